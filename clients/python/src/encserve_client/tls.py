"""Settings for encrypted connections."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from encserve_client.exceptions import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The TLS settings of a client: trusted authorities, and a client certificate for mutual TLS.

    Tls()                                                # gRPC's own list of public authorities
    Tls(ca="ca.pem")                                     # a private certificate authority
    Tls(ca="ca.pem", cert="client.pem", key="client.key")  # mutual TLS

    If a file changes, new connections use the new content. Running calls keep their connection.

    Attributes:
        ca: PEM file of the authorities to trust; None for gRPC's own list.
        cert: PEM file of the client's certificate chain; None for no client certificate.
        key: PEM file of the certificate's private key.
        server_name: The name that the server's certificate must have; None for the name in the target.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Raise InvalidInputError if only one of `cert` and `key` is given."""
        if (self.cert is None) != (self.key is None):
            raise InvalidInputError(f"cert and key go together: give both or neither; were {self.cert} and {self.key}")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials. Raise InvalidInputError if a file cannot be read or has the wrong content."""
        self.context()
        ca, cert, key = self.read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of `ca`, `cert` and `key`. Raise InvalidInputError if a file cannot be read."""
        return _read("ca", self.ca), _read("cert", self.cert), _read("key", self.key)

    def context(self) -> ssl.SSLContext:
        """Return Python's SSL context. Raise InvalidInputError if a file cannot be read or has the wrong content."""
        self.read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        try:
            if self.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"must be a PEM file of whole certificates; was {self.ca}", field="tls.ca"
            ) from error
        if self.cert is None:
            return context
        try:
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"must be a PEM certificate, with its private key without a password in tls.key; were {self.cert} and "
                f"{self.key}",
                field="tls.cert",
            ) from error
        return context


def _read(name: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot be read: {path}: {error.strerror}", field=f"tls.{name}") from error
