"""Runs a small reranking task of MTEB with sentence-transformers and with our server. The task needs no download.

The program runs as `PROGRAM REQUESTS` in the virtual environment of the requirements file mteb.txt. REQUESTS is a JSON
file with:

- `relevant`: For each query, the indexes of the relevant documents.
- `documents`: The documents that each query ranks.
- `url`, `target`: The HTTP address and the gRPC address of our server.
- `model`, `directory`: The name of the model in our server, and the directory of the model.
- `is_dense`: Whether the model computes vectors. If false, the model is a cross-encoder.

The program prints a list of dictionaries with the scores of the task. The first dictionary is from
sentence-transformers. The other dictionaries are from our server.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.models import OpenAIAPIEncodeWrapper, OpenAIAPIRerankWrapper
from mteb.models.model_meta import ModelMeta
from mteb_task import describe
from sentence_transformers import CrossEncoder, SentenceTransformer

from encserve_client import EncoderClient

requests: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
NOT_SCORES = ("hf_subset", "languages", "mteb_version", "evaluation_time")


# mteb is installed only in the judge's environment, so mypy does not know the base class.
class Ranks(AbsTaskRetrieval):  # type: ignore[misc]
    """A task with the queries and documents of REQUESTS."""

    metadata = describe("Ranks", "Reranking", "map_at_1000")

    def load_data(self, *args: Any, **options: Any) -> None:
        """Build the data set."""
        del args, options
        relevant, documents = requests["relevant"], requests["documents"]
        queries = {f"q{i}": query for i, query in enumerate(relevant)}
        names = [f"d{i}" for i in range(len(documents))]
        data = {
            "corpus": Dataset.from_dict({"id": names, "text": documents}),
            "queries": Dataset.from_dict({"id": list(queries), "text": list(queries.values())}),
            "relevant_docs": {name: {names[at]: 1 for at in relevant[query]} for name, query in queries.items()},
            "top_ranked": dict.fromkeys(queries, names),
        }
        self.dataset = {"default": {"test": data}}
        self.data_loaded = True


class EncserveCrossEncoder:
    """Scores pairs over gRPC."""

    def __init__(self, target: str, model: str) -> None:
        """Connect to the server."""
        self.client, self.model = EncoderClient(target), model
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"encserve/{model}"})

    def predict(self, inputs1: Any, inputs2: Any, **_: Any) -> Any:
        """Return the score of each pair."""
        first, second = ([text for batch in inputs for text in batch["text"]] for inputs in (inputs1, inputs2))
        return self.client.score(list(zip(first, second, strict=True)), model=self.model)


def scores_of(model: Any) -> dict[str, float]:
    results = mteb.evaluate(model, [Ranks()], cache=None)
    ((found,),) = results.task_results[0].scores.values()
    return {name: score for name, score in found.items() if name not in NOT_SCORES}


url, model = requests["url"], requests["model"]
library = SentenceTransformer if requests["is_dense"] else CrossEncoder
ways: list[Any] = [
    library(requests["directory"], device="cpu"),
    OpenAIAPIRerankWrapper(url, model),
    EncserveCrossEncoder(requests["target"], model),
]
if requests["is_dense"]:
    ways.append(OpenAIAPIEncodeWrapper(url, model, use_chat_template=False))
sys.stdout.write(f"\n{json.dumps([scores_of(way) for way in ways], default=float)}")
