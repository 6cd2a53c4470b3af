"""Makes the page of the settings, from the fields of the server's `Settings`."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

from encserve_server.settings import SECTIONS, Settings

HEAD = """\
# Settings

Every setting of `encserve-server`, written from the code by `make docs`. A flag takes precedence over its environment
variable, and the variable takes precedence over the default. With an invalid value, the server does not start. The
error names the setting, the allowed values and the given value. `encserve-server --help` prints the same settings.
"""
TABLE = """
## {}

| flag and environment variable | values | default | meaning |
|---|---|---|---|
"""
WORDS = {int: "whole number", float: "number", str: "text", Path: "path"}


def page() -> str:
    """Return the page."""
    hints = typing.get_type_hints(Settings)
    text = HEAD
    for section in SECTIONS:
        text += TABLE.format("Basics" if section == "Options" else section)
        for field in dataclasses.fields(Settings):
            if field.metadata["section"] == section:
                text += f"| {' | '.join(_row(field, hints[field.name]))} |\n"
    return text


def _row(field: "dataclasses.Field[Any]", hint: Any) -> tuple[str, ...]:
    if isinstance(hint, types.UnionType):  # a union such as `int | None` becomes `int`
        hint = typing.get_args(hint)[0]
    name = field.name.replace("_", "-")
    flag = f"`--{name}`, `--no-{name}`" if hint is bool else f"`--{name}`"
    variable = f"`ENCSERVE_{field.name.upper()}`"
    names = f"{variable}, no flag" if field.metadata.get("is_secret") else f"{flag}<br>{variable}"
    return names, _values(field, hint), _default(field), field.metadata["help"]


def _values(field: "dataclasses.Field[Any]", hint: Any) -> str:
    if hint is bool:
        return "`true`, `false`"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "text; for several values, repeat the flag, or separate the values by spaces in the variable"
    minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
    if maximum is not None:
        return f"{WORDS[hint]}, {minimum:g} to {maximum:g}"
    return WORDS[hint] if minimum is None else f"{WORDS[hint]}, at least {minimum:g}"


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default in (None, ()):
        return "–"
    return f"`{str(field.default).lower()}`"
