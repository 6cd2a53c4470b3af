"""The routes of text-embeddings-inference beside /embed: /similarity, /ping, /info, and cutting on the left."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, StartServer
from http_calls import connect, get, post
from tiny_bundle import write_bundle
from tiny_heads import Serve, loader, words

from encserve_server import __version__

TEXTS = ["hello brave new world", "new world", "hello"]
LONG = "hello " * 40


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    """One server with HTTP."""
    return await start_server(http_port=0)


def compared(source: Any, sentences: Any, **parameters: Any) -> dict[str, Any]:
    """A body of /similarity."""
    return {"inputs": {"source_sentence": source, "sentences": sentences}, "parameters": parameters}


async def test_similarity_at_both_paths(serve: Serve) -> None:
    server = await serve({}, {"http_port": 0}, prompts={"before": "w7 w8 "})
    texts = ["w5 w6", "w9 w10 w11", "w5", "w6 w5"]
    rows = np.array((await post(server, "/embed", {"inputs": texts})).json(), np.float64)  # of length 1
    for path in ("/similarity", "/"):
        response = await post(server, path, compared(texts[0], texts[1:]))
        np.testing.assert_allclose(response.json(), rows[1:] @ rows[0], rtol=1e-6)
        no_parameters = compared(texts[0], texts[1:]) | {"parameters": None}
        assert (await post(server, path, no_parameters)).json() == response.json()
        prompted = (await post(server, path, compared("w5", ["w9"], prompt_name="before"))).json()
        written = (await post(server, path, compared("w7 w8 w5", ["w7 w8 w9"]))).json()
        assert prompted == written != (await post(server, path, compared("w5", ["w9"]))).json()


async def test_a_text_of_nothing_is_like_no_other(start_server: StartServer, tmp_path: Path) -> None:
    """Its vector is of zeros, which has no direction."""
    bundle = write_bundle(tmp_path / "bundles", tokenizer=words(special=False), text__takes_empty=True)
    server = await start_server(load=loader(bundle), model=("tiny@1",), tune_batches=False, http_port=0)
    assert (await post(server, "/similarity", compared("w5", ["", "w5"]))).json() == [0.0, 1.0]
    assert (await post(server, "/similarity", compared("", ["", "w5"]))).json() == [0.0, 0.0]


async def test_long_sentences(server: FakeServer) -> None:
    cut = await post(server, "/similarity", compared("hello", [LONG, "hello"]))
    assert (cut.status_code, cut.headers["encserve-truncated-inputs"]) == (200, "1")
    refused = await post(server, "/similarity", compared("hello", ["hello", LONG], truncate=False))
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (422, "SEQUENCE_TOO_LONG")
    assert refused.json()["error"].startswith("inputs.sentences[1]: must be at most 32 tokens")
    refused = await post(server, "/similarity", compared(LONG, ["hello"], truncate=False))
    assert refused.json()["error"].startswith("inputs.source_sentence: must be at most 32 tokens")


BAD: list[tuple[Any, int, str]] = [
    ({}, 422, "inputs"),
    ({"inputs": {}}, 422, "inputs.source_sentence: must be a string; was null"),
    ({"inputs": {"source_sentence": 3, "sentences": ["a"]}}, 422, "inputs.source_sentence: must be a string; was 3"),
    (compared("a", "b"), 422, "inputs.sentences: must be a list of strings; was a string"),
    (compared("a", ["b", 3]), 422, "inputs.sentences[1]: must be a string; was 3"),
    (compared("a", ["b", [4, 5]]), 422, "inputs.sentences[1]: must be a string; was a list"),
    (compared("a", []), 400, "inputs.sentences: must hold at least 1 text; was empty"),
    (compared("a", None), 400, "inputs.sentences: must hold at least 1 text; was empty"),
    (compared("a", ["b"]) | {"parameters": 3}, 422, "parameters: must be an object; was 3"),
    (compared("a", ["b"], truncate=3), 422, "parameters.truncate: must be true or false; was 3"),
    (compared("a", ["b"], prompt_name="x"), 422, "prompt_name: model tiny has no prompt 'x'"),
    (
        compared("a", ["b"], truncation_direction="up"),
        422,
        "parameters.truncation_direction: must be one of right, left",
    ),
    (compared("a", ["b"] * 10), 413, "inputs: must hold at most 10 sequences (max_http_inputs); was 11"),
    (compared("a", ["x" * 300_000]), 422, "inputs.sentences[0]: must be at most 262144 bytes (max_text_bytes)"),
]


async def test_what_is_wrong_with_a_comparison_is_named(start_server: StartServer) -> None:
    server = await start_server(http_port=0, max_http_inputs=10)
    for body, status, problem in BAD:
        for path in ("/similarity", "/"):
            refused = await post(server, path, body)
            assert refused.status_code == status, (path, refused.text)
            assert refused.json()["error"].startswith(problem)
    assert (await post(server, "/similarity", {"inputs": "a"})).json()[
        "error"
    ] == "inputs: must be an object; was a string"
    assert (
        (await post(server, "/", {"inputs": 3, "parameters": {}}))
        .json()["error"]
        .startswith("inputs: must be a string")
    )
    assert (await post(server, "/similarity", compared("a", ["b"] * 9))).status_code == 200


async def test_unknown_fields_of_an_object_in_a_body(
    server: FakeServer, start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """They are treated as those of the body itself."""
    body = compared("hello", ["world"], normalize=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await post(server, "/similarity", body)).status_code == 200
    (record,) = (it for it in caplog.records if it.message == "a field over HTTP is ignored")
    assert vars(record)["field"] == "parameters.normalize"
    assert (await post(server, "/similarity", compared("hello", ["world"], normalize=None))).status_code == 200
    strict = await start_server(http_port=0, strict_http=True)
    refused = await post(strict, "/similarity", body)
    assert refused.status_code == 422
    assert refused.json()["error"].startswith(
        "parameters.normalize: is not known; there are prompt_name, truncate, truncation_direction (strict_http)"
    )


async def test_huggingface_hub_at_the_address_alone(server: FakeServer) -> None:
    """Its client sends every task to the path of the URL itself."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(f"http://127.0.0.1:{server.app.http_port}")
    got = await asyncio.to_thread(client.sentence_similarity, TEXTS[0], TEXTS[1:])
    assert got == (await post(server, "/similarity", compared(TEXTS[0], TEXTS[1:]))).json()
    vector = await asyncio.to_thread(client.feature_extraction, TEXTS[0])
    np.testing.assert_array_equal(vector, (await post(server, "/embed", {"inputs": TEXTS[0]})).json())


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
async def test_texts_are_cut_on_the_right_alone(server: FakeServer, path: str) -> None:
    left = {"truncation_direction": "Left"}
    want = await post(server, path, {"inputs": TEXTS})
    assert (await post(server, path, {"inputs": TEXTS} | left)).content == want.content
    for truncate in (True, False, None):
        refused = await post(server, path, {"inputs": [*TEXTS, LONG], "truncate": truncate} | left)
        assert (refused.status_code, refused.headers["encserve-error-reason"]) == (422, "SEQUENCE_TOO_LONG")
        assert refused.json()["error"] == (
            "inputs[3]: must be at most 32 tokens, because this server cuts texts only at their end; was 42. Ask for "
            "truncation on the right, or split it"
        )
    refused = await post(server, path, {"inputs": [[4] * 33]} | left)
    assert refused.json()["error"].startswith("inputs[0]: must be at most 32 tokens, because")
    few = {"inputs": TEXTS, "truncate_prompt_tokens": 5} | left
    assert (await post(server, path, few)).json()["error"].startswith("inputs[0]: must be at most 5 tokens, because")
    assert (await post(server, path, few | {"truncate_prompt_tokens": 6})).content == want.content
    assert (await post(server, path, {"inputs": "hello", "truncation_direction": "up"})).status_code == 422


async def test_info_has_every_field(start_server: StartServer) -> None:
    server = await start_server(
        http_port=0,
        http_truncate=False,
        max_http_inputs=99,
        max_connections=7,
        tokenizer_threads=2,
        max_batch_tokens=512,
    )
    told = (await get(server, "/info")).json()
    assert told.pop("model_sha")
    assert told == {
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


async def test_ping_is_health(server: FakeServer) -> None:
    assert (await get(server, "/ping")).status_code == 200
    async with connect(server) as client:
        assert (await client.head("/ping")).status_code == 200
        assert (await client.post("/ping")).status_code == 405


async def test_a_large_comparison_is_counted_first(start_server: StartServer) -> None:
    """Before any of it is decoded."""
    server = await start_server(http_port=0)
    refused = await post(server, "/similarity", compared("hello", ["hello"] * 20_000))
    assert refused.status_code == 413
    assert "must hold at most 2048 sequences (max_http_inputs); was more" in refused.json()["error"]
    nested = json.dumps(compared("hello", ["hello"])).encode()[:-1] + b',"x":[' + b"{}," * 30_000 + b"{}]}"
    refused = await post(server, "/similarity", nested)
    assert (refused.status_code, "at most 200 JSON objects" in refused.text) == (400, True)
    many = await post(server, "/similarity", compared("hello", ["hello brave new world " * 3] * 2047))
    assert many.status_code == 200
    assert len(many.json()) == 2047
