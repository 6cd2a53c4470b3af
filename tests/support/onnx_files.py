"""Makes small ONNX encoders. The names and the structure of the graphs are as in files from other exporters."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from encserve_export import Encoder, EncoderConfig
from encserve_export.models.own.init import random_encoder

D_MODEL, VOCAB_SIZE, POSITIONS = 8, 50, 40
INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT

Change = Callable[[onnx.ModelProto], None]


def value(name: str, kind: int = INT64, axes: Sequence[int | str | None] | None = ("batch", "seq")) -> Any:
    """Return the declaration of a graph's input or output."""
    return helper.make_tensor_value_info(name, kind, axes)


def random_table(rows: int, seed: int = 0, width: int = D_MODEL) -> Any:
    """Return a random float32 table of shape (rows, width)."""
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def build(*, with_types: bool = False, positions: int = POSITIONS, opset: int = 17) -> onnx.ModelProto:
    """Build a small encoder.

    x_i is the sum of the token vector and the position vector of token i. The hidden state of token i is x_i plus the
    mean of all x. Tests find nodes by name with `node_of`, for example "words", "placed", "mean" and "rows".
    """
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["words"], name="words"),
        node("Shape", ["input_ids"], ["shape"], name="shape"),
        node("Gather", ["shape", "one"], ["seq"], name="seq"),
        node("Slice", ["places", "zero", "seq", "zero"], ["first"], name="first"),
        node("Add", ["words", "first"], ["placed"], name="placed"),
        node("Cast", ["attention_mask"], ["real"], name="real", to=FLOAT),
        node("Unsqueeze", ["real", "two"], ["column"], name="column"),
        node("Mul", ["placed", "column"], ["kept"], name="kept"),
        node("ReduceSum", ["kept", "one"], ["total"], name="total", keepdims=1),
        node("ReduceSum", ["column", "one"], ["count"], name="count", keepdims=1),
        node("Div", ["total", "count"], ["mean"], name="mean"),
        node("Add", ["placed", "mean"], ["rows"], name="rows"),
    ]
    weights = {"table": random_table(VOCAB_SIZE), "places": random_table(positions, 1)}
    inputs = [value("input_ids"), value("attention_mask")]
    if with_types:
        nodes[0].output[0] = "plain_words"
        nodes.insert(1, node("Gather", ["kinds", "token_type_ids"], ["kind"], name="kind"))
        nodes.insert(2, node("Add", ["plain_words", "kind"], ["words"], name="typed"))
        weights["kinds"] = random_table(2, 2)
        inputs.append(value("token_type_ids"))
    numbers = {"zero": [0], "one": [1], "two": [2]}
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    constants += [numpy_helper.from_array(np.array(number), name) for name, number in numbers.items()]
    outputs = [value("rows", FLOAT, ["batch", "seq", D_MODEL])]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, constants)
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=9,
        producer_name="by hand",
        producer_version="7",
    )


def expected_rows_with_types(model: onnx.ModelProto, ids: Any) -> Any:
    """Return the hidden states that `build(with_types=True)` computes for a sequence. Each token has the type 0.

    `ids` has the shape (seq,). The hidden states have the shape (seq, d_model).
    """
    table, kinds, places = (numpy_helper.to_array(tensor_of(model, name)) for name in ("table", "kinds", "places"))
    placed = table[ids] + kinds[0] + places[: len(ids)]  # (seq, d_model)
    return placed + placed.mean(axis=0)


def node_of(model: onnx.ModelProto, name: str) -> Any:
    """Return the node with this name."""
    return next(node for node in model.graph.node if node.name == name)


def tensor_of(model: onnx.ModelProto, name: str) -> Any:
    """Return the initializer with this name."""
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model and return its path."""
    onnx.save(model, path)
    return path


def save_with_data(model: onnx.ModelProto, path: Path, location: str = "weights.bin") -> Path:
    """Write a model to a file, and write the weight tables to a second file."""
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=100)
    return path


def point_elsewhere(path: Path, name: str = "table", **entries: str) -> None:
    """Change where an ONNX file from `save_with_data` expects the data of the tensor `name`.

    `entries` are new values of location, offset or length.
    """
    model = onnx.load(path, load_external_data=False)
    for entry in tensor_of(model, name).external_data:
        entry.value = entries.pop(entry.key, entry.value)
    for key, text in entries.items():
        tensor_of(model, name).external_data.add(key=key, value=text)
    onnx.save(model, path)


class Renamed(nn.Module):
    """An encoder with token types as an extra input, and the first token's hidden state as an extra output."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.kinds = nn.Embedding(2, encoder.config.d_model)

    def forward(self, tokens: torch.Tensor, real: torch.Tensor, segments: torch.Tensor) -> Any:
        """Return all hidden states, and the hidden states of the first tokens.

        The shapes are (batch, seq, d_model) and (batch, d_model).
        """
        rows = self.encoder(tokens, real) + self.kinds(segments)  # (batch, seq, d_model)
        return rows, rows[:, 0]


def export_torch(path: Path, config: EncoderConfig) -> Path:
    """Export the module `Renamed` with PyTorch.

    The inputs are "tokens" (the ids), "real" (the mask) and "segments" (the token types). The outputs are "hidden" and
    "pooled".
    """
    torch.manual_seed(0)
    module = Renamed(random_encoder(config, 0)).eval()
    ids = torch.tensor([[0, 0, 0], [0, 0, 0]])  # (batch, seq)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])  # (batch, seq)
    names = ["tokens", "real", "segments"]
    with warnings.catch_warnings():
        # PyTorch's tracing exporter (dynamo=False) raises a DeprecationWarning.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            module,
            (ids, mask, torch.zeros_like(ids)),
            str(path),
            input_names=names,
            output_names=["hidden", "pooled"],
            dynamic_axes={name: {0: "n", 1: "length"} for name in [*names, "hidden"]} | {"pooled": {0: "n"}},
            opset_version=17,
            dynamo=False,
        )
    return path
