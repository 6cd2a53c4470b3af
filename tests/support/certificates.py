"""TLS certificates for tests: valid certificates for a server and a client, and several invalid certificates."""

import datetime
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import trustme

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A PEM file with a certificate, and a PEM file with the private key of the certificate."""

    cert: Path
    key: Path

    def der(self) -> bytes:
        """Return the certificate in DER format, the format that `served` returns."""
        return ssl.PEM_cert_to_DER_cert(self.cert.read_text())


class Authority:
    """A certificate authority that writes certificates into a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.cert = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.cert)

    def issue(
        self,
        name: str,
        *names: str,
        days: float = 30,
        begins_in_days: float = -10,
        key_type: trustme.KeyType = trustme.KeyType.ECDSA,
    ) -> Pair:
        """Write a certificate NAME.pem and a key NAME.key.

        The certificate is for the DNS names and addresses in `names`, by default for localhost, 127.0.0.1 and ::1. The
        certificate becomes valid in `begins_in_days` days and expires in `days` days.
        """
        now = datetime.datetime.now(datetime.UTC)
        issued = self._authority.issue_cert(
            *(names or ("localhost", "127.0.0.1", "::1")),
            common_name=name,
            not_before=now + begins_in_days * _DAY,
            not_after=now + days * _DAY,
            key_type=key_type,
        )
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pair.cert.write_bytes(b"".join(it.bytes() for it in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(pair.key)
        return pair


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates of the TLS tests.

    Attributes:
        authority: The first authority, which issued all certificates except `stranger`.
        ca: The certificate file of `authority`.
        server: A certificate for localhost, 127.0.0.1 and ::1.
        client: A certificate for a caller.
        expired: An expired certificate for the same names as `server`.
        other_name: A certificate for other.example, which is not a name of the server.
        stranger: A certificate from a second authority, for the same names as `server`.
        stranger_ca: The certificate file of the second authority.
    """

    authority: Authority
    ca: Path
    server: Pair
    client: Pair
    expired: Pair
    other_name: Pair
    stranger: Pair
    stranger_ca: Path


def make_certificates(directory: Path) -> Certificates:
    """Issue all certificates and write their files into `directory`."""
    authority, stranger = Authority(directory), Authority(directory, "stranger-ca")
    return Certificates(
        authority,
        authority.cert,
        authority.issue("server"),
        authority.issue("client", "client.example"),
        authority.issue("expired", days=-1),
        authority.issue("other-name", "other.example"),
        stranger.issue("stranger"),
        stranger.cert,
    )


def self_signed(directory: Path, name: str, key: str) -> Pair:
    """Write a self-signed certificate for localhost.

    `key` is the key type for openssl's option -newkey. More options of openssl may follow the key type.
    """
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "30"]
    command = ["openssl", "req", "-x509", "-nodes", *subject, "-newkey", *key.split()]
    subprocess.run([*command, "-keyout", pair.key, "-out", pair.cert], check=True, capture_output=True)
    return pair


class Mount:
    """A directory of certificate files with the same links as in a mounted Kubernetes secret.

    `..data` is a symbolic link to a subdirectory with the files. Each visible file is a link to a file in `..data`.
    A change writes a new subdirectory and then replaces `..data`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._changes = 0
        self.pair = Pair(directory / "tls.crt", directory / "tls.key")
        self.ca = directory / "ca.crt"
        directory.mkdir()
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (directory / name).symlink_to(Path("..data") / name)

    def put(self, pair: Pair, ca: Path) -> None:
        """Replace the certificate, the key and the CA file in one step."""
        self._changes += 1
        new = self._directory / f"..{self._changes}"
        new.mkdir()
        for name, file in (("tls.crt", pair.cert), ("tls.key", pair.key), ("ca.crt", ca)):
            (new / name).write_bytes(file.read_bytes())
        link = self._directory / "..link"
        link.symlink_to(new.name)
        link.replace(self._directory / "..data")


def served(port: int, context: ssl.SSLContext) -> bytes:
    """Connect to a local port with TLS, and return the server's certificate in the format DER."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b""
