"""Who calls, by key or by certificate; the files are read again when they change."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encserve_server.callers.file import NAME, CallerRules, CallersError, read_callers, read_file, read_keys
from encserve_server.callers.keys import digest_of, presented_keys
from encserve_server.callers.rates import TokenBucket
from encserve_server.errors import Unauthenticated
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.types.callers import ANYONE, Caller, Priority

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
# A file that has changed is taken once it has not changed for so long: half of it may be a file too.
_SETTLE_SECONDS = 0.1
# Each key of a call is hashed, so their number is bounded.
_MAX_PRESENTED_KEYS = 3
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
# Names that a proxy gives are bounded, since each is a label of metrics; all others share one name.
MAX_PROXY_NAMES = 128
OTHER_NAME = "other"

Metadata = Iterable[tuple[str, str | bytes]]
# What a caller is known by: a key's digest, or a name of its certificate.
Identity = bytes | str
Read = Callable[[], bytes]
Parse = Callable[[bytes], list[CallerRules]]


@dataclass(frozen=True, slots=True, eq=False)
class KnownCaller:
    """A caller that the server knows.

    Attributes:
        rules: What it may do.
        bucket: Counts its rate; None where it has no rate.
    """

    rules: CallerRules
    bucket: TokenBucket | None = None


class Callers:
    """Those who may call; owned by the event loop.

    Attributes:
        generation: Grows with each change of who may call.
        public_listing: Whether everybody may list what is served.
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
        """Reads the source.

        Args:
            source: Where keys and callers are read; None where everybody may call.
            clock: The time, for rates.
            public_listing: Whether everybody may list what is served.
            trusts_proxy: Whether a header names the caller, of calls of those that are proxies.
            asks_for_certificates: Whether connections have client certificates.
            on_read: Hears whether a changed file was taken.
            on_change: Hears the names that callers have from now on.

        Raises:
            CallersError: The source cannot be used, or has names of certificates that nobody is asked for.
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
        # The names that proxies have given, which last, since metrics and queues know them; and what they stand for.
        self._proxy_names: set[str] = set()
        self._proxy_callers: dict[tuple[str, Priority], Caller] = {}
        if source is not None:
            rules = source.read()
            if problem := self._unasked(rules):
                raise CallersError(problem)
            self._take(rules)

    @property
    def names(self) -> list[str]:
        """The callers of the file, and those that proxies have named."""
        return [*self._by_name, *(self._proxy_names - self._by_name.keys())]

    def identify(self, metadata: Metadata, certificate_names: Callable[[], Collection[str]]) -> Identity | None:
        """Who calls; None where everybody may.

        A key that is known decides, and otherwise the certificate. How long this takes tells nothing of keys: their
        digests are looked up, and a digest that is nearly right is nothing that a caller could make.

        Args:
            metadata: The headers, their names in lower case.
            certificate_names: Gives the DNS and URI names of the verified client certificate.

        Raises:
            Unauthenticated: No key and no certificate of the call is known. The text repeats nothing of the call.
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
        raise Unauthenticated("the key is not known here, or not any more" if presented else self._advice())

    def known(self, identity: Identity | None) -> KnownCaller | None:
        """Who was identified; None where everybody may call.

        Raises:
            Unauthenticated: It may not call any more.
        """
        if identity is None:
            return None
        if (found := self._known.get(identity)) is None:
            raise Unauthenticated("the key, or the certificate, has been revoked")
        return found

    def caller(self, known: KnownCaller | None, metadata: Metadata) -> Caller:
        """The caller of a call: the one that a trusted proxy names, or else the one that was let in.

        One that a proxy names is at most as urgent as the proxy.
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
                    "a proxy names more callers than are told apart, or sends what is no name; these are one caller",
                    extra={"as": OTHER_NAME, "most": MAX_PROXY_NAMES},
                )
        known = self._by_name.get(name)
        caller = Caller(name) if known is None else known.rules.caller
        caller = replace(caller, priority=max(caller.priority, limit))
        self._proxy_callers[name, limit] = caller
        return caller

    def _advice(self) -> str:
        text = "no key: send it as `authorization: Bearer KEY`, `api-key` or `x-api-key`"
        return f"{text}, or show a client certificate that is known here" if self._has_certificate_names else text

    async def watch(self) -> None:
        """Read the source again whenever it changes, until cancelled. A source that cannot be used changes nothing."""
        if self._source is not None and self._source.can_change:
            await repeat(self._look, _POLL_SECONDS, clock=self._clock)

    async def _look(self) -> None:
        try:  # in a thread: the file may be on a network
            if self._source is None or (rules := await asyncio.to_thread(self._source.read_changed)) is None:
                return
            if problem := self._unasked(rules):
                logger.warning(problem)
            self._take(rules)
        except CallersError as error:
            logger.error("callers refused, and those of before are kept: %s", error)
            self._on_read(False)
        except Exception as error:  # the text and the traceback of the error may have a key
            logger.error("callers refused, and those of before are kept: unexpected %s", type(error).__name__)
            self._on_read(False)
        else:
            self._on_read(True)
            logger.info("callers read again", extra={"callers": list(self._by_name)})

    def _take(self, rules: Sequence[CallerRules]) -> None:
        """Replaces the callers; what rates have counted stays."""
        now = self._clock.now()
        before, self._by_name, self._known = self._by_name, {}, {}
        for it in rules:
            name = it.caller.name
            known = KnownCaller(it, _bucket(it, before.get(name), now))
            self._by_name[name] = known
            self._known |= dict.fromkeys((*it.digests, *it.certificate_names), known)
        self._has_certificate_names = any(it.certificate_names for it in rules)
        self._proxy_callers.clear()  # their weights may have changed
        self._tell_of_proxies(rules)
        self.generation += 1
        self._on_change(self.names)

    def _unasked(self, rules: Sequence[CallerRules]) -> str:
        """What is wrong where names of certificates can never match; empty for nothing."""
        named = [it.caller.name for it in rules if it.certificate_names]
        if self._asks_for_certificates or not named:
            return ""
        why = "nobody is asked for a certificate: that needs --tls-client-ca-file"
        return f"--callers: caller {named[0]} has certificate_names, and {why}"

    def _tell_of_proxies(self, rules: Sequence[CallerRules]) -> None:
        """Warns where the setting and the file do not agree on who may name others."""
        proxies = [it.caller.name for it in rules if it.is_proxy]
        if self._trusts_proxy and not proxies:
            logger.warning("--trust-fairness-id does nothing: no caller of the file has proxy = true")
        elif any(proxies) and not self._trusts_proxy:
            logger.warning("proxy = true does nothing without --trust-fairness-id", extra={"callers": proxies})


class Source:
    """Where callers are read: a file of callers, a file of keys, or one key."""

    def __init__(self, read: Read, parse: Parse, *, can_change: bool = True) -> None:
        """Takes what gives the bytes, and what makes callers of them."""
        self._read = read
        self._parse = parse
        self._last: bytes | str | None = None
        self.can_change = can_change

    def read(self) -> list[CallerRules]:
        """The callers.

        Raises:
            CallersError: They cannot be read.
        """
        self._last = data = self._read()
        return self._parse(data)

    def read_changed(self) -> list[CallerRules] | None:
        """The callers; None where nothing has changed since the last look, or the file is changing now.

        Takes a moment, so it is not for the event loop.

        Raises:
            CallersError: They have changed and cannot be read; raised once for each change.
        """
        try:
            data = self._read()
        except CallersError as error:
            if self._last == str(error):
                return None
            self._last = str(error)
            raise
        if data == self._last:
            return None
        time.sleep(_SETTLE_SECONDS)
        try:
            if self._read() != data:
                return None
        except CallersError:
            return None  # the next look decides
        self._last = data
        return self._parse(data)


def open_source(api_key: str | None, api_key_file: Path | None, callers: Path | None) -> Source | None:
    """The source of callers, from at most one of three settings; None where everybody may call."""
    if callers is not None:
        where = f"--callers {callers}"
        return Source(lambda: read_file(callers, "--callers"), lambda data: read_callers(data, where))
    if api_key_file is not None:
        where = f"--api-key-file {api_key_file}"
        return Source(lambda: read_file(api_key_file, "--api-key-file"), lambda data: read_keys(data, where))
    if api_key is not None:
        key = api_key.encode("utf-8", "surrogateescape")
        return Source(lambda: key, lambda data: read_keys(data, "ENCSERVE_API_KEY"), can_change=False)
    return None


def certificate_names(certificate: Mapping[str, object]) -> list[str]:
    """The DNS and URI names of a certificate as `ssl.SSLSocket.getpeercert` gives it."""
    names = certificate.get("subjectAltName", ())
    assert isinstance(names, tuple)  # noqa: S101 - ssl's own
    return [value for kind, value in names if kind in ("DNS", "URI")]


def _bucket(rules: CallerRules, before: KnownCaller | None, now: float) -> TokenBucket | None:
    rate = rules.tokens_per_second
    if rate is None:
        return None
    if before is None or before.bucket is None:
        return TokenBucket(rate, now)
    before.bucket.change_rate(rate, now)
    return before.bucket
