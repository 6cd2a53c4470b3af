"""Reads a user's ONNX file, checks that the model is an encoder, and finds its inputs and its output."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import NodeProto, TensorProto, ValueInfoProto, inliner

from encserve_export.core import names
from encserve_export.core.errors import OnnxFileError, OnnxInterfaceError
from encserve_export.core.names import TOKEN_TYPE_IDS
from encserve_export.onnx_graph.nodes import all_tensors, constants, type_name

# ONNX has two names for its default operator set.
DEFAULT_DOMAINS = ("", "ai.onnx")
_AXES = ("batch", "seq")
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
# The types of stored weights, from the most to the least precise. Integers of 32 bits and more are indices and shapes,
# not weights.
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
# These operators do not change token ids.
_SAME_IDS = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
# These operators keep the order of the rows of an embedding table.
_SAME_ROWS = ("Identity", "Cast", "DequantizeLinear")
_MAX_DESCRIPTION = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of the inputs and of the output, as the user gave them, or the default names.

    Attributes:
        input_ids: The input of token ids.
        attention_mask: The input that marks the real tokens.
        token_type_ids: The input that the server fills with zeros. None means the input "token_type_ids", if the model
            has an input of this name.
        output: The output of hidden states. None means the only floating-point output with 3 axes. If several outputs
            have 3 axes, None means "last_hidden_state".
    """

    input_ids: str = names.INPUT_IDS
    attention_mask: str = names.ATTENTION_MASK
    token_type_ids: str | None = None
    output: str | None = None


@dataclasses.dataclass(frozen=True)
class Interface:
    """The names of the inputs and of the output that the server uses.

    Attributes:
        input_ids: The input of token ids, int64 (batch, seq). For a model that takes vectors, this is the input of
            vectors, float32 (batch, seq, width); see `vector_width`.
        attention_mask: int64 (batch, seq).
        token_type_ids: int64 (batch, seq), filled with zeros; empty if the model has no such input.
        output: float32 (batch, seq, d_model).
    """

    input_ids: str
    attention_mask: str
    token_type_ids: str
    output: str


@dataclasses.dataclass(frozen=True)
class Port:
    """The declaration of an input or an output in an ONNX file.

    Attributes:
        name: The name of the input or output.
        data_type: A TensorProto.DataType; 0 if the file declares no tensor type.
        axes: The size of each fixed axis, and the name of each dynamic axis. A dynamic axis without a name is "?".
            Empty if the file declares no shape.
    """

    name: str
    data_type: int
    axes: tuple[int | str, ...]

    def __str__(self) -> str:
        kind = type_name(self.data_type) if self.data_type else "of no tensor type"
        return f"{self.name} {kind} ({', '.join(map(str, self.axes))})"


def read_model(path: Path) -> onnx.ModelProto:
    """Parses an ONNX file, but does not load weights from other files.

    Raises:
        OnnxFileError: The file is unreadable, is not ONNX, or is a training graph.
    """
    try:
        model = onnx.load_model(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise OnnxFileError(f"{path} cannot be read: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        raise OnnxFileError(f"{path} is not an ONNX file") from error
    if not model.ir_version or not model.HasField("graph"):
        raise OnnxFileError(f"{path} is not an ONNX file: it has no graph")
    if not _is_text(model):
        raise OnnxFileError(f"{path} is not an ONNX file: a name in it is not UTF-8")
    if model.training_info:
        raise OnnxFileError(f"{path} is a training graph: it has training_info; export it for inference")
    return model


def opset(model: onnx.ModelProto) -> int:
    """Returns the version of the default operator set.

    Raises:
        OnnxFileError: The file does not declare exactly one version.
    """
    versions = [it.version for it in model.opset_import if it.domain in DEFAULT_DOMAINS]
    if len(versions) != 1:
        imports = ", ".join(f"{it.domain or 'ai.onnx'} {it.version}" for it in model.opset_import)
        raise OnnxFileError(
            f"the file must declare exactly one version of the operator set ai.onnx; was {imports or 'none'}"
        )
    return int(versions[0])


def find_interface(model: onnx.ModelProto, names: Names) -> Interface:
    """Finds the inputs and the output of an encoder, and checks the types and shapes that the file declares.

    Raises:
        OnnxInterfaceError: The inputs or outputs do not fit an encoder. The message lists these inputs or outputs.
    """
    # Older files list their weights as inputs too.
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: _port(value) for value in model.graph.input if value.name not in weights}
    outputs = [_port(value) for value in model.graph.output]
    types = names.token_type_ids or (TOKEN_TYPE_IDS if TOKEN_TYPE_IDS in inputs else "")
    wanted = {"input_ids": names.input_ids, "attention_mask": names.attention_mask, "token_type_ids": types}
    used = {role: name for role, name in wanted.items() if name}
    _check_names(used, inputs)
    _check_inputs([inputs[name] for role, name in used.items() if role != "input_ids" or not _width(inputs[name])])
    output = _choose_output(outputs, names.output)
    _check_output(output)
    return Interface(names.input_ids, names.attention_mask, types, output.name)


def vector_width(model: onnx.ModelProto, interface: Interface) -> int:
    """Returns the width of the vectors that a model takes in place of token ids; 0 if the model takes token ids."""
    return next(_width(_port(value)) for value in model.graph.input if value.name == interface.input_ids)


def precision_of(model: onnx.ModelProto) -> str:
    """Returns the least precise type of the stored matrices, such as "float32", "float16" or "int8"."""
    stored = {tensor.data_type for tensor in all_tensors(model) if len(tensor.dims) >= 2}
    found = [kind for kind in _WEIGHTS if kind in stored]
    return type_name(found[-1]) if found else "float32"


def count_parameters(model: onnx.ModelProto) -> int:
    """Returns the number of parameters in all weights. Scalars are not counted: they are constants of a formula."""
    return sum(math.prod(it.dims) for it in all_tensors(model) if it.dims and it.data_type in _WEIGHTS)


def description(model: onnx.ModelProto) -> str:
    """Returns the program that wrote the file, such as "pytorch 2.13.0"."""
    text = " ".join(f"{model.producer_name} {model.producer_version}".split())
    return text[:_MAX_DESCRIPTION] or "no producer named"


def embedding_rows(model: onnx.ModelProto, input_ids: str) -> int | None:
    """Returns the number of rows of the smallest table in which nodes look up token ids; None without such a table."""
    if model.functions:  # an ONNX function may contain the lookup
        with contextlib.suppress(Exception):  # inlining may raise any exception; the search then may find no table
            model = inliner.inline_local_functions(model)
    return min((int(dims[0]) for dims in token_tables(model, input_ids).values() if len(dims) == 2), default=None)


def token_tables(model: onnx.ModelProto, input_ids: str) -> dict[str, Sequence[int]]:
    """Returns the shapes of the tables in which nodes look up token ids, by the name of the table in the node."""
    graph = model.graph
    ids = {input_ids}
    tables: dict[str, Sequence[int]] = {tensor.name: tensor.dims for tensor in graph.initializer}
    found = {}
    for node in graph.node:  # ONNX stores nodes in topological order
        tables |= {name: tensor.dims for name, tensor in constants(node).items()}
        if node.op_type in _SAME_IDS and node.input[:1] and node.input[0] in ids:
            ids.update(node.output[:1])
        elif node.op_type in _SAME_ROWS and node.input[:1] and node.input[0] in tables:
            tables |= dict.fromkeys(node.output[:1], tables[node.input[0]])
        name = _looked_up(node, ids)
        if name in tables:
            found[name] = tables[name]
    return found


def _is_text(message: Message) -> bool:
    """Returns whether all strings of a message are valid UTF-8. protobuf returns an invalid string as bytes."""
    for field, value in message.ListFields():
        values = [value] if isinstance(value, str | bytes | Message) else value
        if field.type == FieldDescriptor.TYPE_STRING and any(isinstance(it, bytes) for it in values):
            return False
        if field.type == FieldDescriptor.TYPE_MESSAGE and not all(map(_is_text, values)):
            return False
    return True


def _port(value: ValueInfoProto) -> Port:
    if not value.type.HasField("tensor_type"):
        return Port(value.name, 0, ())
    tensor = value.type.tensor_type
    axes = (int(it.dim_value) if it.HasField("dim_value") else it.dim_param or "?" for it in tensor.shape.dim)
    return Port(value.name, tensor.elem_type, tuple(axes))


def _width(port: Port) -> int:
    """Returns the width of an input that takes vectors, float32 (batch, seq, width); 0 for any other input."""
    axes = port.axes
    is_vectors = port.data_type == TensorProto.FLOAT and len(axes) == 3 and not any(type(it) is int for it in axes[:2])
    return axes[2] if is_vectors and isinstance(axes[2], int) else 0


def _listed(ports: Sequence[Port]) -> str:
    return ", ".join(map(str, ports)) or "none"


def _check_names(used: dict[str, str], inputs: dict[str, Port]) -> None:
    available = f"the model's inputs are {_listed(list(inputs.values()))}"
    if len(set(used.values())) != len(used):
        raise OnnxInterfaceError(
            f"the inputs must have different names; the given names are {', '.join(used.values())}; {available}"
        )
    missing = {role: name for role, name in used.items() if name not in inputs}
    if missing:
        wanted = " and ".join(missing.values())
        flags = " and ".join(f"--{role.replace('_', '-')}-name" for role in missing)
        raise OnnxInterfaceError(f"the model has no input {wanted}; {available}. Name the right input with {flags}")
    surplus = [port for name, port in inputs.items() if name not in used.values()]
    if surplus:
        raise OnnxInterfaceError(
            f"the model has inputs that a server does not fill: {_listed(surplus)}. A server gives input_ids, "
            "attention_mask and zeros for token_type_ids. Wrap the model in a module that computes the other "
            "inputs, and export this module"
        )


def _check_inputs(ports: Sequence[Port]) -> None:
    for port in ports:
        if port.data_type != TensorProto.INT64:
            raise OnnxInterfaceError(
                f"the input {port} must be int64; export the model again with int64 ids (torch.long)"
            )
        if len(port.axes) != len(_AXES):
            raise OnnxInterfaceError(f"the input {port} has rank {len(port.axes)}; it must have 2: (batch, seq)")
    fixed = [
        f"axis {axis} ({_AXES[axis]}) of {port.name} is fixed to {size}"
        for port in ports
        for axis, size in enumerate(port.axes)
        if isinstance(size, int)
    ]
    if fixed:
        axes = ", ".join(f'"{port.name}": {{0: "batch", 1: "seq"}}' for port in ports)
        raise OnnxInterfaceError(
            f"{'; '.join(fixed)}. Batches and lengths vary: export the model again with dynamic axes, in PyTorch "
            f"torch.onnx.export(..., dynamic_axes={{{axes}}}, dynamo=False)"
        )


def _choose_output(outputs: Sequence[Port], name: str | None) -> Port:
    available = f"its outputs are {_listed(outputs)}"
    if name is not None:
        found = [port for port in outputs if port.name == name]
        if not found:
            raise OnnxInterfaceError(f"the model has no output {name}; {available}")
        return found[0]
    floats = [port for port in outputs if port.data_type in _FLOATS]
    rows = [port for port in floats if len(port.axes) == 3]
    if len(rows) == 1:
        return rows[0]
    usual = [port for port in rows if port.name == names.OUTPUT]
    if usual:
        return usual[0]
    if rows:
        raise OnnxInterfaceError(
            f"several outputs could be the hidden states: {_listed(rows)}; choose one with --output-name"
        )
    if any(len(port.axes) == 2 for port in floats):
        raise OnnxInterfaceError(_pooled(available))
    raise OnnxInterfaceError(f"no output is float32 (batch, seq, d_model); {available}")


def _check_output(port: Port) -> None:
    if len(port.axes) == 2:
        raise OnnxInterfaceError(_pooled(f"the output is {port}"))
    if len(port.axes) != 3:
        raise OnnxInterfaceError(f"the output {port} has rank {len(port.axes)}; it must have 3: (batch, seq, d_model)")
    if port.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        raise OnnxInterfaceError(
            f"the output {port} must be float32. Export the model in float32. Or keep the weights in "
            f"{type_name(port.data_type)}, and end the graph with a Cast to float32 (keep_io_types=True in "
            "onnxconverter-common)"
        )
    if port.data_type != TensorProto.FLOAT:
        raise OnnxInterfaceError(f"the output {port} must be float32; export the model in float32")


def _pooled(outputs: str) -> str:
    return (
        f"the model pools: {outputs}, one vector for each sequence. A bundle needs the hidden states before pooling, "
        "(batch, seq, d_model). Export the model without its pooling, and name the pooling with --pooling"
    )


def _looked_up(node: NodeProto, ids: set[str]) -> str:
    """Returns the name of the table in which a node looks up token ids; empty if the node looks up other values."""
    if node.op_type == "Gather" and node.domain in DEFAULT_DOMAINS and len(node.input) == 2:
        axis = next((it.i for it in node.attribute if it.name == "axis"), 0)
        return node.input[0] if node.input[1] in ids and axis in (0, -2) else ""
    # ONNX Runtime's optimizer writes EmbedLayerNormalization. The first inputs of this operator are token ids, token
    # types and the token table.
    if node.op_type == "EmbedLayerNormalization" and len(node.input) > 2 and node.input[0] in ids:
        return str(node.input[2])
    return ""
