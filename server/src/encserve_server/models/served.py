"""One served model: from a decoded call to the outputs. Independent of protocols."""

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
    RequestError,
    RequestField,
    RequestTooLarge,
    SequenceTooLong,
    TooManyInputs,
)
from encserve_server.models.inputs import (
    InputChecker,
    InputRules,
    LengthLimit,
    SentInput,
    check_length,
    is_text,
    pieces,
)
from encserve_server.models.inspecting import Inspection, InspectLane, InspectObserver, Wanted, inspection_cost
from encserve_server.models.pairs import SentPair
from encserve_server.models.reply_size import ReplySize
from encserve_server.models.spans import place_spans
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.treatment import CallPlanner, EncodeCall
from encserve_server.outputs import ModelOutputs, OutputPlan, check_output_count, static_weights
from encserve_server.scheduling.scheduler import Scheduler
from encserve_server.system.clock import Clock
from encserve_server.telemetry.spans import RequestSpan
from encserve_server.types.bundles import Bundle, StaticSparse
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.requests import DataType, Detail, OffsetUnit, Task
from encserve_server.types.sequences import TokenSequence

# The number of lookups in a table of static weights after which other calls may run.
_STATIC_TEXTS_AT_ONCE = 16


class ModelObserver(InspectObserver, Protocol):
    """Receives the events of a model on the event loop."""

    def register_text_queue_gauges(self, queued_bytes: Callable[[], int], limit_bytes: int) -> None:
        """Register a function for the size of waiting text, in bytes. Any thread may call the function."""

    def tokenized(self, seconds: float) -> None:
        """The texts of a call have been tokenized, or refused."""

    def answered(self, encode_seconds: float, response_bytes: int) -> None:
        """A reply has been built."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request.

    Attributes:
        max_sequences: The maximum number of inputs.
        max_text_bytes: The maximum size of a text, in bytes of UTF-8.
        max_request_bytes: The maximum size of a request. gRPC enforces this limit, and GetModel returns this limit.
        max_response_bytes: The maximum size of a reply.
        max_tokens: The maximum number of tokens that may wait in the queue of the model.
        max_inspect_tokens: The maximum number of tokens of an inspection.
    """

    max_sequences: int
    max_text_bytes: int
    max_request_bytes: int
    max_response_bytes: int
    max_tokens: int
    max_inspect_tokens: int


@dataclass(slots=True)
class EncodeReply:
    """The reply to a call.

    Attributes:
        sequences: One sequence for each input, in order. `ServedModel.run` sets their outputs.
        plan: The outputs of each sequence.
        detail: The amount of information about each sequence.
        padded: Whether the rows of shorter sequences are padded to the longest sequence.
        static: The table that answers the call instead of the model; None if the model answers.
        tokenize_seconds: The time for tokenizing, including the wait for a thread.
        estimated_bytes: The maximum size of the reply. Sparse weights are included after they are computed.
    """

    sequences: list[TokenSequence]
    plan: OutputPlan
    detail: Detail
    padded: bool
    static: StaticSparse | None
    tokenize_seconds: float
    estimated_bytes: int

    def seconds(self) -> tuple[float, float]:
        """Return the longest queue time of the sequences, and the longest run time of their batches."""
        queue, compute = 0.0, 0.0
        for it in self.sequences:
            compute = max(compute, it.compute_seconds)
            if it.compute_seconds:  # 0 if a table has answered
                queue = max(queue, it.started_at - it.enqueued_at)
        return queue, compute


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A tokenize call: decoded, but not yet checked by the model.

    Attributes:
        texts: The texts.
        truncate: True cuts a text that is too long. False refuses the text. None returns all tokens of the text.
        include_token_strings: Whether the reply has the string of each token.
        prompt_name: See `EncodeCall`.
        task: See `EncodeCall`.
        offset_unit: See `ReplyShape`.
    """

    texts: Sequence[str]
    truncate: bool | None = None
    include_token_strings: bool = False
    prompt_name: str | None = None
    task: Task = Task.NEITHER
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS


@dataclass(frozen=True, slots=True)
class TokenizeReply:
    """The tokens of texts.

    Attributes:
        sequences: One sequence for each text, in order.
        estimated_bytes: The maximum size of the reply.
    """

    sequences: Sequence[TokenSequence]
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class InspectCall:
    """An inspection call: decoded, but not yet checked by the model.

    Attributes:
        input: A text, ids, or vectors.
        wanted: The kinds of tensors, such as hidden states, each with layer indices. The model supports these kinds.
        data_type: The type of the returned numbers.
        truncate: Whether an input that is too long is cut instead of refused.
        prompt_name: See `EncodeCall`.
        task: See `EncodeCall`.
    """

    input: SentInput
    wanted: Wanted
    data_type: DataType
    truncate: bool
    prompt_name: str | None = None
    task: Task = Task.NEITHER


@dataclass(frozen=True, slots=True)
class InspectReply:
    """The result of an inspection.

    Attributes:
        sequence: The tokens or vectors that the model processed.
        inspection: The tensors from inside the model.
        tokenize_seconds: The time for tokenizing, including the wait for a thread.
    """

    sequence: TokenSequence
    inspection: Inspection
    tokenize_seconds: float


class ServedModel:
    """One loaded model: checks a call, tokenizes its texts, and schedules its sequences.

    Attributes:
        observer: Receives the events of the model. Call its methods on the event loop.
        takes_pairs_only: Whether the model's template joins both texts of a pair.
    """

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
        """Set the parts, all from the same bundle. Without `inspect_lane`, the model cannot be inspected."""
        self.bundle = bundle
        self.takes_pairs_only = bundle.template is not None and bundle.template.between is not None
        self.tokenizer = tokenizer
        self.outputs = outputs
        self._scheduler = scheduler
        self.engine_info = engine_info
        self.limits = limits
        self._clock = clock
        self.observer = observer
        self._inspect_lane = inspect_lane
        self.max_batch_tokens = max_batch_tokens
        if tokenizer is not None:  # the function is called only when /metrics is read
            observer.register_text_queue_gauges(lambda: tokenizer.queued_bytes, tokenizer.max_queue_bytes)
        self._planner = CallPlanner(bundle, tokenizer, outputs, limits.max_text_bytes, static_tokenizers or {})
        self._has_tables = bool(static_tokenizers)
        self._reply_size = ReplySize(outputs, tokenizer, limits.max_response_bytes)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._closing: asyncio.Future[None] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The name and the version of the model."""
        return self.bundle.name, self.bundle.version

    def enter(self) -> None:
        """Count a call that uses the model. The model stays open until `leave`, even if another version replaces it."""
        self._users += 1
        self._unused.clear()

    def leave(self) -> None:
        """End the use of the model by one call; see `enter`."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def unused(self) -> None:
        """Wait until no call uses the model."""
        await self._unused.wait()

    def not_ready_reason(self) -> str:
        """Return the reason why the model is not ready; empty if the model is ready."""
        return self._scheduler.not_ready_reason()

    def check_counts(self, inputs: int, outputs: int = 1, spans: int = 0) -> None:
        """Check the counts of a call before its contents are copied, and check that the scheduler accepts calls.

        Args:
            inputs: The number of inputs.
            outputs: The number of requested outputs.
            spans: The number of spans.

        Raises:
            EmptyInputs: The call has no inputs.
            TooManyInputs: The call has too many inputs.
            TooManyOutputs: The call has too many outputs.
            ResponseTooLarge: The vectors of the spans alone are over the limit of a reply.
        """
        self._check_number(inputs)
        check_output_count(outputs)
        if spans:
            self._reply_size.check_spans(spans)
        if not self._has_tables:  # a table answers even if the engine fails
            self._scheduler.check_open()

    def join_pairs(self, call: EncodeCall) -> EncodeCall:
        """Mark the pairs of a call as joined. Call this only if the model takes pairs only.

        The query is repeated before each document. A long query can make much text, so all pairs together have a
        limit.

        Raises:
            RequestTooLarge: The joined pairs have more than `max_request_bytes` characters.
        """
        most = self.limits.max_request_bytes
        inputs = [it._replace(is_joined=True) if isinstance(it, SentPair) else it for it in call.inputs]
        joined = sum(it.size for it in inputs if isinstance(it, SentPair))
        if joined > most:
            raise RequestTooLarge(
                FieldPath(RequestField.INPUTS),
                f"must have at most {most} characters with the query before each of them, because the template of "
                f"{self.bundle.name} joins both; was {joined}. Send fewer documents, or a shorter query",
            )
        return replace(call, inputs=inputs)

    async def prepare(
        self,
        call: EncodeCall,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
        *,
        reply: EncodeReply | None = None,
        end: int | None = None,
    ) -> EncodeReply:
        """Check a call, and tokenize its texts when the sender's turn comes.

        Args:
            call: The call.
            span: Traces the call.
            sender: The caller and the priority.
            reply: The reply with the sequences of earlier inputs. The method adds the next sequences. None for the
                first inputs.
            end: The index after the last input to prepare; None for all inputs.

        Raises:
            RequestError: The call cannot succeed. The error names the input, its value and the limit.
            QueueFull: Too much text is waiting.
        """
        checker, rules, plan, detail, static = self._planner.plan_call(call)
        if reply is None:
            reply = EncodeReply([], plan, detail, call.shape.padded, static, 0.0, 0)
        begin, inputs, sent_spans = len(reply.sequences), call.inputs, call.spans
        if end is not None:
            inputs, sent_spans = inputs[begin:end], sent_spans[begin:end]
        try:
            sequences, tokenize_seconds = await self._check_inputs(checker, inputs, rules, span, sender)
            for i, spans_of_input in enumerate(sent_spans):  # empty if the call has no spans
                if spans_of_input is not None:
                    sequences[i].token_spans = place_spans(i, spans_of_input, inputs[i], sequences[i])
            if plan.bounds_length:
                self.outputs.check_lengths(plan.outputs, [len(it.input) for it in sequences])
        except RequestError as error:
            error.move(begin)
            raise
        for i, sequence in enumerate(sequences, begin):
            sequence.index = i
            sequence.wanted = plan.outputs
            sequence.cost = len(sequence.input)
            if not plan.is_ordinary:
                spans = 0 if sequence.token_spans is None else len(sequence.token_spans)
                sequence.cost = plan.cost(sequence.cost, spans)
        reply.sequences += sequences
        reply.tokenize_seconds += tokenize_seconds
        reply.estimated_bytes = self._reply_size.check(reply.sequences, len(call.inputs), plan, detail, call.shape)
        return reply

    def check_share(self, sender: Sender) -> None:
        """Refuse a call before any work, if the caller or bulk calls already fill their share of the queue.

        Raises:
            ShareExceeded: The share of the caller, or of bulk calls, is full.
        """
        if not self._has_tables:  # tables need no queue
            self._scheduler.check_share(sender)

    async def run(
        self,
        reply: EncodeReply,
        deadline: float = math.inf,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
    ) -> None:
        """Compute the outputs of prepared sequences; see `Scheduler.run` for further errors.

        Raises:
            ResponseTooLarge: With sparse weights, the reply is over the limit.
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
            self.count_sparse(reply)

    def count_sparse(self, reply: EncodeReply) -> None:
        """Add the bytes of computed sparse weights to the estimated bytes of a reply.

        Raises:
            ResponseTooLarge: The reply is over the limit.
        """
        reply.estimated_bytes = self._reply_size.check_sparse(
            reply.estimated_bytes, reply.plan, reply.sequences, padded=reply.padded
        )

    async def _look_up(self, reply: EncodeReply, static: StaticSparse) -> None:
        """Look up the weights of each sequence in a table."""
        for i, sequence in enumerate(reply.sequences):
            if i and not i % _STATIC_TEXTS_AT_ONCE:
                await asyncio.sleep(0)
            sequence.outputs = static_weights(static, sequence.input, reply.plan.outputs)

    async def tokenize(
        self,
        call: TokenizeCall,
        hold: Callable[[int], None],
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
    ) -> TokenizeReply:
        """Tokenize texts in pieces, each when the sender's turn comes. The texts do not enter the queue of the model.

        Args:
            call: The texts.
            hold: Called with the estimated bytes of each piece of the reply, before the next piece is tokenized.
            span: Traces the call.
            sender: The caller and the priority.

        Raises:
            RequestError: The call cannot succeed. The error names the text, its value and the limit.
            ResponseTooLarge: The reply is over the limit.
            QueueFull: Too much text is waiting.
        """
        texts = call.texts
        self._check_number(len(texts))
        if self.tokenizer is None:
            raise InvalidField(FieldPath(RequestField.INPUTS), f"model {self.bundle.name} has no tokenizer")
        checker, rules = self._planner.rules(texts, call.task, call.prompt_name, truncate=call.truncate)
        sequences: list[TokenSequence] = []
        reply_bytes = 0
        for begin, end in pieces(texts):
            try:
                found, _ = await self._check_inputs(checker, texts[begin:end], rules, span, sender)
            except RequestError as error:
                error.move(begin)
                raise
            sequences += found
            size = self._reply_size.check_tokens(sequences, len(texts), call.include_token_strings)
            hold(size - reply_bytes)
            reply_bytes = size
        return TokenizeReply(sequences, reply_bytes)

    def check_length(self, field: FieldPath, count: int, task: Task) -> None:
        """Check the length of an input that may not be cut.

        Raises:
            SequenceTooLong: The input is too long for its task.
        """
        limit = self._planner.limits.get((task, False))
        if limit is not None:  # None if the model lacks the task; then the call is refused later
            check_length(field, count, limit)

    @property
    def max_inspect_tokens(self) -> int:
        """The maximum number of tokens of an inspection; 0 if the model cannot be inspected."""
        return 0 if self._inspect_lane is None else min(self.limits.max_inspect_tokens, self.bundle.max_sequence_tokens)

    @contextlib.asynccontextmanager
    async def inspect(
        self,
        call: InspectCall,
        span: RequestSpan | None = None,
        sender: Sender = ANY_SENDER,
        charge: Callable[[Sequence[TokenSequence]], None] = lambda _: None,
    ) -> AsyncGenerator[InspectReply]:
        """Run one input and return tensors from inside the model, such as hidden states.

        A text is tokenized when the sender's turn comes. Before the run, `charge` is called with the sequence. The
        inspection holds a slot until the `async with` block ends.

        Raises:
            InspectUnavailable: The bundle has no graph for inspections, or inspections are disabled.
            RequestError: The call cannot succeed. The error names the field, its value and the limit.
            QueueFull: Too many inspections are pending.
            ShareExceeded: Too many inspections of this caller are pending.
            InferenceFailed: The model returned NaN or infinity.
        """
        lane = self.check_inspectable()
        checker, rules = self._planner.rules([call.input], call.task, call.prompt_name, truncate=call.truncate)
        if rules.limit.tokens > self.max_inspect_tokens:
            name = f"max_inspect_tokens of {self.bundle.name}"
            limit = LengthLimit(self.max_inspect_tokens, name, call.task, call.truncate)
            rules = rules._replace(limit=limit)
        with lane.place(sender) as place:
            (sequence,), tokenize_seconds = await self._check_inputs(checker, [call.input], rules, span, sender)
            tokens = len(sequence.input)
            if tokens > self.max_inspect_tokens:
                raise SequenceTooLong(
                    FieldPath(RequestField.TASK),
                    "with {task} the text has {tokens} tokens, and an inspection takes at most {most} tokens "
                    "(max_inspect_tokens of {model})",
                    task=call.task,
                    tokens=tokens,
                    most=self.max_inspect_tokens,
                    model=self.bundle.name,
                )
            sequence.cost = inspection_cost(self.bundle, tokens, call.wanted)
            charge([sequence])
            came_at = self._clock.now()

            def on_start() -> None:
                sequence.started_at = self._clock.now()

            inspection = await lane.run(
                place, sequence.input, call.wanted, sequence.attended, cost=sequence.cost, on_start=on_start
            )
            if span is not None:
                began = came_at + inspection.queue_seconds
                span.stage("queue", came_at, began)
                span.stage("compute", began, began + inspection.compute_seconds)
            yield InspectReply(sequence, inspection, tokenize_seconds)

    async def close(self) -> None:
        """Stop the engines, and wait for their current work. A second `close` waits for the end of the first."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._scheduler.close()
        if self._inspect_lane is not None:
            await self._inspect_lane.close()

    def check_inspectable(self) -> InspectLane:
        """Return the lane of inspections.

        Raises:
            InspectUnavailable: The bundle has no graph for inspections, or inspections are disabled.
        """
        if self._inspect_lane is None:
            missing = self.bundle.inspect_graph is None
            why = "its bundle has no inspection graph" if missing else "inspections are off on this server"
            raise InspectUnavailable(f"model {self.bundle.name} cannot be inspected: {why}")
        return self._inspect_lane

    async def _check_inputs(
        self,
        checker: InputChecker,
        inputs: Sequence[SentInput],
        rules: InputRules,
        span: RequestSpan | None,
        sender: Sender,
    ) -> tuple[list[TokenSequence], float]:
        """Return the sequences of inputs, and the time for tokenizing texts. Metrics and the span get this time."""
        began = ended = self._clock.now()
        try:
            sequences = await checker.check(inputs, rules, sender)
        finally:
            if is_text(inputs[0]) or any(is_text(it) for it in inputs):
                ended = self._clock.now()
                self.observer.tokenized(ended - began)
                if span is not None:
                    span.stage("tokenize", began, ended)
        if span is not None:
            span.counted(sum(len(it.input) for it in sequences))
        return sequences, ended - began

    def _check_number(self, count: int) -> None:
        """Refuse a wrong number of inputs."""
        if count == 0:
            raise EmptyInputs(FieldPath(RequestField.INPUTS), "must hold at least 1 sequence; was empty")
        if count > self.limits.max_sequences:
            raise TooManyInputs(
                FieldPath(RequestField.INPUTS),
                f"must hold at most {self.limits.max_sequences} sequences (max_request_sequences); was {count}",
            )
