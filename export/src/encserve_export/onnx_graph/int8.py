"""Makes a traced graph compute its linear layers in 8 bits, and keep its token embeddings in 8 bits.

A linear layer y = x·Wᵀ + b becomes y = s·(q·Vᵀ)·c + b with q and V of 8 bits. Each column of Wᵀ has a scale in c, made
at export; each row of x has a scale in s, made by the graph when it runs. The rows are tokens, so no token changes the
rounding of another: what is in a batch beside a sequence is nothing to it. (One scale for all of x, as in ONNX's
DynamicQuantizeLinear, lets the largest number of a neighbour coarsen everybody.)

Three things keep the rounding small:
- Columns of x that are large everywhere are made smaller, and their weights larger (SmoothQuant, Xiao et al. 2022):
  x·Wᵀ = (x/a)·(W·a)ᵀ. How large they are is seen from random inputs; a bad guess costs accuracy, never correctness.
- What comes from ReLU or GELU has no or small negative numbers, so all 256 steps are for the range that there is.
- A layer in which a row comes out too far off all the same is left in float32; of all-MiniLM-L6-v2's 24 layers one is.
Everything but linear layers and the table of tokens is in float32: LayerNorm, softmax, attention, residuals.

The products are ONNX Runtime's MatMulIntegerToFloat, which scales while it multiplies; with ONNX's own MatMulInteger,
and what must follow it then, all-MiniLM-L6-v2 takes 4 to 11 % longer.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, helper, numpy_helper

from encserve_export.onnx_graph.nodes import all_nodes

# What the scales of quantized weights are called; they are no parameters of the model.
SCALE = ".scale"
_DOMAIN = "com.microsoft"
# The share of a column's size that moves to the weights, as an exponent; SmoothQuant's own choice.
_SMOOTHING = 0.5
# A layer that moves a row of random inputs by more than this share of its norm stays in float32.
MAX_ERROR = 0.1
# Of rows of zeros, whose scale must not be 0.
_LEAST_STEP = 1e-30

Array = npt.NDArray[Any]


def replace_nodes(model: onnx.ModelProto, nodes: Iterable[NodeProto]) -> None:
    """Puts nodes in place of a graph's own, and takes the weights away that nobody uses any more."""
    made = list(nodes)
    del model.graph.node[:]
    model.graph.node.extend(made)
    used = {name for node in all_nodes(model) for name in node.input} | {value.name for value in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    if not any(its.domain == _DOMAIN for its in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


@dataclasses.dataclass(frozen=True)
class Layer:
    """How one linear layer is rounded.

    Attributes:
        weight: The weights, int8 (n, k); times `scales` they are W, smoothed.
        scales: Their scales, float32 (n, 1).
        smoothing: What the columns of x are divided by, float32 (k); None where they stay as they are.
        least: The least number of x, where that is known; otherwise None, and 0 is in the middle of the steps.
        error: The largest ‖got - want‖/‖want‖ of a row of x·Wᵀ, seen with random inputs.
    """

    weight: Array
    scales: Array
    smoothing: Array | None
    least: float | None
    error: float

    def round_rows(self, x: Array) -> Array:
        """What the graph makes of x, (tokens, k), rounded row by row and back again."""
        x = x if self.smoothing is None else x / self.smoothing  # (tokens, k)
        below = self.least or 0.0
        largest = (np.abs(x) if self.least is None else x - below).max(axis=1, keepdims=True)  # (tokens, 1)
        step = np.maximum(largest / (127 if self.least is None else 255), _LEAST_STEP)  # (tokens, 1)
        rounded: Array = np.rint((x - below) / step) * step + below  # (tokens, k)
        return rounded


def plan_layer(weight: Array, x: Array, *, smooth: bool, least: float | None = None) -> Layer:
    """Rounds the weights, (n, k), of a layer whose input is like x, (tokens, k).

    Args:
        weight: (n, k).
        x: (tokens, k).
        smooth: Whether columns of x that are large everywhere are made smaller.
        least: The least number that x can have, where that is known.
    """
    smoothing = _smoothing(np.abs(x).max(axis=0), weight) if smooth else None  # (k)
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
        int8 (n, k) from -127 to 127, and the scales, float32 (n, 1): their product is about `rows`.
    """
    scales = np.abs(rows).max(axis=1, keepdims=True) / 127  # (n, 1)
    scales = np.where(scales == 0, 1, scales).astype(np.float32)  # (n, 1)
    return np.clip(np.rint(rows / scales), -127, 127).astype(np.int8), scales


class Quantizer:
    """Replaces nodes one by one, and keeps the constants that they need."""

    def __init__(self, model: onnx.ModelProto, layers: dict[str, Layer]) -> None:
        self._graph = model.graph
        self._layers = layers
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._same = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
        self._axis = self._constant("quantized.axis", np.array([1], np.int64))
        self._least_step = self._constant("quantized.least_step", np.float32(_LEAST_STEP))
        self._one = self._constant("quantized.one", np.float32(1))

    def replace(self, node: NodeProto) -> Iterable[NodeProto]:
        """The nodes in place of one: itself, or those of a linear layer or a lookup in 8 bits."""
        scope = node.name.rpartition("/")[0]
        layer = self._layers.get(scope.strip("/").replace("/", "."))
        if layer is not None and node.op_type in ("Gemm", "MatMul") and layer.error <= MAX_ERROR:
            return self.linear(node, scope, layer)
        if node.op_type == "Gather" and scope == "/embeddings/tokens":
            return self.lookup(node, scope)
        return [node]

    def linear(self, node: NodeProto, scope: str, layer: Layer) -> Iterable[NodeProto]:
        """The nodes in place of y = x·Wᵀ + b for x (tokens, k) and W (n, k)."""
        x, y = node.input[0], node.output[0]
        bias = self._weight(node.input[2]) if len(node.input) > 2 else None  # (n)
        if layer.smoothing is not None:
            yield self._node("Mul", scope, [x, self._constant(f"{scope}/smoothing", 1 / layer.smoothing)], "smooth")
            x = f"{scope}/smooth"  # (tokens, k)
        if layer.least:
            least = self._constant("quantized.least_of_gelu", np.float32(layer.least))
            yield self._node("Sub", scope, [x, least], "raised")
            x = f"{scope}/raised"  # (tokens, k), nothing in it below 0
            moved = layer.least * (layer.weight.astype(np.float64) * layer.scales).sum(axis=1)  # (n)
            bias = moved if bias is None else bias + moved  # (n)
        signed = layer.least is None
        yield from self._round(scope, x, signed=signed)
        weight = self._constant(f"{scope}/weight", np.ascontiguousarray(layer.weight.T))  # (k, n)
        columns = self._constant(f"{scope}/weight{SCALE}", layer.scales[:, 0])  # (n)
        product = [f"{scope}/rounded", weight, self._one, columns, self._zero(signed=signed)]
        yield self._node("MatMulIntegerToFloat", scope, product, "product", domain=_DOMAIN)  # (tokens, n)
        scaled = y if bias is None else f"{scope}/scaled"
        yield helper.make_node("Mul", [f"{scope}/product", f"{scope}/step"], [scaled], f"{scope}/Mul_scaled")
        if bias is not None:
            added = self._constant(f"{scope}/bias", bias.astype(np.float32))  # (n)
            yield helper.make_node("Add", [scaled, added], [y], f"{scope}/Add")  # (tokens, n)

    def _round(self, scope: str, x: str, *, signed: bool) -> Iterable[NodeProto]:
        """X (tokens, k) -> uint8 (tokens, k) and the steps of its rows, (tokens, 1)."""
        largest = x
        if signed:
            yield self._node("Abs", scope, [x], "size")
            largest = f"{scope}/size"
        steps = 127 if signed else 255
        part = self._constant(f"quantized.one_of_{steps}", np.float32(1 / steps))
        yield self._node("ReduceMax", scope, [largest, self._axis], "largest", keepdims=1)  # (tokens, 1)
        yield self._node("Mul", scope, [f"{scope}/largest", part], "part")  # (tokens, 1)
        yield self._node("Max", scope, [f"{scope}/part", self._least_step], "step")  # (tokens, 1)
        # QuantizeLinear rounds row by row if it is given a step and a zero for each.
        yield self._node("Squeeze", scope, [f"{scope}/step", self._axis], "steps")  # (tokens)
        yield self._node("Shape", scope, [f"{scope}/steps"], "tokens")
        yield self._node("Expand", scope, [self._zero(signed=signed), f"{scope}/tokens"], "zeros")  # (tokens)
        inputs = [x, f"{scope}/steps", f"{scope}/zeros"]
        yield self._node("QuantizeLinear", scope, inputs, "rounded", axis=0)  # (tokens, k)

    def lookup(self, node: NodeProto, scope: str) -> Iterable[NodeProto]:
        """The rows of the table of tokens, each with a scale of its own: within 1 / 254 of its largest number."""
        rounded, scales = quantize_rows(self._weight(node.input[0]))  # (vocab, d_model), (vocab, 1)
        ids = node.input[1]
        rows = [self._constant(f"{scope}/weight", rounded), ids]
        yield helper.make_node("Gather", rows, [f"{scope}/rounded"], node.name)  # (batch, seq, d_model)
        steps = [self._constant(f"{scope}/weight{SCALE}", scales), ids]
        yield self._node("Gather", scope, steps, "step")  # (batch, seq, 1)
        yield self._node("Cast", scope, [f"{scope}/rounded"], "product", to=onnx.TensorProto.FLOAT)
        scaled = [f"{scope}/product", f"{scope}/step"]
        yield helper.make_node("Mul", scaled, list(node.output), f"{scope}/Mul")  # (batch, seq, d_model)

    def _zero(self, *, signed: bool) -> str:
        """What stands for 0 among the 256 steps."""
        zero = 128 if signed else 0
        return self._constant(f"quantized.zero_at_{zero}", np.uint8(zero))

    def _weight(self, name: str) -> Array:
        """The weight of a name; the exporter keeps equal ones once, and gives the others by Identity."""
        while name in self._same:
            name = self._same[name]
        return numpy_helper.to_array(self._constants[name])

    def _constant(self, name: str, values: Any) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.asarray(values), name)
            self._graph.initializer.append(self._constants[name])
        return name

    @staticmethod
    def _node(operator: str, scope: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
        return helper.make_node(operator, inputs, [f"{scope}/{output}"], f"{scope}/{operator}_{output}", **attributes)


def _smoothing(size: Array, weight: Array) -> Array:
    """The factors of weight's columns, (k), for the largest numbers of x's columns, (k), and weight, (n, k)."""
    least = 1e-5  # a column without anything in it is left in the middle
    factors = np.maximum(size, least) ** _SMOOTHING / np.maximum(np.abs(weight).max(axis=0), least) ** (1 - _SMOOTHING)
    centred: Array = factors / np.exp(np.log(factors).mean())
    return centred.astype(np.float32)
