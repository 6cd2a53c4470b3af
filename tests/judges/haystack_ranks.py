"""Ranks documents with Haystack's rankers.

The program runs in the virtual environment of the requirements file rankers.txt.
"""

from typing import Any

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from haystack_integrations.components.rankers.vllm import VLLMRanker
from rank_io import Ranks, address, documents, model, query, rank_with

asked: dict[str, Any] = {"model": model, "api_key": Secret.from_token("none")}


def rank(component: Any) -> Ranks:
    given = [Document(content=text, meta={"at": i}) for i, text in enumerate(documents)]
    found = component.run(query=query, documents=given)["documents"]
    return [(it.meta["at"], it.score) for it in found]


rank_with(
    {
        "CohereRanker": lambda: rank(CohereRanker(api_base_url=address, **asked)),
        "JinaRanker": lambda: rank(JinaRanker(base_url=f"{address}/v1/rerank", **asked)),
        "HuggingFaceTEIRanker": lambda: rank(HuggingFaceTEIRanker(url=address)),
        "VLLMRanker": lambda: rank(VLLMRanker(api_base_url=f"{address}/v1", **asked)),
    }
)
