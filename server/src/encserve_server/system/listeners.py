"""Listening sockets."""

import errno
import ipaddress
import socket


def open_listeners(host: str, port: int, backlog: int | None = None) -> list[socket.socket]:
    """Listen on each address of a host that this machine has, all with the same port. Port 0 means a free port.

    The host `::` also accepts connections over IPv4 if the system supports this.

    Raises:
        OSError: The host has no address on this machine. Or the port of an address is in use or not permitted.
    """
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, address in dict.fromkeys((family, str(address[0])) for family, *_, address in found):
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            listeners.append(socket.create_server((address, port), family=family, backlog=backlog, dualstack_ipv6=both))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                close_all(listeners)
                raise
            missing = error
        else:
            port = port or listeners[0].getsockname()[1]
    if missing is not None and not listeners:
        raise missing
    return listeners


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or the name localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def close_all(listeners: list[socket.socket]) -> None:
    """Close all sockets."""
    for listener in listeners:
        listener.close()
