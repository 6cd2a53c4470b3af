"""Reads the callers file, and files of keys. No error text holds a value that might be a key."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encserve_server.callers.keys import digest_of
from encserve_server.errors import StartupError
from encserve_server.system.files import read_small
from encserve_server.types.callers import PRIORITIES, Caller, Priority

NAME = re.compile(r"[A-Za-z0-9][\w.@:/+-]{0,63}", re.ASCII)
_NAME_RULE = "1 to 64 letters, digits and any of . _ @ : / + -, the first a letter or a digit"
FIELDS = frozenset(
    {"name", "key_sha256", "certificate_names", "models", "inspect", "weight", "priority", "proxy", "tokens_per_second"}
)
_LEAST_KEY_CHARS = 16
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# What tomllib's errors show of a file, and the names that may be shown: others may be a key by mistake.
_QUOTED = re.compile(r"""\(?['"].{2,}['"](,?\))?""")
_SHOWN_NAME = re.compile(r"[A-Za-z_]{1,24}")
# Weights further apart would starve the light ones.
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100.0
_MOST_TOKENS = 1e12
_SHOWN_DIGITS = 15


class CallersError(StartupError):
    """A file of callers or of keys cannot be used; the text names the entry, the field, and what to do."""


@dataclass(frozen=True, slots=True)
class CallerRules:
    """One caller, and what it may do.

    Attributes:
        caller: Its name, weight and priority.
        digests: The SHA-256 of each of its keys.
        certificate_names: DNS and URI names; a client certificate with one of them is this caller's.
        models: The names of the models that it may use; None for all.
        may_inspect: Whether it may use Inspect.
        tokens_per_second: The cost that it may ask for in a second, in tokens; None for any.
        is_proxy: Whether it may name others as the callers of its calls.
    """

    caller: Caller
    digests: tuple[bytes, ...] = ()
    certificate_names: tuple[str, ...] = ()
    models: frozenset[str] | None = None
    may_inspect: bool = True
    tokens_per_second: float | None = None
    is_proxy: bool = False


def read_file(path: Path, setting: str) -> bytes:
    """A file's bytes.

    Raises:
        CallersError: It cannot be read; the text names the setting that names it.
    """
    try:
        return read_small(path)
    except OSError as error:
        raise CallersError(f"{setting} {path}: {error.strerror}") from error


def read_keys(data: bytes, where: str) -> list[CallerRules]:
    """The one caller of a file of keys, which has no name: one key a line, so that keys can be changed.

    Raises:
        CallersError: There is no key, or a line is no key.
    """
    try:
        keys = [line.strip() for line in data.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise CallersError(f"{where}: must be UTF-8; byte {error.start} is not") from None
    if not keys:
        raise CallersError(f"{where}: has no key; write one a line, as encserve-server hash-key makes them")
    for i, key in enumerate(keys):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise CallersError(f"{where}: key {i + 1} must be printable ASCII without blanks, as headers hold it")
        if len(key) < _LEAST_KEY_CHARS:
            problem = f"key {i + 1} must have at least {_LEAST_KEY_CHARS} characters; has {len(key)}"
            raise CallersError(f"{where}: {problem}: encserve-server hash-key makes one")
    return [CallerRules(Caller(), tuple(map(digest_of, keys)), is_proxy=True)]


def read_callers(data: bytes, where: str) -> list[CallerRules]:
    """The callers of a callers file.

    Raises:
        CallersError: It is no TOML, has no caller, or one of its fields is wrong.
    """
    try:
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise CallersError(f"{where}: must be UTF-8; byte {error.start} is not") from None
    except (ValueError, RecursionError) as error:  # tomllib's own is a ValueError, with line and column
        raise CallersError(f"{where}: is no TOML: {_QUOTED.sub('…', str(error))}") from None
    if unknown := set(document) - {"caller"}:
        raise CallersError(f"{where}: no table {_names(unknown)}; there is [[caller]] alone")
    entries = document.get("caller", [])
    if not isinstance(entries, list) or not all(isinstance(it, dict) for it in entries):
        raise CallersError(f"{where}: caller must be an array of tables: write [[caller]], with two brackets")
    if not entries:
        raise CallersError(f"{where}: has no [[caller]], so nobody could call; add one")
    rules = [_Entry(where, i, it).read() for i, it in enumerate(entries)]
    _check_unique(where, "name", ((i, it.caller.name) for i, it in enumerate(rules)))
    _check_unique(where, "key_sha256", ((i, key) for i, it in enumerate(rules) for key in it.digests))
    names = ((i, name) for i, it in enumerate(rules) for name in it.certificate_names)
    _check_unique(where, "certificate_names", names)
    return rules


class _Entry:
    """One [[caller]] of a file."""

    def __init__(self, where: str, place: int, fields: Mapping[str, Any]) -> None:
        self._where = where
        self._place = place
        self._fields = fields

    def read(self) -> CallerRules:
        if unknown := set(self._fields) - FIELDS:
            advice = "; a key itself does not belong here, only its sum" if unknown & {"key", "api_key", "keys"} else ""
            raise self._error(f"no field {_names(unknown)}; there are {', '.join(sorted(FIELDS))}{advice}")
        name = self._fields.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise self._error(f"name: must be {_NAME_RULE}")
        digests = self._strings("key_sha256", _DIGEST.fullmatch, "64 hexadecimal digits, as hash-key prints them")
        certificate_names = self._strings("certificate_names", str.strip, "a DNS or URI name")
        if not digests and not certificate_names:
            raise self._error("needs key_sha256 or certificate_names; without one nobody can be this caller")
        models = self._strings("models", str.strip, "the name of a model")
        if not models and "models" in self._fields:
            raise self._error("models: must name at least one model; leave the field out for all")
        return CallerRules(
            Caller(name, self._number("weight", 1.0, _LEAST_WEIGHT, _MOST_WEIGHT) or 1.0, self._priority()),
            tuple(map(bytes.fromhex, digests)),
            tuple(certificate_names),
            frozenset(models) if "models" in self._fields else None,
            self._flag("inspect", default=True),
            self._number("tokens_per_second", None, 1.0, _MOST_TOKENS),
            self._flag("proxy", default=False),
        )

    def _flag(self, field: str, *, default: bool) -> bool:
        value = self._fields.get(field, default)
        if not isinstance(value, bool):
            raise self._error(f"{field}: must be true or false; was {_shown(value)}")
        return value

    def _priority(self) -> Priority:
        priority = self._fields.get("priority", next(iter(PRIORITIES)))
        if not isinstance(priority, str) or priority not in PRIORITIES:
            raise self._error(f"priority: must be {' or '.join(PRIORITIES)}; was {_shown(priority)}")
        return PRIORITIES[priority]

    def _strings(self, field: str, is_right: Callable[[str], object], rule: str) -> Sequence[str]:
        values = self._fields.get(field, [])
        if not isinstance(values, list):
            raise self._error(f'{field}: must be a list of strings, as ["…", "…"]; was {_kind(values)}')
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self._error(f"{field}[{i}]: must be {rule}; was {_kind(value)}")
            if not is_right(value):  # the value is not shown: it may be a key by mistake
                raise self._error(f"{field}[{i}]: must be {rule}; has {len(value)} characters")
        return values

    def _number(self, field: str, default: float | None, least: float, most: float) -> float | None:
        value = self._fields.get(field, default)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            raise self._error(f"{field}: must be a number; was {_shown(value)}")
        if not least <= value <= most:  # TOML's integers may be larger than any float
            raise self._error(f"{field}: must be from {least:g} to {most:g}; was {_shown(value)}")
        return float(value)

    def _error(self, problem: str) -> CallersError:
        name = self._fields.get("name")
        shown = f' "{name}"' if isinstance(name, str) and NAME.fullmatch(name) else ""
        return CallersError(f"{self._where}: caller[{self._place}]{shown}: {problem}")


def _check_unique(where: str, field: str, found: Iterable[tuple[int, object]]) -> None:
    first: dict[object, int] = {}
    for place, value in found:
        if value in first:
            both = f"caller[{first[value]}] and caller[{place}]"
            raise CallersError(f"{where}: {both} have the same {field}; each must be of one caller, and given once")
        first[value] = place


def _names(names: Iterable[str]) -> str:
    shown = (name if _SHOWN_NAME.fullmatch(name) else f"one of {len(name)} characters" for name in names)
    return ", ".join(sorted(shown))


def _kind(value: object) -> str:
    return {str: "a string", dict: "a table", list: "a list", bool: "true or false"}.get(type(value), "a number")


def _shown(value: object) -> str:
    """Numbers and the like; a string may be a key by mistake."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_DIGITS:
        return f"a number of more than {_SHOWN_DIGITS} digits"
    return _kind(value) if isinstance(value, str | dict | list) else str(value)
