"""Ranks documents with infinity's client.

The program runs in the virtual environment of the requirements file rankers.txt.
"""

import asyncio

from infinity_client import Client
from infinity_client.api.default import rerank
from infinity_client.models import RerankInput
from rank_io import Ranks, address, documents, model, query, rank_with, ranks_of

client = Client(base_url=address)
body = RerankInput(query=query, documents=documents, model=model)


def rank() -> Ranks:
    return ranks_of(rerank.sync(client=client, body=body).results)


async def rank_async() -> Ranks:
    return ranks_of((await rerank.asyncio(client=client, body=body)).results)


rank_with({"sync": rank, "asyncio": lambda: asyncio.run(rank_async())})
