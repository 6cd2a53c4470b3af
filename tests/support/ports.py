"""Ports for servers that are started anew on the port they had."""

import random
import socket


def free_port() -> int:
    """A TCP port that is free on every loopback address.

    From below those that the system gives to outgoing connections: one of them could take it while its server is away,
    or a client that tries to reach it could even meet itself.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as it:
            try:
                it.bind(("", port))
            except OSError:
                continue
            return port
