"""Channels to a target of one or several servers: options, credentials, and reloads of certificates."""

import json
import time
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.message_factory import GetMessageClass

from encserve import __version__
from encserve_client._arguments import check_type
from encserve_client._grpc.proxy import uses_proxy
from encserve_client._grpc.target import is_balanced
from encserve_client._logic.failures import UNREADABLE_REPLY
from encserve_client._logic.planning import Message
from encserve_client._logic.wire import Answered, Event, Failed
from encserve_client.exceptions import InvalidInputError
from encserve_client.tls import Tls
from encserve_proto.v1 import encoder_pb2 as pb

# The shortest time between two checks of the certificate files.
_CHECK_SECONDS = 1.0
_CONNECT_MS = 5_000

ChannelOption = tuple[str, str | int]
_SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"]
SERVICE_NAME: str = _SERVICE.full_name
# The class of the request → the class of the reply.
_REPLIES: dict[type, Any] = {GetMessageClass(it.input_type): GetMessageClass(it.output_type) for it in _SERVICE.methods}


class Connection:
    """A channel and the methods of the service. Calls hold references, and a channel without references is closed.

    A method takes a message and returns bytes, for two reasons. gRPC hides the error of a reply that cannot be parsed.
    And with threads, parsing in the caller's thread instead of the thread of gRPC makes streams 10 % faster.

    Attributes:
        channel: The channel.
        methods: Name of the RPC → gRPC's callable.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.methods: dict[str, Any] = {
            it.name: (channel.unary_stream if it.server_streaming else channel.unary_unary)(
                f"/{SERVICE_NAME}/{it.name}", request_serializer=_serialize
            )
            for it in _SERVICE.methods
            if not it.client_streaming
        }


def _serialize(request: ProtoMessage) -> bytes:
    return request.SerializeToString()


def parse_reply(request: ProtoMessage, reply: bytes) -> Any:
    """Return the message of a reply to `request`.

    Raises:
        DecodeError: The bytes are not such a message.
    """
    return _REPLIES[type(request)].FromString(reply)


def event_of_reply(message: Message, reply: bytes) -> Event:
    """Return the event for a reply to a message, or the failure of a reply that is not such a message."""
    try:
        return Answered(message, parse_reply(message.request, reply))
    except DecodeError:
        return Failed(message, UNREADABLE_REPLY)


class CertificateReloader:
    """Detects changes of the certificate files. New credentials need a new channel.

    https://github.com/grpc/grpc/issues/41779
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls if tls is not None and (tls.ca, tls.cert) != (None, None) else None
        self._last_check = time.monotonic()
        self._contents = None if self._tls is None else self._tls.read()

    def new_credentials(self) -> grpc.ChannelCredentials | None:
        """Return credentials if the files have changed and are valid, otherwise None. Checks at most once a second."""
        now = time.monotonic()
        if self._tls is None or now - self._last_check < _CHECK_SECONDS:
            return None
        self._last_check = now
        try:
            contents = self._tls.read()
            if contents == self._contents:
                return None
            credentials = self._tls.credentials()
        except InvalidInputError:  # the file may be half written; the old credentials stay in use
            return None
        self._contents = contents
        return credentials


def balancing_options() -> dict[str, str | int]:
    """Return the channel arguments for round-robin among the servers that say SERVING."""
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        # gRPC watches the health service of each server. A server that is loading, stopping or failing says NOT_SERVING
        # and gets no calls.
        "healthCheckConfig": {"serviceName": SERVICE_NAME},
    }
    return {
        "grpc.service_config": json.dumps(config),
        # In a rolling update the other servers stop next. So gRPC must reconnect to a restarted server before a call's
        # retries are used up.
        "grpc.max_reconnect_backoff_ms": 500,
        # gRPC resolves a name again when a connection is lost, but by default at most every 30 s. In that time, a
        # rolling update could give new addresses to all servers.
        "grpc.dns_min_time_between_resolutions_ms": 1000,
    }


def channel_options(
    target: str, max_message_bytes: int, tls: Tls | None, extra: Mapping[str, str | int] | None
) -> list[ChannelOption]:
    """Return the options of a channel to a gRPC target. `extra` overrides the defaults."""
    # The options have no retry policy. gRPC silently does not retry requests above grpc.per_rpc_retry_buffer_size (256
    # KiB). Many batches of texts are larger. gRPC also cannot split requests. So `_logic.dispatch` retries requests of
    # all sizes. If no server has seen a call, gRPC itself sends the call again (transparent retries, gRFC A6). This
    # happens, for example, while a connection is renewed.
    options: dict[str, str | int] = {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_send_message_length": max_message_bytes,
        # While a connection is down, gRPC fails calls immediately. By default, gRPC reconnects after 1, 1.6, … 120 s.
        # Then a call's retries could end before gRPC reconnects, or a restarted server could wait minutes for calls.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5000,
        # An address that drops packets fails after 5 s, not after gRPC's 20 s. Despite the name, this option is the
        # timeout for connecting.
        "grpc.min_reconnect_backoff_ms": _CONNECT_MS,
        # A machine that loses power does not close its connections. gRPC drops such a connection within 20 s, so that
        # calls have time for another attempt. Servers allow a ping every 10 s.
        "grpc.keepalive_time_ms": 12_000,
        "grpc.keepalive_timeout_ms": 8_000,
        # The timeout of pings that measure bandwidth. During such a ping, gRPC sends no keepalive ping, by default for
        # up to 60 s.
        "grpc.http2.ping_timeout_ms": 8_000,
        "grpc.primary_user_agent": f"encserve-client/{__version__}",
        **(balancing_options() if is_balanced(target) else {}),
    }
    if not uses_proxy(target):
        options["grpc.enable_http_proxy"] = 0
    if tls is not None and tls.server_name is not None:
        options["grpc.ssl_target_name_override"] = tls.server_name
    for name, value in check_type("channel_arguments", {} if extra is None else extra, Mapping, "a dict").items():
        check_type("a name in channel_arguments", name, str, "a str")
        check_type(f"channel_arguments[{name!r}]", value, (str, int), "a str or an int")
        options[name] = value
    return list(options.items())


def channel_credentials(
    tls: Tls | bool | None, credentials: grpc.ChannelCredentials | None
) -> tuple[Tls | None, grpc.ChannelCredentials | None]:
    """Return the settings and the credentials for `tls=` and `credentials=`. None as credentials means plaintext.

    Raises:
        InvalidInputError: An argument has the wrong type, a file cannot be read, or both arguments are given.
    """
    check_type("tls", tls, (Tls, bool, type(None)), "a Tls or a bool")
    check_type("credentials", credentials, (grpc.ChannelCredentials, type(None)), "grpc.ChannelCredentials or None")
    settings = Tls() if tls is True else tls or None
    if settings is None:
        return None, credentials
    if credentials is not None:
        raise InvalidInputError("give tls or credentials, not both")
    return settings, settings.credentials()
