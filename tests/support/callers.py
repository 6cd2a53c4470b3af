"""Many callers who never stop calling, with either client, and a record of every call."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from agreement import worst_relative_error

from encserve_client import AsyncEncoderClient, EncoderClient, EncserveError

MAX_RELATIVE_ERROR = 1e-5
N_STREAMS = 2


@dataclass(frozen=True, slots=True)
class Call:
    """One call that was answered: when it began and ended, on time.monotonic, and how often it was sent."""

    began: float
    ended: float
    attempts: int


class Callers:
    """32 callers of one client, each with its next call as soon as it has the answer, and two endless streams beside.

    Attributes:
        calls: Those that were answered, by `encode`'s whole.
        n_streamed: How many answers came over streams.
        failed: What went wrong: an exception's text, or an answer that was not right.
    """

    def __init__(
        self, kind: str, target: str | Sequence[str], texts: Sequence[str], want: Sequence[Any], n_callers: int = 32
    ) -> None:
        """Takes the client's kind, sync or async, and texts with the rows that they must get."""
        self._kind, self._target, self._texts, self._want = kind, target, texts, want
        self._n_callers = n_callers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_sync if kind == "sync" else self._run_async)
        self.calls: list[Call] = []
        self.n_streamed = 0
        self.failed: list[str] = []
        # When each got its last answer: callers by their numbers, from 0, and streams by theirs, below 0.
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
        """Lets the callers go on until something has come about, or they have failed."""
        ends = time.monotonic() + seconds
        while not done() and not self.failed:
            assert time.monotonic() < ends, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def all_answered_since(self, moment: float) -> bool:
        """Whether every caller and every stream has got an answer since then."""
        return min(self._last.values(), default=0.0) > moment

    def _run_sync(self) -> None:
        with EncoderClient(self._target) as client, ThreadPoolExecutor(self._n_callers + N_STREAMS) as threads:
            for caller in range(self._n_callers):
                threads.submit(self._guard, self._call_sync, client, caller)
            for stream in range(-N_STREAMS, 0):
                threads.submit(self._guard, self._stream_sync, client, stream)

    def _run_async(self) -> None:
        asyncio.run(self._gather())

    async def _gather(self) -> None:
        async with AsyncEncoderClient(self._target) as client, asyncio.TaskGroup() as group:
            for caller in range(self._n_callers):
                group.create_task(self._guard_async(self._call_async, client, caller))
            for stream in range(-N_STREAMS, 0):
                group.create_task(self._guard_async(self._stream_async, client, stream))

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            self.failed.append(repr(error))

    async def _guard_async(self, work: Callable[..., Any], *args: Any) -> None:
        try:
            await work(*args)
        except Exception as error:
            self.failed.append(repr(error))

    def _call_sync(self, client: EncoderClient, caller: int) -> None:
        for turn in itertools.takewhile(lambda _: not self._stop.is_set(), itertools.count(caller)):
            text, began = self._texts[turn % len(self._texts)], time.monotonic()
            try:
                result = client.run([text])
            except EncserveError as error:
                self._book_failure(error, began)
            else:
                self._book(caller, turn, result, began)

    async def _call_async(self, client: AsyncEncoderClient, caller: int) -> None:
        for turn in itertools.takewhile(lambda _: not self._stop.is_set(), itertools.count(caller)):
            text, began = self._texts[turn % len(self._texts)], time.monotonic()
            try:
                result = await client.run([text])
            except EncserveError as error:
                self._book_failure(error, began)
            else:
                self._book(caller, turn, result, began)

    def _stream_sync(self, client: EncoderClient, stream: int) -> None:
        for turn, rows in enumerate(client.encode_stream(self._endless(), max_in_flight=4)):
            self._book_streamed(stream, turn, rows)

    async def _stream_async(self, client: AsyncEncoderClient, stream: int) -> None:
        turn = 0
        async for rows in client.encode_stream(self._endless_async(), max_in_flight=4):
            self._book_streamed(stream, turn, rows)
            turn += 1

    def _endless(self) -> Iterator[str]:
        return itertools.takewhile(lambda _: not self._stop.is_set(), itertools.cycle(self._texts))

    async def _endless_async(self) -> AsyncIterator[str]:
        for text in self._endless():
            yield text

    def _book(self, caller: int, turn: int, result: Any, began: float) -> None:
        self._last[caller] = time.monotonic()
        self.calls.append(Call(began, self._last[caller], result.timings.attempts))
        self._check("a call", turn, result.outputs[0].arrays()[0])

    def _book_failure(self, error: EncserveError, began: float) -> None:
        self.failed.append(f"began at {began:.3f}, failed at {time.monotonic():.3f}: {error!r}")

    def _book_streamed(self, stream: int, turn: int, rows: Any) -> None:
        self._last[stream] = time.monotonic()
        self.n_streamed += 1
        self._check("a stream", turn, rows)

    def _check(self, what: str, turn: int, rows: Any) -> None:
        want = self._want[turn % len(self._want)]
        if rows.shape != want.shape or worst_relative_error(rows, want) > MAX_RELATIVE_ERROR:
            self.failed.append(f"{what} got wrong rows for {self._texts[turn % len(self._texts)]!r}")
