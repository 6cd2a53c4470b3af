"""HTTP proxies: the proxy of a target, and connections through a proxy."""

import base64
import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from encserve_client._grpc.target import Address, addresses_of, has_several_addresses, is_local

# gRPC reads these variables, in this order. https://grpc.github.io/grpc/core/md_doc_environment_variables.html
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
# gRPC reads the first two variables. Most other programs also read the third.
_EXEMPTION_VARIABLES = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
_GRPC_PROXY_PORT = 443  # if the variable has no port
_MAX_HEAD_BYTES = 16_384


class ProxyRefusedError(OSError):
    """A proxy refused to connect to the server. The text is the proxy's status line."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        host: The proxy's host.
        port: The proxy's port.
        source: The environment variable or the channel argument that names the proxy.
        credentials: "user:password" of the proxy's URL, or "". Errors never show the credentials.
    """

    host: str
    port: int
    source: str
    credentials: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.source})"

    def connect(self, address: Address, timeout: float) -> socket.socket:
        """Connect to a server through the proxy.

        Args:
            address: The server.
            timeout: The time for each step, in seconds.

        Raises:
            ProxyRefusedError: The proxy answered but did not connect.
            OSError: The proxy cannot be reached.
        """
        host, port = address
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
        if self.credentials:
            encoded = base64.b64encode(urllib.parse.unquote(self.credentials).encode()).decode()
            head += f"Proxy-Authorization: Basic {encoded}\r\n"
        connection = socket.create_connection((self.host, self.port), timeout=timeout)
        try:
            connection.sendall(f"{head}\r\n".encode())
            status = _read_head(connection).partition("\r\n")[0]
            if status.split(" ")[1:2] != ["200"]:
                raise ProxyRefusedError(status or "the proxy closed the connection")
        except BaseException:
            connection.close()
            raise
        return connection


def uses_proxy(target: str) -> bool:
    """Whether gRPC may connect to a target through a proxy.

    Connections inside this machine bypass proxies. Connections to a list of addresses also bypass proxies, because gRPC
    would send the whole list to the proxy as one name. Variables such as NO_PROXY exempt names, domains and networks.
    """
    if is_local(target) or has_several_addresses(target):
        return False
    return not any(_is_exempt(host) for host, _ in addresses_of(target))


def proxy_of(target: str, channel_arguments: Mapping[str, str | int]) -> Proxy | None:
    """Return the proxy that gRPC uses for a target with these channel arguments, or None."""
    if not channel_arguments.get("grpc.enable_http_proxy", 1) or not addresses_of(target):
        return None
    variables = {name: os.environ[name] for name in _PROXY_VARIABLES if name in os.environ}
    source, url = next(iter(variables.items()), ("", ""))
    if "grpc.http_proxy" in channel_arguments:
        source, url = "grpc.http_proxy", str(channel_arguments["grpc.http_proxy"])
    with suppress(ValueError):  # gRPC ignores a URL that it does not understand
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "http" and parts.hostname:
            credentials = parts.netloc.rpartition("@")[0]
            return Proxy(parts.hostname, parts.port or _GRPC_PROXY_PORT, source, credentials)
    return None


def _is_exempt(host: str) -> bool:
    value = next((os.environ[name] for name in _EXEMPTION_VARIABLES if os.environ.get(name)), "")
    name = host.lower()
    for entry in value.lower().replace(",", " ").split():
        domain = entry.removeprefix("*").removeprefix(".")
        if entry == "*" or name == domain or name.endswith(f".{domain}"):
            return True
        with suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


def _read_head(connection: socket.socket) -> str:
    """Read the head of an HTTP reply and no byte more, because the server's bytes may follow."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < _MAX_HEAD_BYTES:
        if not (byte := connection.recv(1)):
            break
        head += byte
    return head.decode("latin-1")
