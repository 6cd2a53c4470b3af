"""Tests of HTTP requests that the server splits into parts: order, errors, limits and stops."""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from fake_engine import FakeEngine, fake_rows
from fake_server import D_MODEL, StartServer
from http_calls import connect, get, post
from tiny_heads import Serve
from waiting import until

from encserve_server.errors import QueueFull
from encserve_server.models.inputs import first_piece
from encserve_server.models.parts import PartedCall
from encserve_server.models.served import EncodeReply
from encserve_server.models.treatment import EncodeCall
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.requests import Detail
from encserve_server.types.sequences import TokenSequence

MANY = 2048
OPENAI, TEI = "/v1/embeddings", "/embed"
# A request has at most two parts in the queue at a time. A part has at most 1,024 tokens, an eighth of the queue.
SMALL_QUEUE = {"http_port": 0, "max_queue_tokens": 8192}


async def test_many_inputs_are_answered_in_their_order(start_server: StartServer) -> None:
    server = await start_server(**SMALL_QUEUE)
    inputs = [[3 + i % 900] * (1 + i % 32) for i in range(MANY)]
    got = (await post(server, TEI, {"inputs": inputs, "normalize": False, "pooling": "cls"})).json()
    want = [fake_rows(np.array(ids), D_MODEL)[0] for ids in inputs]
    np.testing.assert_array_equal(np.array(got, np.float32), np.array(want, np.float32))
    tokens = sum(map(len, inputs))
    reply = (await post(server, OPENAI, {"input": inputs, "add_special_tokens": False})).json()
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [it["index"] for it in reply["data"]] == list(range(MANY))


@pytest.mark.parametrize("count", [400, 128])
async def test_one_request_takes_at_most_a_quarter_of_the_queue(start_server: StartServer, count: int) -> None:
    server = await start_server(**SMALL_QUEUE)
    call = await server.start_held(post(server, TEI, {"inputs": [[7] * 32] * count}))
    most = 0.0
    while not call.done():
        most = max(most, server.queued())
        server.engine.let_one_go()
        await asyncio.sleep(0.001)
    assert (await call).status_code == 200
    assert 0 < most <= 2048


@pytest.mark.parametrize("at", [256, 1099])  # the server prepares 256 inputs at a time; 1099 is the last input
async def test_the_error_has_the_index_of_the_bad_input(start_server: StartServer, at: int) -> None:
    server = await start_server(FakeEngine(D_MODEL, poison=666, nan_id=777), **SMALL_QUEUE)
    bad: list[tuple[Any, str, str]] = [
        ([1, 2000], f"[{at}][1]", "from 0 to 999"),
        ([], f"[{at}]", "at least 1 id"),
        ([1] * 33, f"[{at}]", "at most 32 tokens"),
        ([666], f"[{at}]", "could not compute"),
        ([777], f"[{at}]", "NaN or infinity"),
        ("x" * 300_000, f"[{at}]", "at most 262144 bytes"),
    ]
    async with connect(server) as client:
        for wrong, place, problem in bad:
            inputs: list[Any] = [[5, 6]] * 1100  # the server splits this request into three parts
            inputs[at] = wrong
            error = (await client.post(TEI, json={"inputs": inputs, "truncate": False})).json()["error"]
            assert error.startswith(f"inputs{place}: ")
            assert problem in error
            sent = {"input": inputs, "truncate": False, "add_special_tokens": False}
            if not isinstance(wrong, str):
                message = (await client.post(OPENAI, json=sent)).json()["error"]["message"]
                assert f"input{place}: " in message
                assert problem in message
    assert server.queued() == server.held_bytes() == server.in_flight() == 0


@pytest.mark.parametrize("texts", [1, 256])
async def test_texts_and_ids_in_one_request_of_several_parts(serve: Serve, texts: int) -> None:
    """If pooling skips the prompt, a request with texts and ids is refused, even if they are in different parts."""
    prompt = {"prompts": {"q": "w7 "}, "default_prompt_name": "q", "pooling_skips_prompt": True}
    server = await serve({}, {"http_port": 0}, **prompt)
    ids = [[5, 6]]
    for inputs in (["w5"] * texts + ids, ids * texts + ["w5"]):
        assert (await post(server, TEI, {"inputs": inputs})).status_code == 422
    assert (await post(server, TEI, {"inputs": ids * texts})).status_code == 200


async def test_an_input_larger_than_the_queue_is_refused(start_server: StartServer) -> None:
    server = await start_server(http_port=0, max_queue_tokens=24)
    refused = await post(server, TEI, {"inputs": [[5, 6], [7] * 25, [5, 6]]})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (413, "REQUEST_TOO_LARGE")
    assert refused.json()["error"].startswith("inputs[1]: must be at most 24 tokens")


async def test_a_reply_that_is_too_large_is_refused(start_server: StartServer) -> None:
    server = await start_server(**SMALL_QUEUE, max_response_mib=1, max_request_sequences=20_000)
    refused = await post(server, "/embed_all", {"inputs": [[7] * 32] * MANY})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (413, "RESPONSE_TOO_LARGE")
    assert f"of {MANY} inputs" in refused.text
    assert server.held_bytes() == 0
    server.engine.batches.clear()
    refused = await post(server, TEI, {"inputs": [[7]] * 14_000})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (413, "RESPONSE_TOO_LARGE")
    assert "first 13094 of 14000" in refused.text
    assert server.engine.batches == []  # no batch ran, because the size of vectors is known in advance
    call = await server.start_held(post(server, TEI, {"inputs": [[7]] * 13_000}))
    held = server.held_bytes()
    server.engine.let_go()
    assert (await call).status_code == 200
    assert held > 13_000 * (4 * D_MODEL + 64) * 6


LARGE = {"inputs": [[7] * 32] * MANY}


async def test_a_small_request_does_not_wait_for_a_large_one(start_server: StartServer) -> None:
    server = await start_server(**SMALL_QUEUE, parallel_batches=1)
    large = await server.start_held(post(server, TEI, LARGE))
    small = asyncio.create_task(post(server, TEI, {"inputs": "hello"}))
    await until(lambda: server.in_flight() == 2)
    while not small.done():
        server.engine.let_one_go()
        await asyncio.sleep(0.001)
    assert (await small).status_code == 200
    assert sum(map(sum, server.engine.batches)) < MANY * 32 / 8
    server.engine.let_go()
    assert (await large).status_code == 200


@pytest.mark.parametrize("ending", ["the caller leaves", "the engine fails"])
async def test_a_request_that_ends_early_releases_all_resources(start_server: StartServer, ending: str) -> None:
    server = await start_server(**SMALL_QUEUE)
    large = await server.start_held(post(server, TEI, LARGE))
    for _ in range(5):
        server.engine.let_one_go()
        await asyncio.to_thread(server.engine.started.acquire)
    if ending == "the caller leaves":
        large.cancel()
        await until(lambda: server.in_flight() == 0)
        server.engine.let_go()
    else:
        server.engine.broken = True
        server.engine.let_go()
        assert (await large).status_code in (424, 503)
    await until(lambda: server.queued() == 0)
    assert server.held_bytes() == 0
    assert sum(map(sum, server.engine.batches)) < MANY * 32 / 4
    if ending == "the caller leaves":
        assert (await post(server, TEI, {"inputs": "hello"})).status_code == 200


class Crowded:
    """A fake model whose queue is full for some calls of `run` and `prepare`.

    `full_runs` and `full_texts` are the numbers of these calls, counted from 0.
    """

    def __init__(self, *, full_runs: Collection[int] = (), full_texts: Collection[int] = ()) -> None:
        self.limits = SimpleNamespace(max_tokens=40, max_response_bytes=2**20)
        self.max_batch_tokens = 0
        self.full_runs, self.full_texts = full_runs, full_texts
        self.runs = self.texts = 0
        self.costs: list[int] = []

    async def prepare(
        self, call: EncodeCall, span: None, sender: Sender, *, reply: EncodeReply, end: int
    ) -> EncodeReply:
        """Add sequences of one token to a reply. Raise QueueFull if the queue is full."""
        self.texts += 1
        if self.texts - 1 in self.full_texts:
            raise QueueFull("bytes of text", 1, 1, 1, 5.0)
        for _ in call.inputs[len(reply.sequences) : end]:
            reply.sequences.append(TokenSequence(np.array([1]), 1))
            reply.sequences[-1].cost = 1
        return reply

    async def run(self, reply: EncodeReply, deadline: float, span: None, sender: Sender) -> None:
        """Count the call, and store its number of sequences. Raise QueueFull if the queue is full."""
        self.runs += 1
        if self.runs - 1 in self.full_runs:
            raise QueueFull("tokens", 10, 40, 40, 5.0)
        self.costs.append(len(reply.sequences))


async def run_crowded(model: Crowded, clock: FakeClock, inputs: int) -> EncodeReply:
    """Run a call with `inputs` inputs while the fake clock advances."""
    call = EncodeCall(["a"] * inputs, ())
    reply = EncodeReply([], SimpleNamespace(has_sparse=False), Detail.COUNTS, False, None, 0.0, 1)  # type: ignore[arg-type]
    await model.prepare(call, None, ANY_SENDER, reply=reply, end=first_piece(call.inputs))
    parted = PartedCall(model, call, reply, lambda _: None, clock=clock)  # type: ignore[arg-type]
    running = asyncio.create_task(parted.run())
    while not running.done():
        await asyncio.sleep(0)
        clock.advance(1.0)
    await running
    return reply


async def test_a_later_part_waits_for_room() -> None:
    clock = FakeClock()
    model = Crowded(full_runs={1, 2, 4}, full_texts={1})
    reply = await run_crowded(model, clock, 300)
    assert len(reply.sequences) == 300
    assert sum(model.costs) == 300
    assert max(model.costs) == 5
    assert clock.now() >= 4 * 5.0


@pytest.mark.parametrize("model", [Crowded(full_runs={0}), Crowded(full_runs=range(1, 99))])
async def test_a_refused_first_part_ends_the_call(model: Crowded) -> None:
    """A call fails if its first part finds the queue full, or if a later part finds no room in the queue for 30 s."""
    clock = FakeClock()
    with pytest.raises(QueueFull):
        await run_crowded(model, clock, 300)
    assert model.runs <= 1 + 2 * (1 + 30 / 5)  # the server tries two parts again every 5 s for 30 s
    assert clock.now() < 120


async def test_a_replaced_model_finishes_its_requests(start_server: StartServer) -> None:
    server = await start_server(**SMALL_QUEUE)
    old, new = server.app.catalog.resolve("tiny", "2"), server.app.catalog.resolve("tiny", "1")
    large = await server.start_held(post(server, TEI, LARGE))
    server.app.catalog.publish([new])
    unused = asyncio.create_task(old.unused())
    await asyncio.sleep(0)
    assert not unused.done()
    server.engine.let_go()
    assert (await large).status_code == 200
    await unused
    assert [it["id"] for it in (await get(server, "/v1/models")).json()["data"]] == ["tiny"]


@pytest.mark.parametrize("grace_seconds", [60.0, 0.2])
async def test_a_request_in_parts_when_the_server_stops(start_server: StartServer, grace_seconds: float) -> None:
    """A stopping server finishes the request within the grace period, or refuses the request at the period's end."""
    server = await start_server(**SMALL_QUEUE, grace_seconds=grace_seconds)
    large = await server.start_held(post(server, TEI, LARGE))
    stopping = asyncio.create_task(server.app.stop())
    await until(server.app._calls.draining.is_set)
    if grace_seconds == 60:
        server.engine.let_go()
        assert (await large).status_code == 200
        assert await stopping
    else:
        refused = await large
        assert (refused.status_code, refused.headers["encserve-error-reason"]) == (503, "DRAINING")
        server.engine.let_go()
        await stopping
