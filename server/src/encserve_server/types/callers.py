"""Callers, and the priority of their calls."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

# The headers of a request, with names in lower case.
Metadata = Iterable[tuple[str, str | bytes]]


class Priority(IntEnum):
    """The priority of a call. Requests and the callers file use the names in lower case."""

    INTERACTIVE = 0
    BULK = 1


PRIORITIES = {it.name.lower(): it for it in Priority}


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller.

    Attributes:
        name: The name in the callers file; empty if callers have no names.
        weight: The caller's share of a model's time, relative to other callers: weight 2 gets twice as much as 1.
        priority: The highest priority that the caller's calls may have.
    """

    name: str = ""
    weight: float = 1.0
    priority: Priority = Priority.INTERACTIVE


@dataclass(frozen=True, slots=True)
class Sender:
    """The caller and the priority of one call, for the queues.

    Attributes:
        caller: The caller.
        priority: The priority of the call.
        charge_text: Counts the tokens of the call's texts against the caller's rate; None if the caller has no rate.
    """

    caller: Caller = Caller()
    priority: Priority = Priority.INTERACTIVE
    charge_text: Callable[[int], None] | None = None


class CertificateName(NamedTuple):
    """A name in a client certificate. A DNS name never equals a URI. To make a name, use `dns_name` or `uri_name`."""

    kind: Literal["DNS", "URI"]
    value: str


def dns_name(name: str) -> CertificateName:
    """Return the certificate name for a DNS name. Upper and lower case are equal."""
    return CertificateName("DNS", name.lower())


def uri_name(name: str) -> CertificateName:
    """Return the certificate name for a URI, such as a SPIFFE id."""
    return CertificateName("URI", name)


ANYONE = Caller()
ANY_SENDER = Sender()
