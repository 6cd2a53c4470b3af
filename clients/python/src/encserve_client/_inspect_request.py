"""What `inspect` asks for, checked and made into a message. Pure."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from encserve_client._arguments import as_int
from encserve_client._exceptions import InvalidInputError
from encserve_client._inputs import Input, check_input, pack_input
from encserve_client._options import DType, Options
from encserve_proto.v1 import encoder_pb2 as pb

Layers: TypeAlias = bool | Sequence[int]
"""True for every layer, False for none, or the layers from 0 in ascending order."""

_MAX_LAYER = 2**32 - 1  # what the contract's uint32 holds; how many there are only the server knows


def inspect_request(
    item: Input,
    key: tuple[str, str],
    *,
    attention: Layers,
    hidden_states: Layers,
    positions: bool,
    dtype: DType,
    truncate: bool,
) -> pb.InspectRequest:
    """Makes the message of one `inspect` call; `key` is the model's name and version.

    Raises:
        InvalidInputError: `item` is not one input, nothing is asked for, or an argument is wrong.
    """
    options = Options(dtype=dtype, truncate=truncate)
    tensors: list[pb.InspectSpec] = []
    for name, kind, wanted in (
        ("attention", pb.INSPECT_KIND_ATTENTION_WEIGHTS, attention),
        ("hidden_states", pb.INSPECT_KIND_HIDDEN_STATES, hidden_states),
    ):
        layers = _layers(name, wanted)
        if layers is not None:
            tensors.append(pb.InspectSpec(kind=kind, layers=layers))
    if not isinstance(positions, bool):
        raise InvalidInputError(f"positions must be True or False; was {type(positions).__name__}")
    if positions:
        tensors.append(pb.InspectSpec(kind=pb.INSPECT_KIND_POSITIONS))
    if not tensors:
        raise InvalidInputError("at least one of attention, hidden_states and positions must be wanted; none was")
    return pb.InspectRequest(
        model=key[0],
        model_version=key[1],
        input=_pack_one(item),
        truncation=options.truncation,
        tensors=tensors,
        data_type=options.data_type,
    )


def _pack_one(item: Input) -> pb.Input:
    if isinstance(item, list | tuple) and item and not isinstance(item[0], int | np.integer | float):
        count = "1 input" if len(item) == 1 else f"{len(item)} inputs"
        raise InvalidInputError(
            f"input must be one input, not a list of them; was a {type(item).__name__} of {count}: "
            "call inspect once for each. Vectors must be an array"
        )
    return pack_input(check_input(item, "input"), "input")


def _layers(name: str, wanted: Layers) -> list[int] | None:
    """The layers as the contract writes them: none of them for all. None where they are not wanted."""
    if isinstance(wanted, bool):
        return [] if wanted else None
    if isinstance(wanted, int | np.integer):
        raise InvalidInputError(f"{name} must be True, False or a list of layers; for one layer pass [{wanted}]")
    if not isinstance(wanted, list | tuple | range | np.ndarray):
        raise InvalidInputError(f"{name} must be True, False or a list of layers; was {type(wanted).__name__}")
    if len(wanted) == 0:
        raise InvalidInputError(f"{name} must name at least one layer; was empty: pass False to leave it out")
    layers = [as_int(f"{name}[{index}]", layer) for index, layer in enumerate(wanted)]
    for index, layer in enumerate(layers):
        if not 0 <= layer <= _MAX_LAYER:
            raise InvalidInputError(f"{name}[{index}] must be from 0 to {_MAX_LAYER}; was {layer}")
        if index and layer <= layers[index - 1]:
            raise InvalidInputError(
                f"{name} must be ascending, each layer once; {name}[{index}] was {layer} after {layers[index - 1]}"
            )
    return layers
