"""The caller of one call: identity, permissions, and rate."""

import math
from collections.abc import Callable, Collection, Sequence

from encserve_server.callers.registry import Callers, Identity, KnownCaller
from encserve_server.calls.method import Access
from encserve_server.errors import PermissionDenied, RateLimited, Unauthenticated
from encserve_server.models.catalog import Catalog
from encserve_server.system.clock import Clock
from encserve_server.types.callers import ANYONE, CertificateName, Metadata
from encserve_server.types.sequences import TokenSequence


class CallerAccess:
    """The caller of one call, on a server with known callers.

    Attributes:
        caller: The caller, after `identify`.
    """

    __slots__ = (
        "_callers", "_charged", "_charged_text_tokens", "_charged_tokens", "_clock", "_generation", "_identity",
        "_known", "_metadata", "_prepaid_tokens", "caller",
    )  # fmt: skip

    def __init__(self, callers: Callers, clock: Clock, metadata: Metadata) -> None:
        """Set the headers of the call. Later, `identify` finds the caller."""
        self._callers = callers
        self._clock = clock
        self._metadata = metadata
        self._identity: Identity | None = None
        self._known: KnownCaller | None = None
        self._generation = callers.generation
        self._charged: list[TokenSequence] = []  # the sequences that `charge` has counted
        # The tokens that the call has counted against the rate: in total, and by `charge_text`.
        self._charged_tokens = self._charged_text_tokens = 0
        self._prepaid_tokens = 0  # tokens that `charge_text` has counted; the next `charge` subtracts these tokens
        self.caller = ANYONE

    @property
    def models(self) -> Collection[str] | None:
        """The models that the caller may use; None for all."""
        return None if self._known is None else self._known.rules.models

    @property
    def has_rate(self) -> bool:
        """Whether the caller has a rate limit."""
        return self._known is not None and self._known.bucket is not None

    def identify(self, certificate_names: Callable[[], Collection[CertificateName]], access: Access) -> None:
        """Find the caller by a key or a certificate.

        Raises:
            Unauthenticated: The caller is unknown, and the method needs a known caller.
        """
        try:
            self._identity = self._callers.identify(self._metadata, certificate_names)
        except Unauthenticated:
            if access is Access.LISTING and self._callers.public_listing:
                return
            raise
        self._look_up()

    def check(self, access: Access) -> None:
        """Check that the caller may use a method now.

        Raises:
            PermissionDenied: The caller may not use this method.
            RateLimited: The caller is over its rate.
        """
        rules = None if self._known is None else self._known.rules
        if access is Access.INSPECT and rules is not None and not rules.may_inspect:
            problem = f"caller {rules.caller.name} may not use Inspect: the callers file has inspect = false"
            raise PermissionDenied("", problem)
        if access is not Access.LISTING:
            self.check_rate()

    def check_model(self, catalog: Catalog, name: str) -> None:
        """Check that the caller may use the model with this name.

        Raises:
            PermissionDenied: The caller may not use the model. A call through a proxy has the permissions of the
                proxy, and the error names the proxy.
        """
        if self._known is not None and self._known.rules.models is not None:
            catalog.check_use(name, self._known.rules.caller.name, self._known.rules.models)

    def recheck(self) -> None:
        """Look up the caller again if the callers have changed.

        Raises:
            Unauthenticated: The key or certificate was revoked.
        """
        if self._callers.generation != self._generation:
            self._look_up()

    def of_request(self) -> "CallerAccess":
        """Return the access of one request of a stream. The request counts its tokens separately."""
        one = CallerAccess(self._callers, self._clock, ())
        one._known, one.caller = self._known, self.caller
        return one

    def check_rate(self) -> None:
        """Check that the caller is not over its rate.

        Raises:
            RateLimited: The caller is over its rate.
        """
        known = self._known
        if known is None or known.bucket is None or known.rules.tokens_per_second is None:
            return
        if delay_s := known.bucket.delay_seconds(self._clock.now()):
            raise RateLimited(known.rules.caller.name, known.rules.tokens_per_second, delay_s)

    def charge_text(self, tokens: int) -> None:
        """Count the tokens of texts against the rate as soon as the texts are tokenized.

        The caller pays these tokens even if the call fails later.

        Raises:
            RateLimited: The caller is over its rate, and these are the first tokens of this call.
        """
        self._charged_text_tokens += tokens
        self._prepaid_tokens += tokens
        self._take(tokens)

    def charge(self, sequences: Sequence[TokenSequence]) -> None:
        """Count the cost of sequences against the rate. Tokens that `charge_text` has counted are not counted again.

        If the call fails later, `end` reduces the charge.

        Raises:
            RateLimited: The caller is over its rate, and these are the first tokens of this call.
        """
        if self.has_rate:
            self._charged += sequences
            due, self._prepaid_tokens = sum([it.cost for it in sequences]) - self._prepaid_tokens, 0
            self._take(due)

    def end(self, *, failed: bool) -> None:
        """Forget the sequences. If the call failed, reduce its charge.

        A failed call pays the larger of two amounts: the cost of the sequences that have started, or the number of
        tokens of the texts.
        """
        if failed and self._charged_tokens and self._known is not None and self._known.bucket is not None:
            started = sum([it.cost for it in self._charged if not math.isnan(it.started_at)])
            cost = max(started, self._charged_text_tokens)
            self._known.bucket.take(cost - self._charged_tokens, self._clock.now())
        self._charged, self._metadata = [], ()

    def _look_up(self) -> None:
        """Look up the caller in the current callers file."""
        self._generation = self._callers.generation
        self._known = self._callers.known(self._identity)
        self.caller = self._callers.caller(self._known, self._metadata)

    def _take(self, tokens: int) -> None:
        if self._known is None or self._known.bucket is None:
            return
        has_counted, self._charged_tokens = self._charged_tokens > 0, self._charged_tokens + tokens
        try:
            if not has_counted:
                self.check_rate()
        finally:
            self._known.bucket.take(tokens, self._clock.now())
