"""Creates the grpcio server with the options that this service needs."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from encserve_server.settings import MIB, Settings
from encserve_server.system.certificates import Certificates, Identity
from encserve_server.system.listeners import close_all, open_listeners
from encserve_server.transport.grpc.connections import HEADROOM
from encserve_server.transport.grpc.guard import Handler

_KINDS: dict[str, Callable[[Any], "grpc.RpcMethodHandler[Any, Any]"]] = {
    "unary": grpc.stream_unary_rpc_method_handler,  # one request; the handler reads this request from the stream
    "server_stream": grpc.stream_stream_rpc_method_handler,
    "bidi_stream": grpc.stream_stream_rpc_method_handler,
}

# In a stream, a wrapper adds a few bytes to a reply. Without the wrapper, the reply may already have the maximum size.
_MESSAGE_HEADROOM_BYTES = 64 * 1024
# The maximum number of open calls on one connection. Each open call has its request in memory. Normal callers have far
# fewer. Beyond the limit, gRPC clients delay further calls, but some calls still get UNAVAILABLE.
_MAX_CONNECTION_CALLS = 10_000
# The maximum number of calls that wait in gRPC until the event loop takes them. Each takes about 15 KiB. gRPC answers
# CANCELLED to further calls. By default, gRPC would answer CANCELLED to calls beyond 1,000 or after 30 s.
_MAX_PENDING_CALLS = 10_000
_MAX_PENDING_SECONDS = 3600
_HANDSHAKE_SECONDS = 10.0


def make_server(settings: Settings) -> grpc.aio.Server:
    """Return a server that does not listen yet."""
    options = [
        # Without this, a second server on the same port would start and take half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_request_mib * MIB),
        ("grpc.max_send_message_length", settings.max_response_mib * MIB + _MESSAGE_HEADROOM_BYTES),
        ("grpc.max_allowed_incoming_connections", settings.max_connections * HEADROOM),
        ("grpc.max_concurrent_streams", _MAX_CONNECTION_CALLS),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_SECONDS),
        # Bit 0 means no compression. A compressed request of 4 KiB could take 4 MiB before the server checks its size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Clients may ping an idle connection every 10 s. By default, gRPC would close the connection if clients ping
        # more often than every 5 minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # With this ping, gRPC notices a lost connection within two minutes. gRPC waits 60 s for the reply to a ping,
        # and ignores `grpc.keepalive_timeout_ms`.
        ("grpc.keepalive_time_ms", 30_000),
        # By default, a connection that sends nothing would stay open for two minutes.
        ("grpc.server_handshake_timeout_ms", round(_HANDSHAKE_SECONDS * 1000)),
    ]
    if settings.max_connection_age_seconds is not None:  # open calls on an old connection can finish
        options.append(("grpc.max_connection_age_ms", round(settings.max_connection_age_seconds * 1000)))
    logging.getLogger("grpc._cython.cygrpc").addFilter(_drop_client_disconnects)
    return grpc.aio.server(options=options)


def listen(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None = None) -> int:
    """Make a server listen on all addresses of a host, and return the port. Port 0 means a free port.

    With `certificates` the server uses TLS, without `certificates` plaintext.

    gRPC does not report why it cannot listen. It also accepts a host if only some of the host's addresses are free.
    Then callers of localhost could reach another server. So this function first opens and closes each address itself.

    Raises:
        OSError: An address is in use or not available; see `open_listeners`.
        RuntimeError: gRPC cannot listen.
    """
    close_all(open_listeners(host, port))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # [] for an IPv6 address
    if certificates is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _credentials(certificates))


def add_service(
    server: grpc.aio.Server, name: str, methods: Mapping[str, str], handlers: Mapping[str, Handler]
) -> None:
    """Add a service before the server starts.

    The handlers take and return bytes, so that the guard also handles parse errors. The methods are registered by name,
    so gRPC has a queue of pending calls for each method. So a health check does not wait behind many other calls.

    Args:
        server: The server.
        name: The full name of the service.
        methods: The type of each method, as in the `grpc_server_*` metrics.
        handlers: The handler of each method.
    """
    server.add_registered_method_handlers(
        name, {method: _KINDS[kind](handlers[method]) for method, kind in methods.items()}
    )


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials with the current TLS files. gRPC calls `fetch` at every handshake, in gRPC's threads."""
    in_use = certificates.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal in_use
        current = certificates.current
        if current is in_use:
            return None
        in_use = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(in_use),
        fetch,  # type: ignore[arg-type]  # None means "no change"; the type stubs lack it
        require_client_authentication=in_use.client_ca is not None,
    )


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.client_ca)


def _drop_client_disconnects(record: logging.LogRecord) -> bool:
    """Filter log records: drop grpcio's lines about callers that disconnected before the reply."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)
