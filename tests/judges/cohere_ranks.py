"""Ranks documents with Cohere's SDK: the clients of API v1 and v2, and their async clients.

The program runs in the virtual environment of the requirements file gateways.txt.
"""

import asyncio
from typing import Any

import cohere
from rank_io import Ranks, address, documents, model, query, rank_with, ranks_of

api: dict[str, Any] = {"base_url": address, "api_key": "none"}
asked: dict[str, Any] = {"model": model, "query": query, "documents": documents}


def rank(client_type: Any) -> Ranks:
    with client_type(**api) as client:
        return ranks_of(client.rerank(**asked).results)


async def rank_async(client_type: Any) -> Ranks:
    async with client_type(**api) as client:
        return ranks_of((await client.rerank(**asked)).results)


rank_with(
    {
        "Client": lambda: rank(cohere.Client),
        "ClientV2": lambda: rank(cohere.ClientV2),
        "AsyncClient": lambda: asyncio.run(rank_async(cohere.AsyncClient)),
        "AsyncClientV2": lambda: asyncio.run(rank_async(cohere.AsyncClientV2)),
    }
)
