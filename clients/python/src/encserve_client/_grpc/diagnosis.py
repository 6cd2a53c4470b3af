"""The cause of a failed connection. gRPC's texts lack the cause, so a test connection finds the cause."""

import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import grpc

from encserve_client._grpc.target import addresses_of
from encserve_client._logic.failures import Failure
from encserve_client.tls import Tls

_SECONDS = 1.0  # for each step of a connection
_REMEMBER_SECONDS = 2.0  # the client retries for this time if the server has never answered
_MAX_ADDRESSES = 3
# An HTTP/2 client's first bytes (RFC 9113, section 3.4): the preface, and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, …_HAS_EXPIRED, …_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH
_NOT_YET_VALID, _EXPIRED, _OTHER_NAMES = 9, 10, (62, 64)
# TLS alerts of a server that refuses the client's certificate, or did not get one.
_ALERT = re.compile(r"ALERT_(.*CERTIFICATE.*|UNKNOWN_CA|HANDSHAKE_FAILURE|ACCESS_DENIED)")
_SET_TARGET = "set the target (target=, --target or ENCSERVE_TARGET)"
_WRONG_PORT = f"{_SET_TARGET} to the server's gRPC port, 50051 by default"

Connect = Callable[[], socket.socket]


class Diagnosis:
    """Finds the cause if a server cannot be reached.

    Args:
        target: The gRPC target.
        tls: The TLS settings of the client's connections; None for plaintext.
        proxy: The proxy of the client's connections; "" for direct connections. The class tests direct connections
            only. Behind a proxy, gRPC's text has the cause.
    """

    def __init__(self, target: str, tls: Tls | None, proxy: str = "") -> None:
        self._target = target
        self._tls = tls
        self._proxy = proxy
        self._last: tuple[float, str] | None = None  # the time of the last test, and the cause

    def may_help(self, failure: Failure) -> bool:
        """Whether the connection may have failed. If a failure has a reason, the server itself answered."""
        return failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason

    def explain(self, failure: Failure) -> Failure:
        """Return the failure with the cause as its text, if a cause was found. May block for some seconds."""
        if not self.may_help(failure):
            return failure
        if self._proxy:
            advice = "Check the proxy, or put the server into NO_PROXY for a direct connection"
            return replace(failure, message=f"through the proxy {self._proxy}: {failure.message}. {advice}")
        if self._last is None or time.monotonic() - self._last[0] > _REMEMBER_SECONDS:
            cause = self._cause()
            self._last = time.monotonic(), cause
        return replace(failure, message=self._last[1] or failure.message)

    def _cause(self) -> str:
        """Return the cause, or "" if a server answers or the cause cannot be found."""
        if self._target.startswith("unix:"):
            return self._cause_at(self._connect_unix, "")
        addresses = addresses_of(self._target)[:_MAX_ADDRESSES]
        causes = {
            f"{host}:{port}": self._cause_at(partial(socket.create_connection, (host, port), _SECONDS), host)
            for host, port in addresses
        }
        if not all(causes.values()):  # a server answers
            return ""
        if len(causes) == 1:
            return next(iter(causes.values()))
        return "; ".join(f"{address}: {cause}" for address, cause in causes.items())

    def _connect_unix(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_SECONDS)
            connection.connect(self._target.removeprefix("unix:").removeprefix("//"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _cause_at(self, connect: Connect, host: str) -> str:
        try:
            connect().close()
        except OSError as error:
            return _connection_cause(error, host)
        try:
            return _cause_in_plaintext(connect) if self._tls is None else _cause_in_tls(connect, self._tls, host)
        except TimeoutError:
            return (
                f"a process accepts connections here, but sends nothing for {_SECONDS:g} s: the process hangs, or does "
                "not use gRPC"
            )
        except (OSError, ValueError):  # the server went away, or the TLS files have changed
            return ""


def _connection_cause(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} cannot be resolved ({_reason(error)}): {_SET_TARGET}"
    if isinstance(error, TimeoutError):
        return (
            f"no answer to a connection within {_SECONDS:g} s: the address is wrong, or a firewall drops packets. "
            f"Check the network, or {_SET_TARGET}"
        )
    return f"no encserve server here: {_reason(error).lower()}. Start one, or {_SET_TARGET}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _cause_in_plaintext(connect: Connect) -> str:
    """Return the cause for a client without TLS, or "" if a server answers in HTTP/2."""
    with connect() as connection:
        try:
            connection.sendall(_PREFACE)
            start = connection.recv(_FRAME_HEADER_BYTES)
        except ConnectionError:
            start = b""
    if start.startswith((b"HTTP/", b"<")):  # Python's http.server answers HTTP/2 with HTML without a head
        return f"an HTTP server answers here, not a gRPC server: {_WRONG_PORT}"
    if start[3:4] == bytes([_SETTINGS]):
        return ""
    if _speaks_tls(connect):
        return (
            "the server uses TLS, but this client uses plaintext: turn on TLS (tls=True or --tls), and give the "
            "authority's file (ca= or --ca) if the authority is not public"
        )
    if not start:
        return (
            "connections are accepted and closed at once: the server behind this address is down or restarting, or it "
            "does not speak gRPC"
        )
    return f"a server that does not speak gRPC answers here: {_WRONG_PORT}"


def _speaks_tls(connect: Connect) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # safe, because this connection sends no data
    try:
        _handshake(connect, context, None)
    except ssl.SSLError as error:
        return _ALERT.search(error.reason or "") is not None
    except OSError:
        return False
    return True


def _cause_in_tls(connect: Connect, tls: Tls, host: str) -> str:
    """Return the cause for a client with TLS, or "" if a server answers in HTTP/2."""
    name = tls.server_name or host or None
    try:
        protocol = _handshake(connect, tls.context(), name)
    except ssl.SSLCertVerificationError as error:
        return _server_certificate_cause(error, connect, tls, name)
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason == "WRONG_VERSION_NUMBER":
            return (
                "the server uses plaintext, but this client uses TLS: leave out tls= (--tls, --ca, --cert), or give "
                "the port with TLS"
            )
        if _ALERT.search(reason):
            return f"{_client_certificate_cause(tls)} (TLS: {reason.lower().replace('_', ' ')})"
        if not isinstance(error, ssl.SSLEOFError):
            return f"TLS failed: {reason.lower().replace('_', ' ') or error}"
        return _client_certificate_cause(tls)
    if protocol is None:
        return _client_certificate_cause(tls)
    return "" if protocol == "h2" else f"a server with TLS answers here, but not in HTTP/2: {_WRONG_PORT}"


def _handshake(connect: Connect, context: ssl.SSLContext, name: str | None) -> str | None:
    """Return the agreed protocol, "" if none was agreed, or None if the server closes the connection.

    With TLS 1.3 a server refuses client certificates after the handshake, so this function also reads a byte.
    """
    with connect() as plain, context.wrap_socket(plain, server_hostname=name) as encrypted:
        try:
            is_open = encrypted.recv(1) != b""  # a gRPC server sends the first bytes
        except TimeoutError:
            is_open = True
        return (encrypted.selected_alpn_protocol() or "") if is_open else None


def _client_certificate_cause(tls: Tls) -> str:
    if tls.cert is None:
        return "the server requires a client certificate: give one (cert= and key=, or --cert and --tls-key)"
    return (
        f"the server refuses the client certificate {tls.cert}: the certificate has expired, or the server does not "
        "know its authority. Give another (cert= or --cert)"
    )


def _server_certificate_cause(error: ssl.SSLCertVerificationError, connect: Connect, tls: Tls, name: str | None) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate has expired: renew it on the server"
    if error.verify_code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet: check the clock of this machine and the certificate"
    if error.verify_code in _OTHER_NAMES:
        return (
            f"the server's certificate is not for {name!r}, but for {_names(connect, tls)}: connect to one of these "
            "names, or give one (server_name= or --server-name)"
        )
    roots = "the list of authorities of this machine" if tls.ca is None else f"{tls.ca}"
    return (
        f"the authority of the server's certificate is not in {roots} ({error.verify_message}): give the authority's "
        "file (ca= or --ca)"
    )


def _names(connect: Connect, tls: Tls) -> str:
    """Return the names in the server's certificate, for a text."""
    context = tls.context()
    context.check_hostname = False
    with connect() as plain, context.wrap_socket(plain) as encrypted:
        certificate = encrypted.getpeercert() or {}
    found = [repr(name[1]) for name in certificate.get("subjectAltName", ())]
    return ", ".join(found) or "no name"
