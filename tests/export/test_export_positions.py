"""An inspection returns the model's position table. The tests use tables of several sizes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import json_format
from onnx import TensorProto, helper, numpy_helper

from encserve_export import EncoderConfig, Target, export_init
from encserve_export.check import agreement
from encserve_export.models.own.encoder import sinusoids
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_export.onnx_graph.traced import cut
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.repository.bundle import read_bundle

TINY = EncoderConfig(vocab_size=10, d_model=16, n_heads=2, d_ff=32, n_layers=1, max_sequence_tokens=8)


def positions_of(folder: Path) -> Any:
    bundle = read_bundle(folder)
    assert bundle.inspect_graph is not None
    graph = export_graph(folder)
    encoder = OnnxEncoder(bundle.inspect_graph.graph.path, graph)
    return encoder.outputs(["positions"], np.array([[1, 2]]), np.ones((1, 2), np.int64))[0]


def export_graph(folder: Path) -> manifest_pb2.Graph:
    return json_format.Parse((folder / "manifest.json").read_text(), manifest_pb2.Manifest()).graph


@pytest.mark.parametrize(
    ("longest", "vocab_size"),
    [(8, 10), (10, 10), (16, 10), (64, 64)],
    ids=["512 bytes", "as large as the token table", "1,024 bytes", "large, like the token table"],
)
def test_inspected_positions_are_the_sinusoids(longest: int, vocab_size: int, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, max_sequence_tokens=longest, vocab_size=vocab_size)
    path = export_init(config, 0, Target(model_repository=tmp_path, name="m")).path
    np.testing.assert_allclose(positions_of(path), sinusoids(longest, 16).numpy(), atol=1e-6)


def test_an_inspection_with_wrong_positions_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(TINY, position="learned", max_sequence_tokens=20, position_offset=2)
    check = agreement.check_inspection

    def check_with_a_shifted_table(*arguments: Any, longest: int) -> None:
        folder, graph, inspect_graph, reference = arguments
        inspection = dataclasses.replace(reference.inspection, first_position=1)
        check(folder, graph, inspect_graph, dataclasses.replace(reference, inspection=inspection), longest=longest)

    monkeypatch.setattr(agreement, "check_inspection", check_with_a_shifted_table)
    exported = export_init(config, 0, Target(model_repository=tmp_path, name="m"))
    assert not exported.manifest.HasField("inspect_graph")
    assert "gives other positions than PyTorch" in exported.notes["inspection"]


def test_a_cut_graph_keeps_the_values_that_branches_use() -> None:
    y = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    branches = [
        helper.make_graph([helper.make_node("MatMul", ["x", name], ["y"])], name, [], y) for name in ("first", "second")
    ]
    nodes = [helper.make_node("If", ["flag"], ["rows"], then_branch=branches[0], else_branch=branches[1])]
    graph = helper.make_graph(
        nodes,
        "branches",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["seq", 2]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["seq", 2])],
        [numpy_helper.from_array(torch.eye(2).numpy(), name) for name in ("first", "second", "unused")],
    )
    part = cut(helper.make_model(graph), "rows")
    assert sorted(tensor.name for tensor in part.graph.initializer) == ["first", "second"]
