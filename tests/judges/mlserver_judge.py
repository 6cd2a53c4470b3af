"""Runs in the environment of clients.txt: MLServer's codecs and types, as its documentation's clients use them.

MLServer has no client class: its users encode a request with a codec, post it with `requests`, or over gRPC with its
own stubs, and decode the answer. The address is that of gRPC and that of HTTP with a comma between them; for the rest
see triton_judge.py.
"""

import json
import sys
from typing import Any

import grpc
import numpy as np
import requests as http
from mlserver.codecs import NumpyCodec, StringCodec, StringRequestCodec
from mlserver.grpc import converters, dataplane_pb2_grpc
from mlserver.types import (
    InferenceErrorResponse,
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataServerResponse,
    RepositoryIndexResponse,
    RequestOutput,
)

addresses, model, requests_file, results_file = sys.argv[1:]
target, url = addresses.split(",")
with open(requests_file, encoding="utf-8") as file:  # noqa: PTH123 - a program of few imports
    wanted = json.load(file)
texts, ids, mask = wanted["texts"], np.array(wanted["ids"]), np.array(wanted["mask"])


def embedding(answer: Any) -> Any:
    (found,) = [it for it in answer.outputs if it.name == "embedding"]
    return NumpyCodec.decode_output(found)


def infer(request: Any, **how: Any) -> Any:
    response = http.post(f"{url}/v2/models/{model}/infer", json=request.model_dump(**how), timeout=60)
    response.raise_for_status()
    return embedding(InferenceResponse.model_validate_json(response.content))


def over_rest(results: dict[str, Any], told: dict[str, Any]) -> None:
    """With the fields that are not set as nulls, as model_dump has them, and without."""
    told["server"] = MetadataServerResponse.model_validate_json(http.get(f"{url}/v2", timeout=60).content).name
    about = MetadataModelResponse.model_validate_json(http.get(f"{url}/v2/models/{model}", timeout=60).content)
    told["inputs"] = [it.name for it in about.inputs or []]
    index = http.post(f"{url}/v2/repository/index", json={}, timeout=60)
    told["index"] = [str(it.state) for it in RepositoryIndexResponse.model_validate_json(index.content)]
    text = StringCodec.encode_input("text", texts, use_bytes=False)
    output = RequestOutput(name="embedding")
    results["strings"] = infer(InferenceRequest(inputs=[text], outputs=[output]))
    results["strings_unset"] = infer(InferenceRequest(inputs=[text]), exclude_none=True)
    whole = StringRequestCodec.encode_request(texts, use_bytes=False)  # which calls its one input so
    whole.inputs[0].name = "text"
    results["request_codec"] = infer(whole)
    arrays = [NumpyCodec.encode_input("input_ids", ids), NumpyCodec.encode_input("attention_mask", mask)]
    results["arrays"] = infer(InferenceRequest(inputs=arrays))
    response = http.post(f"{url}/v2/models/nobody/infer", json={"inputs": []}, timeout=60)
    told["error"] = [response.status_code, InferenceErrorResponse.model_validate_json(response.content).error]


def over_grpc(results: dict[str, Any]) -> None:
    """With MLServer's converters and stubs."""
    stub = dataplane_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(target))
    request = InferenceRequest(
        inputs=[StringCodec.encode_input("text", texts)], outputs=[RequestOutput(name="embedding")]
    )
    for name, use_raw in {"grpc": False, "grpc_raw": True}.items():
        sent = converters.ModelInferRequestConverter.from_types(
            request, model_name=model, model_version="", use_raw=use_raw
        )
        results[name] = embedding(converters.ModelInferResponseConverter.to_types(stub.ModelInfer(sent)))


all_results: dict[str, Any] = {}
all_told: dict[str, Any] = {}
over_rest(all_results, all_told)
over_grpc(all_results)
np.savez(results_file, **all_results)
sys.stdout.write(json.dumps(all_told))
