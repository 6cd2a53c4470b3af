"""Loads that leave the machine to the server: a closed and an open loop over `LightConnection`."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from comparison.load import METHOD
from grpc import StatusCode

from curves.http2 import Answer, LightConnection
from encserve_cli.load import Call
from encserve_cli.load.generate import CHECKED_ONE_IN
from encserve_cli.load.schedule import poisson_times

_PATIENCE_SECONDS = 60.0  # for the last answers


@dataclass(slots=True)
class LightResult:
    """What a load gave.

    Throughput counts the calls that were answered while it was measured; everything else counts those that were due
    then, or in a closed loop answered, and however late: so a backlog that grows flatters neither.

    Attributes:
        seconds: How long it was measured.
        answered: How many good calls were answered in that time.
        answered_tokens: Those that they had.
        latencies: Seconds of the good calls; in an open loop from when a call was due.
        refused: Seconds of the calls that ended with RESOURCE_EXHAUSTED.
        errors: All other calls, by status.
        lateness: How many seconds after it was due each call was sent; open loop only.
        cpu_seconds: What making the load took in that time.
    """

    seconds: float
    answered: int = 0
    answered_tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    lateness: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def calls_per_second(self) -> float:
        """Good ones."""
        return self.answered / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of good calls."""
        return self.answered_tokens / self.seconds

    def answer(self, call: Call, code: StatusCode) -> None:
        """Counts a call that is answered now."""
        if code is StatusCode.OK:
            self.answered += 1
            self.answered_tokens += call.tokens

    def end(self, code: StatusCode, seconds: float) -> None:
        """Counts how a call ended, and after how long."""
        if code is StatusCode.OK:
            self.latencies.append(seconds)
        elif code is StatusCode.RESOURCE_EXHAUSTED:
            self.refused.append(seconds)
        else:
            self.errors[code.name] += 1


class _Checks:
    """Reads an answer in so many; the others are only counted.

    Attributes:
        answers: How many good answers there were.
    """

    def __init__(self) -> None:
        self.answers = 0

    def see(self, call: Call, answer: Answer) -> None:
        """Looks at an answer, or not.

        Raises:
            ProtocolError: It is none to this call.
        """
        if answer.code is StatusCode.OK:
            if self.answers % CHECKED_ONE_IN == 0:
                call.check(answer.message)
            self.answers += 1


def light_closed_loop(
    target: str, calls: Sequence[Call], *, callers: int, seconds: float, warmup_seconds: float
) -> LightResult:
    """So many callers, each of whom sends the next call when the last one is answered."""
    result, checks = LightResult(seconds), _Checks()
    order = itertools.cycle(calls)
    out: dict[int, tuple[Call, float]] = {}
    with closing(LightConnection(target, METHOD)) as connection:

        def send() -> None:
            call = next(order)
            out[connection.send(call.data)] = (call, time.perf_counter())

        for _ in range(callers):
            send()
        begin = time.perf_counter() + warmup_seconds
        end = begin + seconds
        cpu = _CpuTime(begin, end)
        while (now := time.perf_counter()) < end:
            cpu.look(now)
            for answer in connection.answers(end - now):
                call, sent = out.pop(answer.stream)
                now = time.perf_counter()
                checks.see(call, answer)
                if begin <= now < end:
                    result.answer(call, answer.code)
                    result.end(answer.code, now - sent)
                send()
        result.cpu_seconds = cpu.seconds()
    return result


def light_open_loop(
    target: str,
    calls: Sequence[Call],
    *,
    rate_per_second: float,
    seconds: float,
    seed: int,
    warmup_seconds: float = 2.0,
) -> LightResult:
    """Calls at random times (Poisson) whatever became of those before; waits for all answers.

    Raises:
        TimeoutError: Some never came.
    """
    result, checks = LightResult(seconds), _Checks()
    whole = warmup_seconds + seconds
    due = poisson_times(rate_per_second, whole, seed)
    out: dict[int, int] = {}
    with closing(LightConnection(target, METHOD)) as connection:
        begin = time.perf_counter()
        cpu = _CpuTime(begin + warmup_seconds, begin + whole)
        number = 0
        while number < len(due) or out:
            now = time.perf_counter() - begin
            cpu.look(now + begin)
            while number < len(due) and due[number] <= now:
                out[connection.send(calls[number % len(calls)].data)] = number
                if due[number] >= warmup_seconds:
                    result.lateness.append(now - due[number])
                number += 1
                now = time.perf_counter() - begin
            if now > whole + _PATIENCE_SECONDS:
                raise TimeoutError(f"{len(out)} calls were never answered")
            answers = connection.answers(due[number] - now if number < len(due) else 1.0)
            now = time.perf_counter() - begin
            for answer in answers:
                which = out.pop(answer.stream)
                call = calls[which % len(calls)]
                checks.see(call, answer)
                if warmup_seconds <= now < whole:
                    result.answer(call, answer.code)
                if due[which] >= warmup_seconds:
                    result.end(answer.code, now - due[which])
        result.cpu_seconds = cpu.seconds()
    return result


class _CpuTime:
    """This process' CPU time between two moments."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        self._times: list[float] = []

    def look(self, now: float) -> None:
        """Notes the beginning and the end, each once; to be called often."""
        if now >= (self._begin, self._end, float("inf"))[len(self._times)]:
            self._times.append(time.process_time())

    def seconds(self) -> float:
        """Between them, or until now."""
        first, last, *_ = [*self._times, time.process_time(), time.process_time()]
        return last - first
