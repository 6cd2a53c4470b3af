"""A gRPC service as a protocol describes it. A handler takes and returns bytes. It does not use sockets or grpcio.

Because the handlers parse the bytes, the transport also handles their parse errors.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from google.protobuf.message import DecodeError, Message

from encserve_server.calls import Access, Call
from encserve_server.errors import MalformedRequest, Naming
from encserve_server.failures import Failure

M = TypeVar("M", bound=Message)
Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of a service.

    Attributes:
        kind: The type of the method, as in the `grpc_server_*` metrics.
        name: The name.
        naming: The names of fields and values in errors.
        access: The callers that may use the method.
        answers_while_draining: Whether the server answers the method while it stops.
    """

    kind: ClassVar[str]
    name: str
    naming: Naming
    access: Access = Access.CALLERS
    answers_while_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryRpc(Rpc):
    """A method with one request and one reply.

    Attributes:
        answer: Takes the request and returns the reply.
    """

    kind = "unary"
    answer: Callable[[bytes, Call], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStreamRpc(Rpc):
    """A method with one request and many replies.

    Attributes:
        answer: Takes the request, and writes the replies one after the other.
    """

    kind = "server_stream"
    answer: Callable[[bytes, Call, Write], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """One request of a stream.

    Attributes:
        request_id: The id that the caller gave the request.
        answer: Takes the call of the request, and returns the reply.
        refuse: Returns the reply for an error.
    """

    request_id: str
    answer: Callable[[Call], Awaitable[bytes]]
    refuse: Callable[[Failure], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStreamRpc(Rpc):
    """A method with many requests. Each has one reply, in any order.

    Attributes:
        parse: Parses one request. A parse error ends the stream.
    """

    kind = "bidi_stream"
    parse: Callable[[bytes], StreamedRequest]


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service.

    Attributes:
        name: The full name, such as encserve.v1.EncoderService.
        rpcs: The methods.
    """

    name: str
    rpcs: Sequence[Rpc]


def parse(message_type: type[M], data: bytes) -> M:
    """Parse a message.

    Raises:
        MalformedRequest: The bytes are not a message of this type.
    """
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        raise MalformedRequest("", f"the request of {len(data)} bytes is not a valid {name}: {error}") from error
