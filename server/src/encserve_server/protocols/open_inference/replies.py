"""Builds the output tensors of a reply from the outputs of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encserve_server.errors import FieldPath, RequestField, ResponseTooLarge
from encserve_server.models.scoring import activate
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.protocols.open_inference.requests import InferCall, kinds_of
from encserve_server.protocols.open_inference.tensors import OUTPUTS, TensorPart, datatype_of
from encserve_server.types.arrays import IndexedRows
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import OutputKind


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output tensor of a reply.

    Attributes:
        name: The name of the tensor.
        datatype: The protocol's name of the datatype.
        shape: The size of each dimension.
        parts: The bytes of the tensor, row-major and little-endian, in consecutive parts. Each part has complete rows.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    parts: Sequence[bytes | memoryview]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(map(len, self.parts))


def output_tensors(model: ServedModel, infer: InferCall, reply: EncodeReply) -> list[OutputTensor]:
    """Return the output tensors of a reply, in the order of the request.

    Raises:
        ResponseTooLarge: The tensors, padding included, are larger than the limit.
    """
    places = {kind: i for i, kind in enumerate(kinds_of(infer.outputs))}
    tensors = []
    for name in infer.outputs:
        kind, part = OUTPUTS[name]
        place = places[kind]
        made = [sequence.outputs[place] for sequence in reply.sequences]
        if kind is OutputKind.SCORES:
            made = _activated(model.bundle, made)
        shape, parts = _tensor(part, made, reply.plan.widths[place])
        datatype = datatype_of(part, reply.plan.outputs[place].data_type)
        tensors.append(OutputTensor(name, datatype, shape, parts))
    limit = model.limits.max_response_bytes
    if (size := sum(it.size for it in tensors)) > limit:
        raise ResponseTooLarge(
            FieldPath(RequestField.INPUTS),
            f"the padded reply would take {size} bytes, over the limit of {limit} (max_response_bytes). Send fewer "
            "sequences or sequences of similar length, or request only the output embedding",
        )
    return tensors


def _activated(bundle: Bundle, logits: Sequence[Any]) -> list[Any]:
    """Return the model's own scores, (1, labels) for each sequence, of the type of the logits."""
    assert bundle.scores is not None  # noqa: S101 - only such models have this output
    activation = bundle.scores.activation
    return [activate(row.astype(np.float32), activation).astype(row.dtype, copy=False) for row in logits]


def _tensor(part: TensorPart, made: Sequence[Any], width: int) -> tuple[list[int], list[bytes | memoryview]]:
    """Return the shape and the bytes of one output of all sequences."""
    rows = [it.rows if isinstance(it, IndexedRows) else it for it in made]  # (rows, width) each
    lengths = [len(it) for it in rows]
    if part is TensorPart.LENGTHS:
        return [len(rows)], [np.array(lengths, "<i8").tobytes()]
    if part is TensorPart.VECTOR:
        return [len(rows), width], [it.data.cast("B") for it in rows]
    most = max(lengths)
    shape = [len(rows), most, width] if part is TensorPart.ROWS else [len(rows), most]
    arrays = [it.indices for it in made] if part is TensorPart.INDICES else rows
    row_bytes = arrays[0].itemsize * (width if part is TensorPart.ROWS else 1)
    padding = memoryview(bytes((most - min(lengths)) * row_bytes))
    parts: list[bytes | memoryview] = []
    for array, length in zip(arrays, lengths, strict=True):
        parts += [array.data.cast("B")] if length else []
        parts.append(padding[: (most - length) * row_bytes])
    return shape, parts
