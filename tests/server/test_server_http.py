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
IDS = [[1, 4, 5, 6, 2], [1, 7, 2]]  # with what the tokenizer puts around a text
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
    assert (told["max_input_length"], told["max_client_batch_size"], told["auto_truncate"]) == (32, 2048, True)


async def test_tokenize_counts_in_bytes(server: FakeServer) -> None:
    (told,) = (await post(server, "/tokenize", {"inputs": "hëllo world"})).json()
    assert [it["text"] for it in told] == ["[CLS]", "hëllo", "world", "[SEP]"]
    assert [(it["start"], it["stop"]) for it in told] == [(None, None), (0, 6), (7, 12), (None, None)]
    assert [it["special"] for it in told] == [True, False, False, True]
    bare = (await post(server, "/tokenize", {"inputs": ["hello", "new"], "add_special_tokens": False})).json()
    assert [[token["id"] for token in tokens] for tokens in bare] == [[4], [6]]


LONG = "hello " * 100


async def test_long_texts_are_cut_and_counted_unless_that_is_refused(server: FakeServer) -> None:
    cut = await post(server, OPENAI, {"input": [LONG, "hello", LONG]})
    np.testing.assert_array_equal(openai_vectors(cut), await by_grpc(server, LONG, "hello", LONG))
    assert cut.headers["encserve-truncated-inputs"] == "2"
    assert cut.json()["usage"]["total_tokens"] == 32 + 3 + 32
    assert "encserve-truncated-inputs" not in (await post(server, OPENAI, {"input": "hello"})).headers
    refused = await post(server, OPENAI, {"input": ["hello", LONG], "truncate": False})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "must be at most 32 tokens" in error["message"]
    response = await post(server, TEI, {"inputs": LONG})
    assert response.headers["encserve-truncated-inputs"] == "1"
    np.testing.assert_array_equal(np.array(response.json(), np.float32), await by_grpc(server, LONG))
    refused = await post(server, TEI, {"inputs": LONG, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


async def test_ids_that_are_cut_keep_their_closing_special_token(server: FakeServer) -> None:
    """As texts do; ids that need not be complete are cut as they are."""
    text, ids, raw = "hello " * 40, [1, *[4] * 40, 2], {"pooling": "mean", "normalize": False}
    for more in ({}, {"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": 1}):
        want = openai_vectors(await post(server, OPENAI, {"input": text, **raw, **more}))
        cut = await post(server, OPENAI, {"input": ids, **raw, **more})
        np.testing.assert_array_equal(openai_vectors(cut), want)
        assert cut.headers["encserve-truncated-inputs"] == "1"
    want = await by_grpc(server, [1, *[4] * 31], kind=pb.OUTPUT_KIND_MEAN, l2_normalize=False)
    as_they_are = await post(server, OPENAI, {"input": ids, "add_special_tokens": False, **raw})
    np.testing.assert_array_equal(openai_vectors(as_they_are), want)
    of_tei = (await post(server, TEI, {"inputs": ids, **raw})).json()
    np.testing.assert_array_equal(np.array(of_tei, np.float32), want)


async def test_a_server_may_refuse_long_texts_where_a_request_does_not_say(start_server: StartServer) -> None:
    server = await start_server(http_port=0, http_truncate=False)
    assert (await post(server, OPENAI, {"input": LONG})).status_code == 400
    for more in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        assert (await post(server, OPENAI, {"input": LONG, **more})).headers["encserve-truncated-inputs"] == "1"


async def test_texts_are_cut_to_as_many_tokens_as_asked_for(server: FakeServer) -> None:
    for tokens in (1, 5, 32, -1):
        response = await post(server, OPENAI, {"input": [LONG, "hello"], "truncate_prompt_tokens": tokens})
        many = tokens % 33  # -1 is for as many as the model takes
        want = {1: [2]}.get(many, [1, *[4] * (many - 2), 2])
        np.testing.assert_array_equal(openai_vectors(response)[:1], await by_grpc(server, want))
        assert response.headers["encserve-truncated-inputs"] == ("2" if many < 3 else "1")
    for bad, problem in ((0, "was 0"), (-2, "was -2"), (33, "must be from 1 to 32 (max_sequence_tokens of tiny)")):
        refused = await post(server, OPENAI, {"input": LONG, "truncate_prompt_tokens": bad})
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
        assert problem in refused.text
    both = await post(server, OPENAI, {"input": LONG, "truncate_prompt_tokens": 5, "truncate": False})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


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
    summed = {"input": [[4, 5]], "pooling": "max", "normalize": False, "dimensions": 2, "add_special_tokens": False}
    want = await by_grpc(server, [4, 5], kind=pb.OUTPUT_KIND_MAX, l2_normalize=False)
    np.testing.assert_array_equal(openai_vectors(await post(server, OPENAI, summed)), want[:, :2])
    short = openai_vectors(await post(server, OPENAI, {"input": "new", "pooling": "mean", "dimensions": 2}))
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-6)


BAD: list[tuple[Any, str, str]] = [
    (b"", "", "the body is not valid JSON"),
    (b"{", "", "the body is not valid JSON"),
    (b"\xff\xfe", "", "the body is not valid JSON"),
    (b'{"INPUTS": "\\ud800"}', "", "the body is not valid JSON"),
    (b"[1, 2]", "", "the body must be a JSON object; was a list"),
    ({}, "INPUTS", "must be a string, a list of token ids, or a list of these; was null"),
    ({"INPUTS": 3.5}, "INPUTS", "was 3.5"),
    ({"INPUTS": []}, "INPUTS", "must hold at least 1 text; was empty"),
    ({"INPUTS": ["hello", 3]}, "INPUTS[1]", "must be a string or a list of token ids; was 3"),
    ({"INPUTS": ["hello", None]}, "INPUTS[1]", "was null"),
    ({"INPUTS": [[1, 2.5]]}, "INPUTS[0][1]", "must be a token id; was 2.5"),
    ({"INPUTS": [1, True]}, "INPUTS[0][1]", "must be a token id; was a boolean"),
    ({"INPUTS": [[]]}, "INPUTS[0]", "must hold at least 1 id; was empty"),
    ({"INPUTS": [2**64 - 1]}, "INPUTS[0][0]", "must be a token id; was 18446744073709551615"),
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
    (
        {"INPUTS": "hello", "task": "Query", "input_type": "passage"},
        "input_type",
        "must not say otherwise than task, which is query; was 'passage'",
    ),
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
        # Texts are not complete without special tokens, and are refused with that.
        of_ids = isinstance(body, dict) and isinstance(body.get("INPUTS"), list) and "hello" not in body["INPUTS"]
        refused = await post(
            server, OPENAI, spelled({**body, "add_special_tokens": False} if of_ids else body, "input")
        )
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
    # Inputs may take long to look through, so that the other fields come first.
    refused = await post(server, OPENAI, {"input": [[1, "a"]], "user": 5})
    assert refused.json()["error"]["param"] == "user"


def ignored(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The fields that the log says were ignored."""
    return [getattr(it, "field", "") for it in caplog.records if "is ignored" in it.getMessage()]


async def test_fields_that_nobody_knows_are_ignored_with_one_warning(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    plain = openai_vectors(await post(server, OPENAI, {"input": "hello"}))
    long_name = "z" * 100_000
    for name in ("seed", "seed", "inputs", long_name, long_name + "z"):
        got = openai_vectors(await post(server, OPENAI, {"input": "hello", name: {"a": [1]}}))
        np.testing.assert_array_equal(got, plain)
    assert ignored(caplog) == ["seed", "inputs", "z" * 64]
    for i in range(200):
        assert (await post(server, TEI, {"inputs": "hello", f"raw_{i}": True})).status_code == 200
    assert len(ignored(caplog)) == 3 + 64  # of each route
    assert (await post(server, OPENAI, {"input": "hello", "encoding_format": "hex"})).status_code == 400


async def test_what_is_null_is_not_there(start_server: StartServer) -> None:
    server = await start_server(http_port=0, strict_http=True)
    names = ("model", "user", "dimensions", "task", "truncate", "truncate_prompt_tokens", "add_special_tokens", "foo")
    sent = {"input": "hello", **dict.fromkeys(names)}
    assert (await post(server, OPENAI, sent)).status_code == 200
    assert (await post(server, OPENAI, b'{"foo" : null , "input":"hello"}')).status_code == 200


async def test_a_strict_server_refuses_fields_that_nobody_knows(start_server: StartServer) -> None:
    server = await start_server(http_port=0, strict_http=True)
    for name in ("dimension", "inputs", "texts"):
        for more in ({}, {"zzz": "x" * 100_000}):
            refused = await post(server, OPENAI, {"input": "hello", name: 2, **more})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
            assert refused.json()["error"]["message"].startswith(
                f"{name}: is not known; there are add_special_tokens, "
            )
    assert (await post(server, TEI, {"inputs": "hello", "raw_scores": True})).status_code == 422


async def test_input_type_is_the_task_in_others_words(start_server: StartServer) -> None:
    """Of a model that has no tasks nothing changes, whatever clients send."""
    server = await start_server(http_port=0)
    plain = openai_vectors(await post(server, OPENAI, {"input": "hello"}))
    for input_type in ("query", "search_document", "passage", "classification", ""):
        got = openai_vectors(await post(server, OPENAI, {"input": "hello", "input_type": input_type}))
        np.testing.assert_array_equal(got, plain)


async def test_ids_of_another_tokenizer(server: FakeServer) -> None:
    """LangChain's default; those inside the vocabulary would give wrong vectors, and no error."""
    for ids in ([[4, 5]], [4, 5], ["hello", [1, 4]], [[4, 2]], [[2]]):
        refused = await post(server, OPENAI, {"input": ids})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == ("input[1]" if ids[0] == "hello" else "input[0]")
        for part in ("[CLS] (1) before", "[SEP] (2) behind", '"add_special_tokens": false', "ctx_length=False"):
            assert part in error["message"]
    complete = await post(server, OPENAI, {"input": [[4, 5]], "add_special_tokens": False})
    np.testing.assert_array_equal(openai_vectors(complete), await by_grpc(server, [4, 5]))
    np.testing.assert_array_equal((await post(server, TEI, {"inputs": [[4, 5]]})).json(), await by_grpc(server, [4, 5]))
    refused = await post(server, OPENAI, {"input": ["hello"], "add_special_tokens": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")


async def test_a_model_without_special_tokens_takes_any_ids(start_server: StartServer) -> None:
    server = await start_server(http_port=0, with_tokenizer=False)
    assert (await post(server, OPENAI, {"input": [[4, 5]], "pooling": "mean"})).status_code == 200


async def test_other_names_of_a_model(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    names = ("text-embedding-3-small=tiny", "org/old=tiny@1", "gone=nobody", "tiny=tiny@1")
    server = await start_server(http_port=0, served_model_name=names)
    warned = [it.getMessage() for it in caplog.records if "--served-model-name" in it.getMessage()]
    assert [it.partition("--")[0] for it in warned] == ["no model for ", ""]
    assert warned[1].endswith("is the name of another model, which is served under it")
    listed = {it["id"]: it["root"] for it in (await get(server, "/v1/models")).json()["data"]}
    assert listed == {"tiny": "tiny", "text-embedding-3-small": "tiny", "tiny@1": "tiny", "org/old": "tiny"}
    for name in listed:
        response = await post(server, OPENAI, {"input": "hello", "model": name})
        assert (response.status_code, response.json()["model"]) == (200, name)
        for path in (name, name.replace("/", "%2F"), name.replace("@", "%40")):
            told = await get(server, f"/v1/models/{path}")
            assert (told.status_code, told.json()["id"]) == (200, name)
    for name in ("nobody", "gone", "org/old@9", "tiny@9"):
        refused = await post(server, OPENAI, {"input": "hello", "model": name})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), name
        assert (await get(server, f"/v1/models/{name}")).status_code == 404
    assert "there are tiny, text-embedding-3-small, org/old" in (await get(server, "/v1/models/nobody")).text
    # However many names callers make up, there is one route.
    assert server.sample("encserve_http_requests_total", route="GET /v1/models/{id:path}", status="404") == 5


async def test_any_name_for_one_model(start_server: StartServer) -> None:
    server = await start_server(http_port=0, accept_any_model_name=True)
    for name in ("gpt-4", "org/name@3"):
        assert (await post(server, OPENAI, {"input": "hello", "model": name})).json()["model"] == name
    assert (await post(server, OPENAI, {"input": "hello", "model": "tiny@9"})).status_code == 404


PAGE = {"origin": "https://page.example"}
ASKING = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_pages_of_other_origins_are_shut_out_by_default(server: FakeServer) -> None:
    async with connect(server) as client:
        for response in (await client.post(TEI, json={"inputs": "hello"}, headers=PAGE), await client.options(TEI)):
            assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.status_code == 405


@pytest.mark.parametrize("allowed", ["*", "https://page.example"])
async def test_pages_of_an_allowed_origin(start_server: StartServer, allowed: str) -> None:
    server = await start_server(http_port=0, cors_allow_origin=("http://localhost:3000", allowed))
    async with connect(server) as client:
        for path in (OPENAI, "/v1/models/a/b"):
            asked = await client.options(path, headers=ASKING)
            assert (asked.status_code, asked.content) == (204, b"")
            assert asked.headers["access-control-allow-origin"] == PAGE["origin"]
            assert asked.headers["access-control-allow-methods"] == ("POST" if path == OPENAI else "GET")
            assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        for body, status in (({"input": "hello"}, 200), ({"input": 3.5}, 400)):
            response = await client.post(OPENAI, json=body, headers=PAGE)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == PAGE["origin"]
            assert response.headers["vary"] == "origin"
        other = await client.post(OPENAI, json={"input": "hello"}, headers={"origin": "https://evil.example"})
        assert (other.status_code, other.headers["vary"]) == (200, "origin")
        assert ("access-control-allow-origin" in other.headers) == (allowed == "*")


async def test_too_many_inputs(server: FakeServer) -> None:
    assert (await post(server, OPENAI, {"input": ["hello"] * 2049})).status_code == 400
    refused = await post(server, TEI, {"inputs": ["hello"] * 2049})
    assert refused.status_code == 413
    assert "must hold at most 2048 sequences (max_http_inputs); was 2049" in refused.text


async def test_tokenize_refuses_as_embed_does(server: FakeServer) -> None:
    for body, code in (({"inputs": []}, 400), ({"inputs": [[1]]}, 422), ({"inputs": ["a"] * 2049}, 413), ({}, 422)):
        assert (await post(server, "/tokenize", body)).status_code == code


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit(start_server: StartServer, declared: bool) -> None:
    server = await start_server(http_port=0, max_http_request_mib=1)

    async def parts() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    async with connect(server) as client:
        response = await client.post(OPENAI, content=b" " * 2_000_000 if declared else parts())
        assert response.status_code == 413
        assert "the body must be at most 1048576 bytes (max_http_request_mib)" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
        assert (await client.post(OPENAI, json={"input": "hello"})).status_code == 200


async def test_paths_and_methods_that_are_not_there(server: FakeServer) -> None:
    """The error says what there is, in the form of the route where there is one."""
    for path in ("/metrics", "/made-up", "/embed/", "/v1/engines", "/" + "x" * 2000):
        response = await get(server, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "no_such_path")
        assert error["message"].startswith(f"there is nothing at {path[:64]}; there are POST /v1/embeddings, ")
        assert error["message"].endswith(f"The metrics are at /metrics of port {server.app.metrics_port}")
    response = await get(server, OPENAI)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"] == "the method must be POST"
    response = await post(server, "/info", {})
    assert (response.status_code, response.headers["allow"]) == (405, "GET")
    assert set(response.json()) == {"error", "error_type"}
