"""Checkpoints in the layout of Hugging Face: what fits is loaded exactly, what does not is refused by name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import golden_cases

from encserve_export import Encoder
from encserve_export.ground.errors import (
    CheckpointFileError,
    ConfigError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.models.own.layouts import hf_bert
from encserve_export.source.weights import read_json, read_weights

if TYPE_CHECKING:
    from tests.export.conftest import Checkpoint


def load(directory: Path) -> Encoder:
    layout = hf_bert.read_layout(read_json(directory / "config.json"))
    return layout.load(hf_bert.plain_names(read_weights(directory).tensors))


def encode(encoder: Encoder, ids: torch.Tensor) -> torch.Tensor:
    """Rows of one sequence: (seq) -> (seq, d_model)."""
    rows: torch.Tensor = encoder(ids[None], torch.ones_like(ids)[None])[0]
    return rows


@pytest.mark.parametrize("golden", ["hf-bert", "hf-roberta", "hf-distilbert"])
def test_rows_are_those_of_the_original_implementation(data: Path, golden: str) -> None:
    encoder = load(data / golden)
    for ids, want in zip(*golden_cases(golden), strict=True):
        torch.testing.assert_close(encode(encoder, torch.from_numpy(ids)), torch.from_numpy(want))


def test_two_names_of_one_weight_are_refused() -> None:
    tensors = {name: torch.ones(2) for name in ("bert.embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma")}
    with pytest.raises(WeightNamesError, match=r"bert\..*weight and embeddings\..*gamma are two names of one weight"):
        hf_bert.plain_names(tensors)


def test_sizes_are_read_from_the_configuration(data: Path) -> None:
    bert = load(data / "hf-bert").config
    assert (bert.max_sequence_tokens, bert.n_token_types, bert.position_offset) == (66, 2, 0)
    roberta = load(data / "hf-roberta").config
    # Positions begin behind the padding id: 66 rows are 64 tokens.
    assert (roberta.max_sequence_tokens, roberta.pad_token_id, roberta.position_offset) == (64, 1, 2)
    distilbert = load(data / "hf-distilbert").config
    assert (distilbert.max_sequence_tokens, distilbert.n_token_types, distilbert.layer_norm_eps) == (66, 0, 1e-12)


def test_roberta_counts_no_position_for_its_padding_id_within_a_sequence(data: Path) -> None:
    encoder = load(data / "hf-roberta")
    ids = torch.tensor([[0, 7, 1, 9, 1, 1, 5, 2]])
    # Hugging Face, create_position_ids_from_input_ids: 1 is both the padding id and the row before the first.
    positions = torch.tensor([2, 3, 1, 4, 1, 1, 5, 6])
    embeddings = encoder.embeddings
    assert isinstance(embeddings.types, torch.Tensor)
    x = embeddings.tokens.weight[ids[0]] + embeddings.positions[positions] + embeddings.types[0]
    torch.testing.assert_close(embeddings(ids)[0], embeddings.norm(x))


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_the_heads_of_a_task_are_ignored(bert: "Checkpoint", prefix: str) -> None:
    tensors = {f"{prefix}{name}": tensor for name, tensor in bert.tensors().items()}
    tensors["cls.predictions.bias"] = torch.ones(101)
    tensors["classifier.weight"] = torch.ones(2, 64)
    tensors[f"{prefix}pooler.dense.weight"] = torch.ones(64, 64)
    tensors[f"{prefix}embeddings.position_ids"] = torch.arange(66)[None]
    ids = torch.arange(9)
    want = encode(load(bert.path), ids)
    bert.save(tensors)
    torch.testing.assert_close(encode(load(bert.path), ids), want)


def test_layer_norms_named_gamma_and_beta(bert: "Checkpoint") -> None:
    ids = torch.arange(9)
    want = encode(load(bert.path), ids)
    bert.rename(
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    )
    torch.testing.assert_close(encode(load(bert.path), ids), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(bert: "Checkpoint", dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in bert.tensors().items()}
    bert.save(tensors)
    encoder = load(bert.path)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    name = "encoder.layer.0.intermediate.dense.weight"
    inner = encoder.state_dict()["blocks.0.feed_forward.inner.weight"]
    assert torch.equal(inner, tensors[name].float())


def test_missing_and_surplus_weights_are_all_named(bert: "Checkpoint") -> None:
    def rename(name: str) -> str:
        return name.replace("layer.1.attention.self.query", "layer.1.attention.self.q")

    bert.rename(rename)
    with pytest.raises(WeightNamesError) as caught:
        load(bert.path)
    assert str(caught.value) == (
        "the weights do not fit BertModel; "
        "missing: encoder.layer.1.attention.self.query.bias, encoder.layer.1.attention.self.query.weight; "
        "surplus: encoder.layer.1.attention.self.q.bias, encoder.layer.1.attention.self.q.weight"
    )


def test_more_layers_than_configured_are_surplus(bert: "Checkpoint") -> None:
    bert.set(num_hidden_layers=1)
    with pytest.raises(WeightNamesError, match=r"surplus: encoder\.layer\.1\.attention\.output\.LayerNorm\.bias, "):
        load(bert.path)


def test_a_wrong_shape_is_reported_with_both(bert: "Checkpoint") -> None:
    bert.set(intermediate_size=100)
    with pytest.raises(WeightShapeError) as caught:
        load(bert.path)
    assert str(caught.value) == (
        "encoder.layer.0.intermediate.dense.weight must have the shape (100, 64); was (128, 64)"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(bert: "Checkpoint", value: float) -> None:
    tensors = bert.tensors()
    tensors["encoder.layer.1.output.dense.bias"][3:5] = value
    bert.save(tensors)
    with pytest.raises(
        WeightValueError,
        match=r"encoder\.layer\.1\.output\.dense\.bias must be finite; 2 of its 64 numbers are NaN or infinite",
    ):
        load(bert.path)


def test_integer_weights_are_refused(bert: "Checkpoint") -> None:
    tensors = bert.tensors()
    tensors["encoder.layer.0.output.dense.weight"] = torch.ones(64, 128, dtype=torch.int8)
    bert.save(tensors)
    with pytest.raises(WeightValueError, match=r"output\.dense\.weight must hold floating-point numbers; was int8"):
        load(bert.path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "t5"}, "model_type must be one of bert, .*; was 't5'"),
        ({"model_type": None}, "model_type must be one of bert, .*; was None"),
        ({"hidden_act": "mish"}, "hidden_act must be one of relu, gelu, .*; was 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be .*; was 'relative_key'"),
        ({"is_decoder": True}, "is_decoder must be false, this exports encoders; was True"),
        ({"add_cross_attention": True}, "add_cross_attention must be false"),
    ],
)
def test_models_that_compute_something_else_are_refused(
    bert: "Checkpoint", settings: dict[str, Any], message: str
) -> None:
    bert.set(**settings)
    with pytest.raises(UnsupportedModelError, match=message):
        load(bert.path)


def test_a_missing_setting_is_named(bert: "Checkpoint") -> None:
    bert.set(hidden_size=None)
    with pytest.raises(CheckpointFileError, match=r"config\.json lacks hidden_size"):
        load(bert.path)


@pytest.mark.parametrize("name", ["num_hidden_layers", "max_position_embeddings", "pad_token_id"])
def test_a_size_that_is_no_whole_number(bert: "Checkpoint", name: str) -> None:
    for model_type in ("bert", "roberta", "modernbert"):
        bert.set(model_type=model_type, hidden_activation="gelu", **{name: 2.5})
        with pytest.raises(ConfigError, match=rf"{name} must be an integer; was 2\.5"):
            hf_bert.read_layout(read_json(bert.path / "config.json"))


def test_sizes_that_do_not_go_together(bert: "Checkpoint") -> None:
    bert.set(num_attention_heads=7)
    with pytest.raises(ConfigError, match="n_heads must divide d_model; was 7 for 64"):
        load(bert.path)


@pytest.mark.parametrize(
    ("name", "activation"), [("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")]
)
def test_activations_by_their_other_names(bert: "Checkpoint", name: str, activation: str) -> None:
    bert.set(hidden_act=name)
    assert load(bert.path).config.activation == activation


def test_xlm_roberta_is_a_roberta(roberta: "Checkpoint", data: Path) -> None:
    roberta.set(model_type="xlm-roberta", architectures=["XLMRobertaModel"])
    roberta.rename(lambda name: f"roberta.{name}")
    ids = torch.arange(9)
    torch.testing.assert_close(encode(load(roberta.path), ids), encode(load(data / "hf-roberta"), ids))


def test_defaults_for_settings_that_old_files_lack(bert: "Checkpoint") -> None:
    bert.set(type_vocab_size=None, layer_norm_eps=None, pad_token_id=None, position_embedding_type=None)
    bert.set(architectures=None)
    layout = hf_bert.read_layout(read_json(bert.path / "config.json"))
    assert (layout.config.n_token_types, layout.config.layer_norm_eps, layout.config.pad_token_id) == (2, 1e-12, 0)
    assert layout.description == "bert"
