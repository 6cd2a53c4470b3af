"""A method of a protocol: one RPC or HTTP route, with the settings for its calls."""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Protocol

from encserve_server.errors import Naming
from encserve_server.statuses import Status
from encserve_server.telemetry.spans import SERVER_ERROR_CODES


class Access(Enum):
    """The callers that may use a method, if the server asks for keys or certificates."""

    OPEN = auto()  # everyone, for health checks
    LISTING = auto()  # for lists of models: known callers; with --public-listing, everyone
    CALLERS = auto()  # known callers
    INSPECT = auto()  # known callers with the permission to inspect

    @property
    def is_open(self) -> bool:
        """Whether the method can accept callers without a key. LISTING accepts such callers with --public-listing.

        Requests without a key have at most OPEN_REQUEST_BYTES.
        """
        return self in (Access.OPEN, Access.LISTING)


class CallObserver(Protocol):
    """Counts the calls of one RPC or route in the protocol's metrics. The methods run on the event loop."""

    def began(self) -> None:
        """Count a call that begins."""

    def ended(self, status: Status, reason: str, seconds: float) -> None:
        """Count a call that has ended. `reason` is the reason of the error; empty without an error."""


class Method:
    """One RPC or HTTP route, with the settings for its calls."""

    def __init__(
        self,
        name: str,
        naming: Naming,
        observer: CallObserver | None,
        *,
        attributes: Mapping[str, str] | None = None,
        status_attribute: str = "",
        code_of: Callable[[Status], str | int] = lambda status: status.grpc,
        is_failure: Callable[[Status], bool] = lambda status: status.grpc in SERVER_ERROR_CODES,
        answers_while_draining: bool = False,
        reply_copies: int = 1,
        access: Access = Access.CALLERS,
        log_name: str = "",
    ) -> None:
        """Set the settings.

        Args:
            name: The name of the method's spans.
            naming: The names of fields and values in errors.
            observer: Counts the calls of the method; None for health checks, which are not counted and not traced.
            attributes: The attributes of the method's spans, by OpenTelemetry's conventions for the protocol.
            status_attribute: The name of the span attribute for the status code.
            code_of: Returns the protocol's code for a status.
            is_failure: Returns whether a status counts as the server's error in traces.
            answers_while_draining: Whether the server answers the method while the server stops.
            reply_copies: The number of copies of a reply in memory while the reply is sent.
            access: The callers that may use the method.
            log_name: The name of the method in the access log; by default `name`.
        """
        self.name = name
        self.naming = naming
        self.observer = observer
        self.attributes = attributes or {}
        self.status_attribute = status_attribute
        self.code_of = code_of
        self.is_failure = is_failure
        self.answers_while_draining = answers_while_draining
        self.reply_copies = reply_copies
        self.access = access
        self.log_name = log_name or name
