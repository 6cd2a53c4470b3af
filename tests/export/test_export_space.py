"""space_id is the model's: however that is saved and exported it stays; with all that changes a vector it goes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import DATA
from onnx import numpy_helper
from onnx_files import build, node_of, tensor_of
from safetensors.torch import load_file, save_file
from sentence_models import LONGEST, write_model

from encserve_export import EncoderConfig, OnnxOptions, Target, export_checkpoint, export_hf, export_init, export_onnx
from encserve_export.bundle.space import COUNTED, digest_model
from encserve_export.ground.errors import ConfigError
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

pytest.importorskip("transformers", reason="needs encserve-export[transformers]")

MODULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Pooling", {"pooling_mode": "mean"}),
    ("Dense", {"in_features": 24, "out_features": 16}),
    ("Normalize", {}),
)
SETTINGS = {"prompts": {"query": "Query: ", "passage": ""}, "default_prompt_name": "passage"}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("original") / "model", MODULES, settings=SETTINGS)


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture(scope="module")
def space(original: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The original's, by transformers."""
    return space_of(original, tmp_path_factory.mktemp("models"))


def space_of(directory: Path, folder: Path, **options: Any) -> str:
    target = Target(model_repository=folder / "models", name="m", overwrite=True)
    manifest = export_hf(directory, target, **options).manifest
    assert re.fullmatch("s2-[0-9a-f]{32}", manifest.space_id)
    return manifest.space_id


def change_json(name: str, **changed: Any) -> Callable[[Path], None]:
    """Changes fields of a JSON file; None takes one out."""

    def change(directory: Path) -> None:
        fields = json.loads((directory / name).read_text()) | changed
        gone = {key for key, it in changed.items() if it is None}
        (directory / name).write_text(json.dumps({key: it for key, it in fields.items() if key not in gone}))

    return change


def change_tensors(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        path = directory / name
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        change(tensors)
        if path.suffix == ".safetensors":
            save_file(tensors, path, {"format": "pt"})
        else:
            torch.save(tensors, path)

    return changed


def add_to_one(name: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name].view(-1)[-1] += 1e-3

    return change


def into_shards(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    placed = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if placed[name] == shard}, directory / shard, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def into_pickle(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def rewrite_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings |= {"padding": None, "truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst",
                                                 "stride": 0}}  # fmt: skip
    path.write_text(json.dumps(dict(reversed(settings.items())), indent=7))


def reorder_modules(directory: Path) -> None:
    path = directory / "modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([*modules[:2], modules[3], modules[2]]))


SAME: dict[str, Callable[[Path], None]] = {
    "shards": into_shards,
    "a pickle": into_pickle,
    "indices of older versions": change_tensors(
        "model.safetensors", lambda its: its.update({"embeddings.position_ids": torch.arange(LONGEST)[None]})
    ),
    "where config.json comes from": change_json(
        "config.json", transformers_version="4.1.0", torch_dtype="float32", dtype=None, _name_or_path="/home/x",
        architectures=["BertForMaskedLM"], attention_probs_dropout_prob=0.5, use_cache=False,
    ),
    "how tokenizer.json is written": rewrite_tokenizer,
    "how vectors are compared": change_json("config_sentence_transformers.json", similarity_fn_name="dot"),
}  # fmt: skip
OTHER: dict[str, Callable[[Path], None]] = {
    "a weight": change_tensors("model.safetensors", add_to_one("encoder.layer.1.output.dense.weight")),
    "the configuration": change_json("config.json", layer_norm_eps=1e-5),
    "the tokenizer": change_json("tokenizer.json", normalizer={"type": "Lowercase"}),
    "lower case": change_json("sentence_bert_config.json", do_lower_case=True),
    "the longest text": change_json("sentence_bert_config.json", max_seq_length=20),
    "pooling": change_json("1_Pooling/config.json", pooling_mode="cls"),
    "pooling of the prompt": change_json("1_Pooling/config.json", include_prompt=False),
    "a weight of the head": change_tensors("2_Dense/pytorch_model.bin", add_to_one("linear.bias")),
    "an activation": change_json("2_Dense/config.json", activation_function="torch.nn.modules.activation.ReLU"),
    "the order of modules": reorder_modules,
    "a prompt": change_json("config_sentence_transformers.json", prompts={"query": "query: ", "passage": ""}),
    "the default prompt": change_json("config_sentence_transformers.json", default_prompt_name="query"),
    "dimensions": change_json("config_sentence_transformers.json", truncate_dim=8),
}  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize("what", SAME)
def test_what_is_nothing_to_a_vector(directory: Path, tmp_path: Path, space: str, what: str) -> None:
    SAME[what](directory)
    assert space_of(directory, tmp_path) == space


@pytest.mark.system
@pytest.mark.parametrize("what", OTHER)
def test_what_changes_a_vector(directory: Path, tmp_path: Path, space: str, what: str) -> None:
    OTHER[what](directory)
    assert space_of(directory, tmp_path) != space


def test_every_route(directory: Path, tmp_path: Path, space: str) -> None:
    """The directory's own ONNX file too, which is compared with its weights."""
    assert space_of(directory, tmp_path) == space
    (directory / "onnx").mkdir()
    for file in (tmp_path / "models" / "m" / "1").glob("model.onnx*"):
        shutil.copy(file, directory / "onnx")
    assert space_of(directory, tmp_path, via="onnx") == space
    for name in ("model.safetensors", "modules.json"):
        (directory / name).unlink()
    assert space_of(directory, tmp_path, via="onnx") != space


@pytest.mark.system
def test_options_and_precision(tmp_path: Path) -> None:
    """float16 rounds, as servers do; 8 bits are other weights."""
    asked: list[dict[str, Any]] = [
        {},
        {"precision": "float16"},
        {"precision": "float16", "via": "transformers"},
        {"precision": "int8"},
        {"precision": "int8", "via": "transformers"},
        {"max_sequence_tokens": 30},
    ]
    plain, *spaces = [space_of(DATA / "hf-bert", tmp_path, ids_only=True, **options) for options in asked]
    assert spaces[:2] == [plain, plain]
    assert spaces[2] == spaces[3]
    assert len({plain, *spaces}) == 3


def test_onnx_alone(tmp_path: Path) -> None:
    """By its initializers and its nodes, not by what is said beside them or where the numbers lie."""

    def space(model: onnx.ModelProto, **how: Any) -> str:
        path = tmp_path / "model.onnx"
        path.unlink(missing_ok=True)
        onnx.save(model, path, **how)
        target = Target(model_repository=tmp_path / "models", name="m", overwrite=True)
        return export_onnx(path, target, OnnxOptions(max_sequence_tokens=20)).manifest.space_id

    plain = space(build())
    assert space(build(), save_as_external_data=True, location="data", size_threshold=0) == plain
    renamed = build()
    for node in renamed.graph.node:
        node.name, node.doc_string = f"{node.name} renamed", "line 7"
    assert space(renamed) == plain
    listed, table = build(), numpy_helper.to_array(tensor_of(build(), "table"))
    tensor_of(listed, "table").ClearField("raw_data")
    tensor_of(listed, "table").float_data.extend(table.ravel().tolist())
    assert space(listed) == plain
    weight, computed = build(), build()
    tensor_of(weight, "table").CopyFrom(numpy_helper.from_array(table + np.float32(1e-3), "table"))
    node_of(computed, "rows").op_type = "Sub"
    assert len({plain, space(weight), space(computed)}) == 3


def test_a_key_that_is_not_known_counts_and_one_of_training_does_not() -> None:
    plain = digest_model({}, {"a": 1})
    assert digest_model({}, {"a": 1, "b": None}) != plain
    assert digest_model({}, {"a": 1, "hidden_dropout_prob": 0.1, "classifier_dropout": None}) == plain
    nested = {"a": 1, "text_config": {"torch_dtype": "float32", "b": 1}}
    assert digest_model({}, nested) == digest_model({}, {"a": 1, "text_config": {"b": 1}}) != plain


def test_numbers_by_their_value_and_texts_as_they_are() -> None:
    plain = digest_model({}, {"a": 1, "b": [10000.0, "1", None, True, 0.1]})
    assert digest_model({}, {"b": (1e4, "1", None, True, 0.1), "a": 1.0}) == plain
    others = [[10000.5, "1", None, True, 0.1], [1e4, 1, None, True, 0.1], [1e4, "1", None, 1, 0.1]]
    assert len({plain, *(digest_model({}, {"a": 1, "b": it}) for it in others)}) == 4


@pytest.mark.parametrize("configuration", [{"dtype_of": torch.float32}, {"a": {1: 2}}, {"a": [{1, 2}]}])
def test_a_configuration_that_json_cannot_say_is_refused(configuration: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"configuration must be .*; (it holds|was) "):
        digest_model({}, configuration)


def test_copies_that_transformers_ties_do_not_count() -> None:
    """A .bin file holds them, safetensors leaves them out."""
    words, bias = torch.arange(6.0).reshape(3, 2), torch.arange(3.0)
    saved = {"bert.embeddings.word_embeddings.weight": words, "cls.predictions.bias": bias}
    copies = {"cls.predictions.decoder.weight": words, "cls.predictions.decoder.bias": bias}
    plain = digest_model(saved, {})
    assert digest_model({**copies, **saved}, {}) == plain
    assert digest_model({**saved, "cls.predictions.decoder.weight": words + 1}, {}) != plain
    assert digest_model({**saved, "another.weight": words}, {}) != plain
    shared = {"lm_head.weight": words, "encoder.embed_tokens.weight": words, "decoder.embed_tokens.weight": words}
    assert digest_model({"decoder.embed_tokens.weight": words}, {}) == digest_model(shared, {}), "one of them stays"


def test_each_field_of_the_manifest_counts_or_not_by_decision() -> None:
    """A new field needs one: in `COUNTED` and docs/models.md, or here."""
    of_files = {"file", "input_name", "output_name", "rows_name", "mask_name", "width"}
    beside: dict[str, set[str]] = {
        "Manifest": {
            *(
                "format_version",
                "name",
                "version",
                "fingerprint",
                "space_id",
                "source",
                "files",
                "parameters",
                "parity",
            ),
            *("inspect_graph", "similarity"),
            *("encoder", "graph", "head"),  # by the model, its precision and longest sequence, and its modules
        },
        "MultiVector": {*of_files, "similarity"},
        "Sparse": of_files,
        "StaticSparse": {"tokenizer_file", "weights_file"},
        # By the tokenizer itself; a text without tokens has a vector or none.
        "TextInput": {"tokenizer_file", "special_token_ids", "takes_empty"},
    }
    for name, message in manifest_pb2.DESCRIPTOR.message_types_by_name.items():
        if name in COUNTED:
            undecided = {it.name for it in message.fields} - {*COUNTED[name]} - beside.get(name, set())
            assert not undecided, f"{name}: does {undecided} change vectors?"
            nested = {it.message_type.name for it in message.fields if it.name in COUNTED[name] and it.message_type}
            assert nested <= {*COUNTED, "PromptsEntry"}


def test_a_given_id_is_kept(tiny: EncoderConfig, tmp_path: Path) -> None:
    target = Target(model_repository=tmp_path, name="m")
    own = export_init(tiny, 1, target)
    for given in ("0123456789abcdef" * 2, f"s2-{'5' * 32}"):
        kept = export_init(tiny, 1, Target(model_repository=tmp_path, name="m", overwrite=True, keep_space_id=given))
        assert (kept.manifest.space_id, kept.replaced_space_id) == (given, own.manifest.space_id)
        assert kept.manifest.fingerprint == fingerprint(kept.manifest) != own.manifest.fingerprint
    assert own.replaced_space_id == ""


@pytest.mark.parametrize("given", ["5" * 31, f"s2-{'5' * 33}", f"s3-{'5' * 32}", "A" * 32, f"{'5' * 32}\n"])
def test_what_is_no_id_is_not_kept(given: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="a space_id is s2- and 32 hex digits, or 32 hex digits in older bundles; was"
    ):
        Target(model_repository=tmp_path, name="m", keep_space_id=given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_by_name_type_shape_and_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    shapes = [tensor, tensor.reshape(3, 2), tensor[:, :2], tensor[0, 0], tensor[:0], tensor.flip(0)]
    others = [{"x": it} for it in (*shapes, tensor.to(torch.float16))]
    spaces = {digest_model(tensors, {}) for tensors in (*others, {"y": tensor})}
    assert len(spaces) == 8
    transposed = tensor.T.contiguous().T
    assert not transposed.is_contiguous()
    assert digest_model({"x": transposed}, {}) == digest_model({"x": tensor}, {}), "strides are how it lies in memory"


def test_our_own_encoder(tiny: EncoderConfig, tmp_path: Path) -> None:
    """By its weights; a state dict, whatever is around it, by its own names."""
    target = Target(model_repository=tmp_path, name="m", overwrite=True)
    first = export_init(tiny, 1, target).manifest.space_id
    assert export_init(tiny, 1, target).manifest.space_id == first != export_init(tiny, 2, target).manifest.space_id
    stack = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    tensors = {**stack.state_dict(), "embedding.weight": torch.randn(50, 16)}
    path = tmp_path / "weights.pt"
    spaces = []
    for content, heads in ((tensors, 2), ({"model": {f"module.{k}": v for k, v in tensors.items()}}, 2), (tensors, 4)):
        torch.save(content, path)
        fields = {"n_heads": heads, "activation": "relu", "norm": "post", "position": "sinusoidal",
                  "scale_embedding": False, "max_sequence_tokens": 24}  # fmt: skip
        spaces.append(export_checkpoint(path, target, fields=fields).manifest.space_id)
    assert spaces[0] == spaces[1] != spaces[2]
