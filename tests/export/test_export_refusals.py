"""The export of a faulty directory fails and writes no files. The error has one line and contains advice."""

import functools
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, add_onnx_file, change_config, save
from rich.console import Console
from safetensors.torch import load_file, save_file
from score_models import write_scores
from tokenizers import Tokenizer, models, pre_tokenizers

from encserve_export import Exported, Target, export_hf, report
from encserve_export.core.errors import ExportError

NAMED = {architecture.name: architecture for architecture in ARCHITECTURES}
AGAIN = r"download or save it again \(in a git clone: git lfs pull\)"
TOGETHER = r"config\.json and the weights must belong to one model: download or save them again, together"
NOT_THIS = rf"(does config\.json belong to this checkpoint\?|{TOGETHER})"

Change = Callable[[Path], None]
TOKENIZERS = ("tokenizer.json", "vocab.txt", "spiece.model")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a model's directory, with onnx/model.onnx, and returns the directory.

    The function writes each directory only once.
    """
    folder = tmp_path_factory.mktemp("originals")

    @functools.cache
    def write(name: str) -> Path:
        directory = save(NAMED[name], folder)
        exported = export(directory, folder / "models", "transformers", name=name)
        add_onnx_file(directory, exported.path)
        return directory

    return write


@pytest.fixture
def directory(original: Callable[[str], Path], name: str, tmp_path: Path) -> Path:
    """Copy the directory of a model. A test may change the copy."""
    return shutil.copytree(original(name), tmp_path / "directory")


def export(directory: Path, models: Path, via: Any = None, **target: Any) -> Exported:
    ids_only = not any((directory / it).exists() for it in TOKENIZERS)
    named = Target(**{"model_repository": models, "name": "m", **target})
    return export_hf(directory, named, via=via, ids_only=ids_only, max_sequence_tokens=20)


def files_in(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(directory: Path, via: str | None = None) -> str:
    """Check that the export fails with an error of one line, and return this error.

    Also check that the directory and the model repository do not change.
    """
    models = directory.parent / "models"
    old = models / "m" / "1" / "manifest.json"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    before = files_in(directory.parent)
    with pytest.raises(ExportError) as caught:
        export(directory, models, via, overwrite=True)
    assert files_in(directory.parent) == before
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def changed(directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return changed


def config(**settings: object) -> Change:
    return lambda directory: change_config(directory, **settings)


def drop_a_shard(directory: Path) -> None:
    names = dict.fromkeys(load_file(directory / "model.safetensors"), "model-00001-of-00002.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    index = {"weight_map": names | {"encoder.x": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def writes(name: str, content: str) -> Change:
    def write(directory: Path) -> None:
        (directory / name).write_text(content)

    return write


def tokenizer(model: models.Model) -> Change:
    def write(directory: Path) -> None:
        its = Tokenizer(model)
        its.pre_tokenizer = pre_tokenizers.Whitespace()
        its.save(str(directory / "tokenizer.json"))

    return write


LAST = "encoder.layer.1.output.dense.bias"
WORDS = {f"w{i}": i for i in range(200)}
FAULTS: dict[str, tuple[Change, str]] = {
    "missing-shard": (drop_a_shard, rf"00002-of-00002\.safetensors is missing, but the index names it; {AGAIN}"),
    "narrower": (config(hidden_size=32), rf"\(.*32.*{TOGETHER}"),
    "terminal-codes": (
        weights(lambda its: its | {"encoder.\x1b]0;title\x07.bias": torch.ones(64)}),
        r"encoder\.\\x1b\]0;title\\x07\.bias",
    ),
    "more-vocabulary": (config(vocab_size=300), rf"word_embeddings\.weight .*\(300.*{TOGETHER}"),
    "less-vocabulary": (config(vocab_size=100), rf"word_embeddings\.weight .*\(100.*{TOGETHER}"),
    "more-layers": (config(num_hidden_layers=3), rf"missing: encoder\.layer\.2\..* and \d+ more.*{TOGETHER}"),
    "fewer-layers": (config(num_hidden_layers=1), rf": encoder\.layer\.1\..* and \d+ more.*{TOGETHER}"),
    "heads": (config(num_attention_heads=5), rf"\(64.*\((5\)|60).*{NOT_THIS}"),
    "heads-in-words": (config(num_attention_heads="four"), rf"'four'.*{NOT_THIS}"),
    "missing-tensor": (
        weights(lambda its: {name: tensor for name, tensor in its.items() if name != LAST}),
        rf"missing: {re.escape(LAST)}\..*{TOGETHER}",
    ),
    "missing-table": (
        weights(lambda its: {name: tensor for name, tensor in its.items() if "word_emb" not in name}),
        rf"missing: embeddings\.word_embeddings\.weight\..*{TOGETHER}",
    ),
    "left-over-tensor": (
        weights(lambda its: its | {"encoder.layer.7.output.dense.bias": torch.ones(64)}),
        rf": encoder\.layer\.7\.output\.dense\.bias.*{TOGETHER}",
    ),
    "other-names": (weights(lambda its: {f"theirs.{name}": its[name] for name in its}), rf"missing: .*{TOGETHER}"),
    "not-finite": (
        weights(lambda its: its | {LAST: its[LAST] * float("nan")}),
        rf"{re.escape(LAST)} .*finite.*Use an earlier checkpoint, or download this one again",
    ),
    "integers": (
        weights(lambda its: its | {LAST: its[LAST].to(torch.int8)}),
        rf"{re.escape(LAST)} must hold floating-point numbers; was int8",
    ),
    "no-config": (lambda its: (its / "config.json").unlink(), r"config\.json is missing: .*`encserve-export onnx`"),
    "empty": (empty, r"config\.json is missing: .*`encserve-export checkpoint`"),
    "tokenizer-too-large": (
        tokenizer(models.WordLevel(WORDS | {"[UNK]": 200}, unk_token="[UNK]")),
        r"up to 2\d\d \('.*'\), but the model's vocab_size is 200\. .*by the model's own tokenizer",
    ),
    "vocab-txt-too-large": (
        writes("vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])),
        r"vocab\.txt gives token ids up to 204 .*, but the model's vocab_size is 200\. .*by the model's own tokenizer",
    ),
    "tokenizer-without-unk": (
        tokenizer(models.WordPiece(WORDS, unk_token="[UNK]")),
        r"tokenizer\.json fails for texts with unknown characters or words: .*Set the tokenizer's unk_token",
    ),
    "tokenizer-of-no-words": (
        writes("spiece.model", "no"),
        r"cannot make a tokenizer from the files in .*\. Add a tokenizer\.json to the model's folder, or remove the",
    ),
    "classifier": (
        config(architectures=["BertForSequenceClassification"]),
        r"has no tokenizer, which a cross-encoder or a classifier needs: .*give --ignore-head for the encoder alone",
    ),
}


# A route is one way to export a directory. By default, the exporter tries each route. The ONNX route and the default
# route read the directory with the same functions. So only the slow tests, marked "system", use the ONNX route.
@pytest.mark.parametrize(
    ("name", "via"),
    [pytest.param("BERT", None, id="default"), pytest.param("ELECTRA", "onnx", id="onnx", marks=pytest.mark.system)],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_has_one_line_and_advice(directory: Path, via: str | None, fault: str) -> None:
    change, message = FAULTS[fault]
    change(directory)
    assert re.search(message, refused(directory, via))


@pytest.mark.parametrize("name", ["BERT"])
def test_a_given_route_that_cannot_export_is_refused(directory: Path) -> None:
    shutil.rmtree(directory / "onnx")
    assert re.search(r"onnx/model\.onnx in .*\. Without --via onnx, every route is tried$", refused(directory, "onnx"))


def test_a_vocabulary_file_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Export a T5 with a vocab.txt of another kind of tokenizer, and expect an error.

    From this vocab.txt, transformers creates a T5 tokenizer that knows only special tokens and a space.
    """
    directory = save(NAMED["T5"], tmp_path)
    (directory / "vocab.txt").write_text("[UNK]\nword")
    assert "the vocabulary has only special tokens. Add a tokenizer.json" in refused(directory)


@pytest.mark.system
@pytest.mark.parametrize("name", ["ELECTRA"])
def test_code_in_a_directory_is_not_run(directory: Path) -> None:
    """Export directories with Python code, and expect that the code never runs.

    If transformers has the architecture, the export succeeds without this code. The export fails for unknown weights
    and for unknown model types.
    """
    shutil.rmtree(directory / "onnx")
    change_config(directory, auto_map={"AutoModel": "modeling.Mine"})
    (directory / "modeling.py").write_text("raise SystemExit('it was run')")
    remark = export(directory, directory.parent / "elsewhere").notes["remark"]
    assert remark.startswith("the code that config.json names (auto_map) was not run")
    weights(lambda its: its | {"encoder.layer.0.alibi.bias": torch.ones(64)})(directory)
    message = r"alibi\.bias.*\(auto_map\).* never .*export the model to ONNX"
    assert re.search(message, refused(directory))
    shutil.rmtree(directory.parent / "models")
    change_config(directory, model_type="mine")
    message = r"model_type 'mine'.*\(auto_map .*never .*export the model to ONNX"
    assert re.search(message, refused(directory))


# Each entry is one refused model in the table of docs/reference/support.md.
PADDING = r"gives different rows in a padded batch, even in PyTorch: .* choose another model$"
REFUSED_FAMILIES = {
    "convbert": ({}, f"ConvBertModel {PADDING}"),  # the convolution reads the padding
    "fnet": ({"type_vocab_size": 2}, f"FNetModel {PADDING}"),  # the Fourier transform reads the padding
    "longformer": ({"attention_window": 8, "pad_token_id": 1}, r"the model fails for inputs of shape \(1, 1\)"),
    "nystromformer": (
        {"num_landmarks": 4, "segment_means_seq_len": 16},
        r"does not run in PyTorch with token ids of shape \(2, 3\)",
    ),
}


@pytest.mark.parametrize(
    "family", [pytest.param(it, marks=[] if it == "convbert" else pytest.mark.system) for it in REFUSED_FAMILIES]
)
def test_an_architecture_that_cannot_be_served_is_refused(family: str, tmp_path: Path) -> None:
    settings, message = REFUSED_FAMILIES[family]
    architecture = Architecture(family, family, {**NAMED["ELECTRA"].settings, **settings})
    assert re.search(message, refused(save(architecture, tmp_path)))


@pytest.mark.parametrize("name", ["BERT"])
@pytest.mark.parametrize(("via", "unused"), [(None, ("classifier", "pooler")), ("onnx", ("classifier",))])
def test_position_indices_and_unused_heads_are_accepted(
    directory: Path, via: str | None, unused: tuple[str, ...]
) -> None:
    """Add position indices and an unused head to the weights, and expect success.

    The report must list the head as an unused part, but must not list the position indices. This also holds if the
    head's weights equal the embedding table. The report must list the pooler only if the weights have a pooler.
    """
    table = load_file(directory / "model.safetensors")["embeddings.word_embeddings.weight"]
    legal = {"embeddings.position_ids": torch.arange(66)[None], "classifier.weight": table.clone()}
    kept = ("embeddings.", "encoder.", *unused)
    weights(lambda its: {name: it for name, it in its.items() if name.startswith(kept)} | legal)(directory)
    assert export(directory, directory.parent / "models", via).unused_parts == unused


@pytest.mark.parametrize("name", ["BERT"])
def test_control_characters_in_names_are_escaped(directory: Path) -> None:
    weights(lambda its: its | {"\x1b[2J\x1b]0;title\x07.weight": torch.ones(64)})(directory)
    exported = export(directory, directory.parent / "models", "transformers")
    console = Console(file=io.StringIO())
    report.show(exported, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"^unused parts +\\x1b\[2J\\x1b\]0;title\\x07, pooler$", printed, re.MULTILINE)
    assert not re.search("[\x00-\x09\x0b-\x1f]", printed)


@pytest.mark.system
def test_the_report_lists_an_unused_decoder(tmp_path: Path) -> None:
    """Export a T5 with a decoder, and expect the decoder in the report's unused parts.

    transformers itself does not list the decoder's weights as unused.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(T5Config(**NAMED["T5"].settings)).save_pretrained(tmp_path / "directory")
    assert export(tmp_path / "directory", tmp_path / "models").unused_parts == ("decoder",)


def test_the_onnx_file_of_a_cross_encoder_is_refused(tmp_path: Path) -> None:
    """Export the ONNX file of a cross-encoder, and expect an error.

    Such a file computes logits, but a bundle needs hidden states.
    """
    directory = write_scores(tmp_path / "directory", layout="6")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.onnx").touch()
    assert "computes logits instead of hidden states. Use --via transformers" in refused(directory, "onnx")
