"""Tests of Cohere's routes: requests as Cohere's SDK sends them, replies, refused requests and limits."""

import asyncio
import base64
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, StartServer
from http_calls import post
from http_calls import vectors_over_grpc as over_grpc
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import Serve
from waiting import until

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.protocols.cohere import _GROWTH, _pieces
from encserve_server.types.requests import DataType

TEXTS = ["hello brave new world", "new world", "hello"]
EVERY_TYPE = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
V1, V2 = "/v1/embed", "/v2/embed"


SHARED_SETTINGS = {"http_port": 0}


async def embed(server: FakeServer, path: str = V2, **fields: Any) -> Any:
    """Send an embed request that must succeed, and return the JSON of the reply."""
    response = await post(server, path, {"model": "tiny", "input_type": "search_document"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("dimensions", [None, 3])
async def test_vectors_of_every_type_are_the_same_over_http_and_grpc(
    shared: FakeServer, dimensions: int | None
) -> None:
    reply = await embed(shared, texts=TEXTS, embedding_types=EVERY_TYPE, output_dimension=dimensions)
    got, cut = reply["embeddings"], dimensions or 0
    floats = await over_grpc(shared, *TEXTS, dimensions=cut)
    int8 = await over_grpc(shared, *TEXTS, data_type=pb.DATA_TYPE_INT8, dimensions=cut)
    bits = await over_grpc(shared, *TEXTS, data_type=pb.DATA_TYPE_BINARY, dimensions=cut)
    assert list(got) == EVERY_TYPE
    np.testing.assert_array_equal(np.array(got["float"], np.float32), floats)
    assert got["int8"] == int8.tolist()
    assert got["uint8"] == (int8.astype(int) + 128).tolist()
    assert got["ubinary"] == bits.tolist()
    assert got["binary"] == (bits.astype(int) - 128).tolist()
    assert [base64.b64decode(it) for it in got["base64"]] == [row.tobytes() for row in floats]
    factor = np.float32(127 * np.sqrt(floats.shape[1]) / 4)
    np.testing.assert_array_equal(int8, np.clip(np.rint(floats * factor), -128, 127))
    np.testing.assert_array_equal(bits, np.packbits(floats > 0, axis=1))


async def test_the_reply_has_every_field_of_the_sdk(shared: FakeServer) -> None:
    reply = await embed(shared, texts=TEXTS)
    of_openai = (await post(shared, "/v1/embeddings", {"input": TEXTS, "encoding_format": "float"})).json()
    tokens = {"input_tokens": 6 + 4 + 3}
    assert of_openai["usage"]["prompt_tokens"] == tokens["input_tokens"]
    assert len(reply.pop("id")) == 36
    assert reply == {
        "embeddings": {"float": [it["embedding"] for it in of_openai["data"]]},
        "texts": TEXTS,
        "meta": {"api_version": {"version": "2"}, "billed_units": tokens, "tokens": tokens},
        "response_type": "embeddings_by_type",
    }


async def test_the_first_version_gives_a_list_unless_the_request_names_types(shared: FakeServer) -> None:
    reply = await embed(shared, V1, texts=TEXTS)
    np.testing.assert_array_equal(np.array(reply["embeddings"], np.float32), await over_grpc(shared, *TEXTS))
    assert (reply["response_type"], reply["meta"]["api_version"]) == ("embeddings_floats", {"version": "1"})
    reply = await embed(shared, V1, texts=TEXTS, embedding_types=["int8", "float", "int8"])
    assert (reply["response_type"], list(reply["embeddings"])) == ("embeddings_by_type", ["int8", "float"])


async def test_the_texts_of_one_input_are_joined_by_newlines(shared: FakeServer) -> None:
    inputs = [{"content": [{"type": "text", "text": word} for word in text.split()]} for text in TEXTS]
    reply, want = await embed(shared, inputs=inputs), await embed(shared, texts=TEXTS)
    assert reply["embeddings"] == want["embeddings"]
    assert reply["texts"] == [text.replace(" ", "\n") for text in TEXTS]


async def test_input_types_are_tasks(serve: Serve) -> None:
    query = manifest_pb2.TaskSettings(prompt_name="q")
    server = await serve({}, {"http_port": 0}, prompts={"q": "w7 w7 "}, query=query)
    for name, tokens in (("search_query", 5), ("search_document", 3), ("classification", 3), ("clustering", 3)):
        assert (await embed(server, texts=["w5"], input_type=name))["meta"]["tokens"] == {"input_tokens": tokens}


async def test_truncation(shared: FakeServer) -> None:
    """By default, the server truncates a text at the end, to the model's longest sequence or to `max_tokens`.

    If `truncate` is NONE, the server refuses a longer text.
    """
    long: dict[str, Any] = {"texts": ["hello " * 40, "new"]}
    for fields, tokens in (({}, 32), ({"truncate": "END"}, 32), ({"max_tokens": 5}, 5), ({"max_tokens": 99}, 32)):
        reply = await embed(shared, **long, **fields)
        assert reply["meta"]["billed_units"]["input_tokens"] == tokens + 3
    response = await post(shared, V2, long)
    assert response.headers["encserve-truncated-inputs"] == "1"
    limits: Any = (({}, "32 tokens (max_sequence_tokens of tiny)"), ({"max_tokens": 5}, "5 tokens (max_tokens)"))
    for fields, limit in limits:
        response = await post(shared, V2, {**long, "truncate": "NONE", **fields})
        assert response.status_code == 400
        assert response.json()["message"].startswith("texts[0]: ")
        assert limit in response.json()["message"]


def item(*contents: Any) -> Any:
    return {"inputs": [{"content": [{"type": "text", "text": "hello"}]}, {"content": list(contents)}]}


REFUSED: list[tuple[Any, str, str]] = [  # a body, the field that the error names, and a part of the error text
    ({}, "texts", "null"),
    ({"texts": []}, "texts", "empty"),
    ({"inputs": []}, "inputs", "empty"),
    ({"texts": "hello"}, "texts", "a string"),
    ({"texts": [[1, 2]]}, "texts[0]", "a list"),
    ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "b"}]}]}, "texts", "inputs"),
    ({"texts": ["a"], "inputs": [1]}, "inputs[0].content", '"type": "text"'),
    ({"images": ["data:"]}, "images", "only texts"),
    ({"inputs": ["hello"]}, "inputs[0].content", '"type": "text"'),
    (item(), "inputs[1].content", '"type": "text"'),
    (item({"type": "image_url"}), "inputs[1].content[0].type", "'text'"),
    (item({"type": 4}), "inputs[1].content[0].type", "'text'"),
    (item({"type": "text"}), "inputs[1].content[0].text", "a string"),
    (item({"type": "text", "text": "hello " * 99}) | {"truncate": "NONE"}, "inputs[1]", "at most 32 tokens"),
    ({"inputs": 5}, "inputs", "was 5"),
    ({"inputs": [[[1]] * 400_000]}, "inputs[0]", "at most 262144 bytes"),
    ({"texts": ["a"], "embedding_types": ["float", "int4"]}, "embedding_types[1]", "'int4'"),
    ({"embedding_types": "int8"}, "embedding_types", "a string"),
    ({"texts": ["a"], "truncate": "START"}, "truncate", "START"),
    ({"texts": ["a"], "truncate": "LEFT"}, "truncate", "'left'"),
    ({"texts": ["a"], "truncate": True}, "truncate", "a boolean"),
    ({"texts": ["a"], "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"texts": ["a"], "output_dimension": 0}, "output_dimension", "at least 1"),
    ({"texts": ["a"], "output_dimension": 9}, "output_dimension", "at most 4"),
    ({"texts": ["a"], "input_type": "rank"}, "input_type", "'rank'"),
    ({"texts": ["a"], "input_type": "image"}, "input_type", "search_query"),
]


@pytest.mark.parametrize(("body", "field", "problem"), REFUSED)
async def test_the_error_names_the_bad_field(shared: FakeServer, body: Any, field: str, problem: str) -> None:
    for path in (V1, V2):
        response = await post(shared, path, body)
        assert response.status_code == 400
        assert set(response.json()) == {"id", "message"}
        assert response.json()["message"].startswith(f"{field}: ")
        assert problem in response.json()["message"]


async def test_unknown_models_and_bodies_that_are_not_json(shared: FakeServer) -> None:
    response = await post(shared, V2, {"texts": ["a"], "model": "embed-v4.0"})
    assert response.status_code == 404
    assert response.json()["message"].startswith("model: no model 'embed-v4.0'")
    response = await post(shared, V2, b"{")
    assert (response.status_code, set(response.json())) == (400, {"id", "message"})


def large(count: int, field: str) -> bytes:
    item = {"content": [{"type": "text", "text": "hello " * 30}]}
    return json.dumps({"inputs": [item] * count} if field == "inputs" else {"texts": ["hello " * 30] * count}).encode()


@pytest.mark.parametrize("field", ["texts", "inputs"])
async def test_many_inputs(start_server: StartServer, field: str) -> None:
    server = await start_server(http_port=0, max_request_sequences=500)
    assert len(large(500, field)) > 64 * 1024
    response = await post(server, V2, large(500, field))
    assert response.status_code == 200, response.text
    assert len(response.json()["embeddings"]["float"]) == len(response.json()["texts"]) == 500
    response = await post(server, V2, large(501, field))
    assert (response.status_code, set(response.json())) == (400, {"id", "message"})
    assert "500" in response.json()["message"]


@given(st.sets(st.sampled_from(EVERY_TYPE), min_size=1), st.integers(1, 40), st.integers(1, 8))
def test_the_reply_is_not_larger_than_its_estimate(names: set[str], width: int, count: int) -> None:
    """A reply never exceeds its estimated size, even if each number has as many characters as possible."""
    floats = np.full((1, width), -1.1754944e-38, np.float32)
    made: dict[str, Any] = {"float": floats, "int8": np.full((1, width), -128, np.int8)}
    made["binary"] = np.full((1, DataType.BINARY.row_bytes(width)), 0, np.uint8)
    data_types = {"float": DataType.FLOAT32, "int8": DataType.INT8, "binary": DataType.BINARY}
    needed = [name for name, of in MADE_OF.items() if of & names]
    sequence = SimpleNamespace(outputs=[made[name] for name in needed])
    reply: Any = SimpleNamespace(sequences=[sequence] * count)
    size = sum(len(piece) for name in names for piece in _pieces(name, reply, [data_types[it] for it in needed]))
    assert size <= _GROWTH * count * (64 + sum(made[name].nbytes for name in needed))


MADE_OF = {"float": {"float", "base64"}, "int8": {"int8", "uint8"}, "binary": {"binary", "ubinary"}}


async def test_a_reply_with_long_texts_is_written_outside_the_event_loop(start_server: StartServer) -> None:
    """While the server writes a large reply, the event loop answers other calls.

    The reply repeats the texts, which do not count against `max_response_mib`.
    """
    server = await start_server(http_port=0, max_response_mib=1, max_http_request_mib=16)
    release = threading.Event()
    for _ in range(8):
        server.app._encode_pool.submit(release.wait)
    texts = ["x" * 200_000] * 60
    large = asyncio.create_task(embed(server, texts=texts, embedding_types=["ubinary"]))
    try:
        await until(lambda: bool(server.engine.batches))
        await embed(server, texts=TEXTS)
        assert not large.done()
    finally:
        release.set()
    assert (await large)["texts"] == texts
