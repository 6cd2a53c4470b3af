"""Tests of sparse weights and token vectors over HTTP.

The numbers equal the numbers over gRPC. If a route refuses a request, the error names the right route.
"""

import base64
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_heads
from fake_server import FakeServer, sets
from http_calls import get, post
from tiny_heads import BEGIN, END, Serve, multi_vector, sparse, text

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.v1 import encoder_pb2 as pb

TEXTS = [text(5, 6, 5, 20), text(8), text(6, 30, 31, 32)]
LATE = {"multi_vector.onnx": tiny_heads.multi_vector_file()}
SPLADE = {"sparse.onnx": tiny_heads.sparse_file("max")}
HTTP = SHARED_SETTINGS = {"http_port": 0}
NO_POOLING = {"pooling": manifest_pb2.POOLING_UNSPECIFIED}


async def by_grpc(server: FakeServer, *inputs: Any, kind: Any, task: Any = 0, **spec: Any) -> list[tuple[Any, Any]]:
    """Encode over gRPC. For each input, return (n, width) vectors or weights, and (n,) indices or None."""
    options = pb.EncodeOptions(outputs=[pb.OutputSpec(kind=kind, **spec)], task=task, truncation=pb.TRUNCATION_END)
    return sets((await server.encode(*inputs, options=options)).outputs[0])


def pooled(response: httpx.Response) -> list[Any]:
    """Return the float32 arrays of a /pooling reply, which has numbers or base64."""
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["id"][:5]) == ("list", "pool-")
    assert [(it["index"], it["object"]) for it in body["data"]] == [(i, "pooling") for i in range(len(body["data"]))]
    arrays = []
    for it in body["data"]:
        coded = isinstance(it["data"], str)
        array = np.frombuffer(base64.b64decode(it["data"]), "<f4") if coded else np.array(it["data"], np.float32)
        arrays.append(array.reshape(it["shape"]))
        assert coded or array.size == 0 or list(array.shape) == it["shape"]
    return arrays


def check_sparse(response: httpx.Response, want: list[tuple[Any, Any]]) -> None:
    """Check that a reply of /embed_sparse has exactly these weights and indices."""
    assert response.status_code == 200, response.text
    for got, (weights, indices) in zip(response.json(), want, strict=True):
        assert [it["index"] for it in got] == indices.tolist()
        np.testing.assert_array_equal(np.array([it["value"] for it in got], np.float32), weights[:, 0])


async def test_a_model_of_every_kind_has_a_route_for_each(serve: Serve) -> None:
    """A model with dense, sparse and multi-vector outputs, like BGE-M3, has a route for each kind of output."""
    server = await serve(settings=HTTP, **tiny_heads.every_kind())
    (model,) = (await get(server, "/v1/models")).json()["data"]
    assert model["outputs"] == {
        "embedding": ["/v1/embeddings", "/embed"],
        "sparse": ["/embed_sparse"],
        "multi_vector": ["/pooling"],
        "tokens": ["/embed_all"],
    }
    ids = [[BEGIN, 5, 6, END], [BEGIN, 9, END]]
    for inputs in (TEXTS, ids, TEXTS[0], ids[0]):
        many = [inputs] if inputs in (TEXTS[0], ids[0]) else list(inputs)
        weights = await by_grpc(server, *many, kind=pb.OUTPUT_KIND_SPARSE)
        assert any(len(rows) for rows, _ in weights)
        check_sparse(await post(server, "/embed_sparse", {"inputs": inputs}), weights)
        vectors = await by_grpc(server, *many, kind=pb.OUTPUT_KIND_MULTI_VECTOR)
        for encoding in ("float", "base64", None):
            body = {"input": inputs, "task": "token_embed", "encoding_format": encoding, "model": "tiny@1"}
            for got, (rows, _) in zip(pooled(await post(server, "/pooling", body)), vectors, strict=True):
                np.testing.assert_array_equal(got, rows)
        vectors = await by_grpc(server, *many, kind=pb.OUTPUT_KIND_MODEL_POOLING, l2_normalize=True)
        for task, encoding in (("embed", "float"), ("embed", "base64"), (None, None)):
            body = {"input": inputs, "task": task, "encoding_format": encoding}
            for got, (rows, _) in zip(pooled(await post(server, "/pooling", body)), vectors, strict=True):
                np.testing.assert_array_equal(got, rows[0])
    repeated = TEXTS * 100  # enough inputs for the server to split the request
    weights = await by_grpc(server, *TEXTS, kind=pb.OUTPUT_KIND_SPARSE)
    check_sparse(await post(server, "/embed_sparse", {"inputs": repeated}), weights * 100)
    vectors = await by_grpc(server, *TEXTS, kind=pb.OUTPUT_KIND_MULTI_VECTOR)
    got = pooled(await post(server, "/pooling", {"input": repeated, "task": "token_embed"}))
    for array, (rows, _) in zip(got, vectors * 100, strict=True):
        np.testing.assert_array_equal(array, rows)
    response = (await post(server, "/pooling", {"input": TEXTS, "model": "tiny@1"})).json()
    assert (response["model"], response["usage"]) == ("tiny@1", {"prompt_tokens": 15, "total_tokens": 15})


async def test_refusals_of_a_sparse_model_name_its_route(serve: Serve) -> None:
    server = await serve(SPLADE, HTTP, sparse=sparse(), **NO_POOLING)
    (model,) = (await get(server, "/v1/models")).json()["data"]
    assert list(model["outputs"]) == ["sparse", "tokens"]
    assert (await get(server, "/info")).json()["model_type"] == {"embedding": {"pooling": "splade"}}
    sentences = {"source_sentence": "w5", "sentences": ["w6"]}
    for path, body, status in (
        ("/v1/embeddings", {"input": "w5"}, 400),
        ("/pooling", {"input": "w5", "task": "embed"}, 400),
        ("/v2/embed", {"texts": ["w5"]}, 400),
        ("/embed", {"inputs": "w5"}, 422),
        ("/", {"inputs": "w5"}, 422),
        ("/similarity", {"inputs": sentences}, 422),
    ):
        refused = await post(server, path, body)
        assert refused.status_code == status, path
        assert "POST /embed_sparse" in refused.text
        assert "mean" not in refused.text
    for most in (None, 3):
        want = await by_grpc(server, *TEXTS, kind=pb.OUTPUT_KIND_SPARSE, max_active_dims=most)
        check_sparse(await post(server, "/embed_sparse", {"inputs": TEXTS, "max_active_dims": most}), want)
    mean = await post(server, "/embed", {"inputs": "w5", "pooling": "mean"})  # this request names a pooling
    assert mean.status_code == 200


async def test_refusals_of_a_late_interaction_model_name_its_route(serve: Serve) -> None:
    """A late-interaction model, like ColBERT, has token vectors only. All routes except /pooling refuse calls.

    The errors name /pooling. In this model, queries get a prompt, and short queries get extra tokens.
    """
    expansion = manifest_pb2.Expansion(min_tokens=8, token_id=3, attended=False)
    query = manifest_pb2.TaskSettings(prompt_name="q", max_tokens=8, expansion=expansion)
    document = manifest_pb2.TaskSettings(max_tokens=20, skipped_token_ids=[8, BEGIN, END])
    parts = {"prompts": {"q": "w7 "}, "query": query, "document": document, "multi_vector": multi_vector()}
    server = await serve(LATE, HTTP, **parts, **NO_POOLING)
    route = "POST /pooling with the task token_embed"
    for path, name, status in (("/v1/embeddings", "input", 400), ("/embed", "inputs", 422)):
        refused = await post(server, path, {name: "w5"})
        assert (refused.status_code, route in refused.text) == (status, True)
    refused = await post(server, "/embed_sparse", {"inputs": "w5"})
    assert route in refused.json()["error"]
    for name, task in (("query", pb.TASK_QUERY), ("search_document", pb.TASK_DOCUMENT), ("", pb.TASK_UNSPECIFIED)):
        want = await by_grpc(server, *TEXTS, kind=pb.OUTPUT_KIND_MULTI_VECTOR, task=task)
        for encoding in ("float", "base64"):
            got = pooled(
                await post(server, "/pooling", {"input": TEXTS, "input_type": name, "encoding_format": encoding})
            )
            for array, (rows, _) in zip(got, want, strict=True):
                np.testing.assert_array_equal(array, rows)
    assert got[1].shape == (0, tiny_heads.WIDTH)  # all tokens of the second text are skipped
    cut = await post(server, "/pooling", {"input": text(*range(10, 40)), "input_type": "query"})
    assert (cut.headers["encserve-truncated-inputs"], pooled(cut)[0].shape) == ("1", (8, tiny_heads.WIDTH))
    refused = await post(server, "/pooling", {"input": [BEGIN, 5, END], "input_type": "query"})
    assert refused.json()["error"]["param"] == "input_type"


async def test_a_dense_model_has_token_rows(shared: FakeServer) -> None:
    (model, _) = (await get(shared, "/v1/models")).json()["data"]
    assert model["outputs"] == {"embedding": ["/v1/embeddings", "/embed"], "tokens": ["/embed_all", "/pooling"]}
    texts = ["hello brave new world", "new"]
    body: dict[str, Any] = {"input": texts, "task": "token_embed"}
    for changes, spec in (
        ({}, {"l2_normalize": True}),
        ({"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}, {"l2_normalize": True}),
        ({"use_activation": False}, {"l2_normalize": False}),
        ({"normalize": False, "dimensions": 3}, {"l2_normalize": False, "dimensions": 3}),
    ):
        want = await by_grpc(shared, *texts, kind=pb.OUTPUT_KIND_TOKENS, **spec)
        for got, (rows, _) in zip(pooled(await post(shared, "/pooling", body | changes)), want, strict=True):
            np.testing.assert_array_equal(got, rows)
    refused = await post(shared, "/embed_sparse", {"inputs": texts})
    assert refused.status_code == 422
    assert "POST /v1/embeddings or POST /embed" in refused.json()["error"]


BAD = [  # a body, the field that the error names, and a part of the error text
    ({}, "input", "null"),
    ({"input": "hello", "task": "classify"}, "task", "'classify'"),
    ({"input": "hello", "dimensions": 0, "task": "token_embed"}, "dimensions", "at least 1"),
    ({"input": "hello", "dimensions": 5, "task": "token_embed"}, "dimensions", "at most 4"),
    ({"input": "hello", "pooling": "cls", "task": "token_embed"}, "pooling", "token_"),
    ({"input": [4, 5]}, "input[0]", '"add_special_tokens": false'),
    ({"input": ["hello", "hello " * 40], "truncation_side": "left"}, "input[1]", "at most 32 tokens"),
    ({"input": "hello " * 9, "truncation_side": "left", "truncate_prompt_tokens": 5}, "input[0]", "at most 5 tokens"),
    ({"input": "hello " * 40, "truncate": False}, "input[0]", "at most 32 tokens"),
]


@pytest.mark.parametrize(("body", "field", "problem"), BAD)
async def test_the_error_names_the_bad_field(shared: FakeServer, body: Any, field: str, problem: str) -> None:
    refused = await post(shared, "/pooling", body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert problem in error["message"]


async def test_inputs_that_need_no_truncation(shared: FakeServer) -> None:
    short = {"input": "hello", "truncation_side": "left", "truncate_prompt_tokens": 5}
    for body in (short, {"input": [4, 5], "add_special_tokens": False}):
        assert (await post(shared, "/pooling", body)).status_code == 200


async def test_replies_are_bounded(serve: Serve) -> None:
    """For sparse weights, the size of the reply is known only after the model has run."""
    width = 200_000
    files = {"sparse.onnx": tiny_heads.sparse_file("max", width)}
    server = await serve(files, HTTP | {"max_response_mib": 1}, sparse=sparse(width=width))
    refused = await post(server, "/embed_sparse", {"inputs": [[5], [6]]})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (413, "RESPONSE_TOO_LARGE")
    assert "max_active_dims" in refused.text
    one = await post(server, "/embed_sparse", {"inputs": [[5], [6]], "max_active_dims": 1000})
    assert [len(it) for it in one.json()] == [1000, 1000]
    refused = await post(
        server, "/pooling", {"input": [[5] * 64] * 600, "task": "token_embed", "add_special_tokens": False}
    )
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (400, "RESPONSE_TOO_LARGE")
