"""The tokenizer and the maximum text length of a bundle agree with the model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from architectures import change_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from encserve_export import Target, export_hf
from encserve_export.core.errors import ConfigError, TokenizerError
from encserve_export.routes.hf import longest_sequence
from encserve_export.source.tokenizer import read_tokenizer


@pytest.mark.parametrize("fixed_length", [None, 12])
def test_special_tokens_are_found_with_any_stored_truncation(
    tmp_path: Path, write_tokenizer: Callable[..., Path], fixed_length: int | None
) -> None:
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", 30, fixed_length=fixed_length))
    assert (tokenizer.largest_id, tokenizer.around_text) == (29, (2, 3))


def test_a_vocabulary_of_one_word_is_accepted(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path / "tokenizer.json").largest_id == 0


@pytest.mark.system
def test_a_tokenizer_is_loaded_like_in_transformers(
    bert: Path, models: Path, write_tokenizer: Callable[..., Path]
) -> None:
    """Export a BERT whose tokenizer.json has a truncation, and expect a tokenizer without truncation.

    For a BERT, transformers reads only the vocabulary of tokenizer.json.
    """
    write_tokenizer(bert / "tokenizer.json", 101, fixed_length=12)
    change_config(bert, pad_token_id=5)
    exported = export_hf(bert, Target(model_repository=models, name="bert"))
    written = json.loads((exported.path / "tokenizer.json").read_text())
    assert (written["model"]["type"], written["truncation"], written["padding"]) == ("WordPiece", None, None)
    assert exported.manifest.text.tokenizer_file == "tokenizer.json"
    assert list(exported.manifest.text.special_token_ids) == [2, 3, 5]
    assert "tokenizer.json" in [file.path for file in exported.manifest.files]


def test_a_vocabulary_larger_than_the_model_is_refused(
    bert: Path, models: Path, write_tokenizer: Callable[..., Path]
) -> None:
    write_tokenizer(bert / "tokenizer.json", 102)
    with pytest.raises(TokenizerError, match=r"gives token ids up to 101 \(.*\), but the model's vocab_size is 101"):
        export_hf(bert, Target(model_repository=models, name="bert"))
    assert not models.exists()


def test_the_ids_of_special_tokens_are_checked_too(tmp_path: Path, write_tokenizer: Callable[..., Path]) -> None:
    """Give a special token an id that is too large for the model, and expect an error.

    The ids of special tokens are in the post-processor. These ids may be missing in the vocabulary.
    """
    path = write_tokenizer(tmp_path / "tokenizer.json", 30)
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [101]
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"gives token ids up to 101 \(.*\), but the model's vocab_size is 101"):
        read_tokenizer(path).check_fits(101)


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": 5}'])
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable tokenizer"):
        read_tokenizer(path)


def test_an_empty_tokenizer_is_refused(tmp_path: Path, write_tokenizer: Callable[..., Path]) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"], content["post_processor"] = {}, None
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="has an empty vocabulary"):
        read_tokenizer(path)


@pytest.mark.parametrize(
    ("usual", "asked", "longest", "remark"),
    [
        (None, None, 512, ""),
        (None, 20, 20, ""),
        (512, None, 512, ""),
        (
            256,
            None,
            256,
            "max_sequence_tokens is 256; the checkpoint's max_seq_length is 256, the model has 512 positions",
        ),
        (
            514,
            None,
            512,
            "max_sequence_tokens is 512; the checkpoint's max_seq_length is 514, the model has 512 positions",
        ),
        (
            256,
            256,
            256,
            "max_sequence_tokens is 256; the checkpoint's max_seq_length is 256, the model has 512 positions",
        ),
        (256, 512, 512, "than 256 tokens, sentence-transformers gives different vectors"),
        (256, 128, 128, "than 128 tokens, sentence-transformers gives different vectors"),
    ],
)
def test_sentence_transformers_sets_the_maximum_length(
    usual: int | None, asked: int | None, longest: int, remark: str
) -> None:
    """Choose the maximum length from the model, from sentence-transformers and from the user.

    If the user's length changes the vectors, the report must have a remark.
    """
    found, said = longest_sequence(512, usual, asked)
    assert found == longest
    assert said.endswith(remark)
    assert bool(said) == bool(remark)


def test_the_longest_text_is_read_from_the_checkpoint(bert: Path, models: Path) -> None:
    (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    exported = export_hf(bert, Target(model_repository=models, name="bert"), ids_only=True)
    assert exported.manifest.encoder.max_sequence_tokens == 40
    assert "the checkpoint's max_seq_length is 40" in exported.notes["longest"]


@pytest.mark.system
def test_the_report_names_a_length_from_the_tokenizer(bert: Path, models: Path) -> None:
    (bert / "tokenizer_config.json").write_text('{"model_max_length": 40}')
    exported = export_hf(bert, Target(model_repository=models, name="bert"), ids_only=True)
    assert exported.manifest.encoder.max_sequence_tokens == 40
    assert exported.notes["longest"].endswith("the checkpoint's model_max_length is 40, the model has 66 positions")
    longer = export_hf(bert, Target(model_repository=models, name="longer"), max_sequence_tokens=50, ids_only=True)
    assert "For texts of more than 40 tokens, sentence-transformers gives different vectors" in longer.notes["longest"]


def test_a_length_beyond_the_positions_is_always_refused(bert: Path, models: Path) -> None:
    (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 70}')
    with pytest.raises(ConfigError, match="max_sequence_tokens must be at most 66 for this model; was 67"):
        export_hf(bert, Target(model_repository=models, name="bert"), max_sequence_tokens=67, ids_only=True)
