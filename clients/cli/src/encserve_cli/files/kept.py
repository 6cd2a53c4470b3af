"""The columns of --keep: their types, and values of these types from .jsonl and .csv files."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

# The types that --keep NAME:TYPE takes.
TYPES: Mapping[str, Any] = {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}
_EXACT_IN_DOUBLE = 2**53  # greater whole numbers may have no float64 of the same value


def split_type(column: str) -> tuple[str, str | None]:
    """Split NAME:TYPE of --keep into the name and the type; the type of NAME alone is None."""
    name, colon, its = column.rpartition(":")
    return (name, its) if colon and name and its in TYPES else (column, None)


def json_types(values: Iterable[Any]) -> set[str]:
    """Return the types of JSON values: keys of `TYPES`, and "long" for integers that a double may not hold."""
    found = set()
    for value in values:
        if type(value) is int:
            found.add("string" if not -(2**63) <= value < 2**63 else "int64")
            if abs(value) > _EXACT_IN_DOUBLE:
                found.add("long")
        elif value is not None:
            found.add({bool: "bool", float: "double"}.get(type(value), "string"))
    return found


def common_type(types: Iterable[str]) -> str:
    """Return the one type that holds values of several JSON types exactly; "string" holds all values."""
    found = set(types)
    is_long = "long" in found
    found.discard("long")
    if found == {"int64", "double"} and not is_long:
        return "double"
    return found.pop() if len(found) == 1 else "string"


def type_named(name: str) -> Any:
    """Return the Arrow type of a name, as `str(type)` gives it, or None if the name is unknown."""
    try:
        return TYPES.get(name) or pa.type_for_alias(name)
    except ValueError:
        return None


def array_of(values: Sequence[Any], name: str, its: str, place: Callable[[int], str], *, parsed: bool) -> Any:
    """Return an Arrow array of the values of a column.

    Args:
        values: (rows,) The values; None for null.
        name: The name of the column.
        its: The type.
        place: Gives the place of a row in the inputs, from its index.
        parsed: Whether the values come from JSON. Otherwise they are texts, and the empty text is null for all types
            but "string".

    Raises:
        ValueError: The type does not hold a value exactly; the text names the row.
    """
    if its == "string":
        values = [None if value is None else _to_string(value) for value in values]
    elif not parsed:
        values = [value or None for value in values]
    try:
        return _converted(values, its, parsed=parsed)
    except _ERRORS:
        for index, value in enumerate(values):
            try:
                _converted([value], its, parsed=parsed)
            except _ERRORS:
                raise ValueError(
                    f"{place(index)}: --keep {name}: must be of the type {its}, as the rows before; was "
                    f"{json.dumps(value, default=str)[:60]}; begin again with --keep {name}:string --overwrite"
                ) from None
        raise


_ERRORS = (TypeError, OverflowError, pa.ArrowException)


def _converted(values: Sequence[Any], its: str, *, parsed: bool) -> Any:
    """Return an array. Arrow refuses most values that the type does not hold exactly."""
    wanted = type_named(its)
    if not parsed:
        return pa.array(values, pa.string()).cast(wanted)
    # But Arrow would cut fractions off, and make numbers of true and false.
    takes = (int,) if pa.types.is_integer(wanted) else (int, float) if pa.types.is_floating(wanted) else None
    if takes and any(value is not None and type(value) not in takes for value in values):
        raise TypeError
    return pa.array(values, wanted)


def _to_string(value: Any) -> str:
    """Return a text itself, and other values as JSON. A text that is not valid UTF-8 gets question marks."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="replace").decode()
