"""OpenAI's protocol: /v1/embeddings and /v1/models.

https://platform.openai.com/docs/api-reference/embeddings
"""

import time
from collections.abc import Iterator
from typing import Any

import orjson

from encserve_server.calls import Call
from encserve_server.error_table import Failure, Status
from encserve_server.http.app import Dialect, Route
from encserve_server.http.counting import CountLimits
from encserve_server.http.naming import HttpNaming
from encserve_server.http.replies import joined, pooled_rows, row_as_json
from encserve_server.http.requests import BodyDecoder, Inputs, PooledBody, SentInputs, choice, encode, pooled_output
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import EncodeReply, ServedModel

_FORMATS = ("float", "base64")
_NOT_COSINE = frozenset({"dot", "euclidean", "manhattan"})


class EmbeddingsBody(PooledBody, forbid_unknown_fields=True):
    """The fields of /v1/embeddings."""

    input: Inputs | None = None
    encoding_format: str | None = None
    user: str | None = None


class OpenAiRoutes:
    """The handlers."""

    def __init__(self, catalog: Catalog, limits: CountLimits) -> None:
        """Takes the models, and how much a body may hold."""
        self._catalog = catalog
        self._began = int(time.time())
        self._embeddings = BodyDecoder(EmbeddingsBody, "input", limits)

    def routes(self) -> list[Route]:
        """What is answered, and by whom."""
        return [
            Route("POST", "/v1/embeddings", self.embeddings, DIALECT),
            Route("GET", "/v1/models", self.models, DIALECT),
        ]

    async def embeddings(self, body: bytes, call: Call) -> bytes:
        """One vector for each input."""
        fields = await self._embeddings.decode(body)
        as_base64 = choice("encoding_format", fields.encoding_format, _FORMATS) == "base64"
        return await encode(
            call,
            fields,
            SentInputs("input", fields.input),
            # Scaled to length 1, as OpenAI's are, unless lengths matter to how vectors are compared.
            lambda bundle: pooled_output(fields, bundle, normalize_default=bundle.similarity not in _NOT_COSINE),
            lambda model, reply: _build(model, reply, as_base64=as_base64),
            truncate_default=False,
        )

    async def models(self, body: bytes, call: Call) -> bytes:
        """Every model, the default one first."""
        del body, call
        return orjson.dumps({"object": "list", "data": [self._model(it) for it in self._catalog.all()]})

    def _model(self, model: ServedModel) -> dict[str, Any]:
        name, version = model.key
        return {
            "id": name if self._catalog.is_default_version(model) else f"{name}@{version}",
            "object": "model",
            "created": self._began,
            "owned_by": "encserve",
            "max_model_len": model.bundle.max_sequence_tokens,
        }


def _refuse(failure: Failure) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    error = {
        "message": failure.text,
        "type": failure.status.openai_type,
        "param": failure.field or None,
        "code": failure.status.openai_code or failure.reason.lower(),
    }
    return {"error": error}


def _status_of(status: Status) -> int:
    return status.openai


DIALECT = Dialect(HttpNaming("input"), _status_of, _refuse)


def _build(model: ServedModel, reply: EncodeReply, *, as_base64: bool) -> bytes:
    return joined(_answer(model, reply, as_base64=as_base64))


def _answer(model: ServedModel, reply: EncodeReply, *, as_base64: bool) -> Iterator[bytes]:
    yield b'{"object":"list","data":['
    for i, row in enumerate(pooled_rows(reply)):
        yield b'%s{"object":"embedding","index":%d,"embedding":' % (b"," if i else b"", i)
        yield row_as_json(row, as_base64=as_base64)
        yield b"}"
    tokens = sum(len(it.input) for it in reply.sequences)
    rest = {"model": model.bundle.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    yield b"]," + orjson.dumps(rest)[1:]
