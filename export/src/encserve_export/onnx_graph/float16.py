"""Makes a traced graph compute in float16, for GPUs.

Its inputs and outputs stay what they are: vectors are cast on their way in, rows and all that an inspection shows on
their way out. LayerNorm takes float16 and works in float32 inside, by ONNX's definition. The mask adds the lowest
finite float16; where the sum is below that it becomes -∞, whose exponential is 0 like that of any masked score.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_LIMIT = float(np.finfo(np.float16).max)


def halve(model: onnx.ModelProto) -> None:
    """Changes a graph with its weights in it, in place."""
    graph = model.graph
    for tensor in graph.initializer:
        _halve_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _halve_tensor(attribute.t)
            # "to" of Cast; no other operator in our graphs has a type among its attributes.
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    del graph.value_info[:]
    first = [_rename(graph, value.name, output=False) for value in graph.input if _is_float(value)]
    last = [_rename(graph, value.name, output=True) for value in graph.output if _is_float(value)]
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(graph: Any, name: str, *, output: bool) -> onnx.NodeProto:
    """Renames a value of float32 inside the graph, where it is of float16, and gives the cast between the two."""
    inside = f"{name}.float16"
    for node in graph.node:
        for names in (node.input, node.output):
            for i, used in enumerate(names):
                if used == name:
                    names[i] = inside
    before, after, to = (inside, name, TensorProto.FLOAT) if output else (name, inside, TensorProto.FLOAT16)
    return helper.make_node("Cast", [before], [after], f"/Cast_{name}", to=to)


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == TensorProto.FLOAT)


def _halve_tensor(tensor: TensorProto) -> None:
    """Rounds its numbers, those out of range to the largest: the mask adds the lowest finite number there is."""
    if tensor.data_type == TensorProto.FLOAT:
        values = np.clip(numpy_helper.to_array(tensor), -_LIMIT, _LIMIT).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
