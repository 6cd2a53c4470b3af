"""The gRPC server: grpcio's, with the options that this service needs."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from encserve_server.rpc.connections import HEADROOM
from encserve_server.rpc.guard import Handler
from encserve_server.settings import MIB, Settings
from encserve_server.system.certificates import Certificates, Identity
from encserve_server.system.listeners import close_all, open_listeners

_KINDS: dict[str, Callable[[Any], "grpc.RpcMethodHandler[Any, Any]"]] = {
    "unary": grpc.stream_unary_rpc_method_handler,  # whose handlers read the one request themselves
    "server_stream": grpc.stream_stream_rpc_method_handler,
    "bidi_stream": grpc.stream_stream_rpc_method_handler,
}

# Room for what a stream puts around a reply that is just within the limit.
_MESSAGE_HEADROOM_BYTES = 64 * 1024
# Calls that a caller may have open on one connection, each with its request in memory. More than anybody has who means
# well: gRPC's clients wait with more by themselves, but near the bound some of their calls are answered UNAVAILABLE.
_MAX_CONNECTION_CALLS = 10_000
# Calls that wait to be taken gRPC answers CANCELLED by itself, beyond a thousand or after 30 s. Admission is ours.
_MAX_PENDING_CALLS = 1_000_000
_MAX_PENDING_SECONDS = 3600
_HANDSHAKE_SECONDS = 10.0


def make_server(settings: Settings) -> grpc.aio.Server:
    """A server that listens nowhere yet."""
    options = [
        # On by default: a second server on a taken port would start in silence and take half the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_request_mib * MIB),
        ("grpc.max_send_message_length", settings.max_response_mib * MIB + _MESSAGE_HEADROOM_BYTES),
        ("grpc.max_allowed_incoming_connections", settings.max_connections * HEADROOM),
        ("grpc.max_concurrent_streams", _MAX_CONNECTION_CALLS),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_SECONDS),
        # None but identity, which is bit 0: 4 KiB could be 4 MiB, and would be made that before anybody looks at them.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Clients may ping an idle connection this often; the default of 5 minutes ends their connection.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A caller that vanished without a word is noticed within two minutes: gRPC waits another 60 s for its answer,
        # whatever `grpc.keepalive_timeout_ms` says.
        ("grpc.keepalive_time_ms", 30_000),
        # A connection that says nothing is kept for two minutes by default.
        ("grpc.server_handshake_timeout_ms", round(_HANDSHAKE_SECONDS * 1000)),
    ]
    if settings.max_connection_age_seconds is not None:  # calls on it are finished, however long they take
        options.append(("grpc.max_connection_age_ms", round(settings.max_connection_age_seconds * 1000)))
    logging.getLogger("grpc._cython.cygrpc").addFilter(_drop_client_disconnects)
    return grpc.aio.server(options=options)


def listen(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None = None) -> int:
    """Makes a server listen on every address of a host, and returns the port: with 0 a free one.

    With `certificates` it speaks TLS, without them plaintext.

    gRPC does not say why it cannot, and of a name's addresses it is content with those that are free: callers of
    localhost would then meet another server on the other address. So each is tried first.

    Raises:
        OSError: As of `open_listeners`.
        RuntimeError: gRPC cannot listen there.
    """
    close_all(open_listeners(host, port))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # [] for an IPv6 address
    if certificates is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _credentials(certificates))


def add_service(
    server: grpc.aio.Server, name: str, methods: Mapping[str, str], handlers: Mapping[str, Handler]
) -> None:
    """Adds a service, before the server starts.

    Its methods take and give bytes, so that parsing them is ours to guard. They are registered by their names: calls
    wait to be taken in a queue for each of them, so that a health check does not wait behind a flood.

    Args:
        server: The server.
        name: The service's full name.
        methods: The methods with their types, as `grpc_server_*` metrics name them.
        handlers: The methods' handlers.
    """
    server.add_registered_method_handlers(
        name, {method: _KINDS[kind](handlers[method]) for method, kind in methods.items()}
    )


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that follow the files: gRPC asks at every handshake, in threads of its own, for what is new."""
    served = certificates.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        current = certificates.current
        if current is served:
            return None
        served = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        fetch,  # type: ignore[arg-type]  # the stubs know no None, which is for "no change"
        require_client_authentication=served.client_ca is not None,
    )


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.client_ca)


def _drop_client_disconnects(record: logging.LogRecord) -> bool:
    """A log filter: False for grpcio's lines about a caller that disconnected before its answer."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, grpc.aio.InternalError) and 'Failed "execute_batch"' in str(error))
