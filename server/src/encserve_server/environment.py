"""Environment variables that look like settings but are not."""

import logging
import re
from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)

PREFIX = "ENCSERVE_"
_NEAR = 2
_LEAST_BEGINNING = len(PREFIX) + 4
# Which of the ports it means nobody knows; it is near ENCSERVE_HOST by chance.
_PORT = f"{PREFIX}PORT"
# What the command `encserve` reads, for itself and for its subcommands, and what the tests read.
_OTHERS = frozenset(
    f"{PREFIX}{name}"
    for name in ("TARGET", "TIMEOUT", "TLS", "CA", "CERT", "KEY", "TOKEN", "SERVER_NAME", "METADATA", "VERSION")
)
_COMMANDS = ("ENCODE", "MODELS", "EMBED", "TOKENIZE", "SIMILARITY", "INSPECT", "BENCH")
_OTHERS_BEGIN = tuple(f"{PREFIX}{name}_" for name in (*_COMMANDS, "REQUIRE"))
# What Kubernetes sets in every pod for a service that is called encserve, or encserve-something.
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_[0-9]+_(TCP|UDP|SCTP)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(value: str) -> bool:
    """Return whether Kubernetes wrote a value: the address of a Service, such as tcp://10.0.0.1:80."""
    return _SERVICE_URL.match(value) is not None


def check_environment(environment: Mapping[str, str], settings: Collection[str]) -> list[str]:
    """Looks for variables of this server's prefix that set nothing.

    Args:
        environment: The variables.
        settings: The names of those that are settings.

    Returns:
        The names of those that are like no setting.

    Raises:
        ValueError: One is nearly the name of a setting; the text names both.
    """
    unknown = []
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name in settings or _is_of_others(name, value):
            continue
        nearest = min(settings, key=lambda setting: distance(name, setting))
        longer = [setting for setting in settings if setting.startswith(name)]
        if longer and len(name) >= _LEAST_BEGINNING:
            nearest = min(longer, key=len)
        if name != _PORT and (distance(name, nearest) <= _NEAR or nearest in longer):
            raise ValueError(f"the environment variable {name} is no setting; is {nearest} meant? Rename or unset it")
        unknown.append(name)
    return unknown


def _is_of_others(name: str, value: str) -> bool:
    if name in _OTHERS or name.startswith(_OTHERS_BEGIN) or _SERVICE.search(name):
        return True
    return name.endswith("_PORT") and is_service_link(value)


def distance(one: str, other: str) -> int:
    """Levenshtein's distance: how many characters to insert, delete or replace to turn one text into the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]
