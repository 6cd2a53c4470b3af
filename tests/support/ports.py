"""Ports for servers that start again on the same port."""

import random
import socket


def free_port() -> int:
    """A TCP port that is free on every loopback address.

    The port lies below the range of outgoing connections. Otherwise a connection could take the port while its server
    is away, or a client could connect to itself.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as it:
            try:
                it.bind(("", port))
            except OSError:
                continue
            return port
