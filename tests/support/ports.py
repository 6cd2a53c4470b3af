"""Finds ports for servers that stop and then start again on the same port."""

import random
import socket


def free_port() -> int:
    """Return a TCP port that is free on every loopback address.

    The port is below the system's range for outgoing connections. In that range, another connection could take the port
    while the server is stopped. A client could even connect to itself.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as it:
            try:
                it.bind(("", port))
            except OSError:
                continue
            return port
