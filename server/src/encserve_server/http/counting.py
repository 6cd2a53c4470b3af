"""Counts what a large JSON body holds before it is decoded.

Any decoder of 4 MiB of `[[1],[1],…]` makes a million lists in one call of 0.3 s, and nothing else runs meanwhile. The
count is one pass over the bytes, in pieces between which other requests have a turn, and ends at the first bound
exceeded. It makes no values: without escapes, what stands between quotes is text, and the rest has one bracket for each
list and object, and a comma between members. The count of a body that is no JSON is wrong only behind the first
mistake, where every decoder stops.
"""

import asyncio
from dataclasses import dataclass

from encserve_server.errors import MalformedRequest, RequestTooLarge, TooManyInputs

# A smaller body is decoded as it is; what is in a larger one is counted first.
COUNTED_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024
# Strings, lists and commas that a body may have besides its inputs: names of fields, and what they hold.
_OTHER_VALUES = 200
_MAX_OBJECTS = 200


@dataclass(frozen=True, slots=True)
class CountLimits:
    """What a count can refuse.

    Attributes:
        sequences: The most inputs of a request.
        ids: The most token ids of a request.
        setting: The setting that has the most inputs, for errors.
        strings_each: The most strings that an input takes.
        objects_each: The most objects that an input takes.
        lists_each: The most lists that an input takes.
    """

    sequences: int
    ids: int
    setting: str = "max_http_inputs"
    strings_each: int = 1
    objects_each: int = 0
    lists_each: int = 1


async def check_counts(body: bytes, inputs_field: str, limits: CountLimits) -> None:
    """Returns if a body holds no more than a request may; `inputs_field` is the name of its inputs, for errors.

    Raises:
        TooManyInputs: There are more strings or lists than a request may have inputs.
        RequestTooLarge: There are more numbers than a request may have ids.
        MalformedRequest: There are more objects than any request has.
    """
    quotes = lists = objects = commas = begin = 0
    most_strings = limits.sequences * limits.strings_each + _OTHER_VALUES
    objects_of_inputs = limits.sequences * limits.objects_each
    most_objects = objects_of_inputs + _MAX_OBJECTS
    while begin < len(body):
        end = _end_of_piece(body, begin)
        piece = body[begin:end].replace(rb"\\", b"").replace(rb"\"", b"")
        in_string = quotes % 2
        quotes += piece.count(b'"')
        if quotes > 2 * most_strings:
            raise _too_many_inputs(inputs_field, limits)
        values = b"".join(piece.split(b'"')[in_string::2])
        lists += values.count(b"[")
        objects += values.count(b"{")
        commas += values.count(b",")
        if lists > limits.sequences * limits.lists_each + _OTHER_VALUES:
            raise _too_many_inputs(inputs_field, limits)
        if commas > most_strings + objects_of_inputs + limits.ids:
            problem = f"must be at most {limits.ids} token ids in all; was more"
            raise RequestTooLarge(inputs_field, problem)
        if objects > most_objects:
            raise MalformedRequest("", f"the body must hold at most {most_objects} JSON objects; was more")
        begin = end
        await asyncio.sleep(0)


def _end_of_piece(body: bytes, begin: int) -> int:
    """Where a piece ends: not behind the first half of an escape."""
    end = begin + _PIECE_BYTES
    piece = body[begin:end]
    return end + (len(piece) - len(piece.rstrip(b"\\"))) % 2


def _too_many_inputs(field: str, limits: CountLimits) -> TooManyInputs:
    return TooManyInputs(field, f"must hold at most {limits.sequences} sequences ({limits.setting}); was more")
