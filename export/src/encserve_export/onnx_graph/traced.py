"""Exports a module with PyTorch's tracing exporter, without extra copies of the weights in memory.

By default, PyTorch's exporter would keep up to five copies of the weights, such as folded constants, a protobuf message
and the bytes of this message. So `trace` writes a graph that takes the weights as inputs. `take_weights` then adds the
weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from encserve_export.core import names
from encserve_export.core.quiet import quiet
from encserve_export.onnx_graph.external import LEAST_DATA_BYTES, place
from encserve_export.onnx_graph.nodes import all_nodes, constants, walk


def trace(
    module: nn.Module,
    arguments: tuple[Tensor, ...],
    path: Path,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
) -> onnx.ModelProto:
    """Traces a module into a graph. The last inputs of the graph are the weights, under their names in the module.

    Args:
        module: The module, in evaluation mode.
        arguments: Example arguments for a call of the module.
        path: The path for a temporary file. This function removes the file.
        inputs: The names of the arguments in the graph.
        outputs: The names of the results in the graph.
        dynamic_axes: The axes without a fixed size, by the names of inputs and outputs.
    """
    with quiet():
        # `quiet` hides two kinds of warnings: this exporter is deprecated, and tracing may misread transformers' code.
        # Both kinds can be ignored: the version of torch is pinned, and every graph is compared with PyTorch
        # afterwards. The newer exporter takes six times as long, and its graphs are not faster.
        torch.onnx.export(
            module,
            arguments,
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=dynamic_axes,
            opset_version=names.OPSET,
            export_params=False,
            do_constant_folding=False,
            dynamo=False,
        )
    model: onnx.ModelProto = onnx.load(path)
    path.unlink()
    return model


def cut(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """Returns a copy of a model with a single output. The copy has only the nodes and weights that the output needs."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    made_by = {name: node for node in model.graph.node for name in node.output}
    needed: set[str] = set()
    open_names = [output]
    while open_names:
        name = open_names.pop()
        if name not in needed:
            needed.add(name)
            inner = walk([made_by[name]]) if name in made_by else ()  # a branch may use values of the outer graph
            open_names += (used for node in inner for used in node.input)
    for field, kept in (
        ("node", [node for node in model.graph.node if needed.intersection(node.output)]),
        ("initializer", [tensor for tensor in model.graph.initializer if tensor.name in needed]),
        ("output", [value for value in model.graph.output if value.name == output]),
        ("value_info", []),
    ):
        part.graph.ClearField(field)
        getattr(part.graph, field).extend(kept)
    return part


def lift_constants(model: onnx.ModelProto) -> None:
    """Turns large Constant nodes into initializers.

    The exporter writes some tables, such as sinusoids, as Constant nodes.
    """
    for node in list(model.graph.node):
        for name, tensor in constants(node).items():
            if len(tensor.raw_data) >= LEAST_DATA_BYTES:
                tensor.name = name
                model.graph.initializer.append(tensor)
                model.graph.node.remove(node)


def take_weights(model: onnx.ModelProto, weights: Mapping[str, Tensor], data: BinaryIO | None = None) -> None:
    """Turns each graph input that is a weight into an initializer.

    Args:
        model: The result of `trace`; changed in place.
        weights: The weights, by their input names.
        data: The file for weights of 1,024 bytes or more. If it is None, all weights go into the model.
    """
    graph = model.graph
    for name in [value.name for value in graph.input if value.name in weights]:
        weight = weights[name].detach().contiguous()
        kind = helper.np_dtype_to_tensor_dtype(weight.numpy().dtype)
        tensor = graph.initializer.add(name=name, data_type=kind, dims=weight.shape)
        if data is None or weight.nbytes < LEAST_DATA_BYTES:
            tensor.raw_data = weight.numpy().tobytes()
        else:
            place(tensor, weight.numpy().reshape(-1).view(np.uint8).data, data)
    kept = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)


def fold_weights(model: onnx.ModelProto, module: nn.Module) -> dict[str, Tensor]:
    """Computes values that depend only on weights: transposed matrices, and table rows at a constant index.

    In some models, such as ALBERT, layers share a matrix. Then these layers share the transposed matrix too.

    Args:
        model: The result of `trace`; changed in place.
        module: The traced module.

    Returns:
        The weights, by their input names in the changed graph.
    """
    graph = model.graph
    weights: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
    indices: dict[str, onnx.TensorProto] = {}
    first: dict[tuple[int, str], str] = {}  # the first output name of each computed value
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        source = weights.get(node.input[0]) if node.input else None
        value = None if source is None else _fold(node, source, indices)
        if value is not None:
            name, (operation, weights[name]) = node.output[0], value
            renamed[name] = first.setdefault((id(source), operation), name)
            weights[name] = weights[renamed[name]]
            continue
        if node.op_type == "Constant":
            indices[node.output[0]] = node.attribute[0].t
        elif source is not None and node.op_type == "Identity":  # PyTorch's exporter writes Identity for equal weights
            weights[node.output[0]] = source
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    for node in all_nodes(model):
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for name in first.values():
        kind = helper.np_dtype_to_tensor_dtype(weights[name].detach().numpy().dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, weights[name].shape))
    used = {name for node in all_nodes(model) for name in node.input}
    inputs = [value for value in graph.input if value.name in used or value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    return weights


def _fold(node: onnx.NodeProto, weight: Tensor, indices: Mapping[str, onnx.TensorProto]) -> tuple[str, Tensor] | None:
    """Returns a name for a node's operation, and the operation's result for the weight; None if the node must stay."""
    if node.op_type == "Transpose" and list(node.attribute[0].ints) == [1, 0]:
        return "transpose", weight.T
    if node.op_type == "Gather" and node.input[1] in indices and not any(it.i for it in node.attribute):
        index = numpy_helper.to_array(indices[node.input[1]])
        return None if index.ndim else (f"row {index}", weight[int(index)])
    return None
