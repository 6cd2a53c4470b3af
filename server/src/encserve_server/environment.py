"""Finds environment variables that look like settings but are not."""

import logging
import re
from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)

PREFIX = "ENCSERVE_"
_MAX_TYPOS = 2
_MIN_ABBREVIATION_CHARS = len(PREFIX) + 4
# The error for this variable must not propose a name. It could mean any port, but the most similar name is
# ENCSERVE_HOST.
_PORT = f"{PREFIX}PORT"
# The variables of the command `encserve`, of its subcommands, and of the tests.
_OTHER_PROGRAMS = frozenset(
    f"{PREFIX}{name}"
    for name in ("TARGET", "TIMEOUT", "TLS", "CA", "CERT", "TLS_KEY", "SERVER_NAME", "METADATA", "VERSION")
)
_COMMANDS = (
    *("ENCODE", "MODELS", "EMBED", "TOKENIZE", "SIMILARITY", "RANK", "SCORE"),
    *("INSPECT", "BENCH", "BUNDLE", "SERVE", "PULL"),
)
_OTHER_PROGRAMS_PREFIXES = tuple(f"{PREFIX}{name}_" for name in (*_COMMANDS, "REQUIRE"))
# Kubernetes sets these variables in every pod if a Service is named encserve or encserve-….
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_[0-9]+_(TCP|UDP|SCTP)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(value: str) -> bool:
    """Return whether a value is the address of a Kubernetes Service, such as tcp://10.0.0.1:80."""
    return _SERVICE_URL.match(value) is not None


def check_environment(environment: Mapping[str, str], settings: Collection[str]) -> list[str]:
    """Find variables with the prefix of this server that are not settings.

    Args:
        environment: The variables.
        settings: The variables of all settings.

    Returns:
        The unknown variables that are not similar to a setting.

    Raises:
        ValueError: The name of a variable is similar to a setting's name. The text contains both names.
    """
    unknown = []
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name in settings or _belongs_to_other_program(name, value):
            continue
        nearest = min(settings, key=lambda setting: distance(name, setting))
        completions = [setting for setting in settings if setting.startswith(name)]
        if completions and len(name) >= _MIN_ABBREVIATION_CHARS:
            nearest = min(completions, key=len)
        if name != _PORT and (distance(name, nearest) <= _MAX_TYPOS or nearest in completions):
            raise ValueError(
                f"environment variable {name} is not a setting; did you mean {nearest}? Rename or unset it"
            )
        unknown.append(name)
    return unknown


def _belongs_to_other_program(name: str, value: str) -> bool:
    if name in _OTHER_PROGRAMS or name.startswith(_OTHER_PROGRAMS_PREFIXES) or _SERVICE.search(name):
        return True
    return name.endswith("_PORT") and is_service_link(value)


def distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the minimum number of inserted, deleted and replaced characters."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]
