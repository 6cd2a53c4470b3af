"""Keys and their digests; the server keeps digests only."""

import hashlib
import secrets
from collections.abc import Iterable, Iterator

_PREFIX = "encserve-"
_RANDOM_BYTES = 32
# Headers that hold a key and nothing else; `authorization` holds a scheme before it.
_KEY_HEADERS = frozenset({"api-key", "x-api-key"})
_BEARER = "bearer "


def make_key() -> str:
    """A random key of 256 bits, with a prefix by which people and tools recognise leaked keys."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key. Keys are random, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def presented_keys(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[str]:
    """The keys among the headers of a call, in their order; the headers' names are lower case."""
    for name, value in metadata:
        if isinstance(value, bytes):
            continue
        if name in _KEY_HEADERS:
            yield value.strip()
        elif name == "authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :].strip()
