"""The caller's inputs, checked and made into protobuf messages."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from encserve_client._exceptions import InvalidInputError
from encserve_proto.v1 import encoder_pb2 as pb

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids of one sequence: a list or tuple of int, or a (seq,) array of any integer type."""

Input: TypeAlias = str | TokenIds
"""One sequence: a text that the server tokenizes, or token ids."""


def check_inputs(inputs: Iterable[Input]) -> list[Input]:
    """Reads all inputs, so that one of the wrong type is found before anything is sent.

    Raises:
        InvalidInputError: `inputs` is itself a text or a sequence of ids, or one of them is neither.
    """
    if isinstance(inputs, str):
        raise InvalidInputError("inputs must be a list of inputs; for one text pass [text]")
    if isinstance(inputs, Mapping | Set):  # a tokenizer's own result, say, would be encoded by its keys
        kind = type(inputs).__name__
        raise InvalidInputError(f"inputs must be a list of inputs, in an order of its own; was {kind}")
    if not isinstance(inputs, Iterable):
        raise InvalidInputError(f"inputs must be a list of inputs; was {type(inputs).__name__}")
    return [check_input(item, index) for index, item in enumerate(inputs)]


def check_input(item: object, index: int) -> Input:
    """Returns what can be one sequence; the ids themselves are checked when they are packed.

    Raises:
        InvalidInputError: The item is neither a text nor a sequence of ids.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, np.ndarray):
        if item.ndim != 1 or item.dtype.kind not in "iu":
            raise InvalidInputError(
                f"inputs[{index}] must be a (seq,) array of integers; was {item.shape} of {item.dtype}"
            )
    elif isinstance(item, int | np.integer):
        raise InvalidInputError(f"inputs[{index}] is a single id; for one sequence of ids pass [ids]")
    elif not isinstance(item, list | tuple):
        raise InvalidInputError(
            f"inputs[{index}] must be a text or a list, tuple or array of token ids; was {type(item).__name__}"
        )
    if len(item) == 0:
        raise InvalidInputError(f"inputs[{index}] must have at least one token id; was empty")
    return item


def pack_input(item: Input, index: int) -> pb.Input:
    """Makes the message for one input that passed `check_input`.

    Raises:
        InvalidInputError: The text is no Unicode (a lone surrogate), or an id is no integer of 64 bits.
    """
    try:
        if isinstance(item, str):
            return pb.Input(text=item)
        ids = item.tolist() if isinstance(item, np.ndarray) else item
        return pb.Input(token_ids=pb.TokenIds(ids=ids))
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidInputError(f"inputs[{index}] cannot be sent: {error}") from error
