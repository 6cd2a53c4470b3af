"""Calls the server with KServe's gRPC and REST clients.

The program runs in the virtual environment of the requirements file gateways.txt. This environment does not contain
tritonclient, because the gRPC stubs of kserve and tritonclient conflict (kserve#3099). The argument ADDRESS is
`GRPC_TARGET,HTTP_URL`.
"""

import asyncio
from typing import Any

import grpc
import httpx
import numpy as np
from judge_io import address, ids, mask, model, texts, write
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

target, url = address.split(",")
vectors: dict[str, Any] = {}
facts: dict[str, Any] = {}


def tensor(name: str, data: Any, datatype: str, **options: Any) -> Any:
    made = InferInput(name=name, shape=list(data.shape), datatype=datatype)
    made.set_data_from_numpy(data, **options)
    return made


def text_tensor(**options: Any) -> Any:
    return tensor("text", np.array([text.encode() for text in texts], object), "BYTES", **options)


def id_tensors() -> list[Any]:
    return [tensor("input_ids", ids, "INT64"), tensor("attention_mask", mask, "INT64")]


def request(*inputs: Any, parameters: Any = None, outputs: Any = None) -> Any:
    return InferRequest(model, list(inputs), parameters=parameters, request_outputs=outputs)


def embedding(reply: Any) -> Any:
    (found,) = [output for output in reply.outputs if output.name == "embedding"]
    return found.as_numpy()


async def use_grpc() -> None:
    async with InferenceGRPCClient(url=target) as client:
        facts["grpc_ready"] = [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready(model),
        ]
        vectors["grpc"] = embedding(await client.infer(request(text_tensor())))  # the client sends `binary_data_size`
        as_list = InferInput(name="text", shape=[len(texts)], datatype="BYTES", data=texts)
        vectors["grpc_list"] = embedding(await client.infer(request(as_list)))
        outputs = [RequestedOutput("embedding", {"binary_data": True})]
        vectors["grpc_typed"] = embedding(await client.infer(request(text_tensor(binary_data=False), outputs=outputs)))
        binary = request(*id_tensors(), parameters={"binary_data_output": True})
        vectors["grpc_ids"] = embedding(await client.infer(binary))
        try:
            await client.infer(InferRequest("unknown", [text_tensor()]))
        except grpc.RpcError as error:
            facts["grpc_error"] = str(error.code())


async def use_rest() -> None:
    """Send tensors as bytes and as JSON. By default, KServe's client sends bytes."""
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        facts["rest_ready"] = [
            await client.is_server_live(url),
            await client.is_server_ready(url),
            await client.is_model_ready(url, model),
        ]
        facts["rest_unknown_ready"] = await client.is_model_ready(url, "unknown")
        column = InferInput(name="text", shape=[len(texts), 1], datatype="BYTES", data=[[text] for text in texts])
        requests = {
            "rest": request(text_tensor()),
            "rest_json": request(text_tensor(binary_data=False)),
            "rest_column": request(column),
            "rest_ids": request(*id_tensors(), parameters={"binary_data_output": True}),
        }
        for name, sent in requests.items():
            vectors[name] = embedding(await client.infer(url, sent, model_name=model))
        try:
            await client.infer(url, request(text_tensor()), model_name="unknown")
        except httpx.HTTPStatusError as error:
            facts["rest_error"] = error.response.status_code


asyncio.run(use_grpc())
asyncio.run(use_rest())
write(vectors, facts)
