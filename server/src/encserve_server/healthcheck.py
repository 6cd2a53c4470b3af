"""`python -m encserve_server.healthcheck [TARGET]`: asks a server's health, for a container's HEALTHCHECK.

The exit status is 0 if the server says SERVING and 1 if it does not, or cannot be reached. Without a target it asks the
one that the environment describes, as the server itself reads it; where that has `ENCSERVE_TLS_CERT_FILE`, by /healthz
of the metrics page, which needs no client certificate. It runs every few seconds beside the server, so it
imports little: the standard library, gRPC, the health service's messages, and a module without imports.
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
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here


def own_host() -> str:
    """Where the server of this container listens, from `ENCSERVE_HOST`."""
    host = os.environ.get("ENCSERVE_HOST") or "127.0.0.1"
    return _EVERY_ADDRESS.get(host, host)


def _own_port(variable: str, default: str) -> str:
    """Return the port in a variable. A value that Kubernetes wrote for a Service is ignored, as the server does."""
    value = os.environ.get(variable, "")
    return default if not value or is_service_link(value) else value


def own_target() -> str:
    """The gRPC target of the server of this container, from `ENCSERVE_HOST` and `ENCSERVE_GRPC_PORT`."""
    host = own_host()
    port = _own_port("ENCSERVE_GRPC_PORT", "50051")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check(target: str, deadline_seconds: float = _DEADLINE_SECONDS) -> str:
    """What the server says of itself as a whole: SERVING, NOT_SERVING, or why it could not be asked."""
    # A proxy of the environment is for the world outside.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=deadline_seconds)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def check_page(host: str, port: int, deadline_seconds: float = _DEADLINE_SECONDS) -> str:
    """The same by https://HOST:PORT/healthz. The certificate is for the names of callers, so it is not looked at."""
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
    """What the server of this container says."""
    if not os.environ.get("ENCSERVE_TLS_CERT_FILE"):
        return check(own_target())
    return check_page(own_host(), int(_own_port("ENCSERVE_METRICS_PORT", "9464")))


def main(arguments: list[str]) -> int:
    """Prints what the server says, and returns the exit status."""
    said = check(arguments[0]) if arguments else _check_own()
    print(said)  # noqa: T201 - the engine keeps it with the container's health
    return 0 if said == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
