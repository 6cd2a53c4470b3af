"""A multi-vector directory means what its authors meant: it serves MultiVectorEncoder's vectors, for both tasks."""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from agreement import worst_relative_error
from click.testing import CliRunner
from real_server import RealServer, real_server
from retrieval_models import DIRECTORIES, native, trained
from sentence_models import text_of

from encserve_cli.commands import cli
from encserve_client import AsyncEncoderClient, EncoderClient, Task, TruncationWarning, maxsim
from encserve_export.cli import main

Vectors = npt.NDArray[np.float32]
Ask = Callable[..., list[Vectors]]
TOLERANCE = 1e-4
TEXTS = [
    "",
    "the cat",
    "the cat: sat.",
    *(text_of(n, seed=n) for n in (1, 3, 10, 17, 29, 30, 31, 60, 93, 94, 130, 600)),
]
TASKS: list[Task] = ["query", "document"]
POOLED, UNPOOLED, TRAINED = "token-pooling", "unpooled", "trained"  # the first two have the same weights
ALL = {**DIRECTORIES, UNPOOLED: native(mask={"skiplist_words": [":"]}), TRAINED: trained}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("directories")
    for name, write in ALL.items():
        write(folder / name)
    return {name: folder / name for name in ALL}


@pytest.fixture(scope="module")
def server(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of all of them, exported with no option."""
    models = tmp_path_factory.mktemp("models")
    for directory in directories.values():
        result = CliRunner().invoke(main, ["hf", str(directory), "--model-repository", str(models)])
        assert result.exit_code == 0, result.output
    flags = [flag for name in directories for flag in ("--model", name)]
    with real_server(models, *flags, "--http-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def target(server: RealServer) -> str:
    return server.target


def english(n_words: int, seed: int) -> str:
    """A text of so many words of this file."""
    words = sorted(set(re.findall("[a-z]{3,}", Path(__file__).read_text())))
    return " ".join(np.random.default_rng(seed).choice(words, n_words))


@pytest.fixture(scope="module")
def ask(target: str) -> Iterator[Ask]:
    """The vectors of each text, by the client's encode_query or encode_document."""
    with EncoderClient(target) as client:

        def vectors(model: str, task: str, texts: Sequence[str], **output: Any) -> list[Vectors]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TruncationWarning)
                made: list[Vectors] = getattr(client, f"encode_{task}")(texts, model=model, **output)
            return made

        yield vectors


def theirs(directory: Path) -> Any:
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(str(directory), device="cpu", local_files_only=True)


def encoded(model: Any, task: str, texts: Sequence[str]) -> list[Vectors]:
    """One text at a time: in other batches it differs from itself by up to the tolerance."""
    made: list[Vectors] = getattr(model, f"encode_{task}")(list(texts), batch_size=1, convert_to_numpy=True)
    return made


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", [name for name in DIRECTORIES if name != POOLED])
def test_vectors_are_those_of_sentence_transformers(
    name: str, task: str, directories: dict[str, Path], ask: Ask
) -> None:
    """As many, and each the same, alone and in company."""
    want = encoded(theirs(directories[name]), task, TEXTS)
    together = ask(name, task, TEXTS)
    assert [len(its) for its in together] == [len(its) for its in want]
    for text, company, due in zip(TEXTS, together, want, strict=True):
        assert worst_relative_error(company, due) <= TOLERANCE
        assert worst_relative_error(ask(name, task, [text])[0], due) <= TOLERANCE


@pytest.mark.parametrize("name", [*DIRECTORIES, TRAINED])
def test_http_has_the_same_to_the_bit(name: str, server: RealServer, ask: Ask) -> None:
    for task in TASKS:
        body = {"input": TEXTS, "model": name, "task": "token_embed", "input_type": task}
        response = httpx.post(f"{server.url}/pooling", json=body, trust_env=False, timeout=60)
        assert response.status_code == 200, response.text
        for told, its in zip(response.json()["data"], ask(name, task, TEXTS), strict=True):
            np.testing.assert_array_equal(np.array(told["data"], np.float32).reshape(told["shape"]), its)


async def test_asyncio_has_them_too_and_is_told_what_was_cut(directories: dict[str, Path], target: str) -> None:
    model, name = theirs(directories["fixed-unattended"]), "fixed-unattended"
    longest = [i for i, text in enumerate(TEXTS) if len(text.split()) > 80 - 4]  # less prompt, CLS and SEP
    async with AsyncEncoderClient(target) as client:
        with pytest.warns(TruncationWarning, match=f"inputs {', '.join(map(str, longest))}$"):
            documents = await client.encode_document(TEXTS, model=name)
        queries = await client.encode_query(TEXTS[:6], model=name)
    for texts, task, got in ((TEXTS, "document", documents), (TEXTS[:6], "query", queries)):
        for its, due in zip(got, encoded(model, task, texts), strict=True):
            assert worst_relative_error(its, due) <= TOLERANCE


@pytest.mark.parametrize("name", ["fixed-unattended", "fixed-attended", "min"])
def test_what_is_inspected_is_what_is_encoded(name: str, target: str) -> None:
    with EncoderClient(target) as client:
        for task in (None, *TASKS):
            inspected = client.inspect("the cat: sat.", attention=False, model=name, task=task)
            encoded = client.run(["the cat: sat."], model=name, task=task, include_token_strings=True)
            assert inspected.sequence.tokens == encoded.sequences[0].tokens
            assert inspected.hidden_states is not None
            rows = encoded.outputs[0].arrays()[0]
            assert worst_relative_error(inspected.hidden_states[-1], rows) <= 1e-5


def test_pooled_vectors_are_of_the_same_clusters(directories: dict[str, Path], ask: Ask) -> None:
    """By what sentence-transformers makes of the very rows that the server had."""
    model = theirs(directories[POOLED])
    (pooling,) = [module for module in model if hasattr(module, "pool_factor")]
    rows = [torch.from_numpy(its.copy()) for its in ask(UNPOOLED, "document", TEXTS)]
    want = pooling.pool(rows, task="document")
    got = ask(POOLED, "document", TEXTS)
    assert [len(its) for its in got] == [len(its) for its in encoded(model, "document", TEXTS)]
    assert any(len(its) < len(of) for its, of in zip(got, rows, strict=True))
    for its, due in zip(got, want, strict=True):
        assert worst_relative_error(its, due.numpy()) <= TOLERANCE
    queries = encoded(model, "query", TEXTS)  # which are not pooled
    for its, query in zip(ask(POOLED, "query", TEXTS), queries, strict=True):
        assert worst_relative_error(its, query) <= TOLERANCE


def test_a_call_pools_as_sentence_transformers_does(ask: Ask) -> None:
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    rows = [torch.from_numpy(its.copy()) for its in ask(UNPOOLED, "document", TEXTS)]
    want = HierarchicalTokenPooling(3.0).pool(rows, task="document")
    for its, due in zip(ask(UNPOOLED, "document", TEXTS, pool_factor=3.0), want, strict=True):
        assert worst_relative_error(its, due.numpy()) <= TOLERANCE


@pytest.mark.parametrize("name", [*DIRECTORIES, TRAINED])
def test_scores_stand_in_the_same_order(name: str, directories: dict[str, Path], ask: Ask) -> None:
    """Of 50 queries and 500 documents: every two scores that differ by more than 1e-4 of the larger."""
    make = english if name == TRAINED else text_of
    queries = [make(1 + i % 20, seed=i) for i in range(50)]
    documents = [make(1 + i % 70, seed=1000 + i) for i in range(500)]
    model = theirs(directories[name])
    want = model.similarity(model.encode_query(queries), model.encode_document(documents)).numpy().ravel()
    asked = ask(name, "query", queries)
    found = ask(name, "document", documents)
    got = np.array([maxsim(query, document, model.similarity_fn_name) for query in asked for document in found])
    order = np.argsort(want)
    highest = np.maximum.accumulate(got[order])  # of the served scores, as theirs ascend
    below = np.searchsorted(want[order], want - TOLERANCE * np.abs(want))  # how many of theirs are lower for certain
    compared = below > 0
    # Of 312 million pairs. Of so few words most documents have those of a query, and score nearly the most there is.
    assert below.sum() > (310_000_000 if name == TRAINED else 50_000_000)
    assert (highest[below[compared] - 1] < got[compared]).all()


@pytest.mark.parametrize("name", ["fixed-attended", "min"])
def test_the_bars_of_the_page_are_the_score_of_sentence_transformers(
    name: str, directories: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Tokens put behind a short query are rows of their own."""
    query, document, page = "the cat", text_of(30, seed=30), tmp_path / "met.html"
    command = ["--target", target, "similarity", query, document, "--model", name, "--html", str(page)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data
    products, _, bars = json.loads(data[1])["figures"]["match-0"]["data"]
    model = theirs(directories[name])
    ((score,),) = model.similarity(model.encode_query([query]), model.encode_document([document])).tolist()
    assert sum(bars["x"]) == pytest.approx(score, rel=1e-4)
    assert len(products["y"]) == len(model.encode_query(query)) >= 12
    last = [row.strip("\u2068\u2069").split(" ", 1)[1] for row in products["y"][-5:]]
    assert len(set(last)) == 1, last
