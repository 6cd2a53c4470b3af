"""What the protocol's two front ends have in common: whether models are ready, what there is, and inference."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from encserve_server.calls import Call, Calls
from encserve_server.errors import DeadlineExpired, InvalidField, ModelNotFound, NotReady
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.open_inference.requests import (
    InferCall,
    SentRequest,
    check_length,
    count_tokens,
    decode_call,
    decode_request,
)

PLATFORM = "encserve"
EXTENSIONS = ("model_configuration", "statistics")
# Ids are echoed, and are in traces.
_MAX_ID_CHARS = 1024

Build = Callable[[ServedModel, InferCall, EncodeReply], bytes]


@dataclass(slots=True)
class Spent:
    """How often something was done, and how long that took."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """It was done once more."""
        self.count += 1
        self.seconds += seconds

    @property
    def ns(self) -> int:
        """How long, in nanoseconds."""
        return round(self.seconds * 1e9)


@dataclass(slots=True)
class Statistics:
    """What the calls of this protocol for one model have taken; owned by the event loop.

    Attributes:
        success: Calls that were answered, from their arrival to their answer.
        fail: Calls that were not.
        queue: The longest wait of an answered call's sequences for their batch.
        compute_input: Tokenizing.
        compute_infer: The longest run of a batch with a call's sequences.
        compute_output: Building the answer.
        last_at_ms: When the last was answered, in milliseconds since 1970.
    """

    success: Spent = field(default_factory=Spent)
    fail: Spent = field(default_factory=Spent)
    queue: Spent = field(default_factory=Spent)
    compute_input: Spent = field(default_factory=Spent)
    compute_infer: Spent = field(default_factory=Spent)
    compute_output: Spent = field(default_factory=Spent)
    last_at_ms: int = 0

    def answered(self, reply: EncodeReply, encode_seconds: float, seconds: float) -> None:
        """A call has been answered after so long; building the answer of its reply is a part of that."""
        self.last_at_ms = time.time_ns() // 1_000_000
        self.success.add(seconds)
        self.compute_input.add(reply.tokenize_seconds)
        queue_seconds, compute_seconds = reply.seconds()
        self.queue.add(queue_seconds)
        self.compute_infer.add(compute_seconds)
        self.compute_output.add(encode_seconds)


# What `Statistics` say of each part of a call, by the protocol's names.
STATISTICS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A model as the repository's index has it.

    Attributes:
        name: Its name.
        version: Its version.
        state: "READY" or "UNAVAILABLE".
        reason: Why it is not ready; empty if it is.
    """

    name: str
    version: str
    state: str
    reason: str


class OpenInference:
    """The models, as this protocol sees them; owned by the event loop."""

    def __init__(self, calls: Calls) -> None:
        """Takes the calls of all protocols."""
        self._calls = calls
        self._catalog = calls.catalog
        self._statistics: WeakKeyDictionary[ServedModel, Statistics] = WeakKeyDictionary()

    def is_ready(self) -> bool:
        """Whether every model can be relied on; health says the same."""
        return self._are_ready(self._catalog.all())

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether one model can be relied on; one that is not there cannot."""
        try:
            return self._are_ready([self._catalog.resolve(name, version)])
        except (ModelNotFound, NotReady):
            return False

    def _are_ready(self, models: list[ServedModel]) -> bool:
        draining = self._calls.draining.is_set()
        return bool(models) and not draining and not any(model.not_ready_reason() for model in models)

    def versions(self, model: ServedModel) -> list[str]:
        """The versions of a model that are served."""
        return [it.bundle.version for it in self._catalog.all() if it.bundle.name == model.bundle.name]

    def index(self, call: Call, *, only_ready: bool) -> list[IndexEntry]:
        """Every version of every model that the caller may use, the default one first."""
        reasons = [(model, model.not_ready_reason()) for model in self._catalog.all() if call.may_use(model)]
        return [
            IndexEntry(*model.key, "UNAVAILABLE" if reason else "READY", reason)
            for model, reason in reasons
            if not (only_ready and reason)
        ]

    def statistics(self, call: Call, name: str, version: str) -> list[tuple[ServedModel, Statistics]]:
        """What the calls of this protocol have taken; of every model that the caller may use, where none is named.

        Raises:
            EncserveError: Whatever `Call.resolve` raises.
        """
        found = [call.resolve(0, name, version)] if name else filter(call.may_use, self._catalog.all())
        return [(it, self._statistics.get(it, Statistics())) for it in found]

    async def infer(
        self,
        call: Call,
        model: ServedModel,
        sent: SentRequest,
        build: Build,
        *,
        check: Callable[[InferCall], None] = lambda _: None,
        growth: Callable[[InferCall], float] = lambda _: 1.0,
    ) -> bytes:
        """Answers a request.

        Args:
            call: The call.
            model: The model, as the call resolved it.
            sent: The request.
            build: Makes the answer's bytes; called in a thread where there are many.
            check: Refuses a request before its data are decoded.
            growth: How many bytes the answer has, at most, for each of raw numbers.

        Raises:
            DeadlineExpired: The request's timeout has passed.
            EncserveError: See `check` and `Call.encode`.
        """
        clock = self._calls.clock
        began = clock.now()
        statistics = self._statistics.setdefault(model, Statistics())
        built: list[tuple[EncodeReply, float]] = []

        try:
            if len(sent.request_id) > _MAX_ID_CHARS:
                raise InvalidField("id", f"must be at most {_MAX_ID_CHARS} characters; was {len(sent.request_id)}")
            infer = decode_request(sent, model)

            def timed(reply: EncodeReply) -> bytes:
                began = clock.now()
                data = build(model, infer, reply)
                built.append((reply, clock.now() - began))  # perhaps in a thread, which counts nothing
                return data

            if call.span is not None:
                call.span.about(*model.key, infer.count)
            longest = model.bundle.max_sequence_tokens
            model.check_counts(infer.count, count_tokens(infer, longest), sent.output_count)
            check_length(infer, model)
            async with _in_time(call, infer.parameters.timeout_us, began):
                check(infer)
                decoded = decode_call(infer, longest, model.limits.max_text_bytes)
                response = await call.encode(model, decoded, timed, growth(infer))
        except BaseException:
            statistics.fail.add(clock.now() - began)
            raise
        statistics.answered(*built[0], clock.now() - began)
        return response


@contextlib.asynccontextmanager
async def _in_time(call: Call, timeout_us: int, now: float) -> AsyncGenerator[None]:
    """Ends a block with DeadlineExpired after so many microseconds; 0 for never.

    The call's own deadline becomes the sooner one, so that what waits in the queue is dropped by it.
    """
    if not timeout_us:
        yield
        return
    call.deadline = min(call.deadline, now + timeout_us / 1e6)
    try:
        async with asyncio.timeout(timeout_us / 1e6):
            yield
    except TimeoutError:
        problem = f"the deadline has passed: the request's timeout is {timeout_us} microseconds"
        raise DeadlineExpired(problem) from None
