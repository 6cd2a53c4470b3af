"""`python -m encserve_server.healthcheck [TARGET]`: checks the health of a server, for the HEALTHCHECK of a container.

The exit status is 0 if the server reports SERVING, otherwise 1. Without TARGET, the server's environment variables give
the address. With `ENCSERVE_TLS_CERT_FILE`, the check uses /healthz on the metrics port, because this port needs no
client certificate. The check runs every few seconds, so it imports few modules.
"""

import http.client
import os
import ssl
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encserve_server.environment import is_service_link

_DEADLINE_SECONDS = 3.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - no socket is bound here


def own_host() -> str:
    """Return the host of the server in this container, from `ENCSERVE_HOST`."""
    host = os.environ.get("ENCSERVE_HOST") or "127.0.0.1"
    return _EVERY_ADDRESS.get(host, host)


def _own_port(variable: str, default: str) -> str:
    """Return the port in a variable, or the default. Ignore the address of a Kubernetes Service, as the server does."""
    value = os.environ.get(variable, "")
    return default if not value or is_service_link(value) else value


def own_target() -> str:
    """Return the gRPC target of the server in this container, from `ENCSERVE_HOST` and `ENCSERVE_GRPC_PORT`."""
    host = own_host()
    port = _own_port("ENCSERVE_GRPC_PORT", "50051")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check(target: str, deadline_seconds: float = _DEADLINE_SECONDS) -> str:
    """Return the status of the server by gRPC: SERVING, NOT_SERVING, or the error of the call."""
    # The target is on this machine. So the call must not go through the proxy of the environment variables.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=deadline_seconds)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def check_page(host: str, port: int, deadline_seconds: float = _DEADLINE_SECONDS) -> str:
    """Return the status of the server by https://HOST:PORT/healthz.

    The certificate is not verified, because it names the public addresses of the server, not the local address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=deadline_seconds, context=context)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().read(100).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"UNAVAILABLE: {error}"
    finally:
        connection.close()


def _check_own() -> str:
    """Return the status of the server in this container."""
    if not os.environ.get("ENCSERVE_TLS_CERT_FILE"):
        return check(own_target())
    return check_page(own_host(), int(_own_port("ENCSERVE_METRICS_PORT", "9464")))


def main(arguments: list[str]) -> int:
    """Print the status of the server, and return the exit status."""
    status = check(arguments[0]) if arguments else _check_own()
    print(status)  # noqa: T201 - the container engine stores it with the health of the container
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
