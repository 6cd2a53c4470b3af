"""Runs in the environment of gateways.txt: KServe's clients over gRPC and over REST, as its users write them.

The address is that of gRPC and that of HTTP with a comma between them; for the rest see triton_judge.py. It needs an
environment of its own: the stubs of tritonclient.grpc and of kserve clash (kserve#3099).
"""

import asyncio
import json
import sys
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

addresses, model, requests_file, results_file = sys.argv[1:]
target, url = addresses.split(",")
with open(requests_file, encoding="utf-8") as file:  # noqa: PTH123 - a program of few imports
    requests = json.load(file)
texts, ids, mask = requests["texts"], np.array(requests["ids"]), np.array(requests["mask"])


def text_input(**how: Any) -> Any:
    made = InferInput(name="text", shape=[len(texts)], datatype="BYTES")
    made.set_data_from_numpy(np.array([text.encode() for text in texts], object), **how)
    return made


def column() -> Any:
    return InferInput(name="text", shape=[len(texts), 1], datatype="BYTES", data=[[text] for text in texts])


def id_inputs(**how: Any) -> list[Any]:
    made = []
    for name, data in {"input_ids": ids, "attention_mask": mask}.items():
        made.append(InferInput(name=name, shape=list(data.shape), datatype="INT64"))
        made[-1].set_data_from_numpy(data, **how)
    return made


def request(*inputs: Any, parameters: Any = None, outputs: Any = None) -> Any:
    return InferRequest(model, list(inputs), parameters=parameters, request_outputs=outputs)


def embedding(answer: Any) -> Any:
    (found,) = [it for it in answer.outputs if it.name == "embedding"]
    return found.as_numpy()


async def over_grpc(results: dict[str, Any], told: dict[str, Any]) -> None:
    """With its defaults, which send `binary_data_size`."""
    async with InferenceGRPCClient(url=target) as client:
        told["grpc_ready"] = [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready(model),
        ]
        results["grpc"] = embedding(await client.infer(request(text_input())))
        listed = InferInput(name="text", shape=[len(texts)], datatype="BYTES", data=texts)
        results["grpc_list"] = embedding(await client.infer(request(listed)))
        wanted = [RequestedOutput("embedding", {"binary_data": True})]
        results["grpc_typed"] = embedding(await client.infer(request(text_input(binary_data=False), outputs=wanted)))
        of_ids = request(*id_inputs(), parameters={"binary_data_output": True})
        results["grpc_ids"] = embedding(await client.infer(of_ids))
        try:
            await client.infer(InferRequest("nobody", [text_input()]))
        except grpc.RpcError as error:
            told["grpc_error"] = [str(error.code()), error.details()]


async def over_rest(results: dict[str, Any], told: dict[str, Any]) -> None:
    """Data as bytes, which is the default, and as JSON."""
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        told["rest_ready"] = [
            await client.is_server_live(url),
            await client.is_server_ready(url),
            await client.is_model_ready(url, model),
        ]
        told["rest_unknown_ready"] = await client.is_model_ready(url, "nobody")
        results["rest"] = embedding(await client.infer(url, request(text_input()), model_name=model))
        in_json = request(text_input(binary_data=False))
        results["rest_json"] = embedding(await client.infer(url, in_json, model_name=model))
        results["rest_column"] = embedding(await client.infer(url, request(column()), model_name=model))
        as_bytes = request(*id_inputs(), parameters={"binary_data_output": True})
        results["rest_ids"] = embedding(await client.infer(url, as_bytes, model_name=model))
        try:
            await client.infer(url, request(text_input()), model_name="nobody")
        except httpx.HTTPStatusError as error:
            told["rest_error"] = [error.response.status_code, str(error)]


all_results: dict[str, Any] = {}
all_told: dict[str, Any] = {}
asyncio.run(over_grpc(all_results, all_told))
asyncio.run(over_rest(all_results, all_told))
np.savez(results_file, **all_results)
sys.stdout.write(json.dumps(all_told))
