"""Ranks documents with LangChain's document compressors.

The program runs in the virtual environment of the requirements file rankers.txt.
"""

from typing import Any

from infinity_client import Client
from langchain_cohere import CohereRerank
from langchain_community.document_compressors import infinity_rerank, jina_rerank
from langchain_core.documents import Document
from rank_io import Ranks, address, documents, model, query, rank_with

jina_rerank.JINA_API_URL = f"{address}/v1/rerank"  # JinaRerank has no option for the address


def rank(compressor: Any) -> Ranks:
    found = compressor.compress_documents(
        [Document(page_content=text, metadata={"at": i}) for i, text in enumerate(documents)], query
    )
    return [(it.metadata["at"], it.metadata["relevance_score"]) for it in found]


rank_with(
    {
        "CohereRerank": lambda: rank(CohereRerank(base_url=address, cohere_api_key="none", model=model)),
        "JinaRerank": lambda: rank(jina_rerank.JinaRerank(jina_api_key="none", model=model)),
        "InfinityRerank": lambda: rank(infinity_rerank.InfinityRerank(client=Client(base_url=address), model=model)),
    }
)
