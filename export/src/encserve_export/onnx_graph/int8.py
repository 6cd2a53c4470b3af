"""Converts the linear layers and the table of token embeddings of a float32 graph to int8.

A linear layer y = x·Wᵀ + b becomes y = s·(q·Vᵀ)·c + b, where q and V have 8 bits. The vector c has one
scale for each column of Wᵀ, and is computed at export. The vector s has one scale for each row of x, and the graph
computes s for each batch.

A row of x belongs to one token. So the rounding of a token does not depend on the other tokens of its batch. ONNX's
DynamicQuantizeLinear is not used, because it has a single scale for all rows of x. With a single scale, a large number
in one sequence would change the outputs of other sequences.

Three rules keep the rounding error small:
- Smoothing (SmoothQuant, Xiao et al. 2022) divides each column of x by a factor, and multiplies the weights of this
  column by the same factor: x·Wᵀ = (x/a)·(W·a)ᵀ. Columns with large numbers get large factors. The factors come from a
  run with random inputs. A layer is smoothed only if smoothing lowers the layer's measured error.
- The output of ReLU, GELU or SiLU has a known minimum near 0. So all 256 numbers of 8 bits cover the range above it.
- A layer stays in float32 if its measured error exceeds `MAX_INT8_LAYER_ERROR`.

All other operators stay in float32: LayerNorm, softmax, attention and residual connections.

Layers with the same input x, such as the projections to Q, K and V, share the rounded x.

The products use ONNX Runtime's MatMulIntegerToFloat, which multiplies and scales in one operator. With ONNX's
MatMulInteger and a separate scaling, all-MiniLM-L6-v2 takes 4 to 11 % longer.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, external_data_helper, helper, numpy_helper

from encserve_export.core.errors import UnsupportedModelError
from encserve_export.core.precision import MAX_INT8_LAYER_ERROR
from encserve_export.onnx_graph.interface import DEFAULT_DOMAINS, token_tables
from encserve_export.onnx_graph.nodes import all_nodes
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_proto.bundle.v1 import manifest_pb2

_DOMAIN = "com.microsoft"
# The exponent α of SmoothQuant. A larger α shrinks large columns of x more, and enlarges the weights of these columns
# more. The paper uses 0.5 in section 4.1.
_SMOOTHING = 0.5
# The smoothing formula uses the largest absolute number of a column of x or W, but at least this number. So no factor
# is 0.
_EMPTY_COLUMN = 1e-5
# The least scale of a row. Without this limit, a row of zeros would be divided by 0.
_LEAST_STEP = 1e-30
# The inputs and errors of the layers are measured with 8 random sequences of 64 tokens. For all-MiniLM-L6-v2, the least
# cosine similarity between int8 and PyTorch is then 0.9946. With 4 or 8 times as many tokens, the similarity was 0.9943
# to 0.9946.
_CALIBRATION_BATCH = (8, 64)
# The minimum of each activation, rounded down. The exact minima are -0.16997 for GELU x·Φ(x), -0.17005 for the tanh
# approximation of GELU, and -0.27847 for SiLU x·σ(x).
_LEAST_RELU, _LEAST_GELU, _LEAST_SILU = 0.0, -0.1701, -0.2785

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer in int8, with n outputs and k inputs.

    Attributes:
        weight: W after smoothing, divided by `scales` and rounded, int8 (n, k).
        scales: The scale of each row of `weight`, float32 (n, 1).
        smoothing: The divisors of the columns of x, float32 (k); None without smoothing.
        least: The known minimum of x, at which the 8-bit steps begin. None if the minimum is unknown; the steps are
            then symmetric around 0.
        error: The largest ‖int8 - float32‖/‖float32‖ of a row of x·Wᵀ, for the measured inputs x.
    """

    weight: Array
    scales: Array
    smoothing: Array | None
    least: float | None
    error: float

    def round_rows(self, x: Array) -> Array:
        """Rounds each row of x, (tokens, k), to 8 bits, as the graph does. Returns the rounded rows as floats."""
        x = x if self.smoothing is None else x / self.smoothing  # (tokens, k)
        below = self.least or 0.0
        largest = (np.abs(x) if self.least is None else x - below).max(axis=1, keepdims=True)  # (tokens, 1)
        step = np.maximum(largest / (127 if self.least is None else 255), _LEAST_STEP)  # (tokens, 1)
        rounded: Array = np.rint((x - below) / step) * step + below  # (tokens, k)
        return rounded

    def part(self, first: int, last: int) -> "Layer":
        """Returns the layer with only the outputs from `first` to `last` - 1."""
        return dataclasses.replace(self, weight=self.weight[first:last], scales=self.scales[first:last])


def quantize(
    model: onnx.ModelProto, graph: manifest_pb2.Graph, *, vocab_size: int, width: int, longest: int, folder: Path
) -> onnx.ModelProto:
    """Converts a model to int8, in place, and returns the model with its weights loaded.

    Args:
        model: The model. Its weights are in files of `folder`.
        graph: The names of the inputs.
        vocab_size: The number of token ids; 0 for a model that takes vectors.
        width: The size of a vector; 0 for a model that takes token ids.
        longest: The longest sequence, in tokens.
        folder: The folder that contains the files with the weights.

    Raises:
        UnsupportedModelError: The graph has no linear layer. A linear layer is a product with a matrix of weights.
    """
    same = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    weights |= {name: weights[source] for name, source in same.items() if source in weights}
    by_input: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        if _is_linear(node, weights):
            by_input.setdefault(node.input[0], []).append(node)
    if not by_input:
        raise UnsupportedModelError(
            "the graph has no product with a matrix of weights, so int8 would change nothing; choose float32"
        )
    seen = _run(model, graph, vocab_size, width, longest, sorted(by_input), folder)
    minima = _minima(model)
    quantizer = _Quantizer(model, weights, token_tables(model, graph.input_ids_name) if vocab_size else {}, folder)
    for name, nodes in by_input.items():
        x = seen.pop(name)  # (…, k)
        matrices = [_matrix(node, weights, folder) for node in nodes]  # (n, k) each
        layer = plan_layer(np.concatenate(matrices), x.reshape(-1, x.shape[-1]), least=minima.get(name))
        if layer.error <= MAX_INT8_LAYER_ERROR:
            ends = np.cumsum([0, *map(len, matrices)])
            quantizer.add(name, x.ndim, {node.output[0]: layer.part(*ends[i : i + 2]) for i, node in enumerate(nodes)})
    _replace_nodes(model, [new for node in list(model.graph.node) for new in quantizer.replace(node)])
    external_data_helper.load_external_data_for_model(model, str(folder))  # loads the weights that stay in float32
    return model


def plan_layer(weight: Array, x: Array, *, least: float | None = None) -> Layer:
    """Rounds the weights of a layer, with smoothing if smoothing lowers the error.

    Args:
        weight: W, (n, k).
        x: The layer's measured input, (tokens, k).
        least: The minimum of x, if known. With a minimum, x is not smoothed, because smoothing would give the columns
            different minima.
    """
    plain = _round_layer(weight, x, None, least)
    if least is not None:
        return plain
    smoothed = _round_layer(weight, x, _smoothing(np.abs(x).max(axis=0), weight), None)
    return smoothed if smoothed.error < plain.error else plain


def _round_layer(weight: Array, x: Array, smoothing: Array | None, least: float | None) -> Layer:
    rounded, scales = quantize_rows(weight if smoothing is None else weight * smoothing)  # (n, k), (n, 1)
    layer = Layer(rounded, scales, smoothing, least, 0.0)
    got = layer.round_rows(x) @ (rounded * scales).T  # (tokens, n)
    want = x @ weight.T  # (tokens, n)
    norms = np.maximum(np.linalg.norm(want, axis=1), _LEAST_STEP)  # (tokens)
    return dataclasses.replace(layer, error=float((np.linalg.norm(got - want, axis=1) / norms).max()))


def quantize_rows(rows: Array) -> tuple[Array, Array]:
    """Rounds each row to 8 bits.

    Args:
        rows: (n, k).

    Returns:
        int8 (n, k) from -127 to 127, and the scales, float32 (n, 1). The product of integers and scales approximates
        `rows`.
    """
    scales = np.abs(rows).max(axis=1, keepdims=True) / 127  # (n, 1)
    scales = np.where(scales == 0, 1, scales).astype(np.float32)  # (n, 1)
    return np.clip(np.rint(rows / scales), -127, 127).astype(np.int8), scales


class _Quantizer:
    """Replaces nodes one by one, and adds the constants that the new nodes need."""

    def __init__(
        self, model: onnx.ModelProto, weights: Mapping[str, TensorProto], tables: Iterable[str], folder: Path
    ) -> None:
        self._graph = model.graph
        self._weights = weights
        self._folder = folder
        self._tables = {name for name in tables if name in weights}
        self._layers: dict[str, Layer] = {}
        self._rank: dict[str, int] = {}
        self._rounded: set[str] = set()
        self._names = {tensor.name for tensor in model.graph.initializer}
        self._axis = self._constant("quantized.axis", np.array([1], np.int64))
        self._least_step = self._constant("quantized.least_step", np.float32(_LEAST_STEP))
        self._one = self._constant("quantized.one", np.float32(1))

    def add(self, x: str, rank: int, layers: Mapping[str, Layer]) -> None:
        """Adds the int8 layers that read the value `x`, which has `rank` axes.

        The keys of `layers` are the names of the layers' outputs.
        """
        self._layers |= layers
        self._rank[x] = rank

    def replace(self, node: NodeProto) -> Iterable[NodeProto]:
        """Returns the nodes that replace a node: the node itself, or the nodes of an 8-bit layer or lookup."""
        layer = self._layers.pop(node.output[0], None) if node.output else None
        if layer is not None:
            return self._linear(node, layer)
        takes_rows = not any(it.i for it in node.attribute if it.name == "axis")
        if node.op_type == "Gather" and node.input[0] in self._tables and takes_rows:
            return self._lookup(node)
        return [node]

    def _linear(self, node: NodeProto, layer: Layer) -> Iterable[NodeProto]:
        """Yields the nodes that replace y = x·Wᵀ + b, for x (…, k) and W (n, k)."""
        x, y = node.input[0], node.output[0]
        inside, scope = f"/quantized/{x}", f"/quantized/{y}"
        is_flat, width = self._rank[x] == 2, len(layer.weight)
        if x not in self._rounded:
            self._rounded.add(x)
            yield from self._round(inside, x, layer)
        weight = self._constant(f"{scope}/weight", np.ascontiguousarray(layer.weight.T))  # (k, n)
        columns = self._constant(f"{scope}/weight.scale", layer.scales[:, 0])  # (n)
        product = [f"{inside}/rounded", weight, self._one, columns, self._zero(signed=layer.least is None)]
        yield self._node("MatMulIntegerToFloat", scope, product, "product", domain=_DOMAIN)  # (tokens, n)
        yield self._node("Mul", scope, [f"{scope}/product", f"{inside}/step"], "scaled")  # (tokens, n)
        last = "scaled"
        bias = self._weight(node.input[2]) if len(node.input) > 2 else None  # (n)
        if layer.least:
            moved = layer.least * (layer.weight.astype(np.float64) * layer.scales).sum(axis=1)  # (n)
            bias = moved if bias is None else bias + moved  # (n)
        if bias is not None:
            added = self._constant(f"{scope}/bias", bias.astype(np.float32))  # (n)
            yield self._node("Add", scope, [f"{scope}/scaled", added], "biased")  # (tokens, n)
            last = "biased"
        if is_flat:
            yield helper.make_node("Identity", [f"{scope}/{last}"], [y], f"{scope}/Identity")
            return
        size = self._constant(f"quantized.width_{width}", np.array([width]))
        yield self._node("Concat", scope, [f"{inside}/leading", size], "shape", axis=0)
        yield helper.make_node("Reshape", [f"{scope}/{last}", f"{scope}/shape"], [y], f"{scope}/Reshape")

    def _round(self, inside: str, x: str, layer: Layer) -> Iterable[NodeProto]:
        """Yields nodes that round x, (…, k), to uint8 (tokens, k), and compute the step of each row, (tokens, 1)."""
        k, signed = layer.weight.shape[1], layer.least is None
        if self._rank[x] != 2:
            flat = self._constant(f"quantized.flat_{k}", np.array([-1, k]))
            yield self._node("Shape", inside, [x], "leading", start=0, end=-1)
            yield self._node("Reshape", inside, [x, flat], "flat")
            x = f"{inside}/flat"  # (tokens, k)
        if layer.smoothing is not None:
            yield self._node("Mul", inside, [x, self._constant(f"{inside}/smoothing", 1 / layer.smoothing)], "smooth")
            x = f"{inside}/smooth"  # (tokens, k)
        if layer.least:
            least = self._constant(f"quantized.least_{layer.least}", np.float32(layer.least))
            yield self._node("Sub", inside, [x, least], "raised")
            x = f"{inside}/raised"  # (tokens, k), with a minimum of 0
        largest = x
        if signed:
            yield self._node("Abs", inside, [x], "size")
            largest = f"{inside}/size"
        steps = 127 if signed else 255
        part = self._constant(f"quantized.one_of_{steps}", np.float32(1 / steps))
        yield self._node("ReduceMax", inside, [largest, self._axis], "largest", keepdims=1)  # (tokens, 1)
        yield self._node("Mul", inside, [f"{inside}/largest", part], "part")  # (tokens, 1)
        yield self._node("Max", inside, [f"{inside}/part", self._least_step], "step")  # (tokens, 1)
        # QuantizeLinear rounds row by row if it gets a step and a zero point for each row.
        yield self._node("Squeeze", inside, [f"{inside}/step", self._axis], "steps")  # (tokens)
        yield self._node("Shape", inside, [f"{inside}/steps"], "tokens")
        yield self._node("Expand", inside, [self._zero(signed=signed), f"{inside}/tokens"], "zeros")  # (tokens)
        inputs = [x, f"{inside}/steps", f"{inside}/zeros"]
        yield self._node("QuantizeLinear", inside, inputs, "rounded", axis=0)  # (tokens, k)

    def _lookup(self, node: NodeProto) -> Iterable[NodeProto]:
        """Yields the nodes of a lookup in an int8 token table. Each row of the table has its own scale.

        The error of each number is at most 1/254 of the largest number in the same row.
        """
        scope, ids = f"/quantized/{node.output[0]}", node.input[1]
        rounded, scales = quantize_rows(self._weight(node.input[0]))  # (vocab, n), (vocab, 1)
        rows = [self._constant(f"{scope}/weight", rounded), ids]
        yield helper.make_node("Gather", rows, [f"{scope}/rounded"], node.name)  # (batch, seq, n)
        steps = [self._constant(f"{scope}/weight.scale", scales), ids]
        yield self._node("Gather", scope, steps, "step")  # (batch, seq, 1)
        yield self._node("Cast", scope, [f"{scope}/rounded"], "product", to=onnx.TensorProto.FLOAT)
        scaled = [f"{scope}/product", f"{scope}/step"]
        yield helper.make_node("Mul", scaled, list(node.output), f"{scope}/Mul")  # (batch, seq, n)

    def _weight(self, name: str) -> Array:
        return numpy_helper.to_array(self._weights[name], str(self._folder))

    def _zero(self, *, signed: bool) -> str:
        """Returns the name of the constant for the zero point, the uint8 number that stands for 0."""
        zero = 128 if signed else 0
        return self._constant(f"quantized.zero_at_{zero}", np.uint8(zero))

    def _constant(self, name: str, values: Any) -> str:
        if name not in self._names:
            self._names.add(name)
            self._graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    @staticmethod
    def _node(operator: str, scope: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
        return helper.make_node(operator, inputs, [f"{scope}/{output}"], f"{scope}/{operator}_{output}", **attributes)


def _run(
    model: onnx.ModelProto,
    graph: manifest_pb2.Graph,
    vocab_size: int,
    width: int,
    longest: int,
    names: list[str],
    folder: Path,
) -> dict[str, Any]:
    """Runs a graph on random ids or vectors with a fixed seed. Returns the values that `names` lists, by name."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    outputs = {value.name for value in model.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    shape = (_CALIBRATION_BATCH[0], min(_CALIBRATION_BATCH[1], longest))
    random = np.random.default_rng(0)
    inputs: Any = random.standard_normal((*shape, width), "f4") if width else random.integers(0, vocab_size, shape)
    path = folder / "watched.onnx"  # ONNX Runtime looks for the weights in the folder of the graph
    onnx.save_model(watched, path)
    encoder = OnnxEncoder(path, graph)
    path.unlink()
    return dict(zip(names, encoder.outputs(names, inputs, np.ones(shape, np.int64)), strict=True))


def _is_linear(node: NodeProto, weights: Mapping[str, TensorProto]) -> bool:
    if node.domain not in DEFAULT_DOMAINS or node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights:
        return False
    if any(name and name not in weights for name in node.input[2:]):  # the graph computes the bias
        return False
    dims = weights[node.input[1]].dims
    is_scaled = any(it.f != 1 for it in node.attribute if it.name in ("alpha", "beta"))
    is_transposed = any(it.i for it in node.attribute if it.name == "transA")
    return len(dims) == 2 and not is_scaled and not is_transposed


def _matrix(node: NodeProto, weights: Mapping[str, TensorProto], folder: Path) -> Array:
    """Returns the weight matrix of a linear node, (n, k)."""
    matrix = numpy_helper.to_array(weights[node.input[1]], str(folder))
    is_transposed = any(attribute.i for attribute in node.attribute if attribute.name == "transB")
    return matrix if is_transposed else matrix.T


def _minima(model: onnx.ModelProto) -> dict[str, float]:
    """Returns the minimum of each activation's output, by the name of this output."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for name, node in made_by.items():
        if node.domain not in DEFAULT_DOMAINS:
            continue
        if node.op_type == "Relu":
            found[name] = _LEAST_RELU
        elif node.op_type == "Gelu":
            found[name] = _LEAST_GELU
        elif node.op_type == "Mul":  # x·σ(x)
            for x, factor in (node.input, node.input[::-1]):
                sigmoid = made_by.get(factor)
                if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.input[0] == x:
                    found[name] = _LEAST_SILU
    return found


def _replace_nodes(model: onnx.ModelProto, nodes: Iterable[NodeProto]) -> None:
    """Replaces the nodes of a graph, and removes weights that no node uses."""
    new = list(nodes)
    del model.graph.node[:]
    model.graph.node.extend(new)
    used = {name for node in all_nodes(model) for name in node.input} | {value.name for value in model.graph.output}
    initializers = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(initializers)
    if not any(it.domain == _DOMAIN for it in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _smoothing(size: Array, weight: Array) -> Array:
    """Returns the divisors of the columns of x, (k).

    `size` is the largest absolute number in each column of x, (k). `weight` is W, (n, k).
    """
    of_weight = np.maximum(np.abs(weight).max(axis=0), _EMPTY_COLUMN)  # (k)
    factors = np.maximum(size, _EMPTY_COLUMN) ** _SMOOTHING / of_weight ** (1 - _SMOOTHING)
    centred: Array = factors / np.exp(np.log(factors).mean())
    return centred.astype(np.float32)
