"""How a connection is encrypted."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from encserve_client.exceptions import InvalidInputError


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
        """Raises InvalidInputError if only one of `cert` and `key` is given."""
        if (self.cert is None) != (self.key is None):
            raise InvalidInputError(f"cert and key go together; were {self.cert} and {self.key}")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidInputError for one that cannot be read."""
        return grpc.ssl_channel_credentials(_read("ca", self.ca), _read("key", self.key), _read("cert", self.cert))


def _read(name: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"tls.{name} cannot be read: {error}") from error
