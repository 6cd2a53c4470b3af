"""A fake of `Wire`, the interface between the client's logic and the network, for tests of this logic.

The fake's coroutines never suspend and never sleep. The fake also has its own clock.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from encserve_client._logic.failures import Failure
from encserve_client._logic.inspecting import InspectAssembler
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import Answered, Event, Failed, Rpc
from encserve_proto.v1 import encoder_pb2 as pb

Outcome = tuple[float, Any]
"""The delay in seconds, and the outcome. An outcome is a response, a list of responses to Inspect, or a `Failure`."""


@dataclass
class FakeWire:
    """A wire that gets the answers from a function of the test. Time passes only in `wait`.

    Attributes:
        answer: A function that takes an RPC and a request, and returns the delay and the outcome.
        time: The current time, in seconds.
        sent: The time at which each message was sent.
        most_out: The largest number of messages that waited for an answer at the same time.
        is_closed: Whether `aclose` was called.
    """

    answer: Callable[[Rpc, Any], Outcome] | None = None
    time: float = 0.0
    sent: list[float] = field(default_factory=list)
    most_out: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        """Start with an empty heap of events."""
        self._events: list[tuple[float, int, Event]] = []  # a heap of (time, order, event)
        self._order = itertools.count()
        self._out = 0

    def now(self) -> float:
        """See `Wire`."""
        return self.time

    def start(self, rpc: Rpc, message: Message, timeout_seconds: float | None, *, alone: bool) -> None:
        """See `Wire`."""
        assert self.answer is not None, "no unary answers were scripted"
        delay, outcome = self.answer(rpc, message.request)
        if timeout_seconds is not None and delay > timeout_seconds:
            delay, outcome = timeout_seconds, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if isinstance(message.request, pb.InspectRequest) and not isinstance(outcome, Failure):
            outcome = gather(message.request, outcome)
        event: Event = Failed(message, outcome) if isinstance(outcome, Failure) else Answered(message, outcome)
        self.sent.append(self.time)
        self._out += 1
        self.most_out = max(self.most_out, self._out)
        self._post(delay, event)

    def read_inputs(self, count: int) -> None:
        """See `Wire`. Only the asyncio client reads async iterables."""
        raise NotImplementedError

    def has_event(self) -> bool:
        """See `Wire`."""
        return bool(self._events) and self._events[0][0] <= self.time

    async def wait(self, seconds: float | None) -> Event | None:
        """See `Wire`. Without an event and without a time limit, fail the test, because the wait would never end."""
        while self._events and (seconds is None or self._events[0][0] <= self.time + seconds):
            time, _, event = heapq.heappop(self._events)
            if seconds is not None:
                seconds -= max(time - self.time, 0.0)
            self.time = max(self.time, time)
            self._out -= 1
            return event
        if seconds is None:
            raise AssertionError("the client waits without a time limit, and no event is due")
        self.time += seconds
        return None

    async def aclose(self) -> None:
        """See `Wire`."""
        self.is_closed = True

    def _post(self, delay: float, event: Event) -> None:
        heapq.heappush(self._events, (self.time + delay, next(self._order), event))


class WireServer:
    """A fake server behind a `FakeWire`. It replies to GetModel with `info`, and to Encode with the result of `encode`.

    Attributes:
        sent: The token ids of all inputs of each Encode request.
        sizes: The number of inputs of each Encode request.
        n_get_model: The number of GetModel requests.
    """

    def __init__(self, encode: Callable[[pb.EncodeRequest], Outcome], **limits: Any) -> None:
        """`limits` are further fields of `info`."""
        self.encode = encode
        self.info = pb.ModelInfo(fingerprint="f", name="m", d_model=2, max_sequence_tokens=4096, **limits)
        self.sent: list[list[int]] = []
        self.sizes: list[int] = []
        self.n_get_model = 0
        self.wire = FakeWire(self._answer)

    def _answer(self, rpc: Rpc, request: Any) -> Outcome:
        if rpc == "GetModel":
            self.n_get_model += 1
            return 0.0, pb.GetModelResponse(model=self.info)
        self.sent.append(ids_in(request))
        self.sizes.append(len(request.inputs))
        return self.encode(request)


def ids_in(request: pb.EncodeRequest) -> list[int]:
    """Return the token ids of all inputs of a message."""
    return [token for item in request.inputs for token in item.token_ids.ids]


def gather(request: pb.InspectRequest, parts: Iterable[pb.InspectResponse]) -> InspectAssembler:
    """Gather the messages of a reply to Inspect. Stop at the first error."""
    assembler = InspectAssembler(request)
    for part in parts:
        if not assembler.add(part):
            break
    return assembler


def echo(request: pb.EncodeRequest, fingerprint: str = "f") -> pb.EncodeResponse:
    """Return an answer in which the output of each token is the token id."""
    ids = [list(item.token_ids.ids) for item in request.inputs]
    tensor = pb.RaggedTensor(
        kind=pb.OUTPUT_KIND_TOKENS,
        data_type=pb.DATA_TYPE_FLOAT32,
        width=1,
        lengths=map(len, ids),
        data=np.concatenate(ids).astype("<f4").tobytes(),
    )
    sequences = [pb.SequenceInfo(token_count=len(row), original_token_count=len(row)) for row in ids]
    return pb.EncodeResponse(outputs=[tensor], sequences=sequences, fingerprint=fingerprint)


def counting(n: int, read: list[int]) -> Iterator[list[int]]:
    """Yield the inputs [1], [2], … [n]. Append the number of each requested input to `read`."""
    for i in range(1, n + 1):
        read.append(i)
        yield [i]
