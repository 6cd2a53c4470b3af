"""The protocol of Hugging Face's text-embeddings-inference, with inputs of one model unless a request names another.

https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import orjson

from encserve_server import __version__
from encserve_server.calls import Call
from encserve_server.error_table import Failure, Status
from encserve_server.errors import InvalidField, NotReady
from encserve_server.http.app import Dialect, Reply, Request, Route
from encserve_server.http.naming import HttpNaming
from encserve_server.http.replies import JSON_GROWTH, joined, pooled_rows, rows_as_json
from encserve_server.http.requests import (
    Body,
    BodyDecoder,
    BodyRules,
    EncodeBody,
    Inputs,
    PooledBody,
    SentInputs,
    choice,
    encode,
    model_of,
    pooled_output,
    task_of,
)
from encserve_server.models.offsets import utf8_offsets
from encserve_server.models.served import EncodeReply, ServedModel, TokenizeCall, TokenizeReply
from encserve_server.outputs import OutputSpec
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import OutputKind
from encserve_server.types.sequences import TokenSequence

_TOKENS = OutputSpec(OutputKind.TOKENS)
_INPUTS = "inputs"
_EXAMPLE = {"inputs": ["a cat", "a dog"]}


class EmbedBody(PooledBody):
    """The fields of /embed.

    Attributes:
        inputs: A text, the ids of a text, or a list of these; required.
        truncation_direction: Right, because texts are cut at their end.
    """

    inputs: Inputs | None = None
    truncation_direction: str | None = None


class EmbedAllBody(EncodeBody):
    """The fields of /embed_all.

    Attributes:
        inputs: A text, the ids of a text, or a list of these; required.
        truncation_direction: Right, because texts are cut at their end.
    """

    inputs: Inputs | None = None
    truncation_direction: str | None = None


class TokenizeBody(Body):
    """The fields of /tokenize.

    Attributes:
        inputs: A text, or a list of texts; required.
        add_special_tokens: With false, special tokens are left out.
    """

    inputs: Inputs | None = None
    add_special_tokens: bool | None = None


class Token(TypedDict):
    """A token of a text.

    Attributes:
        id: Its id.
        text: What it stands for in the text, or the vocabulary's string.
        special: Whether it is a special token.
        start: Where it begins in the text, in bytes of UTF-8; null for a special token.
        stop: Where it ends.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TeiError(TypedDict):
    """An error as text-embeddings-inference writes it.

    Attributes:
        error: The field and the problem, with the numbers.
        error_type: Validation, Empty, Tokenizer, Backend, Overloaded or Unhealthy.
    """

    error: str
    error_type: str


class TeiRoutes:
    """The handlers."""

    def __init__(self, serving: Callable[[], bool], rules: BodyRules, tokenizer_threads: int) -> None:
        """Takes whether every model is ready, and how bodies are read."""
        self._serving = serving
        self._rules = rules
        self._tokenizer_threads = tokenizer_threads
        self._embed = BodyDecoder(EmbedBody, _INPUTS, rules)
        self._embed_all = BodyDecoder(EmbedAllBody, _INPUTS, rules)
        self._tokenize = BodyDecoder(TokenizeBody, _INPUTS, rules)

    def routes(self) -> list[Route]:
        """What is answered, and by whom."""
        return [
            Route("POST", "/", self.embed, DIALECT, body=EmbedBody, reply=list[list[float]], example=_EXAMPLE),
            Route("POST", "/embed", self.embed, DIALECT, body=EmbedBody, reply=list[list[float]], example=_EXAMPLE),
            Route(
                "POST",
                "/embed_all",
                self.embed_all,
                DIALECT,
                body=EmbedAllBody,
                reply=list[list[list[float]]],
                example=_EXAMPLE,
            ),
            Route(
                "POST",
                "/tokenize",
                self.tokenize,
                DIALECT,
                body=TokenizeBody,
                reply=list[list[Token]],
                example=_EXAMPLE,
            ),
            Route("GET", "/info", self.info, DIALECT, reply=dict[str, Any]),
            Route("GET", "/health", self.health, DIALECT, is_check=True),
            Route("GET", "/", self.health, DIALECT, is_check=True),
        ]

    async def embed(self, request: Request, call: Call) -> Reply:
        """One vector for each input."""
        fields = await self._embed.decode(request.body, call.hold)
        return await self._encode(
            call,
            fields,
            lambda bundle: pooled_output(fields, bundle, normalize_default=True),
            lambda reply: joined(rows_as_json(pooled_rows(reply))),
        )

    async def embed_all(self, request: Request, call: Call) -> Reply:
        """For each input a vector for each of its tokens."""
        return await self._encode(
            call, await self._embed_all.decode(request.body, call.hold), lambda _: _TOKENS, _all_rows
        )

    async def _encode(
        self,
        call: Call,
        fields: EmbedBody | EmbedAllBody,
        output: Callable[[Bundle], OutputSpec],
        build: Callable[[EncodeReply], bytes],
    ) -> Reply:
        sent = SentInputs(_INPUTS, fields.inputs)
        if choice("truncation_direction", fields.truncation_direction, ("right", "left")) == "left":
            raise InvalidField("truncation_direction", "must be right: this server cuts texts at their end")
        return await encode(call, fields, sent, output, lambda _, reply: build(reply), self._rules)

    async def tokenize(self, request: Request, call: Call) -> Reply:
        """The tokens of texts; nothing is computed."""
        fields = await self._tokenize.decode(request.body, call.hold)
        texts = SentInputs(_INPUTS, fields.inputs).texts()
        model = call.resolve(len(texts), *model_of(fields))
        asked = TokenizeCall(
            texts, include_token_strings=True, prompt_name=fields.prompt_name, task=task_of(fields, model.bundle)
        )
        keeps_special = fields.add_special_tokens is not False

        def build(reply: TokenizeReply) -> bytes:
            tokenized = zip(reply.sequences, texts, strict=True)
            lists = [orjson.dumps(list(_tokens(model, it, text, keeps_special))) for it, text in tokenized]
            return b"[" + b",".join(lists) + b"]"

        return Reply(await call.tokenize(model, asked, build, JSON_GROWTH))

    async def info(self, request: Request, call: Call) -> Reply:
        """The default model, and the limits."""
        del request
        model = call.resolve(0, "", "")
        bundle, limits = model.bundle, model.limits
        pooling = bundle.pooling
        kind = "none" if pooling is None else pooling.kinds[0].name.lower() if pooling.is_plain else "model"
        return Reply(
            orjson.dumps(
                {
                    "model_id": bundle.name,
                    "model_sha": bundle.fingerprint,
                    "model_dtype": model.engine_info.precision,
                    "served_model_name": bundle.name,
                    "model_type": {"embedding": {"pooling": kind}},
                    "max_concurrent_requests": limits.max_tokens,  # the queue is bounded in tokens
                    "max_input_length": bundle.max_sequence_tokens,
                    "max_batch_tokens": model.max_batch_tokens,
                    "max_batch_requests": None,
                    "max_client_batch_size": self._rules.limits.sequences,
                    "auto_truncate": True,
                    "tokenization_workers": self._tokenizer_threads,
                    "version": __version__,
                    "sha": None,
                    "docker_label": None,
                }
            )
        )

    async def health(self, request: Request, call: Call) -> Reply:
        """Nothing, while every model is ready.

        Raises:
            NotReady: One is not.
        """
        del request, call
        if not self._serving():
            raise NotReady("not every model is ready")
        return Reply(b"")


def _refuse(failure: Failure) -> dict[str, Any]:
    """An error as text-embeddings-inference's clients expect it."""
    return {"error": failure.text, "error_type": failure.status.tei_type}


def _status_of(status: Status) -> int:
    return status.tei


DIALECT = Dialect(HttpNaming(_INPUTS), _status_of, _refuse, TeiError)


def _tokens(model: ServedModel, sequence: TokenSequence, text: str, keeps_special: bool) -> Iterator[dict[str, Any]]:
    """What is told of each token; places are counted in bytes of UTF-8."""
    tokenizer, special_tokens = model.tokenizer, sequence.special
    starts, ends = sequence.char_starts, sequence.char_ends
    if tokenizer is None or special_tokens is None or starts is None or ends is None:  # only texts are tokenized
        return
    offsets = utf8_offsets(text).tolist()
    for token_id, start, end, special in zip(
        sequence.input.tolist(), starts, ends, special_tokens.tolist(), strict=True
    ):
        if special and not keeps_special:
            continue
        yield {
            "id": token_id,
            "text": tokenizer.token_string(token_id) if special or start == end else text[start:end],
            "special": special,
            "start": None if special else offsets[start],
            "stop": None if special else offsets[end],
        }


def _all_rows(reply: EncodeReply) -> bytes:
    return joined(_all_pieces(reply))


def _all_pieces(reply: EncodeReply) -> Iterator[bytes]:
    yield b"["
    for i, sequence in enumerate(reply.sequences):
        if i:
            yield b","
        yield from rows_as_json(sequence.outputs[0])
    yield b"]"
