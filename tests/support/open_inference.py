"""Builds requests and reads replies of the Open Inference Protocol, for tests with a `FakeServer`."""

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from fake_engine import fake_rows
from fake_server import D_MODEL, INFER_SERVICE, VOCAB_SIZE, FakeServer

from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as pb

LENGTH = "Inference-Header-Content-Length"
DTYPES = {"INT64": "<i8", "INT32": "<i4", "UINT32": "<u4", "FP32": "<f4", "FP16": "<f2", "INT8": "i1"}
_FIELDS = {"BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents", "FP32": "fp32_contents"}
DATATYPES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
# A batch of two sequences: one sequence has 3 tokens, and the other has 1 token. PADDED has the hidden states that the
# fake engine returns for these sequences, and zeros for the padding.
IDS = np.array([[5, 6, 7], [8, 0, 0]])
MASK = np.array([[1, 1, 1], [1, 0, 0]])
PADDED = np.stack(
    [fake_rows(np.array([5, 6, 7]), D_MODEL), np.pad(fake_rows(np.array([8]), D_MODEL), ((0, 2), (0, 0)))]
)


def text_tensor(*texts: str) -> npt.NDArray[np.object_]:
    """Return texts as an array of bytes objects, in the shape (n,)."""
    return np.array([text.encode() for text in texts], object)


def infer_request(
    *,
    outputs: Sequence[str] = (),
    raw: bool = True,
    parameters: Any = None,
    request_id: str = "",
    model: str = "tiny",
    **inputs: Any,
) -> pb.ModelInferRequest:
    """Return a request with one input tensor for each array. An array of objects becomes a BYTES tensor."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, array in inputs.items():
        is_bytes = array.dtype == object
        datatype = "BYTES" if is_bytes else DATATYPES[array.dtype]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        flat = array.reshape(-1).tolist()
        if raw:
            elements = b"".join(len(it).to_bytes(4, "little") + it for it in flat) if is_bytes else array.tobytes()
            request.raw_input_contents.append(elements)
        else:
            getattr(tensor.contents, _FIELDS[datatype]).extend(flat)
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


def wild_inputs(rng: random.Random) -> dict[str, Any]:
    """Return random input arrays by name. Some ids, masks and combinations are invalid, such as text with ids."""
    rows, columns = rng.choice([0, 1, 1, 2, 5]), rng.choice([0, 1, 3, 3, 9, 40])
    words = ["hello", "", "brave \x00 new", "🌍" * 9, "world " * 50, '"data": [1]', "\\"]
    inputs: dict[str, Any] = {}
    if rng.random() < 0.5:
        its = text_tensor(*(rng.choice(words) for _ in range(rows)))
        inputs["text"] = its.reshape(-1, 1) if rng.random() < 0.3 else its
    if rng.random() < 0.2 or not inputs:
        of_int = rng.choice(["<i4", "<i8"])
        ids = [rng.randrange(-1, VOCAB_SIZE + 5) for _ in range(rows * columns)]
        inputs["input_ids"] = np.array(ids, of_int).reshape(rows, columns)
        if rng.random() < 0.5:
            lengths = np.array([rng.randint(0, columns) for _ in range(rows)], int)
            inputs["attention_mask"] = (np.arange(columns) < lengths[:, None]).astype("<i8").reshape(rows, columns)
        if rng.random() < 0.2:
            inputs["token_type_ids"] = np.full((rows, columns), rng.random() < 0.1, of_int)
    return inputs


def arrays_of(response: pb.ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    """Return the output arrays of a gRPC reply by name."""
    assert len(response.raw_output_contents) == len(response.outputs)
    return {
        it.name: np.frombuffer(data, DTYPES[it.datatype]).reshape(it.shape)
        for it, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def arrays_of_rest(response: httpx.Response) -> dict[str, npt.NDArray[Any]]:
    """Return the output arrays of an HTTP reply by name."""
    assert response.status_code == 200, response.text
    size = int(response.headers.get(LENGTH, len(response.content)))
    head, at, found = json.loads(response.content[:size]), size, {}
    for it in head["outputs"]:
        dtype = DTYPES[it["datatype"]]
        if "data" in it:
            assert "parameters" not in it
            array = np.array(it["data"], dtype)
        else:
            end = at + it["parameters"]["binary_data_size"]
            array, at = np.frombuffer(response.content[at:end], dtype), end
        found[it["name"]] = array.reshape(it["shape"])
    assert at == len(response.content)
    is_binary = LENGTH in response.headers
    assert response.headers["content-type"] == ("application/octet-stream" if is_binary else "application/json")
    return found


async def ask(server: FakeServer, method: str, request: Any, response_type: Any) -> Any:
    """Call a method of the Open Inference service. If the call fails, raise `fake_server.Failed`."""
    return response_type.FromString(await server.call(method, request, INFER_SERVICE))


async def infer(server: FakeServer, **request: Any) -> dict[str, npt.NDArray[Any]]:
    """Call ModelInfer and return the output arrays by name. If the call fails, raise `fake_server.Failed`."""
    return arrays_of(await ask(server, "ModelInfer", infer_request(**request), pb.ModelInferResponse))
