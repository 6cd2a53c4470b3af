"""Starts encserve servers and their callers. The load generator of `encserve bench` runs the callers."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_server import COMMAND, RealServer, real_server

from encserve_cli.load.calls import Call, Request, random_calls, text_calls
from encserve_cli.load.generator import run_load
from encserve_cli.load.results import Load, LoadResult
from encserve_client import AsyncEncoderClient, EncoderClient
from harness.meter import Meter
from harness.rounds import Measurement, Side
from harness.workload import Workload

CALLERS = 64
# A single caller sends only this many sequences, one per call, because the whole workload would take minutes.
SINGLE_SEQUENCES = 192
LARGE_CALL_SEQUENCES, LARGE_CALLERS = 256, 4
TIMEOUT_SECONDS = 120.0

ONE, ONE_POOLED, MANY, POOLED = "encserve-1", "encserve-1-pooled", "encserve-64", "encserve-64-pooled"
LARGE = "encserve-4x256"


def warmup_seconds(seconds: float) -> float:
    """Return the duration of the warm-up before a measurement of `seconds`."""
    return min(1.0, seconds)


def call_server(target: str, calls: Sequence[Call], load: Load, meter: Meter | None = None) -> LoadResult:
    """Run a load. `meter` reads the server's metrics at the start and at the end of the measured time.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed. An incomplete measurement is discarded.
    """
    result = run_load(lambda: AsyncEncoderClient(target), calls, load, on_edge=meter.read if meter else None)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


class Served:
    """A running server, and the calls for the measurement.

    Attributes:
        server: The server process.
    """

    def __init__(self, server: RealServer, workload: Workload, seconds: float) -> None:
        """Build the requests, and run a warm-up. The measurement of each side takes `seconds`."""
        self.server = server
        self._workload = workload
        self._seconds = seconds
        with EncoderClient(server.target) as client:
            self._info = client.model()
        self._calls = random_calls(workload.lengths, self._info)
        self._pooled = self._pooled_calls()
        self._measure(self._calls, CALLERS)  # the first calls allocate the server's memory

    def _pooled_calls(self) -> list[Call]:
        request = Request(pooling="model" if self._info.pooling else "mean")
        if not self._workload.texts:
            return random_calls(self._workload.lengths, self._info, request)
        return text_calls(self._workload.texts, self._workload.lengths, self._info, request)

    def rows(self, indices: Sequence[int]) -> list[Any]:
        """Return the hidden states of the sequences at `indices`, (seq, d_model) each."""
        with EncoderClient(self.server.target) as client:
            return list(client.token_vectors([self._workload.sequences[index] for index in indices]))

    def vectors(self, indices: Sequence[int]) -> list[Any]:
        """Return the pooled vectors of the texts at `indices`, scaled to length 1: (1, d_model) each."""
        with EncoderClient(self.server.target) as client:
            vectors = client.embed([self._workload.texts[index] for index in indices])  # (texts, d_model)
        return [vector[None] / float((vector**2).sum()) ** 0.5 for vector in vectors]

    def sides(self) -> list[Side]:
        """Return the sides. A side is one way to call the server."""
        pooled = "text in, one vector out" if self._workload.texts else "one vector out"
        return [
            Side(ONE, "encserve, 1 caller", lambda: self._one_caller(self._calls)),
            Side(ONE_POOLED, f"encserve, 1 caller, {pooled}", lambda: self._one_caller(self._pooled)),
            Side(LARGE, f"encserve, {LARGE_CALLERS} callers, {LARGE_CALL_SEQUENCES} sequences a call", self._large),
            Side(MANY, f"encserve, {CALLERS} callers", lambda: self._measure(self._calls, CALLERS)),
            Side(POOLED, f"encserve, {CALLERS} callers, {pooled}", lambda: self._measure(self._pooled, CALLERS)),
        ]

    def _one_caller(self, calls: Sequence[Call]) -> Measurement:
        """Send the first sequences one after another. Return the length and the latency of each timed call."""
        first = calls[:SINGLE_SEQUENCES]
        measurement = self._measure(first, 1, warmup=False)
        # There is no warm-up, so the first latency belongs to the first sequence.
        lengths = itertools.cycle(call.tokens for call in first)
        latencies = [(next(lengths), seconds) for _, seconds in measurement.latencies]
        return dataclasses.replace(measurement, latencies=latencies)

    def _large(self) -> Measurement:
        """Send calls that take seconds. Count the tokens of batches, because few calls end during the measurement."""
        count = LARGE_CALL_SEQUENCES * LARGE_CALLERS
        lengths = itertools.islice(itertools.cycle(self._workload.lengths), count)
        calls = random_calls(list(lengths), self._info, Request(sequences_per_call=LARGE_CALL_SEQUENCES))
        return self._measure(calls, LARGE_CALLERS, by_batch=True)

    def _measure(
        self, calls: Sequence[Call], callers: int, *, warmup: bool = True, by_batch: bool = False
    ) -> Measurement:
        """Run callers. Each caller sends its next call after the reply to its last call. Count the tokens of replies.

        If `by_batch` is true, count the tokens of the server's batches instead.

        Raises:
            RuntimeError: A call failed, or the server answered no call.
        """
        load = Load(
            concurrency=callers,
            seconds=self._seconds,
            warmup_seconds=warmup_seconds(self._seconds) if warmup else 0,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        meter = Meter(self.server.metrics_port)
        result = call_server(self.server.target, calls, load, meter)
        if result.errors:
            raise RuntimeError(f"{callers} callers: {result.errors} {result.error_examples}")
        tokens, seconds = (meter.tokens, meter.seconds) if by_batch else (result.tokens, result.seconds)
        if not tokens:
            raise RuntimeError(f"{callers} callers: no call was answered in {seconds:g} s; raise --seconds")
        cpu_ms = 1000 * meter.cpu_seconds / max(meter.sequences, 1)
        return Measurement(tokens, seconds, [(0, latency) for latency in result.latency_seconds.tolist()], cpu_ms)


@contextmanager
def served(
    models: Path, flags: Sequence[str], workload: Workload, seconds: float, program: Path = COMMAND
) -> Iterator[Served]:
    """Run a server until the end of the `with` block. `program` may be the encserve-server of another checkout."""
    with real_server(models, *flags, program=program) as server:
        yield Served(server, workload, seconds)
