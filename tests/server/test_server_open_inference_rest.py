"""Tests of the Open Inference Protocol over HTTP: replies, refusals, binary tensors and limits."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_server import D_MODEL, FakeServer, StartServer
from fuzzing import damaged
from http_calls import connect, get, post
from open_inference import DATATYPES, DTYPES, IDS, LENGTH, MASK, arrays_of_rest, infer, text_tensor, wild_inputs
from waiting import until

PATH = "/v2/models/tiny/infer"
SHARED_SETTINGS = {"http_port": 0}


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    return await start_server(http_port=0)


def tensor(name: str, array: Any, *, nested: bool = False) -> dict[str, Any]:
    """Return a tensor with its data in JSON. The data type of an array of objects is BYTES."""
    is_text = array.dtype == object
    data: Any = (array if nested else array.reshape(-1)).tolist()
    if is_text:
        data = json.loads(json.dumps(data, default=bytes.decode))
    datatype = "BYTES" if is_text else DATATYPES[array.dtype]
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": data}


def request(*, nested: bool = False, outputs: Any = None, parameters: Any = None, **inputs: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"inputs": [tensor(name, array, nested=nested) for name, array in inputs.items()]}
    if outputs is not None:
        body["outputs"] = [it if isinstance(it, dict) else {"name": it} for it in outputs]
    return body if parameters is None else body | {"parameters": parameters}


def binary(body: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return a request whose tensors follow the JSON as binary data, and a header with the length of the JSON."""
    inputs, parts = [], []
    for it in body["inputs"]:
        if it["datatype"] == "BYTES":
            texts = [text.encode() for text in np.array(it["data"], object).reshape(-1)]
            part = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        else:
            part = np.array(it["data"], DTYPES[it["datatype"]]).tobytes()
        parts.append(part)
        rest = {key: value for key, value in it.items() if key != "data"}
        inputs.append(rest | {"parameters": {"binary_data_size": len(part)}})
    head = json.dumps(body | {"inputs": inputs}).encode()
    return b"".join([head, *parts]), {LENGTH: str(len(head))}


async def ask(server: FakeServer, body: dict[str, Any], path: str = PATH) -> dict[str, npt.NDArray[Any]]:
    return arrays_of_rest(await post(server, path, body))


async def ask_bytes(server: FakeServer, body: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    data, headers = binary(body)
    async with connect(server) as client:
        return arrays_of_rest(await client.post(PATH, content=data, headers=headers))


TEXTS = text_tensor("hello brave new world", "", '🌍 "data": [1, 2] \\', "data")
NARROW = {"input_ids": IDS.astype("<i4"), "attention_mask": MASK.astype("<i4"), "token_type_ids": IDS * 0}


@pytest.mark.parametrize(
    "inputs", [{"text": TEXTS}, {"text": TEXTS.reshape(4, 1)}, {"input_ids": IDS, "attention_mask": MASK}, NARROW]
)
async def test_every_form_of_a_request_gives_the_same_as_grpc(shared: FakeServer, inputs: Any) -> None:
    want = await infer(shared, **inputs)
    as_binary = request(parameters={"binary_data_output": True}, **inputs)
    for got in (
        await ask(shared, request(**inputs)),
        await ask(shared, request(nested=True, **inputs)),
        await ask_bytes(shared, request(**inputs)),
        await ask(shared, as_binary),
        await ask_bytes(shared, as_binary),
    ):
        assert list(got) == list(want)
        for name, array in want.items():
            assert got[name].tobytes() == array.tobytes()


async def test_a_model_of_vectors(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True, http_port=0)
    vectors = np.random.default_rng(0).standard_normal((2, 3, D_MODEL)).astype("<f4")
    want = await infer(server, inputs_embeds=vectors, attention_mask=MASK)
    body = request(nested=True, inputs_embeds=vectors, attention_mask=MASK)
    for got in (await ask(server, body), await ask_bytes(server, body)):
        assert got["last_hidden_state"].tobytes() == want["last_hidden_state"].tobytes()
    too_large = changed(request(inputs_embeds=vectors[:1, :1]), data=[0, 1, 1e300, 2.5])  # 1e300 overflows FP32
    assert "inf in row 0, column 2" in (await post(server, PATH, too_large)).json()["error"]


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT8"])
async def test_numbers_of_every_type(shared: FakeServer, datatype: str) -> None:
    """For every data type, the reply has the same bits as over gRPC.

    The protocol has no FP16 in JSON, so the reply with FP16 is always binary.
    """
    want = await infer(shared, input_ids=IDS, outputs=["embedding"], parameters={"datatype": datatype})
    as_binary = {"datatype": datatype, "binary_data_output": True}
    for parameters in [as_binary] if datatype == "FP16" else [as_binary, {"datatype": datatype}]:
        got = await ask(shared, request(input_ids=IDS, outputs=["embedding"], parameters=parameters))
        assert got["embedding"].dtype == want["embedding"].dtype
        assert got["embedding"].tobytes() == want["embedding"].tobytes()


async def test_each_output_is_json_or_binary(shared: FakeServer) -> None:
    outputs: list[Any] = [{"name": "embedding", "parameters": {"binary_data": True}}, {"name": "lengths"}]
    response = await post(shared, PATH, request(input_ids=IDS, outputs=outputs) | {"id": "a 🌍 id"})
    head = json.loads(response.content[: int(response.headers[LENGTH])])
    assert (head["model_name"], head["model_version"], head["id"]) == ("tiny", "2", "a 🌍 id")
    assert head["outputs"] == [
        {"name": "embedding", "datatype": "FP32", "shape": [2, D_MODEL], "parameters": {"binary_data_size": 32}},
        {"name": "lengths", "datatype": "INT64", "shape": [2], "data": [3, 3]},
    ]
    outputs[0]["parameters"] = {"binary_data": False}
    body = request(input_ids=IDS, outputs=outputs, parameters={"binary_data_output": True})
    response = await post(shared, PATH, body)
    head = json.loads(response.content[: int(response.headers[LENGTH])])
    assert ["data" in it for it in head["outputs"]] == [True, False]
    half = request(input_ids=IDS, outputs=outputs[1:], parameters={"binary_data_output": True, "datatype": "FP16"})
    assert (await ask(shared, half))["lengths"].tolist() == [3, 3]


async def test_names_and_versions_in_the_path(start_server: StartServer) -> None:
    server = await start_server(http_port=0, served_model_name=("org/alias=tiny@1",))
    body = request(input_ids=IDS, outputs=["lengths"])
    for path, version in {
        "tiny": "2",
        "tiny/versions/1": "1",
        "tiny@1": "1",
        "tiny%401": "1",
        "org/alias": "1",
        "org%2Falias": "1",
    }.items():
        reply = (await post(server, f"/v2/models/{path}/infer", body)).json()
        assert (reply["model_name"], reply["model_version"]) == ("tiny", version)
        about = (await get(server, f"/v2/models/{path}")).json()
        assert about["name"] == "tiny"
        assert (await get(server, f"/v2/models/{path}/ready")).json()["ready"] is True
    for path in ("other", "tiny/versions/9", "tiny@9"):
        response = await post(server, f"/v2/models/{path}/infer", body)
        assert response.status_code == 404
        assert response.json()["error"].startswith(("model_name: no model", "model_version: no version"))
        assert (await get(server, f"/v2/models/{path}/ready")).status_code == 404


async def test_metadata_configuration_statistics_and_index(server: FakeServer) -> None:
    assert (await get(server, "/v2")).json()["extensions"] == [
        "binary_tensor_data",
        "model_configuration",
        "statistics",
    ]
    assert (await get(server, "/v2/health/live")).json() == {"live": True}
    assert (await get(server, "/v2/health/ready")).json() == {"ready": True}
    about = (await get(server, "/v2/models/tiny")).json()
    assert (about["versions"], about["platform"]) == (["2", "1"], "encserve")
    assert about["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
    config = (await get(server, "/v2/models/tiny/config")).json()
    embedding = {"name": "embedding", "data_type": "TYPE_FP32", "dims": [-1, D_MODEL]}
    assert config["output"][-1].items() >= embedding.items()
    assert config["max_batch_size"] == 0
    await ask(server, request(input_ids=IDS))
    await infer(server, input_ids=IDS)
    for path in ("/v2/models/stats", "/v2/models/tiny/stats", "/v2/models/tiny/versions/2/stats"):
        stats = (await get(server, path)).json()["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == 2  # one call over HTTP and one over gRPC
    index = (await post(server, "/v2/repository/index", b"")).json()
    assert index[0] == {"name": "tiny", "version": "2", "state": "READY", "reason": ""}
    assert (await post(server, "/v2/repository/index", {"ready": True})).json() == index
    refused = await post(server, "/v2/repository/index", {"ready": 5})
    assert (refused.status_code, refused.json()["error"].partition(":")[0]) == (400, "ready")
    assert (await post(server, "/v2/repository/index", b"[1]")).status_code == 400
    assert (await post(server, "/v2/repository/index", b" " * 2000 + b"{}")).status_code == 400


async def test_a_draining_or_failing_server_is_live_but_not_ready(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.5)
    server = await start_server(http_port=0)
    server.app.catalog.resolve("tiny", "1").not_ready_reason = lambda: "stuck"  # type: ignore[method-assign]
    assert (await get(server, "/v2/health/ready")).status_code == 503
    assert (await get(server, "/v2/models/tiny/versions/1/ready")).status_code == 503
    assert (await get(server, "/v2/models/tiny/ready")).status_code == 200
    running = await server.start_held(ask(server, request(input_ids=IDS)))
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    assert (await get(server, "/v2/health/live")).json() == {"live": True}
    assert (await get(server, "/v2/health/ready")).status_code == 503
    assert (await get(server, "/v2/models/tiny/ready")).status_code == 503
    assert (await post(server, PATH, request(input_ids=IDS))).status_code == 503
    server.engine.let_go()
    assert (await running)["lengths"].tolist() == [3, 3]
    assert await stopping


async def test_the_protocol_can_be_turned_off(start_server: StartServer) -> None:
    server = await start_server(http_port=0, open_inference=False)
    assert (await get(server, "/v2/health/live")).status_code == 404


def ids(array: Any = IDS, **more: Any) -> dict[str, Any]:
    return request(input_ids=array, **more)


def texts(*words: str, **more: Any) -> dict[str, Any]:
    return request(text=text_tensor(*words), **more)


def changed(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the request with changed fields of its first input. A value of `...` removes the field."""
    first = {key: value for key, value in (body["inputs"][0] | fields).items() if value is not ...}
    return body | {"inputs": [first, *body["inputs"][1:]]}


SAYS = {"name": "lengths", "parameters": {}}
# Each row has a request with an error, the field that the error names, and a part of the message. The tests over gRPC
# check more errors of fields and shapes.
REFUSED: list[tuple[Any, str, str]] = [
    (b"", "", "the body is not valid JSON"),
    (b"[1]", "", "must be a JSON object"),
    (b'{"raw": 1, "inputs": ', "", "the body is not valid JSON"),
    (b'{"raw": 1, "id": "\xff", "inputs": []}', "id", "must be UTF-8; was byte 0xff"),
    (b'{"inputs": [' + b"{}," * 100_000 + b"5]}", "inputs[0].name", "is required"),
    (b'{"inputs": [' + b"{}," * 100_000, "", "the body is not valid JSON"),
    ({}, "inputs", "must hold input_ids or text; was empty"),
    ({"inputs": None}, "inputs", "must hold input_ids or text; was empty"),
    ({"inputs": []}, "inputs", "was empty"),
    ({"inputs": 5, "raw": 1}, "inputs", "must be a list of objects; was 5"),
    ({"inputs": [5]}, "inputs[0]", "must be an object; was 5"),
    ({"inputs": [{"name": "text"}]}, "inputs[0].datatype", "is required"),
    (ids() | {"outputs": {}}, "outputs", "must be a list of objects; was an object"),
    (ids() | {"id": 5}, "id", "must be a string; was 5"),
    (ids() | {"id": "x" * 1025}, "id", "at most 1024 characters; was 1025"),
    (ids() | {"parameters": [1]}, "parameters", "must be an object; was a list"),
    (ids(parameters={"timeout": [1]}), "parameters.timeout", "64 bits"),
    (ids(parameters={"timeout": 2**70}), "parameters.timeout", "64 bits"),
    (ids(parameters={f"{i}": i for i in range(65)}), "parameters", "at most 64 parameters; was 65"),
    (ids(parameters={"datatype": "FP16"}), "parameters.datatype", "FP32"),
    (ids(outputs=[SAYS | {"parameters": {"classification": 2}}]), "outputs[0].parameters", "classification"),
    (ids(outputs=[SAYS | {"parameters": {"binary_data": 1}}]), "outputs[0].parameters.binary_data", "must be"),
    (changed(ids(), shape=[2**31 - 1, 2**31 - 1]), "inputs", "at most"),
    (changed(ids(), shape="2, 3"), "inputs[0].shape", "must be a list of whole numbers; was a string"),
    (changed(ids(), shape=[2, 2.5]), "inputs[0].shape[1]", "must be a whole number; was 2.5"),
    (changed(ids(), shape=[1] * 10_000), "input_ids.shape", "[-1, -1]"),
    (changed(ids(), shape=[2, 2**31 - 1]), "input_ids[0]", "at most 32 tokens"),
    (changed(ids(parameters={"truncate": True}), shape=[2, 2**31 - 1]), "input_ids", "4294967294 elements"),
    (changed(ids(), shape=[2, 2]), "input_ids", "4 elements for its shape [2, 2]; was 6"),
    (changed(ids(), data=...), "input_ids.data", "required"),
    (changed(ids(), data=5), "input_ids.data", "list of numbers"),
    (changed(ids(), data=["5"]), "input_ids[0, 0]", "whole number"),
    (changed(ids(), data=[[5, 6], [7, 8], [0, 0]]), "input_ids.data", "2 lists for the shape [2, 3]; was 3"),
    (changed(ids(), data=[[5, 6, 7, 8], [0, 0]]), "input_ids[0]", "was 4"),
    (changed(ids(), data=[[5, 6, 7], [8, 0]]), "input_ids[1]", "was 2"),
    (changed(ids(), data=[[5, 6, 7]]), "input_ids.data", "2 lists for the shape [2, 3]; was 1"),
    (changed(ids(), data=[[5, 6, 7], 8]), "input_ids[1]", "a list for the shape [2, 3]; was 8"),
    (changed(ids(), data=[[5, 6, 7]] * 3), "input_ids.data", "[2, 3]"),
    (changed(ids(), data=[[5]] * 100_000), "input_ids.data", "was 100001 lists, not 3"),
    (changed(ids(), data=[[5, 6, [7]], []]), "input_ids[0, 2]", "whole number"),
    (
        changed(ids(), data=[[5, 6, 7], [8, "]", 0]]),
        "input_ids[1, 1]",
        "a whole number of 64 bits (INT64); was a string",
    ),
    (changed(ids(), data=[[[5, 6, 7], [8, 0, 0]]]), "input_ids.data", "list of numbers"),
    (changed(ids(), data=[[5, 6, 7], [8, 0, 0.5]]), "input_ids[1, 2]", "(INT64)"),
    (changed(ids(), data=[5, 6, 7, 8, 2**63, 0]), "input_ids[1, 1]", "(INT64)"),
    (changed(ids(), datatype="INT32", data=[5, 6, 7, 8, 2**31, 0]), "input_ids[1, 1]", "(INT32)"),
    (changed(ids(), data=[]), "input_ids", "was 0"),
    (changed(ids(), data=[[], []]), "input_ids[0]", "was 0"),
    (changed(ids(), parameters={"shared_memory_region": "x"}), "input_ids.parameters", "shared memory"),
    (changed(ids(), parameters={"binary_data_size": 1}), "input_ids.parameters.binary_data_size", "from 0 to 0"),
    (changed(ids(), parameters={"binary_data_size": 0}), "input_ids.data", "left out"),
    (changed(texts("a"), data=[1]), "text[0]", "must be a string; was 1"),
    (changed(texts("a"), data="a"), "text.data", "must be a list of strings; was a string"),
    (changed(texts("a"), data=[["a", "b"]]), "text[0]", "string"),
    (changed(texts("a"), data=["a", "b"]), "text", "was 2"),
    (changed(texts("a"), data=[]), "text", "was 0"),
    (texts(*["hello"] * 3000), "inputs", "at most 2048 sequences"),
    (texts(*["hello there, brave new world"] * 3000), "inputs", "at most 2048 sequences"),
]


@pytest.mark.parametrize(("body", "field", "problem"), REFUSED)
async def test_the_error_names_the_bad_field(shared: FakeServer, body: Any, field: str, problem: str) -> None:
    response = await post(shared, PATH, body)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    assert response.json()["error"].startswith(f"{field}: " if field else "the body ")
    assert problem in response.json()["error"]


SIZE = "input_ids.parameters.binary_data_size"


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({LENGTH: "x"}, LENGTH, "from 1 to"),
        ({LENGTH: "0"}, LENGTH, "from 1 to"),
        ({LENGTH: "-1"}, LENGTH, "from 1 to"),
        ({LENGTH: "9" * 5000}, LENGTH, "from 1 to"),
        ({LENGTH: "10"}, "the body", "JSON"),
        ({"size": 8}, "inputs.parameters.binary_data_size", "48 bytes"),
        ({"size": 49}, SIZE, "from 0 to 48"),
        ({"size": -1}, SIZE, "from 0 to 48"),
        ({"size": True}, SIZE, "from 0 to 48"),
        ({"size": None}, "input_ids.data", "required"),
        ({"text": b"\xff\xff\xff\x7f" + b"x" * 44}, "text", "4 bytes"),
        ({"text": b"\x20\0\0\0" + b"x" * 32 + b"\x08\0\0\0" + b"x" * 8}, "text", "was 2"),
        ({"text": b"\x2c\0\0\0\xff\xfe" + b"x" * 42}, "text[0]", "UTF-8"),
        ({"cut": 3}, "input_ids", "45 bytes"),
        ({"cut": 8}, "input_ids", "was 5"),
    ],
)
async def test_bad_bytes_are_named(shared: FakeServer, change: dict[str, Any], field: str, problem: str) -> None:
    sent = {"name": "input_ids", "datatype": "INT64", "shape": [2, 3]}
    data = change.get("text", IDS.tobytes())
    if "text" in change:
        sent = {"name": "text", "datatype": "BYTES", "shape": [1]}
    data = data[: len(data) - change.get("cut", 0)]
    head = json.dumps({"inputs": [sent | {"parameters": {"binary_data_size": change.get("size", len(data))}}]}).encode()
    headers = {LENGTH: change.get(LENGTH, str(len(head)))}
    async with connect(shared) as client:
        response = await client.post(PATH, content=head + data, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"].startswith(field)
    assert problem in response.json()["error"]


async def test_unknown_fields_are_ignored_by_default(shared: FakeServer) -> None:
    body = changed(ids(outputs=["lengths"]), content_type="np", data=IDS.tolist()) | {"model_name": "x", "raw": 1}
    assert (await ask(shared, body))["lengths"].tolist() == [3, 3]


async def test_a_strict_server_refuses_unknown_fields(start_server: StartServer) -> None:
    server = await start_server(http_port=0, strict_http=True)
    for body, field in ((ids() | {"raw": 1}, "raw"), (changed(ids(), content_type="np"), "inputs[0].content_type")):
        response = await post(server, PATH, body)
        assert (response.status_code, response.json()["error"].partition(":")[0]) == (400, field)


async def test_errors_of_the_server_have_their_statuses(start_server: StartServer) -> None:
    server = await start_server(http_port=0, max_queue_tokens=30)
    async with server.queue_of(30):
        full = await post(server, PATH, ids())
        assert (full.status_code, full.headers["encserve-error-reason"]) == (429, "QUEUE_FULL")
        assert full.headers["retry-after"]
    server.engine.hold()
    late = await post(server, PATH, ids(parameters={"timeout": 50_000}))
    server.engine.let_go()
    assert (late.status_code, late.headers["encserve-error-reason"]) == (408, "DEADLINE_EXPIRED")
    large = await post(server, PATH, ids(np.ones((10, 30), np.int64)))
    assert (large.status_code, large.headers["encserve-error-reason"]) == (413, "REQUEST_TOO_LARGE")


MILLION = np.ones((250, 4000), np.int64)  # a million ids, of which truncation keeps 8,000
LARGE = json.dumps(request(input_ids=MILLION, outputs=["lengths"], parameters={"truncate": True})).encode()


async def test_the_decoded_size_of_a_large_body_counts_against_the_byte_budget(start_server: StartServer) -> None:
    server = await start_server(http_port=0, max_queue_tokens=100_000)
    wide = texts(*["é" * 30_000] * 16)
    server.engine.hold()
    for body, size in ((LARGE, len(LARGE) + MILLION.nbytes), (binary(wide)[0], 16 * 30_000 * 3)):
        headers = {} if body is LARGE else binary(wide)[1]
        async with connect(server) as client:
            running = asyncio.create_task(client.post(PATH, content=body, headers=headers))
            await until(lambda: server.held_bytes() > size)  # noqa: B023
            server.app._calls.budget.limit = server.app._calls.budget.held
            full = await client.post(PATH, content=LARGE)
            assert (full.status_code, full.headers["encserve-error-reason"]) == (429, "BUDGET_FULL")
            running.cancel()
            await until(lambda: server.held_bytes() == 0)
    server.engine.let_go()


async def test_calls_are_counted_by_route_and_status(server: FakeServer) -> None:
    """The label `route` has a placeholder instead of the name of the model."""
    await ask(server, ids())
    await post(server, PATH, ids(-IDS))
    route = "POST /v2/models/{name:path}/infer"
    for status in ("200", "400"):
        assert server.sample("encserve_http_requests_total", route=route, status=status) == 1


def odd(rng: random.Random, good: Any, *others: Any) -> Any:
    """Return `good` in 98 % of the calls, and a bad value in the other calls."""
    if rng.random() > 0.02:
        return good
    return rng.choice([None, [], {}, True, -1, 2**70, 0.5, "", "x", [[1], "a"], *others])


def wild_body(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """Return a random body, in JSON or with binary tensors, and its headers. Any field may be invalid."""
    names = ["last_hidden_state", "lengths", "embedding"]
    outputs = [
        {"name": odd(rng, rng.choice(names)), "parameters": odd(rng, {"binary_data": odd(rng, rng.random() < 0.5)})}
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    parameters = {
        name: odd(rng, value, 7)
        for name, value in {
            "truncate": True,
            "datatype": rng.choice(["FP16", "INT8"]),
            "dimensions": 2,
            "prompt_name": "",
            "timeout": 60_000_000,
            "binary_data_output": True,
        }.items()
        if rng.random() < 0.2
    }
    body = request(
        nested=rng.random() < 0.5, outputs=outputs or None, parameters=odd(rng, parameters), **wild_inputs(rng)
    )
    headers: dict[str, str] = {}
    if rng.random() < 0.5:
        data, headers = binary(body)
        head = json.loads(data[: int(headers[LENGTH])])
        rest = data[int(headers[LENGTH]) :]
    else:
        head, rest = body, b""
    for it in head["inputs"]:
        for field in it:
            it[field] = odd(
                rng, it[field], [2**31, 7], ["a"], "INT64", "text", {"binary_data_size": rng.choice([-1, 3])}
            )
    if rng.random() < 0.2:
        head = {"raw": names} | head
    data = json.dumps(odd(rng, head)).encode()
    if headers:
        headers = {LENGTH: str(odd(rng, len(data), 0, len(data) + 1, 10**30)).encode("ascii", "replace").decode()}
    data += rest
    return (damaged(data, rng) if rng.random() < 0.2 else data), headers


async def test_any_body_gets_a_reply_or_a_client_error(server: FakeServer) -> None:
    """The server answers 300 random bodies with 200, 400, 408 or 413. tests/hostile sends many more random bodies."""
    rng, count = random.Random(0), 300
    seen: Counter[tuple[bool, int]] = Counter()
    async with connect(server) as client:
        for _ in range(count):
            data, headers = wild_body(rng)
            response = await client.post(PATH, content=data, headers=headers)
            seen[bool(headers), response.status_code] += 1
            if response.status_code == 200:
                arrays_of_rest(response)
            else:
                assert response.status_code in (400, 408, 413), (response.text, data)
                assert set(response.json()) == {"error"}
    for is_binary in (True, False):
        assert seen[is_binary, 200] > count / 20, f"the fuzzer sent too few valid requests: {seen}"
        assert seen[is_binary, 400] > count / 20, f"the fuzzer got too few replies with status 400: {seen}"
    assert server.sample("encserve_in_flight_requests") == 0
    assert len((await server.encode([1, 2])).sequences) == 1
