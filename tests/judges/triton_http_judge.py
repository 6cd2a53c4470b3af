"""Triton's HTTP clients, each as its users write it; see triton_judge.py. The address is that of the HTTP port."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

address, model, requests_file, results_file = sys.argv[1:]
with open(requests_file, encoding="utf-8") as file:  # noqa: PTH123 - a program of few imports
    requests = json.load(file)
texts, ids, mask = requests["texts"], np.array(requests["ids"]), np.array(requests["mask"])
address = address.removeprefix("http://")


def tensor(module: Any, name: str, data: Any, datatype: str, **how: Any) -> Any:
    made = module.InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data, **how)
    return made


def text_input(module: Any, **how: Any) -> list[Any]:
    return [tensor(module, "text", np.array([text.encode() for text in texts], object), "BYTES", **how)]


def sync(results: dict[str, Any], told: dict[str, Any]) -> None:
    """infer with all ways of data, async_infer, metadata, and errors."""
    client = triton.InferenceServerClient(address)
    told["ready"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)]
    told["unknown_ready"] = client.is_model_ready("nobody")
    told["server"] = client.get_server_metadata()
    told["metadata"] = client.get_model_metadata(model)
    told["config"] = client.get_model_config(model)
    told["index"] = client.get_model_repository_index()
    wanted = [triton.InferRequestedOutput("embedding")]
    answer = client.infer(model, text_input(triton), outputs=wanted, request_id="an id")
    told["request_id"] = answer.get_response()["id"]
    results["sync"] = answer.as_numpy("embedding")
    as_json = [triton.InferRequestedOutput("embedding", binary_data=False)]
    results["json"] = client.infer(model, text_input(triton, binary_data=False), outputs=as_json).as_numpy("embedding")
    results["mixed"] = client.infer(model, text_input(triton, binary_data=False), outputs=wanted).as_numpy("embedding")
    half = client.infer(model, text_input(triton), outputs=wanted, parameters={"datatype": "FP16"})
    results["half"] = half.as_numpy("embedding")
    tokens = [tensor(triton, "input_ids", ids, "INT64"), tensor(triton, "attention_mask", mask, "INT64")]
    rows = client.infer(model, tokens, priority=1, timeout=60_000_000)  # all outputs, as bytes
    for name in ("last_hidden_state", "lengths"):
        results[name] = rows.as_numpy(name)
    results["embedding_of_ids"] = rows.as_numpy("embedding")
    tokens = [
        tensor(triton, "input_ids", ids.astype(np.int32), "INT32", binary_data=False),
        tensor(triton, "attention_mask", mask, "INT64"),
        tensor(triton, "token_type_ids", np.zeros_like(ids), "INT64", binary_data=False),
    ]
    results["embedding_of_ids_32"] = client.infer(model, tokens, outputs=wanted).as_numpy("embedding")
    results["async_infer"] = (
        client.async_infer(model, text_input(triton), outputs=wanted).get_result().as_numpy("embedding")
    )
    try:
        client.infer(model, [tensor(triton, "input_ids", -ids, "INT64")])
    except InferenceServerException as error:
        told["error"] = [error.status(), error.message()]
    told["statistics"] = client.get_inference_statistics(model)
    client.close()


async def asynchronous(results: dict[str, Any]) -> None:
    """asyncio's client: calls side by side."""
    async with triton_aio.InferenceServerClient(address) as client:
        wanted = [triton_aio.InferRequestedOutput("embedding")]
        answers = await asyncio.gather(*(client.infer(model, text_input(triton_aio), outputs=wanted) for _ in range(2)))
        results["aio"] = answers[0].as_numpy("embedding")


all_results: dict[str, Any] = {}
all_told: dict[str, Any] = {}
sync(all_results, all_told)
asyncio.run(asynchronous(all_results))
np.savez(results_file, **all_results)
sys.stdout.write(json.dumps(all_told))
