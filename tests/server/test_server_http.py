"""The routes of the HTTP port: OpenAI's and text-embeddings-inference's, what they answer and what they refuse."""

import base64
import itertools
import json
from typing import Any

import httpx
import numpy as np
import pytest
from fake_server import FakeServer, StartServer
from http_calls import connect, get, post

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.http.replies import joined, rows_as_json

TEXTS = ["hello brave new world", "new world", "hello"]
IDS = [[4, 5, 6], [7]]
MODEL_POOLING = pb.OUTPUT_KIND_MODEL_POOLING
OPENAI, TEI = "/v1/embeddings", "/embed"


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    """One server with HTTP."""
    return await start_server(http_port=0)


def openai_vectors(response: httpx.Response) -> Any:
    """(inputs, width) float32, whichever encoding they have."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [it["index"] for it in data] == list(range(len(data)))
    vectors = [it["embedding"] for it in data]
    if isinstance(vectors[0], str):
        return np.stack([np.frombuffer(base64.b64decode(it), "<f4") for it in vectors])
    return np.array(vectors, np.float32)


async def by_grpc(
    server: FakeServer, *inputs: Any, kind: int = pb.OUTPUT_KIND_MODEL_POOLING, l2_normalize: bool = True
) -> Any:
    """The same over gRPC."""
    outputs = [pb.OutputSpec(kind=kind, l2_normalize=l2_normalize)]  # type: ignore[arg-type]
    options = pb.EncodeOptions(outputs=outputs, truncation=pb.TRUNCATION_END)
    (tensor,) = (await server.encode(*inputs, options=options)).outputs
    return np.frombuffer(tensor.data, "<f4").reshape(-1, tensor.width)


async def test_openai_vectors_are_those_of_grpc_to_the_bit(server: FakeServer) -> None:
    sent: list[Any] = [TEXTS, IDS, TEXTS[0], IDS[0]]
    for inputs, encoding in itertools.product(sent, ["float", "base64", None]):
        response = await post(server, OPENAI, {"input": inputs, "encoding_format": encoding, "user": "me"})
        many = inputs if inputs in (TEXTS, IDS) else [inputs]
        np.testing.assert_array_equal(openai_vectors(response), await by_grpc(server, *many))
        told = response.json()
        tokens = sum(len(it) if isinstance(it, list) else len(it.split()) + 2 for it in many)
        assert told["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert (told["object"], told["model"]) == ("list", "tiny")


@pytest.mark.parametrize("path", ["/embed", "/"])
async def test_tei_vectors_are_those_of_grpc_to_the_bit(server: FakeServer, path: str) -> None:
    got = np.array((await post(server, path, {"inputs": [*TEXTS, *IDS]})).json(), np.float32)
    np.testing.assert_array_equal(got, await by_grpc(server, *TEXTS, *IDS))


async def test_embed_all_gives_every_tokens_row(server: FakeServer) -> None:
    got = (await post(server, "/embed_all", {"inputs": TEXTS})).json()
    assert [len(rows) for rows in got] == [len(text.split()) + 2 for text in TEXTS]
    want = await by_grpc(server, *TEXTS, kind=pb.OUTPUT_KIND_TOKENS, l2_normalize=False)
    np.testing.assert_array_equal(np.concatenate([np.array(rows, np.float32) for rows in got]), want)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5000, 7), (2, 40_000)])
def test_numbers_keep_every_bit_however_many_there_are(shape: tuple[int, int]) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    rows = bits.view(np.float32)
    rows[~np.isfinite(rows)] = -1.1754944e-38
    data = joined(rows_as_json(rows))
    got = np.array(json.loads(data), np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), rows.view(np.uint32))


async def test_versions_and_models(server: FakeServer) -> None:
    """The default version has the model's name, the others NAME@VERSION."""
    told = (await get(server, "/v1/models")).json()
    assert [it["id"] for it in told["data"]] == ["tiny", "tiny@1"]
    assert {it["object"] for it in told["data"]} == {"model"}
    for path, inputs in ((OPENAI, "input"), (TEI, "inputs")):
        assert (await post(server, path, {inputs: "hello", "model": "tiny@1"})).status_code == 200
        response = await post(server, path, {inputs: "hello", "model": "tiny@9"})
        assert response.status_code == 404
        assert "model: no version '9' of tiny; there are 2, 1" in response.text


async def test_info(server: FakeServer) -> None:
    told = (await get(server, "/info")).json()
    assert (told["model_id"], told["model_type"]) == ("tiny", {"embedding": {"pooling": "mean"}})
    assert (told["max_input_length"], told["max_client_batch_size"], told["auto_truncate"]) == (32, 256, True)


async def test_tokenize_counts_in_bytes(server: FakeServer) -> None:
    (told,) = (await post(server, "/tokenize", {"inputs": "hëllo world"})).json()
    assert [it["text"] for it in told] == ["[CLS]", "hëllo", "world", "[SEP]"]
    assert [(it["start"], it["stop"]) for it in told] == [(None, None), (0, 6), (7, 12), (None, None)]
    assert [it["special"] for it in told] == [True, False, False, True]
    bare = (await post(server, "/tokenize", {"inputs": ["hello", "new"], "add_special_tokens": False})).json()
    assert [[token["id"] for token in tokens] for tokens in bare] == [[4], [6]]


async def test_each_protocol_treats_long_texts_as_its_users_expect(server: FakeServer) -> None:
    text = "hello " * 100
    refused = await post(server, OPENAI, {"input": ["hello", text]})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "must be at most 32 tokens" in error["message"]
    assert (await post(server, OPENAI, {"input": text, "truncate": True})).status_code == 200
    cut = np.array((await post(server, TEI, {"inputs": text})).json(), np.float32)
    np.testing.assert_array_equal(cut, await by_grpc(server, text))
    refused = await post(server, TEI, {"inputs": text, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


async def test_a_model_without_pooling_wants_one_named(start_server: StartServer) -> None:
    server = await start_server(http_port=0, with_tokenizer=False)
    for path, inputs, code in ((OPENAI, "input", 400), (TEI, "inputs", 422)):
        refused = await post(server, path, {inputs: [[1, 2]]})
        assert refused.status_code == code
        assert "name a way in the field pooling: mean, cls" in refused.text
        assert (await post(server, path, {inputs: [[1, 2]], "pooling": "mean"})).status_code == 200
    assert (await post(server, "/embed_all", {"inputs": [[1, 2]]})).status_code == 200
    assert (await get(server, "/info")).json()["model_type"] == {"embedding": {"pooling": "none"}}


async def test_options(start_server: StartServer) -> None:
    server = await start_server(http_port=0, prompts={"query": "hello ", "passage": ""})
    plain = openai_vectors(await post(server, OPENAI, {"input": "new", "prompt_name": "passage"}))
    prompted = openai_vectors(await post(server, OPENAI, {"input": "new", "prompt_name": "query", "normalize": False}))
    np.testing.assert_array_equal(plain, await by_grpc(server, [1, 6, 2]))
    np.testing.assert_array_equal(prompted, await by_grpc(server, [1, 4, 6, 2], l2_normalize=False))
    summed = {"input": [[4, 5]], "pooling": "max", "normalize": False, "dimensions": 2}
    want = await by_grpc(server, [4, 5], kind=pb.OUTPUT_KIND_MAX, l2_normalize=False)
    np.testing.assert_array_equal(openai_vectors(await post(server, OPENAI, summed)), want[:, :2])
    short = openai_vectors(await post(server, OPENAI, {"input": "new", "pooling": "mean", "dimensions": 2}))
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-6)


BAD: list[tuple[Any, str, str]] = [
    (b"", "", "the body is no JSON"),
    (b"{", "", "the body is no JSON"),
    (b"\xff\xfe", "", "the body is no JSON"),
    (b'{"INPUTS": "\\ud800"}', "", "the body is no JSON"),
    (b"[1, 2]", "", "the body must be a JSON object; was a list"),
    ({}, "INPUTS", "must be a string, a list of token ids, or a list of these; was null"),
    ({"INPUTS": 3.5}, "INPUTS", "was 3.5"),
    ({"INPUTS": []}, "INPUTS", "must hold at least 1 text; was empty"),
    ({"INPUTS": ["hello", 3]}, "INPUTS[1]", "must be a string or a list of token ids; was 3"),
    ({"INPUTS": ["hello", None]}, "INPUTS[1]", "was null"),
    ({"INPUTS": [[1, 2.5]]}, "INPUTS[0][1]", "must be a token id; was 2.5"),
    ({"INPUTS": [1, True]}, "INPUTS[0][1]", "must be a token id; was a boolean"),
    ({"INPUTS": [[]]}, "INPUTS[0]", "must hold at least 1 id; was empty"),
    (b'{"INPUTS": [18446744073709551615]}', "INPUTS[0][0]", "must be a token id; was 18446744073709551615"),
    ({"INPUTS": [[1, -3]]}, "INPUTS[0][1]", "must be from 0 to 999 (the vocabulary of tiny); was -3"),
    ({"INPUTS": [[1, 1000]]}, "INPUTS[0][1]", "check_embedding_ctx_length=False"),
    ({"INPUTS": "hello", "model": 3}, "model", "must be a string; was 3"),
    ({"INPUTS": "hello", "dimensions": 0}, "dimensions", "must be at least 1; was 0"),
    ({"INPUTS": "hello", "dimensions": 5}, "dimensions", "must be at most 4, the numbers of a row; was 5"),
    ({"INPUTS": "hello", "dimensions": "2"}, "dimensions", "was a string"),
    ({"INPUTS": "hello", "pooling": "sum"}, "pooling", "must be one of mean, cls"),
    ({"INPUTS": "hello", "normalize": 1}, "normalize", "must be true or false; was 1"),
    ({"INPUTS": "hello", "truncate": "yes"}, "truncate", "must be true or false; was a string"),
    ({"INPUTS": "hello", "task": "rank"}, "task", "must be one of query, document; was 'rank'"),
    ({"INPUTS": "hello", "task": "query"}, "task", "model tiny does not know query"),
    ({"INPUTS": "hello", "prompt_name": "nobody"}, "prompt_name", "has no prompt 'nobody'"),
    ({"INPUTS": "x" * 300_000}, "INPUTS[0]", "must be at most 262144 bytes (max_text_bytes); was 300000"),
]


def spelled(body: Any, name: str) -> bytes:
    """A body for a protocol that calls inputs by this name."""
    data: bytes = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data.replace(b"INPUTS", name.encode())


async def test_what_is_wrong_is_named(server: FakeServer) -> None:
    """Each case on one server, since starting one takes longer."""
    for body, field, text in BAD:
        refused = await post(server, OPENAI, spelled(body, "input"))
        assert refused.status_code == 400, body
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == (field.replace("INPUTS", "input") or None)
        assert text.replace("INPUTS", "input") in error["message"]
        refused = await post(server, TEI, spelled(body, "inputs"))
        assert refused.status_code in (400, 422), body
        told = refused.json()
        assert set(told) == {"error", "error_type"}
        assert told["error"].startswith(field.replace("INPUTS", "inputs"))
        assert told["error_type"] == ("Empty" if body == {"INPUTS": []} else "Validation")


async def test_fields_that_nobody_knows(server: FakeServer) -> None:
    """OpenAI refuses them, text-embeddings-inference does not."""
    for name in ("dimension", "inputs", "texts"):
        refused = await post(server, OPENAI, {"input": "hello", name: 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert refused.json()["error"]["message"].startswith(f"{name}: is not known; there are dimensions, ")
    assert (await post(server, OPENAI, {"input": "hello", "encoding_format": "hex"})).status_code == 400
    assert (await post(server, TEI, {"inputs": "hello", "raw_scores": True})).status_code == 200
    left = await post(server, TEI, {"inputs": "hello", "truncation_direction": "Left"})
    assert (left.status_code, left.json()["error_type"]) == (422, "Validation")


async def test_too_many_inputs(server: FakeServer) -> None:
    assert (await post(server, OPENAI, {"input": ["hello"] * 257})).status_code == 400
    refused = await post(server, TEI, {"inputs": ["hello"] * 257})
    assert refused.status_code == 413
    assert "must hold at most 256 sequences (max_request_sequences); was 257" in refused.text


async def test_tokenize_refuses_as_embed_does(server: FakeServer) -> None:
    for body, code in (({"inputs": []}, 400), ({"inputs": [[1]]}, 422), ({"inputs": ["a"] * 257}, 413), ({}, 422)):
        assert (await post(server, "/tokenize", body)).status_code == code


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit(start_server: StartServer, declared: bool) -> None:
    server = await start_server(http_port=0, max_request_mib=1)

    async def parts() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    async with connect(server) as client:
        response = await client.post(OPENAI, content=b" " * 2_000_000 if declared else parts())
        assert response.status_code == 413
        assert "the body must be at most 1048576 bytes (max_request_mib)" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
        assert (await client.post(OPENAI, json={"input": "hello"})).status_code == 200


async def test_paths_and_methods_that_are_not_there(server: FakeServer) -> None:
    for path in ("/metrics", "/v2", "/embed/", "/embed_sparse"):
        response = await get(server, path)
        assert (response.status_code, response.json()["error_type"]) == (404, "Validation")
    response = await get(server, "/v1/engines")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "no_such_path")
    response = await get(server, OPENAI)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
