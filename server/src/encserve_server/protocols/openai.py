"""OpenAI's protocol: /v1/embeddings and /v1/models.

https://platform.openai.com/docs/api-reference/embeddings
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import msgspec
import orjson

from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Dialect, Reply, Request, Route
from encserve_server.errors import FieldPath, InvalidField, RequestField
from encserve_server.failures import Failure
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.protocols.http_json.decoding import TEXTS_OR_IDS, BodyDecoder
from encserve_server.protocols.http_json.formats import FormatBody, as_base64, wants_normalized
from encserve_server.protocols.http_json.kinds import routes_of
from encserve_server.protocols.http_json.naming import http_naming, text_of
from encserve_server.protocols.http_json.replies import joined, pooled_rows, row_as_json, usage_of
from encserve_server.protocols.http_json.requests import Inputs, SentInputs, encode, pooled_output


class EmbeddingsBody(FormatBody):
    """The fields of /v1/embeddings.

    Attributes:
        input: A text, the ids of a text, or a list of these; required.
        user: Ignored.
        add_special_tokens: false allows lists of ids without the tokenizer's special tokens, and refuses texts. true
            refuses lists of ids without these tokens. Default: true.
    """

    input: Inputs | None = None
    user: str | None = None
    add_special_tokens: bool | None = None


class Embedding(TypedDict):
    """One vector.

    Attributes:
        embedding: The vector, in the requested format.
        index: The index of the input, from 0.
    """

    object: str
    embedding: list[float] | str
    index: int


class Usage(TypedDict):
    """The number of tokens that the model saw, including special tokens and the tokens of a prompt.

    Attributes:
        prompt_tokens: The number of tokens in all inputs.
        total_tokens: The same number.
    """

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The vectors of a request.

    Attributes:
        data: One vector for each input, in the order of the inputs.
        model: The model's name in the request. If the request names no model, the model's own name.
    """

    object: str
    data: list[Embedding]
    model: str
    usage: Usage


class Model(TypedDict):
    """A model under one of its names.

    Attributes:
        id: The name.
        max_model_len: The maximum length of an input, in tokens.
        root: The model's own name.
        outputs: The routes that serve each kind of output that the model has.
    """

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: None
    outputs: dict[str, list[str]]


class Models(TypedDict):
    """All models.

    Attributes:
        data: All models, the default model first. A model with several names is listed under each name.
    """

    object: str
    data: list[Model]


class OpenAiErrorInfo(TypedDict):
    """The details of an error.

    Attributes:
        message: The field, the problem, the sent value and the allowed values.
        type: invalid_request_error, rate_limit_error or server_error.
        param: The field, such as input[3]; null for the whole request.
        code: OpenAI's code, or the reason in lower case.
    """

    message: str
    type: str
    param: str | None
    code: str


class OpenAiError(TypedDict):
    """An error in OpenAI's form."""

    error: OpenAiErrorInfo


class OpenAiRoutes:
    """The handlers of OpenAI's routes."""

    def __init__(self, host: Host) -> None:
        """Keep the models and the settings."""
        self._catalog = host.calls.catalog
        self._settings = settings = host.settings
        self._began = int(time.time())
        self._embeddings = BodyDecoder(EmbeddingsBody, settings, input=TEXTS_OR_IDS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                "POST",
                "/v1/embeddings",
                self.embeddings,
                DIALECT,
                body=EmbeddingsBody,
                reply=Embeddings,
                example={"input": ["a cat", "a dog"]},
            ),
            Route("GET", "/v1/models", self.models, DIALECT, is_listing=True, reply=Models),
            Route("GET", "/v1/models/{id:path}", self.model, DIALECT, is_listing=True, reply=Model),
        ]

    async def embeddings(self, request: Request, call: Call) -> Reply:
        """Return one vector for each input, as OpenAI's API does."""
        fields = await self._embeddings.decode(request.body, call.hold)
        in_base64 = as_base64(fields)
        fields = msgspec.structs.replace(fields, normalize=wants_normalized(fields))
        sent = SentInputs("input", fields.input)
        return await encode(
            call,
            fields,
            sent,
            lambda bundle: pooled_output(fields, bundle),
            lambda model, reply: _build(fields.model or model.bundle.name, reply, as_base64=in_base64),
            self._settings,
            check=lambda model: check_ids(model, sent, fields.add_special_tokens),
        )

    async def models(self, request: Request, call: Call) -> Reply:
        """List the models that the caller may use, each under all its names, the default model first."""
        del request
        models = filter(call.may_use, self._catalog.all())
        listed = [self._model(model, name) for model in models for name in self._catalog.names(model)]
        return Reply(orjson.dumps({"object": "list", "data": listed}))

    async def model(self, request: Request, call: Call) -> Reply:
        """Describe one model.

        Raises:
            ModelNotFound: No model has this name.
        """
        name, _, version = request.values["id"].partition("@")
        model = call.resolve(0, name, version)
        return Reply(orjson.dumps(self._model(model, request.values["id"])))

    def _model(self, model: ServedModel, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "encserve",
            "max_model_len": model.bundle.max_sequence_tokens,
            "root": model.bundle.name,
            "parent": None,
            "outputs": routes_of(model.bundle),
        }


def check_ids(model: ServedModel, sent: SentInputs, add_special_tokens: bool | None) -> None:
    """Refuse ids that probably come from another tokenizer. Such ids would give wrong vectors without an error.

    The function also sets `sent.closing`, so that truncated ids keep their special tokens at the end.

    Raises:
        InvalidField: A list of ids lacks the special tokens that the tokenizer puts around a text, and
            `add_special_tokens` is not false. Or `add_special_tokens` is false, and an input is a text that needs
            special tokens.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        return
    before, behind = tokenizer.special_around
    if add_special_tokens is not False:
        sent.closing = behind
    for i, it in enumerate(sent.items):
        if isinstance(it, str):
            if add_special_tokens is False and (before or behind):
                raise InvalidField(
                    "add_special_tokens",
                    f"must be true for texts; input[{i}] is a text. Or send the text's ids without special tokens",
                )
        elif add_special_tokens is not False and not _has_around(it, before, behind):
            raise InvalidField(
                FieldPath(RequestField.IDS, i),
                f"do not come from this model's tokenizer: it puts {_shown(tokenizer, before)} before a text and "
                f"{_shown(tokenizer, behind)} after a text; these ids begin with {it[:2]} and end with {it[-2:]}. If "
                'the ids are complete without special tokens, send "add_special_tokens": false',
            )


def _shown(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    return " ".join(f"{tokenizer.token_string(it)} ({it})" for it in ids) or "nothing"


def _has_around(ids: list[int], before: Sequence[int], behind: Sequence[int]) -> bool:
    """Return whether ids begin and end with the special tokens. Another function refuses empty lists."""
    return not ids or (ids[: len(before)] == list(before) and ids[len(ids) - len(behind) :] == list(behind))


def _refuse(failure: Failure) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    error = {
        "message": text_of(failure),
        "type": failure.status.openai_type,
        "param": failure.field or None,
        "code": failure.status.openai_code or failure.reason.lower(),
    }
    return {"error": error}


DIALECT = Dialect(http_naming("input"), _refuse, OpenAiError)


def _build(name: str, reply: EncodeReply, *, as_base64: bool) -> bytes:
    return joined(_answer(name, reply, as_base64=as_base64))


def _answer(name: str, reply: EncodeReply, *, as_base64: bool) -> Iterator[bytes]:
    yield b'{"object":"list","data":['
    for i, row in enumerate(pooled_rows(reply)):
        yield b'%s{"object":"embedding","index":%d,"embedding":' % (b"," if i else b"", i)
        yield row_as_json(row, as_base64=as_base64)
        yield b"}"
    yield b"]," + orjson.dumps({"model": name, "usage": usage_of(reply)})[1:]
