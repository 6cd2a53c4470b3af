"""Writes a `Reference`, a model in PyTorch, as one or two ONNX graphs.

The served graph computes the last hidden states. If the model has an `Inspection`, a second graph returns the hidden
states and the attention weights of all blocks. The server uses the second graph for inspections.

For two graphs, the model is traced once, with all outputs. The served graph is the part of this trace that computes
the last hidden states. So both graphs compute the same numbers and share one file of weights.
"""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

import onnx
import torch
from onnx import helper, numpy_helper

from encserve_export.core import names
from encserve_export.core.errors import FULL_DISK, UnsupportedModelError, first_line
from encserve_export.core.precision import Precision
from encserve_export.core.quiet import quiet
from encserve_export.models.reference import LONGEST_AT_ONCE, Inspection, Reference
from encserve_export.onnx_graph import external, interface, query_blocks, traced
from encserve_export.onnx_graph.convert import convert
from encserve_proto.bundle.v1 import manifest_pb2

# PyTorch's exporters, the preferred one first. Tracing is several times faster than dynamo, but fails for the masks of
# some models.
Exporter = Literal["tracing with inspection", "tracing", "dynamo"]
EXPORTERS: tuple[Exporter, ...] = get_args(Exporter)
_AXES = {0: "batch", 1: "seq"}
_ATTENTION_AXES = {0: "batch", 2: "seq", 3: "seq"}


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The graphs of a bundle.

    Attributes:
        files: The written files, the served graph first.
        graph: The served graph's interface.
        inspect_graph: The interface of the graph for inspections, or None.
        n_parameters: The number of parameters, counted before the weights are converted to the precision.
    """

    files: tuple[Path, ...]
    graph: manifest_pb2.Graph
    inspect_graph: manifest_pb2.InspectGraph | None
    n_parameters: int


def write_graphs(
    reference: Reference, folder: Path, exporter: Exporter, *, precision: Precision, max_sequence_tokens: int
) -> Graphs:
    """Write the graphs of a model, and their weights in a file in the same folder.

    Args:
        reference: The model. For "tracing with inspection", the model must have an `inspection`.
        folder: The folder of the bundle.
        exporter: PyTorch's exporter, one of `EXPORTERS`.
        precision: The precision of the weights in both graphs. The precision does not change the types of inputs and
            outputs.
        max_sequence_tokens: The longest sequence to serve, in tokens.

    Raises:
        UnsupportedModelError: The exporter fails for this model, or the graph cannot be converted to the precision.
    """
    path, data_path, inspect_path = folder / names.FILE, folder / names.DATA_FILE, folder / names.INSPECT_FILE
    inspection = reference.inspection if exporter == "tracing with inspection" else None
    try:
        with quiet(), torch.no_grad():
            whole = _run_dynamo(reference, path) if exporter == "dynamo" else _trace(reference, inspection, folder)
    except Exception as error:  # a user's model may raise any exception
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise  # on a full disk, the other exporters would fail too
        raise UnsupportedModelError(
            f"PyTorch cannot write {reference.description} as ONNX ({exporter}): {first_line(error)}"
        ) from error
    n_parameters = interface.count_parameters(whole)
    positions_name = "" if inspection is None else _add_positions(whole, inspection, max_sequence_tokens)
    graph = _describe(reference, whole, precision)
    if precision != "float32":
        onnx.save_model(whole, path)
        whole = convert(
            path,
            graph,
            vocab_size=reference.vocab_size,
            width=reference.width,
            longest=max_sequence_tokens,
            precision=precision,
        )
        with data_path.open("wb") as data:
            external.move_weights(whole, data)
    served = traced.cut(whole, names.OUTPUT)
    if max_sequence_tokens > LONGEST_AT_ONCE and reference.shape.n_heads:
        element_type = onnx.TensorProto.FLOAT16 if precision == "float16" else onnx.TensorProto.FLOAT
        query_blocks.block_queries(served, names.ATTENTION_MASK, reference.shape.n_heads, element_type)
    onnx.save_model(served, path)
    if inspection is None:
        return Graphs((path, data_path), graph, None, n_parameters)
    onnx.save_model(whole, inspect_path)
    inspect_graph = manifest_pb2.InspectGraph(
        file=names.INSPECT_FILE,
        attention_weights_names=inspection.attention_weights_names,
        hidden_state_names=inspection.hidden_state_names,
        positions_name=positions_name,
    )
    return Graphs((path, inspect_path, data_path), graph, inspect_graph, n_parameters)


def refuse_control_flow(reference: Reference) -> None:
    """Refuse a module that branches on the values of its inputs, because a trace would contain only one branch.

    Raises:
        UnsupportedModelError: torch.export fails for the module. The error text contains the reason.
    """
    axes = dict.fromkeys(_AXES, torch.export.Dim.AUTO)
    try:
        with quiet(), torch.no_grad():
            torch.export.export(reference.module, reference.example(), dynamic_shapes=(axes, axes), strict=False)
    except Exception as error:  # a user's module may raise any exception
        raise UnsupportedModelError(
            f"PyTorch cannot export {reference.description} as one graph: {first_line(error)}. Use tensor operations, "
            "such as torch.where, instead of branches on the values of tensors. torch.export.export(module, (inputs, "
            "mask)) shows the line of the branch"
        ) from error


def _trace(reference: Reference, inspection: Inspection | None, folder: Path) -> onnx.ModelProto:
    outputs = {names.OUTPUT: _AXES}
    module = reference.module
    if inspection is not None:
        module = inspection.module
        outputs = dict.fromkeys(inspection.hidden_state_names, _AXES)
        outputs |= dict.fromkeys(inspection.attention_weights_names, _ATTENTION_AXES)
    inputs = reference.input_names
    model = traced.trace(
        module,
        reference.example(),
        folder / names.FILE,
        inputs=inputs,
        outputs=list(outputs),
        dynamic_axes=dict.fromkeys(inputs, _AXES) | outputs,
    )
    traced.lift_constants(model)
    with (folder / names.DATA_FILE).open("wb") as data:
        traced.take_weights(model, traced.fold_weights(model, module), data)
        external.move_weights(model, data)
    return model


def _run_dynamo(reference: Reference, path: Path) -> onnx.ModelProto:
    dynamic = dict.fromkeys(_AXES, torch.export.Dim.DYNAMIC)
    torch.onnx.export(
        reference.module,
        reference.example(),
        str(path),
        input_names=reference.input_names,
        output_names=[names.OUTPUT],
        opset_version=names.OPSET,
        dynamo=True,
        dynamic_shapes=(dynamic,) * len(reference.input_names),
        verbose=False,
    )
    model: onnx.ModelProto = onnx.load(path)
    with path.with_name(names.DATA_FILE).open("wb") as data:
        external.move_weights(model, data)
    return model


def _add_positions(model: onnx.ModelProto, inspection: Inspection, max_sequence_tokens: int) -> str:
    """Add an output for the position table. Return the output's name, or "" for a model without a table."""
    if not inspection.position_table:
        return ""
    table, graph = inspection.positions, model.graph
    source = inspection.position_table
    if all(tensor.name != source for tensor in graph.initializer):  # PyTorch's exporter drops the names of buffers
        source = f"{names.POSITIONS}.table"
        graph.initializer.append(numpy_helper.from_array(table.numpy(), source))
    first = inspection.first_position
    ends = (first, first + max_sequence_tokens)
    limits = [numpy_helper.from_array(torch.tensor([end]).numpy(), f"{names.POSITIONS}.{end}") for end in ends]
    graph.initializer.extend(limits)
    inputs = [source, *(limit.name for limit in limits)]
    graph.node.append(helper.make_node("Slice", inputs, [names.POSITIONS], names.POSITIONS))
    shape = [max_sequence_tokens, table.shape[1]]
    graph.output.append(helper.make_tensor_value_info(names.POSITIONS, onnx.TensorProto.FLOAT, shape))
    return names.POSITIONS


def _describe(reference: Reference, model: onnx.ModelProto, precision: Precision) -> manifest_pb2.Graph:
    return manifest_pb2.Graph(
        file=names.FILE,
        opset=interface.opset(model),
        input_ids_name="" if reference.width else reference.input_name,
        embeddings_name=reference.input_name if reference.width else "",
        attention_mask_name=names.ATTENTION_MASK,
        output_name=names.OUTPUT,
        precision=precision,
        token_type_ids_name=names.TOKEN_TYPE_IDS if reference.has_token_types else "",
    )
