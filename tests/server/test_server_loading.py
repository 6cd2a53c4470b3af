"""Bundles whose manifest vouches for all of their files, and whose parts do not belong together."""

from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import VOCAB_SIZE, write_bundle
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encserve_server.errors import BundleError, InvalidField
from encserve_server.models.turns import TurnPool
from encserve_server.offline import Embedder
from encserve_server.repository import loading
from encserve_server.repository.loaded import LoadedModel, ServedAlready
from encserve_server.repository.loading import load_model
from encserve_server.settings import Settings

FAR = 2**32 - 1  # the largest number that a tokenizer can hold


def load(directory: Path, **settings: Any) -> LoadedModel:
    """Loads a bundle as a server does."""
    chosen = Settings(model_repository=directory, tune_batches=False, **settings)
    return load_model(directory, chosen, TurnPool(1))


def words(count: int, processor: processors.PostProcessor | None = None) -> Tokenizer:
    """A tokenizer of so many words, with something that puts tokens around them."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def around(begin: int, end: int) -> processors.PostProcessor:
    return processors.TemplateProcessing(single="B $A E", special_tokens=[("B", begin), ("E", end)])


def with_a_token(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["[X]"])
    return tokenizer


def test_what_is_served_already_is_verified_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may have been touched, or copied back; a second model in memory would be for nothing."""
    directory = write_bundle(tmp_path)
    served = load(directory)
    monkeypatch.setattr(loading, "open_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    arguments = directory, Settings(model_repository=tmp_path), TurnPool(1), served.bundle.fingerprint
    with pytest.raises(ServedAlready):
        load_model(*arguments)
    (directory / "model.onnx").write_bytes(b"altered")
    with pytest.raises(BundleError, match=r"model.onnx"):
        load_model(*arguments)


@pytest.mark.parametrize(
    "tokenizer",
    [
        words(VOCAB_SIZE),
        words(7),
        words(VOCAB_SIZE, around(1, VOCAB_SIZE - 1)),
        words(VOCAB_SIZE, processors.BertProcessing(("E", VOCAB_SIZE - 1), ("B", 0))),
        with_a_token(words(VOCAB_SIZE - 1)),
    ],
)
def test_a_tokenizer_that_fits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """It may know fewer words than the model, and any of the model's ids may stand around a text."""
    load(write_bundle(tmp_path, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("tokenizer", "largest"),
    [
        (words(VOCAB_SIZE + 1), VOCAB_SIZE),
        (words(7, around(VOCAB_SIZE, 1)), VOCAB_SIZE),
        (words(7, around(1, FAR)), FAR),
        (words(7, processors.BertProcessing(("E", 99), ("B", 0))), 99),
        (words(7, processors.RobertaProcessing(("E", 0), ("B", 99))), 99),
        (words(7, processors.Sequence([processors.ByteLevel(), around(1, 99)])), 99),
    ],
)
def test_a_tokenizer_that_gives_ids_which_the_model_does_not_have(
    tmp_path: Path, tokenizer: Tokenizer, largest: int
) -> None:
    """Ids in its vocabulary, or ids of the special tokens around a text, which are not in the vocabulary."""
    directory = write_bundle(tmp_path, tokenizer=tokenizer)
    problem = rf"tokenizer.json: it gives ids up to {largest}, but the model's end at 49; it belongs to another model"
    with pytest.raises(BundleError, match=problem):
        load(directory)


def test_an_added_token_without_a_row_refuses_only_texts_that_hold_it(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path, tokenizer=with_a_token(words(VOCAB_SIZE)))
    with Embedder(directory, tune_batches=False) as embedder:
        assert len(embedder.embed(["w5 w6"], output="mean")) == 1
        refused = r"holds '\[X\]', token 50; the vocabulary of \S+ ends at 49: leave that token out"
        with pytest.raises(InvalidField, match=refused):
            embedder.embed(["w5", "w5 [X]"], output="mean")
        ids, reason = embedder.tokenize(["w5 w6", "[X]"])
        assert (list(ids), str(reason)[:5]) == ([5, 6], "holds")


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 1, FAR])
def test_a_vocabulary_larger_than_the_graphs_table(tmp_path: Path, vocab_size: int) -> None:
    """The manifest can promise what it likes: the last id is run."""
    directory = write_bundle(tmp_path, encoder__vocab_size=vocab_size, tokenizer=words(VOCAB_SIZE + 1))
    with pytest.raises(BundleError, match=rf"the model fails for sequences of \[1\] tokens: .*idx={vocab_size - 1}"):
        load(directory)
    with pytest.raises(BundleError, match=rf"its table of tokens has 50 rows; .*encoder.vocab_size is {vocab_size}"):
        load(directory, engine="openvino")


def test_a_padding_id_that_the_model_does_not_have(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path, encoder__pad_token_id=VOCAB_SIZE)
    with pytest.raises(BundleError, match="encoder.pad_token_id must be below encoder.vocab_size, 50; was 50"):
        load(directory)
