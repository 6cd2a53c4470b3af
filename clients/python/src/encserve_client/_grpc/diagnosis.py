"""Why no connection comes about: gRPC's texts do not tell, so a connection of our own finds out."""

import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import grpc

from encserve_client._grpc.proxy import Proxy, ProxyRefusedError
from encserve_client._grpc.target import Address, addresses_of
from encserve_client._logic.failures import Failure
from encserve_client.tls import Tls

_SECONDS = 1.0  # for each step of a connection
_REMEMBER_SECONDS = 2.0  # as long as a server that has never answered gets
_MOST_ADDRESSES = 3
# An HTTP/2 client's first bytes (RFC 9113, section 3.4): the preface, and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, …_HAS_EXPIRED, …_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH
_NOT_YET_VALID, _EXPIRED, _OTHER_NAMES = 9, 10, (62, 64)
# What a server says, if anything, of a caller's certificate that is missing or wrong.
_ALERT = re.compile(r"ALERT_(.*CERTIFICATE.*|UNKNOWN_CA|HANDSHAKE_FAILURE|ACCESS_DENIED)")
_SET_TARGET = "set the target (target=, --target or ENCSERVE_TARGET)"
_WRONG_PORT = f"{_SET_TARGET} to the server's gRPC port, 50051 by default"

Connect = Callable[[], socket.socket]


class Diagnosis:
    """Finds out why a server cannot be reached.

    Args:
        target: The gRPC target.
        tls: The TLS settings of the client's connections; None for plaintext.
        proxy: The proxy of the client's connections; None without one.
    """

    def __init__(self, target: str, tls: Tls | None, proxy: Proxy | None = None) -> None:
        self._target = target
        self._tls = tls
        self._proxy = proxy
        self._found: tuple[float, str] | None = None  # when the last connection ended, and the cause

    def may_help(self, failure: Failure) -> bool:
        """Whether a failure may be one of the connection: then the server itself has given no reason."""
        return failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason

    def explain(self, failure: Failure) -> Failure:
        """The same failure, with the cause in front if there is one. Blocks for some seconds, if `may_help`."""
        if not self.may_help(failure):
            return failure
        if self._found is None or time.monotonic() - self._found[0] > _REMEMBER_SECONDS:
            cause = self._cause()
            self._found = time.monotonic(), cause
        cause = self._found[1]
        if self._proxy is not None:
            cause = f"through the proxy {self._proxy}{': ' if cause else ''}{cause}"
        return replace(failure, message=f"{cause}. gRPC says: {failure.message}") if cause else failure

    def _cause(self) -> str:
        """Why the target cannot be reached; empty if a server answers, or if that cannot be found out."""
        if self._target.startswith("unix:"):
            return self._cause_at(self._connect_unix, "")
        addresses = addresses_of(self._target)[:_MOST_ADDRESSES]
        causes = {
            f"{host}:{port}": self._cause_at(partial(self._connect, (host, port)), host) for host, port in addresses
        }
        if not all(causes.values()):  # one of them answers
            return ""
        if len(causes) == 1:
            return next(iter(causes.values()))
        return "; ".join(f"{address}: {cause}" for address, cause in causes.items())

    def _connect(self, address: Address) -> socket.socket:
        if self._proxy is not None:
            return self._proxy.connect(address, _SECONDS)
        return socket.create_connection(address, timeout=_SECONDS)

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
            return self._of_the_connection(error, host)
        try:
            return _cause_in_plaintext(connect) if self._tls is None else _cause_in_tls(connect, self._tls, host)
        except TimeoutError:
            return f"a process accepts connections here, but sends nothing for {_SECONDS:g} s: it hangs, or is not gRPC"
        except (OSError, ValueError):  # the server went away, or the TLS files have changed
            return ""

    def _of_the_connection(self, error: OSError, host: str) -> str:
        """The cause behind an error of a connection that did not come about."""
        if isinstance(error, ProxyRefusedError):
            return (
                f"the proxy does not connect to {self._target} ({error}): let the proxy do so, or put {host} into "
                "NO_PROXY for a direct connection"
            )
        if self._proxy is not None:
            return (
                f"the proxy cannot be reached ({_reason(error)}): correct or unset {self._proxy.source}, or put {host} "
                "into NO_PROXY for a direct connection"
            )
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
    """What to say to a client without TLS; empty if a server answers in HTTP/2."""
    with connect() as connection:
        try:
            connection.sendall(_PREFACE)
            start = connection.recv(_FRAME_HEADER_BYTES)
        except ConnectionError:
            start = b""
    if start.startswith((b"HTTP/", b"<")):  # Python's http.server answers HTTP/2 with a page of HTML alone
        return f"an HTTP server answers here, and no gRPC server: {_WRONG_PORT}"
    if start[3:4] == bytes([_SETTINGS]):
        return ""
    if _speaks_tls(connect):
        return (
            "the server uses TLS, but this client uses plaintext: give tls=True or Tls(ca=…), or --tls or --ca in a "
            "command"
        )
    return f"a server that does not speak gRPC answers here: {_WRONG_PORT}"


def _speaks_tls(connect: Connect) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        _shake(connect, context, None)
    except ssl.SSLError as error:
        return _ALERT.search(error.reason or "") is not None
    except OSError:
        return False
    return True


def _cause_in_tls(connect: Connect, tls: Tls, host: str) -> str:
    """What to say to a client with TLS; empty if a server answers in HTTP/2."""
    name = tls.server_name or host or None
    try:
        protocol = _shake(connect, tls.context(), name)
    except ssl.SSLCertVerificationError as error:
        return _of_the_server(error, connect, tls, name)
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason == "WRONG_VERSION_NUMBER":
            return "the server speaks plaintext, this client TLS: leave tls out, or give the port that has TLS"
        if _ALERT.search(reason):
            return f"{_of_the_caller(tls)} (TLS: {reason.lower().replace('_', ' ')})"
        if not isinstance(error, ssl.SSLEOFError):
            return f"TLS failed: {reason.lower().replace('_', ' ') or error}"
        return _of_the_caller(tls)
    if protocol is None:
        return _of_the_caller(tls)
    return "" if protocol == "h2" else f"a server with TLS answers here, but not in HTTP/2: {_WRONG_PORT}"


def _shake(connect: Connect, context: ssl.SSLContext, name: str | None) -> str | None:
    """The protocol that both sides agree on, "" without one; None if the server closes the connection.

    With TLS 1.3 a server refuses certificates after the handshake.
    """
    with connect() as plain, context.wrap_socket(plain, server_hostname=name) as encrypted:
        try:
            is_open = encrypted.recv(1) != b""  # a gRPC server speaks first
        except TimeoutError:
            is_open = True
        return (encrypted.selected_alpn_protocol() or "") if is_open else None


def _of_the_caller(tls: Tls) -> str:
    if tls.cert is None:
        return (
            "the server wants a client certificate: give tls=Tls(cert=…, key=…), or --cert and --tls-key in a command"
        )
    return (
        f"the server does not take the client certificate of {tls.cert}: it has expired, or is of an authority that "
        "the server does not know"
    )


def _of_the_server(error: ssl.SSLCertVerificationError, connect: Connect, tls: Tls, name: str | None) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet, by the clock of this machine"
    if error.verify_code in _OTHER_NAMES:
        return (
            f"the server's certificate is not for {name!r}, but for {_names(connect, tls)}: connect to one of these "
            "names, or give it as Tls(server_name=…)"
        )
    roots = "the list of authorities of this machine" if tls.ca is None else f"{tls.ca}"
    return (
        f"the server's certificate is of an authority that is not in {roots} ({error.verify_message}): give the right "
        "one as Tls(ca=…), or --ca in a command"
    )


def _names(connect: Connect, tls: Tls) -> str:
    """The names of the server's certificate."""
    context = tls.context()
    context.check_hostname = False
    with connect() as plain, context.wrap_socket(plain) as encrypted:
        certificate = encrypted.getpeercert() or {}
    found = [repr(name[1]) for name in certificate.get("subjectAltName", ())]
    return ", ".join(found) or "no name"
