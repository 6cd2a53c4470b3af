"""A server with tiny models of all kinds gives the scores of sentence-transformers, over gRPC."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import export_once
from real_server import real_server
from score_models import MODELS, PAIRS, TEXTS, library_scores, worst_error
from zoo import MODELS as ZOO
from zoo import SPARSE_TEXTS, Way, Zoo

from encserve_client import EncoderClient
from encserve_export import Target, export_hf

# The tests on OpenVINO use a model with token types, a model without token types, and a model that pools the last
# token.
ON_OPENVINO = ("bert-6", "roberta", "qwen3-yes-no")
# These models have no labels, so `rank` compares their vectors: dense, late-interaction and sparse models.
VECTORS = ("default-prompt", "fixed-unattended", "sum-log1p", "static-queries")
DOCUMENTS = ["a cat sat", "warm mat", "this we like", "the cat on the mat", "passage : the cat"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("directories")


@pytest.fixture(scope="module")
def models(zoo: Zoo, directories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    for name, row in MODELS.items():
        directory = row.write(directories / name)
        export_once(export_hf, directory, target=Target(model_repository=repository, name=name))
    for name in VECTORS:
        zoo.export(name, repository)
    return repository


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[EncoderClient]:
    with real_server(models) as server, EncoderClient(server.target) as client:
        yield client


@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_sentence_transformers(client: EncoderClient, directories: Path, name: str) -> None:
    """Compare the scores of 38 pairs and of texts, with each prompt and with the model's activation.

    The pairs are sent together in one call, and then one pair in each call.
    """
    row, directory = MODELS[name], directories / name
    pairs = [pair for pair in PAIRS if name not in ("qwen3", "gemma3") or pair != ("", "")]
    for prompt_name in (None, "", *row.prompts):
        asked: dict[str, Any] = {"model": name, "activation": "none", "prompt_name": prompt_name}
        want = library_scores(directory, pairs, prompt_name)
        assert worst_error(client.score(pairs, **asked).reshape(want.shape), want) <= 1e-4
        alone = np.concatenate([client.score([pair], **asked) for pair in pairs])
        assert worst_error(alone.reshape(want.shape), want) <= 1e-4
        if not row.pairs_only:
            found = np.array([it.scores for it in client.classify(TEXTS, **asked)])
            assert worst_error(found, library_scores(directory, list(TEXTS), prompt_name)) <= 1e-4
    if len(client.model(name).labels) == 1:
        # transformers' pipeline applies no activation to a plain regression model, so expect the logits.
        activated = library_scores(directory, pairs, raw=name == "regression")
        assert worst_error(client.score(pairs, model=name)[:, None], activated) <= 1e-4
        query = pairs[20][0]
        ranked = client.rank(query, [document for _, document in PAIRS], model=name)
        scores = client.score([(query, document) for _, document in PAIRS], model=name)
        assert [index for index, _ in ranked] == np.argsort(-scores, kind="stable").tolist()


@pytest.fixture(scope="module")
def on_openvino(models: Path) -> Iterator[EncoderClient]:
    flags = [flag for name in ON_OPENVINO for flag in ("--model", name)]
    with real_server(models, "--engine", "openvino", *flags) as server, EncoderClient(server.target) as client:
        yield client


@pytest.mark.parametrize("name", ON_OPENVINO)
def test_openvino_gives_the_scores_of_the_library(on_openvino: EncoderClient, directories: Path, name: str) -> None:
    pairs = list(PAIRS[1:])
    want = library_scores(directories / name, pairs)
    got = on_openvino.score(pairs, model=name, activation="none").reshape(len(pairs), -1)
    assert worst_error(got, want) <= 1e-4


@pytest.mark.parametrize("name", VECTORS)
def test_other_models_rank_by_the_similarity_of_the_library(zoo: Zoo, client: EncoderClient, name: str) -> None:
    texts = [*SPARSE_TEXTS[1:9]] if ZOO[name].kind == "sparse" else DOCUMENTS
    query, documents = texts[2], [*texts, ""]
    (asked,) = zoo.vectors(name, Way("query"), [query])
    given = zoo.vectors(name, Way("document"), documents)
    if ZOO[name].kind == "multi_vector":
        want = np.array([(asked @ it.T).max(axis=1).sum() for it in given])
    else:
        want = np.array([float((asked @ it.T)[0, 0]) for it in given])
    scores = client.score([(query, document) for document in documents], model=name)
    assert worst_error(scores, want) <= 1e-4
    best = client.rank(query, documents, top_k=3, model=name)
    assert [index for index, _ in best] == np.argsort(-scores, kind="stable")[:3].tolist()
