"""How a connection is encrypted."""

import ssl
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

    Files are read again when they change, for new connections; calls that are under way go on with theirs.

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
        """Reads the files. Raises InvalidInputError for one that cannot be read, or is not what it should be."""
        self.context()
        ca, cert, key = self.read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """What is in the files: authorities, certificate, key. Raises InvalidInputError for one that cannot be read."""
        return _read("ca", self.ca), _read("cert", self.cert), _read("key", self.key)

    def context(self) -> ssl.SSLContext:
        """The same for Python's own TLS. Raises InvalidInputError for a file that is not what it should be."""
        self.read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        try:
            if self.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"tls.ca {self.ca} holds no complete PEM certificate: {error}") from error
        if self.cert is None:
            return context
        try:
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"tls.cert {self.cert} and tls.key {self.key} must be a PEM certificate and its private key, without a "
                f"password: {error}"
            ) from error
        return context


def _read(name: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"tls.{name} cannot be read: {error}") from error
