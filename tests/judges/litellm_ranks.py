"""Ranks documents with five providers of LiteLLM. Each provider sends requests as for a different server.

The program runs in the virtual environment of the requirements file gateways.txt.
"""

from collections.abc import Sequence
from typing import Any

import litellm
from rank_io import Ranks, address, documents, model, query, rank_with


def rank(provider: str, path: str = "", texts: Sequence[str] = documents, **options: Any) -> Ranks:
    api = {"api_base": f"{address}{path}", "api_key": "none"}
    reply = litellm.rerank(model=f"{provider}/{model}", query=query, documents=texts, **api, **options)
    return [(it["index"], it["relevance_score"]) for it in reply.results]


rank_with(
    {
        "cohere": lambda: rank("cohere"),
        "jina_ai": lambda: rank("jina_ai", "/v1/rerank"),
        "hosted_vllm": lambda: rank("hosted_vllm"),
        # The last document is too long for the model. From this provider, the server refuses such a document.
        "huggingface": lambda: rank("huggingface", texts=documents[:-1]),
        # This provider fails if the documents of a reply are objects. infinity sends strings, but our server sends
        # objects. So the request asks for a reply without documents.
        "infinity": lambda: rank("infinity", return_documents=False),
    }
)
