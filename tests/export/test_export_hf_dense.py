"""Directories that make one vector of a text: read as sentence-transformers reads them, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_models import D_MODEL, write_encoder, write_model
from torch import nn

from encserve_export import Target, export_hf
from encserve_export.ground.errors import CheckpointFileError, UnsupportedModelError
from encserve_export.kinds.directory import transformer_folder
from encserve_export.kinds.reading import read
from encserve_proto.bundle.v1 import manifest_pb2

MEAN: tuple[str, dict[str, object]] = ("Pooling", {"pooling_mode": "mean"})
NORMALIZE: tuple[str, dict[str, object]] = ("Normalize", {})
TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
CHAT = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "directory", [MEAN, NORMALIZE])


def change(path: Path, **changed: Any) -> None:
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(found | changed))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, manifest_pb2.POOLING_MEAN),
        ({"pooling_mode_cls_token": True}, manifest_pb2.POOLING_CLS),
        ({"pooling_mode": "cls", "include_prompt": True}, manifest_pb2.POOLING_CLS),
    ],
)
def test_pooling_is_read(tmp_path: Path, pooling: dict[str, object], expected: manifest_pb2.Pooling) -> None:
    found = read(write_model(tmp_path, [("Pooling", pooling), NORMALIZE]))
    assert (found.pooling, found.more_poolings, found.l2_normalize) == (expected, (), True)
    assert found.prompts == {"query": "", "document": ""}  # which sentence-transformers has whatever a directory says


def test_without_modules_nothing_is_known(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    found = read(tmp_path)
    assert (found.kind, found.pooling, found.l2_normalize) == ("dense", manifest_pb2.POOLING_UNSPECIFIED, False)


def test_modules_behind_pooling_count_for_the_vector_space(tmp_path: Path) -> None:
    """By the names, the types and the bytes of their files."""
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
    """By its name on the hub, as sentence-transformers does, whatever its files say."""
    assert not read(directory, "someone/else").skips_prompt
    assert read(directory, "hkunlp/instructor-large").skips_prompt


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_the_length_has_had_several_files(directory: Path, name: str) -> None:
    (directory / "sentence_bert_config.json").unlink()
    (directory / name).write_text('{"max_seq_length": 20}')
    assert read(directory).max_seq_length == 20


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"max_seq_length": "256"}, "must give max_seq_length as a number of tokens from 1; was '256'"),
        ({"max_seq_length": 0}, "from 1; was 0"),
        ({"max_seq_length": True}, "from 1; was True"),
        (5, "must hold a JSON object"),
    ],
)
def test_a_length_that_is_no_number_of_tokens(directory: Path, content: object, problem: str) -> None:
    (directory / "sentence_bert_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointFileError, match=rf"sentence_bert_config\.json .*{problem}"):
        read(directory)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("sentence_transformers.models.CNN", "has a CNN module, which a bundle cannot express here: without modules"),
        ("sentence_transformers.models.WordEmbeddings", "WordEmbeddings module, .*: there is no encoder"),
        ("sentence_transformers.models.BoW", "BoW module, .*: there is no encoder"),
        ("sentence_transformers.models.LSTM", "LSTM module, .*: without modules.json"),
        ("sentence_transformers.models.CLIPModel", "CLIPModel module, .*: it takes images too; save its text model"),
        ("sentence_transformers.models.Asym", "Asym module, .*: queries and documents go through"),
        ("sentence_transformers.base.modules.router.Router", "Router module, .*: queries and documents go through"),
        ("custom_st.Transformer", "has a module custom_st.Transformer, which is code of its own and never run here"),
        ("pylate.models.Evil.Dense", "has a module pylate.models.Evil.Dense, which is code of its own and never run"),
    ],
)
def test_a_module_that_is_not_known_is_refused_before_anything_is_loaded(
    directory: Path, module: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentence_transformers.SentenceTransformer.__init__", lambda *_, **__: pytest.fail("loaded"))
    modules = json.loads((directory / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3", "type": module})
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match=problem):
        read(directory)


def test_a_routers_modules_are_checked_before_anything_is_loaded(directory: Path) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.router.Router"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    router = directory / "router_config.json"
    for types, error, problem in (
        ({"query": "mine.Encoder"}, UnsupportedModelError, "has a module mine.Encoder, which is code of its own"),
        (
            {"../x": "sentence_transformers.models.Transformer"},
            CheckpointFileError,
            "names a folder outside .*: '../x'",
        ),
    ):
        router.write_text(json.dumps({"types": types, "structure": {}, "parameters": {}}))
        with pytest.raises(error, match=problem):
            read(directory)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "is a CrossEncoder: it scores pairs of"),
        ("config_sentence_transformers.json", {"model_type": "Mine"}, "must be one of SentenceTransformer.*was 'Mine'"),
        ("config_sentence_transformers.json", {"requirements": {"torch": ">=99"}}, "cannot load .*ImportError.*torch"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "cannot load .*Default prompt name 'x'"),
        ("config.json", {"sentence_transformers": {"activation_fn": "x"}}, "is a CrossEncoder: it scores pairs"),
        ("config.json", {"sbert_ce_default_activation_function": "x"}, "is a CrossEncoder: it scores pairs"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "must be feature-extraction .*'fill-mask'"),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "x"}, "its tokenizer is that of 'x'; put that"),
        ("sentence_bert_config.json", {"config_args": {"n_heads": 3}}, "changes of the config is not known .*n_heads"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "length": 9}},
            "query_expansion is for multi-vector",
        ),
        (
            "sentence_bert_config.json",
            {"query_length": 8, "max_seq_length": 7},
            "query_length must be at most .* was 8",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {**TEXT, "method_output_name": "pooler_output"}}, "module_output_name": "x"},
            "a text must become token_embeddings, .* here .*pooler_output.* Save its text model alone",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"add_special_tokens": False, "padding": True}}},
            "calls the tokenizer with add_special_tokens, which",
        ),
        ("adapter_config.json", {}, "holds an adapter .* merge them with PEFT's merge_and_unload"),
        ("2_Normalize/config.json", {"module_output_name": "x"}, "Normalize module must read and write sentence_emb"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "attention"]}, "cannot load .*Invalid pooling mode"),
    ],
)
def test_a_directory_of_another_kind_is_refused(
    directory: Path, file: str, content: dict[str, Any], problem: str
) -> None:
    change(directory / file, **content)
    with pytest.raises(UnsupportedModelError, match=problem):
        read(directory)


def test_the_rows_of_a_decoder_are_refused(tmp_path: Path) -> None:
    config = {"d_model": D_MODEL, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
              "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
    write_model(tmp_path, [MEAN], encoder={"model_type": "bart", "config": config})
    with pytest.raises(UnsupportedModelError, match="of model_type 'bart' sentence-transformers pools the rows of the"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"in_features": 5}, "cannot load .*: Error.* size mismatch"),
        ({"activation_function": "mine.Tanh"}, "must be a class of torch.nn, .* was 'mine.Tanh', for which"),
        ({"activation_function": "torch.hub.load"}, "must be a class of torch.nn, .* was 'torch.hub.load'"),
        ({"module_input_name": "token_embeddings"}, "Dense module must read and write sentence_embedding"),
    ],
)
def test_a_dense_module_that_cannot_be_read(tmp_path: Path, config: dict[str, object], problem: str) -> None:
    write_model(tmp_path, [MEAN, ("Dense", {"in_features": D_MODEL, "out_features": 3})])
    change(tmp_path / "2_Dense" / "config.json", **config)
    with pytest.raises(UnsupportedModelError, match=problem):
        read(tmp_path)


def test_a_head_that_does_not_take_what_is_pooled(tmp_path: Path) -> None:
    write_model(tmp_path / "directory", [MEAN, ("Dense", {"in_features": 5, "out_features": 3})])
    with pytest.raises(CheckpointFileError, match="the modules after pooling do not take"):
        export_hf(tmp_path / "directory", Target(model_repository=tmp_path / "models", name="m"))
    assert not (tmp_path / "models").exists()


def test_modules_lead_nowhere_else(directory: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([{**modules[0], "path": "../elsewhere"}]))
    with pytest.raises(CheckpointFileError, match=r"names a folder outside .*: '../elsewhere'"):
        transformer_folder(directory)


def test_a_broken_modules_file(directory: Path) -> None:
    (directory / "modules.json").write_text('[{"idx": 0}]')
    with pytest.raises(CheckpointFileError, match="must be a list of modules"):
        read(directory)


def test_modules_run_no_code_of_the_directory(directory: Path) -> None:
    """Nor does config.json, whose class of its own transformers would take if it were trusted."""
    change(directory / "config.json", model_type="mine", auto_map={"AutoConfig": "c.C", "AutoModel": "c.M"})
    (directory / "c.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UnsupportedModelError, match="sentence-transformers cannot load"):
        read(directory)


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    write_model(tmp_path, [MEAN, ("Dense", {"in_features": D_MODEL, "out_features": 3})])
    torch.save(nn.Linear(D_MODEL, 3), tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="cannot load .*UnpicklingError"):
        read(tmp_path)


def test_a_directory_without_a_tokenizer_takes_ids_only(directory: Path, tmp_path: Path) -> None:
    """Of no files at all transformers makes a tokenizer that knows no word."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    exported = export_hf(directory, Target(model_repository=tmp_path / "models", name="m"), ids_only=True)
    assert not exported.manifest.HasField("text")
    assert "going on without tokenizer.json" in exported.notes["text"]
    assert exported.notes["compared with"] == "transformers"


def test_modules_without_a_pooling(tmp_path: Path) -> None:
    """sentence-transformers has the rows alone, whatever pooling is asked for."""
    directory = write_model(tmp_path / "directory", [])
    exported = export_hf(directory, Target(model_repository=tmp_path / "models", name="m"), pooling="mean")
    assert exported.manifest.pooling == manifest_pb2.POOLING_MEAN
    assert exported.notes["compared with"] == "sentence-transformers"
