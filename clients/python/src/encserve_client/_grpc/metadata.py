"""What every call sends along: the caller's own, and the caller's trace where there is one."""

import re
import sys
from collections.abc import Mapping, Sequence

from encserve_client._arguments import want
from encserve_client.exceptions import InvalidInputError

Metadata = tuple[tuple[str, str | bytes], ...]
GivenMetadata = Mapping[str, str] | Sequence[tuple[str, str]]
_KEY = re.compile(r"[0-9a-z_.-]+")


def call_metadata(token: str | None, metadata: GivenMetadata | None) -> Metadata:
    """What every call sends along.

    Raises:
        InvalidInputError: Something is of the wrong type, or a key or a value cannot be sent; the text names the key
            and keeps the value secret.
    """
    given = () if metadata is None else want("metadata", metadata, (Mapping, list, tuple), "a dict or a list of pairs")
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    if token is not None:
        pairs.append(("authorization", f"Bearer {want('token', token, str, 'a str or None')}"))
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInputError("metadata must be of (key, value) pairs")
        key, value = pair
        want("a metadata key", key, str, "a str")
        if not _KEY.fullmatch(key):
            raise InvalidInputError(f"a metadata key must be of a-z, 0-9, '-', '_' and '.'; was {key!r}")
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise InvalidInputError(f"the metadata value of {key!r} must be a str of printable ASCII")
    return tuple(pairs)


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
