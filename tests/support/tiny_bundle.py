"""Writes a bundle with a graph of a few nodes, without PyTorch.

The hidden state of a token is the token's vector plus the mean of all token vectors in the sequence.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from google.protobuf import json_format
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

D_MODEL, VOCAB_SIZE, LONGEST = 8, 50, 64


def table() -> Any:
    """Return the table of token vectors, float32 of shape (vocab, d_model)."""
    return np.random.default_rng(0).standard_normal((VOCAB_SIZE, D_MODEL)).astype(np.float32)


def expected_rows(ids: Any) -> Any:
    """Compute the expected hidden states for one sequence of ids, in the shape (seq, d_model)."""
    vectors = table()[ids]
    return vectors + vectors.mean(axis=0, keepdims=True)


def write_graph(path: Path) -> None:
    """Write the graph that computes hidden states (batch, seq, d_model) from ids and mask (batch, seq)."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in ("ids", "mask")]
    output = helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", "seq", D_MODEL])
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["vectors"]),
        # If the mask is 2, the token gets a hidden state but is left out of the mean.
        helper.make_node("Equal", ["mask", "one"], ["seen"]),
        helper.make_node("Cast", ["seen"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["real", "last"], ["column"]),
        helper.make_node("Mul", ["vectors", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "seq_axis"], ["total"], keepdims=1),
        helper.make_node("ReduceSum", ["column", "seq_axis"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Add", ["vectors", "mean"], ["rows"]),
    ]
    constants = [
        numpy_helper.from_array(table(), "table"),
        numpy_helper.from_array(np.array(1), "one"),
        numpy_helper.from_array(np.array([2]), "last"),
        numpy_helper.from_array(np.array([1]), "seq_axis"),
    ]
    graph = helper.make_graph(nodes, "tiny", inputs, [output], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def byte_products() -> tuple[bytes, Any, Any]:
    """Return a graph, an input and the expected output. The graph multiplies its uint8 input by int8 weights.

    The input has the shape (8, 64). The int32 output has the shape (8, 16). The sum of two products does not fit into
    16 bits. So the output is wrong if an engine saturates such sums.
    """
    random = np.random.default_rng(0)
    inputs, weights = random.integers(200, 256, (8, 64), np.uint8), random.integers(100, 128, (64, 16), np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["A", "weights"], ["Y"])],
        "bytes",
        [helper.make_tensor_value_info("A", TensorProto.UINT8, ["rows", 64])],
        [helper.make_tensor_value_info("Y", TensorProto.INT32, ["rows", 16])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString(), inputs, inputs.astype(np.int32) @ weights.astype(np.int32)


def inspect_parts(directory: Path) -> dict[str, Any]:
    """Return arguments for `write_bundle` that add a graph for inspections.

    In this graph, the attention weights are arbitrary numbers.
    """
    write_graph(directory / "inspect.onnx")
    model = onnx.load(directory / "inspect.onnx")
    for name in ("vectors", "column"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", None]))
    graph = manifest_pb2.InspectGraph(
        file="inspect.onnx", attention_weights_names=["column"], hidden_state_names=["vectors", "rows"]
    )
    return {
        "files": {"inspect.onnx": model.SerializeToString()},
        "inspect_graph": graph,
        "encoder__position": "none",
    }


def write_bundle(
    repository: Path,
    name: str = "tiny",
    version: str = "1",
    tokenizer: Tokenizer | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write the bundle REPOSITORY/<name>/<version>/, and return this directory.

    `files` are additional files. `changes` sets fields of the manifest. The name a__b means the field b of the
    message a.
    """
    directory = repository / name / version
    directory.mkdir(parents=True)
    write_graph(directory / "model.onnx")
    for path, content in files.items():
        (directory / path).write_bytes(content)
    text = None
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
        text = manifest_pb2.TextInput(tokenizer_file="tokenizer.json")
    manifest = manifest_pb2.Manifest(
        format_version=1,
        name=name,
        version=version,
        encoder=manifest_pb2.EncoderShape(
            d_model=D_MODEL, n_heads=1, n_layers=1, vocab_size=VOCAB_SIZE, max_sequence_tokens=LONGEST
        ),
        pooling=manifest_pb2.POOLING_CLS,
        graph=manifest_pb2.Graph(
            file="model.onnx",
            opset=17,
            input_ids_name="ids",
            attention_mask_name="mask",
            output_name="rows",
            precision="float32",
        ),
        text=text,
        files=[
            manifest_pb2.BundleFile(path=path.name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for path in sorted(directory.iterdir())
            if (data := path.read_bytes())
        ],
    )
    for field, value in changes.items():
        part: Any = manifest
        *parents, last = field.split("__")
        for parent in parents:
            part = getattr(part, parent)
        if isinstance(value, Message):
            getattr(part, last).CopyFrom(value)
        elif isinstance(value, Mapping):
            getattr(part, last).update(value)
        else:
            setattr(part, last, value)
    manifest.fingerprint = fingerprint(manifest)
    (directory / "manifest.json").write_text(json_format.MessageToJson(manifest, preserving_proto_field_name=True))
    return directory
