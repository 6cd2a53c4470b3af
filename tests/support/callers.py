"""Callers that repeat calls without a pause. They use the sync or the async client, and record each call."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from agreement import worst_relative_error

from encserve_client import AsyncEncoderClient, EncoderClient, EncserveError

MAX_RELATIVE_ERROR = 1e-5
N_STREAMS = 2


@dataclass(frozen=True, slots=True)
class Call:
    """An answered call: the start, the end, and the number of attempts. Times are seconds of time.monotonic."""

    began: float
    ended: float
    attempts: int


class InThreads:
    """Gives the sync client the interface of the async client. Each call and each stream blocks one thread."""

    def __init__(self, target: str | Sequence[str]) -> None:
        self._client = EncoderClient(target)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._client.close)

    async def run(self, inputs: Sequence[str]) -> Any:
        return await asyncio.to_thread(self._client.run, inputs)

    async def stream(self, inputs: Iterator[str], kind: Literal["tokens"], max_in_flight: int) -> AsyncIterator[Any]:
        results = self._client.stream(inputs, kind="tokens", max_in_flight=max_in_flight)
        while (result := await asyncio.to_thread(next, results, None)) is not None:
            yield result


CLIENTS: dict[str, Callable[..., Any]] = {"sync": InThreads, "async": AsyncEncoderClient}


class Callers:
    """Runs callers and two endless streams on one client until the `with` block ends. By default, 32 callers run.

    When a call ends, the caller immediately starts the next call.

    Attributes:
        calls: The answered calls.
        n_streamed: The number of answers over streams.
        failed: A description of each failure. A failure is an exception or a wrong answer.
    """

    def __init__(
        self, kind: str, target: str | Sequence[str], texts: Sequence[str], want: Sequence[Any], n_callers: int = 32
    ) -> None:
        """Prepare the callers.

        `kind` is "sync" or "async". `want` has the expected hidden states of each text, in the shape (seq, d_model).
        """
        self._client = CLIENTS[kind]
        self._target, self._texts, self._want = target, texts, want
        self._n_callers = n_callers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._gather()))
        self.calls: list[Call] = []
        self.n_streamed = 0
        self.failed: list[str] = []
        # The time of the latest answer. The keys from 0 are callers, and negative keys are streams.
        self._last = dict.fromkeys(range(-N_STREAMS, n_callers), 0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def wait_until(self, done: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Wait until `done` returns true or a call fails. After `seconds`, fail the test."""
        ends = time.monotonic() + seconds
        while not done() and not self.failed:
            assert time.monotonic() < ends, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def all_answered_since(self, moment: float) -> bool:
        """Whether every caller and every stream has received an answer after `moment`."""
        return min(self._last.values(), default=0.0) > moment

    async def _gather(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._n_callers + N_STREAMS))
        async with self._client(self._target) as client:
            callers = [self._call(client, number) for number in range(self._n_callers)]
            streams = [self._stream(client, number) for number in range(-N_STREAMS, 0)]
            await asyncio.gather(*map(self._guard, (*callers, *streams)))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.failed.append(repr(error))

    async def _call(self, client: Any, caller: int) -> None:
        for turn in itertools.takewhile(lambda _: not self._stop.is_set(), itertools.count(caller)):
            began = time.monotonic()
            try:
                result = await client.run([self._texts[turn % len(self._texts)]])
            except EncserveError as error:
                self.failed.append(f"began at {began:.3f}, failed at {time.monotonic():.3f}: {error!r}")
                continue
            self._last[caller] = time.monotonic()
            self.calls.append(Call(began, self._last[caller], result.timings.attempts))
            self._check("a call", turn, result.outputs[0].arrays()[0])

    async def _stream(self, client: Any, stream: int) -> None:
        turn = 0
        endless = itertools.takewhile(lambda _: not self._stop.is_set(), itertools.cycle(self._texts))
        async for _, rows in client.stream(endless, kind="tokens", max_in_flight=4):
            self._last[stream] = time.monotonic()
            self.n_streamed += 1
            self._check("a stream", turn, rows)
            turn += 1

    def _check(self, what: str, turn: int, rows: Any) -> None:
        want = self._want[turn % len(self._want)]
        if rows.shape != want.shape or worst_relative_error(rows, want) > MAX_RELATIVE_ERROR:
            self.failed.append(f"{what} got wrong rows for {self._texts[turn % len(self._texts)]!r}")
