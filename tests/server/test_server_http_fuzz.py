"""Tests that each random HTTP body gets the status 200, or a 4xx error in the format of the route's API."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from fake_server import start_fake_server
from http_calls import connect
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_bundle import D_MODEL, write_bundle
from tiny_heads import SERVE_TINY, every_kind_and_scores, loader
from tiny_heads import words as tokenizer_of_words

ROUTES = {
    "/v1/embeddings": "input",
    "/pooling": "input",
    "/": "inputs",
    "/embed": "inputs",
    "/embed_all": "inputs",
    "/embed_sparse": "inputs",
    "/similarity": "inputs",
    "/tokenize": "inputs",
    "/v1/embed": "texts",
    "/v2/embed": "texts",
    "/rerank": "texts",
    "/v1/rerank": "documents",
    "/v2/rerank": "documents",
    "/score": "text_2",
    "/v1/score": "text_2",
    "/classify": "input",
    "/predict": "inputs",
}
N_EXAMPLES = 200
PROMPTS = {"query": "w7 "}
OPENAI = ("/v1/embeddings", "/pooling", "/score", "/v1/score", "/classify")
COHERE = ("/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank")
OF_TEXTS = (*COHERE, "/rerank", "/score", "/v1/score", "/classify", "/predict")
FIRST = {"/rerank": "query", "/v1/rerank": "query", "/v2/rerank": "query", "/score": "text_1", "/v1/score": "text_1"}

words = st.text(max_size=8) | st.sampled_from(["w5", "w5 w6 w7 w8", "w5 " * 80, "\x00", "🌍", "w2"])
numbers = st.integers(0, 49) | st.sampled_from([-1, 50, 2**31, 2**63, 2**64 - 1, 2**70, 0.5, 1e300])
scalars = st.none() | st.booleans() | numbers | words
wild = st.recursive(scalars, lambda of: st.lists(of, max_size=3) | st.dictionaries(words, of, max_size=3), max_leaves=5)
ids = st.lists(st.integers(0, 49), min_size=1, max_size=80) | st.just([1, 4, 2])
inputs = words | ids | st.lists(words | ids | wild, max_size=4)
sentences = st.fixed_dictionaries({"source_sentence": words | wild, "sentences": st.lists(words, max_size=4) | wild})
fields: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "tiny", "tiny@1", "tiny@", "@2", "other"]),
    "encoding_format": st.sampled_from(["float", "base64", "hex"]),
    "dimensions": st.integers(-1, D_MODEL + 1),
    "user": words,
    "normalize": st.booleans(),
    "pooling": st.sampled_from(["mean", "cls", "MAX", "sum"]),
    "prompt_name": st.sampled_from(["", "query", "other"]),
    "task": st.sampled_from(["query", "document", "rank", "embed", "token_embed"]),
    "input_type": st.sampled_from(["query", "passage", "classification", "search_query", "clustering", "image"]),
    "truncate_prompt_tokens": st.integers(-2, 40),
    "truncation_side": st.sampled_from(["right", "left"]),
    "use_activation": st.booleans(),
    "max_active_dims": st.integers(-1, 5),
    "parameters": st.dictionaries(
        st.sampled_from(["truncate", "truncation_direction", "prompt_name", "other"]), st.booleans() | words, max_size=2
    ),
    "truncate": st.booleans() | st.sampled_from(["NONE", "END", "START"]),
    "embedding_types": st.lists(st.sampled_from(["float", "int8", "uint8", "ubinary", "base64", "int4"]), max_size=4),
    "output_dimension": st.integers(-1, D_MODEL + 1),
    "max_tokens": st.integers(-1, 40),
    "images": st.just([]) | st.just(["data:image/png;base64,"]),
    "inputs": st.just([{"content": [{"type": "text", "text": "w5"}]}]),
    "other": wild,
    "truncation_direction": st.sampled_from(["Right", "left"]),
    "add_special_tokens": st.booleans(),
    "documents": st.lists(words | st.dictionaries(st.sampled_from(["text", "title"]), words), max_size=3),
    "rank_fields": st.lists(st.sampled_from(["text", "title"]), max_size=2),
    "top_n": st.integers(-1, 5),
    "max_tokens_per_doc": st.integers(-1, 9),
    "return_documents": st.booleans(),
    "raw_scores": st.booleans(),
}


@st.composite
def requests(draw: st.DrawFn, paths: Sequence[str]) -> tuple[str, bytes]:
    """Draw a route and a random body, which may be valid or invalid."""
    path = draw(st.sampled_from(paths))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=40))
    is_pair = path == "/similarity" or (path == "/" and draw(st.booleans()))
    sent = sentences if is_pair else st.lists(words, max_size=4) if path in OF_TEXTS else inputs
    body: Any = draw(wild) if draw(st.integers(0, 9)) == 0 else {ROUTES[path]: draw(sent)}
    if isinstance(body, dict):
        if path in FIRST and draw(st.integers(0, 9)):
            body[FIRST[path]] = draw(words)
        if draw(st.integers(0, 19)) == 0:  # a body over 64 KiB, which the server may decode in several steps
            body["pad"] = " " * 70_000
            body[ROUTES[path]] = draw(st.lists(words | ids | wild, max_size=3)) * 300
        for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
            body[name] = draw(wild if draw(st.integers(0, 3)) == 0 else fields[name])
    data = json.dumps(body).encode()
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return path, data


async def ask(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[int, Any]:
    """Send the body in two parts. Return the status and the JSON of the reply."""

    async def parts() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        yield body[len(body) // 2 :]

    response = await client.post(path, content=parts())
    return response.status_code, response.json()


async def check_paths(client: httpx.AsyncClient) -> None:
    """Request models with known, unknown and malformed names."""
    for name in ("tiny", "tiny@1", "%00", "%ff", "a/b", "%2F", "..%2f..%2fetc", "{id:path}", "x" * 7000, "@", "tiny@"):
        response = await client.get(f"/v1/models/{name}")
        assert response.status_code in (200, 404), name
        assert len(response.content) < 1000


def check_refusal(path: str, status: int, reply: Any) -> None:
    """Check that the error is a 4xx in the error format of the route's API."""
    assert 400 <= status < 500, reply
    if path in OPENAI:
        assert status in (400, 404)
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert reply["error"]["type"] == "invalid_request_error"
    elif path in COHERE:
        assert status in (400, 404)
        assert set(reply) - {"detail"} == {"id", "message"}
    else:
        assert status in (400, 404, 413, 422)
        assert set(reply) == {"error", "error_type"}
        assert reply["error_type"] in ("Validation", "Empty")


def test_any_body_gets_a_reply_or_a_client_error(tmp_path: Path) -> None:
    """Each random body gets a reply or a 4xx error. tests/hostile sends 10,000 random bodies to each route."""
    seen: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        kinds = every_kind_and_scores()
        bundle = write_bundle(tmp_path / "bundles", tokenizer=tokenizer_of_words(), prompts=PROMPTS, **kinds)
        server = runner.run(start_fake_server(tmp_path, http_port=0, load=loader(bundle), **SERVE_TINY))
        client = connect(server)

        @settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(requests(sorted(ROUTES)))
        def fuzz(request: tuple[str, bytes]) -> None:
            path, body = request
            status, reply = runner.run(ask(client, path, body))
            seen[status] += 1
            if status != 200:
                check_refusal(path, status, reply)

        fuzz()
        runner.run(check_paths(client))
        assert server.in_flight() == 0
        assert server.sample("encserve_queue_tokens", model="tiny", version="1") == 0
        assert runner.run(ask(client, "/embed", b'{"inputs": "hello"}'))[0] == 200
        runner.run(client.aclose())
        runner.run(server.stop())
    assert sum(seen.values()) >= N_EXAMPLES
    assert seen[200] > N_EXAMPLES / 20, f"the fuzzer sent too few valid requests: {seen}"
    assert {200, 400, 422} <= set(seen), f"the fuzzer must reach the statuses 200, 400 and 422: {seen}"
