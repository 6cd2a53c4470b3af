"""The server's TLS files: reads and validates them, and reads them again when they change.

`Certificates` holds the files in use. Every port uses `Certificates.current` for each new connection. So a change needs
no restart, and open connections stay open. This module needs the extra `tls`.
"""

import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.system.files import FileError, read_files
from encserve_server.system.watched_files import POLL_SECONDS, Contents, WatchedFiles

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
    from cryptography.x509 import Certificate

logger = logging.getLogger(__name__)

# For at most this time, a caller may resume a TLS session. A resumed session does not show the certificate.
_SESSION_SECONDS = 60.0
# P-256, P-384 and P-521.
_CURVES = frozenset({"secp256r1", "secp384r1", "secp521r1"})


class CertificateError(FileError):
    """A TLS file has wrong contents. The text names the setting, the file and the cause."""


class CertificateObserver(Protocol):
    """Receives the changes of TLS files."""

    def certificates_loaded(self, expires: float, client_ca_expires: float | None) -> None:
        """The server has begun to use the files. See `Identity` for the times of expiry."""

    def certificates_refused(self) -> None:
        """The changed files are refused. The server keeps the previous identity."""

    def certificates_as_before(self) -> None:
        """After a refusal, the files have the contents in use again."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of the TLS files, all in PEM.

    Attributes:
        cert: The server's certificate, and the intermediate certificates up to the authority.
        key: The private key of the certificate, without a password.
        client_ca: The authorities of client certificates; None if callers need no certificate.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> Mapping[str, Path]:
        """The path of each file, by its setting."""
        paths = {"tls_cert_file": self.cert, "tls_key_file": self.key, "tls_client_ca_file": self.client_ca}
        return {setting: path for setting, path in paths.items() if path is not None}


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of valid TLS files.

    Attributes:
        contents: The contents of the files, in the order of `TlsFiles.paths`.
        expires: The earliest time at which a certificate of `cert` expires, in seconds since 1970.
        client_ca_expires: The latest time at which an authority expires, in seconds since 1970; None without
            authorities.
        context: The context for most connections. If there are authorities, it requires a client certificate.
        lenient_context: A context in which the client certificate is optional.
    """

    contents: Contents = field(repr=False)
    expires: float
    client_ca_expires: float | None
    context: ssl.SSLContext
    lenient_context: ssl.SSLContext

    @property
    def cert(self) -> bytes:
        """The server's certificate and the intermediate certificates, PEM."""
        return self.contents[0]

    @property
    def key(self) -> bytes:
        """The private key, PEM."""
        return self.contents[1]

    @property
    def client_ca(self) -> bytes | None:
        """The authorities of client certificates, PEM; None if callers need no certificate."""
        return self.contents[2] if len(self.contents) > 2 else None


def load_identity(files: TlsFiles, now: float) -> Identity:
    """Read and validate TLS files. Blocks for some milliseconds.

    Args:
        files: The paths of the files.
        now: The time, in seconds since 1970.

    Raises:
        CertificateError: A file is not valid PEM, has expired or is not yet valid. Or the key does not match the
            certificate, or gRPC does not support the key. Or a file changed while this function read the files.
    """
    contents = read_files(files.paths)
    cert, key, *rest = contents
    client_ca = rest[0] if rest else None
    certificates = _parse("tls_cert_file", files.cert, cert)
    _check_key(files, key, certificates[0])
    for it in certificates:
        _check_dates("tls_cert_file", files.cert, it, now)
    authorities: Sequence[Certificate] = ()
    if files.client_ca is not None and client_ca is not None:
        authorities = _parse("tls_client_ca_file", files.client_ca, client_ca)
        # During a change of authorities, some certificates in the file may have expired or may not be valid yet.
        if not any(
            it.not_valid_before_utc.timestamp() <= now < it.not_valid_after_utc.timestamp() for it in authorities
        ):
            last = max(authorities, key=lambda it: it.not_valid_after_utc)
            _check_dates("tls_client_ca_file", files.client_ca, last, now)
    identity = Identity(
        contents,
        min(it.not_valid_after_utc.timestamp() for it in certificates),
        max((it.not_valid_after_utc.timestamp() for it in authorities), default=None),
        _make_context(files, client_ca, ssl.CERT_REQUIRED),
        _make_context(files, client_ca, ssl.CERT_OPTIONAL),
    )
    if read_files(files.paths) != contents:  # OpenSSL reads the files again, and may have read other contents
        raise CertificateError("the TLS files changed while they were read")
    return identity


class Certificates:
    """The TLS files in use. Belongs to the event loop; any thread may read `current`.

    Attributes:
        current: The last valid identity. A change replaces the whole object.
    """

    def __init__(self, files: TlsFiles, observer: CertificateObserver, now: Callable[[], float] = time.time) -> None:
        """Read the files. `now` returns the time in seconds since 1970.

        Raises:
            FileError: A file cannot be read in time.
            CertificateError: The files cannot be used; see `load_identity`.
        """
        self._files = files
        self._observer = observer
        self._now = now
        self._watched = WatchedFiles(files.paths)
        self._watched.read_first()
        self._problem = ""  # the reason why the server does not use the files; empty if it uses them
        self._sessions_began_at = time.monotonic()
        self.current = load_identity(files, now())
        self._report_loaded()

    async def watch(self, clock: Clock) -> None:
        """Look at the files every second, until cancelled."""

        async def look() -> None:
            await self.look(clock)

        await repeat(look, POLL_SECONDS, clock=clock)

    async def look(self, clock: Clock) -> None:
        """Use the files if they have changed and are valid. Otherwise keep the identity in use."""
        changed: Contents | None = None
        try:
            changed = await self._watched.changed(clock)
            if changed == self.current.contents:
                self._report_unchanged()
            elif changed is not None or self._problem:  # a certificate that was not valid yet may be valid now
                self.current = await self._watched.run(lambda: load_identity(self._files, self._now()))
                self._sessions_began_at = time.monotonic()
                self._problem = ""
                self._report_loaded()
            elif self.current.client_ca is not None and time.monotonic() >= self._sessions_began_at + _SESSION_SECONDS:
                self.current = await self._watched.run(self._with_new_contexts)
                self._sessions_began_at = time.monotonic()
        except FileError as error:
            if changed is not None or self._problem != str(error):
                logger.error("changed TLS files are refused; the previous files stay in use: %s", error)
                self._observer.certificates_refused()
            self._problem = str(error)

    def _with_new_contexts(self) -> Identity:
        """Return the identity with new contexts. OpenSSL and gRPC resume sessions only in the same context.

        A caller that resumes a session does not show its certificate. With the same contexts, a caller with an expired
        certificate could connect for two hours, over gRPC, and over HTTP with TLS 1.2. gRPC has no option against this.
        Python's ssl has no option for sessions that TLS 1.2 keeps on the server.
        """
        current, client_ca = self.current, self.current.client_ca
        renewed = replace(
            current,
            context=_make_context(self._files, client_ca, ssl.CERT_REQUIRED),
            lenient_context=_make_context(self._files, client_ca, ssl.CERT_OPTIONAL),
        )
        return renewed if read_files(self._files.paths) == current.contents else current

    def _report_unchanged(self) -> None:
        if self._problem:
            self._problem = ""
            logger.info("the TLS files have the contents in use again")
            self._observer.certificates_as_before()

    def _report_loaded(self) -> None:
        logger.info("TLS files are in use", extra={"expires": _as_text(self.current.expires)})
        self._observer.certificates_loaded(self.current.expires, self.current.client_ca_expires)


def _parse(name: str, path: Path, data: bytes) -> Sequence["Certificate"]:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(data)
    except ValueError as error:
        raise CertificateError(f"{name} {path} holds no complete PEM certificate: {error}") from error


def _check_key(files: TlsFiles, key: bytes, certificate: "Certificate") -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    served = _public_key(files.cert, certificate)
    try:
        public = load_pem_private_key(key, None).public_key()
    except TypeError:
        raise CertificateError(f"tls_key_file {files.key} has a password; give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):  # the text of the error may show a part of the key
        raise CertificateError(f"tls_key_file {files.key} holds no complete PEM private key") from None
    if public != served:
        raise CertificateError(
            f"tls_key_file {files.key}: the key does not belong to the first certificate of tls_cert_file {files.cert}"
        )


def _public_key(path: Path, certificate: "Certificate") -> "CertificatePublicKeyTypes":
    """Return the public key of the server's certificate. OpenSSL and gRPC's BoringSSL must both support the key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    with contextlib.suppress(ValueError, UnsupportedAlgorithm):
        public = certificate.public_key()
        usual = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if (
            isinstance(public, RSAPublicKey | Ed25519PublicKey)
            or (isinstance(public, EllipticCurvePublicKey) and public.curve.name in _CURVES)
        ) and usual in certificate.public_bytes(Encoding.DER):  # excludes RSA-PSS keys and unnamed curves
            return public
    raise CertificateError(
        f"tls_cert_file {path}: the key must be RSA, Ed25519, or of the curve P-256, P-384 or P-521, for gRPC"
    )


def _check_dates(name: str, path: Path, certificate: "Certificate", now: float) -> None:
    subject = certificate.subject.rfc4514_string()
    ends, begins = certificate.not_valid_after_utc.timestamp(), certificate.not_valid_before_utc.timestamp()
    if ends <= now:
        raise CertificateError(f"{name} {path}: the certificate of {subject!r} expired at {_as_text(ends)}")
    if begins > now:
        raise CertificateError(f"{name} {path}: the certificate of {subject!r} is not valid before {_as_text(begins)}")


def _make_context(files: TlsFiles, client_ca: bytes | None, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(files.cert, files.key)
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode())
            context.verify_mode = verify
            # See `Certificates._with_new_contexts`.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
    except (OSError, ValueError) as error:
        raise CertificateError(f"OpenSSL does not accept the TLS files {files.cert}, {files.key}: {error}") from error
    return context


def _as_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
