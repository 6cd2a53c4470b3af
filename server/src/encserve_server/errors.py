"""The errors of requests and of the start, one class for each cause.

Callers see the text of all errors except StartupError. The text may name fields and values, but no file paths. An error
stores the wrong field as a `FieldPath`. Each protocol has a `Naming`, which gives the field's name in this protocol.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar

from encserve_server import statuses
from encserve_server.statuses import Status

# The retry delay of a server that may be ready again soon.
_RESTORED_SECONDS = 0.5


class RequestField(Enum):
    """The fields of a request, in all protocols."""

    INPUTS = auto()
    INPUT = auto()
    TEXT = auto()
    QUERY = auto()
    IDS = auto()
    VECTORS = auto()
    VECTORS_WIDTH = auto()
    VECTORS_DATA = auto()
    SPANS = auto()
    SPAN_UNIT = auto()
    SPAN_ENDS = auto()
    OUTPUTS = auto()
    OUTPUT = auto()
    OUTPUT_KIND = auto()
    OUTPUT_NORMALIZE = auto()
    OUTPUT_DIMENSIONS = auto()
    OUTPUT_POOL_FACTOR = auto()
    OUTPUT_MAX_ACTIVE_DIMS = auto()
    OUTPUT_SPAN_POOLING = auto()
    DATA_TYPE = auto()
    TASK = auto()
    PROMPT_NAME = auto()
    TOKEN_STRINGS = auto()
    EXCLUDE_SPECIAL_TOKENS = auto()
    TOP_K = auto()
    ACTIVATION = auto()
    MODEL = auto()
    MODEL_VERSION = auto()
    FINGERPRINT = auto()
    SPACE_ID = auto()


@dataclass(frozen=True, slots=True)
class FieldPath:
    """The field of a request that an error is about, with its indices.

    Attributes:
        field: The field.
        at: The index of the input. For fields of an output, the index of the output. None for no index.
        place: The index of the token id or span inside the field; None for the whole field.
    """

    field: RequestField
    at: int | None = None
    place: int | None = None


# For these fields, `FieldPath.at` is the index of an output.
_OF_OUTPUTS = frozenset(field for field in RequestField if field.name.startswith("OUTPUT"))


class _Index:
    """An optional index in a path, for `str.format`.

    The format specification is a text in which `#` stands for the index. Without an index, the result is empty.
    """

    def __init__(self, number: int | None) -> None:
        self._number = number

    def __format__(self, text: str) -> str:
        return "" if self._number is None else text.replace("#", str(self._number))


@dataclass(frozen=True, slots=True, eq=False)
class Naming:
    """The names of fields and enum values in one protocol, for error messages.

    Attributes:
        fields: A template for each field, such as `inputs{at:[#]}.token_ids{place:.ids[#]}`. `{at:[#]}` becomes `[3]`
            for the index `at=3`, and empty for `at=None`. `{place:...}` works the same way.
            Instead of a template, a field may have a function that takes `at` and returns the template.
        values: The names of the values of each enum. Other values have their Python name, in lower case.
    """

    fields: Mapping[RequestField, str | Callable[[int | None], str]]
    values: Mapping[type[Enum], Mapping[Any, str]] = field(default_factory=dict)

    def field(self, path: FieldPath) -> str:
        """Return the name of a field, such as `inputs[3].token_ids.ids[17]`."""
        template = self.fields[path.field]
        if callable(template):
            template = template(path.at)
        return template.format(at=_Index(path.at), place=_Index(path.place))

    def value(self, value: Enum) -> str:
        """Return the name of an enum value, such as `TASK_QUERY`."""
        return self.values.get(type(value), {}).get(value) or value.name.lower()


# The names in log lines and in the offline API, such as `ids 3, place 17`.
PLAIN = Naming({it: it.name.lower() + "{at: #}{place:, place #}" for it in RequestField})


class EncserveError(Exception):
    """Base class of all errors of this server.

    Attributes:
        status: The status in all protocols; None if callers must not see the error. By default, the status of the base
            class.
        reason: The machine-readable reason, such as INVALID_FIELD. By default, the name of the class in capitals.
        retry_delay_s: The seconds until a retry; None if a retry does not help.
    """

    status: ClassVar[Status | None] = None
    reason: ClassVar[str] = "INTERNAL"
    retry_delay_s: float | None = None

    def __init_subclass__(cls, *, status: Status | None = None, reason: str = "") -> None:
        cls.reason = reason or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()
        cls.status = status or cls.status
        if cls.status is not None:
            CALLER_ERRORS[cls] = cls.status

    def __init__(self, problem: str, /, **values: object) -> None:
        """Take the text. With `values`, the text is a template for `str.format`.

        The `Naming` of the protocol gives the names of fields and enum values in `values`.
        """
        self.problem = problem
        self.values = values

    def text(self, naming: Naming) -> str:
        """Return the whole text, with the names of a protocol."""
        return self.problem_text(naming)

    def problem_text(self, naming: Naming) -> str:
        """Return the text without the field."""
        if not self.values:
            return self.problem
        return self.problem.format(**{name: _render(value, naming) for name, value in self.values.items()})

    def change_fields(self, change: Callable[[FieldPath], FieldPath]) -> None:
        """Replace each field that the error names by `change(field)`."""
        self.values = {name: _changed(value, change) for name, value in self.values.items()}

    def __str__(self) -> str:
        return self.text(PLAIN)


# The errors that callers may see. Each class adds itself.
CALLER_ERRORS: dict[type[EncserveError], Status] = {}


def _render(value: object, naming: Naming) -> object:
    if isinstance(value, FieldPath):
        return naming.field(value)
    if isinstance(value, Enum):
        return naming.value(value)
    if isinstance(value, tuple):
        return ", ".join(str(_render(it, naming)) for it in value)
    return value


class RequestError(EncserveError):
    """The request is wrong. A retry of the same request will fail too.

    Attributes:
        field: The wrong field: a FieldPath, or the name of a field that only one protocol has. Empty for the
            whole request.
        others: The errors of the other inputs that were checked, in the order of the inputs. None if the error is not
            the result of a check of all inputs.
    """

    others: "Sequence[RequestError] | None" = None

    def __init__(self, field: FieldPath | str, problem: str, /, **values: object) -> None:
        """Take the field and the problem. The problem shows the wrong value. For `values`, see the base class."""
        self.field = field
        super().__init__(problem, **values)

    def move(self, by: int) -> None:
        """Add `by` to the indices of inputs, because the error came from a later part of a request."""

        def shifted(path: FieldPath) -> FieldPath:
            return path if path.at is None or path.field in _OF_OUTPUTS else replace(path, at=path.at + by)

        self.change_fields(shifted)

    def change_fields(self, change: Callable[[FieldPath], FieldPath]) -> None:
        """Replace each field that this error and the errors of the other inputs name by `change(field)`."""
        super().change_fields(change)
        self.field = _changed(self.field, change)
        for error in self.others or ():
            error.change_fields(change)

    def field_name(self, naming: Naming) -> str:
        """Return the name of the field in a protocol; empty for the whole request."""
        return naming.field(self.field) if isinstance(self.field, FieldPath) else self.field

    def text(self, naming: Naming) -> str:
        """Return the field and the problem."""
        field, problem = self.field_name(naming), self.problem_text(naming)
        return f"{field}: {problem}" if field else problem


def _changed(value: Any, change: Callable[[FieldPath], FieldPath]) -> Any:
    if isinstance(value, tuple):
        return tuple(_changed(it, change) for it in value)
    return change(value) if isinstance(value, FieldPath) else value


class InvalidField(RequestError, status=statuses.INVALID):
    """A field has an invalid value."""


class EmptyInputs(InvalidField, status=statuses.EMPTY, reason=InvalidField.reason):
    """The request has no inputs."""


class UnknownField(InvalidField, reason=InvalidField.reason):
    """The request has a field that this server does not know."""


class MalformedRequest(RequestError, status=statuses.MALFORMED):
    """The bytes are not a valid message of the method."""


class UnsupportedEncoding(RequestError, status=statuses.UNSUPPORTED):
    """The body of an HTTP request is compressed."""


class TooManyInputs(RequestError, status=statuses.TOO_MANY):
    """The request has more sequences than the limit."""


class TooManyOutputs(RequestError, status=statuses.TOO_MANY):
    """The request asks for more outputs than the limit."""


class SequenceTooLong(RequestError, status=statuses.TOO_LONG):
    """A sequence is longer than the limit of the model."""


class TooLongToPool(RequestError, status=statuses.INVALID):
    """A sequence has too many vectors to pool. Pooling n vectors takes memory proportional to n²."""


class RequestTooLarge(RequestError, status=statuses.TOO_LARGE):
    """The request is larger than a fixed limit, for example the size of the whole queue."""


class ResponseTooLarge(RequestError, status=statuses.TOO_MANY):
    """The reply would be larger than the limit. If the size is known early, the model does not run."""


class ModelNotFound(RequestError, status=statuses.NOT_FOUND):
    """The model or version does not exist."""


class Unauthenticated(EncserveError, status=statuses.UNAUTHENTICATED):
    """The caller has no key or an unknown key. The text never contains a key."""


class PermissionDenied(RequestError, status=statuses.FORBIDDEN):
    """The caller is known and lacks the permission."""


class LimitReached(EncserveError):
    """A limit is reached now. A retry may succeed."""

    retry_delay_s: float

    def __init__(self, problem: str, retry_delay_s: float) -> None:
        """Take the text and the seconds until a retry. The text names the limit, with the numbers."""
        self.retry_delay_s = retry_delay_s
        super().__init__(f"{problem}; try again in {retry_delay_s:.2f} s")


class RateLimited(LimitReached, status=statuses.EXHAUSTED):
    """The caller has used up its rate."""

    def __init__(self, caller: str, tokens_per_second: float, retry_delay_s: float) -> None:
        """Take the name of the caller, its rate, and the seconds until a retry."""
        rate = f"its rate of {tokens_per_second:g} tokens a second (tokens_per_second)"
        super().__init__(f"caller {caller} has used up {rate}", retry_delay_s)


class QueueFull(LimitReached, status=statuses.EXHAUSTED):
    """A queue has no room for the request now."""

    def __init__(
        self, unit: str, asked: int | None, queued: int, limit: int, retry_delay_s: float, reopens_at: int | None = None
    ) -> None:
        """Build the text.

        Args:
            unit: The unit of the numbers, such as "tokens".
            asked: The size of the request; None if it is not known.
            queued: The size of the queue now.
            limit: The largest size of the queue.
            retry_delay_s: The seconds until a retry.
            reopens_at: A full queue accepts requests again when its size has fallen to this number. None while the
                queue is open.
        """
        problem = f"the queue is full: it holds {queued} of at most {limit} {unit}"
        if asked is not None:
            problem += f" and this request has {asked}"
        if reopens_at is not None and queued + (asked or 0) <= limit:
            problem += f"; the queue was full and accepts requests again at {reopens_at} {unit} or less"
        super().__init__(problem, retry_delay_s)


class ShareExceeded(QueueFull):
    """A caller, or all bulk calls together, has used its share of a queue."""

    def __init__(
        self, owner: str, asked: int, waiting: int, share: int, retry_delay_s: float, unit: str = "tokens"
    ) -> None:
        """Build the text.

        Args:
            owner: The owner of the share: a caller, or bulk.
            asked: The amount that the request needs.
            waiting: The amount of the owner's waiting work.
            share: The share of the queue.
            retry_delay_s: The seconds until a retry.
            unit: The unit of the amounts.
        """
        numbers = f"{waiting} {unit} waiting, its share of the queue is {share}, and this request has {asked}"
        LimitReached.__init__(self, f"{owner} has {numbers}", retry_delay_s)


class BudgetFull(LimitReached, status=statuses.EXHAUSTED):
    """The memory for requests and replies is used up, or too many slow requests, streams or watches are open."""


class DeadlineExpired(EncserveError, status=statuses.LATE):
    """The deadline passed before a batch started. Or the request arrived too slowly, or the caller read too slowly."""


class FingerprintMismatch(EncserveError, status=statuses.MISMATCH):
    """The bundle of the model does not have the fingerprint that the caller expects."""


class SpaceMismatch(EncserveError, status=statuses.MISMATCH):
    """The model's `space_id` is not the `space_id` that the caller expects."""


class InspectUnavailable(EncserveError, status=statuses.MISMATCH):
    """The bundle of the model has no graph for inspections, or inspections are disabled."""


class InferenceFailed(EncserveError, status=statuses.FAILED):
    """The model fails for a sequence, even if the sequence runs alone. Or the result has NaN or infinity."""

    NOT_COMPUTED = "the model could not compute this input"
    NOT_FINITE = "the model's result for this input has NaN or infinity"

    def __init__(self, index: int, problem: str) -> None:
        """Take the index of the input, and the problem."""
        super().__init__("{input}: {problem}", input=FieldPath(RequestField.INPUT, index), problem=problem)


class EngineUnhealthy(EncserveError, status=statuses.UNAVAILABLE):
    """The engine fails for every input. The server keeps testing the engine until it works again."""

    retry_delay_s = _RESTORED_SECONDS


class NotReady(EncserveError, status=statuses.UNAVAILABLE):
    """A model is not ready, for example because the server is still loading its models."""

    retry_delay_s = _RESTORED_SECONDS

    def __init__(self, problem: str = "not every model is ready") -> None:
        """Take the text."""
        super().__init__(problem)


class Draining(EncserveError, status=statuses.UNAVAILABLE):
    """The server is stopping and accepts no new requests."""

    def __init__(self, problem: str = "the server is stopping; send the request to another") -> None:
        """Take the text."""
        super().__init__(problem)


class StartupError(EncserveError):
    """The server cannot start. Callers never see this error."""


class BundleError(StartupError):
    """A bundle is missing, altered or unreadable; the text names the file."""


class DeviceError(StartupError):
    """This machine does not have the requested device or precision."""


class EngineMissing(StartupError):
    """The Python package of the engine is not installed. The text names the package to install."""
