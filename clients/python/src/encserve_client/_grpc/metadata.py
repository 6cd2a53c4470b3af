"""The metadata of every call: the caller's own, the key, and the caller's trace if there is one."""

import os
import re
import sys
from collections.abc import Mapping, Sequence

from encserve_client._arguments import want
from encserve_client.exceptions import InvalidInputError

Metadata = tuple[tuple[str, str | bytes], ...]
GivenMetadata = Mapping[str, str] | Sequence[tuple[str, str]]
_KEY = re.compile(r"[0-9a-z_.-]+")
_VARIABLE = "ENCSERVE_API_KEY"


def call_metadata(api_key: str | None, metadata: GivenMetadata | None) -> Metadata:
    """The metadata of every call, with the key as "authorization: Bearer …".

    Args:
        api_key: The key; "" for none; None for that of the environment variable ENCSERVE_API_KEY, unless `metadata` has
            an "authorization" of its own.
        metadata: The caller's own.

    Raises:
        InvalidInputError: Something is of the wrong type, or cannot be sent. The text names the argument or the
            metadata key, and no secret value.
    """
    given = () if metadata is None else want("metadata", metadata, (Mapping, list, tuple), "a dict or a list of pairs")
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInputError("metadata must be of (key, value) pairs")
        key, value = pair
        want("a metadata key", key, str, "a str")
        if not _KEY.fullmatch(key):
            raise InvalidInputError(f"a metadata key must be of a-z, 0-9, '-', '_' and '.'; was {key!r}")
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise InvalidInputError(f"the metadata value of {key!r} must be a str of printable ASCII")
    if bearer := _read_key(api_key, has_authorization="authorization" in dict(pairs)):
        pairs.append(("authorization", f"Bearer {bearer}"))
    return tuple(pairs)


def has_bearer_key(metadata: Metadata) -> bool:
    """Whether a call sends a bearer key, as `call_metadata` adds one."""
    return any(key == "authorization" and str(value).startswith("Bearer ") for key, value in metadata)


def _read_key(api_key: str | None, *, has_authorization: bool) -> str:
    name, key = "api_key", api_key
    if key is None:
        name, key = _VARIABLE, "" if has_authorization else os.environ.get(_VARIABLE, "")
    # Files and editors add a line break, or a byte order mark at the start.
    key = want(name, key, str, "a str or None").strip().removeprefix("\ufeff").strip()
    if key and has_authorization:
        raise InvalidInputError("give api_key, or 'authorization' in metadata, not both")
    for i, char in enumerate(key):
        if not "!" <= char <= "~":
            raise InvalidInputError(
                f"{name} must be the key alone, of printable ASCII without spaces; character {i + 1} of {len(key)} is "
                "not. encserve-server hash-key makes such keys"
            )
    return key


def with_trace(metadata: Metadata) -> Metadata:
    """A call's metadata and with it the current span's context, as OpenTelemetry's propagators write it.

    That is W3C Trace Context, in the headers traceparent and tracestate, unless the process has chosen others. A header
    that `metadata` has already stays as it is.

    A span can be current only if somebody has imported OpenTelemetry: so this does not, and where nobody has, it costs
    nothing and nothing is added.
    """
    if sys.modules.get("opentelemetry.trace") is None:
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    given = {key for key, _ in metadata}
    headers = ((key.lower(), value) for key, value in carrier.items())
    return (*metadata, *((key, value) for key, value in headers if key not in given))
