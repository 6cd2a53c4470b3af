"""The ONNX file computes what the checkpoint's original implementation computed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import golden_cases

from encserve_export import EncoderConfig, Exported
from encserve_export.check.agreement import check_inspection, check_parity, relative_error
from encserve_export.ground import names
from encserve_export.models.own import trace
from encserve_export.models.own.init import random_encoder

Run = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float32]]


def open_graph(path: Path) -> Run:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})[
            0
        ]
        return rows

    return run


def test_golden_rows_alone_and_padded(bundles: dict[str, Exported], golden: str) -> None:
    run = open_graph(bundles[golden].path / "model.onnx")
    ids, want = golden_cases(golden)
    longest = max(map(len, ids))
    batch = np.full((len(ids), longest), bundles[golden].manifest.encoder.pad_token_id)
    mask = np.zeros_like(batch)
    for row, sequence in enumerate(ids):
        batch[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    padded = run(batch, mask)
    for row, sequence in enumerate(ids):
        alone = run(sequence[None], np.ones_like(sequence)[None])[0]
        assert relative_error(alone, want[row]) <= 5e-5
        assert relative_error(padded[row, : len(sequence)], want[row]) <= 5e-5
        assert relative_error(padded[row, : len(sequence)], alone) <= 1e-5


def test_the_interface(bundles: dict[str, Exported], golden: str) -> None:
    model = onnx.load(bundles[golden].path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    described = {}
    for value in (*model.graph.input, *model.graph.output):
        tensor = value.type.tensor_type
        shape = [dimension.dim_param or dimension.dim_value for dimension in tensor.shape.dim]
        described[value.name] = (onnx.TensorProto.DataType.Name(tensor.elem_type), shape)
    assert described["input_ids"] == ("INT64", ["batch", "seq"])
    assert described["attention_mask"] == ("INT64", ["batch", "seq"])
    kind, shape = described["last_hidden_state"]
    assert (kind, len(shape)) == ("FLOAT", 3)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", names.OPSET)]


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "pre", "final_norm": True, "activation": "gelu_tanh"},
        {"position": "none", "scale_embedding": True, "n_layers": 1},
        {"position": "learned", "position_offset": 2, "pad_token_id": 1, "pad_takes_no_position": True},
        {"norm": "none", "residual": False, "attention_bias": False, "d_ff": 0, "n_layers": 1},
        {"norm": "none", "n_layers": 1},
        {"residual": False, "attention_bias": False},
        {"d_ff": 0, "norm": "pre"},
        {"max_sequence_tokens": 1, "n_heads": 1, "embedding_norm": True, "n_token_types": 3, "position": "learned"},
    ],
)
def test_every_choice_in_the_formula_survives(tiny: EncoderConfig, tmp_path: Path, fields: dict[str, object]) -> None:
    encoder = random_encoder(EncoderConfig.from_mapping(dataclasses.asdict(tiny) | fields), 0)
    graphs = trace.write_graphs(encoder, tmp_path)
    parity = check_parity(encoder, graphs.files[0])
    check_inspection(encoder, graphs)
    assert parity.max_relative_error <= 5e-6


def test_both_graphs_share_one_file_of_weights(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    graphs = trace.write_graphs(encoder, tmp_path)
    assert [path.name for path in graphs.files] == ["model.onnx", "inspect.onnx", "model.onnx.data"]
    assert sorted(tmp_path.iterdir()) == sorted(graphs.files)
    used = [_external(path) for path in graphs.files[:2]]
    assert used[0] == used[1]
    matrices = {name for name, weight in encoder.named_parameters() if weight.dim() == 2}
    assert matrices <= used[0].keys()
    # Every matrix once, and the sinusoids.
    floats = sum(weight.numel() for weight in encoder.parameters() if weight.dim() == 2) + 24 * 16
    assert 4 * floats <= graphs.files[2].stat().st_size <= 4 * floats + len(used[0]) * 4096


def test_the_graph_does_nothing_that_only_an_inspection_needs(tiny: EncoderConfig, tmp_path: Path) -> None:
    graphs = trace.write_graphs(random_encoder(tiny, 0), tmp_path)
    model, inspected = (onnx.load(path) for path in graphs.files[:2])
    assert [value.name for value in model.graph.output] == ["last_hidden_state"]
    used = {name for node in model.graph.node for name in node.input} | {"last_hidden_state"}
    assert all(used.intersection(node.output) for node in model.graph.node)
    assert all(tensor.name in used for tensor in model.graph.initializer)
    names = [value.name for value in inspected.graph.output]
    assert names == [
        "hidden_state.0", "hidden_state.1", "last_hidden_state", "attention_weights.0", "attention_weights.1",
        "positions",
    ]  # fmt: skip
    assert names == [*graphs.hidden_state_names, *graphs.attention_weights_names, graphs.positions_name]


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, 4), ({"norm": "pre"}, 4), ({"d_ff": 0}, 2), ({"residual": False}, 0), ({"norm": "none", "n_layers": 3}, 6)],
)
def test_residual_connections_are_named(
    tiny: EncoderConfig, tmp_path: Path, fields: dict[str, object], count: int
) -> None:
    encoder = random_encoder(EncoderConfig.from_mapping(dataclasses.asdict(tiny) | fields), 0)
    graphs = trace.write_graphs(encoder, tmp_path)
    assert len(graphs.residual_nodes) == count
    nodes = {node.name: node for node in onnx.load(graphs.files[1]).graph.node}
    assert all(nodes[name].op_type == "Add" for name in graphs.residual_nodes)


def test_embeddings_can_be_the_input(tiny: EncoderConfig, tmp_path: Path) -> None:
    fields = dataclasses.asdict(tiny) | {"input": "embeddings", "vocab_size": 0}
    encoder = random_encoder(EncoderConfig.from_mapping(fields), 0)
    graphs = trace.write_graphs(encoder, tmp_path)
    assert graphs.input_name == "inputs_embeds"
    assert check_parity(encoder, graphs.files[0]).max_relative_error <= 5e-6
    check_inspection(encoder, graphs)


def _external(path: Path) -> dict[str, tuple[str, str]]:
    """Offset and length of each weight that lies outside the graph."""
    model = onnx.load(path, load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "model.onnx.data"
            found[tensor.name] = (entries["offset"], entries["length"])
    return found


def test_no_path_of_the_machine_is_in_the_file(bundles: dict[str, Exported], golden: str) -> None:
    content = (bundles[golden].path / "model.onnx").read_bytes()
    for path in (Path(trace.__file__).parent, Path(torch.__file__).parent, bundles[golden].path.parent):
        assert str(path).encode() not in content
