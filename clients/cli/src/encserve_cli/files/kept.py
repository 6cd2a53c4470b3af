"""The columns of --keep: their types, and the conversion of values to these types."""

import decimal
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from encserve_cli.files.storage import is_text

# The values of TYPE in --keep NAME:TYPE.
TYPES: Mapping[str, Any] = {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}


def split_type(column: str) -> tuple[str, str | None]:
    """Split NAME:TYPE of --keep into name and type. The type is None for NAME without TYPE."""
    name, colon, its = column.rpartition(":")
    return (name, its) if colon and name and its in TYPES else (column, None)


def json_types(values: Iterable[Any]) -> set[str]:
    """Return the types of JSON values, as keys of `TYPES`."""
    found = set()
    for value in values:
        if type(value) is int:
            found.add("string" if not -(2**63) <= value < 2**63 else "int64")
        elif value is not None:
            found.add({bool: "bool", float: "double"}.get(type(value), "string"))
    return found


def common_type(types: Iterable[str]) -> str:
    """Return one type that holds values of all these types: "double" for int64 and double, otherwise "string"."""
    found = set(types)
    if found == {"int64", "double"}:
        return "double"
    return found.pop() if len(found) == 1 else "string"


def type_named(name: str) -> Any:
    """Return the Arrow type with this name (its `str(type)`), or None if the name is unknown."""
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
        place: Returns the file and line of a row, from the index of the row.
        parsed: Whether the values come from JSON. Otherwise the values are texts, and an empty text is null for all
            types except "string".

    Raises:
        ValueError: The type does not hold a value exactly. The message names the row.
    """
    if its == "string":
        values = [value if value is None or isinstance(value, str) else _json_of(value) for value in values]
    elif not parsed:
        values = [value or None for value in values]
    wanted = type_named(its)
    return _array_or_error(values, lambda some: _converted(some, wanted, parsed=parsed), name, wanted, place)


def cast_column(column: Any, name: str, wanted: Any, place: Callable[[int], str]) -> Any:
    """Convert a column of a Parquet file to another type.

    Args:
        column: (rows,) Arrow array.
        name: The name of the column.
        wanted: The Arrow type.
        place: Returns the file and line of a row, from the index of the row.

    Raises:
        ValueError: The type does not hold a value exactly. The message names the row.
    """
    return _array_or_error(column, lambda some: _cast(some, wanted), name, wanted, place)


_ERRORS = (TypeError, OverflowError, UnicodeError, decimal.InvalidOperation, pa.ArrowException)


def _array_or_error(
    values: Any, convert: Callable[[Any], Any], name: str, wanted: Any, place: Callable[[int], str]
) -> Any:
    """Convert all values, or raise ValueError for the first value that cannot be converted."""
    try:
        return convert(values)
    except _ERRORS:
        for index, value in enumerate(values):
            try:
                convert(values[index : index + 1])
            except _ERRORS:
                raise ValueError(f"{place(index)}: --keep {name}: {_problem(value, name, wanted)}") from None
        raise


def _problem(value: Any, name: str, wanted: Any) -> str:
    shown = str(value) if isinstance(value, pa.Scalar) else json.dumps(value, default=str)
    if pa.types.is_string(wanted):
        return f"must be UTF-8; was {shown[:60]}; convert the file to UTF-8, or leave out --keep {name}"
    return (
        f"must fit into the type {wanted} exactly; was {shown[:60]}; begin again with --keep {name}:string --overwrite"
    )


def _converted(values: Sequence[Any], wanted: Any, *, parsed: bool) -> Any:
    """Convert values to an Arrow array. Arrow itself refuses most values that the type does not hold exactly."""
    if not parsed:
        return _cast(pa.array(values, pa.string()), wanted)
    # But Arrow would cut off fractions, and convert true and false to numbers.
    takes = (int,) if pa.types.is_integer(wanted) else (int, float) if pa.types.is_floating(wanted) else None
    if takes and any(value is not None and type(value) not in takes for value in values):
        raise TypeError
    return pa.array(values, wanted)


def _cast(column: Any, wanted: Any) -> Any:
    """Convert an Arrow array to another type. Raise ArrowInvalid if a value would change."""
    its = column.type
    if pa.types.is_dictionary(its):
        return _cast(column.cast(its.value_type), wanted)
    if pa.types.is_floating(wanted) and pa.types.is_decimal(its):
        return _cast(column.cast(pa.string()), wanted)
    found = column.cast(wanted)
    if is_text(its) and pa.types.is_floating(wanted):
        is_exact = all(map(_has_value, column.to_pylist(), found.to_pylist()))
    elif is_text(its) or pa.types.is_string(wanted) or pa.types.is_null(its):
        is_exact = True
    elif pa.types.is_floating(its) and pa.types.is_floating(wanted):
        is_exact = its.bit_width <= wanted.bit_width  # a round trip would fail for NaN
    else:
        is_exact = found.cast(its).equals(column)
    if not is_exact:
        raise pa.ArrowInvalid
    return found


def _has_value(text: str | None, number: float | None) -> bool:
    """Whether a float64 represents the decimal number in a text.

    The number in the text must equal `repr` of the float64, or the float64 rounded to as many digits as the text has.
    """
    if text is None or number is None:
        return text is None and number is None
    exact = decimal.Decimal(text)
    if not exact.is_finite():
        return True
    rounded = f"{number:.{len(exact.as_tuple().digits) - 1}e}"
    return exact in (decimal.Decimal(repr(number)), decimal.Decimal(rounded))


def _json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
