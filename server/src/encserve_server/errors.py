"""What can go wrong with a request or at start-up, one class per cause.

    EncserveError
    ├── RequestError              the request can never succeed as it is
    │   ├── InvalidField          one field is wrong: an empty sequence, an id outside the vocabulary, …
    │   │   ├── EmptyInputs       there are no inputs, which text-embeddings-inference tells from other mistakes
    │   │   └── UnknownField      a field that this server does not know
    │   ├── MalformedRequest      the bytes are not the message that the method takes
    │   ├── TooManyInputs         more sequences than one request may hold
    │   ├── TooManyOutputs        more outputs than one request may ask for
    │   ├── SequenceTooLong       longer than the model's longest sequence
    │   ├── TooLongToPool         more vectors than `pool_factor` may join
    │   ├── RequestTooLarge       more tokens than the whole queue may hold
    │   ├── ResponseTooLarge      the reply would be over the message limit
    │   └── ModelNotFound         no such model or version
    ├── QueueFull                 refused at the door; trying again later helps
    │   └── ShareExceeded         the caller, or bulk as a whole, has its share of the queue already
    ├── BudgetFull                the server holds as many bytes of requests and replies as it may
    ├── DeadlineExpired           the deadline passed before a batch started; no request arrives, or no answer is read
    ├── FingerprintMismatch       the caller expects another bundle
    ├── SpaceMismatch             the caller expects another vector space
    ├── InspectUnavailable        this model cannot be inspected on this server
    ├── InferenceFailed           the model cannot compute this sequence
    ├── EngineUnhealthy           the engine fails again and again; another replica may do better
    ├── NotReady                  the server is still loading its models
    ├── Draining                  the server is stopping
    └── StartupError              the server cannot start
        ├── BundleError           a bundle is missing, altered or unreadable
        ├── DeviceError           the device or the precision asked for is not available on this machine
        └── EngineMissing         what runs models is not installed

The text of every class but StartupError's reaches the caller: it names fields and numbers, never paths. Which field is
data, a `FieldPath`, because every protocol has its own name for it; `error_table` renders it and has the statuses.
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
    """Which part of a request an error is about.

    Attributes:
        part: The part.
        at: Which input, or for the parts of an output which output, from 0; None where the part is not one of several.
        place: Which id, span or vector of it, from 0; None for the whole part.
    """

    part: Part
    at: int | None = None
    place: int | None = None


# Of these `FieldPath.at` is an output.
OF_OUTPUTS = frozenset(part for part in Part if part.name.startswith("OUTPUT"))


class Naming(Protocol):
    """What a protocol calls fields and values, in errors."""

    def field(self, path: FieldPath) -> str:
        """The name of a field."""

    def value(self, value: Enum) -> str:
        """The name of a value that callers send."""


class PlainNaming:
    """Names for log lines and for callers without a protocol."""

    def field(self, path: FieldPath) -> str:
        """As in `input 3, ids 17`."""
        name = path.part.name.lower()
        if path.at is not None:
            name = f"{name} {path.at}"
        return name if path.place is None else f"{name}, place {path.place}"

    def value(self, value: Enum) -> str:
        """As in `query`."""
        return value.name.lower()


class EncserveError(Exception):
    """Base of all errors of this server; its text is for people.

    Attributes:
        reason: What programs are told: the class's name, as in INVALID_FIELD, unless it says otherwise.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, problem: str, /, **values: object) -> None:
        """Takes the text; with values it is a template for `str.format`, in which protocols name fields and enums."""
        self.problem = problem
        self.values = values

    def text(self, naming: Naming) -> str:
        """The whole text, as a protocol names things."""
        return self.problem_text(naming)

    def problem_text(self, naming: Naming) -> str:
        """The problem alone."""
        if not self.values:
            return self.problem
        return self.problem.format(**{name: _rendered(value, naming) for name, value in self.values.items()})

    def __str__(self) -> str:
        return self.text(PlainNaming())


def _rendered(value: object, naming: Naming) -> object:
    if isinstance(value, FieldPath):
        return naming.field(value)
    if isinstance(value, Enum):
        return naming.value(value)
    if isinstance(value, tuple):
        return ", ".join(str(_rendered(it, naming)) for it in value)
    return value


class RequestError(EncserveError):
    """The request can never succeed as it is.

    Attributes:
        field: The wrong field: a FieldPath, or what a front end calls a field of its own; empty for the whole request.
    """

    def __init__(self, field: FieldPath | str, problem: str, /, **values: object) -> None:
        """Takes the field and the problem, with the offending numbers; see the base class for `values`."""
        self.field = field
        super().__init__(problem, **values)

    def move(self, by: int) -> None:
        """Has the error be about inputs that stand so many places later, where a request is worked on in parts."""
        self.field = _moved(self.field, by)
        self.values = {name: _moved(value, by) for name, value in self.values.items()}

    def field_name(self, naming: Naming) -> str:
        """The field, as a protocol names it."""
        return naming.field(self.field) if isinstance(self.field, FieldPath) else self.field

    def text(self, naming: Naming) -> str:
        """The field and the problem."""
        field, problem = self.field_name(naming), self.problem_text(naming)
        return f"{field}: {problem}" if field else problem


def _moved(value: Any, by: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(it, by) for it in value)
    if isinstance(value, FieldPath) and value.at is not None and value.part not in OF_OUTPUTS:
        return replace(value, at=value.at + by)
    return value


class InvalidField(RequestError):
    """One field has a value that it must not have."""


class EmptyInputs(InvalidField):
    """There are no inputs."""

    reason = InvalidField.reason


class UnknownField(InvalidField):
    """There is a field that this server does not know; its name is the caller's own."""

    reason = InvalidField.reason


class MalformedRequest(RequestError):
    """The bytes are not the protobuf message that the method takes."""


class UnsupportedEncoding(RequestError):
    """The body of an HTTP request is compressed."""


class TooManyInputs(RequestError):
    """The request holds more sequences than one request may."""


class TooManyOutputs(RequestError):
    """The request asks for more outputs than one request may."""


class SequenceTooLong(RequestError):
    """A sequence is longer than the model's longest."""


class TooLongToPool(RequestError):
    """A sequence has more vectors than may be joined: the memory for that grows with the square of the number."""


class RequestTooLarge(RequestError):
    """The request holds more tokens than the whole queue may, so it could never be admitted."""


class ResponseTooLarge(RequestError):
    """The reply would be over the message limit; refused before any compute if its size is known by then."""


class ModelNotFound(RequestError):
    """There is no such model or version."""


class QueueFull(EncserveError):
    """A queue has no room for the request now.

    Attributes:
        retry_delay_s: After how many seconds trying again makes sense.
    """

    def __init__(
        self, unit: str, asked: int | None, queued: int, limit: int, retry_delay_s: float, reopens_at: int | None = None
    ) -> None:
        """Takes what is counted, how much is asked for, queued and allowed, and when to try again.

        `asked` is None where nobody looked. `reopens_at` is how much a queue that was full may hold before it takes
        anything again.
        """
        self.retry_delay_s = retry_delay_s
        why = f"it holds {queued} of at most {limit} {unit}"
        if asked is not None:
            why += f" and this request has {asked}"
        if reopens_at is not None and queued + (asked or 0) <= limit:
            why += f"; once full it takes nothing before it holds at most {reopens_at}"
        super().__init__(f"the queue is full: {why}; try again in {retry_delay_s:.2f} s")


class ShareExceeded(QueueFull):
    """A queue has room, but not for more of this caller, or for more bulk."""

    def __init__(
        self, whose: str, asked: int, waiting: int, share: int, retry_delay_s: float, unit: str = "tokens"
    ) -> None:
        """Take whose share it is, how much the request asks for, waits and is the share, and the retry delay."""
        self.retry_delay_s = retry_delay_s
        EncserveError.__init__(
            self,
            f"{whose} has {waiting} {unit} waiting, of the {share} that are its share of the queue, and this request "
            f"has {asked}; try again in {retry_delay_s:.2f} s",
        )


class BudgetFull(EncserveError):
    """The server holds as many bytes of requests and replies as it may, or receives as many calls.

    Attributes:
        retry_delay_s: After how many seconds trying again makes sense.
    """

    def __init__(self, problem: str, retry_delay_s: float) -> None:
        """Takes what is full, with the numbers, and when to try again."""
        self.retry_delay_s = retry_delay_s
        super().__init__(f"{problem}; try again in {retry_delay_s:.2f} s")


class Unauthenticated(EncserveError):
    """It is not known who calls: no key, or one that is not known; the text holds nothing of a key."""


class PermissionDenied(RequestError):
    """The caller is known, and may not do this."""


class RateLimited(EncserveError):
    """The caller has asked for more than its rate allows.

    Attributes:
        retry_delay_s: After how many seconds the caller may call again.
    """

    def __init__(self, caller: str, tokens_per_second: float, retry_delay_s: float) -> None:
        """Takes who calls, its rate, and when to try again."""
        self.retry_delay_s = retry_delay_s
        super().__init__(
            f"caller {caller} has used up its rate of {tokens_per_second:g} tokens a second (tokens_per_second); try "
            f"again in {retry_delay_s:.2f} s"
        )


class DeadlineExpired(EncserveError):
    """The deadline passed before a batch started, the request did not arrive, or the caller did not read the answer."""


class FingerprintMismatch(EncserveError):
    """The model has another fingerprint than the caller expects: it is another bundle."""


class SpaceMismatch(EncserveError):
    """The model has another space_id than the caller expects: its vectors belong to another space."""


class InspectUnavailable(EncserveError):
    """The model's bundle has no graph for inspections, or the server has them turned off."""


class InferenceFailed(EncserveError):
    """The model could not compute a sequence, even alone, or its numbers are not finite."""


class EngineUnhealthy(EncserveError):
    """The engine fails for every input; it is probed and comes back by itself when it can."""


class NotReady(EncserveError):
    """The server is still loading its models."""


class Draining(EncserveError):
    """The server is stopping and takes nothing new."""


class StartupError(EncserveError):
    """The server cannot start."""


class BundleError(StartupError):
    """A bundle is missing, altered or unreadable; the text names the file."""


class DeviceError(StartupError):
    """The device or the precision asked for cannot be had on this machine."""


class EngineMissing(StartupError):
    """The Python package that the engine runs on is not installed; the text says what to install."""
