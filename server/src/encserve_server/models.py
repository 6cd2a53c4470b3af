"""What is served: one model's way from checked call to rows, and the map of all models. Knows no gRPC."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from encserve_server.bundle import Bundle
from encserve_server.clock import Clock
from encserve_server.engine.base import EngineInfo
from encserve_server.errors import (
    InvalidField,
    ModelNotFound,
    NotReady,
    ResponseTooLarge,
    SequenceTooLong,
    TooManyInputs,
)
from encserve_server.metrics import ModelMetrics
from encserve_server.outputs import output_rows
from encserve_server.scheduler import Scheduler
from encserve_server.tokenizing import TextTokenizer
from encserve_server.types import CheckedSequence, DataType, EncodedSequence, Output, TokenIds, TokenizedText

# What a reply holds besides its rows, at most: an id, two offsets and a flag for each token, and a little more.
_INFO_BYTES_PER_TOKEN = 24
_STRING_OVERHEAD_BYTES = 6
_INFO_BYTES_PER_SEQUENCE = 64
_INFO_BYTES_PER_REPLY = 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The bounds of one request.

    Attributes:
        max_sequences: The most inputs.
        max_text_bytes: The longest text, in bytes of UTF-8.
        max_request_bytes: The largest request; gRPC holds it, and callers are told.
        max_response_bytes: The largest reply.
        max_tokens: The most tokens: the bound of the queue.
    """

    max_sequences: int
    max_text_bytes: int
    max_request_bytes: int
    max_response_bytes: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SentIds:
    """Ids as the caller sent them.

    Attributes:
        ids: (seq,) int64, as many as the model can take.
        count: How many there were.
    """

    ids: TokenIds
    count: int


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One request, decoded but not checked against its model.

    Attributes:
        inputs: Texts, or ids.
        outputs: What to return, every default filled in; never empty.
        data_type: The type of the numbers returned.
        truncate: Whether an over-long input is cut instead of refused.
        exclude_special_tokens: Whether special tokens have no rows in OutputKind.TOKENS.
        include_token_strings: Whether the reply holds the vocabulary's strings.
    """

    inputs: Sequence[str | SentIds]
    outputs: tuple[Output, ...]
    data_type: DataType
    truncate: bool
    exclude_special_tokens: bool
    include_token_strings: bool


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """What a model made of a call, one of each for each input, in order.

    Attributes:
        sequences: The sequences as the model saw them.
        encoded: What the engine made of them.
        tokenize_seconds: How long tokenizing took, waiting for its thread included.
        estimated_bytes: The reply's size, at most.
    """

    sequences: Sequence[CheckedSequence]
    encoded: Sequence[EncodedSequence]
    tokenize_seconds: float
    estimated_bytes: int


class ServedModel:
    """One loaded model: checks a call, tokenizes it, and has it scheduled."""

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: TextTokenizer | None,
        scheduler: Scheduler,
        engine_info: EngineInfo,
        limits: RequestLimits,
        *,
        clock: Clock,
        metrics: ModelMetrics,
    ) -> None:
        """Takes the parts, all of the same bundle."""
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.engine_info = engine_info
        self.limits = limits
        self._clock = clock
        self.metrics = metrics
        self._special_ids = np.array(bundle.special_token_ids, np.int64)

    async def encode(self, call: EncodeCall, deadline: float = math.inf) -> EncodeReply:
        """Checks every input, and only then runs them.

        Raises:
            RequestError: The call cannot succeed; the text names the input and the numbers.
            EncserveError: Whatever `Scheduler.encode` raises.
        """
        self._check_call(call)
        began = self._clock.now()
        try:
            sequences = await self._checked_sequences(call)
        finally:
            tokenize_seconds = self._clock.now() - began
            if any(isinstance(it, str) for it in call.inputs):
                self.metrics.tokenize_seconds.observe(tokenize_seconds)
        estimated_bytes = self._check_reply_size(call, sequences)
        encoded = await self.scheduler.encode([sequence.ids for sequence in sequences], deadline)
        return EncodeReply(sequences, encoded, tokenize_seconds, estimated_bytes)

    def check_count(self, count: int) -> None:
        """Refuses a number of inputs that no request may have.

        Raises:
            InvalidField: There are none.
            TooManyInputs: There are too many.
        """
        if count == 0:
            raise InvalidField("inputs", "must hold at least 1 sequence; was empty")
        if count > self.limits.max_sequences:
            raise TooManyInputs(
                "inputs",
                f"must hold at most {self.limits.max_sequences} sequences (max_request_sequences); was {count}",
            )

    def _check_call(self, call: EncodeCall) -> None:
        """Refuses what can be refused without looking into the inputs."""
        if call.include_token_strings and self.tokenizer is None:
            raise InvalidField(
                "options.include_token_strings", f"model {self.bundle.name} has no tokenizer, so no strings for its ids"
            )
        has_ids = any(isinstance(it, SentIds) for it in call.inputs)
        if call.exclude_special_tokens and has_ids and not self.bundle.special_token_ids:
            raise InvalidField(
                "options.exclude_special_tokens", f"model {self.bundle.name} does not say which tokens are special"
            )

    async def _checked_sequences(self, call: EncodeCall) -> list[CheckedSequence]:
        """Every input as a sequence that the model can take, or the first problem."""
        texts: list[tuple[int, str]] = []
        checked: dict[int, CheckedSequence] = {}
        for i, it in enumerate(call.inputs):
            if isinstance(it, str):
                self._check_text(i, it)
                texts.append((i, it))
            else:
                checked[i] = self._check_ids(i, it, call)
        if self.tokenizer is not None and texts:
            places = iter(texts)
            tokenized = self.tokenizer.tokenize([text for _, text in texts], self.bundle.max_sequence_tokens)
            async with contextlib.aclosing(tokenized):
                async for text in tokenized:
                    i, _ = next(places)
                    checked[i] = self._check_tokenized(i, text, call)
        return [checked[i] for i in range(len(call.inputs))]

    def _check_text(self, i: int, text: str) -> None:
        if self.tokenizer is None:
            raise InvalidField(f"inputs[{i}].text", f"model {self.bundle.name} has no tokenizer; send token_ids")
        limit = self.limits.max_text_bytes
        # A code point has at most 4 bytes, so most texts need no encoding to be known short enough.
        if len(text) * 4 > limit and (size := len(text.encode())) > limit:
            raise InvalidField(f"inputs[{i}].text", f"must be at most {limit} bytes (max_text_bytes); was {size}")

    def _check_tokenized(self, i: int, text: TokenizedText, call: EncodeCall) -> CheckedSequence:
        if len(text.ids) == 0:
            raise InvalidField(f"inputs[{i}].text", "has no tokens")
        if text.original_token_count > self.bundle.max_sequence_tokens and not call.truncate:
            raise self._too_long(f"inputs[{i}].text", text.original_token_count)
        return CheckedSequence(text.ids, text.original_token_count, text.special, text)

    def _check_ids(self, i: int, sent: SentIds, call: EncodeCall) -> CheckedSequence:
        field = f"inputs[{i}].token_ids"
        if sent.count == 0:
            raise InvalidField(field, "must hold at least 1 id; was empty")
        if sent.count > self.bundle.max_sequence_tokens and not call.truncate:
            raise self._too_long(field, sent.count)
        outside = (sent.ids < 0) | (sent.ids >= self.bundle.vocab_size)  # (seq,)
        if outside.any():
            at = int(np.argmax(outside))
            raise InvalidField(
                f"{field}.ids[{at}]",
                f"must be from 0 to {self.bundle.vocab_size - 1} (the vocabulary of {self.bundle.name}); "
                f"was {sent.ids[at]}",
            )
        special = np.isin(sent.ids, self._special_ids) if call.exclude_special_tokens else None
        return CheckedSequence(sent.ids, sent.count, special)

    def _too_long(self, field: str, count: int) -> SequenceTooLong:
        longest = self.bundle.max_sequence_tokens
        return SequenceTooLong(
            field,
            f"must be at most {longest} tokens (max_sequence_tokens of {self.bundle.name}); was {count}. "
            "Ask for truncation, or cut it up",
        )

    def _check_reply_size(self, call: EncodeCall, sequences: Sequence[CheckedSequence]) -> int:
        """The reply's size in bytes, at most; refuses one that would not fit, before any compute."""
        limit = self.limits.max_response_bytes
        total, fitting = _INFO_BYTES_PER_REPLY, 0
        for sequence in sequences:
            total += self._sequence_bytes(call, sequence)
            if total <= limit:
                fitting += 1
        if total > limit:
            raise ResponseTooLarge(
                "inputs",
                f"the reply would take {total} bytes, over the limit of {limit} (max_response_bytes); the first "
                f"{fitting} of {len(sequences)} inputs would fit, and float16 or pooled outputs take less",
            )
        return total

    def _sequence_bytes(self, call: EncodeCall, sequence: CheckedSequence) -> int:
        """What one sequence adds to a reply, in bytes, at most."""
        tokens = token_rows = len(sequence.ids)
        if call.exclude_special_tokens and sequence.special is not None:
            token_rows -= int(sequence.special.sum())
        rows = sum(output_rows(output.kind, token_rows) for output in call.outputs)
        strings = 0
        if call.include_token_strings and self.tokenizer is not None:
            strings = tokens * (self.tokenizer.max_token_bytes + _STRING_OVERHEAD_BYTES)
        return (
            rows * self.bundle.d_model * call.data_type.itemsize
            + tokens * _INFO_BYTES_PER_TOKEN
            + strings
            + _INFO_BYTES_PER_SEQUENCE
        )


class Catalog:
    """The models by name and version. A name is only ever a key of this map, never a path."""

    def __init__(self) -> None:
        """Starts empty: every call gets NotReady until `publish`."""
        self._models: dict[tuple[str, str], ServedModel] = {}
        self._default_version: dict[str, str] = {}
        self._default_name = ""

    def publish(self, models: Sequence[ServedModel]) -> None:
        """Makes models available; the first is the default, and the first of a name is that name's default version."""
        self._models = {(model.bundle.name, model.bundle.version): model for model in models}
        self._default_name = models[0].bundle.name
        for model in models:
            self._default_version.setdefault(model.bundle.name, model.bundle.version)

    def resolve(self, name: str, version: str) -> ServedModel:
        """The model of a name and version, either empty for its default.

        Raises:
            NotReady: The models are still being loaded.
            ModelNotFound: There is none.
        """
        if not self._models:
            raise NotReady("the server is still loading its models")
        name = name or self._default_name
        if name not in self._default_version:
            raise ModelNotFound("model", f"no model {_shown(name)}; there are {', '.join(self._default_version)}")
        version = version or self._default_version[name]
        model = self._models.get((name, version))
        if model is None:
            versions = ", ".join(v for n, v in self._models if n == name)
            raise ModelNotFound("model_version", f"no version {_shown(version)} of {name}; there are {versions}")
        return model

    def all(self) -> list[ServedModel]:
        """Every model, the default one first, then by name and version."""
        return sorted(
            self._models.values(),
            key=lambda model: (not self.is_default(model), model.bundle.name, model.bundle.version),
        )

    def is_default(self, model: ServedModel) -> bool:
        """Whether requests that name no model get this one."""
        name = self._default_name
        return (model.bundle.name, model.bundle.version) == (name, self._default_version.get(name))


def _shown(text: str) -> str:
    """A caller's text, quoted and cut to what an error can hold."""
    return repr(text if len(text) <= 64 else text[:64] + "…")
