"""Type checks of arguments, for callers without a type checker. Each error names the argument."""

from typing import TypeVar

import numpy as np

from encserve_client.exceptions import InvalidInputError

F = TypeVar("F")
T = TypeVar("T")


def check_type(name: str, value: object, kind: type[T] | tuple[type[T], ...], words: str) -> T:
    """Return `value` if it is an instance of `kind`. The error does not show the value, which may be a secret.

    Raises:
        InvalidInputError: `value` has another type.
    """
    if not isinstance(value, kind):
        raise InvalidInputError(f"must be {words}; was {type(value).__name__}", field=name)
    return value


def check_function(name: str, function: F) -> F:
    """Return `function`. Raise InvalidInputError unless it is a function or None."""
    if function is not None and not callable(function):
        raise InvalidInputError(f"must be a function or None; was {type(function).__name__}", field=name)
    return function


def as_int(name: str, value: object) -> int:
    """Convert a Python or NumPy integer to int. Raise InvalidInputError for any other type, bool included."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInputError(f"must be an int; was {type(value).__name__}", field=name)
    return int(value)


def as_float(name: str, value: object) -> float:
    """Convert a Python or NumPy number to float. Raise InvalidInputError for any other type, bool included."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidInputError(f"must be a number; was {type(value).__name__}", field=name)
    return float(value)
