"""Bundles in float16 and int8: as close to PyTorch as their bounds say, and refused where they are not."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import export_golden
from tiny_bundle import byte_products

from encserve_export import Encoder, EncoderConfig, Exported, Source, Target, export_encoder
from encserve_export.check.agreement import check_inspection, check_parity, least_cosine
from encserve_export.ground.errors import ParityError
from encserve_export.ground.precision import Precision
from encserve_export.ground.runtime import open_session
from encserve_export.models.own import trace
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.quantize import plan_layers
from encserve_export.onnx_graph import int8

SOURCE = Source("init", "random weights, seed 0")
ROUNDED = ("float16", "int8")
CHOICES: list[dict[str, Any]] = [
    {"activation": "gelu"},
    {"norm": "pre", "final_norm": True, "activation": "gelu_tanh"},
    {"position": "learned", "position_offset": 2, "pad_token_id": 1, "pad_takes_no_position": True},
    {"norm": "none", "residual": False, "attention_bias": False, "d_ff": 0, "n_layers": 1},
    {"max_sequence_tokens": 1, "n_heads": 1, "embedding_norm": True, "n_token_types": 3, "position": "learned"},
    {"input": "embeddings", "vocab_size": 0},
]


def test_products_of_8_bits_are_exact() -> None:
    """On x86 CPUs without VNNI, ONNX Runtime saturates them by default."""
    model, inputs, wanted = byte_products()
    np.testing.assert_array_equal(open_session(model).run(None, {"A": inputs})[0], wanted)


def types_of_matrices(path: Path) -> set[int]:
    model = onnx.load(path, load_external_data=False)
    return {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("fields", CHOICES)
def test_every_choice_in_the_formula_survives(
    tiny: EncoderConfig, tmp_path: Path, fields: dict[str, Any], precision: Precision
) -> None:
    encoder = random_encoder(EncoderConfig.from_mapping(dataclasses.asdict(tiny) | fields), 0)
    graphs = trace.write_graphs(encoder, tmp_path, precision)
    parity = check_parity(encoder, graphs.files[0], precision)
    check_inspection(encoder, graphs)
    assert parity.min_cosine >= {"float16": 0.99999, "int8": 0.99}[precision]
    assert parity.max_relative_error > 0, "it is rounded"


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", ["hf-bert", "split-qkv", "torch-native-pre", "attention-only"])
def test_golden_checkpoints(bundles: dict[str, Exported], models: Path, name: str, precision: Precision) -> None:
    exported = export_golden(name, models, precision)
    manifest, parity = exported.manifest, exported.manifest.parity
    assert manifest.graph.precision == precision
    assert parity.tolerance == 0
    assert 1 >= parity.min_cosine >= parity.required_min_cosine == {"float16": 0.999, "int8": 0.99}[precision]
    assert 1 >= parity.min_padding_cosine >= parity.required_min_padding_cosine == 0.999
    assert manifest.parameters == bundles[name].manifest.parameters


def test_float32_is_not_judged_by_cosines(bundles: dict[str, Exported]) -> None:
    parity = bundles["hf-bert"].manifest.parity
    assert (parity.min_cosine, parity.required_min_cosine, parity.required_min_padding_cosine) == (0, 0, 0)


def test_what_matrices_are_stored_in(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(dataclasses.replace(tiny, position="none"), 0)
    kinds: dict[Precision, int] = {"float16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}
    for precision, kind in kinds.items():
        (tmp_path / precision).mkdir()
        graphs = trace.write_graphs(encoder, tmp_path / precision, precision)
        # The scales of the table of tokens are a column beside it.
        assert types_of_matrices(graphs.files[0]) - {onnx.TensorProto.FLOAT} == {kind}
        assert (onnx.TensorProto.FLOAT in types_of_matrices(graphs.files[0])) == (precision == "int8")


def test_a_neighbour_of_any_size_changes_nothing(tiny: EncoderConfig, tmp_path: Path) -> None:
    """With one scale for the whole batch the small sequence would be rounded to nothing."""
    fields = dataclasses.asdict(tiny) | {"input": "embeddings", "vocab_size": 0, "norm": "none", "activation": "gelu"}
    encoder = random_encoder(EncoderConfig.from_mapping(fields), 0)
    path = trace.write_graphs(encoder, tmp_path, "int8").files[0]
    session = open_session(path)
    small, large = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)

    def run(*sequences: Any) -> Any:
        inputs = np.stack(sequences)  # (batch, seq, d_model)
        return session.run(None, {"inputs_embeds": inputs, "attention_mask": np.ones(inputs.shape[:2], np.int64)})[0]

    np.testing.assert_allclose(run(small, 1e4 * large)[0], run(small)[0], rtol=1e-5, atol=1e-5)


def hard_to_round(config: EncoderConfig) -> Encoder:
    """An encoder with large weights for a number that is always 0, beside which the others are rounded to nothing."""
    encoder = random_encoder(dataclasses.replace(config, activation="relu"), 0)
    feed_forward: Any = encoder.blocks[1].feed_forward
    with torch.no_grad():
        feed_forward.inner.bias[0] = -1e6
        feed_forward.outer.weight[:, 0] = 1e4
    return encoder


def test_a_layer_that_would_be_too_far_off_stays_float32(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = hard_to_round(tiny)
    layers = plan_layers(encoder)
    far_off = [name for name, layer in layers.items() if layer.error > 0.1]
    assert far_off == ["blocks.1.feed_forward.outer"]
    graphs = trace.write_graphs(encoder, tmp_path, "int8")
    nodes = onnx.load(graphs.files[0]).graph.node
    assert [node.name for node in nodes if node.op_type == "Gemm"] == ["/blocks.1/feed_forward/outer/Gemm"]
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in nodes) == len(layers) - 1
    assert check_parity(encoder, graphs.files[0], "int8").min_cosine >= 0.99


def test_what_is_too_far_off_is_refused(tiny: EncoderConfig, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "MAX_ERROR", np.inf)
    message = (
        r"differs from PyTorch: cosine similarity \S+ of a row, at least 0\.99 is required, in a batch of lengths 1;"
    )
    with pytest.raises(ParityError, match=message):
        export_encoder(hard_to_round(tiny), SOURCE, Target(model_repository=models, name="far"), precision="int8")
    assert not models.exists()


def test_numbers_that_float16_does_not_have_are_refused(tiny: EncoderConfig, models: Path) -> None:
    encoder = random_encoder(tiny, 0)
    with torch.no_grad():
        encoder.embeddings.tokens.weight.mul_(1e7)
    with pytest.raises(ParityError, match=r"cosine similarity \S+ of a row, at least 0\.999 is required"):
        export_encoder(encoder, SOURCE, Target(model_repository=models, name="large"), precision="float16")
    assert not models.exists()


def test_inspections_of_other_weights_are_refused(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    graphs = trace.write_graphs(encoder, tmp_path, "int8")
    with pytest.raises(ParityError, match=r"for inspections differs from PyTorch in \S+: cosine similarity"):
        check_inspection(random_encoder(tiny, 1), graphs)
    exchanged = dataclasses.replace(graphs, attention_weights_names=graphs.attention_weights_names[::-1])
    with pytest.raises(ParityError, match=r"attention_weights.1: error \S+, tolerance 1.0e-01"):
        check_inspection(sharpened(encoder), dataclasses.replace(exchanged, files=written(encoder, tmp_path / "sharp")))


def sharpened(encoder: Encoder) -> Encoder:
    """The encoder with attention that looks at few tokens in its first block."""
    with torch.no_grad():
        attention: Any = encoder.blocks[0].attention
        attention.qkv.weight[: 2 * attention.d_model].mul_(8)
    return encoder


def written(encoder: Encoder, folder: Path) -> tuple[Path, Path, Path]:
    folder.mkdir()
    return trace.write_graphs(sharpened(encoder), folder, "int8").files


def test_rounded_rows_are_within_half_a_step() -> None:
    rows = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    rows[3] = 0
    rounded, scales = int8.quantize_rows(rows)
    assert rounded.dtype == np.int8
    assert scales.shape == (7, 1)
    assert np.abs(rounded).max(axis=1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    assert (np.abs(rounded * scales - rows) <= scales / 2 * 1.0001).all()


@pytest.mark.parametrize(
    ("got", "want", "cosine"),
    [
        ([3, 4], [6, 8], 1),
        ([1, 0], [0, 1], 0),
        ([0, 0], [0, 0], 1),
        ([0, 0], [0, 1], 0),
        ([np.nan, 1], [1, 1], -1),
        ([np.inf, 1], [1, 1], -1),
    ],
)
def test_least_cosine(got: list[float], want: list[float], cosine: float) -> None:
    rows = np.array([got, [1, 1]], np.float32), np.array([want, [1, 1]], np.float32)
    assert least_cosine(*rows) == pytest.approx(cosine)
