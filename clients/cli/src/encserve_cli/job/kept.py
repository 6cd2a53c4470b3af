"""Columns that come along: which types they have, and how values of .jsonl and .csv files get these."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from encserve_cli.files.reading import DataFile
from encserve_cli.files.storage import is_text

# What a job writes itself.
_OUTPUT_COLUMNS = ("text", "ids", "vector", "rows", "token_ids", "token_indices", "indices", "values")
_STRING = str(pa.string())


class KeptTypes:
    """Finds the types of columns that come along, file by file. Fields of .jsonl files have the type of all values."""

    def __init__(self, keep: Sequence[str], column: str | None) -> None:
        """Takes the names of the columns, and of the one with inputs.

        Raises:
            ValueError: A column is named twice, has the inputs, or has the name of one that is written.
        """
        for place, name in enumerate(keep):
            if name in keep[:place]:
                raise ValueError(f"--keep {name}: is given twice")
            if name in _OUTPUT_COLUMNS:
                raise ValueError(
                    f"--keep {name}: the output has a column {name!r} of its own; rename that of the inputs"
                )
            _refuse_input_column(name, column)
        self._keep = keep
        self._types: dict[str, tuple[str, str]] = {}  # of each column, and a file that has it
        self._json_types: dict[str, set[str]] = {name: set() for name in keep}  # of all values so far
        self._json_file = ""

    def add_columns(self, file: DataFile, types: Mapping[str, str], input_column: str) -> None:
        """A file with columns of known types.

        Raises:
            ValueError: It lacks a column, or has one of another type than a file before.
        """
        for name in self._keep:
            _refuse_input_column(name, input_column)
            if name not in types:
                there = ", ".join(map(repr, types))
                raise ValueError(f"{file.name}: has no column {name!r} for --keep; it has {there}")
            its, first = self._types.setdefault(name, (types[name], file.name))
            if its != types[name]:
                raise ValueError(_mismatch(name, its, first, types[name], file.name))

    def add_fields(self, file: DataFile, seen: Mapping[str, set[str]]) -> None:
        """A .jsonl file of at least one line, with what `note_types` found.

        Raises:
            ValueError: None of its lines has a field.
        """
        for name, types in seen.items():
            if not types:
                raise ValueError(f"{file.name}: no line has a field {name!r} for --keep")
            self._json_types[name] |= types
        self._json_file = self._json_file or file.name

    def types(self) -> dict[str, str]:
        """The type of each column, as `str` has it.

        Raises:
            ValueError: A column is of one type in .jsonl files and of another elsewhere.
        """
        found = {name: its for name, (its, _) in self._types.items()}
        if self._json_file:
            for name, seen in self._json_types.items():
                its = _unified(seen)
                other = found.setdefault(name, its)
                if not _fits(its, other):
                    raise ValueError(_mismatch(name, other, self._types[name][1], its, self._json_file))
        return {name: found[name] for name in self._keep if name in found}


def note_types(values: Iterable[Any], seen: Mapping[str, set[str]]) -> None:
    """Adds the types of fields, which `seen` names, of the values of some lines."""
    for value in values:
        if isinstance(value, dict):
            for name, types in seen.items():
                if name in value:
                    types.add(_json_type(value[name]))


def _refuse_input_column(name: str, column: str | None) -> None:
    if name == column:
        raise ValueError(f"--keep {name}: is the column of the inputs, which the output has anyway")


def _mismatch(name: str, its: str, first: str, other: str, second: str) -> str:
    return f"--keep {name}: is {its} in {first} and {other} in {second}; it must be of one type in all inputs"


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return ""
    return {bool: "bool", int: "int64", float: "double", str: _STRING}.get(type(value), "")


def _unified(seen: set[str]) -> str:
    """The one type of several; text where there is none."""
    types = seen - {"null"}
    if len(types) < 2:
        return (types.pop() if types else "null") or _STRING
    return "double" if types == {"int64", "double"} else _STRING


def _fits(its: str, other: str) -> bool:
    if its == "null":
        return _alias(other) is not None
    return its == other or (its, other) == ("int64", "double")


def _alias(its: str) -> Any:
    try:
        return pa.type_for_alias(its)
    except ValueError:
        return None


def plain_type(its: Any) -> Any:
    """What a column of Parquet is kept as: its own type, but of text there is only one."""
    if pa.types.is_dictionary(its):
        its = its.value_type
    return pa.string() if is_text(its) else its


def array_of(values: Sequence[Any], its: str) -> Any:
    """An array of values of JSON, of the type that was found for all.

    Raises:
        ValueError: A value is of another type, which none was.
    """
    try:
        if its == _STRING:
            return pa.array([_as_text(it) for it in values], pa.string())
        convert = float if its == "double" else lambda it: it
        return pa.array([None if it is None else convert(it) for it in values], _alias(its))
    except (TypeError, OverflowError, pa.ArrowException) as error:
        raise ValueError(f"has other values than before: {error}") from error


def _as_text(value: Any) -> str | None:
    """A text itself, anything else as JSON; what is no UTF-8 gets question marks."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="replace").decode()
