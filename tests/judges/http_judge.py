"""Runs in the environment of clients.txt: openai's client beyond what docs/http.md shows, and LangChain's default.

Reads the server's URL, MODEL and the file of requests, JSON with `texts`; writes what each client got into an .npz, and
what was refused as JSON to stdout.
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np
import openai
from langchain_openai import OpenAIEmbeddings

url, model, requests_file, results_file = sys.argv[1:]
with open(requests_file, encoding="utf-8") as file:  # noqa: PTH123 - a program of few imports
    texts = json.load(file)["texts"]
api: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}
results: dict[str, Any] = {}
told: dict[str, Any] = {}


def vectors_of(answer: Any) -> Any:
    return np.array([it.embedding for it in sorted(answer.data, key=lambda it: it.index)])


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(**api) as client:
        answers = await asyncio.gather(*(client.embeddings.create(model=model, input=text) for text in texts))
        results["openai_async"] = np.concatenate([vectors_of(answer) for answer in answers])


with openai.OpenAI(**api) as client:
    told["models"] = [it.id for it in client.models.list()]
    whole = client.embeddings.create(model=model, input=texts)  # as base64, which is the client's default
    told["usage"] = whole.usage.prompt_tokens
    results["openai"] = vectors_of(whole)
    results["openai_float"] = vectors_of(client.embeddings.create(model=model, input=texts, encoding_format="float"))
    try:
        client.embeddings.create(model="nobody", input=texts)
    except openai.NotFoundError as error:
        told["unknown"] = str(error)
asyncio.run(asynchronous())

try:  # with its default it sends ids of OpenAI's vocabulary
    OpenAIEmbeddings(model=model, **api).embed_documents(texts)
except openai.APIStatusError as error:
    told["langchain_default"] = [error.status_code, str(error)]

np.savez(results_file, **results)
sys.stdout.write(json.dumps(told))
