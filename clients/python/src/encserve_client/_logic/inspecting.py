"""`inspect`: its request, checked, and its answer as it comes in: a header, then tensors in chunks. Pure."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from encserve_client._arguments import as_int
from encserve_client._logic.answers import sequence_info
from encserve_client.exceptions import InvalidInputError, ProtocolError
from encserve_client.inputs import Input, check_input, pack_input
from encserve_client.options import Array, DType, Layers, Options, Task, numpy_dtype
from encserve_client.results import InspectResult, SequenceInfo, Timings
from encserve_proto.v1 import encoder_pb2 as pb

_ATTENTION, _HIDDEN, _POSITIONS = (
    pb.INSPECT_KIND_ATTENTION_WEIGHTS,
    pb.INSPECT_KIND_HIDDEN_STATES,
    pb.INSPECT_KIND_POSITIONS,
)
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
    prompt_name: str | None,
    task: Task | None,
) -> pb.InspectRequest:
    """Makes the message of one `inspect` call; `key` is the model's name and version.

    Raises:
        InvalidInputError: `item` is not one input, nothing is asked for, or an argument is wrong.
    """
    options = Options(dtype=dtype, truncate=truncate, prompt_name=prompt_name, task=task)
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
        prompt_name=options.prompt_name,
        task=options.task_number,
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


class Gathering:
    """One inspection's answer as it comes in.

    Memory is taken for what has arrived, never for what a header announces, and no more is accepted than it announced.
    What is wrong with an answer ends the reading of it at once, and is said by `result`.
    """

    def __init__(self, request: pb.InspectRequest) -> None:
        self._request = request
        self._dtype = numpy_dtype(request.data_type)
        self._header: pb.InspectHeader | None = None
        self._sequence: SequenceInfo | None = None  # set with the header
        self._shapes: list[tuple[int, ...]] = []
        self._arrays: list[Array] = []  # of the tensors that are complete, which are the first ones
        self._pieces: list[bytes] = []  # of the one that is not
        self._n_bytes = 0  # in the pieces
        self._error: ProtocolError | None = None

    def add(self, part: pb.InspectResponse) -> bool:
        """Takes the next message of the answer. False if it is wrong, so that the rest need not be read."""
        if self._error is None:
            try:
                self._take(part)
            except ProtocolError as error:
                self._error = error
        return self._error is None

    def result(self, total_seconds: float, attempts: int) -> InspectResult:
        """The whole answer; `total_seconds` and `attempts` are the call's, see `Timings`.

        Raises:
            ProtocolError: It is not what the contract promises; the text has the numbers.
        """
        if self._error is not None:
            raise self._error
        header, sequence = self._header, self._sequence
        if header is None or sequence is None:
            raise ProtocolError("the answer to Inspect must begin with a header; it was empty")
        if (index := len(self._arrays)) < len(self._shapes):
            raise ProtocolError(f"{self._wanted(index)}; the answer ended after {self._n_bytes}")
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

    def _take(self, part: pb.InspectResponse) -> None:
        which = part.WhichOneof("part")
        if which is None:
            raise ProtocolError("a message of the answer to Inspect has neither a header nor a chunk")
        if which == "header":
            if self._header is not None:
                raise ProtocolError(f"the answer to Inspect has a second header, after {len(self._arrays)} tensors")
            _check_header(self._request, part.header)
            self._header, self._sequence = part.header, sequence_info(part.header.sequence)
            self._shapes = [tuple(tensor.shape) for tensor in part.header.tensors]
        elif self._header is None:
            raise ProtocolError("the answer to Inspect must begin with a header; began with a chunk")
        else:
            self._take_chunk(part.chunk.tensor, part.chunk.data)

    def _take_chunk(self, index: int, data: bytes) -> None:
        if index >= len(self._shapes):
            raise ProtocolError(f"a chunk's tensor must be from 0 to {len(self._shapes) - 1}; was {index}")
        current = len(self._arrays)
        if index > current:
            raise ProtocolError(
                f"{self._wanted(current)}; a chunk of tensors[{index}] came after {self._n_bytes} of them"
            )
        if index < current:
            if data:
                raise ProtocolError(f"{self._wanted(index)}; {len(data)} more came after them")
            return
        n_wanted = self._bytes_of(index)
        if self._n_bytes + len(data) > n_wanted:
            raise ProtocolError(f"{self._wanted(index)}; {self._n_bytes + len(data)} came")
        if data:
            self._pieces.append(data)
            self._n_bytes += len(data)
        if self._n_bytes == n_wanted:
            whole = bytearray().join(self._pieces)  # the caller may write to a bytearray
            self._arrays.append(np.frombuffer(whole, self._dtype).reshape(self._shapes[index]))
            self._pieces, self._n_bytes = [], 0

    def _bytes_of(self, index: int) -> int:
        return math.prod(self._shapes[index]) * self._dtype.itemsize

    def _wanted(self, index: int) -> str:
        shape, dtype = _shown(self._shapes[index]), self._dtype.name
        return f"tensors[{index}] must have {self._bytes_of(index)} bytes: {shape} of {dtype}"


def _check_header(request: pb.InspectRequest, header: pb.InspectHeader) -> None:
    """Compares what is announced with what was asked for, and its parts with each other."""
    n_tokens = header.sequence.token_count
    if n_tokens < 1:
        raise ProtocolError(f"sequence.token_count must be >= 1; was {n_tokens}")
    wanted = [spec.kind for spec in request.tensors]
    kinds = [tensor.kind for tensor in header.tensors]
    if kinds != wanted:
        raise ProtocolError(f"tensors must be of the kinds {_shown(wanted)}, as asked for; were {_shown(kinds)}")
    for index, (spec, tensor) in enumerate(zip(request.tensors, header.tensors, strict=True)):
        name = f"tensors[{index}]"
        if tensor.data_type != request.data_type:
            raise ProtocolError(f"{name}.data_type must be {request.data_type}; was {tensor.data_type}")
        _check_layers(spec, tensor, name)
        _check_shape(tensor, n_tokens, name)
    _check_together(request, header)


def _check_layers(spec: pb.InspectSpec, tensor: pb.InspectTensor, name: str) -> None:
    got = list(tensor.layers)
    wanted = list(spec.layers)
    if not wanted and spec.kind != _POSITIONS:
        wanted = list(range(max(len(got), 1)))  # all of them, however many the model has
    if got != wanted:
        raise ProtocolError(f"{name}.layers must be {_shown(wanted)}; were {_shown(got)}")


def _check_shape(tensor: pb.InspectTensor, n_tokens: int, name: str) -> None:
    """Compares a shape with what the other fields say of it; 0 stands for an axis of which they say nothing."""
    n_layers = len(tensor.layers)
    if tensor.kind == _ATTENTION:
        wanted: tuple[int, ...] = (n_layers, 0, n_tokens, n_tokens)  # (layers, n_heads, seq, seq)
    elif tensor.kind == _HIDDEN:
        wanted = (n_layers, n_tokens, 0)  # (layers, seq, d_model)
    else:
        wanted = (0, 0)  # (max_sequence_tokens, d_model)
    got = tuple(tensor.shape)
    if len(got) != len(wanted) or not all(
        axis == want if want else axis >= 1 for axis, want in zip(got, wanted, strict=True)
    ):
        axes = ", ".join(str(want) if want else ">= 1" for want in wanted)
        raise ProtocolError(f"{name}.shape must be ({axes}); was {_shown(got)}")


def _check_together(request: pb.InspectRequest, header: pb.InspectHeader) -> None:
    """Compares what two tensors say of the same model."""
    asked = {spec.kind: spec for spec in request.tensors}
    found = {tensor.kind: tensor for tensor in header.tensors}
    if _ATTENTION in found and _HIDDEN in found and not asked[_ATTENTION].layers and not asked[_HIDDEN].layers:
        blocks, depths = len(found[_ATTENTION].layers), len(found[_HIDDEN].layers)
        if depths != blocks + 1:
            raise ProtocolError(
                f"{blocks} layers of attention must go with {blocks + 1} of hidden states; had {depths}"
            )
    if _HIDDEN in found and _POSITIONS in found:
        hidden_width, positions_width = found[_HIDDEN].shape[-1], found[_POSITIONS].shape[-1]
        if hidden_width != positions_width:
            raise ProtocolError(
                f"hidden states and positions must be as wide; were {hidden_width} and {positions_width}"
            )


def _shown(numbers: Iterable[int]) -> str:
    """The first numbers of a list, so that a text stays one whatever a server sends."""
    items: Sequence[int] = list(numbers)
    return f"({', '.join(map(str, items[:16]))}{', …' if len(items) > 16 else ''})"
