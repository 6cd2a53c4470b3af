"""Decodes requests of Inspect from protobuf, and encodes replies."""

from collections.abc import Iterator, Sequence

import numpy as np

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import InvalidField
from encserve_server.models.served import InspectCall, InspectReply, ServedModel
from encserve_server.protocols.encserve.codec import (
    decode_float_type,
    decode_input,
    decode_task,
    decode_truncation,
    fill_counts,
    fill_tokens,
)
from encserve_server.types.bundles import Bundle
from encserve_server.types.inspections import InspectKind, InspectTensor
from encserve_server.types.requests import DataType

# Larger chunks would delay other calls. Smaller chunks would need too many messages.
_CHUNK_BYTES = 256 * 1024


def decode_inspect_call(request: pb.InspectRequest, model: ServedModel) -> InspectCall:
    """Decode a request of Inspect, and fill in the defaults.

    Raises:
        InspectUnavailable: The model cannot be inspected.
        InvalidField: The input is missing or has spans, or an enum has an unknown value. Or a kind or layer is
            requested twice, or the model does not have this kind or layer.
    """
    model.check_inspectable()
    if request.input.HasField("spans"):
        raise InvalidField("input.spans", "is only for Encode")
    return InspectCall(
        input=decode_input("input", request.input, model.bundle.max_sequence_tokens),
        wanted=_decode_specs(request.tensors, model.bundle),
        data_type=decode_float_type("data_type", request.data_type),
        truncate=decode_truncation("truncation", request.truncation),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        task=decode_task("task", request.task),
    )


def encode_inspect_header(model: ServedModel, call: InspectCall, reply: InspectReply) -> pb.InspectResponse:
    """Return the first message of a reply."""
    bundle, inspection = model.bundle, reply.inspection
    header = pb.InspectHeader(
        model=bundle.name,
        model_version=bundle.version,
        fingerprint=bundle.fingerprint,
        space_id=bundle.space_id,
        timings=pb.Timings(
            tokenize_seconds=reply.tokenize_seconds,
            queue_seconds=inspection.queue_seconds,
            compute_seconds=inspection.compute_seconds,
        ),
    )
    fill_counts(header.sequence, reply.sequence)
    fill_tokens(header.sequence, reply.sequence, model, with_strings=True)
    if reply.sequence.char_starts is None:
        header.sequence.token_ids.extend(reply.sequence.token_ids or ())
    for tensor in inspection.tensors:
        header.tensors.add(
            kind=pb.InspectKind.Name(tensor.kind.value),
            layers=tensor.layers,
            shape=tensor.shape,
            data_type=pb.DataType.Name(call.data_type.value),
        )
    return pb.InspectResponse(header=header)


def encode_chunks(tensors: Sequence[InspectTensor], data_type: DataType) -> Iterator[pb.InspectResponse]:
    """Yield the messages after the header: the bytes of the tensors, one tensor after another."""
    for i, tensor in enumerate(tensors):
        for part in tensor.parts:
            with np.errstate(over="ignore"):
                numbers = np.ascontiguousarray(part.astype(data_type.dtype, copy=False))
            data = numbers.data.cast("B")
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = pb.TensorChunk(tensor=i, data=bytes(data[start : start + _CHUNK_BYTES]))
                yield pb.InspectResponse(chunk=chunk)


def _decode_specs(specs: Sequence[pb.InspectSpec], bundle: Bundle) -> list[tuple[InspectKind, tuple[int, ...]]]:
    if not specs:
        default = (pb.INSPECT_KIND_ATTENTION_WEIGHTS, pb.INSPECT_KIND_HIDDEN_STATES)
        specs = [pb.InspectSpec(kind=kind) for kind in default]
    wanted: dict[InspectKind, tuple[int, ...]] = {}
    for i, spec in enumerate(specs):
        name = f"tensors[{i}]"
        if spec.kind not in pb.InspectKind.values() or not spec.kind:
            last = len(pb.InspectKind.values()) - 1
            raise InvalidField(f"{name}.kind", f"must be a value of InspectKind, 1 to {last}; was {spec.kind}")
        kind = InspectKind(spec.kind)
        if kind in wanted:
            raise InvalidField(name, f"requests the same kind as tensors[{list(wanted).index(kind)}]")
        wanted[kind] = _decode_layers(name, kind, spec.layers, bundle)
    return list(wanted.items())


def _decode_layers(name: str, kind: InspectKind, layers: Sequence[int], bundle: Bundle) -> tuple[int, ...]:
    if kind is InspectKind.POSITIONS:
        if bundle.position not in ("learned", "sinusoidal"):
            raise InvalidField(f"{name}.kind", f"model {bundle.name} adds no position vectors to tokens")
        if layers:
            raise InvalidField(f"{name}.layers", f"must be empty for positions; was {list(layers[:8])}")
        return ()
    count = bundle.n_layers + (kind is InspectKind.HIDDEN_STATES)
    for i, layer in enumerate(layers):
        if layer >= count:
            raise InvalidField(f"{name}.layers[{i}]", f"must be from 0 to {count - 1}; was {layer}")
        if i and layer <= layers[i - 1]:
            raise InvalidField(
                f"{name}.layers[{i}]", f"must be greater than {layers[i - 1]}, the layer before; was {layer}"
            )
    return tuple(layers) or tuple(range(count))
