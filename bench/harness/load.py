"""encserve servers and those who ask them: the load generator of `encserve bench`, in processes of its own."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_server import COMMAND, RealServer, real_server

from encserve_cli.load import Call, Request, closed_loop, make_calls, make_text_calls
from encserve_client import EncoderClient
from harness.rounds import Measurement, Side
from harness.workload import Workload

CALLERS = 64
SLICE = 192  # sequences of those sides that handle one at a time; everything would take minutes
CALL_SEQUENCES = 256  # in one call of the large ones
LARGE_CALLERS = 4
TIMEOUT_SECONDS = 120.0

ONE, ONE_POOLED, MANY, POOLED = "encserve-1", "encserve-1-pooled", "encserve-64", "encserve-64-pooled"
LARGE = "encserve-4x256"


def warmup_of(seconds: float) -> float:
    """How long to load a server before that is measured for so long."""
    return min(1.0, seconds)


class Served:
    """A running server, and what it is asked.

    Attributes:
        server: The process.
    """

    def __init__(self, server: RealServer, workload: Workload, seconds: float) -> None:
        """Serialises the calls; `seconds` is how long each side is measured."""
        self.server = server
        self._workload = workload
        self._seconds = seconds
        with EncoderClient(server.target) as client:
            self._info = client.model()
        self._calls = make_calls(workload.lengths, self._info)
        self._pooled = self._make_pooled()
        self._measure(self._calls, CALLERS)  # memory is taken now

    def _make_pooled(self) -> list[Call]:
        request = Request(pooling="model" if self._info.pooling else "mean")
        if not self._workload.texts:
            return make_calls(self._workload.lengths, self._info, request)
        calls = make_text_calls(self._workload.texts, self._info, request)
        # We know what the generator cannot: how many tokens a text has.
        return [dataclasses.replace(it, tokens=n) for it, n in zip(calls, self._workload.lengths, strict=True)]

    def rows(self, places: Sequence[int]) -> list[Any]:
        """The (seq, d_model) rows of the sequences at some places."""
        with EncoderClient(self.server.target) as client:
            return list(client.encode([self._workload.sequences[it] for it in places]))

    def vectors(self, places: Sequence[int]) -> list[Any]:
        """The pooled vectors of the texts at some places, (1, d_model) each, of length 1."""
        with EncoderClient(self.server.target) as client:
            found = client.embed([self._workload.texts[it] for it in places])  # (texts, d_model)
        return [it[None] / float((it**2).sum()) ** 0.5 for it in found]

    def sides(self) -> list[Side]:
        """The server, asked in several ways."""
        pooled = "text in, one vector out" if self._workload.texts else "one vector out"
        return [
            Side(ONE, "encserve, 1 caller", lambda: self._one_caller(self._calls)),
            Side(ONE_POOLED, f"encserve, 1 caller, {pooled}", lambda: self._one_caller(self._pooled)),
            Side(LARGE, f"encserve, {LARGE_CALLERS} callers, {CALL_SEQUENCES} sequences a call", self._large_calls),
            Side(MANY, f"encserve, {CALLERS} callers", lambda: self._measure(self._calls, CALLERS)),
            Side(POOLED, f"encserve, {CALLERS} callers, {pooled}", lambda: self._measure(self._pooled, CALLERS)),
        ]

    def _one_caller(self, calls: Sequence[Call]) -> Measurement:
        """The first sequences, one after another, with the latency of each."""
        first = calls[:SLICE]
        found = self._measure(first, 1, warmup=False)
        # Without a warm-up the first latency is of the first call.
        lengths = itertools.cycle(it.tokens for it in first)
        return dataclasses.replace(found, latencies=[(next(lengths), seconds) for _, seconds in found.latencies])

    def _large_calls(self) -> Measurement:
        """A call takes seconds, so that few end while it is measured: what counts is what the server's batches held."""
        lengths = itertools.islice(itertools.cycle(self._workload.lengths), CALL_SEQUENCES * LARGE_CALLERS)
        calls = make_calls(list(lengths), self._info, Request(sequences_per_call=CALL_SEQUENCES))
        return self._measure(calls, LARGE_CALLERS, by_batch=True)

    def _measure(
        self, calls: Sequence[Call], callers: int, *, warmup: bool = True, by_batch: bool = False
    ) -> Measurement:
        """A closed loop; counts the tokens of answers, or those of the server's batches.

        Raises:
            RuntimeError: A call failed, none was answered, or the server's metrics cannot be read.
        """
        result = closed_loop(
            self.server.target,
            calls,
            concurrency=callers,
            seconds=self._seconds,
            warmup_seconds=warmup_of(self._seconds) if warmup else 0,
            timeout_seconds=TIMEOUT_SECONDS,
            metrics_url=f"http://127.0.0.1:{self.server.metrics_port}/metrics",
        )
        view = result.server
        if result.errors or view is None:
            raise RuntimeError(f"{callers} callers: {result.errors or result.server_missing} {result.error_examples}")
        tokens, seconds = (view.tokens, view.seconds) if by_batch else (result.tokens, result.seconds)
        if not tokens:
            raise RuntimeError(f"{callers} callers: no call was answered in {seconds:g} s; give --seconds more")
        cpu_ms = None if view.cpu_seconds is None else 1000 * view.cpu_seconds / max(view.sequences, 1)
        return Measurement(tokens, seconds, [(0, it) for it in result.latency_seconds.tolist()], cpu_ms)


@contextmanager
def served(
    models: Path, flags: Sequence[str], workload: Workload, seconds: float, program: Path = COMMAND
) -> Iterator[Served]:
    """Runs a server until the end of the block; `program` is another checkout's encserve-server."""
    with real_server(models, *flags, program=program) as server:
        yield Served(server, workload, seconds)
