"""These tests export models in the format of the library transformers.

The bundle must return the same hidden states and attention weights as transformers. Otherwise, the export must fail
with advice.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, Architecture, add_onnx_file, build, change_config, save
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from encserve_export import Exported, Target, export_hf
from encserve_export.check.agreement import relative_error
from encserve_export.core.errors import (
    CheckpointFileError,
    ConfigError,
    ExportError,
    ParityError,
    UnsupportedModelError,
    WeightShapeError,
)
from encserve_export.core.precision import BOUNDS, Precision
from encserve_export.models.graphs import write_graphs
from encserve_export.models.reference import Reference
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_server.repository.bundle import read_bundle
from encserve_server.types.inspections import InspectKind

NAMED = {architecture.name: architecture for architecture in ARCHITECTURES}
FAST = ("BERT", "ModernBERT")
# PyTorch cannot trace the code that computes the attention window of these models.
NOT_INSPECTED = ("EmbeddingGemma",)
WITH_POSITIONS = {
    *("BERT", "RoBERTa", "XLM-R", "CamemBERT", "DistilBERT", "MPNet", "DeBERTa-v2", "MobileBERT", "Ernie", "CLIP"),
}


@pytest.fixture
def data2vec(tmp_path: Path) -> Path:
    return save(Architecture("Data2Vec", "data2vec-text", NAMED["RoBERTa"].settings), tmp_path)


def export(directory: Path, models: Path, **options: Any) -> Exported:
    return export_hf(
        directory, Target(model_repository=models, name="m"), **{"max_sequence_tokens": 20, "ids_only": True, **options}
    )


def change(directory: Path, **changed: Tensor | None) -> None:
    """Change weights by name. In a name, "__" stands for ".". The value None removes a weight."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.system) for name in NAMED]
)
def test_hidden_states_and_attention_equal_transformers(name: str, tmp_path: Path) -> None:
    exported = export(save(NAMED[name], tmp_path), tmp_path / "models")
    manifest, theirs = exported.manifest, build(NAMED[name])
    theirs = theirs.get_encoder() if theirs.config.is_encoder_decoder else theirs
    ids = np.random.default_rng(0).integers(3, manifest.encoder.vocab_size, (1, 17))
    with torch.inference_mode():
        want = theirs(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.ones((1, 17), dtype=torch.int64),
            output_hidden_states=True,
            output_attentions=True,
        )
    rows = OnnxEncoder(exported.path, manifest.graph)(ids, np.ones_like(ids))
    assert relative_error(rows, want.last_hidden_state.numpy()) <= 5e-5
    inspect = read_bundle(exported.path).inspect_graph  # read by the server's code
    if name in NOT_INSPECTED:
        assert inspect is None
        assert exported.notes["inspection"].startswith("not possible: PyTorch cannot write")
        return
    assert inspect is not None
    assert (InspectKind.POSITIONS in inspect.names) == (name in WITH_POSITIONS)
    run = OnnxEncoder(inspect.graph.path, manifest.graph)
    states = run.outputs(inspect.names[InspectKind.HIDDEN_STATES], ids, np.ones_like(ids))
    for got, state in zip(states, (*want.hidden_states[:-1], want.last_hidden_state), strict=True):
        assert relative_error(got, state.numpy()) <= 5e-5
    weights = run.outputs(inspect.names[InspectKind.ATTENTION_WEIGHTS], ids, np.ones_like(ids))
    for got, attention in zip(weights, want.attentions, strict=True):
        np.testing.assert_allclose(got, attention.numpy(), atol=1e-5)
    if name in WITH_POSITIONS:
        (table,) = run.outputs(inspect.names[InspectKind.POSITIONS], ids, np.ones_like(ids))
        found = next(it for key, it in theirs.state_dict().items() if "position_embedding" in key and it.dim() == 2)
        first = {"RoBERTa": 2, "XLM-R": 2, "CamemBERT": 2, "MPNet": 2}.get(name, 0)
        np.testing.assert_array_equal(table, found[first : first + 20].numpy())


@pytest.mark.system
@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("name", ["ModernBERT", "Qwen3", "T5", "MPNet"])
def test_other_precisions_pass_their_gates(name: str, precision: Precision, tmp_path: Path) -> None:
    """Export in float16 and int8. Expect that the hidden states and the inspections pass their checks.

    The models have RMSNorm or LayerNorm, and three kinds of positions.
    """
    manifest = export(save(NAMED[name], tmp_path), tmp_path / "models", precision=precision).manifest
    assert manifest.graph.precision == precision
    assert manifest.HasField("inspect_graph")


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_are_smaller(data2vec: Path, models: Path, precision: Precision) -> None:
    manifest = export(data2vec, models, precision=precision).manifest
    assert (manifest.graph.precision, manifest.source.route) == (precision, "transformers")
    assert manifest.parity.min_cosine >= manifest.parity.required_min_cosine == BOUNDS[precision].cosine
    assert manifest.parity.min_padding_cosine >= 0.999
    weights = (data2vec / "model.safetensors").stat().st_size
    data = sum(file.size_bytes for file in manifest.files if file.path == "model.onnx.data")
    assert data < {"float16": 0.6, "int8": 0.6}[precision] * weights


@pytest.mark.system  # too slow for the fast tests
def test_shared_weights_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for n_layers in (1, 8):
        settings = NAMED["ALBERT"].settings | {"num_hidden_layers": n_layers}
        albert = Architecture(f"{n_layers} layers", "albert", settings)
        exported = export(save(albert, tmp_path), tmp_path / "models" / str(n_layers))
        sizes.append((exported.path / "model.onnx.data").stat().st_size)
    assert sizes[1] <= 1.01 * sizes[0]


def test_the_manifest_describes_the_model(data2vec: Path, models: Path) -> None:
    exported = export(data2vec, models, max_sequence_tokens=None)
    shape, source = exported.manifest.encoder, exported.manifest.source
    assert (shape.d_model, shape.vocab_size, shape.pad_token_id) == (64, 200, 1)
    assert (shape.n_layers, shape.n_heads, shape.position) == (2, 4, "learned")
    assert shape.max_sequence_tokens == 64, "66 positions, two of which are not for tokens"
    assert (source.kind, source.route, source.description) == ("hf", "transformers", "Data2VecTextModel")
    assert {"torch", "transformers"} <= set(source.versions)
    assert 0 < exported.manifest.parity.max_relative_error <= exported.manifest.parity.tolerance == 5e-5
    assert exported.notes["route"] == "transformers"
    assert "inspection" not in exported.notes


@pytest.mark.system
def test_the_longrope_error_names_the_longest_sequence(tmp_path: Path, models: Path) -> None:
    """Export a model with longrope for long sequences. Expect an error that names the longest possible length.

    With longrope, a long text in a batch changes the positions of the short texts. The exporter refuses such lengths.
    """
    scaling = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    settings = NAMED["Qwen3"].settings | {"rope_parameters": scaling, "max_position_embeddings": 60}
    directory = save(Architecture("Long", "qwen3", settings), tmp_path)
    with pytest.raises(ExportError, match="more than 30 tokens .*Give --max-sequence-tokens 30 or less"):
        export(directory, models, max_sequence_tokens=60)
    assert export(directory, models, max_sequence_tokens=30).manifest.source.route == "transformers"


@pytest.mark.system
def test_weights_with_other_names_and_types_give_the_same_rows(tmp_path: Path) -> None:
    """Export the same weights under other names and in float64, and expect the same hidden states.

    In old checkpoints, the weights of a LayerNorm are named gamma and beta. Names may also have a prefix.
    """
    directory = save(NAMED["BERT"], tmp_path)
    ids = np.arange(12)[None]

    def rows(name: str) -> Any:
        exported = export_hf(
            directory, Target(model_repository=tmp_path / "models", name=name), max_sequence_tokens=20, ids_only=True
        )
        return OnnxEncoder(exported.path, exported.manifest.graph)(ids, np.ones_like(ids))

    want = rows("plain")
    renamed = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        renamed[f"bert.{name}"] = tensor.double()
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    assert relative_error(rows("renamed"), want) <= 1e-6


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"intermediate_size": 64}, WeightShapeError, r"has shape \(128,\); config.json asks for \(64,\), and 5 more"),
        ({"model_type": "unheard"}, UnsupportedModelError, "does not know model_type 'unheard'; a newer version"),
        (
            {"model_type": "new", "auto_map": {"AutoModel": "modeling.NewModel"}},
            UnsupportedModelError,
            r"needs its own code .* never executed\. Instead, export the model to ONNX yourself",
        ),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "the checkpoint is quantized"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    data2vec: Path, models: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    change_config(data2vec, **settings)
    with pytest.raises(error, match=message):
        export(data2vec, models)
    assert not models.exists()


class Looking(torch.nn.Module):
    """A model that chooses its output by the values of the mask. PyTorch cannot write this choice as a graph."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return ids.float() if mask.sum().item() > 3 else mask.float()


def test_pytorch_prints_nothing_if_it_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reference = Reference(module=Looking(), description="Looking", vocab_size=50)
    with pytest.raises(UnsupportedModelError, match=r"cannot write Looking as ONNX \(dynamo\): .+") as refusal:
        write_graphs(reference, tmp_path, "dynamo", precision="float32", max_sequence_tokens=20)
    assert "\n" not in str(refusal.value)
    assert "\x1b" not in str(refusal.value)
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.system
def test_a_model_without_hidden_states_is_exported_without_inspection(
    data2vec: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Data2VecTextModel

    forward = Data2VecTextModel.forward

    def closed(self: Any, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        return forward(self, input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(Data2VecTextModel, "forward", closed)
    exported = export(data2vec, models)
    assert not exported.manifest.HasField("inspect_graph")
    assert (
        exported.notes["inspection"]
        == "not possible: the model does not return the hidden states and attention weights of all blocks"
    )


@pytest.mark.system
@pytest.mark.parametrize("true", [True, False])
def test_an_onnx_file_in_the_directory_is_used_if_asked_for(
    data2vec: Path, models: Path, tmp_path: Path, true: bool
) -> None:
    """Export the ONNX file of a directory. Expect an error if the hidden states differ from transformers."""
    exported = export(data2vec, tmp_path / "before")
    add_onnx_file(data2vec, exported.path)
    if not true:
        bias = load_file(data2vec / "model.safetensors")["embeddings.LayerNorm.bias"]
        change(data2vec, embeddings__LayerNorm__weight=bias)
        with pytest.raises(ParityError, match="the model differs from PyTorch"):
            export(data2vec, models, via="onnx")
        return
    assert export(data2vec, tmp_path / "other").manifest.source.route == "transformers"
    exported = export(data2vec, models, via="onnx")
    assert (exported.manifest.source.route, exported.notes["route"]) == ("onnx", "onnx/model.onnx, chosen by --via")
    assert exported.manifest.parity.tolerance == 5e-5


@pytest.mark.system
@pytest.mark.parametrize("name", ["BERT", "T5"])
def test_an_onnx_file_without_weights_is_used(name: str, tmp_path: Path, models: Path) -> None:
    """Remove the weights that transformers loads, and expect that the ONNX file is exported.

    Some directories on the hub have only config.json and onnx/model.onnx.
    """
    directory = save(NAMED[name], tmp_path)
    bundle = export(directory, tmp_path / "before", via="transformers").path
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointFileError, match="holds no weights; looked for"):
        export(directory, models)
    add_onnx_file(directory, bundle)
    exported = export(directory, models)
    assert exported.manifest.source.route == "onnx"
    assert exported.notes["route"] == "onnx/model.onnx; the directory holds no weights for transformers"


@pytest.mark.system
def test_the_onnx_file_of_an_unknown_model_type_is_used(data2vec: Path, models: Path, tmp_path: Path) -> None:
    bundle = export(data2vec, tmp_path / "before").path
    add_onnx_file(data2vec, bundle)
    change_config(data2vec, model_type="unheard")
    exported = export(data2vec, models)
    assert exported.manifest.source.route == "onnx"
    assert "the route transformers does not support this model: transformers" in exported.notes["route"]
    assert exported.manifest.parity.tolerance == 0, "nothing to compare with"


@pytest.mark.system
def test_vocab_txt_becomes_a_tokenizer(bert: Path, models: Path) -> None:
    (bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "##s"]))
    exported = export(bert, models, ids_only=False)
    tokenizer = Tokenizer.from_file(str(exported.path / "tokenizer.json"))
    assert tokenizer.encode("One twos").tokens == ["[CLS]", "one", "two", "##s", "[SEP]"]
    assert list(exported.manifest.text.special_token_ids) == [0, 2, 3]


@pytest.mark.system
def test_the_remark_names_settings_that_transformers_ignores(tmp_path: Path, models: Path) -> None:
    directory = save(NAMED["BERT"], tmp_path)
    change_config(directory, position_embedding_type="alibi", auto_map={"AutoModel": "modeling.Mine"})
    remark = export(directory, models).notes["remark"]
    assert "(auto_map) was not run: the model was loaded with transformers' code for model_type bert" in remark
    assert (
        "position_embedding_type 'alibi', but transformers ignores it for model_type bert. If the model was" in remark
    )


@pytest.mark.system
def test_the_remark_omits_positions_that_transformers_reads(tmp_path: Path, models: Path) -> None:
    sizes = {**NAMED["BERT"].settings, "pad_token_id": 0, "mask_token_id": 4, "position_embedding_type": "rotary"}
    assert "remark" not in export(save(Architecture("ESM", "esm", sizes), tmp_path), models).notes


def test_an_unknown_route_is_refused(data2vec: Path, models: Path) -> None:
    with pytest.raises(ConfigError, match="via must be one of transformers, onnx; was 'own'"):
        export(data2vec, models, via="own")
