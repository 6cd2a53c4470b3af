"""Cohere's routes: what its SDK sends and reads, and what is refused."""

import asyncio
import base64
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_heads
from fake_server import FakeServer, StartServer, start_fake_server
from http_calls import connect, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_heads import Serve
from waiting import until

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import TooManyInputs
from encserve_server.http.cohere import _GROWTH, _pieces
from encserve_server.http.counting import CountLimits, check_counts
from encserve_server.types.requests import DataType

TEXTS = ["hello brave new world", "new world", "hello"]
EVERY_TYPE = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
V1, V2 = "/v1/embed", "/v2/embed"


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    """One server with HTTP."""
    return await start_server(http_port=0)


async def embed(server: FakeServer, path: str = V2, **fields: Any) -> Any:
    """What is answered, which must be a reply."""
    response = await post(server, path, {"model": "tiny", "input_type": "search_document"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def by_grpc(
    server: FakeServer, *texts: str, data_type: pb.DataType = pb.DATA_TYPE_FLOAT32, dimensions: int = 0
) -> Any:
    """(texts, bytes or numbers) the vectors over gRPC."""
    outputs = [pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING, l2_normalize=True, dimensions=dimensions)]
    (tensor,) = (await server.encode(*texts, options=pb.EncodeOptions(outputs=outputs, data_type=data_type))).outputs
    dtype = {pb.DATA_TYPE_INT8: "i1", pb.DATA_TYPE_BINARY: "u1"}.get(data_type, "<f4")
    return np.frombuffer(tensor.data, dtype).reshape(len(texts), -1)


@pytest.mark.parametrize("dimensions", [None, 3])
async def test_every_type_is_that_of_grpc_to_the_bit(server: FakeServer, dimensions: int | None) -> None:
    told = await embed(server, texts=TEXTS, embedding_types=EVERY_TYPE, output_dimension=dimensions)
    got, cut = told["embeddings"], dimensions or 0
    floats = await by_grpc(server, *TEXTS, dimensions=cut)
    int8 = await by_grpc(server, *TEXTS, data_type=pb.DATA_TYPE_INT8, dimensions=cut)
    bits = await by_grpc(server, *TEXTS, data_type=pb.DATA_TYPE_BINARY, dimensions=cut)
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


async def test_the_reply_is_as_the_sdk_reads_it(server: FakeServer) -> None:
    told = await embed(server, texts=TEXTS)
    tokens = {"input_tokens": 6 + 4 + 3}
    assert len(told.pop("id")) == 36
    assert list(told.pop("embeddings")) == ["float"]
    assert told == {
        "texts": TEXTS,
        "meta": {"api_version": {"version": "2"}, "billed_units": tokens, "tokens": tokens},
        "response_type": "embeddings_by_type",
    }


async def test_numbers_and_tokens_are_those_of_openais_route(server: FakeServer) -> None:
    told = await embed(server, texts=TEXTS)
    want = (await post(server, "/v1/embeddings", {"input": TEXTS, "encoding_format": "float"})).json()
    assert told["embeddings"]["float"] == [it["embedding"] for it in want["data"]]
    assert told["meta"]["billed_units"]["input_tokens"] == want["usage"]["prompt_tokens"]


async def test_the_first_generation_gets_a_list_unless_it_asks_for_types(server: FakeServer) -> None:
    told = await embed(server, V1, texts=TEXTS)
    np.testing.assert_array_equal(np.array(told["embeddings"], np.float32), await by_grpc(server, *TEXTS))
    assert (told["response_type"], told["meta"]["api_version"]) == ("embeddings_floats", {"version": "1"})
    told = await embed(server, V1, texts=TEXTS, embedding_types=["int8", "float", "int8"])
    assert (told["response_type"], list(told["embeddings"])) == ("embeddings_by_type", ["int8", "float"])


async def test_inputs_of_contents(server: FakeServer) -> None:
    """Several texts of one input are its lines."""
    inputs = [{"content": [{"type": "text", "text": word} for word in text.split()]} for text in TEXTS]
    told, want = await embed(server, inputs=inputs), await embed(server, texts=TEXTS)
    assert told["embeddings"] == want["embeddings"]
    assert told["texts"] == [text.replace(" ", "\n") for text in TEXTS]


async def test_input_types_are_the_tasks_of_models_that_know_them(serve: Serve) -> None:
    query = manifest_pb2.TaskSettings(prompt_name="q")
    server = await serve({}, {"http_port": 0}, prompts={"q": "w7 w7 "}, query=query)
    for name, tokens in (("search_query", 5), ("search_document", 3), ("classification", 3), ("clustering", 3)):
        assert (await embed(server, texts=["w5"], input_type=name))["meta"]["tokens"] == {"input_tokens": tokens}


async def test_input_types_change_nothing_for_other_models(server: FakeServer) -> None:
    want = await by_grpc(server, "hello")
    for name in ("search_query", "search_document", "classification", "clustering", None):
        got = (await embed(server, texts=["hello"], input_type=name))["embeddings"]["float"]
        np.testing.assert_array_equal(np.array(got, np.float32), want)


async def test_truncation(server: FakeServer) -> None:
    """At the end by default, to what the model takes or to `max_tokens`; NONE refuses."""
    long: dict[str, Any] = {"texts": ["hello " * 40, "new"]}
    for fields, tokens in (({}, 32), ({"truncate": "END"}, 32), ({"max_tokens": 5}, 5), ({"max_tokens": 99}, 32)):
        told = await embed(server, **long, **fields)
        assert told["meta"]["billed_units"]["input_tokens"] == tokens + 3
    response = await post(server, V2, long)
    assert response.headers["encserve-truncated-inputs"] == "1"
    limits: Any = (({}, "32 tokens (max_sequence_tokens of tiny)"), ({"max_tokens": 5}, "5 tokens (max_tokens)"))
    for fields, limit in limits:
        response = await post(server, V2, {**long, "truncate": "NONE", **fields})
        assert response.status_code == 400
        assert response.json()["message"].startswith(f"texts[0]: must be at most {limit}; was 42")


def item(*contents: Any) -> Any:
    return {"inputs": [{"content": [{"type": "text", "text": "hello"}]}, {"content": list(contents)}]}


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "texts: must be a list of strings; was null"),
    "no texts": ({"texts": []}, "texts: must hold at least 1 text; was empty"),
    "no inputs": ({"inputs": []}, "inputs: must hold at least 1 text; was empty"),
    "one text": ({"texts": "hello"}, "texts: must be a list of strings; was a string"),
    "ids": ({"texts": [[1, 2]]}, "texts[0]: must be a string; was a list"),
    "both": ({"texts": ["a"], "inputs": [1]}, "texts: must be left out where inputs is set; was 1 texts"),
    "images": ({"images": ["data:"]}, "images: must be left out: this server takes only texts"),
    "an item that is no object": ({"inputs": ["hello"]}, 'inputs[0].content: must be a list of {"type": "text", "'),
    "an item of nothing": (item(), 'inputs[1].content: must be a list of {"type": "text", "text": "…"}'),
    "an image": (item({"type": "image_url"}), "inputs[1].content[0].type: must be 'text', this server takes only te"),
    "a type that is none": (item({"type": 4}), "inputs[1].content[0].type: must be 'text', this server take"),
    "no text": (item({"type": "text"}), "inputs[1].content[0].text: must be a string"),
    "inputs that are no list": ({"inputs": 5}, "inputs: must be a list; was 5"),
    "another type": (
        {"texts": ["a"], "embedding_types": ["float", "int4"]},
        "embedding_types[1]: must be one of float, int8, uint8, binary, ubinary, base64; was 'int4'",
    ),
    "types that are no list": ({"embedding_types": "int8"}, "embedding_types: must be a list of strings; was a string"),
    "the start": ({"texts": ["a"], "truncate": "START"}, "truncate: must be END or NONE; was START, and this ser"),
    "another cut": ({"texts": ["a"], "truncate": "LEFT"}, "truncate: must be one of none, end, start; was 'left'"),
    "a cut by a boolean": ({"texts": ["a"], "truncate": True}, "truncate: must be a string; was a boolean"),
    "no tokens": ({"texts": ["a"], "max_tokens": 0}, "max_tokens: must be at least 1; was 0"),
    "no dimensions": ({"texts": ["a"], "output_dimension": 0}, "output_dimension: must be at least 1; was 0"),
    "too many dimensions": (
        {"texts": ["a"], "output_dimension": 9},
        "output_dimension: must be at most 4, the numbers of a row; was 9",
    ),
    "another input type": (
        {"texts": ["a"], "input_type": "rank"},
        "input_type: must be one of search_query, search_document, classification, clustering; was 'rank'",
    ),
    "an image's input type": ({"texts": ["a"], "input_type": "image"}, "input_type: must be one of search_q"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_wrong_is_named(server: FakeServer, name: str) -> None:
    body, problem = REFUSED[name]
    for path in (V1, V2):
        response = await post(server, path, body)
        assert response.status_code == 400
        assert set(response.json()) == {"id", "message"}
        assert response.json()["message"].startswith(problem), response.text


async def test_an_item_of_inputs_is_named_as_such(server: FakeServer) -> None:
    response = await post(server, V2, item({"type": "text", "text": "hello " * 99}) | {"truncate": "NONE"})
    assert response.json()["message"].startswith("inputs[1]: must be at most 32 tokens")


async def test_models_are_named(server: FakeServer) -> None:
    response = await post(server, V2, {"texts": ["a"], "model": "embed-v4.0"})
    assert response.status_code == 404
    assert response.json()["message"].startswith("model: no model 'embed-v4.0'")


async def test_a_model_of_another_kind_says_which_route_serves_it(serve: Serve) -> None:
    splade = {"sparse.onnx": tiny_heads.sparse_file("max")}
    unspecified = manifest_pb2.POOLING_UNSPECIFIED
    server = await serve(splade, {"http_port": 0}, sparse=tiny_heads.sparse(), pooling=unspecified)
    response = await post(server, V2, {"texts": ["w5"]})
    assert response.status_code == 400
    problem = "does not make one vector of an input. It makes sparse weights: POST /embed_sparse"
    assert response.json()["message"] == f"model: tiny {problem}"


async def test_json_that_is_none(server: FakeServer) -> None:
    response = await post(server, V2, b"{")
    assert (response.status_code, set(response.json())) == (400, {"id", "message"})


def large(count: int, field: str) -> bytes:
    item = {"content": [{"type": "text", "text": "hello " * 30}]}
    return json.dumps({"inputs": [item] * count} if field == "inputs" else {"texts": ["hello " * 30] * count}).encode()


@pytest.mark.parametrize("field", ["texts", "inputs"])
async def test_many_inputs(start_server: StartServer, field: str) -> None:
    """As many as other routes take, in parts, and one too many is refused."""
    server = await start_server(http_port=0, max_http_inputs=500)
    assert len(large(500, field)) > 64 * 1024
    response = await post(server, V2, large(500, field))
    assert response.status_code == 200, response.text
    assert len(response.json()["embeddings"]["float"]) == len(response.json()["texts"]) == 500
    response = await post(server, V2, large(501, field))
    assert (response.status_code, set(response.json())) == (400, {"id", "message"})
    assert "500" in response.json()["message"]


async def test_a_large_body_of_more_than_any_request_has_is_refused_unread() -> None:
    limits = CountLimits(10, 100, strings_each=16, objects_each=4)
    with pytest.raises(TooManyInputs, match="texts: must hold at most 10 sequences"):
        await check_counts(b'{"texts":[' + b'"",' * 1000 + b'""]}', "texts", limits)


texts = st.text(max_size=8) | st.sampled_from(["hello", "hello brave new world", "hello " * 40, "\x00", "🌍"])
scalars = st.none() | st.booleans() | st.sampled_from([-1, 0, 2**63, 2**70, 0.5, 1e300]) | texts
wild = st.recursive(
    scalars, lambda its: st.lists(its, max_size=3) | st.dictionaries(texts, its, max_size=3), max_leaves=5
)
contents = st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | wild
fields: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "tiny", "tiny@1", "embed-v4.0"]),
    "input_type": st.sampled_from(["search_query", "search_document", "clustering", "image", "rank"]),
    "embedding_types": st.lists(st.sampled_from([*EVERY_TYPE, "int4"]), max_size=4),
    "output_dimension": st.integers(-1, 5),
    "max_tokens": st.integers(-1, 40),
    "truncate": st.sampled_from(["NONE", "END", "START", "none"]),
    "images": st.just([]) | st.just(["data:image/png;base64,"]),
    "normalize": st.booleans(),
    "pooling": st.sampled_from(["mean", "CLS", "sum"]),
    "priority": st.integers(0, 9),
}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A body that may be right."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=40))
    body: Any = draw(wild)
    if draw(st.integers(0, 9)):
        of_contents = st.fixed_dictionaries({"content": st.lists(contents, max_size=3)})
        sent = st.lists(texts, max_size=4), st.lists(of_contents | wild, max_size=3)
        name = draw(st.sampled_from(["texts", "texts", "inputs"]))
        body = {name: draw(sent[name == "inputs"])}
        for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
            body[name] = draw(wild if draw(st.integers(0, 5)) == 0 else fields[name])
    data = json.dumps(body).encode()
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data


def test_any_body_gets_a_reply_or_the_callers_error(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        server = runner.run(start_fake_server(tmp_path, http_port=0))
        client = connect(server)

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.sampled_from([V1, V2]), bodies())
        def fuzz(path: str, body: bytes) -> None:
            response = runner.run(client.post(path, content=body))
            seen[response.status_code] += 1
            told = response.json()
            if response.status_code == 200:
                lists = told["embeddings"].values() if isinstance(told["embeddings"], dict) else [told["embeddings"]]
                assert {len(its) for its in lists} == {len(told["texts"])}
            else:
                assert response.status_code in (400, 404), told
                assert set(told) == {"id", "message"}

        fuzz()
        assert server.sample("encserve_in_flight_requests") == 0
        assert server.sample("encserve_queue_tokens", model="tiny", version="2") == 0
        runner.run(client.aclose())
        runner.run(server.channel.close())
        runner.run(server.app.stop())
    assert sum(seen.values()) >= 150
    assert seen[200] > 150 / 20, f"the fuzzer sent too little that is right: {seen}"
    assert {200, 400} <= set(seen), f"the fuzzer reached too little: {seen}"


@given(st.sets(st.sampled_from(EVERY_TYPE), min_size=1), st.integers(1, 40), st.integers(1, 8))
def test_the_reply_is_no_larger_than_is_held_for_it(names: set[str], width: int, count: int) -> None:
    """Of the longest numbers there are."""
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


async def test_long_texts_are_written_beside_the_event_loop(start_server: StartServer) -> None:
    """They are in the reply, however small its vectors are, and do not count against the largest reply."""
    server = await start_server(http_port=0, max_response_mib=1)
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
