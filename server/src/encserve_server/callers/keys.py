"""Keys and their digests. The server stores only digests."""

import hashlib
import secrets
from collections.abc import Iterable, Iterator

_PREFIX = "encserve-"
_RANDOM_BYTES = 32
# Headers that contain only the key. `authorization` has a scheme before the key.
_KEY_HEADERS = frozenset({"api-key", "x-api-key"})
_BEARER = "bearer "


def make_key() -> str:
    """Return a random key of 256 bits. The prefix helps people and tools to find leaked keys."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key. Keys are random, so a slow hash would not add security."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def presented_keys(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[str]:
    """Yield the keys in the headers of a call, in order. Header names must be in lower case."""
    for name, value in metadata:
        if isinstance(value, bytes):
            continue
        if name in _KEY_HEADERS:
            yield value.strip()
        elif name == "authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :].strip()
