"""Counts the parameters of a bundle by layer and part, from the graph itself."""

import dataclasses
import math
import re

import onnx

from encserve_export.bundle.read import ReadBundle
from encserve_export.onnx_graph.int8 import SCALE

_BLOCK = re.compile(r"/blocks\.([0-9]+)/")
# The operators that hold weights; all else among the constants are shapes, axes and scales.
_OPERATORS = frozenset({"Gemm", "MatMul", "MatMulIntegerToFloat", "LayerNormalization", "Gather", "Add", "Slice"})
_TYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8})


@dataclasses.dataclass(frozen=True)
class LayerParameters:
    """How many numbers one layer has.

    Attributes:
        name: "embeddings", "layer 0" and so on, or "final norm".
        counts: The numbers by part.
    """

    name: str
    counts: dict[str, int]

    @property
    def total(self) -> int:
        """The numbers of all parts."""
        return sum(self.counts.values())


def count_by_layer(bundle: ReadBundle) -> list[LayerParameters]:
    """Counts by where a weight is used: weights that are equal are kept once, but each use is one of the model's.

    Only for a bundle that was exported from PyTorch, whose nodes are named after the encoder's parts.
    """
    model = onnx.load(bundle.path / bundle.manifest.graph.file, load_external_data=False)
    sizes = {
        tensor.name: math.prod(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.data_type in _TYPES and tensor.dims and not tensor.name.endswith(SCALE)
    }
    layers: dict[str, dict[str, int]] = {}
    for node in model.graph.node:
        if node.op_type == "Identity":  # a weight that is equal to another goes by a name of its own
            sizes[node.output[0]] = sizes.get(node.input[0], 0)
        count = sum(sizes.get(name, 0) for name in node.input)
        if not count or node.op_type not in _OPERATORS:
            continue
        # The table of sinusoids is computed, not learned.
        if node.op_type == "Slice" and bundle.manifest.encoder.position != "learned":
            continue
        counts = layers.setdefault(_layer(node.name), {})
        part = _part(node.name)
        counts[part] = counts.get(part, 0) + count
    return [LayerParameters(name, counts) for name, counts in layers.items()]


def _layer(node_name: str) -> str:
    if found := _BLOCK.match(node_name):
        return f"layer {found[1]}"
    return "embeddings" if node_name.startswith("/embeddings/") else "final norm"


def _part(node_name: str) -> str:
    """The part of a node, e.g. "/blocks.0/attention_norm/LayerNormalization" -> "norm"."""
    modules = node_name.split("/")[1:-1]
    if modules[-1].endswith("norm"):
        return "norm"
    return "embedding" if modules[0] == "embeddings" else modules[1]
