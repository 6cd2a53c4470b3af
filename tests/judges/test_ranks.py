"""Clients of other projects rank documents with our server, and get the same ranks as sentence-transformers.

The clients have their default settings. The programs `*_ranks.py` call the server with these clients. The model is
a cross-encoder. The weekly tests also use a dense model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import score_models
from checkpoints import MODEL
from judging import JUDGES, python_environment, run
from served_scores import Served, scores_of_library

pytestmark = pytest.mark.timeout(900)  # the first run installs the clients

Array = npt.NDArray[Any]
Ranks = list[tuple[int, float]]
QUERY = "How do I keep a cat off the sofa?"
DOCUMENTS = [
    "Cats dislike the smell of oranges, so put the peel on the sofa.",
    "A spray bottle teaches a cat quickly, but the cat learns to fear you.",
    "The sofa was delivered on Tuesday, in two boxes.",
    "Stock markets fell sharply on Monday.",
    "Give the cat a high place with a view, and the cat will leave the sofa.",
    "Der Kater schläft lieber auf dem Sofa als in seinem Korb.",
    "犬は庭で遊ぶ。 🐕",
    "Keep off the grass!",
    "[SEP] [CLS] </s> as text",
    "Leather resists claws better than linen does.",
    "How do I keep a dog off the bed?",
    "It rained for three days. " * 40,  # too long for the cross-encoder
]
# For each program: the virtual environment, and the number of ranks that each client returns by default. None means
# all ranks.
PROGRAMS: dict[str, tuple[str, dict[str, int | None]]] = {
    "cohere": ("gateways", dict.fromkeys(("Client", "ClientV2", "AsyncClient", "AsyncClientV2"))),
    "litellm": ("gateways", dict.fromkeys(("cohere", "jina_ai", "hosted_vllm", "huggingface", "infinity"))),
    "langchain": ("rankers", {"CohereRerank": 3, "JinaRerank": 3, "InfinityRerank": 3}),
    "llama_index": ("rankers", {"CohereRerank": 2, "JinaRerank": 2, "TextEmbeddingInference": 5}),
    "haystack": ("rankers", {"CohereRanker": 10, "JinaRanker": None, "HuggingFaceTEIRanker": 10, "VLLMRanker": None}),
    "infinity": ("rankers", {"sync": None, "asyncio": None}),
}
VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
# A reranking task: the indexes of the relevant documents of each query.
RELEVANT = {
    QUERY: [0, 1, 4],
    "furniture": [2, 9],
    "Where do animals sleep?": [5, 6],
    "signs in a park": [7],
    "bad news of the week": [3, 11],
    "training a pet": [1, 4, 10],
}


@pytest.fixture(scope="module", params=["cross_encoder", pytest.param("dense", marks=pytest.mark.weekly)])
def served(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def judged(
    served: Served, bin_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Callable[[str], dict[str, Ranks | str]], Array]:
    """A function and the right scores. The function runs a program once, and returns each client's ranks or error."""
    file, found = tmp_path_factory.mktemp("ranks") / "requests.json", dict[str, dict[str, Ranks | str]]()
    file.write_text(json.dumps({"query": QUERY, "documents": DOCUMENTS}))

    def ranks_of(program: str) -> dict[str, Ranks | str]:
        if program not in found:
            python = bin_of(PROGRAMS[program][0]) / "python"
            command = [python, JUDGES / f"{program}_ranks.py", served.server.url, served.name, file]
            found[program] = json.loads(run(command, environment=VARIABLES).splitlines()[-1])
        return found[program]

    (scores,) = scores_of_library(served, [QUERY], DOCUMENTS)
    assert np.diff(np.sort(scores)).min() > 1e-4  # all scores differ, so the order does not depend on rounding
    return ranks_of, scores


@pytest.mark.parametrize(
    ("program", "client"), [(program, client) for program, (_, clients) in PROGRAMS.items() for client in clients]
)
def test_clients_rank_as_sentence_transformers_does(
    judged: tuple[Callable[[str], dict[str, Ranks | str]], Array], program: str, client: str
) -> None:
    ranks_of, scores = judged
    ranks = ranks_of(program)[client]
    assert not isinstance(ranks, str), ranks
    order = np.argsort(-scores)[: PROGRAMS[program][1][client]]
    if client == "huggingface":  # litellm_ranks.py leaves out the last document for this provider
        order = order[order != len(DOCUMENTS) - 1]
    assert [index for index, _ in ranks] == order.tolist()
    np.testing.assert_allclose([score for _, score in ranks], scores[order], rtol=0, atol=1e-5)


def test_huggingface_hub_classifies(classifier: Served, bin_of: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "requests.json").write_text(json.dumps({"texts": DOCUMENTS}))
    command = [bin_of("clients") / "python", JUDGES / "huggingface_labels.py", classifier.server.url]
    output = run([*command, tmp_path / "requests.json"], environment={"HF_HUB_OFFLINE": "0"})
    found = json.loads(output.splitlines()[-1])
    logits = score_models.library_scores(classifier.directory, list(DOCUMENTS))
    powers = np.exp(logits)
    wanted = {"default": (powers / powers.sum(axis=1, keepdims=True), 3), "logits": (logits, 3)}
    wanted["best"] = wanted["default"][0], 1
    for name, (rows, count) in wanted.items():
        for got, row in zip(found[name], rows, strict=True):
            order = np.argsort(-row)[:count]
            assert [label for label, _ in got] == [f"LABEL_{at}" for at in order]
            np.testing.assert_allclose([score for _, score in got], row[order], rtol=1e-4, atol=1e-5)


def test_mteb_scores_are_those_of_sentence_transformers(served: Served, tmp_path: Path) -> None:
    """A reranking task has the same scores with sentence-transformers and with our server, to the last digit."""
    requests = {
        "documents": DOCUMENTS,
        "relevant": RELEVANT,
        "url": served.server.url,
        "target": served.server.target,
        "model": served.name,
        "directory": f"{served.directory}",
        "is_dense": served.name == MODEL,
    }
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    python = python_environment("mteb", with_encserve=True) / "python"
    output = run([python, JUDGES / "mteb_ranks.py", tmp_path / "requests.json"], cwd=tmp_path)
    want, *others = json.loads(output.splitlines()[-1])
    assert 0 < want["main_score"] < 1
    for got in others:
        assert got == want
