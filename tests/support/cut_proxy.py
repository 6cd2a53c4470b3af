"""A TCP proxy on a loopback port that can cut the connections between a client and a server."""

import contextlib
import socket
import socketserver
import threading
from types import TracebackType
from typing import Literal

Direction = Literal["up", "down"]


class CutProxy:
    """Passes bytes between clients and a server, until the bytes exceed a limit in `cut_after`.

    Then the proxy ends all connections. The proxy passes no more bytes until `mend` is called.

    Attributes:
        port: The port of the proxy.
        passed: The number of bytes since the last `mend`, by direction: "up" to the server, "down" to the client.
        cut_after: The limit of bytes, by direction. A direction without an entry has no limit.
    """

    def __init__(self, server_port: int) -> None:
        """Listen on a free port of 127.0.0.1 for clients of the server at `server_port`."""
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.cut_after: dict[Direction, int] = {}
        self._is_cut = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", server_port)) as server:
                    proxy._connect(self.request, server)

        self._listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(target=self._listener.serve_forever)

    @property
    def is_cut(self) -> bool:
        """Whether the proxy has cut the connections."""
        return self._is_cut

    def mend(self) -> None:
        """Start to pass bytes again, reset the counts, and remove the limits."""
        self.passed, self.cut_after = {"up": 0, "down": 0}, {}
        self._is_cut = False

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=self._pass_on, args=(server, client, "down"))
        back.start()
        self._pass_on(client, server, "up")
        back.join()
        with self._lock:
            self._open -= {client, server}

    def _pass_on(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):  # one end has closed the connection
            while (data := source.recv(16384)) and self._may_pass(direction, len(data)):
                target.sendall(data)
        _end(source)
        _end(target)

    def _may_pass(self, direction: Direction, count: int) -> bool:
        with self._lock:
            self.passed[direction] += count
            if self.passed[direction] > self.cut_after.get(direction, self.passed[direction]):
                self._cut()
            return not self._is_cut

    def _cut(self) -> None:
        self._is_cut = True
        for it in self._open:
            _end(it)

    def __enter__(self) -> "CutProxy":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._cut()
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the connection has already ended
        connection.shutdown(socket.SHUT_RDWR)
