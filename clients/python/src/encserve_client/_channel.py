"""The channel: its options, its credentials, and what every call sends along."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from encserve_client._arguments import want
from encserve_client._exceptions import InvalidInputError
from encserve_client._target import balancing_options, is_balanced
from encserve_client._wire_sync import Metadata

ChannelOption = tuple[str, str | int]
_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How to check the server's certificate, and which of our own to show.

    Tls()                                                # a public certificate, checked against the usual roots
    Tls(ca="ca.pem")                                     # one's own certificate authority
    Tls(ca="ca.pem", cert="client.pem", key="client.key")  # mutual TLS

    Files are read once, when the client is made.

    Attributes:
        ca: PEM file of the authorities to trust; None for gRPC's own list.
        cert: PEM file of the certificate chain to show; None to show none.
        key: PEM file of its private key.
        server_name: The name that the server's certificate must have, where it is not the target's.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if only one of `cert` and `key` is given."""
        if (self.cert is None) != (self.key is None):
            raise ValueError(f"cert and key go together; were {self.cert} and {self.key}")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def channel_options(
    target: str, max_message_bytes: int, tls: Tls | None, extra: Mapping[str, str | int] | None
) -> list[ChannelOption]:
    """The options of a channel to a gRPC target; `extra` has the last word."""
    options: dict[str, str | int] = {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_send_message_length": max_message_bytes,
        # gRPC's own retries stop without a word for requests above grpc.per_rpc_retry_buffer_size (256 KiB), which a
        # batch of texts easily is, and know nothing of splitting. `_retry` does it for every size.
        "grpc.enable_retries": 0,
        # While a connection is down gRPC fails calls at once and tries to connect again only after 1, 1.6, … 120 s: by
        # then our retries would be used up, or a server that is back would go unnoticed for minutes.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5000,
        "grpc.primary_user_agent": "encserve-client",
        **(balancing_options() if is_balanced(target) else {}),
    }
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
        InvalidInputError: One of them is of the wrong type.
        ValueError: Both are given.
    """
    want("tls", tls, (Tls, bool, type(None)), "a Tls or a bool")
    want("credentials", credentials, (grpc.ChannelCredentials, type(None)), "grpc.ChannelCredentials or None")
    settings = Tls() if tls is True else tls or None
    if settings is None:
        return None, credentials
    if credentials is not None:
        raise ValueError("give tls or credentials, not both")
    return settings, settings.credentials()


def call_metadata(token: str | None, metadata: Mapping[str, str] | Sequence[tuple[str, str]] | None) -> Metadata:
    """What every call sends along.

    Raises:
        InvalidInputError: Something is of the wrong type.
        ValueError: A key or a value cannot be sent; the text names the key and keeps the value secret.
    """
    given = () if metadata is None else want("metadata", metadata, (Mapping, list, tuple), "a dict or a list of pairs")
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    if token is not None:
        pairs.append(("authorization", f"Bearer {want('token', token, str, 'a str or None')}"))
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInputError("metadata must be of (key, value) pairs")
        key, value = pair
        want("a metadata key", key, str, "a str")
        if not _METADATA_KEY.fullmatch(key):
            raise ValueError(f"a metadata key must be of a-z, 0-9, '-', '_' and '.'; was {key!r}")
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise ValueError(f"the metadata value of {key!r} must be a str of printable ASCII")
    return tuple(pairs)


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
