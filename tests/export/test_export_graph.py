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
from safetensors.numpy import load_file

from encserve_export import EncoderConfig, Exported, graph
from encserve_export.init import random_encoder
from encserve_export.verify import check_parity, relative_error

Run = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float32]]


def open_graph(path: Path) -> Run:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})[
            0
        ]
        return rows

    return run


def test_golden_rows_alone_and_padded(bundles: dict[str, Exported], data: Path, golden: str) -> None:
    run = open_graph(bundles[golden].path / "model.onnx")
    cases = load_file(data / golden / "cases.safetensors")
    ids = [cases[name] for name in sorted(cases) if name.startswith("ids.")]
    want = [cases[name] for name in sorted(cases) if name.startswith("out.")]
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
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", graph.OPSET)]


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
    (path,) = graph.write_graph(encoder, tmp_path)
    parity = check_parity(encoder, path)
    assert parity.max_relative_error <= 5e-6


def test_large_weights_go_into_a_file_beside_the_graph(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    files = graph.write_graph(encoder, tmp_path, max_file_bytes=1000)
    assert [path.name for path in files] == ["model.onnx", "model.onnx.data"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    # Matrices have left the graph; the small vectors stay.
    assert files[1].stat().st_size > 2 * 4 * (4 * 16 * 16 + 2 * 16 * 32)
    check_parity(encoder, files[0])


def test_exactly_at_the_limit_one_file_is_enough(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    sinusoids = 24 * 16
    size = 4 * (sinusoids + sum(parameter.numel() for parameter in encoder.parameters()))
    assert len(graph.write_graph(encoder, tmp_path, max_file_bytes=size)) == 1
    assert len(graph.write_graph(encoder, tmp_path, max_file_bytes=size - 1)) == 2


def test_no_path_of_the_machine_is_in_the_file(bundles: dict[str, Exported], golden: str) -> None:
    content = (bundles[golden].path / "model.onnx").read_bytes()
    for path in (Path(graph.__file__).parent, Path(torch.__file__).parent, bundles[golden].path.parent):
        assert str(path).encode() not in content
