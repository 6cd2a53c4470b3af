"""Whatever body arrives on whatever route, the answer is a reply or the protocol's own error for its caller."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import D_MODEL, start_fake_server
from http_calls import connect
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROUTES = {"/v1/embeddings": "input", "/": "inputs", "/embed": "inputs", "/embed_all": "inputs", "/tokenize": "inputs"}

words = st.text(max_size=8) | st.sampled_from(["hello", "hello brave new world", "hello " * 40, "\x00", "🌍", "[SEP]"])
numbers = st.integers(0, 999) | st.sampled_from([-1, 1000, 2**31, 2**63, 2**64 - 1, 2**70, 0.5, 1e300])
scalars = st.none() | st.booleans() | numbers | words
wild = st.recursive(
    scalars, lambda its: st.lists(its, max_size=3) | st.dictionaries(words, its, max_size=3), max_leaves=5
)
ids = st.lists(st.integers(0, 999), min_size=1, max_size=40) | st.just([1, 4, 2])
inputs = words | ids | st.lists(words | ids | wild, max_size=4)
fields: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "tiny", "tiny@1", "tiny@", "@2", "nobody"]),
    "encoding_format": st.sampled_from(["float", "base64", "hex"]),
    "dimensions": st.integers(-1, D_MODEL + 1),
    "user": words,
    "normalize": st.booleans(),
    "pooling": st.sampled_from(["mean", "cls", "MAX", "sum"]),
    "prompt_name": st.sampled_from(["", "query", "nobody"]),
    "task": st.sampled_from(["query", "document", "rank"]),
    "truncate": st.booleans(),
    "truncate_prompt_tokens": st.integers(-2, 34),
    "input_type": st.sampled_from(["query", "search_document", "classification", ""]),
    "nobody": wild,
    "truncation_direction": st.sampled_from(["Right", "left"]),
    "add_special_tokens": st.booleans(),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a body that may be right."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=40))
    body: Any = draw(wild) if draw(st.integers(0, 9)) == 0 else {ROUTES[path]: draw(inputs)}
    if isinstance(body, dict):
        if draw(st.integers(0, 19)) == 0:  # so long that it is counted, and decoded in turns
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
    """What the server answers; the body comes in two parts."""

    async def parts() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        yield body[len(body) // 2 :]

    response = await client.post(path, content=parts())
    return response.status_code, response.json()


async def check_paths(client: httpx.AsyncClient) -> None:
    """Names of models that callers make up."""
    for name in ("tiny", "tiny@1", "%00", "%ff", "a/b", "%2F", "..%2f..%2fetc", "{id:path}", "x" * 7000, "@", "tiny@"):
        response = await client.get(f"/v1/models/{name}")
        assert response.status_code in (200, 404), name
        assert len(response.content) < 1000


def check_refusal(path: str, status: int, told: Any) -> None:
    """An error is for the caller, and told as the protocol does."""
    assert 400 <= status < 500, told
    if path == "/v1/embeddings":
        assert status in (400, 404)
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["type"] == "invalid_request_error"
    else:
        assert status in (400, 404, 413, 422)
        assert set(told) == {"error", "error_type"}
        assert told["error_type"] in ("Validation", "Empty")


@pytest.mark.parametrize("examples", [150, pytest.param(10_000, marks=[pytest.mark.system, pytest.mark.timeout(900)])])
def test_any_body_gets_a_reply_or_the_callers_error(tmp_path: Path, examples: int) -> None:
    seen: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        server = runner.run(start_fake_server(tmp_path, http_port=0, prompts={"query": "hello "}))

        client = connect(server)

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(requests())
        def fuzz(request: tuple[str, bytes]) -> None:
            path, body = request
            status, told = runner.run(ask(client, path, body))
            seen[status] += 1
            if status != 200:
                check_refusal(path, status, told)

        fuzz()
        runner.run(check_paths(client))
        assert server.sample("encserve_in_flight_requests") == 0
        assert server.sample("encserve_queue_tokens", model="tiny", version="2") == 0
        assert runner.run(ask(client, "/embed", b'{"inputs": "hello"}'))[0] == 200
        runner.run(client.aclose())
        runner.run(server.channel.close())
        runner.run(server.app.stop())
    assert sum(seen.values()) >= examples
    assert seen[200] > examples / 20, f"the fuzzer sent too little that is right: {seen}"
    assert {200, 400, 422} <= set(seen), f"the fuzzer reached too little: {seen}"
