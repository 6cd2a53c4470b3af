"""OpenAI's protocol: /v1/embeddings and /v1/models.

https://platform.openai.com/docs/api-reference/embeddings
"""

import time
from typing import Any

import orjson

from encserve_server.http.app import Dialect, Route
from encserve_server.http.replies import pooled_rows, row_as_json
from encserve_server.http.requests import Fields, encode, pooled_output
from encserve_server.http.status import Failure
from encserve_server.models.calls import Calls
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.types import Bundle

_FIELDS = frozenset({"dimensions", "encoding_format", "input", "model", "user"})
_OUR_FIELDS = frozenset({"normalize", "pooling", "prompt_name", "task", "truncate"})
_FORMATS = ("float", "base64")
_NOT_COSINE = frozenset({"dot", "euclidean", "manhattan"})


class OpenAiRoutes:
    """The handlers."""

    def __init__(self, calls: Calls, catalog: Catalog) -> None:
        """Takes the calls of all protocols, and the models."""
        self._calls = calls
        self._catalog = catalog
        self._began = int(time.time())

    def routes(self) -> list[Route]:
        """What is answered, and by whom."""
        return [
            Route("POST", "/v1/embeddings", self.embeddings, DIALECT),
            Route("GET", "/v1/models", self.models, DIALECT),
        ]

    async def embeddings(self, body: bytes) -> bytes:
        """One vector for each input."""
        fields = Fields(body)
        fields.refuse_others(_FIELDS | _OUR_FIELDS)
        as_base64 = fields.choice("encoding_format", _FORMATS) == "base64"
        fields.text("user")
        return await encode(
            self._calls,
            fields,
            DIALECT.inputs,
            lambda bundle: pooled_output(fields, bundle, _gives_unit_vectors),
            lambda model, reply: _build(model, reply, as_base64=as_base64),
            truncate_default=False,
        )

    async def models(self, body: bytes) -> bytes:
        """Every model, the default one first."""
        del body
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


def _refuse(failure: Failure) -> tuple[int, dict[str, Any]]:
    """An error as OpenAI's clients expect it."""
    mapping = failure.mapping
    error = {
        "message": failure.text,
        "type": mapping.openai_type,
        "param": failure.field or None,
        "code": mapping.openai_code or failure.reason.lower(),
    }
    return mapping.openai_status, {"error": error}


DIALECT = Dialect("input", _refuse)


def _gives_unit_vectors(bundle: Bundle) -> bool:
    """Whether vectors are scaled to length 1, as OpenAI's are: unless lengths matter to how they are compared."""
    return bundle.similarity not in _NOT_COSINE


def _build(model: ServedModel, reply: EncodeReply, *, as_base64: bool) -> bytes:
    parts = [b'{"object":"list","data":[']
    for i, row in enumerate(pooled_rows(reply)):
        numbers = row_as_json(row, as_base64=as_base64)
        parts += [b"," if i else b"", b'{"object":"embedding","index":%d,"embedding":' % i, numbers, b"}"]
    tokens = sum(len(it.input) for it in reply.sequences)
    rest = {"model": model.bundle.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return b"".join([*parts, b"],", orjson.dumps(rest)[1:]])
