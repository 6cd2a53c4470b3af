"""What an ONNX file tells of its model without being run: precision, numbers, the embedding table, who wrote it."""

import math

import onnx
from onnx import NodeProto, TensorProto, inliner

from encserve_export.onnx_data import all_tensors, constants, type_name
from encserve_export.onnx_model import DEFAULT_DOMAINS

# The types that weights are stored in, the finest first. Integers of 32 bits and more are indices and shapes.
_WEIGHTS = (
    TensorProto.DOUBLE,
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT16,
    TensorProto.UINT16,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT4,
    TensorProto.UINT4,
)
# What leaves ids what they are, and what leaves the rows of a table where they are.
_SAME_IDS = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
_SAME_ROWS = ("Identity", "Cast", "DequantizeLinear")
_MAX_DESCRIPTION = 200


def precision(model: onnx.ModelProto) -> str:
    """The coarsest type that a matrix of weights is stored in, e.g. "float32", "float16" or "int8"."""
    stored = {tensor.data_type for tensor in all_tensors(model) if len(tensor.dims) >= 2}
    found = [kind for kind in _WEIGHTS if kind in stored]
    return type_name(found[-1]) if found else "float32"


def count_parameters(model: onnx.ModelProto) -> int:
    """How many numbers the weights have."""
    return sum(math.prod(tensor.dims) for tensor in all_tensors(model) if tensor.data_type in _WEIGHTS)


def description(model: onnx.ModelProto) -> str:
    """The program that wrote the file, e.g. "pytorch 2.13.0"."""
    text = " ".join(f"{model.producer_name} {model.producer_version}".split())
    return text[:_MAX_DESCRIPTION] or "no producer named"


def embedding_rows(model: onnx.ModelProto, input_ids: str) -> int | None:
    """The rows of the table that the token ids index, or None where it cannot be found; of several, the fewest."""
    graph = _inlined(model).graph
    ids = {input_ids}
    tables = {tensor.name: tensor.dims for tensor in graph.initializer}
    rows = []
    # Nodes are in topological order, so one pass is enough.
    for node in graph.node:
        tables |= {name: tensor.dims for name, tensor in constants(node).items()}
        if node.op_type in _SAME_IDS and node.input[:1] and node.input[0] in ids:
            ids.update(node.output[:1])
        elif node.op_type in _SAME_ROWS and node.input[:1] and node.input[0] in tables:
            tables |= dict.fromkeys(node.output[:1], tables[node.input[0]])
        table = tables.get(_looked_up(node, ids))
        if table is not None and len(table) == 2:
            rows.append(int(table[0]))
    return min(rows, default=None)


def _looked_up(node: NodeProto, ids: set[str]) -> str:
    """The name of the table that a node looks the token ids up in; empty where it does not."""
    if node.op_type == "Gather" and node.domain in DEFAULT_DOMAINS and len(node.input) == 2:
        axis = next((its.i for its in node.attribute if its.name == "axis"), 0)
        return node.input[0] if node.input[1] in ids and axis in (0, -2) else ""
    # ONNX Runtime's own, as its optimizer writes it: ids, token types, the word table.
    if node.op_type == "EmbedLayerNormalization" and len(node.input) > 2 and node.input[0] in ids:
        return str(node.input[2])
    return ""


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the bodies of its local functions in their places, since a table may be used inside one."""
    if not model.functions:
        return model
    try:
        inlined: onnx.ModelProto = inliner.inline_local_functions(model)
    except Exception:  # the library raises what it likes; --vocab-size can say what is not found
        return model
    return inlined
