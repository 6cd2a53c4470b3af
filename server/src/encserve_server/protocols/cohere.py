"""Cohere's protocol: /v2/embed and /v2/rerank, and /v1/embed for older clients. /v1/rerank is among Jina's routes.

https://docs.cohere.com/reference/embed
https://docs.cohere.com/reference/rerank
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
import orjson

from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Dialect, Reply, Request, Route
from encserve_server.errors import InvalidField, RequestField
from encserve_server.failures import Failure
from encserve_server.models.scoring import Scored
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.protocols.http_json import scores
from encserve_server.protocols.http_json.decoding import ANYTHING, DOCUMENTS, STRINGS, BodyDecoder
from encserve_server.protocols.http_json.naming import http_naming, text_of
from encserve_server.protocols.http_json.replies import joined, row_as_json, rows_as_json
from encserve_server.protocols.http_json.requests import (
    Body,
    PooledBody,
    SentInputs,
    choice,
    encode,
    pooled_output,
    positive,
)
from encserve_server.settings import Settings
from encserve_server.types.arrays import OutputRows
from encserve_server.types.requests import DataType

_INPUT_TYPES = ("search_query", "search_document", "classification", "clustering")
_IMAGE = "this server takes only texts"
# For each type of embedding: the data type of the rows, and the function that converts the rows. uint8 is int8 + 128;
# binary is ubinary - 128.
_TYPES: Mapping[str, tuple[DataType, Callable[[Any], OutputRows]]] = {
    "float": (DataType.FLOAT32, lambda rows: rows),
    "int8": (DataType.INT8, lambda rows: rows),
    "uint8": (DataType.INT8, lambda rows: rows.view(np.uint8) ^ np.uint8(128)),
    "binary": (DataType.BINARY, lambda rows: (rows ^ np.uint8(128)).view(np.int8)),
    "ubinary": (DataType.BINARY, lambda rows: rows),
    "base64": (DataType.FLOAT32, lambda rows: rows),
}
# The maximum number of JSON characters for each byte of vectors. A byte of int8 can be written twice: as `-128,` for
# int8 and as `255,` for uint8. The same is true for ubinary and binary. A float32 has 4 bytes. As a number it takes at
# most 17 characters, and in base64 6 characters.
_GROWTH = 10.0

_EXAMPLE = {"texts": ["a cat", "a dog"], "input_type": "search_document", "embedding_types": ["float", "int8"]}


class CohereBody(Body):
    """The fields of /v2/embed and /v1/embed.

    Attributes:
        texts: The texts. A request has either texts or inputs.
        inputs: A list of objects {"content": [{"type": "text", "text": "…"}]}, instead of texts. The texts of one
            object become one text, with line breaks between them.
        images: Refused, because this server takes only texts.
        input_type: search_query and search_document select the tasks of models that have them. classification and
            clustering select no task.
        embedding_types: One or several of float, int8, uint8, binary, ubinary and base64. Default: float.
        output_dimension: The number of dimensions to which a vector is cut.
        max_tokens: The maximum number of tokens of a text, if this number is less than the model's limit. truncate says
            whether longer texts are cut or refused.
        truncate: END cuts texts that are too long, NONE refuses such texts. Default: END, or NONE if the server runs
            with http_truncate off.
        normalize: Whether float vectors are scaled to Euclidean length 1.
        pooling: Replaces the pooling that the model was trained with: mean, cls, max, last_token, weighted_mean or
            mean_sqrt_length.
    """

    texts: list[str] | None = None
    inputs: list[Any] | None = None
    images: list[Any] | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: str | None = None
    normalize: bool | None = None
    pooling: str | None = None


class CohereEmbeddings(TypedDict, total=False):
    """The vectors of all inputs by type, in the order of the inputs."""

    float: list[list[float]]
    int8: list[list[int]]
    uint8: list[list[int]]
    binary: list[list[int]]
    ubinary: list[list[int]]
    base64: list[str]


class CohereReply(TypedDict):
    """The vectors of a request.

    Attributes:
        id: A new id.
        embeddings: The vectors by type. On /v1/embed without embedding_types, the list of float vectors.
        texts: The texts of the request.
        meta: The version of the API, and the number of tokens that the model saw.
        response_type: embeddings_by_type, or embeddings_floats for a list.
    """

    id: str
    embeddings: CohereEmbeddings | list[list[float]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


class RankedDocument(TypedDict, total=False):
    """A document with its score.

    Attributes:
        index: The index of the document in the request.
        relevance_score: The score of the document. For cross-encoders, /v1/rerank and /v2/rerank return a score from
            0 to 1, and /rerank returns the model's own score.
        document: The document, if the request asks for documents.
    """

    index: int
    relevance_score: float
    document: dict[str, Any]


class Ranked(TypedDict):
    """The best documents of a request.

    Attributes:
        id: A new id.
        results: The documents with the largest scores, the largest first.
        meta: The version of the API, and the number of tokens that the model saw.
    """

    id: str
    results: list[RankedDocument]
    meta: dict[str, Any]


class CohereError(TypedDict):
    """An error in Cohere's form.

    Attributes:
        id: A new id.
        message: The field, the problem, the sent value and the allowed values.
    """

    id: str
    message: str


class CohereRoutes:
    """The handlers of Cohere's routes."""

    def __init__(self, host: Host) -> None:
        """Keep the settings."""
        self._settings = settings = host.settings
        self._body = BodyDecoder(
            CohereBody,
            settings,
            embedding_types=STRINGS,
            texts=STRINGS,
            inputs=replace(ANYTHING, convert=_text_of),
            images=ANYTHING,
        )
        self._rerank = BodyDecoder(scores.RerankBody, settings, documents=DOCUMENTS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("POST", "/v2/embed", self.embed, DIALECT, body=CohereBody, reply=CohereReply, example=_EXAMPLE),
            Route("POST", "/v1/embed", self.embed_v1, DIALECT, body=CohereBody, reply=CohereReply, example=_EXAMPLE),
            Route(
                "POST",
                "/v2/rerank",
                self.rerank,
                DIALECT,
                body=scores.RerankBody,
                reply=Ranked,
                example={"query": "a pet", "documents": ["a cat", "a car"], "top_n": 1},
            ),
        ]

    async def embed(self, request: Request, call: Call) -> Reply:
        """Return one vector for each input, in each requested type, as Cohere's API does."""
        fields = await self._body.decode(request.body, call.hold)
        return await self._embed(request, fields, call, version="2", by_type=True)

    async def embed_v1(self, request: Request, call: Call) -> Reply:
        """Return one vector for each input, as version 1 of Cohere's API does.

        Without `embedding_types`, the vectors are a list instead of lists by type.
        """
        fields = await self._body.decode(request.body, call.hold)
        return await self._embed(request, fields, call, version="1", by_type=bool(fields.embedding_types))

    async def rerank(self, request: Request, call: Call) -> Reply:
        """Return the documents with the largest scores for a query, as version 2 of Cohere's API does."""
        fields = await self._rerank.decode(request.body, call.hold)
        call.naming = OF_DOCUMENTS
        positive("top_n", fields.top_n)

        def answer(_: ServedModel, scored: Scored, results: Iterator[bytes]) -> Iterator[bytes]:
            yield b'{"id":"%s","results":' % str(uuid.uuid4()).encode()
            yield from results
            yield b"," + orjson.dumps({"meta": rerank_meta("2", scored)})[1:]

        return await scores.rank(
            call,
            fields,
            answer,
            self._settings,
            activation=scores.logits_or_share,
            with_documents=fields.return_documents is True,
            body_bytes=len(request.body),
        )

    async def _embed(self, request: Request, fields: CohereBody, call: Call, *, version: str, by_type: bool) -> Reply:
        texts = _texts_of(fields)
        types = _types_of(fields.embedding_types)
        data_types = list(dict.fromkeys(_TYPES[name][0] for name in types))
        _check_input_type(fields.input_type)
        pooled = PooledBody(
            model=fields.model,
            prompt_name=fields.prompt_name,
            task=fields.task,
            input_type=fields.input_type,
            dimensions=positive("output_dimension", fields.output_dimension) or None,
            normalize=fields.normalize,
            pooling=fields.pooling,
        )

        def answer(reply: EncodeReply) -> Iterator[bytes]:
            yield b'{"id":"%s","embeddings":' % str(uuid.uuid4()).encode()
            pieces = {name: _pieces(name, reply, data_types) for name in types}
            yield from _by_type(pieces) if by_type else pieces["float"]
            yield b',"texts":['
            for i, text in enumerate(texts):
                yield b"," + orjson.dumps(text) if i else orjson.dumps(text)
            tokens = {"input_tokens": sum(len(it.input) for it in reply.sequences)}
            meta = {"api_version": {"version": version}, "billed_units": tokens, "tokens": tokens}
            response_type = "embeddings_by_type" if by_type else "embeddings_floats"
            yield b"]," + orjson.dumps({"meta": meta, "response_type": response_type})[1:]

        if fields.inputs is not None:
            call.naming = _OF_INPUTS
        return await encode(
            call,
            pooled,
            SentInputs("texts" if fields.inputs is None else "inputs", list(texts)),
            lambda bundle: pooled_output(pooled, bundle),
            lambda _, reply: joined(answer(reply)),
            self._settings,
            growth=_GROWTH,
            more_bytes=len(request.body),  # the reply repeats the texts
            data_types=data_types,
            cut=(_truncates(fields.truncate, self._settings), positive("max_tokens", fields.max_tokens)),
        )


def rerank_meta(version: str, scored: Scored) -> dict[str, Any]:
    """Return the field `meta` of a ranking. Cohere bills a ranking as one search."""
    tokens = {"input_tokens": scored.token_count}
    return {"api_version": {"version": version}, "billed_units": {"search_units": 1}, "tokens": tokens}


def _texts_of(fields: CohereBody) -> Sequence[str]:
    """Return the texts of a request, from `texts` or `inputs`.

    Raises:
        InvalidField: Both fields are set, or neither.
    """
    if fields.images:
        raise InvalidField("images", f"must be left out: {_IMAGE}")
    if fields.inputs is None:
        if fields.texts is None:
            raise InvalidField("texts", "must be a list of strings; was null")
        return fields.texts
    if fields.texts:
        raise InvalidField("texts", f"must be left out if inputs is set; was {len(fields.texts)} texts")
    return fields.inputs


def _text_of(field: str, item: Any) -> str:
    """Return the text of one element of `inputs`. A line break separates the parts of its content."""
    contents = item.get("content") if isinstance(item, dict) else None
    if not isinstance(contents, list) or not contents:
        raise InvalidField(f"{field}.content", 'must be a list of {"type": "text", "text": "…"}')
    texts = []
    for i, content in enumerate(contents):
        at = f"{field}.content[{i}]"
        kind = content.get("type") if isinstance(content, dict) else None
        if kind != "text":
            shown = f"{kind[:64]!r}" if isinstance(kind, str) else "no string"
            raise InvalidField(f"{at}.type", f"must be 'text', {_IMAGE}; was {shown}")
        if not isinstance(content.get("text"), str):
            raise InvalidField(f"{at}.text", "must be a string")
        texts.append(content["text"])
    return "\n".join(texts)


def _types_of(names: Sequence[str] | None) -> list[str]:
    """Return the requested types, each once."""
    found = [str(choice(f"embedding_types[{i}]", name, _TYPES)) for i, name in enumerate(names or ["float"])]
    return list(dict.fromkeys(found))


def _check_input_type(name: str | None) -> None:
    """Refuse images and input types that Cohere does not have."""
    if name == "image":
        raise InvalidField("input_type", f"must be one of {', '.join(_INPUT_TYPES)}; was 'image', and {_IMAGE}")
    choice("input_type", name, _INPUT_TYPES)


def _truncates(name: str | None, settings: Settings) -> bool:
    """Return whether texts that are too long are cut."""
    if choice("truncate", name, ("none", "end", "start")) == "start":
        raise InvalidField("truncate", "must be END or NONE; was START, and this server cuts texts at their end")
    return settings.http_truncate if name is None else name.lower() == "end"


def _pieces(name: str, reply: EncodeReply, data_types: Sequence[DataType]) -> Iterator[bytes]:
    """Write the vectors of all inputs as one type of embedding. The reply has one output for each data type."""
    data_type, convert = _TYPES[name]
    place = data_types.index(data_type)
    rows = convert(np.concatenate([sequence.outputs[place] for sequence in reply.sequences]))  # (inputs, width)
    if name != "base64":
        yield from rows_as_json(rows)
        return
    for i, row in enumerate(rows):
        yield b"," if i else b"["
        yield row_as_json(row, as_base64=True)
    yield b"]"


def _by_type(pieces: Mapping[str, Iterator[bytes]]) -> Iterator[bytes]:
    """Write a JSON object that has a list of vectors for each type."""
    for i, (name, its) in enumerate(pieces.items()):
        yield b'%s"%s":' % (b"," if i else b"{", name.encode())
        yield from its
    yield b"}"


def _refuse(failure: Failure) -> dict[str, Any]:
    """Return an error in Cohere's form: a CohereError."""
    return {"id": str(uuid.uuid4()), "message": text_of(failure)}


_FIELDS = {
    RequestField.OUTPUT_DIMENSIONS: "output_dimension",
    RequestField.DATA_TYPE: "embedding_types",
    RequestField.TASK: "input_type",
}
_OF_INPUTS = http_naming("inputs", _FIELDS)
OF_DOCUMENTS = http_naming("documents")
DIALECT = Dialect(http_naming("texts", _FIELDS), _refuse, CohereError)
