"""Calls the server with Triton's HTTP clients, sync and async.

The program runs in the virtual environment of the requirements file clients.txt. The argument ADDRESS is the server's
URL.
"""

import asyncio
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from judge_io import address, ids, mask, model, texts, write
from tritonclient.utils import InferenceServerException

host = address.removeprefix("http://")
vectors: dict[str, Any] = {}
facts: dict[str, Any] = {}


def tensor(module: Any, name: str, data: Any, datatype: str, **options: Any) -> Any:
    made = module.InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data, **options)
    return made


def text_input(module: Any, **options: Any) -> list[Any]:
    return [tensor(module, "text", np.array([text.encode() for text in texts], object), "BYTES", **options)]


def use_client() -> None:
    client = triton.InferenceServerClient(host)
    facts["ready"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)]
    facts["unknown_ready"] = client.is_model_ready("unknown")
    facts["metadata"] = client.get_model_metadata(model)
    facts["config"] = client.get_model_config(model)
    facts["index"] = client.get_model_repository_index()
    binary = [triton.InferRequestedOutput("embedding")]
    as_json = [triton.InferRequestedOutput("embedding", binary_data=False)]
    reply = client.infer(model, text_input(triton), outputs=binary, request_id="an id")
    facts["request_id"] = reply.get_response()["id"]
    vectors["sync"] = reply.as_numpy("embedding")
    for name, outputs in {"json": as_json, "mixed": binary}.items():
        reply = client.infer(model, text_input(triton, binary_data=False), outputs=outputs)
        vectors[name] = reply.as_numpy("embedding")
    half = client.infer(model, text_input(triton), outputs=binary, parameters={"datatype": "FP16"})
    vectors["half"] = half.as_numpy("embedding")
    tokens = [tensor(triton, "input_ids", ids, "INT64"), tensor(triton, "attention_mask", mask, "INT64")]
    rows = client.infer(model, tokens, priority=1, timeout=60_000_000)  # by default, the reply has all outputs as bytes
    for name in ("last_hidden_state", "lengths"):
        vectors[name] = rows.as_numpy(name)
    vectors["embedding_of_ids"] = rows.as_numpy("embedding")
    tokens = [
        tensor(triton, "input_ids", ids.astype(np.int32), "INT32", binary_data=False),
        tensor(triton, "attention_mask", mask, "INT64"),
        tensor(triton, "token_type_ids", np.zeros_like(ids), "INT64", binary_data=False),
    ]
    vectors["embedding_of_ids_32"] = client.infer(model, tokens, outputs=binary).as_numpy("embedding")
    reply = client.async_infer(model, text_input(triton), outputs=binary).get_result()
    vectors["async_infer"] = reply.as_numpy("embedding")
    try:
        client.infer(model, [tensor(triton, "input_ids", -ids, "INT64")])
    except InferenceServerException as error:
        facts["error"] = [error.status(), error.message()]
    facts["statistics"] = client.get_inference_statistics(model)
    client.close()


async def use_async_client() -> None:
    async with triton_aio.InferenceServerClient(host) as client:
        outputs = [triton_aio.InferRequestedOutput("embedding")]
        calls = (client.infer(model, text_input(triton_aio), outputs=outputs) for _ in range(2))
        vectors["aio"] = (await asyncio.gather(*calls))[0].as_numpy("embedding")


use_client()
asyncio.run(use_async_client())
write(vectors, facts)
