"""10,000 bodies on every route over HTTP that takes one, each an example with something changed in it.

The routes, their examples and their fields are those of /openapi.json, so that a new route is among them.
"""

import asyncio
import copy
import io
import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_server import FakeServer, start_fake_server
from tiny_bundle import write_bundle
from tiny_heads import every_kind, loader
from tiny_heads import words as tokenizer_of_words

pytestmark = pytest.mark.timeout(1200)

BODIES, AT_ONCE = 10_000, 16
HEADER_LENGTH = "Inference-Header-Content-Length"
TEXTS = [
    "w5",
    "w5 w6 w7 w8",
    "w5 " * 80,
    "",
    "\x00",
    "🌍",
    "\ud800",
    "query",
    "document",
    "float",
    "int8",
    "tiny",
    "tiny@1",
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 5, 2**31, 2**63, 2**64, 2**70, 0.5, -0.0, 1e300, "BYTES", "INT64", "FP32"),
    *([], {}, [[]], [{}], {"": 1}, [[1, 4, 2]], [1, 4, 2], ["w5", [5]], [[[[[[[[]]]]]]]], {"a": {"b": {"c": []}}}),
    *TEXTS,
]
# Of requests of the Open Inference Protocol.
PARAMETERS: list[dict[str, Any]] = [
    {"datatype": "INT8"},
    {"datatype": "FP16"},
    {"datatype": "FP16", "binary_data_output": True},
    {"truncate": True, "timeout": 60_000_000, "binary_data_output": True},
]


class Mutator:
    """Changes bodies, always in the same ways for one seed."""

    def __init__(self, fields: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._fields = fields

    def change(self, example: Any) -> tuple[bytes, dict[str, str]]:
        """A body and its headers."""
        body = copy.deepcopy(example)
        if isinstance(body.get("inputs"), list) and self._random.random() < 0.3:
            body["parameters"] = copy.deepcopy(self._random.choice(PARAMETERS))
        for _ in range(self._random.choice([0, 1, 1, 1, 2, 4])):
            body = self._changed(body)
        headers: dict[str, str] = {}
        raw = b""
        if isinstance(body, dict) and "inputs" in body and self._random.random() < 0.3:
            raw, headers = self._as_bytes(body), {}
        data = json.dumps(body).encode("utf-8", "surrogatepass")
        if raw:
            headers = {HEADER_LENGTH: str(self._random.choice([len(data)] * 8 + [0, -1, len(data) + 1, "x", 2**70]))}
        if self._random.random() < 0.15:
            at = self._random.randrange(len(data) + 1)
            data = (
                data[:at] + self._random.randbytes(self._random.randrange(4)) + data[at + self._random.randrange(4) :]
            )
        return data + raw, headers

    def _changed(self, body: Any) -> Any:
        """The body with one place changed: replaced, left out, repeated, or with one more field."""
        places = list(_places(body))
        holder, key = self._random.choice(places) if places else (None, None)
        how = self._random.random()
        if holder is None or how < 0.02:
            return self._value()
        if how < 0.5:
            holder[key] = self._value()
        elif how < 0.6:
            del holder[key]
        elif how < 0.7 and isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[:2]) * self._random.choice([1, 30, 300]))
        elif isinstance(body, dict):
            body[self._random.choice(self._fields)] = self._value()
        return body

    def _value(self) -> Any:
        return copy.deepcopy(self._random.choice(VALUES))

    def _as_bytes(self, body: dict[str, Any]) -> bytes:
        """The data of the first tensor, taken out of the body, as bytes behind it."""
        tensors = body["inputs"]
        if not (isinstance(tensors, list) and tensors and isinstance(tensors[0], dict)):
            return b""
        texts = tensors[0].pop("data", None)
        if not isinstance(texts, list):
            return b""
        encoded = [str(it).encode("utf-8", "surrogatepass") for it in texts[:8]]
        raw = b"".join(self._random.choice([len(it)] * 20 + [2**31]).to_bytes(4, "little") + it for it in encoded)
        size = self._random.choice([len(raw)] * 8 + [len(raw) - 1, -1, 2**63, None])
        tensors[0]["parameters"] = {"binary_data_size": size}
        return raw


def _places(body: Any) -> Any:
    """Every place of a body that holds a value: what holds it, and the key or index."""
    keys = body.keys() if isinstance(body, dict) else range(min(len(body), 20)) if isinstance(body, list) else ()
    for key in list(keys):
        yield body, key
        yield from _places(body[key])


async def _routes(session: aiohttp.ClientSession) -> tuple[dict[str, Any], list[str]]:
    """The example of every route that takes a body, by its path, and the names of all fields."""
    async with session.get("/openapi.json") as response:
        document = await response.json()
    examples = {}
    for path, methods in document["paths"].items():
        if "requestBody" in methods.get("post", {}):
            content = methods["post"]["requestBody"]["content"]["application/json"]
            examples[path.replace("{name}", "tiny").replace("{version}", "1")] = content["example"]
    fields = {name for its in document["components"]["schemas"].values() for name in its.get("properties", ())}
    return examples, sorted(fields)


async def _attack(server: FakeServer) -> dict[str, Counter[int]]:
    """How many answers of each status there were, by route."""
    seen: dict[str, Counter[int]] = {}
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    url = f"http://127.0.0.1:{server.app.http_port}"
    async with aiohttp.ClientSession(url, connector=connector) as session:
        examples, fields = await _routes(session)
        for path, example in examples.items():
            counts = seen[path] = Counter()
            mutator = Mutator(fields, seed=len(seen))

            async def send(path: str = path, example: Any = example, counts: Counter[int] = counts) -> None:
                for _ in range(BODIES // AT_ONCE):
                    data, headers = mutator.change(example)  # noqa: B023 - awaited before the next one
                    async with session.post(path, data=io.BytesIO(data), headers=headers) as response:
                        text = await response.text(errors="replace")
                    counts[response.status] += 1
                    assert response.status < 500, (path, data, headers, text)
                    assert "Traceback" not in text

            await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        async with session.post("/v1/embeddings", json={"input": "w5"}) as response:
            assert response.status == 200
    return seen


def test_any_body_gets_a_reply_or_the_callers_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        bundle = write_bundle(
            tmp_path / "bundles", tokenizer=tokenizer_of_words(), prompts={"query": "w7 "}, **every_kind()
        )
        served: dict[str, Any] = {"model": ("tiny@1",), "tune_batches": False, "load": loader(bundle)}
        server = runner.run(start_fake_server(tmp_path, http_port=0, **served))
        seen = runner.run(_attack(server))
        assert server.sample("encserve_in_flight_requests") == 0
        assert server.sample("encserve_in_flight_bytes") == 0
        assert server.sample("encserve_queue_tokens", model="tiny", version="1") == 0
        runner.run(server.channel.close())
        runner.run(server.app.stop())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    for path, counts in seen.items():
        assert counts[200] > BODIES / 20, (path, counts)
        assert sum(counts.values()) - counts[200] > BODIES / 20, (path, counts)
    assert len(seen) >= 12
