"""These tests export multi-vector models. A multi-vector model returns one vector for each token.

The bundle must return the same vectors as sentence-transformers, for each layout of the model's directory.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from retrieval_models import DIRECTORIES, WIDTH, native, pylate
from torch import nn

from encserve_export import Target, export_hf
from encserve_export.cli import main
from encserve_export.core.errors import ConfigError, ParityError
from encserve_export.core.precision import BOUNDS, Precision
from encserve_export.kinds.reading import read
from encserve_export.kinds.spec import ModelSpec, MultiVectorHead


def others_skipped(spec: ModelSpec) -> dict[str, Any]:
    del spec.tasks["document"].skipped_token_ids[:]
    return {}


def expanded_with_another_token(spec: ModelSpec) -> dict[str, Any]:
    spec.tasks["query"].expansion.token_id += 1
    return {}


def seen_by_others(spec: ModelSpec) -> dict[str, Any]:
    spec.tasks["query"].expansion.attended = True
    return {}


def without_projection(spec: ModelSpec) -> dict[str, Any]:
    return {"multi_vector": MultiVectorHead(nn.Identity(), "maxsim")}


@pytest.mark.parametrize(
    "fault",
    [
        expanded_with_another_token,
        *(pytest.param(it, marks=pytest.mark.system) for it in (others_skipped, seen_by_others, without_projection)),
    ],
)
def test_the_comparison_finds_a_misread_directory(
    fault: Callable[[ModelSpec], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DIRECTORIES["pylate"](tmp_path / "m")

    def misread(*arguments: Any, **options: Any) -> ModelSpec:
        spec = read(*arguments, **options)
        return dataclasses.replace(spec, **fault(spec))

    monkeypatch.setattr("encserve_export.routes.hf.read", misread)
    # The exporter compares ids before vectors. Only another expansion token changes the ids.
    what = "the ids" if fault is expanded_with_another_token else ""
    with pytest.raises(ParityError, match=f"the bundle gives {what}"):
        export_hf(tmp_path / "m", Target(model_repository=tmp_path / "models", name="m"))
    assert not (tmp_path / "models").exists()


@pytest.mark.system
def test_the_manifest_describes_queries_and_documents(tmp_path: Path) -> None:
    DIRECTORIES["pylate"](tmp_path / "m")
    found = export_hf(tmp_path / "m", Target(model_repository=tmp_path / "models", name="m")).manifest
    assert dict(found.prompts) == {"query": "[Q] ", "document": "[D] "}
    assert (found.query.prompt_name, found.query.max_tokens, found.query.expansion.min_tokens) == ("query", 16, 16)
    assert not found.query.expansion.attended
    assert not found.query.skipped_token_ids
    assert found.document.skipped_token_ids
    # A document may have 64 tokens. A text that is neither a query nor a document may have 63 tokens.
    assert (found.encoder.max_sequence_tokens, found.text.max_tokens) == (64, 63)
    assert found.multi_vector.similarity == "maxsim"


@pytest.mark.system
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_report_the_error_of_scores(precision: Precision, tmp_path: Path) -> None:
    DIRECTORIES["plain"](tmp_path / "m")
    target = Target(model_repository=tmp_path / "models", name="m")
    found = export_hf(tmp_path / "m", target, precision=precision).manifest
    bounds = BOUNDS[precision]
    assert bounds.cosine is not None
    assert found.parity.min_pipeline_cosine >= bounds.cosine
    assert found.parity.maxsim_tolerance == bounds.maxsim_error
    assert 0 < found.parity.max_maxsim_error <= bounds.maxsim_error


@pytest.mark.system
def test_a_precision_that_changes_scores_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DIRECTORIES["plain"](tmp_path / "m")
    monkeypatch.setitem(BOUNDS, "int8", dataclasses.replace(BOUNDS["int8"], maxsim_error=1e-6))
    figures = r"by \d\.\de-05 of its query's best score; at most 1.0e-06 is allowed. Export in float32 instead"
    with pytest.raises(ParityError, match=f"a MaxSim score differs from sentence-transformers {figures}"):
        export_hf(tmp_path / "m", Target(model_repository=tmp_path / "models", name="m"), precision="int8")
    assert not (tmp_path / "models").exists()


@pytest.mark.system
def test_the_report_describes_queries_and_documents(tmp_path: Path) -> None:
    """Export a directory in Stanford's layout, and check the report.

    In this layout, one file has the weights of BERT and of the projection. The report must not list the projection as
    unused.
    """
    DIRECTORIES["stanford"](tmp_path / "m")
    result = CliRunner().invoke(main, ["hf", str(tmp_path / "m"), "--model-repository", str(tmp_path / "models")])
    said = {line[:13].strip(): line[13:] for line in result.output.splitlines()}
    assert said["vectors"] == f"one vector of {WIDTH} dimensions per token, compared by maxsim"
    assert said["query"] == "prompt '[unused0] ', at most 24 tokens, expanded to 24 with token 4, not attended"
    assert said["document"].startswith("prompt '[unused1] ', at most 60 tokens, ")
    assert said["unused parts"] == "pooler"
    assert "of the query's best score, tolerance 0.0001" in said["pipeline"]
    assert "pooling" not in said


def refused(directory: Path, tmp_path: Path) -> str:
    result = CliRunner().invoke(
        main, ["hf", str(directory), "--model-repository", str(tmp_path / "models"), "--name", "m"]
    )
    assert result.exit_code == 1
    assert not (tmp_path / "models" / "m").exists()
    return result.output.splitlines()[-1]


@pytest.mark.parametrize("activation", [None, "pylate.models.Gelu"])
def test_an_activation_that_would_be_replaced_is_refused(activation: str | None, tmp_path: Path) -> None:
    pylate(model_type="ColBERT")(tmp_path / "m")
    path = tmp_path / "m" / "1_Dense" / "config.json"
    settings = json.loads(path.read_text())
    del settings["activation_function"]
    path.write_text(json.dumps(settings | ({} if activation is None else {"activation_function": activation})))
    assert (
        f"must be a class of torch.nn; was {activation!r}, which sentence-transformers would replace by Tanh"
        in refused(tmp_path / "m", tmp_path)
    )


def test_a_module_of_another_package_is_never_imported(tmp_path: Path) -> None:
    pylate(model_type="ColBERT")(tmp_path / "m")
    path = tmp_path / "m" / "modules.json"
    path.write_text(path.read_text().replace("pylate.models.Dense.Dense", "antigravity.Dense"))
    assert (
        "has a module antigravity.Dense, which is not a class of sentence-transformers. The exporter never runs"
        in refused(tmp_path / "m", tmp_path)
    )


def test_a_model_of_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentence_transformers.base.modules import Transformer

    DIRECTORIES["plain"](tmp_path / "m")
    monkeypatch.setattr(Transformer, "modalities", ["text", "image"])
    assert "takes text, image; a bundle takes text only" in refused(tmp_path / "m", tmp_path)


@pytest.mark.system
def test_a_maximum_length_below_the_length_of_queries_is_refused(tmp_path: Path) -> None:
    DIRECTORIES["fixed-unattended"](tmp_path / "m")
    with pytest.raises(
        ConfigError,
        match=r"max_sequence_tokens must be at least 32, the length to which each query is expanded; was 20",
    ):
        export_hf(tmp_path / "m", Target(model_repository=tmp_path / "models", name="m"), max_sequence_tokens=20)


def test_a_module_that_a_bundle_cannot_express_is_refused(tmp_path: Path) -> None:
    native(pooling={"pool_factor": 2})(tmp_path / "m")
    path = tmp_path / "m" / "modules.json"
    modules = json.loads(path.read_text())
    # After this change, the module Normalize comes after the token pooling.
    path.write_text(json.dumps([*modules[:-2], modules[-1], modules[-2]]))
    assert "has a Normalize module, which a bundle cannot express" in refused(tmp_path / "m", tmp_path)


@pytest.mark.system
def test_tokens_with_an_empty_attention_window_are_refused(tmp_path: Path) -> None:
    """Export a model in which some tokens have an empty attention window, and expect an error with numbers.

    For such tokens, PyTorch's implementations of attention return different vectors.
    """
    native(
        model_type="modernbert",
        encoder={"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2},
        transformer={"query_expansion": {"strategy": "fixed", "length": 32}},
    )(tmp_path / "m")
    assert "gives another vector than sentence-transformers for the text '' with the task query: a row has" in (
        refused(tmp_path / "m", tmp_path)
    )
