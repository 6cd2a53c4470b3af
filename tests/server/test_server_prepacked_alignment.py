"""Tests that prepacked weights are saved at aligned offsets.

A CPU kernel that loads from an unaligned address crashes the process.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from encserve_server.engine import onnx as onnx_engine
from encserve_server.engine.aligned import ALIGNMENT_BYTES

# The vectors of TinyBERT and rubert-tiny2 have 312 numbers: 1,248 bytes, which is not a multiple of 64.
WIDTHS = {"tiny": 24, "TinyBERT": 312, "MiniLM": 384}


def write_products(path: Path, width: int) -> Path:
    """Write a graph with a table of 19 vectors and two matrix products.

    The second product has a bias and is inside both branches of an If node.
    """
    rng = np.random.default_rng(0)
    sizes = {"table": (19, width), "up": (width, 72), "bias": (width,), "down": (72, width)}
    arrays = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    inner = {name: numpy_helper.from_array(arrays[name], name) for name in ("down", "bias")}
    y = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    product = helper.make_node("Gemm", ["h", "down", "bias"], ["y"])
    branch = helper.make_graph([product], "branch", [], y, list(inner.values()))
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Gemm", ["x", "up"], ["h"]),
        helper.make_node("ReduceMax", ["ids"], ["largest"], keepdims=0),
        helper.make_node("Cast", ["largest"], ["condition"], to=TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["rows"], then_branch=branch, else_branch=branch),
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["seq"])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["seq", width])],
        [numpy_helper.from_array(arrays[name], name) for name in ("table", "up")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def offsets(graph: Any) -> list[int]:
    """Return the offsets of all weights and prepacked weights of a saved model, including weights inside branches."""
    found = []
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "offset":
                found.append(int(entry.value))
            elif entry.key.startswith("prepacked_"):
                found += [int(block.split(";")[0]) for block in entry.value.split("|")[1:]]
    branches = [its.g for node in graph.node for its in node.attribute if its.HasField("g")]
    return [*found, *(offset for inner in branches for offset in offsets(inner))]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_saved_weights_are_aligned_and_give_the_same_rows(width: int, tmp_path: Path) -> None:
    graph = write_products(tmp_path / "products.onnx", width)
    (tmp_path / "saved").mkdir()
    saved = tmp_path / "saved" / "model.onnx"
    onnx_engine._write_prepacked(graph, saved)
    found = offsets(onnx.load(saved, load_external_data=False).graph)
    assert len(found) >= 5
    assert not [offset for offset in found if offset % ALIGNMENT_BYTES]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for ids in ([0], [7], [1, 18, 3], list(range(19))):
        rows = [
            ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(
                ["rows"], {"ids": np.array(ids)}
            )
            for path in (graph, saved)
        ]
        np.testing.assert_array_equal(*rows)
