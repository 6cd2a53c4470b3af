"""Targets: the names and addresses of servers, checked and completed for gRPC."""

import ipaddress
import os
import re
from collections.abc import Sequence

from encserve_client._arguments import check_type
from encserve_client.exceptions import InvalidInputError

DEFAULT_TARGET = "localhost:50051"
DEFAULT_PORT = 50051
_VARIABLE = "ENCSERVE_TARGET"
# https://github.com/grpc/grpc/blob/master/doc/naming.md
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"})
# A name, an IPv4 address, or an IPv6 address in brackets; then a port, or none.
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]+\]|[^\s/@?#,:\[\]]+)(?::([0-9]{1,5}))?")

Address = tuple[str, int]


def as_target(target: str | Sequence[str] | None) -> str:
    """Return the gRPC target for a server name or for several addresses. The default port is 50051.

    Args:
        target: "host", "host:port", a target with one of gRPC's schemes, or a list of IP addresses; None for the
            environment variable ENCSERVE_TARGET, or "localhost:50051".

    Raises:
        InvalidInputError: The target is neither a valid name nor a list of only IPv4 or only IPv6 addresses. The error
            message names the argument or the variable.
    """
    name = "target"
    if target is None:
        name, target = _VARIABLE, os.environ.get(_VARIABLE) or DEFAULT_TARGET
    if isinstance(target, str):
        return _named_target(target.strip(), name)
    rule = f"a str such as {DEFAULT_TARGET!r}, or a list of addresses"
    items = check_type(name, target, (list, tuple), rule)
    if not items:
        raise InvalidInputError(f"must be {rule}; was empty", field=name)
    addresses = [_ip_address(f"{name}[{index}]", item) for index, item in enumerate(items)]
    schemes = {"ipv6" if host.startswith("[") else "ipv4" for host, _ in addresses}
    if len(schemes) > 1:
        raise InvalidInputError("must have IPv4 addresses or IPv6 addresses; had both", field=name)
    return f"{schemes.pop()}:{','.join(f'{host}:{port}' for host, port in addresses)}"


def is_balanced(target: str) -> bool:
    """Whether gRPC balances calls among all addresses of a target. True for a list, and for a name with "dns:"."""
    return target.startswith("dns:") or has_several_addresses(target)


def has_several_addresses(target: str) -> bool:
    """Whether a gRPC target is a list of addresses."""
    return target.startswith(("ipv4:", "ipv6:")) and "," in target


def addresses_of(target: str) -> list[Address]:
    """Return the hosts and ports of a gRPC target, IPv6 addresses without brackets.

    The list is empty for a Unix socket. The list is also empty for names that only gRPC can resolve: xDS names, and
    names with a DNS server, such as "dns://10.0.0.2/encoder:50051".
    """
    scheme, _, rest = target.partition(":")
    if scheme == "dns":
        authority, _, target = rest.removeprefix("//").rpartition("/")
        if authority:
            return []
    elif scheme in ("ipv4", "ipv6"):
        target = rest
    elif scheme in _SCHEMES:
        return []
    parts = [part.rpartition(":") for part in target.split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in parts if port.isdigit()]


def is_local(target: str) -> bool:
    """Whether all connections to a gRPC target stay on this machine: by loopback or a Unix socket."""
    addresses = addresses_of(target)
    return all(_is_loopback(host) for host, _ in addresses) if addresses else target.startswith("unix")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _named_target(target: str, name: str) -> str:
    scheme, colon, rest = target.partition(":")
    if colon and scheme in _SCHEMES:
        if scheme != "dns":
            return target
        authority, slash, host = rest.rpartition("/")
        return f"dns:{authority}{slash}{_with_port(host, name)}"
    if "://" in target:
        tls = ", and turn on TLS (tls=True or --tls)" if scheme in ("https", "grpcs") else ""
        raise InvalidInputError(
            f"must be host:port, without {scheme}://; was {target!r}. Give the host with the server's gRPC port "
            f"(50051 by default){tls}",
            field=name,
        )
    return _with_port(target, name)


def _with_port(address: str, name: str) -> str:
    try:
        host, port = _split(address)
    except ValueError:
        was = repr(address) if address else "empty"
        raise InvalidInputError(
            f"must be host:port, such as {DEFAULT_TARGET!r} or '[fd00::7]:50051', with a port from 1 to 65535; was "
            f"{was}",
            field=name,
        ) from None
    return f"{host}:{port}"


def _ip_address(name: str, address: object) -> Address:
    text = check_type(name, address, str, "a str such as '10.0.0.7:50051'")
    try:
        host, port = _split(text)
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        # A gRPC target has at most one name. The client does not resolve names, because addresses change.
        raise InvalidInputError(
            f"must be an IP address with or without a port, such as '10.0.0.7:50051' or '[fd00::7]:50051'; was "
            f"{address!r}. Or give one DNS name that has the addresses of all servers, 'dns:///NAME:PORT'",
            field=name,
        ) from None
    return host, port


def _split(address: str) -> Address:
    """Return the host (IPv6 in brackets) and the port. Raise ValueError unless the address is host or host:port."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        raise ValueError
    host, port = found[1], int(found[2] or DEFAULT_PORT)
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    if not 0 < port < 65536:
        raise ValueError
    return host, port
