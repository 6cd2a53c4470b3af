"""What our own encoder is not, transformers is asked for: exported true, or refused with what to do next."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, change_config, save
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from encserve_export import Exported, Target, export_hf
from encserve_export.ground.errors import (
    CheckpointFileError,
    ConfigError,
    ParityError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.ground.precision import BOUNDS, Precision
from encserve_export.models.pretrained import TransformersModel, write_onnx

NAMED = {architecture.name: architecture for architecture in ARCHITECTURES}


@pytest.fixture
def data2vec(tmp_path: Path) -> Path:
    return save(Architecture("Data2Vec", "data2vec-text", NAMED["RoBERTa"].settings), tmp_path)


def export(directory: Path, models: Path, **options: Any) -> Exported:
    return export_hf(
        directory, Target(model_repository=models, name="m"), **{"max_sequence_tokens": 20, "ids_only": True, **options}
    )


def change(directory: Path, **changed: Tensor | None) -> None:
    """Changes weights, by their names with "__" for "."; None takes one out."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def test_what_the_manifest_says(data2vec: Path, models: Path) -> None:
    exported = export(data2vec, models, max_sequence_tokens=None)
    shape, source = exported.manifest.encoder, exported.manifest.source
    assert (shape.d_model, shape.vocab_size, shape.pad_token_id) == (64, 200, 1)
    assert shape.max_sequence_tokens == 64, "66 positions, two of which are not for tokens"
    assert (source.kind, source.route, source.description) == ("hf", "transformers", "Data2VecTextModel")
    assert {"torch", "transformers"} <= set(source.versions)
    assert 0 < exported.manifest.parity.max_relative_error <= exported.manifest.parity.tolerance == 5e-5
    assert exported.notes["route"].startswith(
        "transformers; our own encoder does not take it: model_type must be one of bert"
    )
    assert "there is no onnx/model.onnx" in exported.notes["route"]


@pytest.mark.parametrize("name", ["ModernBERT", "Qwen3", "T5"])
def test_rows_are_those_of_transformers(tmp_path: Path, models: Path, name: str) -> None:
    """The gate compares them; one with layers of its own, one that decodes, and one half of a model."""
    assert export(save(NAMED[name], tmp_path), models, via="transformers").manifest.parity.tolerance == 5e-5


def test_the_longest_sequence(data2vec: Path, models: Path) -> None:
    (data2vec / "tokenizer_config.json").write_text('{"model_max_length": 30}')
    assert export(data2vec, models, max_sequence_tokens=None).manifest.encoder.max_sequence_tokens == 30
    with pytest.raises(ConfigError, match="max_sequence_tokens must be at most 64 for this model; was 65"):
        export(data2vec, models, max_sequence_tokens=65)


def test_heads_are_left_behind_and_named(data2vec: Path, models: Path) -> None:
    weights = load_file(data2vec / "model.safetensors")
    own = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    head = {"lm_head.dense.weight": next(iter(weights.values())).clone()}
    save_file({**own, **head}, data2vec / "model.safetensors", {"format": "pt"})
    assert export(data2vec, models).unused_parts == ("lm_head",), "the pooler makes no rows: it may be missing"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_hidden_layers": 3}, WeightNamesError, r"weights are missing: encoder\.layer\.2\..* and \d+ more"),
        ({"num_hidden_layers": 1}, WeightNamesError, r"no place for: encoder\.layer\.1\..* and \d+ more"),
        ({"intermediate_size": 64}, WeightShapeError, r"has shape \(128,\); config.json asks for \(64,\), and 5 more"),
        ({"num_attention_heads": 5}, ConfigError, "transformers cannot make a Data2VecTextModel"),
        ({"model_type": "unheard"}, UnsupportedModelError, "does not know model_type 'unheard'; a newer one may"),
        (
            {"model_type": "new", "auto_map": {"AutoModel": "modeling.NewModel"}},
            UnsupportedModelError,
            "brings code of its own .* never executed; export it as ONNX yourself",
        ),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "the checkpoint is quantised"),
    ],
)
def test_a_configuration_that_lies(
    data2vec: Path, models: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    change_config(data2vec, **settings)
    with pytest.raises(error, match=message):
        export(data2vec, models)
    assert not models.exists()


def test_weights_that_are_no_numbers(data2vec: Path, models: Path) -> None:
    name = "encoder.layer.0.output.dense.bias"
    bias = load_file(data2vec / "model.safetensors")[name]
    bias[3] = float("nan")
    change(data2vec, **{name: bias})
    with pytest.raises(WeightValueError, match=f"{name} holds numbers that are not finite"):
        export(data2vec, models)
    assert not models.exists()


def test_a_missing_shard(data2vec: Path, models: Path) -> None:
    weights = load_file(data2vec / "model.safetensors")
    (data2vec / "model.safetensors").rename(data2vec / "model-00001-of-00002.safetensors")
    names = dict.fromkeys(weights, "model-00001-of-00002.safetensors") | {"x": "model-00002-of-00002.safetensors"}
    (data2vec / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(
        CheckpointFileError, match=r"model-00002-of-00002\.safetensors is missing, but the index names it"
    ):
        export(data2vec, models)
    assert not models.exists()


class Looking(torch.nn.Module):
    """Does what no graph can know beforehand: it looks at the numbers."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return ids.float() if mask.sum().item() > 3 else mask.float()


def test_what_pytorch_says_of_a_failure_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = TransformersModel(Looking(), "Looking", None, 50, 0, ())
    with pytest.raises(UnsupportedModelError, match=r"cannot write Looking as ONNX \(dynamo\): .+") as it:
        write_onnx(model, "dynamo", tmp_path / "model.onnx")
    assert "\n" not in str(it.value)
    assert "\x1b" not in str(it.value)
    assert "".join(capfd.readouterr()) == ""


def test_a_model_whose_padding_changes_rows(data2vec: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mask is forgotten, in PyTorch as in the graph."""
    from transformers import Data2VecTextModel

    forward = Data2VecTextModel.forward

    def forgetful(self: Any, input_ids: Tensor, attention_mask: Tensor, **more: Any) -> Any:
        return forward(self, input_ids, attention_mask=attention_mask * 0 + 1, **more)

    monkeypatch.setattr(Data2VecTextModel, "forward", forgetful)
    with pytest.raises(ParityError, match="Data2VecTextModel gives other rows in a padded batch, in PyTorch already"):
        export(data2vec, models)
    assert not models.exists()


def test_a_route_that_is_asked_for(bert: Any, models: Path) -> None:
    """Our own encoder would do; what is asked for is taken, or nothing is."""
    exported = export(bert.path, models, via="transformers")
    assert (exported.manifest.source.route, exported.notes["route"]) == ("transformers", "transformers, as --via asks")
    target = Target(model_repository=models, name="other")
    with pytest.raises(UnsupportedModelError, match=r"there is no onnx/model\.onnx"):
        export_hf(bert.path, target, via="onnx", ids_only=True)


@pytest.mark.parametrize("true", [True, False])
def test_an_onnx_file_in_the_directory(data2vec: Path, models: Path, tmp_path: Path, true: bool) -> None:
    """It is taken where its rows are the model's, and otherwise the model itself."""
    graph = export(data2vec, tmp_path / "before").path / "model.onnx"
    (data2vec / "onnx").mkdir()
    graph.rename(data2vec / "onnx" / "model.onnx")
    if not true:
        change(
            data2vec,
            embeddings__LayerNorm__weight=load_file(data2vec / "model.safetensors")["embeddings.LayerNorm.bias"],
        )
    exported = export(data2vec, models)
    assert exported.manifest.source.route == ("onnx" if true else "transformers")
    assert exported.manifest.parity.tolerance == 5e-5
    assert true or "onnx/model.onnx does not take it: the model differs from PyTorch" in exported.notes["route"]


def test_vocab_txt_becomes_a_tokenizer(bert: Any, models: Path) -> None:
    (bert.path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "##s"]))
    exported = export(bert.path, models, ids_only=False)
    tokenizer = Tokenizer.from_file(str(exported.path / "tokenizer.json"))
    assert tokenizer.encode("One twos").tokens == ["[CLS]", "one", "two", "##s", "[SEP]"]
    assert list(exported.manifest.text.special_token_ids) == [0, 2, 3]


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_precision(data2vec: Path, models: Path, precision: Precision) -> None:
    """Smaller, and within the bounds that hold for our own encoder."""
    manifest = export(data2vec, models, precision=precision).manifest
    assert (manifest.graph.precision, manifest.source.route) == (precision, "transformers")
    assert manifest.parity.min_cosine >= manifest.parity.required_min_cosine == BOUNDS[precision].cosine
    assert manifest.parity.min_padding_cosine >= 0.999
    weights = (data2vec / "model.safetensors").stat().st_size
    assert sum(file.size_bytes for file in manifest.files) < {"float16": 0.75, "int8": 0.65}[precision] * weights
