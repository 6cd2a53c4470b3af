"""Checks of the caller's inputs, and their conversion to protobuf messages."""

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
"""The token ids of one sequence: a list or tuple of int, or a (seq,) array of any integer type."""

TokenEmbeddings: TypeAlias = npt.NDArray[np.floating[Any]]
"""One vector per token: a (seq, d_model) array of float16, float32 or float64. float64 is sent as float32."""

Input: TypeAlias = str | TokenIds | TokenEmbeddings
"""One sequence: a text, token ids, or one vector per token for a model with `input_kind` "embeddings"."""


@dataclass(frozen=True, slots=True)
class SpanInput:
    """One input, and ranges in the input.

    Attributes:
        input: The input.
        spans: The starts and the ends of the ranges.
        unit: The unit of the ranges. None: code points for a text, tokens for token ids and vectors.
    """

    input: Input
    spans: tuple[list[int], list[int]]
    unit: SpanUnit | None


_FLOAT32 = np.dtype("<f4")
# The type on the wire for each type of array. The bytes are always little-endian.
_WIRE_TYPES: dict[str, tuple[np.dtype[np.floating[Any]], pb.DataType]] = {
    "float16": (np.dtype("<f2"), pb.DATA_TYPE_FLOAT16),
    "float32": (_FLOAT32, pb.DATA_TYPE_FLOAT32),
    "float64": (_FLOAT32, pb.DATA_TYPE_FLOAT32),
}


def read_inputs(inputs: Iterable[Input], name: str = "inputs") -> tuple[list[Input], bool]:
    """Return all inputs as a list, without checking each input. `name` is the argument's name, for errors.

    Returns:
        The inputs, and whether `inputs` was a single text.

    Raises:
        InvalidInputError: `inputs` is not an iterable of inputs, or is an async iterable.
    """
    if isinstance(inputs, str):
        return [inputs], True
    check_iterable(inputs, name)
    if not isinstance(inputs, Iterable):
        raise InvalidInputError(
            f"must be a list of inputs; was {type(inputs).__name__}: only `stream` takes async iterables", field=name
        )
    return list(inputs), False


def check_inputs(inputs: Sequence[Input]) -> None:
    """Check the type of each input, before anything is sent.

    Raises:
        InvalidInputError: An input has the wrong type.
    """
    for index, item in enumerate(inputs):
        if isinstance(item, str):  # the common case, fast
            continue
        try:
            check_input(item, f"inputs[{index}]")
        except InvalidInputError as error:
            error.index = index
            raise


def check_texts(texts: Sequence[object]) -> None:
    """Check that each item is a text, before anything is sent.

    Raises:
        InvalidInputError: An item is not a text.
    """
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            error = InvalidInputError(f"must be a str; was {type(text).__name__}", field=f"texts[{index}]")
            error.index = index
            raise error


def check_iterable(inputs: object, name: str = "inputs") -> None:
    """Check that `inputs` is an iterable of inputs. `name` is the argument's name, for errors.

    Raises:
        InvalidInputError: `inputs` is not iterable, or is bytes, or is one sequence of vectors.
    """
    if isinstance(inputs, bytes | bytearray):
        raise InvalidInputError(
            f"must be a str or a list of inputs; was {type(inputs).__name__}: decode the bytes",
            field=name,
        )
    # Iteration over a dict, such as a tokenizer's result, would encode the keys.
    is_scalar = isinstance(inputs, np.ndarray) and inputs.ndim == 0
    if not isinstance(inputs, Iterable | AsyncIterable) or isinstance(inputs, Mapping | Set) or is_scalar:
        raise InvalidInputError(f"must be a list of inputs; was {type(inputs).__name__}", field=name)
    if isinstance(inputs, np.ndarray) and inputs.ndim == 2 and inputs.dtype.kind == "f":
        raise InvalidInputError("must be a list of inputs; for one sequence of vectors pass [array]", field=name)


def check_spans(spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the starts and the ends of ranges.

    Raises:
        InvalidInputError: A range is not a pair of integers from 0 to 2**32 - 1.
    """
    if not isinstance(spans, Iterable):
        raise InvalidInputError(f"must be a list of (start, end); was {type(spans).__name__}", field="spans")
    starts: list[int] = []
    ends: list[int] = []
    for index, span in enumerate(spans):
        if isinstance(span, str) or not isinstance(span, Sequence | np.ndarray) or len(span) != 2:
            raise InvalidInputError(f"must be (start, end); was {span!r}", field=f"spans[{index}]")
        for numbers, value in ((starts, span[0]), (ends, span[1])):
            numbers.append(as_int(f"spans[{index}]", value))
            if not 0 <= numbers[-1] < 2**32:
                raise InvalidInputError(f"must be from 0 to {2**32 - 1}; was {numbers[-1]}", field=f"spans[{index}]")
    return starts, ends


def check_input(item: object, name: str) -> Input:
    """Check the type of an input, and return the input. `pack_input` checks ids and the values of vectors.

    Raises:
        InvalidInputError: The item is not a text, a sequence of ids, or an array of vectors.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, np.ndarray):
        _check_array(item, name)
    elif isinstance(item, int | np.integer):
        raise InvalidInputError("is a single id; for one sequence of ids pass [ids]", field=name)
    elif not isinstance(item, list | tuple):
        raise InvalidInputError(
            f"must be a text, a list, tuple or array of token ids, or an array of vectors; was {type(item).__name__}",
            field=name,
        )
    if len(item) == 0:
        raise InvalidInputError("must have at least one token id; was empty", field=name)
    return item


def pack_input(item: Input | SpanInput, name: str) -> pb.Input:
    """Return the message for one input that passed `check_input`.

    Raises:
        InvalidInputError: The text has half of a surrogate pair, or an id is not a 64-bit integer. Or a vector has NaN
            or infinity, after the conversion to the type on the wire.
    """
    if isinstance(item, str):
        return pb.Input(text=_check_unicode(item, name))
    if isinstance(item, SpanInput):
        packed = pack_input(item.input, "text")
        packed.spans.CopyFrom(pb.Spans(unit=UNITS[item.unit], starts=item.spans[0], ends=item.spans[1]))
        return packed
    if isinstance(item, np.ndarray) and item.ndim == 2:
        return pb.Input(embeddings=_pack_vectors(item, name))
    ids = item.tolist() if isinstance(item, np.ndarray) else item
    try:
        return pb.Input(token_ids=pb.TokenIds(ids=ids))
    except (TypeError, ValueError) as error:
        place, wrong = next((place, it) for place, it in enumerate(ids) if not _is_id(it))
        raise InvalidInputError(f"must be an integer of 64 bits; was {wrong!r}", field=f"{name}[{place}]") from error


def _check_unicode(text: str, name: str) -> str:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"must be valid Unicode; has half of a surrogate pair at character {error.start}", field=name
        ) from None
    return text


def _is_id(value: Any) -> bool:
    try:
        pb.TokenIds(ids=[value])
    except (TypeError, ValueError):
        return False
    return True


def _check_array(array: npt.NDArray[Any], name: str) -> None:
    is_ids = array.ndim == 1 and array.dtype.kind in "iu"
    is_vectors = array.ndim == 2 and array.dtype.name in _WIRE_TYPES
    if not is_ids and not is_vectors:
        raise InvalidInputError(
            f"must be a (seq,) array of integers or a (seq, d_model) array of float32, float16 or float64; "
            f"was {array.shape} of {array.dtype}",
            field=name,
        )
    if is_vectors and 0 in array.shape:
        raise InvalidInputError(f"must have at least one row and one column; was {array.shape}", field=name)


def _pack_vectors(array: npt.NDArray[Any], name: str) -> pb.TokenEmbeddings:
    """Return the message for the vectors of one sequence. A float64 is rounded to the nearest float32."""
    dtype, data_type = _WIRE_TYPES[array.dtype.name]
    with np.errstate(over="ignore"):  # the check below finds infinity
        vectors = np.asarray(array, dtype)  # (seq, d_model)
    finite = np.isfinite(vectors)
    if not finite.all():
        row, column = (int(index) for index in np.argwhere(~finite)[0])
        value = float(array[row, column])
        largest = np.finfo(np.float32).max
        rule = f"have a magnitude of at most {largest:g}, to fit into float32" if math.isfinite(value) else "be finite"
        raise InvalidInputError(f"must {rule}; was {value:g} in row {row}, column {column}", field=name)
    return pb.TokenEmbeddings(width=vectors.shape[1], data_type=data_type, data=vectors.tobytes())
