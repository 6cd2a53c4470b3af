"""Calls the server with MLServer's codecs and types.

MLServer has no client class. A caller encodes a request with a codec, and sends the request with `requests` or with
MLServer's gRPC stubs. The program runs in the virtual environment of the requirements file clients.txt. The argument
ADDRESS is `GRPC_TARGET,HTTP_URL`.
"""

from typing import Any

import grpc
import requests as http
from judge_io import address, ids, mask, model, texts, write
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

target, url = address.split(",")
vectors: dict[str, Any] = {}
facts: dict[str, Any] = {}


def embedding(reply: Any) -> Any:
    (found,) = [output for output in reply.outputs if output.name == "embedding"]
    return NumpyCodec.decode_output(found)


def infer(request: Any, **options: Any) -> Any:
    reply = http.post(f"{url}/v2/models/{model}/infer", json=request.model_dump(**options), timeout=60)
    reply.raise_for_status()
    return embedding(InferenceResponse.model_validate_json(reply.content))


def use_rest() -> None:
    """Send some requests with null for unset fields, and one request without these fields.

    By default, model_dump writes null.
    """
    MetadataServerResponse.model_validate_json(http.get(f"{url}/v2", timeout=60).content)
    about = MetadataModelResponse.model_validate_json(http.get(f"{url}/v2/models/{model}", timeout=60).content)
    facts["inputs"] = [tensor.name for tensor in about.inputs or []]
    RepositoryIndexResponse.model_validate_json(http.post(f"{url}/v2/repository/index", json={}, timeout=60).content)
    text = StringCodec.encode_input("text", texts, use_bytes=False)
    vectors["strings"] = infer(InferenceRequest(inputs=[text], outputs=[RequestOutput(name="embedding")]))
    vectors["strings_unset"] = infer(InferenceRequest(inputs=[text]), exclude_none=True)
    whole = StringRequestCodec.encode_request(texts, use_bytes=False)
    whole.inputs[0].name = "text"
    vectors["request_codec"] = infer(whole)
    arrays = [NumpyCodec.encode_input("input_ids", ids), NumpyCodec.encode_input("attention_mask", mask)]
    vectors["arrays"] = infer(InferenceRequest(inputs=arrays))
    reply = http.post(f"{url}/v2/models/unknown/infer", json={"inputs": []}, timeout=60)
    InferenceErrorResponse.model_validate_json(reply.content)
    facts["error"] = reply.status_code


def use_grpc() -> None:
    stub = dataplane_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(target))
    text = StringCodec.encode_input("text", texts)
    request = InferenceRequest(inputs=[text], outputs=[RequestOutput(name="embedding")])
    to_proto, from_proto = converters.ModelInferRequestConverter, converters.ModelInferResponseConverter
    for name, use_raw in {"grpc": False, "grpc_raw": True}.items():
        sent = to_proto.from_types(request, model_name=model, model_version="", use_raw=use_raw)
        vectors[name] = embedding(from_proto.to_types(stub.ModelInfer(sent)))


use_rest()
use_grpc()
write(vectors, facts)
