"""Calls the server with OpenAI's client, and with LangChain in its default settings.

The program runs in the virtual environment of the requirements file clients.txt.
"""

import asyncio
from typing import Any

import numpy as np
import openai
from judge_io import address, model, texts, write
from langchain_openai import OpenAIEmbeddings

api: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none"}
vectors: dict[str, Any] = {}
facts: dict[str, Any] = {}


def rows(reply: Any) -> Any:
    return np.array([item.embedding for item in sorted(reply.data, key=lambda item: item.index)])


async def use_async_client() -> None:
    async with openai.AsyncOpenAI(**api) as client:
        replies = await asyncio.gather(*(client.embeddings.create(model=model, input=text) for text in texts))
        vectors["async"] = np.concatenate([rows(reply) for reply in replies])


with openai.OpenAI(**api) as client:
    facts["models"] = [item.id for item in client.models.list()]
    reply = client.embeddings.create(model=model, input=texts)  # the client requests base64 by default
    facts["usage"] = reply.usage.prompt_tokens
    vectors["base64"] = rows(reply)
    vectors["float"] = rows(client.embeddings.create(model=model, input=texts, encoding_format="float"))
    try:
        client.embeddings.create(model="unknown", input=texts)
    except openai.NotFoundError as error:
        facts["unknown_model"] = str(error)
asyncio.run(use_async_client())
try:  # by default, LangChain sends token ids from OpenAI's vocabulary
    OpenAIEmbeddings(model=model, **api).embed_documents(texts)
except openai.APIStatusError as error:
    facts["langchain_default"] = [error.status_code, str(error)]
write(vectors, facts)
