"""Sends 10,000 bodies to each HTTP route.

Each body is the route's example from /openapi.json with random changes.
"""

import asyncio
import copy
import io
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_server import FakeServer, start_fake_server
from fuzzing import damaged
from tiny_bundle import write_bundle
from tiny_heads import every_kind_and_scores, loader
from tiny_heads import words as tokenizer_of_words

pytestmark = pytest.mark.timeout(1200)

BODIES, CONNECTIONS = 10_000, 16
TEXTS = ["w5", "w5 w6 w7 w8", "w5 " * 80, "", "\x00", "🌍", "\ud800", "query", "document", "float", "int8", "tiny@1"]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 5, 2**31, 2**63, 2**64, 2**70, 0.5, -0.0, 1e300, "BYTES", "INT64", "FP32"),
    *([], {}, [[]], [{}], {"": 1}, [[1, 4, 2]], [1, 4, 2], ["w5", [5]], [[[[[[[[]]]]]]]], {"a": {"b": {"c": []}}}),
    *(
        {"datatype": "INT8"},
        {"datatype": "FP16", "binary_data_output": True},
        {"truncate": True, "timeout": 60_000_000},
    ),
    *TEXTS,
]


class Mutator:
    """Changes request bodies at random. Equal seeds give equal changes."""

    def __init__(self, fields: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._fields = fields

    def change(self, example: Any) -> bytes:
        """Return the example with up to four random changes, as JSON.

        Sometimes, a few bytes of the JSON are damaged too.
        """
        body = copy.deepcopy(example)
        for _ in range(self._random.choice([0, 1, 1, 1, 2, 4])):
            body = self._change_one_place(body)
        data = json.dumps(body).encode("utf-8", "surrogatepass")
        return damaged(data, self._random) if self._random.random() < 0.15 else data

    def _change_one_place(self, body: Any) -> Any:
        places = list(_places(body))
        holder, key = self._random.choice(places) if places else (None, None)
        chance = self._random.random()
        if holder is None or chance < 0.02:
            return self._value()
        if chance < 0.5:
            holder[key] = self._value()
        elif chance < 0.6:
            del holder[key]
        elif chance < 0.7 and isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[:2]) * self._random.choice([1, 30, 300]))
        elif isinstance(body, dict):
            body[self._random.choice(self._fields)] = self._value()
        return body

    def _value(self) -> Any:
        return copy.deepcopy(self._random.choice(VALUES))


def _places(body: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key or index of every nested value of a body."""
    keys = body.keys() if isinstance(body, dict) else range(min(len(body), 20)) if isinstance(body, list) else ()
    for key in list(keys):
        yield body, key
        yield from _places(body[key])


async def examples_and_fields(session: aiohttp.ClientSession) -> tuple[dict[str, Any], list[str]]:
    """Return the example body of each POST route, and the names of the fields of all bodies."""
    async with session.get("/openapi.json") as reply:
        document = await reply.json()
    examples = {}
    for path, methods in document["paths"].items():
        if "requestBody" in methods.get("post", {}):
            content = methods["post"]["requestBody"]["content"]["application/json"]
            examples[path.replace("{name}", "tiny").replace("{version}", "1")] = content["example"]
    fields = {name for schema in document["components"]["schemas"].values() for name in schema.get("properties", ())}
    return examples, sorted(fields)


async def send_all(server: FakeServer) -> dict[str, Counter[int]]:
    """Send all bodies, and return the number of replies by route and status."""
    statuses: dict[str, Counter[int]] = {}
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    url = f"http://127.0.0.1:{server.app.http_port}"
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def send(path: str, bodies: list[bytes]) -> None:
            for body in bodies:
                async with session.post(path, data=io.BytesIO(body)) as reply:
                    text = await reply.text(errors="replace")
                statuses[path][reply.status] += 1
                assert reply.status < 500, (path, body, text)
                assert "Traceback" not in text

        examples, fields = await examples_and_fields(session)
        for seed, (path, example) in enumerate(examples.items()):
            statuses[path] = Counter()
            mutator = Mutator(fields, seed)
            bodies = [mutator.change(example) for _ in range(BODIES)]
            await asyncio.gather(*(send(path, bodies[i::CONNECTIONS]) for i in range(CONNECTIONS)))
    return statuses


def test_every_random_body_gets_a_reply_or_a_4xx(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        bundle = write_bundle(
            tmp_path / "bundles", tokenizer=tokenizer_of_words(), prompts={"query": "w7 "}, **every_kind_and_scores()
        )
        served: dict[str, Any] = {"model": ("tiny@1",), "tune_batches": False, "load": loader(bundle)}
        server = runner.run(start_fake_server(tmp_path, http_port=0, **served))
        statuses = runner.run(send_all(server))
        for metric in ("encserve_in_flight_requests", "encserve_in_flight_bytes"):
            assert server.sample(metric) == 0
        assert server.sample("encserve_queue_tokens", model="tiny", version="1") == 0
        runner.run(server.channel.close())
        runner.run(server.app.stop())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(statuses) >= 12
    for path, counts in statuses.items():
        assert BODIES / 20 < counts[200] < BODIES * 19 / 20, (path, counts)
