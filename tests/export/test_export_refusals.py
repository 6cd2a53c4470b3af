"""What is wrong with a directory is said once, with what to try next, on every route of `hf`; nothing is written."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, change_config, save
from click.testing import CliRunner, Result
from onnx_files import POSITIONS, VOCAB_SIZE, node_of
from onnx_files import build as build_onnx
from onnx_files import save as save_onnx
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from encserve_export.cli import main

NAMED = {architecture.name: architecture for architecture in ARCHITECTURES}
ROUTES = [
    ("BERT", None),
    ("ELECTRA", None),
    ("ELECTRA", "onnx"),
    ("ELECTRA", "transformers"),
]
ON_EVERY_ROUTE = pytest.mark.parametrize(("name", "via"), ROUTES, ids=lambda it: str(it).lower())
AGAIN = r"[Dd]ownload or save it again \(in a clone by git: git lfs pull\)"
TOGETHER = r"config\.json and the weights must be of one model: download or save them again, together"
NOT_THIS = rf"(is it this checkpoint's\?|{TOGETHER})"

Change = Callable[[Path], None]
TOKENIZERS = ("tokenizer.json", "vocab.txt", "spiece.model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each model, with a true onnx/model.onnx in it."""
    folder = tmp_path_factory.mktemp("made")
    directories = {name: save(NAMED[name], folder) for name in ("BERT", "ELECTRA")}
    for name, directory in directories.items():
        result = hf(directory, folder / "models", "transformers", "--name", name)
        assert result.exit_code == 0, result.output
        (directory / "onnx").mkdir()
        for file in (folder / "models" / name / "1").glob("model.onnx*"):
            shutil.copy(file, directory / "onnx")
    return directories


@pytest.fixture
def directory(made: dict[str, Path], name: str, tmp_path: Path) -> Path:
    return shutil.copytree(made[name], tmp_path / "directory")


def hf(directory: Path, repository: Path, via: str | None, *options: str) -> Result:
    forced = [] if via is None else ["--via", via]
    # A directory that has a tokenizer is refused for --ids-only.
    forced += [] if any((directory / it).exists() for it in TOKENIZERS) else ["--ids-only"]
    command = ["hf", directory, "--model-repository", repository, "--max-sequence-tokens", 20, *forced]
    return CliRunner().invoke(main, [str(argument) for argument in (*command, *options)])


def files_in(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(directory: Path, via: str | None = None) -> str:
    """The error; neither the directory nor what was in the repository has changed."""
    repository = directory.parent / "models"
    there = repository / "m" / "1" / "manifest.json"
    there.parent.mkdir(parents=True)
    there.write_text("of an export before")
    before = files_in(directory.parent)
    result = hf(directory, repository, via, "--name", "m", "--overwrite")
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), f"no traceback: {result.exception!r}"
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert errors == result.stderr.splitlines()[-1:], "one error, of one line"
    assert files_in(directory.parent) == before
    return errors[0]


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


def cut_a_shard(directory: Path) -> None:
    drop_a_shard(directory)
    shard = (directory / "model-00001-of-00002.safetensors").read_bytes()
    (directory / "model-00002-of-00002.safetensors").write_bytes(shard[:5000])


def cut_a_pickle(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    pickle = (directory / "pytorch_model.bin").read_bytes()
    (directory / "pytorch_model.bin").write_bytes(pickle[:5000])


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
    "missing-shard": (drop_a_shard, rf"00002-of-00002\.safetensors is missing; the index names it\. {AGAIN}"),
    "cut-shard": (cut_a_shard, rf"00002-of-00002\.safetensors is no readable safetensors file: .*; {AGAIN}"),
    "cut-pickle": (cut_a_pickle, rf"pytorch_model\.bin is unreadable: .*; {AGAIN}"),
    "lfs": (writes("model.safetensors", "version https://git-lfs.github.com/spec/v1"), rf"no readable .*; {AGAIN}"),
    "narrower": (config(hidden_size=32), rf"\(.*32.*{TOGETHER}"),
    "absurdly-wide": (config(hidden_size=10**7), rf"(10000000|of [\d,]+ numbers; the weights have).*{TOGETHER}"),
    "absurdly-many-layers": (
        config(num_hidden_layers=10**9),
        r"num_hidden_layers in .*config\.json.*1024; was 10{9}\.",
    ),
    "terminal-codes": (
        weights(lambda its: its | {"encoder.\x1b]0;title\x07.bias": torch.ones(64)}),
        r"encoder\.\\x1b\]0;title\\x07\.bias",
    ),
    "more-vocabulary": (config(vocab_size=300), rf"word_embeddings\.weight .*\(300.*{TOGETHER}"),
    "less-vocabulary": (config(vocab_size=100), rf"word_embeddings\.weight .*\(100.*{TOGETHER}"),
    "more-layers": (config(num_hidden_layers=3), rf"missing: encoder\.layer\.2\..* and \d+ more.*{TOGETHER}"),
    "fewer-layers": (config(num_hidden_layers=1), rf": encoder\.layer\.1\..* and \d+ more.*{TOGETHER}"),
    "heads": (config(num_attention_heads=5), rf"\(?5|60.*{NOT_THIS}"),
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
        rf"{re.escape(LAST)} .*finite.*Take an earlier checkpoint, or download it again",
    ),
    "no-config": (lambda its: (its / "config.json").unlink(), r"config\.json is missing: .*`encserve-export onnx`"),
    "broken-config": (writes("config.json", "{"), rf"config\.json cannot be read as JSON: .*; {AGAIN}"),
    "config-of-another-kind": (writes("config.json", "[]"), rf"config\.json must hold an object; {AGAIN}"),
    "empty": (empty, r"config\.json is missing: .*`encserve-export checkpoint`"),
    "tokenizer-too-large": (
        tokenizer(models.WordLevel(WORDS | {"[UNK]": 200}, unk_token="[UNK]")),
        r"up to 2\d\d \('.*'\); the model's vocab_size is 200: .*Put the one there that the model was trained with",
    ),
    "vocab-txt-too-large": (
        writes("vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])),
        r"vocab\.txt gives token ids up to 204 .*; the model's vocab_size is 200: .*Put the one there",
    ),
    "tokenizer-without-unk": (
        tokenizer(models.WordPiece(WORDS, unk_token="[UNK]")),
        r"tokenizer\.json fails for texts with .* it does not know: .*Give its model an unk_token that is in its vocab",
    ),
    "tokenizer-of-no-words": (
        writes("spiece.model", "no"),
        r"makes no tokenizer of the files in .*; put a tokenizer\.json there, or take the",
    ),
    "broken-tokenizer": (writes("tokenizer.json", "{"), rf"tokenizer\.json is no readable tokenizer: .*; {AGAIN}"),
    "classifier": (
        config(architectures=["BertForSequenceClassification"]),
        r'names BertForSequenceClassification, .* gives scores and no vector; .*take "architectures" out of config',
    ),
}


@ON_EVERY_ROUTE
@pytest.mark.parametrize("fault", FAULTS)
def test_one_clear_error(directory: Path, via: str | None, fault: str) -> None:
    change, message = FAULTS[fault]
    change(directory)
    assert re.search(message, refused(directory, via))


@pytest.mark.parametrize(
    ("name", "via", "message"),
    [
        ("BERT", "onnx", r"there is no onnx/model\.onnx in .*\. Without --via onnx, every route is tried$"),
    ],
)
def test_a_route_that_does_not_take_it(directory: Path, via: str, message: str) -> None:
    shutil.rmtree(directory / "onnx")
    assert re.search(message, refused(directory, via))


def test_a_tokenizers_file_of_another_kind(tmp_path: Path) -> None:
    """transformers makes T5's of nothing, with a space in it."""
    directory = save(NAMED["T5"], tmp_path)
    (directory / "vocab.txt").write_text("[UNK]\nword")
    assert "it reads none of them, and has special tokens alone; put a tokenizer.json there" in refused(directory)


@pytest.mark.parametrize("name", ["ELECTRA"])
@pytest.mark.parametrize("via", [None, "transformers"])
def test_code_of_its_own(directory: Path, via: str | None) -> None:
    """It is never run: not for a model that transformers has not, nor for weights that are not those of its own."""
    shutil.rmtree(directory / "onnx")
    change_config(directory, auto_map={"AutoModel": "modeling.Mine"})
    (directory / "modeling.py").write_text("raise SystemExit('it was run')")
    exported = hf(directory, directory.parent / "elsewhere", via)
    assert exported.exit_code == 0, exported.output
    assert re.search(
        r"^remark +the code that config.json names \(auto_map\) was not run", exported.stdout, re.MULTILINE
    )
    weights(lambda its: its | {"encoder.layer.0.alibi.bias": torch.ones(64)})(directory)
    message = r"alibi\.bias\. config\.json names code of its own \(auto_map\), .* never executed; .*export it as ONNX"
    assert re.search(message, refused(directory, via))
    shutil.rmtree(directory.parent / "models")
    change_config(directory, model_type="mine")
    message = (
        r"model_type 'mine' brings code of its own \(auto_map .*, which is never executed; export it as ONNX yourself"
    )
    assert re.search(message, refused(directory, via))


@pytest.mark.parametrize("via", [None, "transformers"])
def test_an_architecture_whose_padding_changes_rows(tmp_path: Path, via: str | None) -> None:
    """Its convolution runs over the end of a sequence."""
    convolving = Architecture("ConvBERT", "convbert", {**NAMED["ELECTRA"].settings, "num_attention_heads": 4})
    message = r"ConvBertModel gives other rows in a padded batch, in PyTorch already: .*: choose another model$"
    assert re.search(message, refused(save(convolving, tmp_path), via))


@pytest.mark.parametrize("via", [None, "onnx"])
def test_an_onnx_file_that_ignores_its_mask(tmp_path: Path, via: str | None) -> None:
    directory = tmp_path / "directory"
    (directory / "onnx").mkdir(parents=True)
    model = build_onnx()
    node_of(model, "total").input[0] = "placed"
    save_onnx(model, directory / "onnx" / "model.onnx")
    settings = {"model_type": "mine", "vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS}
    (directory / "config.json").write_text(json.dumps(settings))
    error = refused(directory, via)
    assert "the model changes when padded: relative error " in error
    assert "it ignores its attention mask in part or altogether" in error


@pytest.mark.parametrize("name", ["BERT", "ELECTRA"])
@pytest.mark.parametrize("via", [None, "onnx", "transformers"])
def test_what_is_no_fault(directory: Path, name: str, via: str | None) -> None:
    """Indices among the weights; and a head, which is named, whose table is that of the tokens."""
    table = load_file(directory / "model.safetensors")["embeddings.word_embeddings.weight"]
    legal = {"embeddings.position_ids": torch.arange(66)[None], "classifier.weight": table.clone()}
    weights(lambda its: its | legal)(directory)
    exported = hf(directory, directory.parent / "models", via)
    assert exported.exit_code == 0, exported.output
    (left,) = re.findall("^left behind +(.*)$", exported.stdout, re.MULTILINE)
    assert left == ("classifier, pooler" if name == "BERT" else "classifier")


@pytest.mark.parametrize("name", ["ELECTRA"])
def test_a_terminal_is_told_nothing_by_names(directory: Path) -> None:
    weights(lambda its: its | {"\x1b[2J\x1b]0;title\x07.weight": torch.ones(64)})(directory)
    exported = hf(directory, directory.parent / "models", "transformers")
    assert exported.exit_code == 0, exported.output
    assert re.search(r"^left behind +\\x1b\[2J\\x1b\]0;title\\x07$", exported.stdout, re.MULTILINE)
    assert not re.search("[\x00-\x09\x0b-\x1f]", exported.output)


def test_a_decoder_is_left_behind(tmp_path: Path) -> None:
    """transformers itself says nothing of it."""
    from transformers import T5Config, T5ForConditionalGeneration

    T5ForConditionalGeneration(T5Config(**NAMED["T5"].settings)).save_pretrained(tmp_path / "directory")
    exported = hf(tmp_path / "directory", tmp_path / "models", None)
    assert exported.exit_code == 0, exported.output
    assert re.search("^left behind +decoder$", exported.stdout, re.MULTILINE)


def test_a_cross_encoder(tmp_path: Path) -> None:
    """As sentence-transformers 6 writes one, with modules.json."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification

    plain = save(NAMED["BERT"], tmp_path)
    AutoModelForSequenceClassification.from_pretrained(plain, num_labels=1).save_pretrained(plain)
    tokenizer(models.WordLevel(WORDS, unk_token="w1"))(plain)
    for via in (None, "onnx", "transformers"):
        directory = tmp_path / str(via) / "directory"
        CrossEncoder(str(plain), device="cpu").save_pretrained(str(directory))
        assert "is a CrossEncoder: it scores pairs of texts" in refused(directory, via)
