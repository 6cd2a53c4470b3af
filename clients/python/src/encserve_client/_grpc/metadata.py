"""The metadata of calls: the caller's metadata, the API key, and the trace context."""

import os
import re
import sys
from collections.abc import Mapping, Sequence

from encserve_client._arguments import check_type
from encserve_client.exceptions import InvalidInputError

Metadata = tuple[tuple[str, str | bytes], ...]
MetadataArgument = Mapping[str, str] | Sequence[tuple[str, str]]
_KEY = re.compile(r"[0-9a-z_.-]+")
_VARIABLE = "ENCSERVE_API_KEY"


def call_metadata(api_key: str | None, metadata: MetadataArgument | None) -> Metadata:
    """Return the metadata of every call, with the key as "authorization: Bearer …".

    Args:
        api_key: The key; "" for no key. None for the environment variable ENCSERVE_API_KEY, unless `metadata` has an
            "authorization" entry.
        metadata: The caller's metadata.

    Raises:
        InvalidInputError: An argument has the wrong type, or a value cannot be sent. The error message names the
            argument or the metadata key, but shows no secret.
    """
    metadata = () if metadata is None else metadata
    checked = check_type("metadata", metadata, (Mapping, list, tuple), "a dict or a list of pairs")
    pairs = list(checked.items() if isinstance(checked, Mapping) else checked)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInputError("must be a dict or a list of (key, value) pairs", field="metadata")
        key, value = pair
        check_type("a metadata key", key, str, "a str")
        if not _KEY.fullmatch(key):
            raise InvalidInputError(
                f"must have names of a-z, 0-9, '-', '_' and '.' only; was {key!r}", field="metadata"
            )
        if key.endswith("-bin"):
            raise InvalidInputError(
                f"must have texts as values, but names that end in -bin are for binary values; was {key!r}",
                field="metadata",
            )
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise InvalidInputError(
                f"must have values of printable ASCII; the value of {key!r} has other characters", field="metadata"
            )
    if bearer := _read_key(api_key, has_authorization="authorization" in dict(pairs)):
        pairs.append(("authorization", f"Bearer {bearer}"))
    return tuple(pairs)


def has_bearer_key(metadata: Metadata) -> bool:
    """Whether the metadata has a bearer key."""
    return any(key == "authorization" and str(value).startswith("Bearer ") for key, value in metadata)


def _read_key(api_key: str | None, *, has_authorization: bool) -> str:
    name, key = "api_key", api_key
    if key is None:
        name, key = _VARIABLE, "" if has_authorization else os.environ.get(_VARIABLE, "")
    # Files and editors add a line break, or a byte order mark at the start.
    key = check_type(name, key, str, "a str or None").strip().removeprefix("\ufeff").strip()
    if key and has_authorization:
        raise InvalidInputError("must be left out if metadata has 'authorization'; give one of them", field="api_key")
    for i, char in enumerate(key):
        if not "!" <= char <= "~":
            raise InvalidInputError(
                f"must be only the key, in printable ASCII without spaces; character {i + 1} of {len(key)} is "
                "not. encserve-server hash-key makes valid keys",
                field=name,
            )
    return key


def with_trace(metadata: Metadata) -> Metadata:
    """Return the metadata with the trace context of the current OpenTelemetry span.

    The process's propagators write the headers, by default traceparent and tracestate (W3C Trace Context). A header in
    `metadata` is not changed.

    If no module has imported OpenTelemetry, there is no current span, and `metadata` is returned unchanged.
    """
    if sys.modules.get("opentelemetry.trace") is None:
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    names = {name for name, _ in metadata}
    headers = ((key.lower(), value) for key, value in carrier.items())
    return (*metadata, *((key, value) for key, value in headers if key not in names))
