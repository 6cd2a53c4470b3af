"""What the light generator counts, on a connection whose answers come at known times, and on a clock of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from curves import light_load
from curves.http2 import Answer
from curves.light_load import light_closed_loop, light_open_loop
from grpc import StatusCode

from encserve_cli.load.generate import CHECKED_ONE_IN
from encserve_cli.load.schedule import poisson_times

SMALLEST_WAIT = 2.0**-20  # seconds; times are sums of floats, so a wait for a moment may end next to it
CLOSE = 1e-4


@dataclass
class FakeCall:
    """Of so many tokens."""

    data: bytes
    tokens: int
    checked: int = 0

    def check(self, message: bytes) -> None:
        """Counts; every answer is right."""
        assert message == self.data
        self.checked += 1


@dataclass
class World:
    """A connection and the clock that it is on: time passes where answers are waited for, or sending is slow.

    Attributes:
        answered_at: When the call of this number is answered that is sent at this time.
        code: How.
        sending: How long it takes to send it.
    """

    answered_at: Callable[[int, float], float]
    code: Callable[[int], StatusCode] = lambda _: StatusCode.OK
    sending: Callable[[int], float] = lambda _: 0.0
    now: float = 64.0
    sent: list[bytes] = field(default_factory=list)
    due: dict[int, float] = field(default_factory=dict)
    is_closed: bool = False

    def send(self, message: bytes) -> int:
        number = len(self.sent)
        self.now += self.sending(number)
        self.sent.append(message)
        self.due[number] = self.answered_at(number, self.now)
        return number

    def answers(self, timeout_seconds: float) -> list[Answer]:
        """Those that are there by the time at which the first is, or none in that time."""
        ends = self.now + max(timeout_seconds, SMALLEST_WAIT)
        self.now = max(self.now, min([ends, *self.due.values()]))
        there = sorted((at, number) for number, at in self.due.items() if at <= self.now)
        for _, number in there:
            del self.due[number]
        return [Answer(number, self.code(number), bytearray(5) + self.sent[number]) for _, number in there]

    def close(self) -> None:
        self.is_closed = True


Enter = Callable[[World], list[Any]]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Lets the generator live in a world, and gives calls to make there: of 3, 1, 20 and 7 tokens."""

    def enter_one(world: World) -> list[Any]:
        monkeypatch.setattr(light_load, "LightConnection", lambda target, method: world)
        # Of the CPU's time it takes a quarter of what passes.
        clock = SimpleNamespace(perf_counter=lambda: world.now, process_time=lambda: world.now / 4)
        monkeypatch.setattr(light_load, "time", clock)
        return [FakeCall(bytes([tokens]), tokens) for tokens in (3, 1, 20, 7)]

    return enter_one


def one_after_the_other(seconds: float) -> Callable[[int, float], float]:
    """A server that takes so long for a call, and has the others wait."""
    free_at = 0.0

    def answered_at(_: int, sent: float) -> float:
        nonlocal free_at
        free_at = max(free_at, sent) + seconds
        return free_at

    return answered_at


def near(values: Any) -> Any:
    return pytest.approx(values, abs=CLOSE)


def test_an_open_loop_counts_every_call_that_was_due(enter: Enter) -> None:
    """Latencies of those that were due while it was measured, throughput of those that were answered then."""
    world = World(lambda _, sent: sent + 0.03)
    calls = enter(world)
    result = light_open_loop("", calls, rate_per_second=200, seconds=1.0, seed=1, warmup_seconds=0.2)
    due = poisson_times(200, 1.2, seed=1).tolist()
    assert world.sent == [calls[number % 4].data for number in range(len(due))]
    measured = [at for at in due if at >= 0.2]
    assert result.latencies == near([0.03] * len(measured))
    assert result.lateness == near([0.0] * len(measured))
    in_time = [number for number, at in enumerate(due) if 0.2 <= at + 0.03 < 1.2]
    assert 0 < len(in_time) != len(measured)
    assert (result.answered, result.calls_per_second) == (len(in_time), len(in_time))
    assert result.answered_tokens == sum(calls[number % 4].tokens for number in in_time)
    assert (result.refused, result.errors.total()) == ([], 0)
    assert result.cpu_seconds == pytest.approx(0.25, abs=0.02)  # looked at whenever something happens
    assert sum(call.checked for call in calls) == -(-len(due) // CHECKED_ONE_IN)
    assert world.is_closed


def test_what_is_answered_after_the_end_is_no_throughput(enter: Enter) -> None:
    """Three times what a server stands: in the end every call is answered, but the server was no faster for it."""
    calls = enter(World(one_after_the_other(0.02)))  # 50 a second
    result = light_open_loop("", calls, rate_per_second=150, seconds=1.0, seed=0, warmup_seconds=0.3)
    due = poisson_times(150, 1.3, seed=0)
    free_at, latencies = 0.0, []
    for at in due.tolist():
        free_at = max(free_at, at) + 0.02
        latencies.append(free_at - at)
    assert result.latencies == near(latencies[-(due >= 0.3).sum() :])
    assert max(result.latencies) > 1.0
    assert len(result.latencies) > 100
    assert abs(result.answered - 50) <= 1


def test_latency_counts_from_when_a_call_was_due(enter: Enter) -> None:
    """Whether the server stands still for half a second or the generator; it tells its own lateness apart."""
    due = poisson_times(100, 1.0, seed=3).tolist()
    still = World(lambda _, sent: max(sent, 64.0 + due[10] + 0.5) if sent >= 64.0 + due[10] else sent)
    slow = World(lambda _, sent: sent, sending=lambda number: 0.5 if number == 10 else 0.0)
    waits = [max(due[10] + 0.5 - at, 0.0) if at >= due[10] else 0.0 for at in due]
    assert sum(wait > 0.1 for wait in waits) > 20
    for world, lateness in ((still, [0.0] * len(due)), (slow, [*waits[:10], 0.0, *waits[11:]])):
        result = light_open_loop("", enter(world), rate_per_second=100, seconds=1.0, seed=3, warmup_seconds=0)
        assert result.latencies == near(waits)
        assert result.lateness == near(lateness)


CODES = [StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE, StatusCode.OK, StatusCode.INTERNAL]


def test_refusals_and_errors_are_counted_apart(enter: Enter) -> None:
    world = World(lambda _, sent: sent + 0.01, code=lambda number: CODES[number % 5])
    result = light_open_loop("", enter(world), rate_per_second=100, seconds=0.8, seed=0, warmup_seconds=0)
    count = len(poisson_times(100, 0.8, seed=0))
    ends = [CODES[number % 5] for number in range(count)]
    assert result.latencies == near([0.01] * ends.count(StatusCode.OK))
    assert result.refused == near([0.01] * ends.count(StatusCode.RESOURCE_EXHAUSTED))
    assert result.errors == {name: ends.count(StatusCode[name]) for name in ("UNAVAILABLE", "INTERNAL")}
    closed = light_closed_loop(
        "", enter(World(lambda _, sent: sent + 0.01, world.code)), callers=1, seconds=0.505, warmup_seconds=0
    )
    assert (len(closed.latencies), closed.answered, len(closed.refused)) == (20, 20, 10)
    assert closed.errors == {"UNAVAILABLE": 10, "INTERNAL": 10}


def test_calls_that_are_never_answered(enter: Enter) -> None:
    world = World(lambda number, sent: sent if number else float("inf"))
    with pytest.raises(TimeoutError, match="^1 calls were never answered$"):
        light_open_loop("", enter(world), rate_per_second=100, seconds=1.0, seed=0, warmup_seconds=0)
    assert world.is_closed


def test_a_closed_loop_counts_what_is_answered_while_it_is_measured(enter: Enter) -> None:
    """Each caller sends the next call when it is answered; what is still out at the end is nobody's."""
    world = World(one_after_the_other(0.0625))
    calls = enter(world)
    result = light_closed_loop("", calls, callers=4, seconds=1.0, warmup_seconds=0.53125)
    # An answer every sixteenth of a second, from the ninth on while it is measured; each has waited for three others.
    assert world.sent == [calls[number % 4].data for number in range(4 + 24)]
    assert result.latencies == near([0.25] * 16)
    assert (result.answered, result.calls_per_second, result.answered_tokens) == (16, 16.0, 4 * 31)
    assert result.tokens_per_second == 124.0
    assert result.cpu_seconds == pytest.approx(0.25, abs=0.02)
    assert (result.refused, result.errors.total(), result.lateness) == ([], 0, [])
    assert world.is_closed
