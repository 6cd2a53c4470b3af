"""Identifies callers by key or certificate. Reloads the callers when the callers file or key file changes."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encserve_server.callers.file import NAME, CallerRules, CallersError, read_callers, read_keys
from encserve_server.callers.keys import digest_of, presented_keys
from encserve_server.callers.rates import TokenBucket
from encserve_server.errors import Unauthenticated
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.system.files import FileError
from encserve_server.system.watched_files import POLL_SECONDS, WatchedFiles
from encserve_server.types.callers import ANYONE, Caller, CertificateName, Metadata, Priority, dns_name, uri_name

logger = logging.getLogger(__name__)

# The server checks at most this number of keys in a call.
_MAX_PRESENTED_KEYS = 3
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
# The maximum number of different caller names from proxies. Each name is a label value of metrics. Further names are
# counted as `OTHER_NAME`.
MAX_PROXY_NAMES = 128
OTHER_NAME = "other"

# The digest of a caller's key, or a name in the caller's certificate.
Identity = bytes | CertificateName
Parse = Callable[[bytes], list[CallerRules]]


@dataclass(frozen=True, slots=True, eq=False)
class KnownCaller:
    """A caller of the file, with its state.

    Attributes:
        rules: The caller and its permissions.
        bucket: Counts the tokens of the caller; None for a caller without a rate.
    """

    rules: CallerRules
    bucket: TokenBucket | None = None


class Callers:
    """The known callers. Only the event loop uses this class.

    Attributes:
        generation: Increases by 1 with each change of the callers.
        public_listing: Whether callers without a key may list the models.
    """

    def __init__(
        self,
        source: "Source | None",
        clock: Clock,
        *,
        public_listing: bool = False,
        trusts_proxy: bool = False,
        asks_for_certificates: bool = True,
        on_read: Callable[[bool], None] = lambda _: None,
        on_change: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        """Read the callers from the source.

        Args:
            source: The source of the callers; None if everyone may call the server.
            clock: The clock for the rates, and for the time between checks of the file.
            public_listing: Whether callers without a key may list the models.
            trusts_proxy: Whether proxies may name the caller of a call in a header.
            asks_for_certificates: Whether the server asks callers for certificates.
            on_read: Called after each change of the file. The argument is true if the new file was loaded.
            on_change: Called with all names after each change of the callers, and after a new name from a proxy.

        Raises:
            CallersError: The source is invalid, or has certificate names although the server asks for no certificates.
        """
        self.generation = 0
        self.public_listing = public_listing
        self._source = source
        self._clock = clock
        self._trusts_proxy = trusts_proxy
        self._asks_for_certificates = asks_for_certificates
        self._on_read = on_read
        self._on_change = on_change
        self._known: dict[Identity, KnownCaller] = {}
        self._by_name: dict[str, KnownCaller] = {}
        self._has_certificate_names = False
        # Names that proxies have sent. A name is never removed, because metrics and queues use the name.
        self._proxy_names: set[str] = set()
        self._proxy_callers: dict[tuple[str, Priority], Caller] = {}
        if source is not None:
            rules = source.read()
            if problem := self._certificate_names_problem(rules):
                raise CallersError(problem)
            self._replace_callers(rules)

    @property
    def names(self) -> list[str]:
        """The names of the callers in the file, and the names that proxies have given."""
        return [*self._by_name, *(self._proxy_names - self._by_name.keys())]

    def identify(
        self, metadata: Metadata, certificate_names: Callable[[], Collection[CertificateName]]
    ) -> Identity | None:
        """Return the identity of a caller; None if everyone may call the server.

        A known key has precedence over the certificate. The duration of the check does not help an attacker: the server
        compares digests, and similar digests do not belong to similar keys.

        Args:
            metadata: The headers, with names in lower case.
            certificate_names: Returns the names in the verified client certificate.

        Raises:
            Unauthenticated: The call has no known key and no known certificate. The error shows no part of a key.
        """
        if self._source is None:
            return None
        presented = 0
        for key in presented_keys(metadata):
            if (digest := digest_of(key)) in self._known:
                return digest
            presented += 1
            if presented == _MAX_PRESENTED_KEYS:
                break
        if self._has_certificate_names:
            for name in certificate_names():
                if name in self._known:
                    return name
        raise Unauthenticated("unknown or revoked key" if presented else self._advice())

    def known(self, identity: Identity | None) -> KnownCaller | None:
        """Return the caller with this identity; None if everyone may call the server.

        Raises:
            Unauthenticated: The caller has been revoked.
        """
        if identity is None:
            return None
        if (found := self._known.get(identity)) is None:
            raise Unauthenticated("the key, or the certificate, has been revoked")
        return found

    def caller(self, known: KnownCaller | None, metadata: Metadata) -> Caller:
        """Return the caller that a trusted proxy names in a header, or else the identified caller.

        A caller from a proxy's header has at most the priority of the proxy.
        """
        caller = ANYONE if known is None else known.rules.caller
        if not self._trusts_proxy or not (known is None or known.rules.is_proxy):
            return caller
        name = next((value for header, value in metadata if header == FAIRNESS_HEADER), "")
        if not isinstance(name, str) or not name:
            return caller
        return self._proxy_callers.get((name, caller.priority)) or self._named_by_proxy(name, caller.priority)

    def _named_by_proxy(self, name: str, limit: Priority) -> Caller:
        if name not in self._proxy_names and (
            not NAME.fullmatch(name) or len(self._proxy_names - {OTHER_NAME}) == MAX_PROXY_NAMES
        ):
            name = OTHER_NAME
        if name not in self._proxy_names:
            self._proxy_names.add(name)
            self._on_change(self.names)
            if name == OTHER_NAME:
                logger.warning(
                    "a proxy sent malformed or too many caller names; calls with these names count as one caller",
                    extra={"caller": OTHER_NAME, "max_names": MAX_PROXY_NAMES},
                )
        known = self._by_name.get(name)
        caller = Caller(name) if known is None else known.rules.caller
        caller = replace(caller, priority=max(caller.priority, limit))
        self._proxy_callers[name, limit] = caller
        return caller

    def _advice(self) -> str:
        text = "no key: send it as `authorization: Bearer KEY`, `api-key` or `x-api-key`"
        return f"{text}, or use a client certificate of a known caller" if self._has_certificate_names else text

    async def watch(self) -> None:
        """Reload the file after each change, until the task is cancelled. The callers stay if a new file is invalid."""
        if self._source is not None and self._source.can_change:
            await repeat(self._look, POLL_SECONDS, clock=self._clock)

    async def _look(self) -> None:
        try:
            if self._source is None or (rules := await self._source.read_changed(self._clock)) is None:
                return
            if problem := self._certificate_names_problem(rules):
                logger.warning(problem)
            self._replace_callers(rules)
        except (CallersError, FileError) as error:
            logger.error("callers not loaded; the previous callers stay: %s", error)
            self._on_read(False)
        except Exception as error:  # the text and the traceback of the error may show a key
            name = type(error).__name__
            logger.error("callers not loaded; the previous callers stay: unexpected %s", name)
            self._on_read(False)
        else:
            self._on_read(True)
            logger.info("callers loaded", extra={"callers": list(self._by_name)})

    def _replace_callers(self, rules: Sequence[CallerRules]) -> None:
        """Replace the callers. A caller with the same name as before keeps its token bucket."""
        now = self._clock.now()
        previous, self._by_name, self._known = self._by_name, {}, {}
        for it in rules:
            name = it.caller.name
            known = KnownCaller(it, _bucket(it, previous.get(name), now))
            self._by_name[name] = known
            self._known |= dict.fromkeys((*it.digests, *it.certificate_names), known)
        self._has_certificate_names = any(it.certificate_names for it in rules)
        self._proxy_callers.clear()  # the weights of these callers may have changed
        self._warn_of_proxies(rules)
        self.generation += 1
        self._on_change(self.names)

    def _certificate_names_problem(self, rules: Sequence[CallerRules]) -> str:
        """Return an error if a caller has certificate names but the server asks for no certificates; else empty."""
        named = [it.caller.name for it in rules if it.certificate_names]
        if self._asks_for_certificates or not named:
            return ""
        why = "the server asks for no certificates; set --tls-client-ca-file"
        return f"--callers: caller {named[0]} has certificate_names, but {why}"

    def _warn_of_proxies(self, rules: Sequence[CallerRules]) -> None:
        """Log a warning if only the setting, or only the file, allows proxies."""
        proxies = [it.caller.name for it in rules if it.is_proxy]
        if self._trusts_proxy and not proxies:
            logger.warning("--trust-fairness-id does nothing: no caller of the file has proxy = true")
        elif any(proxies) and not self._trusts_proxy:
            logger.warning("proxy = true does nothing without --trust-fairness-id", extra={"callers": proxies})


class Source:
    """A callers file, a key file, or one fixed key."""

    def __init__(self, parse: Parse, *, files: WatchedFiles | None = None, key: bytes = b"") -> None:
        """Set the parser, and either the file or the key."""
        self._parse = parse
        self._files = files
        self._key = key

    @property
    def can_change(self) -> bool:
        """Whether the callers come from a file."""
        return self._files is not None

    def read(self) -> list[CallerRules]:
        """Return the callers. Called at the start of the server.

        Raises:
            CallersError: The file cannot be read, or the callers are invalid.
        """
        try:
            return self._parse(self._key if self._files is None else self._files.read_first()[0])
        except FileError as error:
            raise CallersError(str(error)) from error

    async def read_changed(self, clock: Clock) -> list[CallerRules] | None:
        """Return the new callers if the file has changed and its new content is stable; otherwise None.

        Raises:
            FileError: The file cannot be read. Raised once for each change.
            CallersError: The new callers are invalid. Raised once for each change.
        """
        contents = None if self._files is None else await self._files.changed(clock)
        return None if contents is None else await asyncio.to_thread(self._parse, contents[0])


def open_source(api_key: str | None, api_key_file: Path | None, callers: Path | None) -> Source | None:
    """Return the source of callers. At most one of the three settings is set; without any, return None."""
    if callers is not None:
        where = f"--callers {callers}"
        return Source(lambda data: read_callers(data, where), files=WatchedFiles({"--callers": callers}))
    if api_key_file is not None:
        where = f"--api-key-file {api_key_file}"
        return Source(lambda data: read_keys(data, where), files=WatchedFiles({"--api-key-file": api_key_file}))
    if api_key is not None:
        return Source(lambda data: read_keys(data, "ENCSERVE_API_KEY"), key=api_key.encode("utf-8", "surrogateescape"))
    return None


def certificate_names(certificate: Mapping[str, object]) -> list[CertificateName]:
    """Return the DNS and URI names of a certificate. `certificate` is a dict from `ssl.SSLSocket.getpeercert`."""
    names = certificate.get("subjectAltName", ())
    assert isinstance(names, tuple)  # noqa: S101 - always true for a dict of Python's ssl
    kinds = {"DNS": dns_name, "URI": uri_name}
    return [kinds[kind](value) for kind, value in names if kind in kinds]


def _bucket(rules: CallerRules, previous: KnownCaller | None, now: float) -> TokenBucket | None:
    rate = rules.tokens_per_second
    if rate is None:
        return None
    if previous is None or previous.bucket is None:
        return TokenBucket(rate, now)
    previous.bucket.change_rate(rate, now)
    return previous.bucket
