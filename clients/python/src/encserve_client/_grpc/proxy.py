"""HTTP proxies: the proxy that gRPC uses for a target."""

import ipaddress
import os
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress

from encserve_client._grpc.target import addresses_of, has_several_addresses, is_local

# gRPC reads these variables, in this order. https://grpc.github.io/grpc/core/md_doc_environment_variables.html
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
# gRPC reads the first two variables. Most other programs also read the third.
_EXEMPTION_VARIABLES = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
_GRPC_PROXY_PORT = 443  # if the variable has no port


def uses_proxy(target: str) -> bool:
    """Whether gRPC may connect to a target through a proxy.

    Connections inside this machine bypass proxies. Connections to a list of addresses also bypass proxies, because gRPC
    would send the whole list to the proxy as one name. Variables such as NO_PROXY exempt names, domains and networks.
    """
    if is_local(target) or has_several_addresses(target):
        return False
    return not any(_is_exempt(host) for host, _ in addresses_of(target))


def proxy_of(target: str, channel_arguments: Mapping[str, str | int]) -> str:
    """Return the proxy that gRPC uses for a target with these channel arguments, or "".

    The text has the proxy's address, and the variable or the channel argument that names the proxy. The text never has
    the credentials of the proxy's URL.
    """
    if not channel_arguments.get("grpc.enable_http_proxy", 1) or not addresses_of(target):
        return ""
    variables = {name: os.environ[name] for name in _PROXY_VARIABLES if name in os.environ}
    source, url = next(iter(variables.items()), ("", ""))
    if "grpc.http_proxy" in channel_arguments:
        source, url = "grpc.http_proxy", str(channel_arguments["grpc.http_proxy"])
    with suppress(ValueError):  # gRPC ignores a URL that it does not understand
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "http" and parts.hostname:
            return f"{parts.hostname}:{parts.port or _GRPC_PROXY_PORT} ({source})"
    return ""


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
