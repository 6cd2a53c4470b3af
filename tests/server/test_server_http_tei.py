"""Tests of routes of text-embeddings-inference: /similarity, /ping and /info. Also tests of truncation on the left."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from fake_server import D_MODEL, FakeServer, StartServer
from http_calls import connect, get, post
from tiny_bundle import write_bundle
from tiny_heads import SERVE_TINY, Serve, loader, words

from encserve import __version__

TEXTS = ["hello brave new world", "new world", "hello"]
LONG = "hello " * 40


SHARED_SETTINGS = {"http_port": 0, "max_request_sequences": 10}


def compared(source: Any, sentences: Any, **parameters: Any) -> dict[str, Any]:
    """Return the body of a request to /similarity."""
    return {"inputs": {"source_sentence": source, "sentences": sentences}, "parameters": parameters}


async def test_similarity_at_both_paths(serve: Serve) -> None:
    server = await serve({}, {"http_port": 0}, prompts={"before": "w7 w8 "})
    texts = ["w5 w6", "w9 w10 w11", "w5", "w6 w5"]
    rows = np.array((await post(server, "/embed", {"inputs": texts})).json(), np.float64)  # each row has length 1
    for path in ("/similarity", "/"):
        response = await post(server, path, compared(texts[0], texts[1:]))
        np.testing.assert_allclose(response.json(), rows[1:] @ rows[0], rtol=1e-6)
        no_parameters = compared(texts[0], texts[1:]) | {"parameters": None}
        assert (await post(server, path, no_parameters)).json() == response.json()
        prompted = (await post(server, path, compared("w5", ["w9"], prompt_name="before"))).json()
        written = (await post(server, path, compared("w7 w8 w5", ["w7 w8 w9"]))).json()
        assert prompted == written != (await post(server, path, compared("w5", ["w9"]))).json()
    fields = {"pooling": "max", "dimensions": 4, "normalize": True}
    first, *others = np.array((await post(server, "/embed", {"inputs": texts, **fields})).json(), np.float64)
    response = await post(server, "/similarity", compared(texts[0], texts[1:]) | fields)
    np.testing.assert_allclose(response.json(), others @ first, rtol=1e-6)


async def test_the_similarity_of_an_empty_text_is_0(start_server: StartServer, tmp_path: Path) -> None:
    """An empty text has the similarity 0 with every text, because the vector of an empty text has only zeros."""
    bundle = write_bundle(tmp_path / "bundles", tokenizer=words(special=False), text__takes_empty=True)
    server = await start_server(load=loader(bundle), http_port=0, **SERVE_TINY)
    assert (await post(server, "/similarity", compared("w5", ["", "w5"]))).json() == [0.0, 1.0]
    assert (await post(server, "/similarity", compared("", ["", "w5"]))).json() == [0.0, 0.0]


BAD: list[tuple[Any, int, str, str]] = [  # a body, the status, the field of the error, and a part of the error text
    ({}, 422, "inputs", "null"),
    ({"inputs": {}}, 422, "inputs.source_sentence", "null"),
    ({"inputs": {"source_sentence": 3, "sentences": ["a"]}}, 422, "inputs.source_sentence", "was 3"),
    (compared("a", "b"), 422, "inputs.sentences", "a string"),
    (compared("a", ["b", 3]), 422, "inputs.sentences[1]", "was 3"),
    (compared("a", ["b", [4, 5]]), 422, "inputs.sentences[1]", "a list"),
    (compared("a", []), 400, "inputs.sentences", "empty"),
    (compared("a", None), 400, "inputs.sentences", "empty"),
    (compared("a", ["b"]) | {"parameters": 3}, 422, "parameters", "was 3"),
    (compared("a", ["b"], truncate=3), 422, "parameters.truncate", "true or false"),
    (compared("a", ["b"], prompt_name="x"), 422, "prompt_name", "'x'"),
    (compared("a", ["b"], truncation_direction="up"), 422, "parameters.truncation_direction", "right, left"),
    (compared("a", ["b"] * 10), 413, "inputs", "at most 10 sequences (max_request_sequences); was 11"),
    (compared("a", ["x" * 300_000]), 422, "inputs.sentences[0]", "262144 bytes"),
    (compared("hello", ["hello", LONG], truncate=False), 422, "inputs.sentences[1]", "at most 32 tokens"),
    (compared(LONG, ["hello"], truncate=False), 422, "inputs.source_sentence", "at most 32 tokens"),
]


@pytest.mark.parametrize("path", ["/similarity", "/"])
@pytest.mark.parametrize(("body", "status", "field", "problem"), BAD)
async def test_a_bad_comparison_is_named(
    shared: FakeServer, path: str, body: Any, status: int, field: str, problem: str
) -> None:
    refused = await post(shared, path, body)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"].startswith(field)
    assert problem in refused.json()["error"]


async def test_comparisons_at_the_limits(shared: FakeServer) -> None:
    cut = await post(shared, "/similarity", compared("hello", [LONG, "hello"]))
    assert (cut.status_code, cut.headers["encserve-truncated-inputs"]) == (200, "1")
    assert (await post(shared, "/similarity", compared("a", ["b"] * 9))).status_code == 200
    for path, body in (("/similarity", {"inputs": "a"}), ("/", {"inputs": 3, "parameters": {}})):
        assert (await post(shared, path, body)).json()["error"].startswith("inputs: must be")


async def test_unknown_fields_of_an_inner_object(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = await start_server(http_port=0)
    body = compared("hello", ["world"], normalize=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await post(server, "/similarity", body)).status_code == 200
    (record,) = (it for it in caplog.records if it.message == "a field over HTTP is ignored")
    assert vars(record)["field"] == "parameters.normalize"
    assert (await post(server, "/similarity", compared("hello", ["world"], normalize=None))).status_code == 200
    strict = await start_server(http_port=0, strict_http=True)
    refused = await post(strict, "/similarity", body)
    assert (refused.status_code, refused.json()["error"].partition(":")[0]) == (422, "parameters.normalize")


async def test_huggingface_hub_at_the_root_path(shared: FakeServer) -> None:
    """The route `/` answers huggingface_hub. For a URL without a path, huggingface_hub sends all requests to `/`."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(f"http://127.0.0.1:{shared.app.http_port}")
    got = await asyncio.to_thread(client.sentence_similarity, TEXTS[0], TEXTS[1:])
    assert got == (await post(shared, "/similarity", compared(TEXTS[0], TEXTS[1:]))).json()
    vector = await asyncio.to_thread(client.feature_extraction, TEXTS[0])
    np.testing.assert_array_equal(vector, (await post(shared, "/embed", {"inputs": TEXTS[0]})).json())


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
async def test_truncation_on_the_left_is_refused(shared: FakeServer, path: str) -> None:
    left = {"truncation_direction": "Left"}
    want = await post(shared, path, {"inputs": TEXTS})
    assert (await post(shared, path, {"inputs": TEXTS} | left)).content == want.content
    for truncate in (True, False, None):
        refused = await post(shared, path, {"inputs": [*TEXTS, LONG], "truncate": truncate} | left)
        assert (refused.status_code, refused.headers["encserve-error-reason"]) == (422, "SEQUENCE_TOO_LONG")
        assert refused.json()["error"].startswith("inputs[3]: must be at most 32 tokens")
    refused = await post(shared, path, {"inputs": [[4] * 33]} | left)
    assert refused.json()["error"].startswith("inputs[0]: must be at most 32 tokens")
    few = {"inputs": TEXTS, "truncate_prompt_tokens": 5} | left
    assert (await post(shared, path, few)).json()["error"].startswith("inputs[0]: must be at most 5 tokens")
    assert (await post(shared, path, few | {"truncate_prompt_tokens": 6})).content == want.content
    assert (await post(shared, path, {"inputs": "hello", "truncation_direction": "up"})).status_code == 422


async def test_info_has_every_field(start_server: StartServer) -> None:
    server = await start_server(
        http_port=0,
        http_truncate=False,
        max_request_sequences=99,
        max_connections=7,
        tokenizer_threads=2,
        max_batch_tokens=512,
    )
    info = (await get(server, "/info")).json()
    assert info.pop("model_sha")
    assert info == {
        "model_id": "tiny",
        "model_dtype": "float32",
        "served_model_name": "tiny",
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": 7,
        "max_input_length": 32,
        "max_batch_tokens": 512,
        "max_batch_requests": None,
        "max_client_batch_size": 99,
        "auto_truncate": False,
        "tokenization_workers": 2,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


async def test_ping_is_health(shared: FakeServer) -> None:
    assert (await get(shared, "/ping")).status_code == 200
    async with connect(shared) as client:
        assert (await client.head("/ping")).status_code == 200
        assert (await client.post("/ping")).status_code == 405


async def test_a_large_comparison(start_server: StartServer) -> None:
    server = await start_server(http_port=0)
    refused = await post(server, "/similarity", compared("hello", ["hello"] * 20_000))
    assert refused.status_code == 413
    problem = "inputs.sentences: must hold at most 2048 sequences (max_request_sequences)"
    assert refused.json()["error"].startswith(problem)
    many = await post(server, "/similarity", compared("hello", ["hello brave new world " * 3] * 2047))
    assert many.status_code == 200
    assert len(many.json()) == 2047


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/similarity", {"inputs": {"source_sentence": "brave", "sentences": ["hello", "hello"]}}, "source_sentence"),
        ("/similarity", {"inputs": {"source_sentence": "hello", "sentences": ["hello", "brave"]}}, "sentences[1]"),
        ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": it}]} for it in ("hello", "brave")]}, "[1]"),
    ],
)
async def test_a_failed_computation_names_the_input(
    start_server: StartServer, path: str, body: dict[str, Any], field: str
) -> None:
    """If the engine fails for one text, the error names the text's field in this request."""
    server = await start_server(FakeEngine(D_MODEL, nan_id=5), http_port=0)  # "brave" has the id 5
    failed = await post(server, path, body)
    assert failed.status_code in (424, 500)
    assert f"inputs.{field}" in failed.text if field[0] == "s" else f"inputs{field}" in failed.text
