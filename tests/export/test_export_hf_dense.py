"""These tests export dense models. A dense model returns one vector for each text.

The exporter must read a model's directory in the same way as sentence-transformers. Otherwise the export must fail.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_models import D_MODEL, SPECIAL, WORDS, write_encoder, write_model
from torch import nn

from encserve_export import Exported, Target, export_hf
from encserve_export.check import pipeline
from encserve_export.core.errors import CheckpointFileError, ConfigError, ParityError, UnsupportedModelError
from encserve_export.kinds.directory import transformer_folder
from encserve_export.kinds.reading import read
from encserve_export.kinds.spec import ModelSpec
from encserve_export.routes import hf
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.offline import Embedder

MEAN: tuple[str, dict[str, object]] = ("Pooling", {"pooling_mode": "mean"})
NORMALIZE: tuple[str, dict[str, object]] = ("Normalize", {})
TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "directory", [MEAN, NORMALIZE])


def change(path: Path, **changed: Any) -> None:
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(found | changed))


def export(directory: Path, **options: Any) -> Exported:
    return export_hf(directory, Target(model_repository=directory.parent / "models", name="m"), **options)


def test_the_settings_of_a_directory_are_read(directory: Path) -> None:
    found = read(directory)
    assert (found.kind, found.pooling, found.more_poolings, found.l2_normalize) == (
        "dense",
        manifest_pb2.POOLING_MEAN,
        (),
        True,
    )
    assert found.prompts == {"query": "", "document": ""}  # sentence-transformers always writes both prompts
    (directory / "modules.json").unlink()
    plain = read(directory)
    assert (plain.kind, plain.pooling, plain.l2_normalize) == ("dense", manifest_pb2.POOLING_UNSPECIFIED, False)


def test_modules_after_pooling_change_the_space_id(tmp_path: Path) -> None:
    """Read a directory with the module Dense after the pooling, and expect the module's settings and tensors.

    The space_id, the id of the model's vectors, depends on these tensors. So each tensor keeps the dtype of its file.
    """
    dense = {"in_features": D_MODEL, "out_features": 7, "activation_function": "torch.nn.modules.activation.GELU"}
    write_model(tmp_path, [MEAN, ("Dense", dense), ("Dropout", {"dropout": 0.1}), NORMALIZE])
    file = torch.load(tmp_path / "2_Dense" / "pytorch_model.bin")
    torch.save({name: tensor.half() for name, tensor in file.items()}, tmp_path / "2_Dense" / "pytorch_model.bin")
    (facts,) = read(tmp_path).modules
    assert (facts.kind, facts.settings) == ("Dense", {"activation_function": "GELU"})
    assert {name: tensor.dtype for name, tensor in facts.tensors.items()} == {
        "linear.weight": torch.float16,
        "linear.bias": torch.float16,
    }


def test_prompts_of_an_instructor_are_left_out_of_pooling(directory: Path) -> None:
    """Expect that pooling skips the prompt if the model has the name of an Instructor model on the Hugging Face Hub.

    sentence-transformers recognises Instructor models only by this name.
    """
    assert not read(directory, "someone/else").skips_prompt
    assert read(directory, "hkunlp/instructor-large").skips_prompt


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_every_name_of_the_settings_file_is_read(directory: Path, name: str) -> None:
    (directory / "sentence_bert_config.json").unlink()
    (directory / name).write_text('{"max_seq_length": 20}')
    assert read(directory).max_seq_length == 20


@pytest.mark.parametrize("content", [{"max_seq_length": "256"}, {"max_seq_length": 0}, {"query_length": True}])
def test_a_length_that_is_not_a_number_of_tokens_is_refused(directory: Path, content: dict[str, object]) -> None:
    ((name, value),) = content.items()
    (directory / "sentence_bert_config.json").write_text(json.dumps(content))
    text = rf"must give {name} as a number of tokens, at least 1; was {value!r}"
    with pytest.raises(CheckpointFileError, match=text):
        read(directory)


def test_the_length_of_a_task_may_exceed_max_seq_length(directory: Path) -> None:
    change(directory / "sentence_bert_config.json", query_length=8, max_seq_length=7)
    spec = read(directory)
    assert (spec.max_seq_length, spec.max_tokens) == (8, 7)
    assert [spec.tasks[task].max_tokens for task in ("query", "document")] == [8, 7]


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("sentence_transformers.models.WordEmbeddings", "WordEmbeddings module, .* Serve the model with"),
        ("sentence_transformers.models.CLIPModel", "CLIPModel module, .* Serve the model with"),
        ("sentence_transformers.base.modules.router.Router", "Router module, .* Queries and documents go through"),
        ("custom_st.Transformer", "has a module custom_st.Transformer, which is not a class of sentence-transformers"),
        ("pylate.models.Evil.Dense", "has a module pylate.models.Evil.Dense, which is not"),
    ],
)
def test_a_module_is_refused_before_anything_is_loaded(
    directory: Path, module: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentence_transformers.SentenceTransformer.__init__", lambda *_, **__: pytest.fail("loaded"))
    modules = json.loads((directory / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3", "type": module})
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match=problem):
        read(directory)


def test_a_module_that_a_bundle_cannot_express_is_refused(directory: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    path = "3_WeightedLayerPooling"
    modules.insert(1, {"idx": 3, "name": "3", "path": path, "type": f"sentence_transformers.models.{path[2:]}"})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / path).mkdir()
    (directory / path / "config.json").write_text(
        json.dumps({"embedding_dimension": D_MODEL, "num_hidden_layers": 2, "layer_start": 0})
    )
    torch.save({"layer_weights": torch.ones(3)}, directory / path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"WeightedLayerPooling module, .* to export only the encoder"):
        read(directory)


def test_a_routers_modules_are_checked_before_anything_is_loaded(directory: Path) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.router.Router"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    router = directory / "router_config.json"
    outside = {"../x": "sentence_transformers.models.Transformer"}
    for types, error, problem in (
        ({"query": "mine.Encoder"}, UnsupportedModelError, "has a module mine.Encoder, which is not"),
        (outside, CheckpointFileError, "names a folder outside .*: '../x'"),
    ):
        router.write_text(json.dumps({"types": types, "structure": {}, "parameters": {}}))
        with pytest.raises(error, match=problem):
            read(directory)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config_sentence_transformers.json", {"model_type": "Mine"}, "must be one of SentenceTransformer.*was 'Mine'"),
        ("config_sentence_transformers.json", {"requirements": {"torch": ">=99"}}, "cannot load .*ImportError.*torch"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "cannot load .*Default prompt name 'x'"),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "x"}, r"names another tokenizer, 'x'\. Put the"),
        ("sentence_bert_config.json", {"modality_config": {"text": TEXT}}, "cannot load .*directory: ValueError"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "length": 9}},
            "query_expansion is for multi-vector",
        ),
        ("adapter_config.json", {}, "is an adapter, .* Merge the adapter into that model with PEFT's"),
        (
            "2_Normalize/config.json",
            {"module_output_name": "x"},
            "has a Normalize module, which a bundle cannot",
        ),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "attention"]}, "cannot load .*Invalid pooling mode"),
    ],
)
def test_a_directory_of_another_kind_is_refused(
    directory: Path, file: str, content: dict[str, Any], problem: str
) -> None:
    change(directory / file, **content)
    with pytest.raises(UnsupportedModelError, match=problem):
        read(directory)


@pytest.mark.system
@pytest.mark.parametrize(
    "settings",
    [
        {"transformer_task": "fill-mask"},
        {"config_args": {"layer_norm_eps": 0.5}},
        {"processing_kwargs": {"text": {"add_special_tokens": False}}},
        {"modality_config": {"text": TEXT | {"method_output_name": "pooler_output"}}, "module_output_name": "x"},
        {"modality_config": {"text": TEXT | {"method_output_name": ["hidden_states", 1]}},
         "module_output_name": "token_embeddings"},
    ],
)  # fmt: skip
def test_the_comparison_finds_a_setting_that_a_bundle_cannot_express(directory: Path, settings: dict[str, Any]) -> None:
    change(directory / "sentence_bert_config.json", **settings)
    with pytest.raises(ParityError, match="the bundle gives|sentence-transformers itself fails for the text"):
        export(directory)


@pytest.mark.system
def test_gpt2_with_token_types_is_refused(tmp_path: Path) -> None:
    """Export a GPT-2 whose tokenizer also gives token types, and expect an error.

    GPT-2 has no table of token types. It reads token types as token ids, and adds the vectors of these tokens.
    """
    sizes = {"n_embd": D_MODEL, "n_layer": 1, "n_head": 2, "n_positions": 96}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    encoder = {"model_type": "gpt2", "config": sizes, "model_input_names": inputs}
    directory = write_model(tmp_path / "directory", [MEAN], encoder=encoder)
    with pytest.raises(ParityError, match="gives token_type_ids, which this model reads as tokens. If the model"):
        export(directory)


PROMPTS = {"query": "Query: ", "document": "passage: "}


def prompts_forgotten(spec: ModelSpec) -> dict[str, Any]:
    tasks = {task: manifest_pb2.TaskSettings() for task in spec.tasks}
    return {"prompts": dict.fromkeys(spec.prompts, ""), "tasks": tasks}


@pytest.mark.parametrize(
    "fault",
    [
        lambda _: {"pooling": manifest_pb2.POOLING_CLS},
        prompts_forgotten,
        pytest.param(lambda _: {"skips_prompt": False}, marks=pytest.mark.system),
        pytest.param(lambda _: {"l2_normalize": False}, marks=pytest.mark.system),
        pytest.param(lambda _: {"dimensions": 0}, marks=pytest.mark.system),
        pytest.param(lambda _: {"head": None}, marks=pytest.mark.system),
    ],
    ids=["pooling", "prompts", "prompt in pooling", "length 1", "dimensions", "head"],
)
def test_the_comparison_finds_a_misread_directory(
    fault: Callable[[ModelSpec], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = ("Dense", {"in_features": D_MODEL, "out_features": 7})
    pooling = ("Pooling", {"pooling_mode": "mean", "include_prompt": False})
    settings = {"prompts": PROMPTS, "truncate_dim": 5}
    directory = write_model(tmp_path / "directory", [pooling, dense, NORMALIZE], settings=settings)

    def misread(*arguments: Any, **options: Any) -> ModelSpec:
        spec = read(*arguments, **options)
        return dataclasses.replace(spec, **fault(spec))

    ask = pipeline.prepare_comparison

    def ask_the_right_one(spec: ModelSpec, **options: Any) -> Any:
        return ask(read(directory), **options)

    monkeypatch.setattr(hf, "read", misread)
    monkeypatch.setattr(hf, "prepare_comparison", ask_the_right_one)
    # The exporter compares ids before vectors. Only a forgotten prompt changes the ids.
    what = "the ids" if fault is prompts_forgotten else ""
    with pytest.raises(ParityError, match=f"the bundle gives {what}"):
        # Short sequences are enough, because the fault changes the vectors of short texts too.
        export(directory, max_sequence_tokens=16)


def test_the_rows_of_a_decoder_are_refused(tmp_path: Path) -> None:
    config = {"d_model": D_MODEL, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
              "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
    write_model(tmp_path, [MEAN], encoder={"model_type": "bart", "config": config})
    with pytest.raises(
        UnsupportedModelError, match="for model_type 'bart', sentence-transformers pools the hidden states"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"in_features": 5}, "cannot load .*: Error.* size mismatch"),
        ({"activation_function": "mine.Tanh"}, "must be a class of torch.nn; was 'mine.Tanh', which .* Tanh"),
        ({"activation_function": "torch.hub.load"}, "must be a class of torch.nn; was 'torch.hub.load'"),
        ({"module_input_name": "token_embeddings"}, "has a Dense module, which a bundle cannot"),
    ],
)
def test_an_unreadable_dense_module_is_refused(tmp_path: Path, config: dict[str, object], problem: str) -> None:
    write_model(tmp_path, [MEAN, ("Dense", {"in_features": D_MODEL, "out_features": 3})])
    change(tmp_path / "2_Dense" / "config.json", **config)
    with pytest.raises(UnsupportedModelError, match=problem):
        read(tmp_path)


def test_a_given_pooling_is_refused_for_a_directory_with_a_pooling(directory: Path) -> None:
    with pytest.raises(ConfigError, match="the files of this checkpoint state its pooling"):
        export(directory, pooling="cls")


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "directory", [MEAN, ("Dense", {"in_features": 5, "out_features": 3})])
    with pytest.raises(ParityError, match="sentence-transformers itself fails for the text '' with no prompt: .*1x24"):
        export(tmp_path / "directory")


def test_module_folders_outside_the_directory_are_refused(directory: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([{**modules[0], "path": "../elsewhere"}]))
    with pytest.raises(CheckpointFileError, match=r"names a folder outside .*: '../elsewhere'"):
        transformer_folder(directory)
    for modules in ('[{"idx": 0}]', "[]"):
        (directory / "modules.json").write_text(modules)
        with pytest.raises(CheckpointFileError, match="must be a list of modules"):
            read(directory)


def test_modules_run_no_code_of_the_directory(directory: Path) -> None:
    """Read a directory whose config.json names classes in a Python file of the directory.

    The exporter must refuse the directory, and must not run this Python file.
    """
    change(directory / "config.json", model_type="mine", auto_map={"AutoConfig": "c.C", "AutoModel": "c.M"})
    (directory / "c.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UnsupportedModelError, match="sentence-transformers cannot load"):
        read(directory)


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    write_model(tmp_path, [MEAN, ("Dense", {"in_features": D_MODEL, "out_features": 3})])
    torch.save(nn.Linear(D_MODEL, 3), tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="cannot load .*UnpicklingError"):
        read(tmp_path)


def test_a_directory_without_a_tokenizer_takes_ids_only(directory: Path) -> None:
    """Export a directory without tokenizer files, and expect a model that takes token ids only.

    Without these files, transformers would create a tokenizer without words.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    exported = export(directory, ids_only=True)
    assert not exported.manifest.HasField("text")
    assert "no tokenizer.json: the model will take token ids" in exported.notes["text"]
    assert exported.notes["compared with"] == "transformers"
    assert exported.manifest.parity.pipeline_texts == 1
    assert exported.manifest.parity.max_pipeline_error <= 1e-4


@pytest.mark.system
def test_a_directory_without_a_pooling_module_is_exported(tmp_path: Path) -> None:
    """Export a directory without a Pooling module, and expect a bundle with the pooling that the user gave.

    For such a directory, sentence-transformers returns only hidden states.
    """
    exported = export(write_model(tmp_path / "directory", []), pooling="mean")
    assert exported.manifest.pooling == manifest_pb2.POOLING_MEAN
    assert exported.notes["compared with"] == "sentence-transformers"


@pytest.mark.system
def test_sentence_transformers_is_loaded_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentence_transformers import SentenceTransformer

    made, make = [], SentenceTransformer.__init__

    def count(self: Any, *arguments: Any, **options: Any) -> None:
        made.append(self)
        make(self, *arguments, **options)

    monkeypatch.setattr(SentenceTransformer, "__init__", count)
    export(directory)
    assert len(made) == 1


@pytest.mark.system
@pytest.mark.parametrize("modules", [True, False], ids=["modules", "no modules"])
@pytest.mark.parametrize("place", ["config.json", "sentence_bert_config.json"])
def test_a_directory_with_flash_attention_is_exported_without_a_gpu(directory: Path, modules: bool, place: str) -> None:
    if not modules:
        (directory / "modules.json").unlink()
    flash = "flash_attention_2"
    if place == "config.json":
        change(directory / place, attn_implementation=flash, _attn_implementation=flash)
    else:
        change(directory / place, model_args={"attn_implementation": flash})
    assert export(directory).manifest.parity.max_pipeline_error <= 1e-5


@pytest.mark.system
@pytest.mark.parametrize(("asked", "problem"), [(None, "at most 6 "), (4, "at most 4 "), (20, "")])
def test_a_prompt_that_fills_the_longest_text_is_refused(asked: int | None, problem: str, tmp_path: Path) -> None:
    """Export with several maximum lengths. If the prompt leaves no room for a text, expect an error.

    Pooling skips the tokens of the prompt. So pooling has no tokens if the prompt has the maximum length.
    """
    directory = write_model(
        tmp_path / "directory",
        [("Pooling", {"pooling_mode": "mean", "include_prompt": False})],
        settings={"prompts": {"query": "Represent this query : "}},
        transformer={"max_seq_length": 6},
    )
    if problem:
        with pytest.raises(
            UnsupportedModelError, match=f"the prompt 'Represent .*' has 6 tokens, but a text may have {problem}"
        ):
            export(directory, max_sequence_tokens=asked)
    else:
        assert export(directory, max_sequence_tokens=asked).manifest.pooling_skips_prompt


def write_classifier(folder: Path) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    write_encoder(folder)
    config = BertConfig.from_pretrained(folder, num_labels=3)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_cross_encoder(folder: Path) -> Path:
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(write_classifier(folder.with_name("classifier")))).save_pretrained(str(folder))
    return folder


def write_old_cross_encoder(folder: Path) -> Path:
    change(write_classifier(folder) / "config.json", sbert_ce_default_activation_function="torch.nn.Sigmoid")
    return folder


@pytest.mark.system
@pytest.mark.parametrize("write", [write_classifier, write_cross_encoder, write_old_cross_encoder])
def test_the_encoder_of_a_classifier_is_exported_without_its_head(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    directory = write(tmp_path / "directory")
    with pytest.raises(ConfigError, match="computes scores, so leave out --pooling. To export only the encoder"):
        export(directory, pooling="mean")
    exported = export(directory, ignore_head=True, pooling="mean")
    assert "classifier" in exported.unused_parts
    assert exported.manifest.encoder.vocab_size == len(SPECIAL) + len(WORDS)
    made = AutoTokenizer.from_pretrained(directory)("the cat", return_tensors="pt")
    with torch.no_grad():
        want = AutoModel.from_pretrained(directory)(**made).last_hidden_state[0].mean(dim=0).numpy()
    with Embedder(exported.path, tune_batches=False) as embedder:
        assert np.allclose(embedder.embed(["the cat"])[0], want, atol=1e-5)


def test_the_command_exports_the_encoder_of_a_classifier(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from encserve_export.cli import main

    arguments = ["hf", str(write_classifier(tmp_path / "m")), "--model-repository", str(tmp_path / "models")]
    refused = CliRunner().invoke(main, [*arguments, "--pooling", "mean"])
    assert "To export only the encoder with --pooling, give --ignore-head too" in refused.output
    assert CliRunner().invoke(main, [*arguments, "--ignore-head", "--pooling", "mean"]).exit_code == 0
    manifest = json.loads((tmp_path / "models" / "m" / "1" / "manifest.json").read_text())
    assert "scores" not in manifest
    assert manifest["pooling"] == "POOLING_MEAN"
