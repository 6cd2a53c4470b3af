"""The server's TLS files: read, validated, and read again when they change.

`Certificates` owns what is in use. Every port takes `current` for each new connection, so a change needs no restart and
leaves open connections alone. Needs encserve-server[tls].
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.system.files import read_small

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
    from cryptography.x509 import Certificate

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
# How long a caller may resume a TLS session without showing its certificate again.
_SESSION_SECONDS = 60.0
# P-256, P-384 and P-521.
_CURVES = frozenset({"secp256r1", "secp384r1", "secp521r1"})


class CertificateError(ValueError):
    """TLS files cannot be used; the text names the setting, the file and the cause."""


class CertificateObserver(Protocol):
    """Counts changes of TLS files."""

    def certificates_loaded(self, expires: float, client_ca_expires: float | None) -> None:
        """Files are in use; when they expire, in seconds since 1970, as in `Identity`."""

    def certificates_refused(self) -> None:
        """The files have changed and cannot be used; those from before stay in use."""

    def certificates_as_before(self) -> None:
        """After refused files, the files are those in use again."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the files are.

    Attributes:
        cert: PEM file of the server's certificate, and of those between it and its authority.
        key: PEM file of its private key, without a password.
        client_ca: PEM file of the authorities of callers' certificates; None where callers need none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """What is in the files: certificates, key, authorities.

        Raises:
            CertificateError: One of them cannot be read.
        """
        client_ca = None if self.client_ca is None else _read("tls_client_ca_file", self.client_ca)
        return _read("tls_cert_file", self.cert), _read("tls_key_file", self.key), client_ca


@dataclass(frozen=True, slots=True)
class Identity:
    """What valid files hold.

    Attributes:
        cert: The certificate and those between it and its authority, PEM.
        key: The private key, PEM.
        client_ca: The authorities of callers' certificates, PEM; None where callers need none.
        expires: When the first of the certificates expires, in seconds since 1970.
        client_ca_expires: When the last of the authorities expires; None without authorities.
        context: For connections that need a certificate of the caller, if there are authorities.
        lenient_context: For connections where the caller may show a certificate, if there are authorities.
    """

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(repr=False)
    expires: float
    client_ca_expires: float | None
    context: ssl.SSLContext
    lenient_context: ssl.SSLContext


def load_identity(files: TlsFiles, now: float) -> Identity:
    """Reads and validates TLS files.

    Args:
        files: Where they are.
        now: The time, in seconds since 1970.

    Raises:
        CertificateError: A file cannot be read, is no such file, has expired or is not valid yet, the key does not
            belong to the certificate or is of a kind that gRPC does not take, or a file changed meanwhile.
    """
    cert, key, client_ca = found = files.read()
    certificates = _parse("tls_cert_file", files.cert, cert)
    _check_key(files, key, certificates[0])
    for it in certificates:
        _check_dates("tls_cert_file", files.cert, it, now)
    authorities: Sequence[Certificate] = ()
    if files.client_ca is not None and client_ca is not None:
        authorities = _parse("tls_client_ca_file", files.client_ca, client_ca)
        # While authorities are changed, the file may have one that has expired, or is not valid yet, beside others.
        if not any(
            it.not_valid_before_utc.timestamp() <= now < it.not_valid_after_utc.timestamp() for it in authorities
        ):
            last = max(authorities, key=lambda it: it.not_valid_after_utc)
            _check_dates("tls_client_ca_file", files.client_ca, last, now)
    identity = Identity(
        cert,
        key,
        client_ca,
        min(it.not_valid_after_utc.timestamp() for it in certificates),
        max((it.not_valid_after_utc.timestamp() for it in authorities), default=None),
        _make_context(files, client_ca, ssl.CERT_REQUIRED),
        _make_context(files, client_ca, ssl.CERT_OPTIONAL),
    )
    if files.read() != found:  # OpenSSL reads files itself
        raise CertificateError("the TLS files changed while they were read")
    return identity


class Certificates:
    """The TLS files in use.

    Attributes:
        current: What was valid last; replaced as a whole, so any thread may read it.
    """

    def __init__(self, files: TlsFiles, observer: CertificateObserver, now: Callable[[], float] = time.time) -> None:
        """Reads the files; `now` is the time, in seconds since 1970.

        Raises:
            CertificateError: As of `load_identity`.
        """
        self._files = files
        self._observer = observer
        self._now = now
        self._refused: object = None  # what was refused last, so that it is told of once
        self._since = time.monotonic()  # when the sessions that callers may resume began
        self.current = load_identity(files, now())
        self._loaded()

    def look(self) -> None:
        """Takes the files as they are now, if they have changed and are valid; blocks for some milliseconds."""
        found: object = None
        try:
            found = self._files.read()
            if found == (self.current.cert, self.current.key, self.current.client_ca):
                if self._refused is not None:
                    self._refused = None
                    logger.info("the TLS files are those in use again")
                    self._observer.certificates_as_before()
                if self.current.client_ca is not None and time.monotonic() >= self._since + _SESSION_SECONDS:
                    self._end_sessions()
                return
            # What is not valid yet may be a second later, so it is not enough to look at what has changed.
            self.current, self._since = load_identity(self._files, self._now()), time.monotonic()
        except CertificateError as error:
            refused = found or str(error)
            if self._refused != refused and not self._is_changing(found):
                self._refused = refused
                logger.error("changed TLS files are refused, and those from before stay in use: %s", error)
                self._observer.certificates_refused()
        else:
            self._refused = None
            self._loaded()

    async def watch(self, clock: Clock) -> None:
        """Look at the files every second, until cancelled."""
        await repeat(self._look_in_thread, _POLL_SECONDS, clock=clock)

    async def _look_in_thread(self) -> None:
        await asyncio.to_thread(self.look)

    def _end_sessions(self) -> None:
        """Replaces the contexts: neither OpenSSL's nor gRPC's new ones resume a session of the old ones.

        A caller that resumes a session does not show its certificate, which may have expired since. Python's ssl has
        no option against sessions that TLS 1.2 keeps on the server, and gRPC has none at all.
        """
        it = self.current
        identity = replace(
            it,
            context=_make_context(self._files, it.client_ca, ssl.CERT_REQUIRED),
            lenient_context=_make_context(self._files, it.client_ca, ssl.CERT_OPTIONAL),
        )
        if self._files.read() == (it.cert, it.key, it.client_ca):  # OpenSSL reads files itself
            self.current, self._since = identity, time.monotonic()

    def _is_changing(self, found: object) -> bool:
        """Whether the files are others by now: of files that are replaced one after another, the next look decides."""
        try:
            return self._files.read() != found
        except CertificateError:
            return found is not None

    def _loaded(self) -> None:
        it = self.current
        logger.info("TLS files are in use", extra={"expires": _as_text(it.expires)})
        self._observer.certificates_loaded(it.expires, it.client_ca_expires)


def _read(name: str, path: Path) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise CertificateError(f"{name} {path} cannot be read: {error.strerror}") from error


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
    except (ValueError, UnsupportedAlgorithm):  # whose text might show some of the key
        raise CertificateError(f"tls_key_file {files.key} holds no complete PEM private key") from None
    if public != served:
        raise CertificateError(
            f"tls_key_file {files.key}: the key does not belong to the first certificate of tls_cert_file {files.cert}"
        )


def _public_key(path: Path, certificate: "Certificate") -> "CertificatePublicKeyTypes":
    """The key of the server's certificate, which OpenSSL and gRPC's BoringSSL must both be able to use."""
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
        ) and usual in certificate.public_bytes(Encoding.DER):  # not so: RSA for PSS alone, curves without their name
            return public
    raise CertificateError(
        f"tls_cert_file {path}: the key must be RSA, Ed25519, or of the curve P-256, P-384 or P-521, which gRPC takes"
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
            # See `Certificates._end_sessions`.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
    except (OSError, ValueError) as error:
        raise CertificateError(f"OpenSSL does not take the TLS files {files.cert}, {files.key}: {error}") from error
    return context


def _as_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
