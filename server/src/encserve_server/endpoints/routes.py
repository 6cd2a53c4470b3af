"""An HTTP route as a protocol describes it. A handler does not use sockets or aiohttp."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from encserve_server.calls import Call
from encserve_server.errors import Naming
from encserve_server.failures import Failure
from encserve_server.statuses import Status

# A placeholder for one part of a path, or with `:path` for several parts.
PLACEHOLDER = re.compile(r"{(\w+)(:path)?}")


class Check(Enum):
    """When a health check gets the reply 200."""

    LIVE = auto()  # while the process runs
    READY = auto()  # while every model is ready


def http_status(status: Status) -> int:
    """Return the HTTP status of an error on the routes of most protocols."""
    return status.openai


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one protocol writes errors.

    Attributes:
        naming: The names of fields and values in errors.
        refuse: Returns the JSON of an error.
        error: The type of this JSON, for the OpenAPI document.
        status_of: Returns the HTTP status of an error.
    """

    naming: Naming
    refuse: Callable[[Failure], dict[str, Any]]
    error: Any
    status_of: Callable[[Status], int] = http_status


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a handler.

    Attributes:
        body: The body.
        headers: The headers; their names are case-insensitive.
        values: The values of the placeholders in the route's path.
    """

    body: bytes
    headers: Mapping[str, str]
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a handler.

    Attributes:
        body: The body; JSON unless `headers` has another `content-type`.
        headers: Headers in addition to those of every reply.
    """

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of a method and a path.

    Attributes:
        method: The method.
        path: The path; `{name}` stands for one part, `{name:path}` for one or more parts.
        handle: Answers a request.
        dialect: Writes the errors of the route.
        check: When a health check gets the reply 200; None for routes that are not health checks. The server does not
            count health checks, and answers them even while it stops.
        is_listing: Whether the route lists models. A setting can allow such routes without a key.
        body: The msgspec.Struct with the fields of the JSON body; None for a route without a JSON body.
        reply: The type of the JSON in the reply, for the OpenAPI document; None if the reply is not JSON.
        example: An example of a body, for the OpenAPI document.
    """

    method: str
    path: str
    handle: Callable[[Request, Call], Awaitable[Reply]]
    dialect: Dialect
    check: Check | None = None
    is_listing: bool = False
    body: type[Any] | None = None
    reply: Any = None
    example: Mapping[str, Any] | None = None
