"""Traces an Encoder into two ONNX files that share one file of weights: the model, and what happens inside it.

Plain ONNX operators only, so that any runtime may read the files; ONNX Runtime fuses what it can when it loads them. In
int8 one of ONNX Runtime's own is among them.

Only the second graph is traced. The first is that graph without the outputs, and the nodes, that nobody but an
inspection needs; so both compute the same numbers from the same weights. It alone goes through the queries of long
sequences in blocks, since it need not give attention weights.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from encserve_export.ground import names
from encserve_export.ground.precision import Precision
from encserve_export.models.own import quantize
from encserve_export.models.own.encoder import Encoder
from encserve_export.onnx_graph import external, float16, query_blocks, traced

# What attention is computed in.
_ELEMENT_TYPES = dict.fromkeys(("float32", "int8"), onnx.TensorProto.FLOAT) | {"float16": onnx.TensorProto.FLOAT16}
# The residual connections are the additions of a block itself, not of the parts in it.
_RESIDUAL = re.compile(r"/blocks\.[0-9]+/Add(_[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The files that were written, and the interface of the second graph.

    Attributes:
        files: The graph first, then the graph for inspections, then their weights.
        input_name: The input of token ids, or of embeddings.
        attention_weights_names: The outputs of attention weights, one for each block: (batch, heads, seq, seq).
        hidden_state_names: The outputs of rows, n_layers + 1: (batch, seq, d_model).
        positions_name: The output of positions: (max_sequence_tokens, d_model); empty where there are none.
        residual_nodes: The nodes that are residual connections, in the order of the blocks.
        precision: What both compute in.
    """

    files: tuple[Path, Path, Path]
    input_name: str
    attention_weights_names: tuple[str, ...]
    hidden_state_names: tuple[str, ...]
    positions_name: str
    residual_nodes: tuple[str, ...]
    precision: Precision


class _Watched(nn.Module):
    """Gives everything that happens inside an encoder; made of the encoder's own parts, which keep their names."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.embeddings = encoder.embeddings
        self.positions = encoder.positions
        self.window = encoder.window
        self.blocks = encoder.blocks
        self.final_norm = encoder.final_norm
        self._inspect = encoder.inspect

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """All hidden states, then all attention weights."""
        inspection = self._inspect(inputs, attention_mask)
        return (*inspection.hidden_states, *inspection.attention_weights)


def input_name(encoder: Encoder) -> str:
    """The name of the graph's first input."""
    return names.EMBEDDINGS if encoder.config.input == "embeddings" else names.INPUT_IDS


def write_graphs(encoder: Encoder, folder: Path, precision: Precision = "float32") -> Graphs:
    """Writes the encoder as ONNX.

    The graph takes input_ids int64 (batch, seq), or inputs_embeds float32 (batch, seq, d_model), and attention_mask
    int64 (batch, seq); it gives last_hidden_state float32 (batch, seq, d_model). The graph for inspections takes the
    same and gives more.

    Args:
        encoder: The encoder, in float32.
        folder: Where to put the files; it must be empty.
        precision: What both graphs compute in; inputs and outputs are the same in all.
    """
    config = encoder.config
    n_layers = config.n_layers
    states = (*(f"hidden_state.{i}" for i in range(n_layers)), names.OUTPUT)
    weights = tuple(f"attention_weights.{i}" for i in range(n_layers))
    path, data_path, inspect_path = folder / names.FILE, folder / names.DATA_FILE, folder / names.INSPECT_FILE
    inspected = _trace(encoder, path, states, weights)
    _lift_constants(inspected)
    positions = _add_positions(inspected, encoder)
    if precision == "int8":
        quantize.quantize(inspected, encoder)
    elif precision == "float16":
        float16.halve(inspected)
    with data_path.open("wb") as data:
        # Weights of the same name are the same in both, and are written once.
        _move_weights(inspected, data)
        model = _only(inspected, names.OUTPUT)
        if config.max_sequence_tokens > query_blocks.LONGEST_AT_ONCE:
            query_blocks.block_queries(model, names.ATTENTION_MASK, config.n_heads, _ELEMENT_TYPES[precision])
        _move_weights(model, data)
    onnx.save_model(model, path)
    onnx.save_model(inspected, inspect_path)
    residual_nodes = tuple(node.name for node in inspected.graph.node if _RESIDUAL.fullmatch(node.name))
    files = (path, inspect_path, data_path)
    return Graphs(files, input_name(encoder), weights, states, positions, residual_nodes, precision)


def _trace(encoder: Encoder, path: Path, states: Iterable[str], weights: Iterable[str]) -> onnx.ModelProto:
    # Two sequences of different length: no size in the example is 1, which would be taken for a constant.
    inputs = torch.zeros((2, 3), dtype=torch.int64)  # (batch, seq)
    if encoder.config.input == "embeddings":
        inputs = torch.zeros((2, 3, encoder.config.d_model))  # (batch, seq, d_model)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])  # (batch, seq)
    name = input_name(encoder)
    rows = {0: "batch", 1: "seq"}
    squares = {0: "batch", 2: "seq", 3: "seq"}
    axes = dict.fromkeys((name, names.ATTENTION_MASK, *states), rows) | dict.fromkeys(weights, squares)
    watched = _Watched(encoder).eval()
    model = traced.trace(
        watched,
        (inputs, mask),
        path,
        inputs=[name, names.ATTENTION_MASK],
        outputs=[*states, *weights],
        dynamic_axes=axes,
    )
    traced.take_weights(model, traced.fold_weights(model, watched))
    return model


def _lift_constants(model: onnx.ModelProto) -> None:
    """Makes tables among the constants weights like the others: the exporter hides the sinusoids in a node."""
    graph = model.graph
    for node in list(graph.node):
        if node.op_type == "Constant" and len(node.attribute[0].t.dims) == 2:
            tensor = node.attribute[0].t
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
            graph.node.remove(node)


def _add_positions(model: onnx.ModelProto, encoder: Encoder) -> str:
    """Adds the output of positions and returns its name; empty where there are none."""
    config, graph = encoder.config, model.graph
    if config.position in ("none", "rotary"):
        return ""
    table = encoder.embeddings.positions.numpy()  # (n_positions, d_model)
    # By what it holds, since the exporter drops the name of a table without gradient.
    same = (tensor for tensor in graph.initializer if tuple(tensor.dims) == table.shape)
    source = next((tensor.name for tensor in same if numpy_helper.to_array(tensor).tobytes() == table.tobytes()), None)
    if source is None:
        raise AssertionError("the traced graph does not hold the position table")
    ends = (config.position_offset, config.n_positions)
    limits = [numpy_helper.from_array(torch.tensor([end]).numpy(), f"{names.POSITIONS}.{end}") for end in ends]
    graph.initializer.extend(limits)
    graph.node.append(
        helper.make_node("Slice", [source, *(limit.name for limit in limits)], [names.POSITIONS], names.POSITIONS)
    )
    shape = [config.max_sequence_tokens, config.d_model]
    graph.output.append(helper.make_tensor_value_info(names.POSITIONS, onnx.TensorProto.FLOAT, shape))
    return names.POSITIONS


def _only(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """The same model with one of its outputs, and no more than that one needs; its large weights are moved out."""
    only = onnx.ModelProto()
    only.CopyFrom(model)
    graph = only.graph
    made_by = {name: node for node in model.graph.node for name in node.output}
    needed: set[str] = set()
    open_names = [output]
    while open_names:
        name = open_names.pop()
        if name not in needed:
            needed.add(name)
            open_names += made_by[name].input if name in made_by else ()
    for field, keep in (
        ("node", [node for node in model.graph.node if needed.intersection(node.output)]),
        ("initializer", [tensor for tensor in model.graph.initializer if tensor.name in needed]),
        ("output", [value for value in model.graph.output if value.name == output]),
        ("value_info", []),
    ):
        graph.ClearField(field)
        getattr(graph, field).extend(keep)
    return only


def _move_weights(model: onnx.ModelProto, data: BinaryIO) -> None:
    """Moves the weights of a model out into a file."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= external.LEAST_DATA_BYTES:
            external.place(tensor, tensor.raw_data, data)
