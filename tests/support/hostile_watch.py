"""Watches a server under attack: the latency of health checks, the replies to an ordinary caller, and the memory.

This file is also a program that sends the health checks and the ordinary caller's requests. The program runs in a
separate process, so that the attack does not delay the checks.
"""

import contextlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2
from real_server import RealServer

from encserve_proto.v1 import encoder_pb2

logger = logging.getLogger("hostile")

MIB = 2**20
CHECK_SECONDS, ORDINARY_SECONDS, MEMORY_SECONDS = 0.01, 0.1, 0.2
ANSWER_SECONDS = 10.0
SLACK_BYTES = 100 * MIB
# If the server exceeds the test's memory limit by this much, the watch kills the server. The machine has other users.
_KILLED_BEYOND_BYTES = 1024 * MIB
# The key of the ordinary caller. Servers without keys ignore it.
KEY = "encserve-ordinary"
_CHECK, _ENCODE = "/grpc.health.v1.Health/Check", "/encserve.v1.EncoderService/Encode"
_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()


def parse_seconds() -> float:
    """Return the time to parse a costly protobuf message of 4 MiB, in seconds, as the median of five runs."""
    data = b"\x1a\x00" * (2 * MIB)  # about 2 million empty inputs, each of two bytes
    return statistics.median(_parse_once(data) for _ in range(5))


def _parse_once(data: bytes) -> float:
    began = time.perf_counter()
    encoder_pb2.EncodeRequest.FromString(data)
    return time.perf_counter() - began


class Sample(NamedTuple):
    """One call: the start in seconds of the monotonic clock, the duration in seconds, and the reply."""

    began: float
    seconds: float
    answer: str


class Health(NamedTuple):
    """Latencies and replies of one phase.

    Attributes:
        p50_ms: The median latency of health checks.
        p99_ms: The 99th percentile of the latency of health checks.
        max_ms: The maximum latency of health checks.
        answers: The number of health replies other than SERVING, by the text of the reply.
        ordinary: The number of replies to the ordinary caller, by the text of the reply.
        ordinary_max_ms: The duration of the ordinary caller's longest call.
    """

    p50_ms: float
    p99_ms: float
    max_ms: float
    answers: dict[str, int]
    ordinary: dict[str, int]
    ordinary_max_ms: float

    @classmethod
    def of(cls, checks: Sequence[Sample], ordinary: Sequence[Sample]) -> "Health":
        """Compute the percentiles and counts of these calls."""
        latencies = sorted(_as_sent_in_time(checks))
        assert len(latencies) >= 100, "too few health checks"
        return cls(
            p50_ms=round(latencies[len(latencies) // 2] * 1000, 1),
            p99_ms=round(latencies[len(latencies) * 99 // 100] * 1000, 1),
            max_ms=round(latencies[-1] * 1000, 1),
            answers=dict(Counter(check.answer for check in checks if check.answer != "SERVING")),
            ordinary=dict(Counter(call.answer for call in ordinary)),
            ordinary_max_ms=round(max((call.seconds for call in ordinary), default=0) * 1000, 1),
        )


def _as_sent_in_time(checks: Sequence[Sample]) -> Iterator[float]:
    """Return the latencies that the checks would have if each check was sent on time, in seconds.

    A late reply delays the next checks. For each delayed check, add the time from the planned start to the late reply.
    """
    for check in checks:
        left = check.seconds
        while left > 0:
            yield left
            left -= CHECK_SECONDS


class Phase:
    """A named part of a test.

    Attributes:
        level_bytes: The server's memory at the start.
        peak_bytes: The largest memory so far.
        health: Latencies and replies. Set at the end of the watch.
    """

    def __init__(self, name: str, level_bytes: int) -> None:
        self.name = name
        self.level_bytes = level_bytes
        self.peak_bytes = level_bytes
        self.began = time.monotonic()
        self.ended = 0.0
        self.health: Health

    def __str__(self) -> str:
        level, peak = self.level_bytes // MIB, self.peak_bytes // MIB
        return f"{self.name}: memory {level} to {peak} MiB, {self.health}"


class Watch:
    """Watches a server from construction until `end`."""

    def __init__(self, server: RealServer, budget_bytes: int) -> None:
        self._pid = server.process.pid
        self._kill = server.process.kill
        self._bound_bytes = self.resident_bytes() + budget_bytes + SLACK_BYTES + _KILLED_BEYOND_BYTES
        self._phases: list[Phase] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._prober = subprocess.Popen(
            [sys.executable, __file__, server.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._sampler.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Begin a phase. The phase ends at the end of the block."""
        phase = Phase(name, self.resident_bytes())
        self._phases.append(phase)
        try:
            yield phase
        finally:
            phase.ended = time.monotonic()

    def end(self) -> None:
        """Stop the calls and the memory measurements, and compute `health` for all phases."""
        self._over.set()
        self._sampler.join()
        try:
            output, _ = self._prober.communicate("", timeout=2 * ANSWER_SECONDS)
        finally:
            self._prober.kill()
        checks, ordinary = ([Sample(*call) for call in calls] for calls in json.loads(output))
        for phase in self._phases:
            phase.health = Health.of(_within(phase, checks), _within(phase, ordinary))
            logger.info("%s", phase)

    def resident_bytes(self) -> int:
        """Return the server's resident memory in bytes. If the server has ended, return 0."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0

    def wait_for_level(self, level_bytes: int, seconds: float = ANSWER_SECONDS) -> int:
        """Wait until the memory is at most `level_bytes`, but no longer than `seconds`. Return the memory in bytes."""
        ends = time.monotonic() + seconds
        while (now := self.resident_bytes()) > level_bytes and time.monotonic() < ends:
            time.sleep(MEMORY_SECONDS)
        return now

    def _sample(self) -> None:
        while not self._over.wait(MEMORY_SECONDS):
            now = self.resident_bytes()
            for phase in self._phases[-1:]:
                phase.peak_bytes = max(phase.peak_bytes, now)
            if now > self._bound_bytes:
                self._kill()


def _within(phase: Phase, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if phase.began <= sample.began <= phase.ended]


@contextlib.contextmanager
def watching(server: RealServer, budget_mib: int) -> Iterator[Watch]:
    """Watch a server until the end of the block. After the block, `health` is set in each phase."""
    watch = Watch(server, budget_mib * MIB)
    try:
        yield watch
    finally:
        watch.end()


class _Prober:
    """Sends calls at a fixed rate until stdin ends."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._over = threading.Event()
        request = encoder_pb2.EncodeRequest()
        request.inputs.add().token_ids.ids.append(1)
        request.options.outputs.add(kind=encoder_pb2.OUTPUT_KIND_MEAN)
        self._checks: list[Sample] = []
        self._ordinary: list[Sample] = []
        self._threads = [
            threading.Thread(target=self._call, args=(_CHECK, b"", CHECK_SECONDS, self._checks)),
            threading.Thread(
                target=self._call, args=(_ENCODE, request.SerializeToString(), ORDINARY_SECONDS, self._ordinary)
            ),
        ]

    def run(self) -> None:
        """Send calls until stdin ends, then write the samples to stdout as JSON."""
        for thread in self._threads:
            thread.start()
        sys.stdin.read()
        self._over.set()
        for thread in self._threads:
            thread.join()
        json.dump([self._checks, self._ordinary], sys.stdout)

    def _call(self, path: str, request: bytes, pause_seconds: float, samples: list[Sample]) -> None:
        """Send calls one after another.

        The time between the starts of two calls is a multiple of `pause_seconds`.
        """
        options = [("grpc.use_local_subchannel_pool", 1)]  # the channel does not share a connection
        with grpc.insecure_channel(self._target, options=options) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            while not self._over.is_set():
                began = time.monotonic()
                answer = _answer(call, request)
                ended = time.monotonic()
                samples.append(Sample(began, ended - began, answer))
                self._over.wait(pause_seconds - (ended - began) % pause_seconds)


def _answer(call: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", request: bytes) -> str:
    answer: Any = call.future(request, timeout=ANSWER_SECONDS, metadata=(("api-key", KEY),))
    if (code := answer.code()) is not grpc.StatusCode.OK:
        reasons = [str(value) for key, value in answer.trailing_metadata() or () if key == "encserve-error-reason"]
        return " ".join([code.name, *reasons])
    if request:
        return "OK"
    return "SERVING" if answer.result() == _SERVING else "NOT_SERVING"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C, because the test ends this process
    _Prober(*sys.argv[1:]).run()
    os._exit(0)
