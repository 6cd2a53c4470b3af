"""The columns of --keep: their types, and values of these types from .jsonl and .csv files."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

# The types that --keep NAME:TYPE takes.
TYPES: Mapping[str, Any] = {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}
_EXACT_IN_DOUBLE = 2**53  # greater whole numbers may have no float64 of the same value


def split_type(column: str) -> tuple[str, str | None]:
    """Split NAME:TYPE of --keep into the name and the type, which is None if there is none."""
    name, colon, its = column.rpartition(":")
    return (name, its) if colon and name and its in TYPES else (column, None)


def json_types(values: Iterable[Any]) -> set[str]:
    """Return the types of JSON values, of those that `TYPES` has; null has none, and all others are "string"."""
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
    """Return the one type for values of several JSON types: "string" unless another type holds all of them exactly."""
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


def array_of(values: Sequence[Any], name: str, its: str, place: Callable[[int], str]) -> Any:
    """Return an Arrow array of JSON values or of CSV's texts.

    Args:
        values: (rows,) The values. For other types than "string", null and the empty text give null.
        name: The name of the column.
        its: The type.
        place: Gives the place of a row in the inputs, from its index.

    Raises:
        ValueError: The type does not hold a value exactly; the text names the row.
    """
    convert = _CONVERT.get(its, _as_they_are)
    found = []
    for index, value in enumerate(values):
        try:
            found.append(None if value is None else convert(value))
        except (ValueError, TypeError, OverflowError):
            raise ValueError(
                f"{place(index)}: --keep {name}: must be of the type {its}, as the rows before; was "
                f"{json.dumps(value, default=str)[:60]}; begin again with --keep {name}:string --overwrite"
            ) from None
    try:
        return pa.array(found, type_named(its))
    except (TypeError, OverflowError, pa.ArrowException) as error:  # a type of Parquet that `TYPES` does not have
        raise ValueError(f"{place(0)} and later: --keep {name}: must be of the type {its}: {error}") from error


def _as_they_are(value: Any) -> Any:
    return value


def _to_string(value: Any) -> str:
    """Return a text itself, and other values as JSON. A text that is not valid UTF-8 gets question marks."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="replace").decode()


def _to_int64(value: Any) -> int | None:
    if isinstance(value, str):
        value = int(value) if value else None
    if value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
        raise ValueError
    found: int | None = value
    return found


def _to_double(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if value else None
    if type(value) not in (int, float) or (type(value) is int and int(float(value)) != value):
        raise ValueError
    return float(value)


def _to_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        value = _BOOLS.get(value.lower(), value)
    if value is not None and type(value) is not bool:
        raise ValueError
    found: bool | None = value
    return found


_BOOLS = {"true": True, "false": False, "": None}
_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "string": _to_string,
    "int64": _to_int64,
    "double": _to_double,
    "bool": _to_bool,
}
