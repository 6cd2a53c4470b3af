"""What can go wrong with a request or at start-up, one class per cause.

    EncserveError
    ├── RequestError              the request can never succeed as it is
    │   ├── InvalidField          one field is wrong: an empty sequence, an id outside the vocabulary, …
    │   ├── MalformedRequest      the bytes are not the message that the method takes
    │   ├── TooManyInputs         more sequences than one request may hold
    │   ├── SequenceTooLong       longer than the model's longest sequence
    │   ├── RequestTooLarge       more tokens than the whole queue may hold
    │   ├── ResponseTooLarge      the reply would be over the message limit
    │   └── ModelNotFound         no such model or version
    ├── QueueFull                 refused at the door; trying again later helps
    ├── DeadlineExpired           the caller's deadline passed before its batch started, or it reads no answer
    ├── FingerprintMismatch       the caller expects another bundle
    ├── SpaceMismatch             the caller expects another vector space
    ├── InspectUnavailable        this model cannot be looked into on this server
    ├── InferenceFailed           the model cannot compute this sequence
    ├── EngineUnhealthy           the engine fails again and again; another replica may do better
    ├── NotReady                  the server is still loading its models
    ├── Draining                  the server is stopping
    └── StartupError              the server cannot start
        ├── BundleError           a bundle is missing, altered or unreadable
        ├── DeviceError           the device or the precision asked for cannot be had on this machine
        └── EngineMissing         what runs models is not installed

The text of every class but StartupError's reaches the caller: it names fields and numbers, never paths.
"""

import re
from typing import ClassVar


class EncserveError(Exception):
    """Base of all errors of this server; its text is for people.

    Attributes:
        reason: What programs are told: the class's name, as in INVALID_FIELD, unless it says otherwise.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()


class RequestError(EncserveError):
    """The request can never succeed as it is.

    Attributes:
        field: The path of the wrong field, as in `inputs[3].token_ids.ids[17]`; empty if it is the whole request.
    """

    def __init__(self, field: str, problem: str) -> None:
        """Takes the field's path and what is wrong with it, with the offending numbers."""
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}" if field else problem)


class InvalidField(RequestError):
    """One field has a value that it must not have."""


class MalformedRequest(RequestError):
    """The bytes are not the protobuf message that the method takes."""


class TooManyInputs(RequestError):
    """The request holds more sequences than one request may."""


class SequenceTooLong(RequestError):
    """A sequence is longer than the model's longest."""


class RequestTooLarge(RequestError):
    """The request holds more tokens than the whole queue may, so it could never be admitted."""


class ResponseTooLarge(RequestError):
    """The reply would be over the message limit; refused before any compute."""


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


class DeadlineExpired(EncserveError):
    """The caller's deadline passed while the request was queued, or it read nothing of an inspection for too long."""


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
