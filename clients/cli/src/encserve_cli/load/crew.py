"""The generator processes: starting them together, stopping them, and bringing home what they measured."""

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from encserve_cli.load.calls import Call
from encserve_cli.load.generate import Generator
from encserve_cli.load.samples import Samples
from encserve_cli.load.schedule import LoadPlan
from encserve_cli.load.senders import Connection
from encserve_client import ServerError, ServerUnavailableError

_CONNECT_SECONDS = 10.0
_LEAVE_SECONDS = 5.0


class Crew:
    """Generator processes, one for each plan. Entered when all of them are connected; left when they are gone.

    Raises:
        ServerUnavailableError: One of them found no server.
    """

    def __init__(self, connection: Connection, calls: Sequence[Call], plans: Sequence[LoadPlan]) -> None:
        # Spawned: gRPC does not survive a fork.
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe[Any, Any]] = []
        self._processes: list[BaseProcess] = []
        for plan in plans:
            near, far = spawn.Pipe()
            process = spawn.Process(target=_work, args=(far, connection, list(calls), plan), daemon=True)
            self._pipes.append(near)
            self._processes.append(process)
            process.start()
            far.close()  # so that the pipe ends with the process

    def __enter__(self) -> Self:
        try:
            for ready in self._receive():
                if ready is not None:
                    raise ServerUnavailableError(ready)
        except BaseException:
            self._leave(0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error nobody wants to know what they measured.
        self._leave(_LEAVE_SECONDS if error is None else 0)

    def tell(self, begin: float | None) -> None:
        """Says when to begin, and after that, with None, to send no more."""
        for pipe in self._pipes:
            pipe.send(begin)

    def collect(self) -> list[Samples]:
        """Waits until each has ended. Raises ServerError if one died."""
        return list(self._receive())

    def _receive(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as error:
            raise ServerError("a generator process died; its own words are above") from error

    def _leave(self, patience_seconds: float) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(patience_seconds)
            if process.is_alive():
                process.terminate()
                process.join()


def _work(pipe: "Pipe[Any, Any]", connection: Connection, calls: Sequence[Call], plan: LoadPlan) -> None:
    """What a generator process does from beginning to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent's word counts
    asyncio.run(_generate(pipe, connection, calls, plan))


def _listen(pipe: "Pipe[Any, Any]", loop: asyncio.AbstractEventLoop, told: "asyncio.Queue[float | None]") -> None:
    """Hands over what the parent says, and None when it is gone; in a thread, until nobody listens any more."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: all is done
        try:
            while True:
                loop.call_soon_threadsafe(told.put_nowait, pipe.recv())
        except (EOFError, OSError):  # the parent is gone
            loop.call_soon_threadsafe(told.put_nowait, None)


async def _generate(pipe: "Pipe[Any, Any]", connection: Connection, calls: Sequence[Call], plan: LoadPlan) -> None:
    loop = asyncio.get_running_loop()
    generator = Generator(calls, plan)
    async with connection.open() as channel:
        patience_seconds = min(_CONNECT_SECONDS, plan.timeout_seconds)
        try:
            async with asyncio.timeout(patience_seconds):
                await channel.channel_ready()
        except TimeoutError:
            pipe.send(f"{connection.target}: no server answered within {patience_seconds:g} s")
            return
        pipe.send(None)
        told: asyncio.Queue[float | None] = asyncio.Queue()
        threading.Thread(target=_listen, args=(pipe, loop, told), daemon=True).start()
        begin = await told.get()
        if begin is None:
            return
        stopping = asyncio.create_task(_stop_when_told(told, generator))
        gc.collect()
        gc.freeze()  # the calls never become garbage, so no collection looks at them
        samples = await generator.run(begin, channel, connection)
        stopping.cancel()
    with contextlib.suppress(OSError):  # the parent is gone
        pipe.send(samples)


async def _stop_when_told(told: "asyncio.Queue[float | None]", generator: Generator) -> None:
    await told.get()
    generator.stop()
