"""Tokenizers and the files of sentence-transformers, checked against the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from encserve_export import Target, export_hf
from encserve_export.ground.errors import CheckpointFileError, ConfigError, TokenizerError, UnsupportedModelError
from encserve_export.kinds.dense import read_max_seq_length, read_sentence_vector, transformer_folder
from encserve_export.kinds.recipe import Recipe
from encserve_export.routes.hf import longest_sequence
from encserve_export.source.tokenizer import read_tokenizer
from encserve_proto.bundle.v1 import manifest_pb2

if TYPE_CHECKING:
    from tests.export.conftest import Checkpoint

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
TEXT_METHOD = {"method": "forward", "method_output_name": "last_hidden_state"}


def write_modules(folder: Path, modules: object, **pooling: object) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def save_linear(folder: Path, width: int) -> None:
    torch.save({"linear.weight": torch.ones(3, width), "linear.bias": torch.ones(3)}, folder / "pytorch_model.bin")


@pytest.mark.parametrize("fixed_length", [None, 12])
def test_special_tokens_are_found_whatever_length_is_baked_in(
    tmp_path: Path, write_tokenizer: Callable[..., Path], fixed_length: int | None
) -> None:
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", 30, fixed_length=fixed_length))
    assert (tokenizer.largest_id, tokenizer.around_text) == (29, (2, 3))


def test_a_tokenizer_is_what_transformers_makes_of_it(
    bert: "Checkpoint", models: Path, write_tokenizer: Callable[..., Path]
) -> None:
    """Of the vocabulary alone for BERT, whatever else the file says; and without a length of training."""
    write_tokenizer(bert.path / "tokenizer.json", 101, fixed_length=12)
    bert.set(pad_token_id=5)
    exported = export_hf(bert.path, Target(model_repository=models, name="bert"))
    written = json.loads((exported.path / "tokenizer.json").read_text())
    assert (written["model"]["type"], written["truncation"], written["padding"]) == ("WordPiece", None, None)
    assert exported.manifest.text.tokenizer_file == "tokenizer.json"
    assert list(exported.manifest.text.special_token_ids) == [2, 3, 5]
    assert "tokenizer.json" in [file.path for file in exported.manifest.files]


def test_a_vocabulary_larger_than_the_model_is_refused(
    bert: "Checkpoint", models: Path, write_tokenizer: Callable[..., Path]
) -> None:
    write_tokenizer(bert.path / "tokenizer.json", 102)
    with pytest.raises(TokenizerError, match=r"gives token ids up to 101 \(.*\); the model's vocab_size is 101"):
        export_hf(bert.path, Target(model_repository=models, name="bert"))
    assert not models.exists()


def test_ids_around_a_text_count_too(tmp_path: Path, write_tokenizer: Callable[..., Path]) -> None:
    """They stand in the rule that puts them there, whatever the vocabulary says."""
    path = write_tokenizer(tmp_path / "tokenizer.json", 30)
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [101]
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"gives token ids up to 101 \(.*\); the model's vocab_size is 101"):
        read_tokenizer(path).check_fits(101)


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": 5}'])
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no readable tokenizer"):
        read_tokenizer(path)


def test_an_empty_tokenizer_is_refused(tmp_path: Path, write_tokenizer: Callable[..., Path]) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"], content["post_processor"] = {}, None
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="has an empty vocabulary"):
        read_tokenizer(path)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, manifest_pb2.POOLING_MEAN),
        ({"pooling_mode_cls_token": True}, manifest_pb2.POOLING_CLS),
        ({"pooling_mode_max_tokens": True}, manifest_pb2.POOLING_MAX),
        ({"pooling_mode": "cls", "include_prompt": True}, manifest_pb2.POOLING_CLS),
    ],
)
def test_pooling_is_read(tmp_path: Path, pooling: dict[str, object], expected: manifest_pb2.Pooling) -> None:
    write_modules(tmp_path, MODULES, **pooling)
    found = read_sentence_vector(tmp_path)
    assert (found.pooling, found.more_poolings, found.l2_normalize) == (expected, (), True)
    assert found.prompts == {"query": "", "document": ""}  # which sentence-transformers has whatever a directory says


def test_pooling_without_normalising(bert: "Checkpoint", models: Path) -> None:
    write_modules(bert.path, MODULES[:2], pooling_mode_mean_tokens=True)
    manifest = export_hf(bert.path, Target(model_repository=models, name="bert")).manifest
    assert (manifest.pooling, manifest.l2_normalize) == (manifest_pb2.POOLING_MEAN, False)


def write_length(folder: Path, content: object, name: str = "sentence_bert_config.json") -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("usual", "asked", "longest", "remark"),
    [
        (None, None, 512, ""),
        (None, 20, 20, ""),
        (512, None, 512, ""),
        (256, None, 256, "max_sequence_tokens is 256; the checkpoint's max_seq_length is 256, its positions are 512"),
        (514, None, 512, "max_sequence_tokens is 512; the checkpoint's max_seq_length is 514, its positions are 512"),
        (256, 256, 256, "max_sequence_tokens is 256; the checkpoint's max_seq_length is 256, its positions are 512"),
        (256, 512, 512, "than 256 tokens sentence-transformers gives other vectors"),
        (256, 128, 128, "than 128 tokens sentence-transformers gives other vectors"),
    ],
)
def test_the_longest_text_is_that_of_sentence_transformers(
    usual: int | None, asked: int | None, longest: int, remark: str
) -> None:
    """Beyond it are rows that nobody ever compared the model by; another length is taken, and said aloud."""
    found, said = longest_sequence(512, usual, asked)
    assert found == longest
    assert said.endswith(remark)
    assert bool(said) == bool(remark)


def test_the_longest_text_is_read_from_the_checkpoint(bert: "Checkpoint", models: Path) -> None:
    write_length(bert.path, {"max_seq_length": 40, "do_lower_case": False})
    exported = export_hf(bert.path, Target(model_repository=models, name="bert"))
    assert exported.manifest.encoder.max_sequence_tokens == 40
    assert "the checkpoint's max_seq_length is 40" in exported.remark


def test_a_length_that_only_the_tokenizer_says_is_said(bert: "Checkpoint", models: Path) -> None:
    (bert.path / "tokenizer_config.json").write_text('{"model_max_length": 40}')
    exported = export_hf(bert.path, Target(model_repository=models, name="bert"))
    assert exported.manifest.encoder.max_sequence_tokens == 40
    assert exported.remark.endswith("the checkpoint's max_seq_length is 40, its positions are 66")
    longer = export_hf(bert.path, Target(model_repository=models, name="longer"), max_sequence_tokens=50)
    assert "for texts of more than 40 tokens sentence-transformers gives other vectors" in longer.remark


def test_a_length_beyond_the_positions_is_refused_whatever_the_checkpoint_says(
    bert: "Checkpoint", models: Path
) -> None:
    write_length(bert.path, {"max_seq_length": 70})
    with pytest.raises(ConfigError, match="max_sequence_tokens must be at most 66 for this model; was 67"):
        export_hf(bert.path, Target(model_repository=models, name="bert"), max_sequence_tokens=67)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_the_length_has_had_several_files(tmp_path: Path, name: str) -> None:
    write_length(tmp_path, {"max_seq_length": 128}, name)
    assert read_max_seq_length(tmp_path) == 128


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"max_seq_length": "256"}, "must give max_seq_length as a number of tokens from 1; was '256'"),
        ({"max_seq_length": 0}, "from 1; was 0"),
        ({"max_seq_length": True}, "from 1; was True"),
        (5, "must hold an object"),
    ],
)
def test_a_length_that_is_none(tmp_path: Path, content: object, problem: str) -> None:
    write_length(tmp_path, content)
    with pytest.raises(CheckpointFileError, match=rf"sentence_bert_config\.json .*{problem}"):
        read_max_seq_length(tmp_path)


def test_without_modules_nothing_is_known(tmp_path: Path) -> None:
    assert read_sentence_vector(tmp_path) == Recipe(manifest_pb2.POOLING_UNSPECIFIED, l2_normalize=False)


@pytest.mark.parametrize(
    ("pooling", "was"),
    [({"pooling_mode": ["mean", "attention"]}, "mean and attention"), ({"pooling_mode": None}, "None")],
)
def test_poolings_that_do_not_exist_are_refused(tmp_path: Path, pooling: dict[str, object], was: str) -> None:
    write_modules(tmp_path, MODULES, **pooling)
    with pytest.raises(UnsupportedModelError, match=f"pooling must be of mean, cls, max, .*; was {was}$"):
        read_sentence_vector(tmp_path)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("sentence_transformers.models.CNN", "has a CNN module, which a bundle cannot express here: without modules"),
        ("sentence_transformers.models.Pooling", "has a Pooling module, which a bundle cannot express here"),
        (
            "sentence_transformers.base.modules.router.Router",
            "Router module, .*: queries and documents go through",
        ),
        ("sentence_transformers.models.StaticEmbedding", "StaticEmbedding module, .*: it looks vectors up"),
        ("sentence_transformers.models.WordEmbeddings", "WordEmbeddings module, .*: there is no encoder"),
        ("sentence_transformers.models.BoW", "BoW module, .*: there is no encoder"),
        ("sentence_transformers.models.WeightedLayerPooling", "WeightedLayerPooling module, .*: without modules.json"),
        ("sentence_transformers.models.LSTM", "LSTM module, .*: without modules.json"),
        ("sentence_transformers.models.CLIPModel", "CLIPModel module, .*: it takes images too; save its text model"),
        ("custom_st.Transformer", "has a module custom_st.Transformer, which is code of its own and never run here"),
    ],
)
def test_a_module_that_a_bundle_cannot_express_is_refused(tmp_path: Path, module: str, problem: str) -> None:
    write_modules(tmp_path, [*MODULES, {"idx": 3, "name": "3", "path": "3", "type": module}], pooling_mode="mean")
    with pytest.raises(UnsupportedModelError, match=problem):
        read_sentence_vector(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "is a CrossEncoder: it scores pairs of"),
        ("config.json", {"sentence_transformers": {"activation_fn": "x"}}, "is a CrossEncoder: it scores pairs"),
        ("config.json", {"sbert_ce_default_activation_function": "x"}, "is a CrossEncoder: it scores pairs"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "must be feature-extraction .*'fill-mask'"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "takes message and no plain text"),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "x"}, "its tokenizer is that of 'x'; put that"),
        ("sentence_bert_config.json", {"config_args": {"n_heads": 3}}, "changes of the config is not known .*n_heads"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "get_text_features", "method_output_name": "pooler_output"}}},
            "a text must become token_embeddings, .* here .*get_text_features.* Save its text model alone",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": TEXT_METHOD}, "module_output_name": "sentence_embedding"},
            "here it becomes sentence_embedding",
        ),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion is for multi-vector"),
        (
            "sentence_bert_config.json",
            {"query_length": 8, "max_seq_length": 7},
            "query_length must be at most max_seq_length, 7, a bundle's longest; was 8",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"add_special_tokens": False, "padding": True}}},
            "calls the tokenizer with add_special_tokens, which",
        ),
        ("sentence_bert_config.json", {"processing_kwargs": {"common": {"max_length": 9}}}, "with max_length, which"),
        (
            "config.json",
            {"model_type": "bart", "is_encoder_decoder": True},
            "of model_type 'bart' sentence-transformers pools the rows of the decoder, which are not served",
        ),
        ("adapter_config.json", {}, "holds an adapter .* merge them with PEFT's merge_and_unload"),
        ("2_Normalize/config.json", {"module_output_name": "x"}, "only the sentence's vector can be normalised"),
    ],
)
def test_a_directory_of_another_kind_is_refused(tmp_path: Path, file: str, content: object, problem: str) -> None:
    write_modules(tmp_path, MODULES, pooling_mode="mean")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=problem):
        read_sentence_vector(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"prompts": {"query": 5}}, "must give prompts as texts by name"),
        (
            {"prompts": {"query": "q: "}, "default_prompt_name": "summary"},
            "is 'summary'; the prompts are .'document",
        ),
        ({"truncate_dim": 0}, "must give truncate_dim as a number from 1; was 0"),
    ],
)
def test_settings_that_contradict_themselves(tmp_path: Path, content: object, problem: str) -> None:
    write_modules(tmp_path, MODULES, pooling_mode="mean")
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointFileError, match=problem):
        read_sentence_vector(tmp_path)


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        ({"in_features": 0}, CheckpointFileError, "must give in_features as a number from 1; was 0"),
        ({"in_features": 5}, CheckpointFileError, "its weights are not those of its config.json: "),
        ({"activation_function": "mine.Tanh"}, UnsupportedModelError, "one of torch.nn .*; was mine.Tanh"),
        ({"activation_function": "torch.nn.modules.activation.MultiheadAttention"}, UnsupportedModelError, "one of"),
        (
            {"module_input_name": "token_embeddings"},
            UnsupportedModelError,
            "must be sentence_embedding; was 'tok",
        ),
    ],
)
def test_a_dense_module_that_cannot_be_read(
    tmp_path: Path, config: dict[str, object], error: type[Exception], problem: str
) -> None:
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    write_modules(tmp_path, [*MODULES, dense], pooling_mode="mean")
    (tmp_path / "3_Dense").mkdir()
    (tmp_path / "3_Dense" / "config.json").write_text(json.dumps({"in_features": 4, "out_features": 3, **config}))
    torch.save(
        {"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(3)}, tmp_path / "3_Dense/pytorch_model.bin"
    )
    with pytest.raises(error, match=problem):
        read_sentence_vector(tmp_path)


def test_a_head_that_does_not_take_what_is_pooled(bert: "Checkpoint", models: Path) -> None:
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    write_modules(bert.path, [*MODULES[:2], dense], pooling_mode="mean")
    (bert.path / "3_Dense").mkdir()
    (bert.path / "3_Dense" / "config.json").write_text(json.dumps({"in_features": 5, "out_features": 3}))
    torch.save(
        {"linear.weight": torch.ones(3, 5), "linear.bias": torch.ones(3)}, bert.path / "3_Dense/pytorch_model.bin"
    )
    with pytest.raises(CheckpointFileError, match="the modules after pooling do not take"):
        export_hf(bert.path, Target(model_repository=models, name="bert"))
    assert not models.exists()


def test_modules_lead_nowhere_else(tmp_path: Path) -> None:
    write_modules(tmp_path, [{**MODULES[0], "path": "../elsewhere"}])
    with pytest.raises(CheckpointFileError, match=r"names a folder outside .*: '../elsewhere'"):
        transformer_folder(tmp_path)


def test_a_broken_pooling_file(tmp_path: Path) -> None:
    write_modules(tmp_path, MODULES)
    (tmp_path / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(CheckpointFileError, match="config.json must hold an object"):
        read_sentence_vector(tmp_path)


def test_a_broken_modules_file(tmp_path: Path) -> None:
    write_modules(tmp_path, [{"idx": 0}])
    with pytest.raises(CheckpointFileError, match="must be a list of modules"):
        read_sentence_vector(tmp_path)
