"""Static embeddings on a real server: the vectors of sentence-transformers, with batches, limits and cuts as usual."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import export_once
from real_server import real_server
from static_models import WIDTH, static_text, write_model2vec, write_static

from encserve_client import EncoderClient, InvalidRequestError, Output
from encserve_export import Target, export_hf

TEXTS = ["", "東京 🌍", "a", "A cat in Köln", *(static_text(n) for n in (3, 40, 700))]
WRITE = {"static": write_static, "dense": lambda folder: write_static(folder, dense=True), "model2vec": write_model2vec}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("directories")
    return {name: write(folder / name) for name, write in WRITE.items()}


@pytest.fixture(scope="module")
def client(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderClient]:
    models = tmp_path_factory.mktemp("models")
    for name, directory in directories.items():
        export_once(export_hf, directory, target=Target(model_repository=models, name=name))
    flags = [flag for name in directories for flag in ("--model", name)]
    with real_server(models, *flags) as server, EncoderClient(server.target) as client:
        yield client


def theirs(directory: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu", local_files_only=True).float()


@pytest.mark.parametrize("name", WRITE)
def test_vectors_are_those_of_sentence_transformers(
    name: str, directories: dict[str, Path], client: EncoderClient
) -> None:
    model = theirs(directories[name])
    want = model.encode(TEXTS)
    got = client.embed(TEXTS, model=name)
    assert np.abs(got - want).max() <= 1e-5
    alone = np.concatenate([client.embed([text], model=name) for text in TEXTS])
    np.testing.assert_array_equal(alone, got)
    if name != "model2vec":
        assert np.abs(client.embed(TEXTS, model=name, prompt_name="query") - model.encode_query(TEXTS)).max() <= 1e-5


def test_a_text_without_known_tokens_has_a_vector_of_zeros_and_no_ids(client: EncoderClient) -> None:
    outputs = [Output("model"), Output("tokens"), Output("max", l2_normalize=True)]
    result = client.run(["東京", "ab", ""], outputs=outputs, model="static")
    assert [it.token_count for it in result.sequences] == [0, 2, 0]
    for output in (result.outputs[0], result.outputs[2]):
        rows = output.matrix()
        assert not rows[[0, 2]].any()
        assert rows[1].any()
    assert [len(it) for it in client.encode(["東京", "ab"], model="static")] == [0, 2]
    assert not client.embed(["", "東京"], model="static").any()
    with pytest.raises(InvalidRequestError, match="at least one token id; was empty"):
        client.embed([[]], model="static")


def test_longer_texts_are_refused_or_cut_and_that_is_said(client: EncoderClient) -> None:
    text = static_text(8200)
    with pytest.raises(InvalidRequestError, match="must be at most 8192 tokens .* was 8200"):
        client.embed([text], model="static")
    result = client.run([text], outputs=[Output("model")], model="static", truncate=True)
    assert result.sequences[0].truncated
    assert result.outputs[0].matrix().shape == (1, WIDTH)
