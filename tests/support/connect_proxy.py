"""An HTTP proxy for tests of the client."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class ConnectProxy:
    """A proxy for CONNECT requests. It ignores the requested host, and connects all clients to one local port.

    Attributes:
        asked: The hosts and ports that clients have requested, as HOST:PORT.
        address: The proxy's own host and port.
    """

    def __init__(self, port: int | None) -> None:
        """Set the port of all connections. With None, the proxy refuses every connection with the status 403."""
        self.asked: list[str] = []
        self.address = ""
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head.split()[1].decode())
            if self._port is None:
                writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.closing(to_server):
                await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
