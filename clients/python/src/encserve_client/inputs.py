"""The caller's inputs, checked and made into protobuf messages."""

import math
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from encserve_client._arguments import as_int
from encserve_client.exceptions import InvalidInputError
from encserve_client.options import UNITS, SpanUnit
from encserve_proto.v1 import encoder_pb2 as pb

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids of one sequence: a list or tuple of int, or a (seq,) array of any integer type."""

TokenEmbeddings: TypeAlias = npt.NDArray[np.floating[Any]]
"""One vector per token: a (seq, d_model) array of float32, float16, or float64, which is sent as float32."""

Input: TypeAlias = str | TokenIds | TokenEmbeddings
"""One sequence: a text that the server tokenizes, token ids, or, for a model that takes them, one vector per token."""


@dataclass(frozen=True, slots=True)
class Spanned:
    """One input with ranges of it: starts, ends and what they are counted in, None for the contract's default."""

    input: Input
    spans: tuple[list[int], list[int]]
    unit: SpanUnit | None


_FLOAT32 = np.dtype("<f4")
# What each type of vectors is sent as; the bytes are little-endian whatever this machine and the array are.
_SENT_AS: dict[str, tuple[np.dtype[np.floating[Any]], pb.DataType]] = {
    "float16": (np.dtype("<f2"), pb.DATA_TYPE_FLOAT16),
    "float32": (_FLOAT32, pb.DATA_TYPE_FLOAT32),
    "float64": (_FLOAT32, pb.DATA_TYPE_FLOAT32),
}


def read_inputs(inputs: Iterable[Input]) -> tuple[list[Input], bool]:
    """Read all inputs, so that an input of the wrong type is found before anything is sent.

    Returns:
        The inputs, and whether `inputs` was a single text.

    Raises:
        InvalidInputError: `inputs` is one input but not a text, or one of the inputs is of the wrong type.
    """
    if isinstance(inputs, str):
        return [inputs], True
    check_iterable(inputs)
    if isinstance(inputs, Mapping | Set):  # a tokenizer's own result, say, would be encoded by its keys
        raise InvalidInputError(f"inputs must be a list of inputs; was {type(inputs).__name__}")
    items = list(inputs)
    for index, item in enumerate(items):
        try:
            check_input(item, f"inputs[{index}]")
        except InvalidInputError as error:
            error.index = index
            raise
    return items, False


def check_iterable(inputs: object) -> None:
    """Check that `inputs` can be several inputs.

    Raises:
        InvalidInputError: `inputs` is not iterable, or is one sequence of vectors, or bytes.
    """
    if isinstance(inputs, bytes | bytearray):
        raise InvalidInputError(
            f"inputs must be a str or a list of inputs; was {type(inputs).__name__}: decode the bytes"
        )
    if not isinstance(inputs, Iterable | AsyncIterable):
        raise InvalidInputError(f"inputs must be a list of inputs; was {type(inputs).__name__}")
    if isinstance(inputs, np.ndarray) and inputs.ndim == 2 and inputs.dtype.kind == "f":
        raise InvalidInputError("inputs must be a list of inputs; for one sequence of vectors pass [array]")


def check_spans(spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Where ranges start, and where they end.

    Raises:
        InvalidInputError: One is no pair of integers, or one of these is negative or has more than 32 bits.
    """
    starts: list[int] = []
    ends: list[int] = []
    for index, span in enumerate(spans):
        if isinstance(span, str) or not isinstance(span, Sequence | np.ndarray) or len(span) != 2:
            raise InvalidInputError(f"spans[{index}] must be (start, end); was {span!r}")
        for numbers, value in ((starts, span[0]), (ends, span[1])):
            numbers.append(as_int(f"spans[{index}]", value))
            if not 0 <= numbers[-1] < 2**32:
                raise InvalidInputError(f"spans[{index}] must be from 0 to {2**32 - 1}; was {numbers[-1]}")
    return starts, ends


def check_input(item: object, name: str) -> Input:
    """Returns what can be one sequence; its ids or numbers are checked when they are packed.

    Raises:
        InvalidInputError: The item is neither a text, nor a sequence of ids, nor one of vectors.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, np.ndarray):
        _check_array(item, name)
    elif isinstance(item, int | np.integer):
        raise InvalidInputError(f"{name} is a single id; for one sequence of ids pass [ids]")
    elif not isinstance(item, list | tuple):
        raise InvalidInputError(
            f"{name} must be a text, a list, tuple or array of token ids, or an array of vectors; "
            f"was {type(item).__name__}"
        )
    if len(item) == 0:
        raise InvalidInputError(f"{name} must have at least one token id; was empty")
    return item


def pack_input(item: Input | Spanned, name: str) -> pb.Input:
    """Makes the message for one input that passed `check_input`.

    Raises:
        InvalidInputError: The text is no Unicode (a lone surrogate), an id is no integer of 64 bits, or a number of a
            vector is not finite as it is sent.
    """
    if isinstance(item, Spanned):
        packed = pack_input(item.input, name)
        packed.spans.CopyFrom(pb.Spans(unit=UNITS[item.unit], starts=item.spans[0], ends=item.spans[1]))
        return packed
    if isinstance(item, np.ndarray) and item.ndim == 2:
        return pb.Input(embeddings=_pack_vectors(item, name))
    try:
        if isinstance(item, str):
            return pb.Input(text=item)
        ids = item.tolist() if isinstance(item, np.ndarray) else item
        return pb.Input(token_ids=pb.TokenIds(ids=ids))
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidInputError(f"{name} cannot be sent: {error}") from error


def _check_array(array: npt.NDArray[Any], name: str) -> None:
    """Accepts (seq,) integers and (seq, d_model) numbers of a type that can be sent."""
    is_ids = array.ndim == 1 and array.dtype.kind in "iu"
    is_vectors = array.ndim == 2 and array.dtype.name in _SENT_AS
    if not is_ids and not is_vectors:
        raise InvalidInputError(
            f"{name} must be a (seq,) array of integers or a (seq, d_model) array of float32, float16 or float64; "
            f"was {array.shape} of {array.dtype}"
        )
    if is_vectors and 0 in array.shape:
        raise InvalidInputError(f"{name} must have at least one row and one column; was {array.shape}")


def _pack_vectors(array: npt.NDArray[Any], name: str) -> pb.TokenEmbeddings:
    """The vectors of one sequence, row by row. A float64 is rounded to the nearest float32."""
    dtype, data_type = _SENT_AS[array.dtype.name]
    with np.errstate(over="ignore"):  # what becomes infinite is found below
        vectors = np.asarray(array, dtype)  # (seq, d_model)
    finite = np.isfinite(vectors)
    if not finite.all():
        row, column = (int(place) for place in np.argwhere(~finite)[0])
        value = float(array[row, column])
        wanted = (
            f"fit into float32, whose largest is {np.finfo(np.float32).max:g}" if math.isfinite(value) else "be finite"
        )
        raise InvalidInputError(f"{name}: the number in row {row}, column {column} must {wanted}; was {value:g}")
    return pb.TokenEmbeddings(width=vectors.shape[1], data_type=data_type, data=vectors.tobytes())
