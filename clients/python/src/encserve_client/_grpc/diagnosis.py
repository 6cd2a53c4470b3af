"""Why no connection comes about: gRPC says "Socket closed" of most, so one handshake of our own finds out."""

import contextlib
import re
import socket
import ssl
import time
import urllib.parse
from dataclasses import replace

import grpc

from encserve_client._logic.failures import Failure
from encserve_client.tls import Tls

# What gRPC says where no connection lasts, of the address that it tried last; and what of one that was not reached.
_NO_CONNECTION = re.compile(r"failed to connect to all addresses|connections to all backends failing", re.IGNORECASE)
_MAYBE_TLS = re.compile(
    r"socket closed|handshake|verification|reset by peer|recvmsg|endpoint closing|connection closed|end of",
    re.IGNORECASE,
)
_NOT_REACHED = re.compile(r"connection refused|unreachable|no route to host", re.IGNORECASE)
_ADDRESS = re.compile(r"\bipv[46]:([^\s,]+):(\d+)\b")
_SECONDS = 1.0
_REMEMBER_SECONDS = 1.0
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, …_HAS_EXPIRED, …_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH
_NOT_YET_VALID, _EXPIRED, _OTHER_NAMES = 9, 10, (62, 64)
# What a server says, if anything, of a caller's certificate that is missing or wrong.
_ALERT = re.compile(r"ALERT_(.*CERTIFICATE.*|UNKNOWN_CA|HANDSHAKE_FAILURE|ACCESS_DENIED)")


class Diagnosis:
    """Finds out why a server cannot be connected to, where TLS may be the cause.

    Args:
        target: The gRPC target.
        tls: What the client's connections are encrypted with; None for plaintext.
    """

    def __init__(self, target: str, tls: Tls | None) -> None:
        self._target = target
        self._tls = tls
        self._found: tuple[float, str] | None = None  # when the last handshake was, and what it found

    def may_help(self, failure: Failure) -> bool:
        """Whether a failure may be one of TLS."""
        return (
            failure.code is grpc.StatusCode.UNAVAILABLE
            and not failure.reason
            and _NO_CONNECTION.search(failure.message) is not None
            and bool(self._addresses(failure.message))
        )

    def explain(self, failure: Failure) -> Failure:
        """The same failure, with its cause in front if there is one. Blocks for some seconds, where `may_help`."""
        if not self.may_help(failure):
            return failure
        if self._found is None or time.monotonic() - self._found[0] > _REMEMBER_SECONDS:
            cause = ""
            for address in self._addresses(failure.message):
                with contextlib.suppress(OSError, ValueError):  # whose cause is not TLS, or is not known
                    cause = self._speaks_tls(address) if self._tls is None else self._handshake(address, self._tls)
                if cause:
                    break
            self._found = time.monotonic(), cause
        cause = self._found[1]
        return replace(failure, message=f"{cause}. gRPC says: {failure.message}") if cause else failure

    def _addresses(self, said: str) -> list[tuple[str, int]]:
        """Which addresses to ask: the one that gRPC names, or the target's where that one was not reached.

        gRPC tells the error of one address alone. For `localhost` that is often ::1, where nothing listens.
        """
        found = _ADDRESS.search(said)
        named = None if found is None else (urllib.parse.unquote(found[1]).strip("[]"), int(found[2]))
        if _NOT_REACHED.search(said):
            return [it for it in _addresses_of(self._target) if it != named]
        if not _MAYBE_TLS.search(said):
            return []
        return _addresses_of(self._target)[:1] if named is None else [named]

    def _speaks_tls(self, address: tuple[str, int]) -> str:
        """What to say to a client without TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
        try:
            _shake(address, context, None)
        except ssl.SSLError as error:
            if not _ALERT.search(error.reason or ""):
                return ""
        return (
            "the server uses TLS, but this client uses plaintext: give tls=True or Tls(ca=…), or --tls or --ca in a "
            "command"
        )

    def _handshake(self, address: tuple[str, int], tls: Tls) -> str:
        """What to say to a client with TLS; empty if nothing is wrong."""
        name = tls.server_name or next((host for host, _ in _addresses_of(self._target)), address[0])
        try:
            is_open = _shake(address, tls.context(), name)
        except ssl.SSLCertVerificationError as error:
            return _of_the_server(error, address, tls, name)
        except ssl.SSLError as error:
            reason = error.reason or ""
            if reason == "WRONG_VERSION_NUMBER":
                return "the server speaks plaintext, this client TLS: leave tls out, or give the port that has TLS"
            if _ALERT.search(reason):
                return f"{_of_the_caller(tls)} (TLS: {reason.lower().replace('_', ' ')})"
            if not isinstance(error, ssl.SSLEOFError):
                return f"TLS failed: {reason.lower().replace('_', ' ') or error}"
            is_open = False
        return "" if is_open else _of_the_caller(tls)


def _addresses_of(target: str) -> list[tuple[str, int]]:
    """The hosts and ports of a gRPC target; none where it has none."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]
    elif scheme.startswith("unix"):
        return []
    parts = [it.rpartition(":") for it in target.split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in parts if host and port.isdigit()]


def _shake(address: tuple[str, int], context: ssl.SSLContext, name: str | None) -> bool:
    """Connects; returns whether the connection lasts. With TLS 1.3 a server refuses certificates afterwards."""
    with (
        socket.create_connection(address, timeout=_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=name) as encrypted,
    ):
        try:
            return encrypted.recv(1) != b""  # a gRPC server speaks first
        except TimeoutError:
            return True


def _of_the_caller(tls: Tls) -> str:
    if tls.cert is None:
        return "the server wants a client certificate: give tls=Tls(cert=…, key=…), or --cert and --key in a command"
    return (
        f"the server does not take the client certificate of {tls.cert}: it has expired, or is of an authority that "
        "the server does not know"
    )


def _of_the_server(error: ssl.SSLCertVerificationError, address: tuple[str, int], tls: Tls, name: str) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet, by the clock of this machine"
    if error.verify_code in _OTHER_NAMES:
        return (
            f"the server's certificate is not for {name!r}, but for {_names(address, tls)}: connect to one of these "
            "names, or give it as Tls(server_name=…)"
        )
    roots = "the list of authorities of this machine" if tls.ca is None else f"{tls.ca}"
    return (
        f"the server's certificate is of an authority that is not in {roots} ({error.verify_message}): give the right "
        "one as Tls(ca=…), or --ca in a command"
    )


def _names(address: tuple[str, int], tls: Tls) -> str:
    """The names of the server's certificate."""
    context = tls.context()
    context.check_hostname = False
    with (
        socket.create_connection(address, timeout=_SECONDS) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        shown = encrypted.getpeercert() or {}
    found = [repr(it[1]) for it in shown.get("subjectAltName", ())]
    return ", ".join(found) or "no name"
