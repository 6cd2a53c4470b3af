"""vLLM's route `/pooling`: token vectors, for MaxSim or late chunking, and pooled vectors in the same form.

https://docs.vllm.ai/en/stable/models/pooling_models/
"""

import time
import uuid
from collections.abc import Iterator
from typing import Any, TypedDict

import msgspec
import orjson

from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Dialect, Reply, Request, Route
from encserve_server.errors import InvalidField, RequestField
from encserve_server.models.served import EncodeReply
from encserve_server.outputs import OutputSpec
from encserve_server.protocols import openai
from encserve_server.protocols.http_json.decoding import TEXTS_OR_IDS, BodyDecoder
from encserve_server.protocols.http_json.formats import FormatBody, as_base64, wants_normalized
from encserve_server.protocols.http_json.naming import http_naming
from encserve_server.protocols.http_json.replies import joined, row_as_json, rows_as_json, usage_of
from encserve_server.protocols.http_json.requests import (
    Inputs,
    SentInputs,
    choice,
    encode,
    is_left,
    pooled_output,
    positive,
)
from encserve_server.types.arrays import IndexedRows
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import OutputKind

_TOKEN_EMBED, _EMBED = "token_embed", "embed"
_TASKS = (_TOKEN_EMBED, _EMBED)


class PoolingBody(FormatBody):
    """The fields of /pooling.

    Attributes:
        input: A text, the ids of a text, or a list of these; required.
        task: token_embed for one vector per token, embed for one vector per input. Default: embed if the request sets
            pooling or the model was trained to compute one vector, otherwise token_embed.
        truncation_side: right or left. With left, an input that is too long is refused, because this server cuts only
            the end of a text.
        add_special_tokens: false allows lists of ids without the tokenizer's special tokens, and refuses texts. true
            refuses lists of ids without these tokens. Default: true.
        user: Ignored.
    """

    input: Inputs | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class PooledInput(TypedDict):
    """The vectors of one input.

    Attributes:
        index: The index of the input, from 0.
        data: One vector per token, or one vector. If the request asks for base64, base64 of little-endian float32.
        shape: With token_embed, the number of vectors and the number of dimensions; with embed, only the number of
            dimensions.
    """

    index: int
    object: str
    data: list[Any] | str
    shape: list[int]


class Pooled(TypedDict):
    """The vectors of all inputs.

    Attributes:
        data: One element for each input, in the order of the inputs.
        model: The model's name in the request. If the request names no model, the model's own name.
    """

    id: str
    object: str
    created: int
    model: str
    data: list[PooledInput]
    usage: openai.Usage


class VllmRoutes:
    """The handler of /pooling."""

    def __init__(self, host: Host) -> None:
        """Keep the settings."""
        self._settings = settings = host.settings
        self._pooling = BodyDecoder(PoolingBody, settings, input=TEXTS_OR_IDS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        example = {"input": ["a cat", "a dog"], "task": "token_embed"}
        return [
            Route("POST", "/pooling", self.pooling, DIALECT, body=PoolingBody, reply=Pooled, example=example),
        ]

    async def pooling(self, request: Request, call: Call) -> Reply:
        """Return one vector for each token of each input, or one vector for each input, as vLLM does."""
        fields = await self._pooling.decode(request.body, call.hold)
        task = choice("task", fields.task, _TASKS)
        in_base64 = as_base64(fields)
        # Here `task` is vLLM's field. `input_type` says whether inputs are queries or documents.
        fields = msgspec.structs.replace(fields, task=None, normalize=wants_normalized(fields))
        sent = SentInputs("input", fields.input)
        return await encode(
            call,
            fields,
            sent,
            lambda bundle: _output(fields, bundle, task),
            lambda model, reply: joined(_answer(fields.model or model.bundle.name, reply, as_base64=in_base64)),
            self._settings,
            check=lambda model: openai.check_ids(model, sent, fields.add_special_tokens),
            from_left=is_left("truncation_side", fields.truncation_side),
        )


DIALECT = Dialect(http_naming("input", {RequestField.TASK: "input_type"}), openai.DIALECT.refuse, openai.OpenAiError)


def _output(fields: PoolingBody, bundle: Bundle, task: str | None) -> OutputSpec:
    """Return the requested output of each input.

    Raises:
        InvalidField: A field has a wrong value, or the model was not trained to compute one vector.
    """
    if task == _EMBED or (task is None and (fields.pooling is not None or bundle.pooling is not None)):
        return pooled_output(fields, bundle)
    if fields.pooling is not None:
        raise InvalidField("pooling", f"must be left out with the task {_TOKEN_EMBED}, because it does not pool")
    if bundle.multi_vector is not None:  # keep the norms that the model was trained to produce
        kind, normalize = OutputKind.MULTI_VECTOR, False
    else:
        kind, normalize = OutputKind.TOKENS, True
    normalize = normalize if fields.normalize is None else fields.normalize
    return OutputSpec(kind, normalize, dimensions=positive("dimensions", fields.dimensions))


def _answer(name: str, reply: EncodeReply, *, as_base64: bool) -> Iterator[bytes]:
    head = {"id": f"pool-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}
    yield orjson.dumps(head)[:-1] + b',"data":['
    is_one_row = reply.plan.row_bytes is not None
    for i, sequence in enumerate(reply.sequences):
        made = sequence.outputs[0]
        rows = made.rows if isinstance(made, IndexedRows) else made
        yield b'%s{"index":%d,"object":"pooling","data":' % (b"," if i else b"", i)
        if as_base64 or is_one_row:
            yield row_as_json(rows[0] if is_one_row else rows, as_base64=as_base64)
        else:
            yield from rows_as_json(rows)
        yield b',"shape":%s}' % orjson.dumps(rows.shape[is_one_row:])
    yield b"]," + orjson.dumps({"usage": usage_of(reply)})[1:]
