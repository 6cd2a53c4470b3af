"""What is served: one model's way from checked call to rows. Knows no gRPC."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from encserve_server.engine.base import EngineInfo
from encserve_server.errors import (
    InspectUnavailable,
    InvalidField,
    SequenceTooLong,
    TooManyInputs,
)
from encserve_server.models.inputs import InputChecker, Longest, SentInput
from encserve_server.models.inspecting import Inspection, InspectLane, InspectObserver, Wanted
from encserve_server.models.reply_size import ReplySize
from encserve_server.models.spans import SentSpans, place_spans
from encserve_server.models.sparse import static_weights
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.scheduling.scheduler import Scheduler
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans
from encserve_server.types import (
    Bundle,
    CheckedSequence,
    DataType,
    Detail,
    EncodedSequence,
    OffsetUnit,
    Output,
    OutputKind,
    StaticSparse,
    Task,
)

# A bound that no text reaches.
_ANY_TOKENS = 2**62
_ALL_TOKENS = Longest(_ANY_TOKENS, "", truncate=False)


class ModelObserver(InspectObserver, Protocol):
    """Who is told what a model does; called on the event loop, or in a thread that builds replies."""

    def has_text_queue(self, queued_bytes: Callable[[], int], limit_bytes: int) -> None:
        """How much text waits can be asked for, by any thread; no more than so much may."""

    def tokenized(self, seconds: float) -> None:
        """The texts of a call have been tokenized, or refused."""

    def answered(self, encode_seconds: float, response_bytes: int) -> None:
        """A reply has been built."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The bounds of one request.

    Attributes:
        max_sequences: The most inputs.
        max_text_bytes: The longest text, in bytes of UTF-8.
        max_request_bytes: The largest request; gRPC holds it, and callers are told.
        max_response_bytes: The largest reply.
        max_tokens: The most tokens: the bound of the queue.
        max_inspect_tokens: The longest sequence that is looked into.
    """

    max_sequences: int
    max_text_bytes: int
    max_request_bytes: int
    max_response_bytes: int
    max_tokens: int
    max_inspect_tokens: int


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One request, decoded but not checked against its model.

    Attributes:
        inputs: Texts, ids, or vectors.
        outputs: What to return, every default filled in; never empty.
        truncate: Whether an over-long input is cut instead of refused.
        exclude_special_tokens: Whether special tokens have no rows in OutputKind.TOKENS.
        include_token_strings: Whether the reply holds the vocabulary's strings.
        prompt_name: What to put before every text; empty for nothing, None for what the task, or the model, has.
        task: What the texts are; one that the model knows.
        detail: How much the reply tells of each sequence.
        offset_unit: What it counts places in the text in.
        spans: For each input what OutputKind.SPANS has rows for, None for nothing; or nothing for all.
        padded: Whether every sequence has as many rows in the reply as the longest.
    """

    inputs: Sequence[SentInput]
    outputs: tuple[Output, ...]
    truncate: bool
    exclude_special_tokens: bool
    include_token_strings: bool
    prompt_name: str | None = None
    task: Task = Task.NEITHER
    detail: Detail = Detail.TOKENS
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS
    spans: Sequence[SentSpans | None] = ()
    padded: bool = False


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """What a model made of a call, one of each for each input, in order.

    Attributes:
        sequences: The sequences as the model saw them.
        encoded: What was made of them.
        tokenize_seconds: How long tokenizing took, waiting for its thread included.
        estimated_bytes: The reply's size, at most.
    """

    sequences: Sequence[CheckedSequence]
    encoded: Sequence[EncodedSequence]
    tokenize_seconds: float
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """Texts that are to be tokenized and nothing else, decoded but not checked against their model.

    Attributes:
        texts: The texts.
        truncate: Whether an over-long text is cut, or refused; None to give all of its tokens.
        include_token_strings: Whether the reply holds the vocabulary's strings.
        prompt_name: As of an EncodeCall.
        task: As of an EncodeCall.
        offset_unit: As of an EncodeCall.
    """

    texts: Sequence[str]
    truncate: bool | None = None
    include_token_strings: bool = False
    prompt_name: str | None = None
    task: Task = Task.NEITHER
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS


@dataclass(frozen=True, slots=True)
class TokenizeReply:
    """What a model would see of texts.

    Attributes:
        sequences: One for each text, in order.
        estimated_bytes: The reply's size, at most.
    """

    sequences: Sequence[CheckedSequence]
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class InspectCall:
    """One inspection, decoded but its input not yet checked.

    Attributes:
        input: A text, ids, or vectors.
        wanted: Kinds that the model has, each with its layers.
        data_type: The type of the numbers returned.
        truncate: Whether an over-long input is cut instead of refused.
        prompt_name: As of an EncodeCall.
        task: As of an EncodeCall.
    """

    input: SentInput
    wanted: Wanted
    data_type: DataType
    truncate: bool
    prompt_name: str | None = None
    task: Task = Task.NEITHER


@dataclass(frozen=True, slots=True)
class InspectReply:
    """What a model did with one input.

    Attributes:
        sequence: The sequence as the model saw it.
        inspection: What happened inside.
        tokenize_seconds: How long tokenizing took, waiting for its thread included.
    """

    sequence: CheckedSequence
    inspection: Inspection
    tokenize_seconds: float


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
        observer: ModelObserver,
        inspect_lane: InspectLane | None = None,
        max_batch_tokens: int = 0,
        static_tokenizers: Mapping[Task, TextTokenizer] | None = None,
    ) -> None:
        """Takes the parts, all of the same bundle; without a lane nobody looks into the model."""
        self.bundle = bundle
        self.tokenizer = tokenizer
        self._scheduler = scheduler
        self.engine_info = engine_info
        self.limits = limits
        self._clock = clock
        self._observer = observer
        self._inspect_lane = inspect_lane
        self.max_batch_tokens = max_batch_tokens
        if tokenizer is not None:  # read when the page is, so that a request costs nothing
            observer.has_text_queue(lambda: tokenizer.queued_bytes, tokenizer.max_queue_bytes)
        self._checker = InputChecker(bundle, tokenizer, limits.max_text_bytes)
        self._static_checkers = {
            task: InputChecker(bundle, its, limits.max_text_bytes, least_tokens=0)
            for task, its in (static_tokenizers or {}).items()
        }
        self._tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self._longest = {
            (task, truncate): Longest(its.max_tokens, f"{_longest_name(task)} of {bundle.name}", truncate)
            for task, its in self._tasks.items()
            for truncate in (False, True)
        }
        self._skipped_tokens: dict[str, int] = {}  # of each prompt, where it is left out of pooling
        if tokenizer is not None and bundle.pooling is not None and bundle.pooling.skips_prompt:
            longest = bundle.max_sequence_tokens - 1
            its = bundle.prompts.items()
            self._skipped_tokens = {
                name: min(tokenizer.count_prompt(text), longest) if text else 0 for name, text in its
            }
        self._reply_size = ReplySize(bundle, tokenizer, limits.max_response_bytes)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._closing: asyncio.Future[None] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Its name and version."""
        return self.bundle.name, self.bundle.version

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this block the model is not closed, even if another takes its place."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def unused(self) -> None:
        """Returns when no request uses the model."""
        await self._unused.wait()

    def not_ready_reason(self) -> str:
        """Why the model cannot be relied on now, for people; empty if it can."""
        return self._scheduler.not_ready_reason()

    def check_open(self, count_tokens: Callable[[], int | None]) -> None:
        """Returns unless every call would be refused now; see `Scheduler.check_open`."""
        self._scheduler.check_open(count_tokens)

    def answered(self, encode_seconds: float, response_bytes: int) -> None:
        """To be told by whoever built a call's reply: how long that took, and how large it is."""
        self._observer.answered(encode_seconds, response_bytes)

    async def encode(self, call: EncodeCall, deadline: float = math.inf) -> EncodeReply:
        """Checks every input, and only then runs them.

        Raises:
            RequestError: The call cannot succeed; the text names the input and the numbers.
            EncserveError: Whatever `Scheduler.encode` raises.
        """
        self._check_call(call)
        settings = self._tasks[call.task]
        prompt_name = self._prompt_name("options.prompt_name", call.prompt_name, call.inputs, call.task)
        self._check_task("options.task", call.task, prompt_name, call.inputs)
        outputs = self._outputs(call, prompt_name)
        static = self._static(call)
        checker, longest = self._checker, self._longest[call.task, call.truncate]
        if static is not None:
            checker = self._static_checkers[call.task]
            longest = Longest(static.max_tokens or _ANY_TOKENS, "static_sparse.max_tokens", call.truncate)
        span = spans.current()
        began = self._clock.now()
        try:
            sequences = await checker.check(
                call.inputs,
                [f"inputs[{i}]" for i in range(len(call.inputs))],
                longest,
                mark_special=call.exclude_special_tokens,
                prompt=self.bundle.prompts.get(prompt_name, ""),
                expansion=None if static else settings.expansion,
            )
        finally:
            tokenize_seconds = self._clock.now() - began
            if any(isinstance(it, str) for it in call.inputs):
                self._observer.tokenized(tokenize_seconds)
                if span is not None:
                    span.stage("tokenize", began, began + tokenize_seconds)
        if span is not None:
            span.counted(sum(len(it.input) for it in sequences))
        if call.spans:
            sequences = _with_spans(sequences, call)
        estimated_bytes = self._reply_size.check(
            sequences,
            outputs,
            call.detail,
            with_strings=call.include_token_strings,
            without_special=call.exclude_special_tokens,
            padded=call.padded,
        )
        if static is not None:
            encoded = [
                EncodedSequence(tuple(static_weights(static, it.input, output) for output in outputs), 0.0, 0.0)
                for it in sequences
            ]
        else:
            expands = settings.expansion is not None and not settings.expansion.attended
            attended = [it.attended for it in sequences] if expands else ()
            token_spans = [it.token_spans for it in sequences] if call.spans else ()
            inputs = [it.input for it in sequences]
            encoded = await self._scheduler.encode(inputs, outputs, deadline, attended, token_spans)
        estimated_bytes += self._reply_size.check_sparse(estimated_bytes, outputs, encoded)
        return EncodeReply(sequences, encoded, tokenize_seconds, estimated_bytes)

    async def tokenize(self, call: TokenizeCall) -> TokenizeReply:
        """Says what the model would see of texts; nothing is queued for it but the text.

        Raises:
            RequestError: The call cannot succeed; the text names the text and the numbers.
            QueueFull: Too much text is waiting.
        """
        self._check_number("texts", len(call.texts))
        if self.tokenizer is None:
            raise InvalidField("texts", f"model {self.bundle.name} has no tokenizer")
        prompt_name = self._prompt_name("prompt_name", call.prompt_name, call.texts, call.task)
        longest = _ALL_TOKENS if call.truncate is None else self._longest[call.task, call.truncate]
        began = self._clock.now()
        try:
            sequences = await self._checker.tokenize(
                call.texts,
                [f"texts[{i}]" for i in range(len(call.texts))],
                longest,
                prompt=self.bundle.prompts.get(prompt_name, ""),
                expansion=self._tasks[call.task].expansion,
            )
        finally:
            ended = self._clock.now()
            self._observer.tokenized(ended - began)
            if (span := spans.current()) is not None:
                span.stage("tokenize", began, ended)
        if span is not None:
            span.counted(sum(len(it.input) for it in sequences))
        return TokenizeReply(sequences, self._reply_size.check_tokens("texts", sequences, call.include_token_strings))

    @property
    def max_inspect_tokens(self) -> int:
        """The longest sequence that can be looked into; 0 where none can."""
        return 0 if self._inspect_lane is None else min(self.limits.max_inspect_tokens, self.bundle.max_sequence_tokens)

    @contextlib.asynccontextmanager
    async def inspect(self, call: InspectCall) -> AsyncGenerator[InspectReply]:
        """Looks into what the model does with one input; the reply's memory is given back when the block ends.

        Raises:
            InspectUnavailable: The bundle has no graph for it, or the server has it turned off.
            RequestError: The call cannot succeed; the text names the field and the numbers.
            QueueFull: Too many inspections are pending.
            InferenceFailed: The model gives numbers that are not finite.
        """
        lane = self.check_inspectable()
        expansion = self._tasks[call.task].expansion
        longest = self._longest[call.task, call.truncate]
        if longest.tokens > self.max_inspect_tokens:
            longest = Longest(self.max_inspect_tokens, f"max_inspect_tokens of {self.bundle.name}", call.truncate)
        began = self._clock.now()
        prompt_name = self._prompt_name("prompt_name", call.prompt_name, [call.input], call.task)
        self._check_task("task", call.task, prompt_name, [call.input])
        prompt = self.bundle.prompts.get(prompt_name, "")
        (sequence,) = await self._checker.check([call.input], ["input"], longest, prompt=prompt, expansion=expansion)
        if len(sequence.input) > self.max_inspect_tokens:
            raise SequenceTooLong(
                "task",
                f"TASK_{call.task.name} makes texts {len(sequence.input)} tokens long, and at most "
                f"{self.max_inspect_tokens} can be inspected (max_inspect_tokens of {self.bundle.name})",
            )
        tokenize_seconds = self._clock.now() - began
        span = spans.current()
        if span is not None:
            span.counted(len(sequence.input))
            if isinstance(call.input, str):
                span.stage("tokenize", began, began + tokenize_seconds)
        came_at = self._clock.now()
        async with lane.inspect(sequence.input, call.wanted, sequence.attended) as inspection:
            if span is not None:
                began = came_at + inspection.queue_seconds
                span.stage("queue", came_at, began)
                span.stage("compute", began, began + inspection.compute_seconds)
            yield InspectReply(sequence, inspection, tokenize_seconds)

    async def close(self) -> None:
        """Stops the engines; waits for what runs in them. Callable again, also if it was not waited for."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._scheduler.close()
        if self._inspect_lane is not None:
            await self._inspect_lane.close()

    def check_inspectable(self) -> InspectLane:
        """The lane of inspections.

        Raises:
            InspectUnavailable: The bundle has no graph for it, or the server has it turned off.
        """
        if self._inspect_lane is None:
            why = "its bundle holds no graph for it" if self.bundle.inspect_graph is None else "this server has it off"
            raise InspectUnavailable(f"model {self.bundle.name} cannot be inspected: {why}")
        return self._inspect_lane

    def check_count(self, count: int) -> None:
        """Refuses a number of inputs that no request may have.

        Raises:
            InvalidField: There are none.
            TooManyInputs: There are too many.
        """
        self._check_number("inputs", count)

    def _check_number(self, field: str, count: int) -> None:
        """Refuses so many inputs, which are in this field."""
        if count == 0:
            raise InvalidField(field, "must hold at least 1 sequence; was empty")
        if count > self.limits.max_sequences:
            raise TooManyInputs(
                field,
                f"must hold at most {self.limits.max_sequences} sequences (max_request_sequences); was {count}",
            )

    def _check_call(self, call: EncodeCall) -> None:
        """Refuses what can be refused without looking into the inputs."""
        if call.include_token_strings and self.tokenizer is None:
            raise InvalidField(
                "options.include_token_strings", f"model {self.bundle.name} has no tokenizer, so no strings for its ids"
            )
        if not call.exclude_special_tokens or self.bundle.special_token_ids:
            return
        if not all(isinstance(it, str) for it in call.inputs):
            raise InvalidField(
                "options.exclude_special_tokens", f"model {self.bundle.name} does not say which tokens are special"
            )

    def _prompt_name(self, field: str, name: str | None, inputs: Sequence[SentInput], task: Task = Task.NEITHER) -> str:
        """The prompt that a call's texts get; empty for none. `field` is where its name was asked for.

        Raises:
            InvalidField: The model has no such prompt, or there are inputs that cannot have one.
        """
        bundle = self.bundle
        if name is None:
            return self._tasks[task].prompt_name
        if name and name not in bundle.prompts:
            there = ", ".join(map(repr, bundle.prompts)) or "none"
            raise InvalidField(field, f"model {bundle.name} has no prompt {name[:64]!r}; it has {there}")
        if name and (other := _first_not_text(field, inputs)):
            raise InvalidField(field, f"goes before texts only; {other} is none: put it among its ids")
        return name

    def _check_task(self, field: str, task: Task, prompt_name: str, inputs: Sequence[SentInput]) -> None:
        """Refuses a task that would change inputs which are no texts, and are taken as they are."""
        if not task:
            return
        changes = []
        if self.bundle.prompts.get(prompt_name):
            changes.append("puts a prompt before texts")
        if self._tasks[task].expansion:
            changes.append("puts tokens behind short texts")
        if changes and (other := _first_not_text(field, inputs)):
            raise InvalidField(
                field,
                f"TASK_{task.name} {' and '.join(changes)}; {other} is none: send text, or leave the task out",
            )

    def _static(self, call: EncodeCall) -> StaticSparse | None:
        """What answers the call without the model, if anything does.

        Raises:
            InvalidField: It cannot answer all of the call.
        """
        static = self._tasks[call.task].static_sparse
        if static is None or OutputKind.SPARSE not in (kinds := [it.kind for it in call.outputs]):
            return None
        how = f"model {self.bundle.name} makes OUTPUT_KIND_SPARSE of this task without a run"
        if others := [i for i, kind in enumerate(kinds) if kind is not OutputKind.SPARSE]:
            raise InvalidField(
                f"options.outputs[{others[0]}].kind",
                f"{how}: ask for OUTPUT_KIND_{kinds[others[0]].name} in another call",
            )
        if others := [i for i, it in enumerate(call.inputs) if not isinstance(it, str)]:
            raise InvalidField(f"inputs[{others[0]}]", f"{how}, from texts only")
        return static

    def _outputs(self, call: EncodeCall, prompt_name: str) -> tuple[Output, ...]:
        """The call's outputs, with the tokens of the prompt left out of pooling where the model was trained so.

        Raises:
            InvalidField: Only some of the inputs have a prompt.
        """
        skipped = self._skipped_tokens.get(prompt_name, 0)
        texts = sum(isinstance(it, str) for it in call.inputs)
        if not skipped or not texts or all(it.kind is not OutputKind.MODEL for it in call.outputs):
            return call.outputs
        if texts < len(call.inputs):
            raise InvalidField(
                "inputs",
                f"must be texts, or else sequences of ids, in one call: model {self.bundle.name} leaves its prompt out "
                "of pooling, and only texts have one",
            )
        return tuple(it._replace(skipped_tokens=skipped) for it in call.outputs)


def _with_spans(sequences: Sequence[CheckedSequence], call: EncodeCall) -> list[CheckedSequence]:
    """The sequences of a call, each with the tokens of its ranges.

    Raises:
        InvalidField: A range is not one of its input.
    """
    return [
        sequence
        if spans is None
        else replace(sequence, token_spans=place_spans(f"inputs[{i}].spans", spans, it, sequence))
        for i, (it, spans, sequence) in enumerate(zip(call.inputs, call.spans, sequences, strict=True))
    ]


def _first_not_text(field: str, inputs: Sequence[SentInput]) -> str:
    """The path of the first input that is no text, in a request with this field; empty where all are texts."""
    others = (
        f"inputs[{i}]" if field.startswith("options.") else "input"
        for i, it in enumerate(inputs)
        if not isinstance(it, str)
    )
    return next(others, "")


def _longest_name(task: Task) -> str:
    """What bounds the texts of a task, for errors."""
    return f"max_tokens of TASK_{task.name}" if task else "max_sequence_tokens"
