"""The protocol of Hugging Face's text-embeddings-inference, with inputs of one model unless a request names another.

https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from encserve_server import __version__
from encserve_server.errors import InvalidField, NotReady
from encserve_server.http.app import Dialect, Route
from encserve_server.http.replies import JSON_GROWTH, pooled_rows, rows_as_json
from encserve_server.http.requests import Fields, SentInputs, encode, model_of, pooled_output, task_of
from encserve_server.http.status import Failure
from encserve_server.models.calls import Calls
from encserve_server.models.offsets import utf8_offsets
from encserve_server.models.served import EncodeReply, ServedModel, TokenizeCall, TokenizeReply
from encserve_server.types import Bundle, CheckedSequence, DataType, Output, OutputKind

_TOKENS = Output(OutputKind.TOKENS, l2_normalize=False, data_type=DataType.FLOAT32)


class TeiRoutes:
    """The handlers."""

    def __init__(self, calls: Calls, serving: Callable[[], bool], tokenizer_threads: int) -> None:
        """Takes the calls of all protocols, and whether every model is ready."""
        self._calls = calls
        self._serving = serving
        self._tokenizer_threads = tokenizer_threads

    def routes(self) -> list[Route]:
        """What is answered, and by whom."""
        return [
            Route("POST", "/", self.embed, DIALECT),
            Route("POST", "/embed", self.embed, DIALECT),
            Route("POST", "/embed_all", self.embed_all, DIALECT),
            Route("POST", "/tokenize", self.tokenize, DIALECT),
            Route("GET", "/info", self.info, DIALECT),
            Route("GET", "/health", self.health, DIALECT, is_check=True),
            Route("GET", "/", self.health, DIALECT, is_check=True),
        ]

    async def embed(self, body: bytes) -> bytes:
        """One vector for each input."""
        return await self._encode(
            Fields(body),
            lambda fields, bundle: pooled_output(fields, bundle, lambda _: True),
            lambda reply: b"".join(rows_as_json(pooled_rows(reply))),
        )

    async def embed_all(self, body: bytes) -> bytes:
        """For each input a vector for each of its tokens."""
        return await self._encode(Fields(body), lambda _, __: _TOKENS, _all_rows)

    async def _encode(
        self, fields: Fields, output: Callable[[Fields, Bundle], Output], build: Callable[[EncodeReply], bytes]
    ) -> bytes:
        def wanted(bundle: Bundle) -> Output:
            if fields.choice("truncation_direction", ("right", "left")) == "left":
                raise InvalidField("truncation_direction", "must be right: this server cuts texts at their end")
            return output(fields, bundle)

        calls, inputs_field = self._calls, DIALECT.inputs
        return await encode(calls, fields, inputs_field, wanted, lambda _, it: build(it), truncate_default=True)

    async def tokenize(self, body: bytes) -> bytes:
        """The tokens of texts; nothing is computed."""
        fields = Fields(body)
        sent = SentInputs.of(fields, DIALECT.inputs)
        for i, text in enumerate(sent.items):
            if not isinstance(text, str):
                raise InvalidField(f"{DIALECT.inputs}[{i}]", "must be a string")
        model = self._calls.resolve(len(sent.items), *model_of(fields))
        call = TokenizeCall(
            sent.items,
            include_token_strings=True,
            prompt_name=fields.text("prompt_name"),
            task=task_of(fields, model.bundle),
        )
        keeps_special = bool(fields.flag("add_special_tokens", True))

        def build(reply: TokenizeReply) -> bytes:
            its = zip(reply.sequences, call.texts, strict=True)
            lists = [orjson.dumps(list(_tokens(model, it, text, keeps_special))) for it, text in its]
            return b"[" + b",".join(lists) + b"]"

        return await self._calls.tokenize(model, call, build, JSON_GROWTH)

    async def info(self, body: bytes) -> bytes:
        """The default model, and the limits."""
        del body
        model = self._calls.resolve(0, "", "")
        bundle, limits = model.bundle, model.limits
        pooling = bundle.pooling
        kind = "none" if pooling is None else pooling.kinds[0].name.lower() if pooling.is_plain else "model"
        return orjson.dumps(
            {
                "model_id": bundle.name,
                "model_sha": bundle.fingerprint,
                "model_dtype": model.engine_info.precision,
                "served_model_name": bundle.name,
                "model_type": {"embedding": {"pooling": kind}},
                "max_concurrent_requests": limits.max_tokens,  # the queue is bounded in tokens, one a request at least
                "max_input_length": bundle.max_sequence_tokens,
                "max_batch_tokens": model.max_batch_tokens,
                "max_batch_requests": None,
                "max_client_batch_size": limits.max_sequences,
                "auto_truncate": True,
                "tokenization_workers": self._tokenizer_threads,
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )

    async def health(self, body: bytes) -> bytes:
        """Nothing, while every model is ready.

        Raises:
            NotReady: One is not.
        """
        del body
        if not self._serving():
            raise NotReady("not every model is ready")
        return b""


def _refuse(failure: Failure) -> tuple[int, dict[str, Any]]:
    """An error as text-embeddings-inference's clients expect it."""
    return failure.mapping.tei_status, {"error": failure.text, "error_type": failure.mapping.tei_type}


DIALECT = Dialect("inputs", _refuse)


def _tokens(model: ServedModel, sequence: CheckedSequence, text: str, keeps_special: bool) -> Iterator[dict[str, Any]]:
    """What is told of each token; places are counted in bytes of UTF-8."""
    tokenized, tokenizer = sequence.text, model.tokenizer
    if tokenized is None or tokenizer is None:  # only texts are tokenized
        return
    offsets = utf8_offsets(text).tolist()
    its = zip(
        tokenized.ids.tolist(), tokenized.char_starts, tokenized.char_ends, tokenized.special.tolist(), strict=True
    )
    for token_id, start, end, special in its:
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
    parts: list[Any] = [b"["]
    for i, encoded in enumerate(reply.encoded):
        parts += [b"," if i else b"", *rows_as_json(encoded.outputs[0])]
    return b"".join([*parts, b"]"])
