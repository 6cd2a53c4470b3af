"""`inspect`: the request, and the answer in parts (a header, then chunks of tensors). Without I/O."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from encserve_client._arguments import as_int
from encserve_client._logic.answers import sequence_info
from encserve_client.exceptions import InvalidInputError, ProtocolError
from encserve_client.inputs import Input, check_input, pack_input
from encserve_client.options import Array, Layers, Options, numpy_dtype
from encserve_client.results import InspectResult, ModelInfo, SequenceInfo, Timings
from encserve_proto.v1 import encoder_pb2 as pb

_ATTENTION, _HIDDEN, _POSITIONS = (
    pb.INSPECT_KIND_ATTENTION_WEIGHTS,
    pb.INSPECT_KIND_HIDDEN_STATES,
    pb.INSPECT_KIND_POSITIONS,
)
_MAX_LAYER = 2**32 - 1  # the largest uint32 of the contract; `check_layers` compares with the model


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


def check_layers(request: pb.InspectRequest, info: ModelInfo) -> None:
    """Raise InvalidInputError if the request has a layer that the model does not have."""
    for tensor in request.tensors:
        name, most = "attention", info.n_layers - 1
        if tensor.kind == pb.INSPECT_KIND_HIDDEN_STATES:
            name, most = "hidden_states", info.n_layers
        if info.n_layers and tensor.layers and tensor.layers[-1] > most:
            raise InvalidInputError(f"must be from 0 to {most}; was {tensor.layers[-1]}", field=name)


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
        raise InvalidInputError("must name at least one layer; was empty: pass False to leave it out", field=name)
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

    Memory is allocated only for data that has arrived. More data than the header announces is an error. The first error
    ends the reading, and `result` raises the error.
    """

    def __init__(self, request: pb.InspectRequest) -> None:
        self._request = request
        self._dtype = numpy_dtype(request.data_type)
        self._header: pb.InspectHeader | None = None
        self._sequence: SequenceInfo | None = None  # set with the header
        self._shapes: list[tuple[int, ...]] = []
        self._arrays: list[Array] = []  # the complete tensors
        self._pieces: list[bytes] = []  # of the next tensor
        self._n_bytes = 0  # in the pieces
        self._error: ProtocolError | None = None

    def add(self, part: pb.InspectResponse) -> bool:
        """Add the next message of the answer. Return False after an error, so that the caller stops reading."""
        if self._error is None:
            try:
                self._add(part)
            except ProtocolError as error:
                self._error = error
        return self._error is None

    def result(self, total_seconds: float, attempts: int) -> InspectResult:
        """Return the result. See `Timings` for `total_seconds` and `attempts`.

        Raises:
            ProtocolError: The answer breaks the contract. The text has the numbers.
        """
        if self._error is not None:
            raise self._error
        header, sequence = self._header, self._sequence
        if header is None or sequence is None:
            raise ProtocolError("the answer to Inspect must begin with a header; was empty")
        if (index := len(self._arrays)) < len(self._shapes):
            raise ProtocolError(f"{self._size_rule(index)}; the answer ended after {self._n_bytes}")
        found = {tensor.kind: index for index, tensor in enumerate(header.tensors)}
        layers = {tensor.kind: tuple(tensor.layers) for tensor in header.tensors}
        seconds = header.timings
        return InspectResult(
            model=header.model,
            version=header.model_version,
            fingerprint=header.fingerprint,
            space_id=header.space_id,
            sequence=sequence,
            attention=self._arrays[found[_ATTENTION]] if _ATTENTION in found else None,
            attention_layers=layers.get(_ATTENTION, ()),
            hidden_states=self._arrays[found[_HIDDEN]] if _HIDDEN in found else None,
            hidden_state_layers=layers.get(_HIDDEN, ()),
            positions=self._arrays[found[_POSITIONS]] if _POSITIONS in found else None,
            timings=Timings(
                seconds.tokenize_seconds, seconds.queue_seconds, seconds.compute_seconds, total_seconds, 1, attempts
            ),
        )

    def _add(self, part: pb.InspectResponse) -> None:
        which = part.WhichOneof("part")
        if which is None:
            raise ProtocolError("each message of the answer to Inspect must have a header or a chunk; had neither")
        if which == "header":
            if self._header is not None:
                count = len(self._arrays)
                raise ProtocolError(f"the answer to Inspect must have one header; another came after {count} tensors")
            _check_header(self._request, part.header)
            self._header, self._sequence = part.header, sequence_info(part.header.sequence)
            self._shapes = [tuple(tensor.shape) for tensor in part.header.tensors]
        elif self._header is None:
            raise ProtocolError("the answer to Inspect must begin with a header; began with a chunk")
        else:
            self._add_chunk(part.chunk.tensor, part.chunk.data)

    def _add_chunk(self, index: int, data: bytes) -> None:
        if index >= len(self._shapes):
            raise ProtocolError(f"a chunk's tensor must be from 0 to {len(self._shapes) - 1}; was {index}")
        current = len(self._arrays)
        if index > current:
            raise ProtocolError(
                f"{self._size_rule(current)}; a chunk of tensors[{index}] came after {self._n_bytes} bytes"
            )
        if index < current:
            if data:
                raise ProtocolError(f"{self._size_rule(index)}; {len(data)} more bytes came")
            return
        n_expected = self._bytes_of(index)
        if self._n_bytes + len(data) > n_expected:
            raise ProtocolError(f"{self._size_rule(index)}; {self._n_bytes + len(data)} came")
        if data:
            self._pieces.append(data)
            self._n_bytes += len(data)
        if self._n_bytes == n_expected:
            whole = bytearray().join(self._pieces)  # the caller may write to a bytearray
            self._arrays.append(np.frombuffer(whole, self._dtype).reshape(self._shapes[index]))
            self._pieces, self._n_bytes = [], 0

    def _bytes_of(self, index: int) -> int:
        return math.prod(self._shapes[index]) * self._dtype.itemsize

    def _size_rule(self, index: int) -> str:
        shape, dtype = _format(self._shapes[index]), self._dtype.name
        return f"tensors[{index}] must have {self._bytes_of(index)} bytes: {shape} of {dtype}"


def _check_header(request: pb.InspectRequest, header: pb.InspectHeader) -> None:
    """Raise ProtocolError if the header does not fit the request."""
    n_tokens = header.sequence.token_count
    if n_tokens < 1:
        raise ProtocolError(f"sequence.token_count must be >= 1; was {n_tokens}")
    expected = [spec.kind for spec in request.tensors]
    kinds = [tensor.kind for tensor in header.tensors]
    if kinds != expected:
        raise ProtocolError(f"the kinds of tensors must be {_format(expected)}; were {_format(kinds)}")
    for index, (spec, tensor) in enumerate(zip(request.tensors, header.tensors, strict=True)):
        name = f"tensors[{index}]"
        if tensor.data_type != request.data_type:
            raise ProtocolError(f"{name}.data_type must be {request.data_type}; was {tensor.data_type}")
        _check_layers(spec, tensor, name)
        _check_shape(tensor, n_tokens, name)
    _check_consistency(request, header)


def _check_layers(spec: pb.InspectSpec, tensor: pb.InspectTensor, name: str) -> None:
    layers = list(tensor.layers)
    expected = list(spec.layers)
    if not expected and spec.kind != _POSITIONS:
        expected = list(range(max(len(layers), 1)))  # all layers of the model, at least one
    if layers != expected:
        raise ProtocolError(f"{name}.layers must be {_format(expected)}; were {_format(layers)}")


def _check_shape(tensor: pb.InspectTensor, n_tokens: int, name: str) -> None:
    n_layers = len(tensor.layers)
    # The expected length of each axis; 0 for any length.
    if tensor.kind == _ATTENTION:
        expected: tuple[int, ...] = (n_layers, 0, n_tokens, n_tokens)  # (layers, n_heads, seq, seq)
    elif tensor.kind == _HIDDEN:
        expected = (n_layers, n_tokens, 0)  # (layers, seq, d_model)
    else:
        expected = (0, 0)  # (max_sequence_tokens, d_model)
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or not all(
        length == rule if rule else length >= 1 for length, rule in zip(shape, expected, strict=True)
    ):
        axes = ", ".join(str(rule) if rule else ">= 1" for rule in expected)
        raise ProtocolError(f"{name}.shape must be ({axes}); was {_format(shape)}")


def _check_consistency(request: pb.InspectRequest, header: pb.InspectHeader) -> None:
    """Raise ProtocolError if two tensors contradict each other about the sizes of the model."""
    specs = {spec.kind: spec for spec in request.tensors}
    found = {tensor.kind: tensor for tensor in header.tensors}
    if _ATTENTION in found and _HIDDEN in found and not specs[_ATTENTION].layers and not specs[_HIDDEN].layers:
        blocks, depths = len(found[_ATTENTION].layers), len(found[_HIDDEN].layers)
        if depths != blocks + 1:
            raise ProtocolError(f"{blocks} layers of attention need {blocks + 1} layers of hidden states; had {depths}")
    if _HIDDEN in found and _POSITIONS in found:
        hidden_width, positions_width = found[_HIDDEN].shape[-1], found[_POSITIONS].shape[-1]
        if hidden_width != positions_width:
            raise ProtocolError(
                f"hidden states and positions must have the same width; were {hidden_width} and {positions_width}"
            )


def _format(numbers: Iterable[int]) -> str:
    """Return the first numbers of a list as text, because a server may send any number of numbers."""
    items: Sequence[int] = list(numbers)
    return f"({', '.join(map(str, items[:16]))}{', …' if len(items) > 16 else ''})"
