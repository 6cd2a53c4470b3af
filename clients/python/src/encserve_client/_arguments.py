"""Checks of arguments' types, for callers without a type checker: a wrong one is named, and at once."""

from typing import TypeVar

import numpy as np

from encserve_client.exceptions import InvalidInputError

T = TypeVar("T")


def want(name: str, value: object, kind: type[T] | tuple[type[T], ...], words: str) -> T:
    """Returns a value of one of these types. The error has no part of the value, which may be a key.

    Raises:
        InvalidInputError: It is of another type.
    """
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name} must be {words}; was {type(value).__name__}")
    return value


def as_int(name: str, value: object) -> int:
    """An integer of Python's or NumPy's, as Python's. Raises InvalidInputError for anything else, True included."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInputError(f"{name} must be an int; was {type(value).__name__}")
    return int(value)


def as_float(name: str, value: object) -> float:
    """A number of Python's or NumPy's, as Python's. Raises InvalidInputError for anything else, True included."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidInputError(f"{name} must be a number; was {type(value).__name__}")
    return float(value)
