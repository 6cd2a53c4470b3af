"""The errors of requests and of the start, one class for each cause.

    EncserveError
    ├── RequestError              the request can never succeed as it is
    │   ├── InvalidField          one field is wrong: an empty sequence, an id outside the vocabulary, …
    │   │   ├── EmptyInputs       the request has no inputs; text-embeddings-inference has an error type for this
    │   │   └── UnknownField      a field that this server does not know
    │   ├── MalformedRequest      the bytes are not a valid message of the method
    │   ├── TooManyInputs         more sequences than one request may hold
    │   ├── TooManyOutputs        more outputs than one request may ask for
    │   ├── SequenceTooLong       longer than the model's longest sequence
    │   ├── TooLongToPool         more vectors than `pool_factor` may join
    │   ├── RequestTooLarge       more tokens than the whole queue may hold
    │   ├── ResponseTooLarge      the reply would be over the message limit
    │   └── ModelNotFound         no such model or version
    ├── QueueFull                 the queue has no room now; retry later
    │   └── ShareExceeded         the caller, or all bulk calls together, has used its share of the queue
    ├── BudgetFull                requests and replies fill the memory limit, or there are too many calls
    ├── DeadlineExpired           the deadline passed, the request did not arrive, or the reply was not read
    ├── FingerprintMismatch       the caller expects another bundle
    ├── SpaceMismatch             the caller expects another vector space
    ├── InspectUnavailable        this model cannot be inspected on this server
    ├── InferenceFailed           the model cannot compute this sequence
    ├── EngineUnhealthy           the engine fails again and again; try another replica
    ├── NotReady                  the server is still loading its models
    ├── Draining                  the server is stopping
    └── StartupError              the server cannot start
        ├── BundleError           a bundle is missing, altered or unreadable
        ├── DeviceError           this machine does not have the device or the precision
        └── EngineMissing         the package that runs models is not installed

Callers see the text of all errors except StartupError. The text names fields and numbers, and no file paths. An error
stores the wrong field as a `FieldPath`, because each protocol has a different name for it. `error_table` maps errors to
statuses and texts.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, Protocol


class Part(Enum):
    """The parts of a request that an error can be about."""

    INPUTS = auto()
    INPUT = auto()
    TEXT = auto()
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
    MODEL = auto()
    MODEL_VERSION = auto()
    FINGERPRINT = auto()
    SPACE_ID = auto()


@dataclass(frozen=True, slots=True)
class FieldPath:
    """The part of a request that an error is about.

    Attributes:
        part: The part.
        at: The index of the input, or for parts of an output, the index of the output. None if the part has no index.
        place: The index of the id, span or vector in the part; None for the whole part.
    """

    part: Part
    at: int | None = None
    place: int | None = None


# For these parts, `FieldPath.at` is the index of an output.
OF_OUTPUTS = frozenset(part for part in Part if part.name.startswith("OUTPUT"))


class Naming(Protocol):
    """The names of fields and enum values in one protocol, for error messages."""

    def field(self, path: FieldPath) -> str:
        """Return the name of a field."""

    def value(self, value: Enum) -> str:
        """Return the name of an enum value."""


class PlainNaming:
    """Names for log lines and for callers without a protocol."""

    def field(self, path: FieldPath) -> str:
        """Return the name of a field, such as `ids 3, place 17`."""
        name = path.part.name.lower()
        if path.at is not None:
            name = f"{name} {path.at}"
        return name if path.place is None else f"{name}, place {path.place}"

    def value(self, value: Enum) -> str:
        """Return the name of an enum value, such as `query`."""
        return value.name.lower()


class EncserveError(Exception):
    """Base class of all errors of this server.

    Attributes:
        reason: The machine-readable reason, such as INVALID_FIELD. By default, it is made from the name of the class.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, problem: str, /, **values: object) -> None:
        """Take the text. With `values`, it is a template for `str.format`; a protocol names the fields and enums."""
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

    def __str__(self) -> str:
        return self.text(PlainNaming())


def _render(value: object, naming: Naming) -> object:
    if isinstance(value, FieldPath):
        return naming.field(value)
    if isinstance(value, Enum):
        return naming.value(value)
    if isinstance(value, tuple):
        return ", ".join(str(_render(it, naming)) for it in value)
    return value


class RequestError(EncserveError):
    """The request is wrong. The same request will never succeed.

    Attributes:
        field: The wrong field: a FieldPath, or the name of a field that only one protocol has. Empty for the
            whole request.
    """

    def __init__(self, field: FieldPath | str, problem: str, /, **values: object) -> None:
        """Take the field and the problem, with the wrong numbers; see the base class for `values`."""
        self.field = field
        super().__init__(problem, **values)

    def move(self, by: int) -> None:
        """Add `by` to the indices of inputs, because the error came from a later part of a request."""
        self.field = _shift(self.field, by)
        self.values = {name: _shift(value, by) for name, value in self.values.items()}

    def field_name(self, naming: Naming) -> str:
        """Return the name of the field in a protocol; empty for the whole request."""
        return naming.field(self.field) if isinstance(self.field, FieldPath) else self.field

    def text(self, naming: Naming) -> str:
        """Return the field and the problem."""
        field, problem = self.field_name(naming), self.problem_text(naming)
        return f"{field}: {problem}" if field else problem


def _shift(value: Any, by: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_shift(it, by) for it in value)
    if isinstance(value, FieldPath) and value.at is not None and value.part not in OF_OUTPUTS:
        return replace(value, at=value.at + by)
    return value


class InvalidField(RequestError):
    """A field has an invalid value."""


class EmptyInputs(InvalidField):
    """The request has no inputs."""

    reason = InvalidField.reason


class UnknownField(InvalidField):
    """The request has a field that this server does not know."""

    reason = InvalidField.reason


class MalformedRequest(RequestError):
    """The bytes are not a valid message of the method."""


class UnsupportedEncoding(RequestError):
    """The body of an HTTP request is compressed."""


class TooManyInputs(RequestError):
    """The request has more sequences than the limit."""


class TooManyOutputs(RequestError):
    """The request asks for more outputs than the limit."""


class SequenceTooLong(RequestError):
    """A sequence is longer than the limit of the model."""


class TooLongToPool(RequestError):
    """A sequence has too many vectors to pool. Pooling needs memory for the square of their number."""


class RequestTooLarge(RequestError):
    """The request is larger than a fixed limit, for example the size of the whole queue."""


class ResponseTooLarge(RequestError):
    """The reply would be larger than the limit. Refused before the model runs if its size is known then."""


class ModelNotFound(RequestError):
    """The model or version does not exist."""


class QueueFull(EncserveError):
    """A queue has no room for the request now.

    Attributes:
        retry_delay_s: The seconds after which a retry may succeed.
    """

    def __init__(
        self, unit: str, asked: int | None, queued: int, limit: int, retry_delay_s: float, reopens_at: int | None = None
    ) -> None:
        """Build the text.

        Args:
            unit: The unit of the numbers, such as "tokens".
            asked: The size of the request; None if it is not known.
            queued: The size of the queue now.
            limit: The largest size of the queue.
            retry_delay_s: The seconds after which a retry may succeed.
            reopens_at: After the queue was full, it accepts requests again at this size. None for a queue without this.
        """
        self.retry_delay_s = retry_delay_s
        problem = f"it holds {queued} of at most {limit} {unit}"
        if asked is not None:
            problem += f" and this request has {asked}"
        if reopens_at is not None and queued + (asked or 0) <= limit:
            problem += f"; after it was full, it accepts requests again at {reopens_at} {unit}"
        super().__init__(f"the queue is full: {problem}; try again in {retry_delay_s:.2f} s")


class ShareExceeded(QueueFull):
    """A caller, or all bulk calls together, has used its share of a queue."""

    def __init__(
        self, owner: str, asked: int, waiting: int, share: int, retry_delay_s: float, unit: str = "tokens"
    ) -> None:
        """Build the text.

        Args:
            owner: The owner of the share: a caller, or bulk.
            asked: The amount that the request needs.
            waiting: The waiting amount of the owner.
            share: The share of the queue.
            retry_delay_s: The seconds after which a retry may succeed.
            unit: The unit of the amounts.
        """
        self.retry_delay_s = retry_delay_s
        EncserveError.__init__(
            self,
            f"{owner} has {waiting} {unit} waiting, its share of the queue is {share}, and this request has {asked}; "
            f"try again in {retry_delay_s:.2f} s",
        )


class BudgetFull(EncserveError):
    """Requests and replies fill the memory limit, or the server receives too many calls.

    Attributes:
        retry_delay_s: The seconds after which a retry may succeed.
    """

    def __init__(self, problem: str, retry_delay_s: float) -> None:
        """Take the text about the limit, with the numbers, and the seconds until a retry."""
        self.retry_delay_s = retry_delay_s
        super().__init__(f"{problem}; try again in {retry_delay_s:.2f} s")


class Unauthenticated(EncserveError):
    """The caller has no key or an unknown key. The text never contains a key."""


class PermissionDenied(RequestError):
    """The caller is known and lacks the permission."""


class RateLimited(EncserveError):
    """The caller has used up its rate.

    Attributes:
        retry_delay_s: The seconds after which the caller may call again.
    """

    def __init__(self, caller: str, tokens_per_second: float, retry_delay_s: float) -> None:
        """Take the name of the caller, its rate, and the seconds until a retry."""
        self.retry_delay_s = retry_delay_s
        super().__init__(
            f"caller {caller} has used up its rate of {tokens_per_second:g} tokens a second (tokens_per_second); try "
            f"again in {retry_delay_s:.2f} s"
        )


class DeadlineExpired(EncserveError):
    """The deadline passed before a batch started, the request did not arrive, or the caller did not read the reply."""


class FingerprintMismatch(EncserveError):
    """The bundle of the model does not have the fingerprint that the caller expects."""


class SpaceMismatch(EncserveError):
    """The vectors of the model belong to another vector space: not the space_id that the caller expects."""


class InspectUnavailable(EncserveError):
    """The bundle of the model has no graph for inspections, or inspections are disabled."""


class InferenceFailed(EncserveError):
    """The model fails for a sequence, even without other sequences in the batch, or the result is not finite."""


class EngineUnhealthy(EncserveError):
    """The engine fails for every input. The server keeps testing the engine until it works again."""


class NotReady(EncserveError):
    """The server is still loading its models."""


class Draining(EncserveError):
    """The server is stopping and accepts no new requests."""


class StartupError(EncserveError):
    """The server cannot start."""


class BundleError(StartupError):
    """A bundle is missing, altered or unreadable; the text names the file."""


class DeviceError(StartupError):
    """This machine does not have the requested device or precision."""


class EngineMissing(StartupError):
    """The Python package of the engine is not installed. The text names the package to install."""
