"""Tests of the embedding routes of OpenAI and text-embeddings-inference.

They check replies, refusals, model names and CORS origins.
"""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from fake_server import D_MODEL, FakeServer, StartServer
from http_calls import connect, get, post
from http_calls import vectors_over_grpc as over_grpc

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.protocols.http_json.replies import joined, rows_as_json

SHARED_SETTINGS = {"http_port": 0}
TEXTS = ["hello brave new world", "new world", "hello"]
IDS = [[1, 4, 5, 6, 2], [1, 7, 2]]  # token ids with the special tokens [CLS] (1) and [SEP] (2)
LONG = "hello " * 100
OPENAI, TEI = "/v1/embeddings", "/embed"


def openai_vectors(response: httpx.Response) -> Any:
    """Return the vectors of a reply as float32 (inputs, width). The reply has numbers or base64."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [it["index"] for it in data] == list(range(len(data)))
    vectors = [it.get("embedding", it.get("data")) for it in data]
    if isinstance(vectors[0], str):
        return np.stack([np.frombuffer(base64.b64decode(it), "<f4") for it in vectors])
    return np.array(vectors, np.float32)


def error_of(response: httpx.Response) -> tuple[int, str | None]:
    """Return the status of an error reply, and the field in the OpenAI error."""
    return response.status_code, response.json()["error"]["param"]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
@pytest.mark.parametrize("inputs", [TEXTS, IDS, TEXTS[0], IDS[0]])
async def test_openai_vectors_have_the_bits_of_grpc(shared: FakeServer, inputs: Any, encoding: Any) -> None:
    response = await post(shared, OPENAI, {"input": inputs, "encoding_format": encoding, "user": "me"})
    many = inputs if inputs in (TEXTS, IDS) else [inputs]
    np.testing.assert_array_equal(openai_vectors(response), await over_grpc(shared, *many))
    body = response.json()
    tokens = sum(len(it) if isinstance(it, list) else len(it.split()) + 2 for it in many)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "tiny")


async def test_tei_vectors_have_the_bits_of_grpc(shared: FakeServer) -> None:
    for path in (TEI, "/"):
        got = np.array((await post(shared, path, {"inputs": [*TEXTS, *IDS]})).json(), np.float32)
        np.testing.assert_array_equal(got, await over_grpc(shared, *TEXTS, *IDS))
    rows = (await post(shared, "/embed_all", {"inputs": TEXTS})).json()
    assert [len(it) for it in rows] == [len(text.split()) + 2 for text in TEXTS]
    want = await over_grpc(shared, *TEXTS, kind=pb.OUTPUT_KIND_TOKENS, l2_normalize=False)
    np.testing.assert_array_equal(np.concatenate([np.array(it, np.float32) for it in rows]), want)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5000, 7), (2, 40_000)])
def test_numbers_in_json_keep_every_bit(shape: tuple[int, int]) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    rows = bits.view(np.float32)
    rows[~np.isfinite(rows)] = -1.1754944e-38
    got = np.array(json.loads(joined(rows_as_json(rows))), np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), rows.view(np.uint32))


async def test_tokenize_counts_in_bytes(shared: FakeServer) -> None:
    (tokens,) = (await post(shared, "/tokenize", {"inputs": "hëllo world"})).json()
    assert [it["text"] for it in tokens] == ["[CLS]", "hëllo", "world", "[SEP]"]
    assert [(it["start"], it["stop"]) for it in tokens] == [(None, None), (0, 6), (7, 12), (None, None)]
    assert [it["special"] for it in tokens] == [True, False, False, True]
    bare = (await post(shared, "/tokenize", {"inputs": ["hello", "new"], "add_special_tokens": False})).json()
    assert [[token["id"] for token in it] for it in bare] == [[4], [6]]
    for body, code in (({"inputs": []}, 400), ({"inputs": [[1]]}, 422), ({"inputs": ["a"] * 2049}, 413), ({}, 422)):
        assert (await post(shared, "/tokenize", body)).status_code == code


async def test_long_texts_are_truncated_unless_the_request_forbids_truncation(shared: FakeServer) -> None:
    cut = await post(shared, OPENAI, {"input": [LONG, "hello", LONG]})
    np.testing.assert_array_equal(openai_vectors(cut), await over_grpc(shared, LONG, "hello", LONG))
    assert cut.headers["encserve-truncated-inputs"] == "2"
    assert cut.json()["usage"]["total_tokens"] == 32 + 3 + 32
    assert "encserve-truncated-inputs" not in (await post(shared, OPENAI, {"input": "hello"})).headers
    refused = await post(shared, OPENAI, {"input": ["hello", LONG], "truncate": False})
    assert error_of(refused) == (400, "input[1]")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    response = await post(shared, TEI, {"inputs": LONG})
    assert response.headers["encserve-truncated-inputs"] == "1"
    np.testing.assert_array_equal(np.array(response.json(), np.float32), await over_grpc(shared, LONG))
    refused = await post(shared, TEI, {"inputs": LONG, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


async def test_truncated_ids_keep_their_last_special_token(shared: FakeServer) -> None:
    """Truncated ids keep their last special token, as truncated texts do.

    If `add_special_tokens` is false, truncated ids lose this token.
    """
    text, ids, raw = "hello " * 40, [1, *[4] * 40, 2], {"pooling": "mean", "normalize": False}
    for more in ({}, {"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": 1}):
        want = openai_vectors(await post(shared, OPENAI, {"input": text, **raw, **more}))
        cut = await post(shared, OPENAI, {"input": ids, **raw, **more})
        np.testing.assert_array_equal(openai_vectors(cut), want)
        assert cut.headers["encserve-truncated-inputs"] == "1"
    want = await over_grpc(shared, [1, *[4] * 31], kind=pb.OUTPUT_KIND_MEAN, l2_normalize=False)
    unchanged = await post(shared, OPENAI, {"input": ids, "add_special_tokens": False, **raw})
    np.testing.assert_array_equal(openai_vectors(unchanged), want)
    of_tei = (await post(shared, TEI, {"inputs": ids, **raw})).json()
    np.testing.assert_array_equal(np.array(of_tei, np.float32), want)


async def test_a_server_that_does_not_truncate_by_default(start_server: StartServer) -> None:
    server = await start_server(http_port=0, http_truncate=False)
    assert (await post(server, OPENAI, {"input": LONG})).status_code == 400
    for more in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        assert (await post(server, OPENAI, {"input": LONG, **more})).headers["encserve-truncated-inputs"] == "1"


async def test_texts_are_truncated_to_the_tokens_of_the_request(shared: FakeServer) -> None:
    for tokens in (1, 5, 32, -1):
        response = await post(shared, OPENAI, {"input": [LONG, "hello"], "truncate_prompt_tokens": tokens})
        many = tokens % 33  # -1 means 32, the maximum length of the model
        want = {1: [2]}.get(many, [1, *[4] * (many - 2), 2])
        np.testing.assert_array_equal(openai_vectors(response)[:1], await over_grpc(shared, want))
        assert response.headers["encserve-truncated-inputs"] == ("2" if many < 3 else "1")
    for fields in ({}, {"truncate": False}):
        for bad in (5,) if fields else (0, -2, 33):
            refused = await post(shared, OPENAI, {"input": LONG, "truncate_prompt_tokens": bad, **fields})
            assert error_of(refused) == (400, "truncate_prompt_tokens")


async def test_a_model_without_a_tokenizer_or_pooling(start_server: StartServer) -> None:
    server = await start_server(http_port=0, with_tokenizer=False)
    for path, inputs, code in ((OPENAI, "input", 400), (TEI, "inputs", 422)):
        refused = await post(server, path, {inputs: [[1, 2]]})
        assert refused.status_code == code
        assert "pooling" in refused.text
        assert (await post(server, path, {inputs: [[1, 2]], "pooling": "mean"})).status_code == 200
    for path, body, shape in (
        ("/pooling", {"input": [[1, 2]]}, [2, D_MODEL]),
        ("/pooling", {"input": [[1, 2]], "pooling": "mean"}, [D_MODEL]),
    ):
        assert (await post(server, path, body)).json()["data"][0]["shape"] == shape
    assert (await post(server, "/embed_all", {"inputs": [[1, 2]]})).status_code == 200
    assert "POST /embed_all" in (await post(server, "/embed_sparse", {"inputs": [[1, 2]]})).json()["error"]
    assert (await get(server, "/info")).json()["model_type"] == {"embedding": {"pooling": "none"}}


async def test_prompts_pooling_and_dimensions(start_server: StartServer) -> None:
    server = await start_server(http_port=0, prompts={"query": "hello ", "passage": ""})
    plain = openai_vectors(await post(server, OPENAI, {"input": "new", "prompt_name": "passage"}))
    prompted = openai_vectors(await post(server, OPENAI, {"input": "new", "prompt_name": "query", "normalize": False}))
    np.testing.assert_array_equal(plain, await over_grpc(server, [1, 6, 2]))
    np.testing.assert_array_equal(prompted, await over_grpc(server, [1, 4, 6, 2], l2_normalize=False))
    largest = {"input": [[4, 5]], "pooling": "max", "normalize": False, "dimensions": 2, "add_special_tokens": False}
    want = await over_grpc(server, [4, 5], kind=pb.OUTPUT_KIND_MAX, l2_normalize=False)
    np.testing.assert_array_equal(openai_vectors(await post(server, OPENAI, largest)), want[:, :2])
    short = openai_vectors(await post(server, OPENAI, {"input": "new", "pooling": "mean", "dimensions": 2}))
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-6)


ONE = {"input": [[1, 7, 8, 2]], "add_special_tokens": False, "pooling": "mean"}


@pytest.mark.parametrize("path", [OPENAI, "/pooling"])
async def test_fields_of_vllm_are_applied_or_refused(shared: FakeServer, path: str) -> None:
    formats = [("embed_dtype", "float16"), ("endianness", "big"), ("modality", "image"), ("encoding_format", "bytes")]
    for field, value in formats:
        refused = await post(shared, path, {**ONE, "encoding_format": "base64", field: value})
        assert error_of(refused) == (400, field)
        assert repr(value) in refused.json()["error"]["message"]

    async def vector(**fields: Any) -> Any:
        return openai_vectors(await post(shared, path, ONE | fields))

    same = {"embed_dtype": "float32", "endianness": "little", "modality": "text"}
    np.testing.assert_array_equal(await vector(use_activation=False, **same), await vector(normalize=False))
    np.testing.assert_array_equal(await vector(use_activation=True), await vector(normalize=True))
    refused = await post(shared, path, {**ONE, "use_activation": True, "normalize": False})
    assert error_of(refused) == (400, "use_activation")


BAD: list[tuple[Any, str, str]] = [  # a body, the field that the error names, and a part of the error text
    (b"", "", "not valid JSON"),
    (b"{", "", "not valid JSON"),
    (b"\xff\xfe", "", "byte order mark"),
    (b'\xef\xbb\xbf{"INPUTS": "hello"}', "", "must be UTF-8 without a byte order mark"),
    ('{"INPUTS": "hello"}'.encode("utf-16"), "", "must be UTF-8 without a byte order mark"),
    (b'{"INPUTS": "caf\xe9"}', "INPUTS", "must be UTF-8; was byte 0xe9 at position 4 of the field"),
    (b'{"INPUTS": "hello", "caf\xe9": 1}', "", "must be UTF-8; was byte 0xe9 at position 2"),
    (b'{"INPUTS": "\\ud800"}', "INPUTS", "half of a surrogate pair"),
    (b'{"INPUTS": ["\\ud83d\\ude00", "a\\ude00"]}', "INPUTS[1]", "half of a surrogate pair"),
    (b'{"INPUTS": [%s"\\uDC00"]}' % (b'"word", ' * 1999), "INPUTS[1999]", "half of a surrogate pair"),
    (b'{"INPUTS": [%s"\\uDC00"]}' % (b'"%s", ' % (b"word " * 20) * 1999), "INPUTS[1999]", "half of a surrogate pair"),
    (b'{"INPUTS": ["\\ud83d\\ude00", ', "", "not valid JSON"),
    (b'{"INPUTS": ["\\ud83d\\ude00", "%s' % (b"x" * 2_000_000), "", "not valid JSON"),
    (b"[1, 2]", "", "a list"),
    ({}, "INPUTS", "null"),
    ({"INPUTS": 3.5}, "INPUTS", "3.5"),
    ({"INPUTS": []}, "INPUTS", "empty"),
    ({"INPUTS": ["hello", 3]}, "INPUTS[1]", "3"),
    ({"INPUTS": ["hello", None]}, "INPUTS[1]", "null"),
    ({"INPUTS": [[1, 2.5]]}, "INPUTS[0][1]", "2.5"),
    ({"INPUTS": [1, True]}, "INPUTS[0][1]", "a boolean"),
    ({"INPUTS": [[]]}, "INPUTS[0]", "empty"),
    ({"INPUTS": [2**64 - 1]}, "INPUTS[0][0]", "18446744073709551615"),
    ({"INPUTS": [[1, -3]]}, "INPUTS[0][1]", "-3"),
    ({"INPUTS": [[1, 1000]]}, "INPUTS[0][1]", "check_embedding_ctx_length=False"),
    ({"INPUTS": "hello", "model": 3}, "model", "3"),
    ({"INPUTS": "hello", "dimensions": 0}, "dimensions", "at least 1"),
    ({"INPUTS": "hello", "dimensions": 5}, "dimensions", "at most 4"),
    ({"INPUTS": "hello", "dimensions": "2"}, "dimensions", "a string"),
    ({"INPUTS": "hello", "pooling": "sum"}, "pooling", "mean, cls"),
    ({"INPUTS": "hello", "normalize": 1}, "normalize", "true or false"),
    ({"INPUTS": "hello", "truncate": "yes"}, "truncate", "true or false"),
    ({"INPUTS": "hello", "task": "rank"}, "task", "'rank'"),
    ({"INPUTS": "hello", "task": "query"}, "task", "query"),
    ({"INPUTS": "hello", "task": "Query", "input_type": "passage"}, "input_type", "'passage'"),
    ({"INPUTS": "hello", "prompt_name": "other"}, "prompt_name", "'other'"),
    ({"INPUTS": "x" * 300_000}, "INPUTS[0]", "300000"),
    ({"INPUTS": ["hello"] * 2049}, "INPUTS", "2048 sequences (max_request_sequences); was 2049"),
]


def spelled(body: Any, name: str) -> bytes:
    """Return the body as JSON bytes. The field INPUTS gets the name `name`."""
    data: bytes = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data.replace(b"INPUTS", name.encode())


@pytest.mark.parametrize(("body", "field", "problem"), BAD)
async def test_the_error_names_the_bad_field(shared: FakeServer, body: Any, field: str, problem: str) -> None:
    only_ids = isinstance(body, dict) and isinstance(body.get("INPUTS"), list) and "hello" not in body["INPUTS"]
    refused = await post(shared, OPENAI, spelled({**body, "add_special_tokens": False} if only_ids else body, "input"))
    assert error_of(refused) == (400, field.replace("INPUTS", "input") or None)
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert problem in refused.json()["error"]["message"]
    refused = await post(shared, TEI, spelled(body, "inputs"))
    assert refused.status_code in (400, 413, 422)
    assert set(refused.json()) == {"error", "error_type"}
    assert refused.json()["error"].startswith(field.replace("INPUTS", "inputs"))
    assert refused.json()["error_type"] == ("Empty" if body == {"INPUTS": []} else "Validation")


async def test_other_fields_are_checked_before_the_inputs(shared: FakeServer) -> None:
    """If an input and another field are wrong, the error names the other field.

    The server checks the inputs last, because checking many inputs is slow.
    """
    assert error_of(await post(shared, OPENAI, {"input": [[1, "a"]], "user": 5})) == (400, "user")


async def test_an_unknown_field_is_ignored_with_one_warning(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    def ignored() -> list[str]:
        return [getattr(it, "field", "") for it in caplog.records if "is ignored" in it.getMessage()]

    plain = openai_vectors(await post(server, OPENAI, {"input": "hello"}))
    long_name = "z" * 100_000
    for name in ("seed", "seed", "inputs", long_name, long_name + "z"):
        got = openai_vectors(await post(server, OPENAI, {"input": "hello", name: {"a": [1]}}))
        np.testing.assert_array_equal(got, plain)
    assert ignored() == ["seed", "inputs", "z" * 64]
    async with connect(server) as client:
        for i in range(70):
            assert (await client.post(TEI, json={"inputs": "hello", f"raw_{i}": True})).status_code == 200
    assert len(ignored()) == 3 + 64  # the three warnings above, and at most 64 warnings for this route


async def test_a_strict_server_refuses_unknown_fields(start_server: StartServer) -> None:
    server = await start_server(http_port=0, strict_http=True)
    for name in ("dimension", "inputs", "texts"):
        for more in ({}, {"zzz": "x" * 100_000}):
            refused = await post(server, OPENAI, {"input": "hello", name: 2, **more})
            assert error_of(refused) == (400, name)
            assert "add_special_tokens" in refused.json()["error"]["message"]
    assert (await post(server, TEI, {"inputs": "hello", "raw_scores": True})).status_code == 422
    names = ("model", "user", "dimensions", "task", "truncate", "truncate_prompt_tokens", "add_special_tokens", "foo")
    # The server ignores a field whose value is null.
    assert (await post(server, OPENAI, {"input": "hello", **dict.fromkeys(names)})).status_code == 200
    assert (await post(server, OPENAI, b'{"foo" : null , "input":"hello"}')).status_code == 200


async def test_input_type_changes_nothing_for_a_model_without_tasks(shared: FakeServer) -> None:
    plain = openai_vectors(await post(shared, OPENAI, {"input": "hello"}))
    for input_type in ("query", "search_document", "passage", "classification", ""):
        got = openai_vectors(await post(shared, OPENAI, {"input": "hello", "input_type": input_type}))
        np.testing.assert_array_equal(got, plain)
    for of_sdk in ("search_query", "classification", None):
        of_cohere = await post(shared, "/v2/embed", {"texts": ["hello"], "input_type": of_sdk})
        np.testing.assert_array_equal(np.array(of_cohere.json()["embeddings"]["float"], np.float32), plain)


async def test_ids_of_another_tokenizer_are_refused(shared: FakeServer) -> None:
    """OpenAI's route refuses ids without the special tokens of the model, unless `add_special_tokens` is false.

    By default, LangChain sends ids of OpenAI's tokenizer. For this model, these ids would give wrong vectors.
    """
    for ids in ([[4, 5]], [4, 5], ["hello", [1, 4]], [[4, 2]], [[2]]):
        refused = await post(shared, OPENAI, {"input": ids})
        assert error_of(refused) == (400, "input[1]" if ids[0] == "hello" else "input[0]")
        for part in ("[CLS] (1)", "[SEP] (2)", '"add_special_tokens": false', "ctx_length=False"):
            assert part in refused.json()["error"]["message"]
    complete = await post(shared, OPENAI, {"input": [[4, 5]], "add_special_tokens": False})
    np.testing.assert_array_equal(openai_vectors(complete), await over_grpc(shared, [4, 5]))
    np.testing.assert_array_equal(
        (await post(shared, TEI, {"inputs": [[4, 5]]})).json(), await over_grpc(shared, [4, 5])
    )
    refused = await post(shared, OPENAI, {"input": ["hello"], "add_special_tokens": False})
    assert error_of(refused) == (400, "add_special_tokens")


async def test_other_names_of_a_model(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    names = ("text-embedding-3-small=tiny", "org/old=tiny@1", "gone=other", "tiny=tiny@1")
    server = await start_server(http_port=0, served_model_name=names)
    warnings = [it.getMessage() for it in caplog.records if "--served-model-name" in it.getMessage()]
    assert len(warnings) == 2  # `gone` names a missing model; `tiny` is already a model's name
    models = (await get(server, "/v1/models")).json()["data"]
    assert {it["object"] for it in models} == {"model"}
    listed = {it["id"]: it["root"] for it in models}
    assert listed == {"tiny": "tiny", "text-embedding-3-small": "tiny", "tiny@1": "tiny", "org/old": "tiny"}
    for name in listed:
        response = await post(server, OPENAI, {"input": "hello", "model": name})
        assert (response.status_code, response.json()["model"]) == (200, name)
        assert (await post(server, TEI, {"inputs": "hello", "model": name})).status_code == 200
        for path in (name, name.replace("/", "%2F"), name.replace("@", "%40")):
            model = await get(server, f"/v1/models/{path}")
            assert (model.status_code, model.json()["id"]) == (200, name)
    for name in ("other", "gone", "org/old@9", "tiny@9"):
        refused = await post(server, OPENAI, {"input": "hello", "model": name})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), name
        assert (await post(server, TEI, {"inputs": "hello", "model": name})).status_code == 404
        assert (await get(server, f"/v1/models/{name}")).status_code == 404
    assert "tiny, text-embedding-3-small, org/old" in (await get(server, "/v1/models/other")).text
    # All model names, including unknown names, have the same route label.
    assert server.sample("encserve_http_requests_total", route="GET /v1/models/{id:path}", status="404") == 5


async def test_accept_any_model_accepts_every_name(start_server: StartServer) -> None:
    server = await start_server(http_port=0, accept_any_model_name=True)
    for name in ("gpt-4", "org/name@3"):
        assert (await post(server, OPENAI, {"input": "hello", "model": name})).json()["model"] == name
    assert (await post(server, OPENAI, {"input": "hello", "model": "tiny@9"})).status_code == 404


PAGE = {"origin": "https://page.example"}
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_no_other_origin_is_allowed_by_default(shared: FakeServer) -> None:
    async with connect(shared) as client:
        for response in (await client.post(TEI, json={"inputs": "hello"}, headers=PAGE), await client.options(TEI)):
            assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.status_code == 405


@pytest.mark.parametrize("allowed", ["*", "https://page.example"])
async def test_an_allowed_origin(start_server: StartServer, allowed: str) -> None:
    server = await start_server(http_port=0, cors_allow_origin=("http://localhost:3000", allowed))
    async with connect(server) as client:
        for path in (OPENAI, "/v1/models/a/b"):
            response = await client.options(path, headers=PREFLIGHT)
            assert (response.status_code, response.content) == (204, b"")
            assert response.headers["access-control-allow-origin"] == PAGE["origin"]
            assert response.headers["access-control-allow-methods"] == ("POST" if path == OPENAI else "GET")
            assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        for body, status in (({"input": "hello"}, 200), ({"input": 3.5}, 400)):
            response = await client.post(OPENAI, json=body, headers=PAGE)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == PAGE["origin"]
            assert response.headers["vary"] == "origin"
        other = await client.post(OPENAI, json={"input": "hello"}, headers={"origin": "https://evil.example"})
        assert (other.status_code, other.headers["vary"]) == (200, "origin")
        assert ("access-control-allow-origin" in other.headers) == (allowed == "*")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit(start_server: StartServer, declared: bool) -> None:
    server = await start_server(http_port=0, max_http_request_mib=1)

    async def parts() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    async with connect(server) as client:
        response = await client.post(OPENAI, content=b" " * 2_000_000 if declared else parts())
        assert response.status_code == 413
        assert "1048576 bytes (max_http_request_mib)" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
        assert (await client.post(OPENAI, json={"input": "hello"})).status_code == 200


async def test_unknown_paths_and_methods(shared: FakeServer) -> None:
    for path in ("/metrics", "/made-up", "/embed/", "/v1/engines", "/" + "x" * 2000):
        response = await get(shared, path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_such_path")
        message = response.json()["error"]["message"]
        assert path[:64] in message
        assert f"port {shared.app.metrics_port}" in message
        assert len(message) < 3000
    response = await get(shared, OPENAI)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "POST" in response.json()["error"]["message"]
    response = await post(shared, "/info", {})
    assert (response.status_code, response.headers["allow"]) == (405, "GET")
    assert set(response.json()) == {"error", "error_type"}
