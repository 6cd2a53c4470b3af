"""Runs in an environment with `cohere`: its SDK, both generations, sync and async.

Reads the server's URL, MODEL and the file of requests, JSON with `texts`; writes what each client got into an .npz, and
what was refused as JSON to stdout.
"""

import asyncio
import base64
import json
import sys
from typing import Any

import cohere
import numpy as np
from cohere.core.api_error import ApiError

url, model, requests_file, results_file = sys.argv[1:]
with open(requests_file, encoding="utf-8") as file:  # noqa: PTH123 - a program of few imports
    texts = json.load(file)["texts"]
api: dict[str, Any] = {"base_url": url, "api_key": "none"}
asked: dict[str, Any] = {"model": model, "input_type": "search_document"}
every_type = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
results: dict[str, Any] = {}
told: dict[str, Any] = {}


def decoded(embeddings: Any) -> Any:
    return np.array([np.frombuffer(base64.b64decode(it), "<f4") for it in embeddings.base64])


async def asynchronous() -> None:
    async with cohere.AsyncClientV2(**api) as client:
        answers = await asyncio.gather(*(client.embed(texts=[text], **asked) for text in texts))
        results["v2_async"] = np.concatenate([answer.embeddings.float_ for answer in answers])


with cohere.ClientV2(**api) as client:
    answer = client.embed(texts=texts, **asked)
    results["v2"] = np.array(answer.embeddings.float_)
    told["texts"], told["id"] = answer.texts, answer.id
    told["version"], told["tokens"] = answer.meta.api_version.version, answer.meta.billed_units.input_tokens
    answer = client.embed(texts=texts, embedding_types=every_type, **asked)
    results["v2_typed"], results["base64"] = np.array(answer.embeddings.float_), decoded(answer.embeddings)
    for name in every_type[1:-1]:
        results[name] = np.array(getattr(answer.embeddings, name), np.int16)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
    results["v2_inputs"] = np.array(client.embed(inputs=inputs, **asked).embeddings.float_)
    cut = client.embed(texts=texts, output_dimension=3, max_tokens=4, truncate="END", **asked)
    results["cut"] = np.array(cut.embeddings.float_)
    refused = {
        "model": {"texts": texts, "model": "embed-v4.0"},
        "start": {"texts": texts, "truncate": "START"},
        "image": {"images": ["data:image/png;base64,"], "input_type": "image"},
        "types": {"texts": texts, "embedding_types": ["int4"]},
        "long": {"texts": ["a " * 10_000], "truncate": "NONE"},
    }
    for name, fields in refused.items():
        try:
            client.embed(**asked | fields)
        except ApiError as error:
            told[name] = [type(error).__name__, error.status_code, error.body["message"]]
with cohere.Client(**api) as first:
    many = first.embed(texts=texts * 50, **asked)  # sent in requests of 96
    results["v1"] = np.array(many.embeddings)
    told["v1_texts"] = many.texts == texts * 50
    results["v1_int8"] = np.array(first.embed(texts=texts, embedding_types=["int8"], **asked).embeddings.int8, np.int16)
asyncio.run(asynchronous())

np.savez(results_file, **results)
sys.stdout.write(json.dumps(told))
