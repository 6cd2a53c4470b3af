"""Explains why bytes are not JSON that the server can use."""

import json
import re
from typing import Any

from encserve_server.errors import InvalidField, MalformedRequest, RequestError

_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
# Longer JSON is not searched for half surrogate pairs, because the search would delay other calls. Each input is
# decoded separately, so most JSON is shorter.
_MAX_SEARCHED_BYTES = 1024 * 1024


def explain(data: bytes, error: Exception, path: str = "") -> RequestError:
    """Return the error for bytes that a JSON decoder refused.

    Args:
        data: The body, or the JSON of one field.
        error: The error of the decoder.
        path: The field; empty for the body.
    """
    subject = "" if path else "the body "
    if data.startswith(_BYTE_ORDER_MARKS):
        return MalformedRequest(path, f"{subject}must be UTF-8 without a byte order mark")
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        found = f"byte 0x{data[wrong.start]:02x} at position {wrong.start}{' of the field' if path else ''}"
        return MalformedRequest(path, f"{subject}must be UTF-8; was {found}")
    if len(data) <= _MAX_SEARCHED_BYTES and _ESCAPED_HALF.search(data):
        place = _path_of_half(data, path)
        if place is not None:
            return InvalidField(place, "must be text; was half of a surrogate pair, \\ud800 to \\udfff")
    return MalformedRequest("", f"the body is not valid JSON: {error}")


def _path_of_half(data: bytes, path: str) -> str | None:
    """Return the path of the first string with half of a surrogate pair; None without such a string.

    Python's decoder accepts such strings, although UTF-8 cannot encode them.
    """
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    waiting = [(path, value)]
    while waiting:
        place, it = waiting.pop()
        if isinstance(it, str) and _HALF.search(it):
            return place
        if isinstance(it, list):
            waiting.extend((f"{place}[{i}]", member) for i, member in reversed(list(enumerate(it))))
        elif isinstance(it, dict):
            waiting.extend((f"{place}.{name}" if place else name, member) for name, member in reversed(it.items()))
    return None
