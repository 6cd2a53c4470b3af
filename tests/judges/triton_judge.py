"""Calls the server with Triton's gRPC clients, sync and async.

The program runs in the virtual environment of the requirements file clients.txt. The argument ADDRESS is the gRPC
target.
"""

import asyncio
import functools
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from judge_io import address, ids, mask, model, texts, write
from tritonclient.utils import InferenceServerException

vectors: dict[str, Any] = {}
facts: dict[str, Any] = {}


def tensor(module: Any, name: str, data: Any, datatype: str) -> Any:
    made = module.InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data)
    return made


def text_input(module: Any, chosen: list[str]) -> list[Any]:
    return [tensor(module, "text", np.array([text.encode() for text in chosen], object), "BYTES")]


def embedding_output(module: Any) -> list[Any]:
    return [module.InferRequestedOutput("embedding")]


def use_client(client: Any) -> None:
    facts["ready"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)]
    facts["unknown_ready"] = client.is_model_ready("unknown")
    facts["metadata"] = client.get_model_metadata(model, as_json=True)
    facts["config"] = client.get_model_config(model, as_json=True)
    inputs, outputs = text_input(triton, texts), embedding_output(triton)
    reply = client.infer(model, inputs, outputs=outputs, request_id="an id")
    facts["request_id"] = reply.get_response().id
    vectors["sync"] = reply.as_numpy("embedding")
    half = client.infer(model, inputs, outputs=outputs, parameters={"datatype": "FP16"})
    vectors["half"] = half.as_numpy("embedding")
    tokens = [tensor(triton, "input_ids", ids, "INT64"), tensor(triton, "attention_mask", mask, "INT64")]
    rows = client.infer(model, tokens)  # by default, the reply has all outputs
    for name in ("last_hidden_state", "lengths"):
        vectors[name] = rows.as_numpy(name)
    vectors["embedding_of_ids"] = rows.as_numpy("embedding")
    replies: queue.Queue[Any] = queue.Queue()
    client.async_infer(model, inputs, lambda result, error: replies.put(error or result))
    vectors["async_infer"] = replies.get(timeout=60).as_numpy("embedding")
    try:
        client.infer(model, [tensor(triton, "input_ids", -ids, "INT64")])
    except InferenceServerException as error:
        facts["error"] = [error.status(), error.message()]
    facts["statistics"] = client.get_inference_statistics(model, as_json=True)


def use_stream(client: Any) -> None:
    """Send all texts in one stream. The replies may arrive in any order."""
    queued: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: queued.put(error or result))
    for i, text in enumerate(texts):
        outputs = embedding_output(triton)
        client.async_stream_infer(model, text_input(triton, [text]), outputs=outputs, request_id=str(i))
    replies = [queued.get(timeout=60) for _ in texts]
    client.stop_stream()
    replies.sort(key=lambda reply: int(reply.get_response().id))
    vectors["stream"] = np.concatenate([reply.as_numpy("embedding") for reply in replies])


async def use_async_client() -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        infer = functools.partial(client.infer, model, outputs=embedding_output(triton_aio))
        replies = await asyncio.gather(*(infer(text_input(triton_aio, [text])) for text in texts))
        vectors["aio"] = np.concatenate([reply.as_numpy("embedding") for reply in replies])

        async def send() -> Any:
            for i, text in enumerate(texts):
                yield {"model_name": model, "inputs": text_input(triton_aio, [text]), "request_id": str(i)}

        found = {}
        async for reply, error in client.stream_infer(send()):
            if error is not None:
                raise error
            found[int(reply.get_response().id)] = reply.as_numpy("embedding")
        vectors["aio_stream"] = np.concatenate([found[i] for i in range(len(texts))])


use_client(triton.InferenceServerClient(address))
use_stream(triton.InferenceServerClient(address))
asyncio.run(use_async_client())
write(vectors, facts)
