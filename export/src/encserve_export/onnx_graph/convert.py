"""Converts a float32 graph to float16 or int8."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, numpy_helper

from encserve_export.core.errors import UnsupportedModelError
from encserve_export.core.precision import Precision
from encserve_export.onnx_graph.int8 import quantize
from encserve_export.onnx_graph.interface import opset
from encserve_proto.bundle.v1 import manifest_pb2

from encserve_export.core.runtime import onnxruntime  # isort: skip # noqa: F401 - before its submodules

from onnxruntime.transformers.float16 import (  # isort: skip
    DEFAULT_OP_BLOCK_LIST,
    convert_float_to_float16,
    convert_np_to_float16,
)

# The int8 conversion gives ReduceMax its axes as an input. Opset 18 is the first opset with this input.
_LEAST_OPSET = 18
# These operators stay in float32. PyTorch's autocast does the same for softmax, pow, reciprocal, log, sum and norm
# ("CUDA Ops that can autocast to float32"). ReduceMean is a scaled sum, and Sqrt is the last step of a norm, so both
# also stay in float32. Cos, Sin and Range compute with the angles of positions. float16 would round these angles too
# much.
_FLOAT32_OPERATORS = (
    *("Softmax", "Pow", "Reciprocal", "Log", "ReduceSum", "ReduceL2", "Sqrt", "ReduceMean"),
    *("Cos", "Sin", "Range"),
)
# onnxruntime's rounding takes up to 20 bytes of memory for each number. So a tensor is rounded in blocks of this many
# numbers.
_BLOCK = 2**20


def convert(
    path: Path, graph: manifest_pb2.Graph, *, vocab_size: int, width: int, longest: int, precision: Precision
) -> onnx.ModelProto:
    """Returns the model in another precision, with all weights inside the returned object.

    Args:
        path: The model's float32 file. The int8 conversion writes a temporary file into the same folder, and removes
            this file.
        graph: The names of the model's inputs.
        vocab_size: The number of token ids; 0 for a model that takes vectors.
        width: The size of a vector; 0 for a model that takes token ids.
        longest: The longest sequence, in tokens.
        precision: "float16" or "int8".

    Raises:
        UnsupportedModelError: The graph cannot be converted. The message has the reason.
    """
    model: onnx.ModelProto = onnx.load(path, load_external_data=False)
    if opset(model) < _LEAST_OPSET:
        raise UnsupportedModelError(
            f"{precision} needs a graph of opset {_LEAST_OPSET} or newer; was {opset(model)}. Export the graph again "
            "with a newer opset, or choose float32"
        )
    if precision == "float16":
        return _to_float16(model, path.parent)
    return quantize(model, graph, vocab_size=vocab_size, width=width, longest=longest, folder=path.parent)


def _to_float16(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    model = onnx.shape_inference.infer_shapes(model)
    weights = _take_out_weights(model)
    external_data_helper.load_external_data_for_model(model, str(folder))  # loads the large constants of nodes
    made_by = {name: node for node in model.graph.node for name in node.output}
    # A rounded angle would make Cos and Sin wrong. So all nodes that compute an angle stay in float32 too.
    float32_nodes: set[str] = set()
    open_nodes = [node for node in model.graph.node if node.op_type in ("Cos", "Sin")]
    while open_nodes:
        node = open_nodes.pop()
        if node.name not in float32_nodes:
            float32_nodes.add(node.name)
            open_nodes += [made_by[name] for name in node.input if name in made_by]
    converted: onnx.ModelProto = convert_float_to_float16(
        model,
        keep_io_types=True,
        disable_shape_infer=True,
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, *_FLOAT32_OPERATORS],
        node_block_list=sorted(float32_nodes),
    )
    _put_back_weights(converted, weights, folder)
    # If several float32 nodes read a value, the library adds a Cast of this value for each node. These Casts have the
    # same output name, so only the first Cast is kept.
    first = {tuple(node.output): node for node in reversed(converted.graph.node)}
    del converted.graph.node[:]
    converted.graph.node.extend(reversed(first.values()))
    return converted


def _take_out_weights(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """Empties the weights that are stored in other files. Returns the original entries of these weights by name.

    onnxruntime's conversion does not accept weights in other files. If all weights were loaded, the weights would be in
    memory in float32 and in float16 at the same time. So the conversion gets empty weights.
    """
    weights: dict[str, TensorProto] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            weights[tensor.name] = TensorProto()
            weights[tensor.name].CopyFrom(tensor)
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
    return weights


def _put_back_weights(model: onnx.ModelProto, weights: Mapping[str, TensorProto], folder: Path) -> None:
    """Puts back the weights that `_take_out_weights` returned, in the types that the converted graph declares.

    Weights that change their type are loaded one by one, which takes less memory.
    """
    for tensor in model.graph.initializer:
        source = weights.get(tensor.name)
        if source is None:
            continue
        if tensor.data_type == source.data_type:
            tensor.CopyFrom(source)
            continue
        values = numpy_helper.to_array(source, str(folder)).reshape(-1)
        blocks = np.array_split(values, math.ceil(values.size / _BLOCK))
        tensor.dims[:] = source.dims
        tensor.raw_data = b"".join(convert_np_to_float16(block).tobytes() for block in blocks)
    external_data_helper.load_external_data_for_model(model, str(folder))  # loads the weights that stay in float32
    del model.graph.value_info[:]  # these shapes are wrong, because they come from the empty weights
