"""The graphs of our own encoder return the same hidden states as the original code of each checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import golden_cases

from encserve_export import EncoderConfig, Exported, Source, Target, export_encoder
from encserve_export.check.agreement import relative_error
from encserve_export.core import names
from encserve_export.core.precision import Precision
from encserve_export.models import graphs
from encserve_export.models.own.init import random_encoder
from encserve_export.onnx_graph.run import OnnxEncoder

CHOICES: list[dict[str, Any]] = [
    {"norm": "pre", "final_norm": True, "activation": "gelu_tanh"},
    {"position": "none", "scale_embedding": True, "n_layers": 1, "activation": "gelu"},
    {"position": "learned", "position_offset": 2, "pad_token_id": 1},
    {"norm": "none", "residual": False, "attention_bias": False, "d_ff": 0, "n_layers": 1},
    {"norm": "none", "n_layers": 1},
    {"residual": False, "attention_bias": False},
    {"d_ff": 0, "norm": "pre"},
    {"max_sequence_tokens": 1, "n_heads": 1, "position": "learned"},
    {"input": "embeddings", "vocab_size": 0},
]


def export(config: EncoderConfig, models: Path, precision: Precision = "float32") -> Exported:
    target = Target(model_repository=models, name="m")
    return export_encoder(random_encoder(config, 0), Source("init", "random"), target, precision=precision)


def test_golden_rows_alone_and_padded(bundles: dict[str, Exported], golden: str) -> None:
    run = OnnxEncoder(bundles[golden].path, bundles[golden].manifest.graph)
    ids, want = golden_cases(golden)
    batch = np.full((len(ids), max(map(len, ids))), bundles[golden].manifest.encoder.pad_token_id)
    mask = np.zeros_like(batch)
    for row, sequence in enumerate(ids):
        batch[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    padded = run(batch, mask)
    for row, sequence in enumerate(ids):
        alone = run(sequence[None], np.ones_like(sequence)[None])[0]
        assert relative_error(alone, want[row]) <= 5e-5
        assert relative_error(padded[row, : len(sequence)], want[row]) <= 5e-5
        assert relative_error(padded[row, : len(sequence)], alone) <= 1e-5


def test_the_graph_has_the_declared_inputs_and_outputs(bundles: dict[str, Exported], golden: str) -> None:
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
    "precision", ["float32", *(pytest.param(it, marks=pytest.mark.system) for it in ("float16", "int8"))]
)
@pytest.mark.parametrize("fields", CHOICES)
def test_every_option_of_the_configuration_is_exported(
    tiny: EncoderConfig, models: Path, fields: dict[str, Any], precision: Precision
) -> None:
    config = EncoderConfig.from_mapping(dataclasses.asdict(tiny) | {"d_model": 32} | fields)
    parity = export(config, models, precision).manifest.parity
    if precision == "float32":
        assert parity.max_relative_error <= 5e-6
    else:
        assert parity.min_cosine >= {"float16": 0.99999, "int8": 0.99}[precision]
        assert parity.max_relative_error > 0, "the rows are rounded"


def test_both_graphs_share_one_file_of_weights(tiny: EncoderConfig, models: Path) -> None:
    exported = export(tiny, models)
    assert [file.path for file in exported.manifest.files] == ["inspect.onnx", "model.onnx", "model.onnx.data"]
    served, inspected = (_external(exported.path / name) for name in ("model.onnx", "inspect.onnx"))
    assert served == inspected
    matrices = {name: weight for name, weight in random_encoder(tiny, 0).named_parameters() if weight.dim() == 2}
    assert matrices.keys() <= served.keys()
    # The file contains each matrix once, and the table of sinusoidal positions.
    floats = sum(weight.numel() for weight in matrices.values()) + 24 * 16
    size = (exported.path / "model.onnx.data").stat().st_size
    assert 4 * floats <= size <= 4 * floats + len(served) * 4096


def _external(path: Path) -> dict[str, tuple[str, str]]:
    """Return the offset and the length of each weight in model.onnx.data, by the name of the weight."""
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "model.onnx.data"
            found[tensor.name] = (entries["offset"], entries["length"])
    return found


def test_the_served_graph_computes_nothing_for_inspections(tiny: EncoderConfig, models: Path) -> None:
    exported = export(tiny, models)
    served, inspected = (onnx.load(exported.path / name) for name in ("model.onnx", "inspect.onnx"))
    assert [value.name for value in served.graph.output] == ["last_hidden_state"]
    used = {name for node in served.graph.node for name in node.input} | {"last_hidden_state"}
    assert all(used.intersection(node.output) for node in served.graph.node)
    assert all(tensor.name in used for tensor in served.graph.initializer)
    outputs = [value.name for value in inspected.graph.output]
    assert outputs == [
        "hidden_state.0", "hidden_state.1", "last_hidden_state", "attention_weights.0", "attention_weights.1",
        "positions",
    ]  # fmt: skip
    graph = exported.manifest.inspect_graph
    assert outputs == [*graph.hidden_state_names, *graph.attention_weights_names, graph.positions_name]


def test_the_file_has_no_path_of_this_machine(bundles: dict[str, Exported], golden: str) -> None:
    content = (bundles[golden].path / "model.onnx").read_bytes()
    for path in (Path(graphs.__file__).parent, Path(torch.__file__).parent, bundles[golden].path.parent):
        assert str(path).encode() not in content
