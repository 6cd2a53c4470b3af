"""Parsers of the callers file and of key files. No error text shows a value that may be a key."""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encserve_server.callers.keys import digest_of
from encserve_server.errors import StartupError
from encserve_server.types.callers import PRIORITIES, Caller, CertificateName, Priority, dns_name, uri_name

NAME = re.compile(r"[A-Za-z0-9][\w.@:/+-]{0,63}", re.ASCII)
_NAME_RULE = "1 to 64 letters, digits or . _ @ : / + -, and begin with a letter or digit"
FIELDS = frozenset(
    {"name", "key_sha256", "certificate_names", "models", "inspect", "weight", "priority", "proxy", "tokens_per_second"}
)
_MIN_KEY_CHARS = 16
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# A URI begins with its scheme. A host and a port, such as example.org:443, are not a URI.
_URI_NAME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?!\d+$)\S+")
_DNS_NAME = re.compile(r"[^\s:/@]+")
_CERTIFICATE_NAME_RULE = "a DNS name, or a URI that begins with its scheme such as spiffe://"
# Errors of tomllib quote parts of the file. These parts are hidden, because they may contain a key.
_QUOTED = re.compile(r"""\(?['"].{2,}['"](,?\))?""")
# Errors show an unknown field name only in this form. Another text may be a key that the user wrote as a field name.
_SAFE_NAME = re.compile(r"[A-Za-z_]{1,24}")
# A wider range of weights would starve callers of low weight.
_MIN_WEIGHT, _MAX_WEIGHT = 0.01, 100.0
_MAX_RATE = 1e12  # tokens per second
_MAX_SHOWN_DIGITS = 15


class CallersError(StartupError):
    """A callers file or a key file cannot be used. The text names the entry, the field, and the next step."""


@dataclass(frozen=True, slots=True)
class CallerRules:
    """A caller and its permissions.

    Attributes:
        caller: The caller's name, weight and priority.
        digests: The SHA-256 of each of the caller's keys.
        certificate_names: A client certificate with one of these names belongs to the caller.
        models: The names of the models that the caller may use; None for all.
        may_inspect: Whether the caller may use Inspect.
        tokens_per_second: The rate limit; None for no limit.
        is_proxy: Whether a header in this caller's calls may name another caller.
    """

    caller: Caller
    digests: tuple[bytes, ...] = ()
    certificate_names: tuple[CertificateName, ...] = ()
    models: frozenset[str] | None = None
    may_inspect: bool = True
    tokens_per_second: float | None = None
    is_proxy: bool = False


def read_keys(data: bytes, where: str) -> list[CallerRules]:
    """Return the only caller of a key file. The file has one key per line. The caller has no name.

    Args:
        data: The bytes of the file.
        where: The setting and the path for errors, such as "--api-key-file keys.txt".

    Raises:
        CallersError: The file has no key, or a line is not a key.
    """
    try:
        keys = [line.strip() for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise CallersError(f"{where}: must be UTF-8; byte {error.start} is not") from None
    if not keys:
        raise CallersError(f"{where}: has no key; write one key per line, from encserve-server hash-key")
    for i, key in enumerate(keys):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise CallersError(f"{where}: key {i + 1} must be printable ASCII without blanks, to fit into a header")
        if len(key) < _MIN_KEY_CHARS:
            problem = f"key {i + 1} must have at least {_MIN_KEY_CHARS} characters; has {len(key)}"
            raise CallersError(f"{where}: {problem}; make one with encserve-server hash-key")
    return [CallerRules(Caller(), tuple(map(digest_of, keys)), is_proxy=True)]


def read_callers(data: bytes, where: str) -> list[CallerRules]:
    """Return the callers of a callers file.

    Args:
        data: The bytes of the file.
        where: The setting and the path for errors, such as "--callers callers.toml".

    Raises:
        CallersError: The file is not valid TOML, has no caller, or has an invalid field.
    """
    try:
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise CallersError(f"{where}: must be UTF-8; byte {error.start} is not") from None
    except (ValueError, RecursionError) as error:  # tomllib raises a ValueError with the line and the column
        raise CallersError(f"{where}: is not valid TOML: {_QUOTED.sub('…', str(error))}") from None
    if unknown := set(document) - {"caller"}:
        raise CallersError(f"{where}: unknown table {_names(unknown)}; the only table is [[caller]]")
    entries = document.get("caller", [])
    if not isinstance(entries, list) or not all(isinstance(it, dict) for it in entries):
        raise CallersError(f"{where}: caller must be an array of tables: write [[caller]], with two brackets")
    if not entries:
        raise CallersError(f"{where}: has no [[caller]], so the server would refuse all calls; add one")
    rules = [_Entry(where, i, it).read() for i, it in enumerate(entries)]
    _check_unique(where, "name", ((i, it.caller.name) for i, it in enumerate(rules)))
    _check_unique(where, "key_sha256", ((i, key) for i, it in enumerate(rules) for key in it.digests))
    names = ((i, name) for i, it in enumerate(rules) for name in it.certificate_names)
    _check_unique(where, "certificate_names", names)
    return rules


class _Entry:
    """One [[caller]] table of the file."""

    def __init__(self, where: str, index: int, fields: Mapping[str, Any]) -> None:
        self._where = where
        self._index = index
        self._fields = fields

    def read(self) -> CallerRules:
        if unknown := set(self._fields) - FIELDS:
            advice = (
                "; put the SHA-256 of the key into key_sha256, not the key"
                if unknown & {"key", "api_key", "keys"}
                else ""
            )
            raise self._error(f"unknown field {_names(unknown)}; the fields are {', '.join(sorted(FIELDS))}{advice}")
        name = self._fields.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise self._error(f"name: must be {_NAME_RULE}")
        digests = self._strings("key_sha256", _DIGEST.fullmatch, "64 hexadecimal digits, as hash-key prints them")
        certificate_names = self._strings("certificate_names", _certificate_name, _CERTIFICATE_NAME_RULE)
        if not digests and not certificate_names:
            raise self._error("needs key_sha256 or certificate_names, to recognise the caller")
        models = self._strings("models", str.strip, "the name of a model")
        if not models and "models" in self._fields:
            raise self._error("models: must name at least one model; leave the field out for all")
        return CallerRules(
            Caller(name, self._number("weight", 1.0, _MIN_WEIGHT, _MAX_WEIGHT) or 1.0, self._priority()),
            tuple(map(bytes.fromhex, digests)),
            tuple(name for text in certificate_names if (name := _certificate_name(text)) is not None),
            frozenset(models) if "models" in self._fields else None,
            self._flag("inspect", default=True),
            self._number("tokens_per_second", None, 1.0, _MAX_RATE),
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

    def _strings(self, field: str, is_valid: Callable[[str], object], rule: str) -> Sequence[str]:
        values = self._fields.get(field, [])
        if not isinstance(values, list):
            raise self._error(f'{field}: must be a list of strings, as ["…", "…"]; was {_kind(values)}')
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self._error(f"{field}[{i}]: must be {rule}; was {_kind(value)}")
            if not is_valid(value):  # the error hides the value, which may be a key in the wrong field
                raise self._error(f"{field}[{i}]: must be {rule}; has {len(value)} characters")
        return values

    def _number(self, field: str, default: float | None, minimum: float, maximum: float) -> float | None:
        value = self._fields.get(field, default)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            raise self._error(f"{field}: must be a number; was {_shown(value)}")
        if not minimum <= value <= maximum:  # before `float`, which fails for a very large integer
            raise self._error(f"{field}: must be from {minimum:g} to {maximum:g}; was {_shown(value)}")
        return float(value)

    def _error(self, problem: str) -> CallersError:
        name = self._fields.get("name")
        quoted = f' "{name}"' if isinstance(name, str) and NAME.fullmatch(name) else ""
        return CallersError(f"{self._where}: caller[{self._index}]{quoted}: {problem}")


def _certificate_name(text: str) -> CertificateName | None:
    if _URI_NAME.fullmatch(text):
        return uri_name(text)
    return dns_name(text) if _DNS_NAME.fullmatch(text) else None


def _check_unique(where: str, field: str, found: Iterable[tuple[int, object]]) -> None:
    first: dict[object, int] = {}
    for index, value in found:
        if value in first:
            both = f"caller[{first[value]}] and caller[{index}]"
            raise CallersError(f"{where}: {both} have the same {field}; the file may have each value only once")
        first[value] = index


def _names(names: Iterable[str]) -> str:
    safe = (name if _SAFE_NAME.fullmatch(name) else f"of {len(name)} characters" for name in names)
    return ", ".join(sorted(safe))


def _kind(value: object) -> str:
    return {str: "a string", dict: "a table", list: "a list", bool: "true or false"}.get(type(value), "a number")


def _shown(value: object) -> str:
    """Return a number or a boolean as text. For other values, return the type, because a string may be a key."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN_DIGITS:
        return f"a number of more than {_MAX_SHOWN_DIGITS} digits"
    return _kind(value) if isinstance(value, str | dict | list) else str(value)
