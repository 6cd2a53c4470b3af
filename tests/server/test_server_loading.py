"""Tests of loading bundles with right checksums, but with parts that contradict each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
from tiny_bundle import VOCAB_SIZE, write_bundle
from tiny_heads import multi_vector, npy, sparse
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.errors import BundleError, InvalidField
from encserve_server.models.turns import FairThreadPool
from encserve_server.offline import Embedder
from encserve_server.repository import loading
from encserve_server.repository.loaded import LoadedModel, ServedAlready
from encserve_server.repository.loading import load_model
from encserve_server.settings import Settings

FAR = 2**32 - 1  # the largest id that a tokenizer can have


def load(directory: Path, **settings: Any) -> LoadedModel:
    """Load a bundle in the same way as a server."""
    return load_model(
        directory, Settings(model_repository=directory, tune_batches=False, **settings), FairThreadPool(1)
    )


def words(count: int, processor: processors.PostProcessor | None = None) -> Tokenizer:
    """Return a tokenizer with `count` words."""
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


def test_a_served_bundle_is_verified_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may contain the served content again, for example after a second copy of the same files."""
    directory = write_bundle(tmp_path)
    served = load(directory)
    monkeypatch.setattr(loading, "open_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    arguments = directory, Settings(model_repository=tmp_path), FairThreadPool(1), served.bundle.fingerprint
    with pytest.raises(ServedAlready):
        load_model(*arguments)
    (directory / "model.onnx").write_bytes(b"altered")
    with pytest.raises(BundleError, match=r"model.onnx"):
        load_model(*arguments)


@pytest.mark.parametrize(
    "tokenizer",
    [
        words(7),
        words(VOCAB_SIZE, around(1, VOCAB_SIZE - 1)),
        words(VOCAB_SIZE, processors.BertProcessing(("E", VOCAB_SIZE - 1), ("B", 0))),
        with_a_token(words(VOCAB_SIZE - 1)),
    ],
)
def test_a_tokenizer_that_fits_is_loaded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A bundle is loaded if its tokenizer has no more words than the model. Special tokens may have any valid id."""
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
def test_a_tokenizer_with_ids_beyond_the_model_is_refused(tmp_path: Path, tokenizer: Tokenizer, largest: int) -> None:
    """The id beyond the model belongs to a word or to a special token.

    The tokenizer adds the special token to texts, although the tokenizer's vocabulary does not contain the token.
    """
    directory = write_bundle(tmp_path, tokenizer=tokenizer)
    with pytest.raises(BundleError, match=rf"tokenizer.json: .* {largest}, .* 49"):
        load(directory)


def test_only_texts_with_an_added_token_without_a_row_are_refused(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path, tokenizer=with_a_token(words(VOCAB_SIZE)))
    with Embedder(directory, tune_batches=False) as embedder:
        assert len(embedder.embed(["w5 w6"], output="mean")) == 1
        refused = r"holds '\[X\]', token 50; the vocabulary of \S+ ends at 49: remove that token"
        with pytest.raises(InvalidField, match=refused):
            embedder.embed(["w5", "w5 [X]"], output="mean")
        ids, reason = embedder.tokenize(["w5 w6", "[X]"])
        assert (list(ids), str(reason)[:5]) == ([5, 6], "holds")


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 1, FAR])
def test_a_vocabulary_larger_than_the_graphs_table_is_refused(tmp_path: Path, vocab_size: int) -> None:
    """While the server loads the bundle, it runs the graph with the largest id of the vocabulary."""
    directory = write_bundle(tmp_path, encoder__vocab_size=vocab_size, tokenizer=words(VOCAB_SIZE + 1))
    with pytest.raises(BundleError, match=rf"\[1\] tokens: .*idx={vocab_size - 1}"):
        load(directory)
    with pytest.raises(BundleError, match=rf"50 rows; .*encoder.vocab_size is {vocab_size}"):
        load(directory, engine="openvino")


def test_a_padding_id_beyond_the_model_is_refused(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path, encoder__pad_token_id=VOCAB_SIZE)
    with pytest.raises(BundleError, match="encoder.pad_token_id .* 50; was 50"):
        load(directory)


FILES = {
    "multi_vector.onnx": tiny_heads.multi_vector_file(),
    "sparse.onnx": tiny_heads.sparse_file("max"),
    "query.json": words(VOCAB_SIZE + 1).to_str().encode(),
    "query.npy": npy(np.ones(VOCAB_SIZE, np.float32)),
}
STATIC = manifest_pb2.TaskSettings(
    static_sparse=manifest_pb2.StaticSparse(tokenizer_file="query.json", weights_file="query.npy")
)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"multi_vector": multi_vector(width=4)}, r"multi_vector.onnx: .* \(2, 3\); .* \(2, 4\)"),
        ({"multi_vector": multi_vector(input_name="x")}, "'rows'.*; the manifest names"),
        ({"sparse": sparse(width=49)}, r"sparse.onnx: .* \(2, 50\); .* \(2, 49\)"),
        ({"sparse": sparse(file="query.json")}, "query.json: ONNX Runtime cannot load it"),
        ({"sparse": sparse(), "encoder__d_model": 9}, "sparse.onnx: .* width 9"),
        ({"query": STATIC, "sparse": sparse()}, "query.json: .* 50, .* 49"),
    ],
)
def test_a_head_that_contradicts_the_manifest_is_refused(tmp_path: Path, parts: dict[str, Any], problem: str) -> None:
    directory = write_bundle(tmp_path, files=FILES, **parts)
    with pytest.raises(BundleError, match=problem):
        load(directory)
