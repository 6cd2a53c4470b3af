"""Decodes requests of Score from protobuf, and encodes replies."""

from typing import Any

import numpy as np

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import InvalidField
from encserve_server.models.pairs import SentPair, SentQuery
from encserve_server.models.scoring import DocumentVectors, ScoreCall, Scored
from encserve_server.models.served import ServedModel
from encserve_server.protocols.encserve.codec import (
    decode_enum,
    decode_float_type,
    decode_priority,
    decode_truncation,
)
from encserve_server.protocols.wire import field, join
from encserve_server.types.arrays import IndexedRows
from encserve_server.types.requests import Activation, OutputKind

_INPUTS = ("documents", "document_vectors", "pairs", "texts")
_SCORES = pb.ScoreResponse.SCORES_FIELD_NUMBER
_ACTIVATIONS: dict[int, Activation | None] = {0: None} | {it.value: it for it in Activation}
# The kinds of rows that document vectors may have. Every pooling is one vector for each document.
_VECTOR_KINDS = {kind.value: kind for kind in OutputKind if kind not in (OutputKind.TOKENS, OutputKind.SCORES)}


def inputs_of(request: pb.ScoreRequest) -> str:
    """Return the field that has the inputs of a request; "documents" if a request has no inputs.

    Raises:
        InvalidField: Two fields have inputs, or another field does not go with the inputs.
    """
    given = [name for name in _INPUTS if _has(request, name)]
    if len(given) > 1:
        raise InvalidField(given[1], f"must not be set together with {given[0]}; send two requests")
    inputs = given[0] if given else "documents"
    if request.query and inputs in ("pairs", "texts"):
        raise InvalidField("query", f"must be empty with {inputs}; it is for documents and document_vectors")
    if request.max_document_tokens and inputs in ("document_vectors", "texts"):
        problem = f"must be 0 with {inputs}; it is for documents and pairs; was {request.max_document_tokens}"
        raise InvalidField("max_document_tokens", problem)
    return inputs


def count_inputs(request: pb.ScoreRequest, inputs: str) -> int:
    """Return the number of documents, vectors, pairs or texts."""
    return len(request.document_vectors.lengths if inputs == "document_vectors" else getattr(request, inputs))


def decode_score_call(request: pb.ScoreRequest, inputs: str) -> ScoreCall:
    """Decode a request, and fill in the defaults. `inputs` is the result of `inputs_of`.

    Raises:
        InvalidField: An enum has a value that this server does not know, or the vectors are malformed.
    """
    query = SentQuery(request.query)
    pairs: list[SentPair] = []
    vectors = None
    if inputs == "documents":
        pairs = [SentPair(query, document) for document in request.documents]
    elif inputs == "pairs":
        queries: dict[str, SentQuery] = {}  # equal queries are tokenized once
        pairs = [SentPair(queries.setdefault(it.query, SentQuery(it.query)), it.document) for it in request.pairs]
    elif inputs == "document_vectors":
        vectors, pairs = _decode_vectors(request.document_vectors), [SentPair(query, "")]
    return ScoreCall(
        pairs=pairs,
        texts=list(request.texts),
        vectors=vectors,
        top_k=request.top_k,
        activation=decode_enum("activation", request.activation, _ACTIVATIONS, pb.Activation),
        truncate=not request.truncation or decode_truncation("truncation", request.truncation),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        priority=decode_priority(request.priority),
        max_document_tokens=request.max_document_tokens,
    )


def encode_scores(model: ServedModel, scored: Scored) -> bytes:
    """Return the bytes of a ScoreResponse."""
    bundle = model.bundle
    response = pb.ScoreResponse(
        model=bundle.name,
        model_version=bundle.version,
        fingerprint=bundle.fingerprint,
        space_id=bundle.space_id,
        label_count=scored.scores.shape[1],
        labels=scored.labels,
        indices=() if scored.indices is None else scored.indices.tolist(),
        token_count=scored.token_count,
        truncated=scored.truncated,
        query_truncated=any(it.truncated for it in scored.queries),
        timings=pb.Timings(
            tokenize_seconds=scored.tokenize_seconds,
            queue_seconds=scored.queue_seconds,
            compute_seconds=scored.compute_seconds,
        ),
    )
    data = np.ascontiguousarray(scored.scores, "<f4").data.cast("B")
    return join([response.SerializeToString(), *field(_SCORES, [data])])  # the scores are copied only here


def _has(request: pb.ScoreRequest, name: str) -> bool:
    return request.HasField(name) if name == "document_vectors" else bool(getattr(request, name))


def _decode_vectors(tensor: pb.RaggedTensor) -> DocumentVectors:
    """Return the vectors of documents as float32."""
    name = "document_vectors"
    kind = decode_enum(f"{name}.kind", tensor.kind, _VECTOR_KINDS, pb.OutputKind)
    data_type = decode_float_type(f"{name}.data_type", tensor.data_type)
    width, rows = tensor.width, sum(tensor.lengths)
    is_sparse = kind is OutputKind.SPARSE
    if width < 1 or (is_sparse and width != 1):
        raise InvalidField(f"{name}.width", f"must be {'1' if is_sparse else 'at least 1'}; was {width}")
    data, size = tensor.data, rows * data_type.row_bytes(width)
    if len(data) != size:
        raise InvalidField(
            f"{name}.data", f"must have {size} bytes, for {rows} rows of {width} numbers; was {len(data)}"
        )
    matrix: Any = np.frombuffer(data, data_type.dtype).reshape(rows, width).astype(np.float32, copy=False)
    finite = np.isfinite(matrix)
    if not finite.all():
        row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
        problem = f"must be finite; was {matrix[row, column]} in row {row}, column {column}"
        raise InvalidField(f"{name}.data", problem)
    ends = np.cumsum(tensor.lengths)[:-1]
    arrays: list[Any] = np.split(matrix, ends)
    if is_sparse:
        if len(tensor.indices) != 4 * rows:
            raise InvalidField(f"{name}.indices", f"must have {4 * rows} bytes; was {len(tensor.indices)}")
        indices = np.split(np.frombuffer(tensor.indices, "<u4"), ends)
        arrays = [IndexedRows(values, its) for values, its in zip(arrays, indices, strict=True)]
    elif kind is OutputKind.MULTI_VECTOR:
        arrays = [IndexedRows(vectors, None) for vectors in arrays]
    else:
        wrong = next((i for i, length in enumerate(tensor.lengths) if length != 1), None)
        if wrong is not None:
            raise InvalidField(f"{name}.lengths[{wrong}]", f"must be 1 for this kind; was {tensor.lengths[wrong]}")
    return DocumentVectors(kind, width, arrays)
