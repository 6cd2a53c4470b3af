"""Calls the server with Cohere's SDK: with the sync clients of API v1 and v2, and the async client of v2.

The program runs in the virtual environment of the requirements file gateways.txt.
"""

import asyncio
import base64
from typing import Any

import cohere
import numpy as np
from cohere.core.api_error import ApiError
from judge_io import address, model, texts, write

api: dict[str, Any] = {"base_url": address, "api_key": "none"}
options: dict[str, Any] = {"model": model, "input_type": "search_document"}
types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
vectors: dict[str, Any] = {}
facts: dict[str, Any] = {}


def decode(embeddings: Any) -> Any:
    return np.array([np.frombuffer(base64.b64decode(text), "<f4") for text in embeddings.base64])


async def use_async_client() -> None:
    async with cohere.AsyncClientV2(**api) as client:
        replies = await asyncio.gather(*(client.embed(texts=[text], **options) for text in texts))
        vectors["v2_async"] = np.concatenate([reply.embeddings.float_ for reply in replies])


with cohere.ClientV2(**api) as client:
    reply = client.embed(texts=texts, **options)
    vectors["v2"] = np.array(reply.embeddings.float_)
    facts["texts"], facts["id"] = reply.texts, reply.id
    facts["version"], facts["tokens"] = reply.meta.api_version.version, reply.meta.billed_units.input_tokens
    reply = client.embed(texts=texts, embedding_types=types, **options)
    vectors["v2_typed"], vectors["base64"] = np.array(reply.embeddings.float_), decode(reply.embeddings)
    for name in types[1:-1]:
        vectors[name] = np.array(getattr(reply.embeddings, name), np.int16)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
    vectors["v2_inputs"] = np.array(client.embed(inputs=inputs, **options).embeddings.float_)
    cut = client.embed(texts=texts, output_dimension=3, max_tokens=4, truncate="END", **options)
    vectors["cut"] = np.array(cut.embeddings.float_)
    for name, field, value in (("unknown_model", "model", "embed-v4.0"), ("start", "truncate", "START")):
        try:
            client.embed(**options | {"texts": texts, field: value})
        except ApiError as error:
            facts[name] = error.status_code
    ranked = client.rerank(model=model, query=texts[0], documents=texts, top_n=2)
    facts["v2_units"] = ranked.meta.billed_units.search_units
    facts["v2_documents"] = [it.index for it in ranked.results]
with cohere.Client(**api) as first:
    ranked = first.rerank(model=model, query=texts[0], documents=texts, return_documents=True)
    facts["v1_units"] = ranked.meta.billed_units.search_units
    facts["v1_documents"] = [(it.index, it.document.text) for it in ranked.results]
    many = first.embed(texts=texts * 50, **options)  # the SDK sends requests of at most 96 texts
    vectors["v1"] = np.array(many.embeddings)
    vectors["v1_int8"] = np.array(first.embed(texts=texts, embedding_types=["int8"], **options).embeddings.int8)
asyncio.run(use_async_client())
write(vectors, facts)
