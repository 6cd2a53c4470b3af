"""The messages of score calls, and their answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from encserve_client._arguments import as_int, check_type
from encserve_client._logic.planning import (
    MAX_MESSAGE_TOKENS,
    Limits,
    Message,
    request_like,
    tensor_at,
    tokens_of_bytes,
)
from encserve_client.exceptions import InvalidInputError, ProtocolError
from encserve_client.options import Activation, Array, check_choice, numpy_dtype
from encserve_client.results import ModelInfo, SparseVector
from encserve_proto.v1 import encoder_pb2 as pb

Field = Literal["documents", "document_vectors", "pairs", "texts"]

# A score is one number, and the server runs a large call in parts. So a message of a score call may have more tokens
# than other messages.
_MAX_TOKENS = 16 * MAX_MESSAGE_TOKENS
_MOST = 2**32 - 1  # the largest uint32, the type in the .proto file
_OVERHEAD_BYTES = 8
_INDEX_BYTES = 4
_ACTIVATIONS: dict[Activation | None, pb.Activation] = {
    None: pb.ACTIVATION_UNSPECIFIED,
    "none": pb.ACTIVATION_NONE,
    "sigmoid": pb.ACTIVATION_SIGMOID,
    "softmax": pb.ACTIVATION_SOFTMAX,
}


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The answer to one message.

    Attributes:
        fingerprint: The id of the bundle.
        space_id: The id of the vector space; "" if unknown.
        scores: (n, labels) float32.
        labels: The names of the labels; empty for a model without labels.
        indices: The index in the message of each score, for answers to a request with `top_k`.
        token_count: The number of tokens that the server processed.
    """

    fingerprint: str
    space_id: str
    scores: Array
    labels: tuple[str, ...]
    indices: tuple[int, ...]
    token_count: int


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of a score call; see `EncoderClient.rank`."""

    activation: Activation | None = None
    truncate: bool = True
    prompt_name: str | None = None
    max_document_tokens: int | None = None
    top_k: int | None = None

    def to_proto(self) -> pb.ScoreRequest:
        """Return a request with these options.

        Raises:
            InvalidInputError: An option has the wrong type or is out of range.
        """
        if self.activation is not None:
            check_choice("activation", self.activation, Activation)
        for name in ("max_document_tokens", "top_k"):
            number = getattr(self, name)
            if number is not None and not 1 <= as_int(name, number) <= _MOST:
                raise InvalidInputError(f"must be from 1 to {_MOST:,}; was {number}", field=name)
        check_type("prompt_name", self.prompt_name, (str, type(None)), "a str or None")
        is_cut = check_type("truncate", self.truncate, bool, "a bool")
        return pb.ScoreRequest(
            activation=_ACTIVATIONS[self.activation],
            truncation=pb.TRUNCATION_END if is_cut else pb.TRUNCATION_REFUSE,
            prompt_name=self.prompt_name,
            max_document_tokens=self.max_document_tokens or 0,
            top_k=self.top_k or 0,
        )


def check_pairs(pairs: object) -> list[pb.TextPair]:
    """Return pairs of texts as `TextPair` protobufs.

    Raises:
        InvalidInputError: `pairs` is not an iterable of pairs of texts.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise InvalidInputError(f"must be a list of (query, document) pairs; was {type(pairs).__name__}", field="pairs")
    made = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(it, str) for it in pair):
            raise InvalidInputError(
                f"must be a (query, document) pair of texts; was {pair!r:.80}", field=f"pairs[{index}]"
            )
        query, document = (_utf8(it, f"pairs[{index}]") for it in pair)
        made.append(pb.TextPair(query=query, document=document))
    return made


def check_documents(documents: object, name: str, allowed: str = "a list of texts") -> list[str]:
    """Return texts.

    Args:
        documents: The texts.
        name: The name of the argument.
        allowed: A description of valid values, for errors.

    Raises:
        InvalidInputError: `documents` is not an iterable of texts.
    """
    if isinstance(documents, str) or not isinstance(documents, Iterable):
        raise InvalidInputError(f"must be {allowed}; was {type(documents).__name__}", field=name)
    texts = list(documents)
    if texts and isinstance(texts[0], np.ndarray | SparseVector):
        problem = f"must be {allowed}; was {type(documents).__name__} of {type(texts[0]).__name__}"
        raise InvalidInputError(problem, field=name)
    for index, text in enumerate(texts):
        check_type(f"{name}[{index}]", text, str, "a text")
        _utf8(text, f"{name}[{index}]")
    return texts


def _utf8(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"must be valid Unicode; character {error.start} is half of a surrogate pair"
        raise InvalidInputError(problem, field=name) from None
    return text


def as_vectors(documents: Any) -> pb.RaggedTensor | None:
    """Return the vectors of documents as a tensor; None if `documents` is neither an array nor a list of vectors.

    Args:
        documents: (documents, width), or a list of (n, width) arrays, or a list of `SparseVector`.

    Raises:
        InvalidInputError: The vectors differ in kind, type or width.
    """
    if isinstance(documents, np.ndarray) and documents.ndim == 2:
        return _tensor(pb.OUTPUT_KIND_MODEL_POOLING, [documents[i : i + 1] for i in range(len(documents))])
    if not isinstance(documents, Sequence) or not documents or isinstance(documents[0], str):
        return None
    if isinstance(documents[0], SparseVector):
        for index, it in enumerate(documents):
            check_type(f"documents[{index}]", it, SparseVector, "a SparseVector")
        tensor = _tensor(pb.OUTPUT_KIND_SPARSE, [it.values[:, None] for it in documents])
        tensor.indices = b"".join(np.asarray(it.indices, "<u4").tobytes() for it in documents)
        return tensor
    if isinstance(documents[0], np.ndarray):
        is_matrix = documents[0].ndim == 2
        kind = pb.OUTPUT_KIND_MULTI_VECTOR if is_matrix else pb.OUTPUT_KIND_MODEL_POOLING
        arrays = []
        for index, it in enumerate(documents):
            array = check_type(f"documents[{index}]", it, np.ndarray, "an array")
            arrays.append(array if is_matrix or array.ndim != 1 else array[None])
        return _tensor(kind, arrays)
    return None


def _tensor(kind: pb.OutputKind, arrays: Sequence[Array]) -> pb.RaggedTensor:
    width = arrays[0].shape[-1] if arrays else 0
    types = {"float16": pb.DATA_TYPE_FLOAT16, "float32": pb.DATA_TYPE_FLOAT32, "float64": pb.DATA_TYPE_FLOAT32}
    name = str(arrays[0].dtype) if arrays else "float32"
    for index, it in enumerate(arrays):
        if it.ndim != 2 or it.shape[1] != width or str(it.dtype) != name or name not in types:
            raise InvalidInputError(
                f"must be float32 or float16 rows of {width} numbers, as the first document; was {it.dtype} {it.shape}",
                field=f"documents[{index}]",
            )
    dtype = "<f2" if name == "float16" else "<f4"
    return pb.RaggedTensor(
        kind=kind,
        data_type=types[name],
        width=width,
        lengths=[len(it) for it in arrays],
        data=b"".join(np.ascontiguousarray(it, dtype).tobytes() for it in arrays),
    )


def score_limits(limits: Limits) -> Limits:
    """Return the limits of one message of a score call."""
    return replace(limits, max_tokens=_MAX_TOKENS)


def plan_scores(
    template: pb.ScoreRequest, field: Field, items: Sequence[str | pb.TextPair], limits: Limits
) -> Iterator[Message]:
    """Yield messages with all documents, pairs or texts in order. Each message is as large as the limits allow.

    Args:
        template: A request without documents, pairs and texts.
        field: The field of the items.
        items: The documents, pairs or texts.
        limits: The limits of one message.
    """
    query_tokens, query_bytes = _cost(template.query, limits)
    begin, tokens, request_bytes = 0, 0, query_bytes
    for index, item in enumerate(items):
        item_tokens, item_bytes = _cost(item, limits)
        item_tokens += query_tokens
        if index > begin and (
            tokens + item_tokens > limits.max_tokens
            or request_bytes + item_bytes > limits.max_request_bytes
            or index - begin >= limits.max_sequences
        ):
            yield Message(request_like(template, items[begin:index], field), range(begin, index))
            begin, tokens, request_bytes = index, 0, query_bytes
        tokens += item_tokens
        request_bytes += item_bytes
    yield Message(request_like(template, items[begin:], field), range(begin, len(items)))


def plan_vectors(template: pb.ScoreRequest, limits: Limits) -> Iterator[Message]:
    """Yield messages with all document vectors of a request in order. Each message is as large as the limits allow.

    Args:
        template: A request with `document_vectors`.
        limits: The limits of one message.
    """
    tensor = template.document_vectors
    row_bytes = tensor.width * numpy_dtype(tensor.data_type).itemsize + (_INDEX_BYTES if tensor.indices else 0)
    _, query_bytes = _cost(template.query, limits)
    begin, request_bytes, count = 0, query_bytes, len(tensor.lengths)
    for index, length in enumerate(tensor.lengths):
        document_bytes = length * row_bytes + _OVERHEAD_BYTES
        if index > begin and (
            request_bytes + document_bytes > limits.max_request_bytes or index - begin >= limits.max_sequences
        ):
            positions = range(begin, index)
            yield Message(request_like(template, tensor_at(tensor, positions), "document_vectors"), positions)
            begin, request_bytes = index, query_bytes
        request_bytes += document_bytes
    positions = range(begin, count)
    chosen = tensor_at(tensor, positions) if begin else tensor
    yield Message(request_like(template, chosen, "document_vectors"), positions)


def check_widths(documents: Any, info: ModelInfo) -> None:
    """Check that sparse vectors have the width of the model. Other documents pass.

    Raises:
        InvalidInputError: A sparse vector has another width than the vectors of the model.
    """
    if not info.sparse_width or not isinstance(documents, Sequence):
        return
    for index, it in enumerate(documents):
        if isinstance(it, SparseVector) and it.width != info.sparse_width:
            problem = f"must have the width {info.sparse_width} of model {info.name}; was {it.width}"
            raise InvalidInputError(problem, field=f"documents[{index}]")


def _cost(item: str | pb.TextPair, limits: Limits) -> tuple[int, int]:
    """Return the estimated number of tokens and the number of bytes of a text or a pair."""
    size = (len(item.encode()) if isinstance(item, str) else item.ByteSize()) + _OVERHEAD_BYTES
    return min(tokens_of_bytes(size), limits.max_sequence_tokens), size


def decode_scores(request: pb.ScoreRequest, response: pb.ScoreResponse, n_inputs: int) -> ScoreAnswer:
    """Convert the answer to a request with `n_inputs` documents, vectors, pairs or texts.

    Raises:
        ProtocolError: The answer is not valid.
    """
    count, labels = min(request.top_k or n_inputs, n_inputs), response.label_count
    if labels < 1 or len(response.scores) != 4 * count * labels:
        raise ProtocolError(
            f"the answer must have {count} scores of at least 1 label; had {len(response.scores)} bytes for {labels} "
            "labels"
        )
    if len(response.labels) != (labels if response.labels or request.texts or labels > 1 else 0):
        raise ProtocolError(f"the answer must have {labels} labels; had {len(response.labels)}")
    if request.top_k and (len(response.indices) != count or not all(it < n_inputs for it in response.indices)):
        raise ProtocolError(f"the answer must have {count} indices below {n_inputs}; had {len(response.indices)}")
    scores = np.frombuffer(response.scores, "<f4").reshape(count, labels)
    return ScoreAnswer(
        response.fingerprint,
        response.space_id,
        scores,
        tuple(response.labels),
        tuple(response.indices),
        response.token_count,
    )
