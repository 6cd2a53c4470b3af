"""These tests export cross-encoders and classifiers.

The bundle's ids and scores must equal the ids and scores of sentence-transformers.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from score_models import PAIRS, change, library_scores, worst_error, write_scores

from encserve_export import Exported, Target, export_hf
from encserve_export.cli import main
from encserve_export.core.errors import (
    ExportError,
    ParityError,
    UnsupportedModelError,
    WeightNamesError,
)
from encserve_export.kinds.reading import read
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.offline import Embedder


def export(directory: Path, tmp_path: Path, **options: Any) -> Exported:
    target = Target(model_repository=tmp_path / "models", name="scores")
    return export_hf(directory, target, progress=lambda _: None, **options)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scores(tmp_path_factory.mktemp("bert") / "model", layout="6")


@pytest.fixture
def directory(bert: Path, tmp_path: Path) -> Path:
    """A copy of `bert` that a test may change."""
    import shutil

    return shutil.copytree(bert, tmp_path / "directory")


def test_a_cross_encoder_is_recognised(bert: Path, tmp_path: Path) -> None:
    exported = export(bert, tmp_path)
    manifest = exported.manifest
    assert list(manifest.scores.labels) == ["LABEL_0"]
    assert manifest.scores.pooling == manifest_pb2.POOLING_CLS
    assert manifest.scores.activation == manifest_pb2.ACTIVATION_SIGMOID
    assert manifest.scores.pair_truncation == manifest_pb2.PAIR_TRUNCATION_LONGEST_FIRST
    assert manifest.graph.token_type_ids_name
    assert manifest.pooling == manifest_pb2.POOLING_UNSPECIFIED
    assert manifest.parity.score_pairs == 47
    assert 0 < manifest.parity.max_score_error <= manifest.parity.score_tolerance
    assert exported.unused_parts == ()
    want = library_scores(bert, list(PAIRS[:5]))
    with Embedder(exported.path, tune_batches=False, cache_dir=Path("off")) as embedder:
        assert worst_error(embedder.embed(PAIRS[:5], output="scores", truncate=True), want) <= 1e-4


@pytest.mark.parametrize("labels", [1, 3])
def test_a_plain_regression_has_no_activation(tmp_path: Path, labels: int) -> None:
    scores = read(write_scores(tmp_path / "model", labels=labels, problem_type="regression")).scores
    assert scores is not None
    assert scores.activation == manifest_pb2.ACTIVATION_NONE


def _without_classifier(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = {name: it for name, it in load_file(path).items() if not name.startswith("classifier")}
    save_file(tensors, path, {"format": "pt"})


def _settings(**fields: Any) -> Callable[[Path], None]:
    return lambda directory: change(directory / "config_sentence_transformers.json", **fields)


def _transformer(**fields: Any) -> Callable[[Path], None]:
    return lambda directory: change(directory / "sentence_bert_config.json", **fields)


REFUSED: dict[str, tuple[Callable[[Path], None], type[ExportError], str]] = {
    "no-classifier": (_without_classifier, WeightNamesError, r"weights of the head are missing: classifier\.weight"),
    "own-activation": (
        _settings(activation_fn="theirs.Activation"),
        UnsupportedModelError,
        r"activation_fn must be a class of torch\.nn; was 'theirs\.Activation'",
    ),
    "other-activation": (
        _settings(activation_fn="torch.nn.modules.activation.Hardsigmoid"),
        UnsupportedModelError,
        r"activation_fn must be one of Identity, Sigmoid, Softmax; was Hardsigmoid",
    ),
    "only-first": (
        _transformer(processing_kwargs={"text": {"truncation": "only_first"}}),
        UnsupportedModelError,
        r"truncation must be one of longest_first, only_second; was 'only_first'",
    ),
    "other-task": (
        _transformer(transformer_task="feature-extraction"),
        UnsupportedModelError,
        r"transformer_task must be sequence-classification or text-generation",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_model_that_a_bundle_cannot_express_is_refused(directory: Path, tmp_path: Path, fault: str) -> None:
    change_files, error, message = REFUSED[fault]
    change_files(directory)
    with pytest.raises(error, match=message):
        export(directory, tmp_path)


@pytest.mark.usefixtures("_misread_eps")
def test_logits_of_another_model_are_refused(bert: Path, tmp_path: Path) -> None:
    """The exporter reads a wrong eps. Only the comparison of logits with sentence-transformers finds this fault."""
    with pytest.raises(ParityError, match="the bundle gives other logits than sentence-transformers for the pair"):
        export(bert, tmp_path)
    assert not (tmp_path / "models").exists()


def test_the_report_shows_the_labels_and_the_comparison(tmp_path: Path) -> None:
    """Use the command to export a classifier, and check the lines of the report."""
    directory = write_scores(tmp_path / "m", labels=3)
    result = CliRunner().invoke(main, ["hf", str(directory), "--model-repository", str(tmp_path / "models")])
    assert result.exit_code == 0, result.output
    shown = "3 labels (LABEL_0, LABEL_1, LABEL_2), activation softmax, for pairs of texts, and texts"
    assert re.search(rf"scores +{re.escape(shown)}\n", result.output)
    compared = r"pipeline +47 pairs and texts compared with sentence-transformers, max error of a logit \S+, tolerance"
    assert re.search(compared, result.output)
    assert "pooling" not in result.output


def test_only_the_second_text_is_cut(directory: Path, tmp_path: Path) -> None:
    _transformer(processing_kwargs={"text": {"truncation": "only_second"}})(directory)
    # sentence-transformers fails if the first text leaves no room for the second. The export compares such pairs.
    with pytest.raises(ExportError, match="sentence-transformers itself fails"):
        export(directory, tmp_path)


def test_labels_that_are_too_many_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="must have 1 to 16384 labels; has 16385"):
        export(write_scores(tmp_path / "model", labels=16_385), tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_are_judged_by_rank_correlation(bert: Path, tmp_path: Path, precision: Any) -> None:
    parity = export(bert, tmp_path, precision=precision).manifest.parity
    assert 0.9 <= parity.min_score_rank_correlation <= 1
    assert 0 < parity.max_score_change < 0.2
    assert parity.score_tolerance == 0
    assert torch.isfinite(torch.tensor(parity.max_score_error))
