"""Makes a graph that is not our own encoder's compute in float16 or 8 bits.

Linear layers and the table of tokens are found by what they are in ONNX: a product with a matrix of weights, a lookup
in a table. They are rounded as in `int8`, and what they take is seen in ONNX Runtime.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, external_data_helper, helper, numpy_helper

from encserve_export.ground.errors import UnsupportedModelError
from encserve_export.ground.precision import Precision
from encserve_export.onnx_graph import int8
from encserve_export.onnx_graph.foreign import DEFAULT_DOMAINS, Interface, opset, vector_width

from encserve_export.ground.runtime import open_session  # isort: skip

from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16  # isort: skip

# The first in which ReduceMax takes its axes as an input, as `int8` writes it.
_LEAST_OPSET = 18
_CALIBRATION_BATCH = (16, 64)  # sequences, tokens
# A matrix with fewer numbers is left as it is.
_LEAST_WEIGHTS = 1024
# Sums of squares and angles of positions leave the range and the steps of float16.
_KEPT = ("Cos", "Sin", "Pow", "ReduceMean", "ReduceSum", "ReduceL2", "Sqrt", "Reciprocal", "Range", "Softmax", "Log")


def convert(path: Path, interface: Interface, vocab_size: int, longest: int, precision: Precision) -> onnx.ModelProto:
    """The same model in another precision, with its weights in it.

    Args:
        path: Its file, in float32; a file beside it is written for a while.
        interface: Its inputs and output.
        vocab_size: One more than the largest id; 0 where it takes vectors.
        longest: The longest sequence, in tokens.
        precision: "float16" or "int8".

    Raises:
        UnsupportedModelError: It cannot be; the text says why.
    """
    model: onnx.ModelProto = onnx.load(path, load_external_data=False)
    if opset(model) < _LEAST_OPSET:
        raise UnsupportedModelError(
            f"{precision} needs a graph of opset {_LEAST_OPSET} or newer; was {opset(model)}. Export it again with a "
            "newer one, or in float32"
        )
    if precision == "float16":
        return _halved(model, path.parent)
    return _quantized(model, interface, vocab_size, longest, path.parent)


def _halved(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    # Before the weights are in it: shapes are inferred on a copy.
    model = onnx.shape_inference.infer_shapes(model)
    external_data_helper.load_external_data_for_model(model, str(folder))
    made_by = {name: node for node in model.graph.node for name in node.output}
    # What angles are made of has to be as exact as they are.
    kept: set[str] = set()
    open_nodes = [node for node in model.graph.node if node.op_type in ("Cos", "Sin")]
    while open_nodes:
        node = open_nodes.pop()
        if node.name not in kept:
            kept.add(node.name)
            open_nodes += [made_by[name] for name in node.input if name in made_by]
    halved: onnx.ModelProto = convert_float_to_float16(
        model,
        keep_io_types=True,
        disable_shape_infer=True,
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, *_KEPT],
        node_block_list=sorted(kept),
    )
    # It casts a value once for each node that is kept and takes it, always to the same name.
    first = {tuple(node.output): node for node in reversed(halved.graph.node)}
    del halved.graph.node[:]
    halved.graph.node.extend(reversed(first.values()))
    return halved


def _quantized(
    model: onnx.ModelProto, interface: Interface, vocab_size: int, longest: int, folder: Path
) -> onnx.ModelProto:
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    linear = [node for node in model.graph.node if _is_linear(node, weights)]
    if not linear:
        raise UnsupportedModelError(
            f"no product in the graph has weights of {_LEAST_WEIGHTS} numbers or more, so int8 would bring nothing; "
            "export it in float32"
        )
    seen = _seen(model, interface, vocab_size, longest, {node.input[0] for node in linear}, folder)
    external_data_helper.load_external_data_for_model(model, str(folder))
    layers = {}
    for node in linear:
        x = seen[node.input[0]]
        weight = numpy_helper.to_array(weights[node.input[1]])  # (k, n), of Gemm perhaps (n, k)
        if not _is_transposed(node):
            weight = weight.T  # (n, k)
        layers[node.output[0]] = int8.plan_layer(weight, x.reshape(-1, x.shape[-1]), smooth=True)
    del seen
    table = next((name for name, tensor in weights.items() if list(tensor.dims)[:1] == [vocab_size]), "")
    quantizer = _AnyQuantizer(model, layers, table)
    int8.replace_nodes(model, [made for node in list(model.graph.node) for made in quantizer.replace(node)])
    return model


class _AnyQuantizer(int8.Quantizer):
    """Replaces products whose x is (…, k); layers go by the name of what they give."""

    def __init__(self, model: onnx.ModelProto, layers: dict[str, int8.Layer], table: str) -> None:
        super().__init__(model, layers)
        self._table = table

    def replace(self, node: NodeProto) -> Iterable[NodeProto]:
        """The nodes in place of one."""
        layer = self._layers.get(node.output[0])
        if layer is not None and layer.error <= int8.MAX_ERROR:
            return self._product(node, layer)
        if node.op_type == "Gather" and node.input[0] == self._table:
            return self.lookup(node, f"/quantized/{node.output[0]}")
        return [node]

    def _product(self, node: NodeProto, layer: int8.Layer) -> Iterable[NodeProto]:
        scope = f"/quantized/{node.output[0]}"
        n, k = layer.weight.shape
        flat, all_but_last = self._constant(f"quantized.flat_{k}", np.array([-1, k])), {"start": 0, "end": -1}
        yield self._node("Reshape", scope, [node.input[0], flat], "x")  # (tokens, k)
        inside = helper.make_node(node.op_type, [f"{scope}/x", *node.input[1:]], [f"{scope}/y"])
        yield from self.linear(inside, scope, layer)  # (tokens, n)
        yield self._node("Shape", scope, [node.input[0]], "leading", **all_but_last)
        width = self._constant(f"quantized.width_{n}", np.array([n]))
        yield self._node("Concat", scope, [f"{scope}/leading", width], "shape", axis=0)
        yield helper.make_node("Reshape", [f"{scope}/y", f"{scope}/shape"], list(node.output), f"{scope}/Reshape")


def _seen(
    model: onnx.ModelProto, interface: Interface, vocab_size: int, longest: int, names: Iterable[str], folder: Path
) -> dict[str, Any]:
    """What values of a graph are for random ids or vectors, always the same."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    listed = sorted(set(names))
    there = {value.name for value in watched.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in listed if name not in there)
    shape = (_CALIBRATION_BATCH[0], min(_CALIBRATION_BATCH[1], longest))
    random, width = np.random.default_rng(0), vector_width(model, interface)
    mask = np.ones(shape, np.int64)  # (batch, seq)
    inputs: Any = random.integers(0, vocab_size, shape) if not width else random.standard_normal((*shape, width), "f4")
    feeds = {interface.input_ids: inputs, interface.attention_mask: mask}
    if interface.token_type_ids:
        feeds[interface.token_type_ids] = np.zeros_like(mask)
    path = folder / "watched.onnx"  # beside the weights that both have
    onnx.save_model(watched, path)
    session = open_session(path)
    path.unlink()
    return dict(zip(listed, session.run(listed, feeds), strict=True))


def _is_linear(node: NodeProto, weights: dict[str, TensorProto]) -> bool:
    if node.domain not in DEFAULT_DOMAINS or node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights:
        return False
    if any(name and name not in weights for name in node.input[2:]):  # a bias that is computed
        return False
    dims = weights[node.input[1]].dims
    plain = all(its.f == 1 for its in node.attribute if its.name in ("alpha", "beta")) and not any(
        its.i for its in node.attribute if its.name == "transA"
    )
    return len(dims) == 2 and dims[0] * dims[1] >= _LEAST_WEIGHTS and plain


def _is_transposed(node: NodeProto) -> bool:
    return any(its.i for its in node.attribute if its.name == "transB")
