"""`inspect`: the request, and the answer in parts (a header, then chunks of tensors). Without I/O."""

import math

import numpy as np

from encserve_client._arguments import as_int
from encserve_client._logic.answers import sequence_info
from encserve_client.exceptions import InvalidInputError, ProtocolError
from encserve_client.inputs import Input, check_input, pack_input
from encserve_client.options import Array, Layers, Options, numpy_dtype
from encserve_client.results import InspectResult, ModelInfo, Timings
from encserve_proto.v1 import encoder_pb2 as pb

_ATTENTION, _HIDDEN, _POSITIONS = (
    pb.INSPECT_KIND_ATTENTION_WEIGHTS,
    pb.INSPECT_KIND_HIDDEN_STATES,
    pb.INSPECT_KIND_POSITIONS,
)
_MAX_LAYER = 2**32 - 1  # the largest uint32; `layer_error` compares with the model


def inspect_request(
    item: Input,
    key: tuple[str, str],
    options: Options,
    *,
    attention: Layers,
    hidden_states: Layers,
    positions: bool,
) -> pb.InspectRequest:
    """Return the request of one `inspect` call. `key` is the model's name and version.

    Raises:
        InvalidInputError: `item` is not one input, the call asks for no tensor, or an argument is wrong.
    """
    tensors: list[pb.InspectSpec] = []
    for name, kind, selection in (
        ("attention", pb.INSPECT_KIND_ATTENTION_WEIGHTS, attention),
        ("hidden_states", pb.INSPECT_KIND_HIDDEN_STATES, hidden_states),
    ):
        layers = _layers(name, selection)
        if layers is not None:
            tensors.append(pb.InspectSpec(kind=kind, layers=layers))
    if not isinstance(positions, bool):
        raise InvalidInputError(f"must be True or False; was {type(positions).__name__}", field="positions")
    if positions:
        tensors.append(pb.InspectSpec(kind=pb.INSPECT_KIND_POSITIONS))
    if not tensors:
        raise InvalidInputError("give at least one of attention, hidden_states and positions; all were False")
    return pb.InspectRequest(
        model=key[0],
        model_version=key[1],
        input=_pack_one(item),
        truncation=options.truncation,
        tensors=tensors,
        data_type=options.data_type,
        prompt_name=options.prompt_name,
        task=options.task_number,
    )


def _pack_one(item: Input) -> pb.Input:
    if isinstance(item, list | tuple) and item and not isinstance(item[0], int | np.integer | float):
        count = "1 input" if len(item) == 1 else f"{len(item)} inputs"
        raise InvalidInputError(
            f"must be one input; was a {type(item).__name__} of {count}: call inspect once for each. "
            "Vectors must be an array",
            field="input",
        )
    return pack_input(check_input(item, "input"), "input")


def layer_error(request: pb.InspectRequest | None, info: ModelInfo) -> InvalidInputError | None:
    """Return the error if the request has a layer that the model does not have, or None."""
    for tensor in () if request is None else request.tensors:
        name, most = "attention", info.n_layers - 1
        if tensor.kind == pb.INSPECT_KIND_HIDDEN_STATES:
            name, most = "hidden_states", info.n_layers
        if info.n_layers and tensor.layers and tensor.layers[-1] > most:
            return InvalidInputError(f"must be from 0 to {most}; was {tensor.layers[-1]}", field=name)
    return None


def _layers(name: str, selection: Layers) -> list[int] | None:
    """Return the layers for the request: an empty list for all layers, None for no layers."""
    if isinstance(selection, bool):
        return [] if selection else None
    if isinstance(selection, int | np.integer):
        raise InvalidInputError(
            f"must be True, False or a list of layers; for one layer pass [{selection}]", field=name
        )
    if not isinstance(selection, list | tuple | range | np.ndarray):
        raise InvalidInputError(f"must be True, False or a list of layers; was {type(selection).__name__}", field=name)
    if len(selection) == 0:
        raise InvalidInputError("must name at least one layer; was empty: pass False for no layers", field=name)
    layers = [as_int(f"{name}[{index}]", layer) for index, layer in enumerate(selection)]
    for index, layer in enumerate(layers):
        if not 0 <= layer <= _MAX_LAYER:
            raise InvalidInputError(f"must be from 0 to {_MAX_LAYER}; was {layer}", field=f"{name}[{index}]")
        if index and layer <= layers[index - 1]:
            raise InvalidInputError(
                f"must be ascending, each layer once; {name}[{index}] was {layer} after {layers[index - 1]}",
                field=name,
            )
    return layers


class InspectAssembler:
    """Assembles the answer to one Inspect request from its parts.

    Memory is allocated only for data that has arrived. Reading stops if the answer has more data than
    the header announces.
    """

    def __init__(self, request: pb.InspectRequest) -> None:
        self._dtype = numpy_dtype(request.data_type)
        self._kinds = [tensor.kind for tensor in request.tensors]
        self._header = pb.InspectHeader()
        self._data: list[bytearray] = []  # one for each tensor; arrays over a bytearray are writable
        self._error: ProtocolError | None = None

    def add(self, part: pb.InspectResponse) -> bool:
        """Add the next message of the answer. Return False after an error, so that the caller stops reading."""
        index = part.chunk.tensor
        if part.HasField("header"):
            self._header = part.header
            self._data = [bytearray() for _ in part.header.tensors]
        elif index >= len(self._data):
            self._error = ProtocolError(f"a chunk's tensor must be one of the {len(self._data)} announced; was {index}")
        else:
            self._data[index] += part.chunk.data
            if len(self._data[index]) > self._bytes_of(index):
                self._error = self._size_error(index)
        return self._error is None

    def result(self, total_seconds: float, attempts: int) -> InspectResult:
        """Return the result. See `Timings` for `total_seconds` and `attempts`.

        Raises:
            ProtocolError: The answer has more or fewer bytes than its header announces, or not the tensors of the
                request. The error message has the numbers.
        """
        header, seconds = self._header, self._header.timings
        for index, data in enumerate(self._data):
            if self._error is None and len(data) != self._bytes_of(index):
                self._error = self._size_error(index)
        if self._error is not None:
            raise self._error
        if not self._data:
            raise ProtocolError("the answer to Inspect must have a header with tensors; had none")
        if (kinds := [tensor.kind for tensor in header.tensors]) != self._kinds:
            raise ProtocolError(f"the answer's tensors must be of the kinds {self._kinds}; were {kinds}")
        layers = {tensor.kind: tuple(tensor.layers) for tensor in header.tensors}
        arrays = {tensor.kind: self._array(index) for index, tensor in enumerate(header.tensors)}
        return InspectResult(
            model=header.model,
            version=header.model_version,
            fingerprint=header.fingerprint,
            space_id=header.space_id,
            sequence=sequence_info(header.sequence),
            attention=arrays.get(_ATTENTION),
            attention_layers=layers.get(_ATTENTION, ()),
            hidden_states=arrays.get(_HIDDEN),
            hidden_state_layers=layers.get(_HIDDEN, ()),
            positions=arrays.get(_POSITIONS),
            timings=Timings(
                seconds.tokenize_seconds, seconds.queue_seconds, seconds.compute_seconds, total_seconds, 1, attempts
            ),
        )

    def _array(self, index: int) -> Array:
        shape = tuple(self._header.tensors[index].shape)
        try:
            return np.frombuffer(self._data[index], self._dtype).reshape(shape)
        except ValueError as error:
            raise ProtocolError(f"tensors[{index}] must have a shape that NumPy supports; was {shape}") from error

    def _bytes_of(self, index: int) -> int:
        return math.prod(self._header.tensors[index].shape) * self._dtype.itemsize

    def _size_error(self, index: int) -> ProtocolError:
        shape = tuple(self._header.tensors[index].shape)
        return ProtocolError(
            f"tensors[{index}] must have {self._bytes_of(index)} bytes: {shape} of {self._dtype.name}; "
            f"had {len(self._data[index])}"
        )
