"""The channel to a target, which is one server or several that take turns: its options and its credentials."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from encserve_client._arguments import want
from encserve_client._grpc.proxy import uses_proxy
from encserve_client._grpc.target import is_balanced
from encserve_client.exceptions import InvalidInputError
from encserve_client.tls import Tls
from encserve_proto.v1 import encoder_pb2 as pb

# Files of certificates are looked at so often, at most.
_LOOK_SECONDS = 1.0
_CONNECT_MS = 5_000

ChannelOption = tuple[str, str | int]
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name


@dataclass(eq=False)
class Link:
    """A channel and its methods. Calls hold the one that they use: one that nobody holds any more is closed."""

    channel: Any
    stub: Any


class Freshness:
    """Whether the files of `tls` have changed: gRPC's credentials are for good, so a channel has to be opened anew.

    https://github.com/grpc/grpc/issues/41779
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls if tls is not None and (tls.ca, tls.cert) != (None, None) else None
        self._looked = time.monotonic()
        self._read = None if self._tls is None else self._tls.read()

    def new_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of files that have changed and are valid, otherwise None; looks at most once a second."""
        now = time.monotonic()
        if self._tls is None or now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        try:
            found = self._tls.read()
            if found == self._read:
                return None
            credentials = self._tls.credentials()
        except InvalidInputError:  # half written, perhaps; those from before may do, and if not, the server says so
            return None
        self._read = found
        return credentials


def balancing_options() -> dict[str, str | int]:
    """The channel arguments that send call after call to the next server that says it is serving."""
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        # gRPC watches the health service of each server. One that says NOT_SERVING, because it is loading or stopping
        # or because its engine fails, gets no calls.
        "healthCheckConfig": {"serviceName": SERVICE_NAME},
    }
    return {
        "grpc.service_config": json.dumps(config),
        # A server that is back must be noticed before the retries of a call are used up: the others may go next.
        "grpc.max_reconnect_backoff_ms": 500,
        # A name is looked up again when a connection is lost, but by default no sooner than 30 s after the last time:
        # servers replaced one after another, with new addresses, could all be unknown until then.
        "grpc.dns_min_time_between_resolutions_ms": 1000,
    }


def channel_options(
    target: str, max_message_bytes: int, tls: Tls | None, extra: Mapping[str, str | int] | None
) -> list[ChannelOption]:
    """The options of a channel to a gRPC target; `extra` has the last word."""
    # There is no retry policy: gRPC's own retries stop without a word for requests above
    # grpc.per_rpc_retry_buffer_size (256 KiB), which a batch of texts easily is, and know nothing of splitting.
    # `_logic.dispatch` retries every size. gRPC still resends a call that no server has seen (transparent retries, gRFC
    # A6), as when a connection is renewed at that moment.
    options: dict[str, str | int] = {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_send_message_length": max_message_bytes,
        # While a connection is down gRPC fails calls at once and tries to connect again only after 1, 1.6, … 120 s: by
        # then our retries would be used up, or a server that is back would go unnoticed for minutes.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5000,
        # An address that drops packets fails after 5 s, not after gRPC's 20 s. The name of this option is gRPC's.
        "grpc.min_reconnect_backoff_ms": _CONNECT_MS,
        # A machine that goes down closes no connection. gRPC gives up such a connection within 20 s, and the calls on
        # it still have time for another attempt. Servers allow a ping every 10 s. The third option is for the pings
        # that measure bandwidth: during such a ping, which may last 60 s, gRPC sends no keepalive ping.
        "grpc.keepalive_time_ms": 12_000,
        "grpc.keepalive_timeout_ms": 8_000,
        "grpc.http2.ping_timeout_ms": 8_000,
        "grpc.primary_user_agent": "encserve-client",
        **(balancing_options() if is_balanced(target) else {}),
    }
    if not uses_proxy(target):
        options["grpc.enable_http_proxy"] = 0
    if tls is not None and tls.server_name is not None:
        options["grpc.ssl_target_name_override"] = tls.server_name
    for name, value in want("channel_arguments", {} if extra is None else extra, Mapping, "a dict").items():
        want("a name in channel_arguments", name, str, "a str")
        want(f"channel_arguments[{name!r}]", value, (str, int), "a str or an int")
        options[name] = value
    return list(options.items())


def channel_credentials(
    tls: Tls | bool | None, credentials: grpc.ChannelCredentials | None
) -> tuple[Tls | None, grpc.ChannelCredentials | None]:
    """What `tls=` and `credentials=` mean together; no credentials stand for plaintext.

    Raises:
        InvalidInputError: One of them is of the wrong type, a file cannot be read, or both are given.
    """
    want("tls", tls, (Tls, bool, type(None)), "a Tls or a bool")
    want("credentials", credentials, (grpc.ChannelCredentials, type(None)), "grpc.ChannelCredentials or None")
    settings = Tls() if tls is True else tls or None
    if settings is None:
        return None, credentials
    if credentials is not None:
        raise InvalidInputError("give tls or credentials, not both")
    return settings, settings.credentials()
