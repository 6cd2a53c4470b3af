"""Runs in the environment of clients.txt: Triton's clients, each as its users write it.

Reads ADDRESS, MODEL and the file of requests, JSON with `texts`, `ids` and `mask`; writes what each client got into an
.npz, and what Triton's tools read of the server as JSON to stdout.
"""

import asyncio
import functools
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

address, model, requests_file, results_file = sys.argv[1:]
with open(requests_file, encoding="utf-8") as file:  # noqa: PTH123 - a program of few imports
    requests = json.load(file)
texts, ids, mask = requests["texts"], np.array(requests["ids"]), np.array(requests["mask"])


def tensor(module: Any, name: str, data: Any, datatype: str) -> Any:
    made = module.InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data)
    return made


def text_input(module: Any, chosen: list[str]) -> list[Any]:
    return [tensor(module, "text", np.array([text.encode() for text in chosen], object), "BYTES")]


def wanted(module: Any, *names: str) -> list[Any]:
    return [module.InferRequestedOutput(name) for name in names]


def sync(results: dict[str, Any], told: dict[str, Any]) -> None:
    """infer, async_infer, metadata, and errors."""
    client = triton.InferenceServerClient(address)
    told["ready"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)]
    told["unknown_ready"] = client.is_model_ready("nobody")
    told["metadata"] = client.get_model_metadata(model, as_json=True)
    told["config"] = client.get_model_config(model, as_json=True)
    inputs = text_input(triton, texts)
    answer = client.infer(model, inputs, outputs=wanted(triton, "embedding"), request_id="an id")
    told["request_id"] = answer.get_response().id
    results["sync"] = answer.as_numpy("embedding")
    half = client.infer(model, inputs, outputs=wanted(triton, "embedding"), parameters={"datatype": "FP16"})
    results["half"] = half.as_numpy("embedding")
    tokens = [tensor(triton, "input_ids", ids, "INT64"), tensor(triton, "attention_mask", mask, "INT64")]
    rows = client.infer(model, tokens)  # all outputs
    for name in ("last_hidden_state", "lengths"):
        results[name] = rows.as_numpy(name)
    results["embedding_of_ids"] = rows.as_numpy("embedding")
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, inputs, lambda result, error: done.put(error or result))
    results["async_infer"] = done.get(timeout=60).as_numpy("embedding")
    try:
        client.infer(model, [tensor(triton, "input_ids", -ids, "INT64")])
    except InferenceServerException as error:
        told["error"] = [error.status(), error.message()]
    told["statistics"] = client.get_inference_statistics(model, as_json=True)


def stream(results: dict[str, Any]) -> None:
    """A stream of infers, whose answers may come in any order."""
    client = triton.InferenceServerClient(address)
    done: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: done.put(error or result))
    for i, text in enumerate(texts):
        outputs = wanted(triton, "embedding")
        client.async_stream_infer(model, text_input(triton, [text]), outputs=outputs, request_id=str(i))
    answers = [done.get(timeout=60) for _ in texts]
    client.stop_stream()
    answers.sort(key=lambda answer: int(answer.get_response().id))
    results["stream"] = np.concatenate([answer.as_numpy("embedding") for answer in answers])


async def asynchronous(results: dict[str, Any]) -> None:
    """asyncio's client: calls side by side, and a stream."""
    async with triton_aio.InferenceServerClient(address) as client:
        ask = functools.partial(client.infer, model, outputs=wanted(triton_aio, "embedding"))
        answers = await asyncio.gather(*(ask(text_input(triton_aio, [text])) for text in texts))
        results["aio"] = np.concatenate([answer.as_numpy("embedding") for answer in answers])

        async def send() -> Any:
            for i, text in enumerate(texts):
                yield {"model_name": model, "inputs": text_input(triton_aio, [text]), "request_id": str(i)}

        found = {}
        async for answer, error in client.stream_infer(send()):
            if error is not None:
                raise error
            found[int(answer.get_response().id)] = answer.as_numpy("embedding")
        results["aio_stream"] = np.concatenate([found[i] for i in range(len(texts))])


all_results: dict[str, Any] = {}
all_told: dict[str, Any] = {}
sync(all_results, all_told)
stream(all_results)
asyncio.run(asynchronous(all_results))
np.savez(results_file, **all_results)
sys.stdout.write(json.dumps(all_told))
