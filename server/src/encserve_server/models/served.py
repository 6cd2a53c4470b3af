"""What is served: one model's way from a decoded call to rows. Knows no protocol."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from encserve_server.engine.base import EngineInfo
from encserve_server.errors import (
    EmptyInputs,
    FieldPath,
    InspectUnavailable,
    InvalidField,
    Part,
    SequenceTooLong,
    TooManyInputs,
    TooManyOutputs,
)
from encserve_server.models.inputs import InputChecker, LengthLimit, SentInput, check_length
from encserve_server.models.inspecting import Inspection, InspectLane, InspectObserver, Wanted
from encserve_server.models.reply_size import ReplyShape, ReplySize
from encserve_server.models.spans import SentSpans, place_spans
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.outputs import MAX_OUTPUTS, ModelOutputs, OutputPlan, OutputSpec, static_weights
from encserve_server.scheduling.scheduler import Scheduler
from encserve_server.system.clock import Clock
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.bundles import Bundle, Expansion, StaticSparse, TaskSettings
from encserve_server.types.callers import ANY_SENDER, Priority, Sender
from encserve_server.types.requests import DataType, Detail, OffsetUnit, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

# A bound that no text reaches.
_ANY_TOKENS = 2**62
_ALL_TOKENS = LengthLimit(_ANY_TOKENS, "")
_PLAIN_SHAPE = ReplyShape()
# Static weights of so many texts are looked up before other calls have a turn.
_STATIC_TEXTS_AT_ONCE = 16


class ModelObserver(InspectObserver, Protocol):
    """Hears what a model does; called on the event loop."""

    def register_text_queue_gauges(self, queued_bytes: Callable[[], int], limit_bytes: int) -> None:
        """Takes a function, callable from any thread, that says how much text waits, and the bound on it."""

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
        max_inspect_tokens: The longest sequence that is inspected.
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
        outputs: What to return; empty for the rows of tokens.
        truncate: Whether an over-long input is cut instead of refused.
        prompt_name: What to put before every text; empty for nothing, None for what the task, or the model, has.
        task: What the texts are.
        spans: For each input what OutputKind.SPANS has rows for, None for nothing; or nothing for all.
        shape: How the reply is to be written.
        max_tokens: The most tokens of an input; 0 for as many as the model, or the task, takes.
        priority: How urgent it says it is.
        closing: What all ids end with, and keep where they are cut.
        part_of: All inputs of the call, where these are a part of them.
    """

    inputs: Sequence[SentInput]
    outputs: tuple[OutputSpec, ...]
    truncate: bool = False
    prompt_name: str | None = None
    task: Task = Task.NEITHER
    spans: Sequence[SentSpans | None] = ()
    shape: ReplyShape = _PLAIN_SHAPE
    max_tokens: int = 0
    priority: Priority = Priority.INTERACTIVE
    closing: tuple[int, ...] = ()
    part_of: Sequence[SentInput] = ()


@dataclass(slots=True)
class EncodeReply:
    """What a model makes of a call.

    Attributes:
        sequences: One for each input, in order; with outputs once the call has run.
        plan: What is made of each.
        detail: How much the reply says of each sequence.
        padded: Whether every sequence has as many rows in the reply as the longest.
        static: What answers the call in place of the model, if anything does.
        tokenize_seconds: How long tokenizing took, waiting for its thread included.
        estimated_bytes: The reply's size, at most; of sparse weights what they take once they are there.
    """

    sequences: list[TokenSequence]
    plan: OutputPlan
    detail: Detail
    padded: bool
    static: StaticSparse | None
    tokenize_seconds: float
    estimated_bytes: int

    def seconds(self) -> tuple[float, float]:
        """The longest wait of a sequence for its batch, and the longest run of a batch with one of them."""
        queue, compute = 0.0, 0.0
        for it in self.sequences:
            compute = max(compute, it.compute_seconds)
            if it.compute_seconds:  # a table has answered otherwise
                queue = max(queue, it.started_at - it.enqueued_at)
        return queue, compute


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """Texts that are to be tokenized and nothing else, decoded but not checked against their model.

    Attributes:
        texts: The texts.
        truncate: Whether an over-long text is cut, or refused; None to give all of its tokens.
        include_token_strings: Whether the reply holds the vocabulary's strings.
        prompt_name: As of an EncodeCall.
        task: As of an EncodeCall.
        offset_unit: As of a ReplyShape.
        most_inputs: As of `ServedModel.check_counts`.
    """

    texts: Sequence[str]
    truncate: bool | None = None
    include_token_strings: bool = False
    prompt_name: str | None = None
    task: Task = Task.NEITHER
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS
    most_inputs: int = 0


@dataclass(frozen=True, slots=True)
class TokenizeReply:
    """What a model would see of texts.

    Attributes:
        sequences: One for each text, in order.
        estimated_bytes: The reply's size, at most.
    """

    sequences: Sequence[TokenSequence]
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

    sequence: TokenSequence
    inspection: Inspection
    tokenize_seconds: float


class ServedModel:
    """One loaded model: checks a call, tokenizes it, and has it scheduled."""

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: TextTokenizer | None,
        outputs: ModelOutputs,
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
        """Takes the parts, all of the same bundle; without a lane the model cannot be inspected."""
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.outputs = outputs
        self._scheduler = scheduler
        self.engine_info = engine_info
        self.limits = limits
        self._clock = clock
        self._observer = observer
        self._inspect_lane = inspect_lane
        self.max_batch_tokens = max_batch_tokens
        if tokenizer is not None:  # read when the page is, so that a request costs nothing
            observer.register_text_queue_gauges(lambda: tokenizer.queued_bytes, tokenizer.max_queue_bytes)
        least_tokens = 0 if bundle.takes_empty_texts else 1
        self._checker = InputChecker(bundle, tokenizer, limits.max_text_bytes, least_tokens=least_tokens)
        self._static_checkers = {
            task: InputChecker(bundle, its, limits.max_text_bytes, least_tokens=0)
            for task, its in (static_tokenizers or {}).items()
        }
        self._tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self._limits_of = {
            (task, truncate): LengthLimit(settings.max_tokens, _limit_name(task, bundle), task, truncate)
            for task, settings in self._tasks.items()
            for truncate in (False, True)
        }
        self._skipped_tokens: dict[str, int] = {}  # of each prompt, where it is left out of pooling
        if tokenizer is not None and bundle.pooling is not None and bundle.pooling.skips_prompt:
            longest = bundle.max_sequence_tokens - 1
            self._skipped_tokens = {
                name: min(tokenizer.count_prompt(text), longest) if text else 0 for name, text in bundle.prompts.items()
            }
        self._reply_size = ReplySize(outputs, tokenizer, limits.max_response_bytes)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._closing: asyncio.Future[None] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Its name and version."""
        return self.bundle.name, self.bundle.version

    def enter(self) -> None:
        """A call uses the model: it is not closed before `leave`, even if another takes its place."""
        self._users += 1
        self._unused.clear()

    def leave(self) -> None:
        """A call that has entered does not use the model any more."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def unused(self) -> None:
        """Returns when no request uses the model."""
        await self._unused.wait()

    def not_ready_reason(self) -> str:
        """Why the model cannot be relied on now, for people; empty if it can."""
        return self._scheduler.not_ready_reason()

    def answered(self, encode_seconds: float, response_bytes: int) -> None:
        """Counts a reply that has been built: how long that took, and how large it is. To be called on the loop."""
        self._observer.answered(encode_seconds, response_bytes)

    def check_counts(
        self, inputs: int, tokens: int | None = None, outputs: int = 1, spans: int = 0, *, most_inputs: int = 0
    ) -> None:
        """Refuses what counting can refuse, before the contents of a call are copied.

        Args:
            inputs: How many inputs there are.
            tokens: How many tokens they have, each at most the model's longest; None where that takes more than
                counting, or where the call is worked on in parts.
            outputs: How many outputs are wanted.
            spans: How many spans there are.
            most_inputs: The most inputs, `max_http_inputs`; 0 for `max_request_sequences`.

        Raises:
            EmptyInputs: There are no inputs.
            TooManyInputs: There are too many.
            TooManyOutputs: There are too many.
            ResponseTooLarge: The rows of the spans alone are over the limit.
            EncserveError: Whatever `Scheduler.check_open` raises.
        """
        self._check_number(inputs, most_inputs)
        if outputs > MAX_OUTPUTS:
            raise TooManyOutputs(
                FieldPath(Part.OUTPUTS), f"must be at most {MAX_OUTPUTS} (max_outputs); was {outputs}: make more calls"
            )
        if spans:
            self._reply_size.check_spans(spans)
        if not self._static_checkers:  # tables answer whether or not the engine does
            self._scheduler.check_open(tokens)

    def check_rows(self, row_bytes: int, inputs: int) -> int:
        """What a reply without details takes whose rows take so much for each input.

        Raises:
            ResponseTooLarge: It is over the limit.
        """
        return self._reply_size.check_rows(row_bytes, inputs)

    async def prepare(
        self, call: EncodeCall, span: RequestSpan | None = None, sender: Sender = ANY_SENDER
    ) -> EncodeReply:
        """Checks all of a call, and tokenizes its texts when the sender's turn comes.

        Raises:
            RequestError: The call cannot succeed; the text names the input and the numbers.
            QueueFull: Too much text is waiting.
        """
        self._check_shape(call)
        settings = self._tasks[call.task] if call.task in self._tasks else self._refuse_task(call.task)
        prompt_name = self._prompt_name(call.prompt_name, call.inputs, call.task)
        skipped = self._skipped_by(prompt_name, call) if self._skipped_tokens else 0
        plan = self.outputs.plan(call.outputs, call.task, skipped)
        static = (
            self.outputs.static(plan.outputs, call.task, _first_not_text(call.inputs))
            if self._static_checkers
            else None
        )
        checker, limit = self._checker, self._limits_of[call.task, call.truncate]
        if static is not None:
            checker = self._static_checkers[call.task]
            limit = LengthLimit(static.max_tokens or _ANY_TOKENS, "static_sparse.max_tokens", call.task, call.truncate)
        if 0 < call.max_tokens < limit.tokens:
            limit = replace(limit, tokens=call.max_tokens, name="max_tokens")
        if call.closing:
            limit = replace(limit, closing=call.closing)
        detail = call.shape.detail or plan.detail
        sequences, tokenize_seconds = await self._check_inputs(
            checker,
            call.inputs,
            limit,
            prompt_name,
            None if static else settings.expansion,
            details=detail is Detail.TOKENS or bool(call.spans) or call.shape.without_special,
            span=span,
            sender=sender,
        )
        for i, (sent, sent_spans) in enumerate(zip(call.inputs, call.spans, strict=False)):  # of all, or of none
            if sent_spans is not None:
                sequences[i].token_spans = place_spans(i, sent_spans, sent, sequences[i])
        if plan.bounds_length:
            self.outputs.check_lengths(plan.outputs, [len(it.input) for it in sequences])
        for i, sequence in enumerate(sequences):
            sequence.index = i
            sequence.wanted = plan.outputs
            sequence.cost = len(sequence.input)
            if not plan.is_ordinary:
                spans = 0 if sequence.token_spans is None else len(sequence.token_spans)
                sequence.cost = plan.cost(sequence.cost, spans)
        estimated_bytes = self._reply_size.check(sequences, plan, detail, call.shape)
        return EncodeReply(sequences, plan, detail, call.shape.padded, static, tokenize_seconds, estimated_bytes)

    def check_share(self, sender: Sender) -> None:
        """Refuses a call before anything is done for it, if its caller has its share of the queue waiting.

        Raises:
            ShareExceeded: The caller, or bulk, has.
        """
        if not self._static_checkers:  # tables answer without the queue
            self._scheduler.check_share(sender)

    async def run(
        self,
        reply: EncodeReply,
        deadline: float = math.inf,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
    ) -> None:
        """Runs what `prepare` gave, so that its sequences have outputs.

        Raises:
            ResponseTooLarge: With sparse weights the reply is over the limit.
            EncserveError: Whatever `Scheduler.run` raises.
        """
        if reply.static is not None:
            await self._look_up(reply, reply.static)
        else:
            sequences = reply.sequences
            if self.bundle.takes_empty_texts:
                empty = [it for it in sequences if not len(it.input)]
                if empty:
                    self.outputs.compute_empty(empty)
                    sequences = [it for it in sequences if len(it.input)]
            if sequences:
                await self._scheduler.run(sequences, deadline, span, sender)
        if reply.plan.has_sparse:
            reply.estimated_bytes = self._reply_size.check_sparse(
                reply.estimated_bytes, reply.plan, reply.sequences, padded=reply.padded
            )

    async def _look_up(self, reply: EncodeReply, static: StaticSparse) -> None:
        """Gives the sequences of a call the weights of a table."""
        for i, sequence in enumerate(reply.sequences):
            if i and not i % _STATIC_TEXTS_AT_ONCE:
                await asyncio.sleep(0)
            sequence.outputs = static_weights(static, sequence.input, reply.plan.outputs)

    async def tokenize(
        self, call: TokenizeCall, span: RequestSpan | None = None, sender: Sender = ANY_SENDER
    ) -> TokenizeReply:
        """Says what the model would see of texts, when the sender's turn comes; nothing is queued but the text.

        Raises:
            RequestError: The call cannot succeed; the text names the text and the numbers.
            QueueFull: Too much text is waiting.
        """
        self._check_number(len(call.texts), call.most_inputs)
        if self.tokenizer is None:
            raise InvalidField(FieldPath(Part.INPUTS), f"model {self.bundle.name} has no tokenizer")
        settings = self._tasks[call.task] if call.task in self._tasks else self._refuse_task(call.task)
        prompt_name = self._prompt_name(call.prompt_name, call.texts, call.task)
        limit = _ALL_TOKENS if call.truncate is None else self._limits_of[call.task, call.truncate]
        sequences, _ = await self._check_inputs(
            self._checker, call.texts, limit, prompt_name, settings.expansion, details=True, span=span, sender=sender
        )
        for it in sequences:
            it.cost = len(it.input)
        return TokenizeReply(sequences, self._reply_size.check_tokens(sequences, call.include_token_strings))

    def check_length(self, field: FieldPath, count: int, task: Task) -> None:
        """Raises SequenceTooLong for an input that is too long for its task and may not be cut."""
        if (limit := self._limits_of.get((task, False))) is not None:  # else the model refuses the task
            check_length(field, count, limit)

    @property
    def max_inspect_tokens(self) -> int:
        """The longest sequence that can be inspected; 0 where none can."""
        return 0 if self._inspect_lane is None else min(self.limits.max_inspect_tokens, self.bundle.max_sequence_tokens)

    @contextlib.asynccontextmanager
    async def inspect(
        self,
        call: InspectCall,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
        charge: Callable[[Sequence[TokenSequence]], None] = lambda _: None,
    ) -> AsyncGenerator[InspectReply]:
        """Looks into what the model does with one input; the reply's memory is given back when the block ends.

        A text is tokenized when the sender's turn comes. `charge` is called with the sequence before it is run.

        Raises:
            InspectUnavailable: The bundle has no graph for it, or the server has it turned off.
            RequestError: The call cannot succeed; the text names the field and the numbers.
            QueueFull: Too many inspections are pending.
            InferenceFailed: The model gives numbers that are not finite.
        """
        lane = self.check_inspectable()
        settings = self._tasks[call.task] if call.task in self._tasks else self._refuse_task(call.task)
        limit = self._limits_of[call.task, call.truncate]
        if limit.tokens > self.max_inspect_tokens:
            name = f"max_inspect_tokens of {self.bundle.name}"
            limit = LengthLimit(self.max_inspect_tokens, name, call.task, call.truncate)
        prompt_name = self._prompt_name(call.prompt_name, [call.input], call.task)
        (sequence,), tokenize_seconds = await self._check_inputs(
            self._checker, [call.input], limit, prompt_name, settings.expansion, details=True, span=span, sender=sender
        )
        if len(sequence.input) > self.max_inspect_tokens:
            raise SequenceTooLong(
                FieldPath(Part.TASK),
                "{task} makes texts {tokens} tokens long, and at most {most} can be inspected (max_inspect_tokens of "
                "{model})",
                task=call.task,
                tokens=len(sequence.input),
                most=self.max_inspect_tokens,
                model=self.bundle.name,
            )
        sequence.cost = len(sequence.input)
        charge([sequence])
        came_at = self._clock.now()

        def on_start() -> None:
            sequence.started_at = self._clock.now()

        async with lane.inspect(sequence.input, call.wanted, sequence.attended, on_start) as inspection:
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

    async def _check_inputs(
        self,
        checker: InputChecker,
        inputs: Sequence[SentInput],
        limit: LengthLimit,
        prompt_name: str,
        expansion: Expansion | None,
        *,
        details: bool,
        span: RequestSpan | None,
        sender: Sender = ANY_SENDER,
    ) -> tuple[list[TokenSequence], float]:
        """The sequences of inputs, and how long texts took to tokenize, which is counted and traced."""
        prompt = self.bundle.prompts[prompt_name] if prompt_name else ""
        began = ended = self._clock.now()
        try:
            sequences = await checker.check(
                inputs, limit, details=details, prompt=prompt, expansion=expansion, sender=sender
            )
        finally:
            if isinstance(inputs[0], str) or any(isinstance(it, str) for it in inputs):
                ended = self._clock.now()
                self._observer.tokenized(ended - began)
                if span is not None:
                    span.stage("tokenize", began, ended)
        if span is not None:
            span.counted(sum(len(it.input) for it in sequences))
        return sequences, ended - began

    def _check_number(self, count: int, most_over_http: int = 0) -> None:
        """Refuses so many inputs."""
        if count == 0:
            raise EmptyInputs(FieldPath(Part.INPUTS), "must hold at least 1 sequence; was empty")
        limit = most_over_http or self.limits.max_sequences
        if count > limit:
            name = "max_http_inputs" if most_over_http else "max_request_sequences"
            raise TooManyInputs(FieldPath(Part.INPUTS), f"must hold at most {limit} sequences ({name}); was {count}")

    def _check_shape(self, call: EncodeCall) -> None:
        """Refuses what the reply cannot say."""
        if call.shape.with_strings and self.tokenizer is None:
            problem = f"model {self.bundle.name} has no tokenizer, so no strings for its ids"
            raise InvalidField(FieldPath(Part.TOKEN_STRINGS), problem)
        if not call.shape.without_special or self.bundle.special_token_ids:
            return
        if not all(isinstance(it, str) for it in call.inputs):
            problem = f"model {self.bundle.name} does not say which tokens are special"
            raise InvalidField(FieldPath(Part.EXCLUDE_SPECIAL_TOKENS), problem)

    def _refuse_task(self, task: Task) -> TaskSettings:
        """Refuses a task that the model does not know."""
        known = tuple(self.bundle.tasks)
        raise InvalidField(
            FieldPath(Part.TASK),
            "model {model} does not know {task}; " + ("it knows {known}" if known else "it treats all texts alike"),
            model=self.bundle.name,
            task=task,
            known=known,
        )

    def _prompt_name(self, name: str | None, inputs: Sequence[SentInput], task: Task) -> str:
        """The prompt that a call's texts get; empty for none.

        Raises:
            InvalidField: The model has no such prompt, or there are inputs that prompt or task would change, and which
                are no texts.
        """
        bundle, settings = self.bundle, self._tasks[task]
        if name and name not in bundle.prompts:
            there = ", ".join(map(repr, bundle.prompts)) or "none"
            problem = f"model {bundle.name} has no prompt {name[:64]!r}; it has {there}"
            raise InvalidField(FieldPath(Part.PROMPT_NAME), problem)
        chosen = settings.prompt_name if name is None else name
        if not (name or task):  # without being asked, a prompt goes before the texts, and other inputs stay as they are
            return chosen
        changes = ["puts a prompt before texts"] if bundle.prompts.get(chosen) else []
        if task and settings.expansion:
            changes.append("puts tokens behind short texts")
        other = _first_not_text(inputs)
        if other is None:
            return chosen
        if name:
            raise InvalidField(
                FieldPath(Part.PROMPT_NAME),
                "goes before texts only; {other} is not a text: put it among its ids",
                other=FieldPath(Part.INPUT, other),
            )
        if changes:
            raise InvalidField(
                FieldPath(Part.TASK),
                "{task} {changes}; {other} is not a text: send text, or leave the task out",
                task=task,
                changes=" and ".join(changes),
                other=FieldPath(Part.INPUT, other),
            )
        return chosen

    def _skipped_by(self, prompt_name: str, call: EncodeCall) -> int:
        """How many tokens of a prompt are left out of pooling, for a model that was trained so.

        Raises:
            InvalidField: Only some of the inputs have a prompt.
        """
        skipped = self._skipped_tokens.get(prompt_name, 0)
        if not skipped or all(it.kind is not OutputKind.MODEL for it in call.outputs):
            return 0
        inputs = call.part_of or call.inputs
        texts = sum(isinstance(it, str) for it in inputs)
        if not texts:
            return 0
        if texts < len(inputs):
            raise InvalidField(
                FieldPath(Part.INPUTS),
                f"must be texts, or else sequences of ids, in one call: model {self.bundle.name} leaves its prompt out "
                "of pooling, and only texts have one",
            )
        return skipped


def _first_not_text(inputs: Sequence[SentInput]) -> int | None:
    """The place of the first input that is not a text; None where all are."""
    return next((i for i, it in enumerate(inputs) if not isinstance(it, str)), None)


def _limit_name(task: Task, bundle: Bundle) -> str:
    """What bounds the texts of a task, for errors."""
    if task:
        return f"max_tokens of {{task}} of {bundle.name}"
    return f"{'text.max_tokens' if bundle.max_text_tokens else 'max_sequence_tokens'} of {bundle.name}"
