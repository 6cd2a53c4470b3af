"""Aligns the weights of a model that ONNX Runtime saved.

ONNX Runtime writes tensors and prepacked weights without gaps. Kernels with AVX-512 need aligned prepacked weights: if
an address is not a multiple of 64, the process ends with SIGSEGV.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# The size of the widest register of an x86 or ARM CPU. ONNX Runtime's allocators have the same alignment.
ALIGNMENT_BYTES = 64

_PREPACKED = "prepacked_"
_Field = descriptor_pb2.FieldDescriptorProto
# The messages of onnx.proto on the path to external data. For each field: ONNX's field number, and the type of a
# message field. All other fields stay unchanged.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Model": {"graph": (7, "Graph")},
    "Graph": {"node": (1, "Node"), "initializer": (5, "Tensor")},
    "Node": {"attribute": (5, "Attribute")},
    "Attribute": {"g": (6, "Graph"), "graphs": (11, "Graph")},
    "Tensor": {"external_data": (13, "Entry")},
    "Entry": {"key": (1, ""), "value": (2, "")},
}
_SINGULAR = ("graph", "g", "key", "value")


def align_weights(model_path: Path) -> None:
    """Rewrite a saved model and its file of weights, so that all offsets are multiples of `ALIGNMENT_BYTES`.

    Args:
        model_path: The ONNX file. All its external weights are in one file in the same folder.

    Raises:
        OSError: A file cannot be read or written.
    """
    model = _model_type()()
    model.ParseFromString(model_path.read_bytes())
    tensors = [tensor for tensor in _tensors(model.graph) if tensor.external_data]
    if not tensors:
        return
    (name,) = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    data_path = model_path.with_name(name)
    aligned_path = model_path.with_name(f"{name}.aligned")
    with (
        data_path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        aligned_path.open("wb") as aligned,
    ):

        def move(offset: str, length: str) -> str:
            aligned.write(bytes(-aligned.tell() % ALIGNMENT_BYTES))
            moved = aligned.tell()
            aligned.write(data[int(offset) : int(offset) + int(length)])
            return str(moved)

        for tensor in tensors:
            entries = {entry.key: entry for entry in tensor.external_data}
            entries["offset"].value = move(entries["offset"].value, entries["length"].value)
            for key, entry in entries.items():
                if key.startswith(_PREPACKED):  # "KERNEL+KEY|OFFSET;LENGTH;HASH|OFFSET;LENGTH;HASH…"
                    kernel, *blocks = entry.value.split("|")
                    parts = [block.split(";") for block in blocks]
                    moved = [";".join((move(offset, length), length, *rest)) for offset, length, *rest in parts]
                    entry.value = "|".join((kernel, *moved))
    model_path.write_bytes(model.SerializeToString())
    aligned_path.replace(data_path)


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _tensors(inner)


def _model_type() -> Any:
    """Return the message class of an ONNX model, with the fields of `_MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(name="encserve/saved_model.proto", package="encserve.saved_model")
    for message, fields in _MESSAGES.items():
        descriptor = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            label = _Field.LABEL_OPTIONAL if name in _SINGULAR else _Field.LABEL_REPEATED
            if kind:
                descriptor.field.add(
                    name=name,
                    number=number,
                    label=label,
                    type=_Field.TYPE_MESSAGE,
                    type_name=f".{file.package}.{kind}",
                )
            else:
                descriptor.field.add(name=name, number=number, label=label, type=_Field.TYPE_STRING)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))
