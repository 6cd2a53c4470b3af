"""Tests of the priority of calls and of the shares of callers, over every protocol."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from callers_file import entry
from fake_server import Failed, FakeServer, StartServer, make_input, refusal
from http_calls import connect, post
from open_inference import ask, infer_request
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as infer_pb

BULK_TOKENS, URGENT_TOKENS = 7, 3
SEARCH_KEY, JOBS_KEY = "encserve-search-key", "encserve-jobs-key"
CALLERS = entry("search", SEARCH_KEY) + entry("jobs", JOBS_KEY, priority='"bulk"')
BULK_CALLERS = entry("jobs", JOBS_KEY, weight=0.01, priority='"bulk"') + entry("search", SEARCH_KEY, priority='"bulk"')


async def grpc(server: FakeServer, ids: list[int], priority: str) -> None:
    request = pb.EncodeRequest(inputs=[make_input(ids)], priority=f"PRIORITY_{priority.upper()}")
    await server.call("Encode", request.SerializeToString())


async def openai(server: FakeServer, ids: list[int], priority: str) -> None:
    body = {"input": ids, "add_special_tokens": False, "priority": priority, "pooling": "mean"}
    assert (await post(server, "/v1/embeddings", body)).status_code == 200


async def tei(server: FakeServer, ids: list[int], priority: str) -> None:
    assert (await post(server, "/embed_all", {"inputs": [ids], "priority": priority})).status_code == 200


async def open_inference(server: FakeServer, ids: list[int], priority: str) -> None:
    request = infer_request(input_ids=np.array([ids]), parameters={"priority": priority})
    await ask(server, "ModelInfer", request, infer_pb.ModelInferResponse)


@pytest.mark.parametrize("send", [grpc, openai, tei, open_inference])
async def test_bulk_waits_for_later_interactive_calls(
    start_server: StartServer, send: Callable[[FakeServer, list[int], str], Coroutine[Any, Any, None]]
) -> None:
    server = await start_server(http_port=0)
    server.engine.hold()
    tasks = [asyncio.create_task(grpc(server, [1], "interactive"))]
    await asyncio.to_thread(server.engine.started.acquire, timeout=60)

    async def queue_up(tokens: int, priority: str, waiting: int) -> None:
        tasks.append(asyncio.create_task(send(server, [5] * tokens, priority)))
        await until(lambda: server.sample("encserve_queue_sequences", model="tiny", version="2") == waiting)

    await queue_up(BULK_TOKENS, "bulk", 1)
    await queue_up(URGENT_TOKENS, "interactive", 2)
    waiting = server.sample("encserve_queue_bulk_tokens", model="tiny", version="2")
    assert BULK_TOKENS <= waiting <= BULK_TOKENS + 1, "the cost may include one token for outputs"
    server.engine.let_go()
    await asyncio.gather(*tasks)
    assert server.engine.batches == [[1], [URGENT_TOKENS], [BULK_TOKENS]]
    assert server.sample("encserve_answer_seconds_count", priority="bulk") == 1
    assert server.sample("encserve_answer_seconds_count", priority="interactive") == 2


async def test_an_unknown_priority_is_refused(start_server: StartServer) -> None:
    server = await start_server(http_port=0)
    for path, body in (("/v1/embeddings", {"input": "hello"}), ("/embed", {"inputs": "hello"})):
        assert (
            "priority: must be one of interactive, bulk; was 'low'"
            in (await post(server, path, body | {"priority": "low"})).text
        )
    request: Any = {"inputs": [make_input([1])], "priority": 9}
    with pytest.raises(Failed, match="priority: .* Priority, 0 to 2; was 9"):
        await server.call("Encode", pb.EncodeRequest(**request))
    bad, level = (infer_request(input_ids=np.array([[1]]), parameters={"priority": it}) for it in ("now", 3))
    with pytest.raises(Failed, match="parameters.priority: .* 'interactive' or 'bulk'; was 'now'"):
        await ask(server, "ModelInfer", bad, infer_pb.ModelInferResponse)
    await ask(server, "ModelInfer", level, infer_pb.ModelInferResponse)


async def test_a_bulk_caller_waits_for_others_and_keeps_its_share(start_server: StartServer, tmp_path: Path) -> None:
    """If the callers file gives a caller the priority bulk, all calls of this caller are bulk.

    The caller cannot request interactive priority. If a bulk caller exceeds its share, only this caller is refused.
    """
    file = tmp_path / "callers.toml"
    file.write_text(CALLERS)
    server = await start_server(callers=file, http_port=0, max_queue_tokens=64)
    server.engine.hold()
    tasks = []

    async def queue_up(key: str, tokens: int, waiting: int) -> None:
        request = pb.EncodeRequest(inputs=[make_input([5] * tokens)], priority=pb.PRIORITY_INTERACTIVE)
        call = server.call("Encode", request.SerializeToString(), metadata=(("authorization", f"Bearer {key}"),))
        tasks.append(asyncio.create_task(call))
        await until(lambda: server.sample("encserve_queue_sequences", model="tiny", version="2") == waiting)

    await queue_up(SEARCH_KEY, 1, 0)
    await asyncio.to_thread(server.engine.started.acquire, timeout=60)
    await queue_up(JOBS_KEY, 30, 1)
    async with connect(server) as http:
        body = {"input": [5] * 10, "add_special_tokens": False, "pooling": "mean"}
        refused = await http.post("/v1/embeddings", json=body, headers={"api-key": JOBS_KEY})
    assert (refused.status_code, refused.headers["encserve-error-reason"]) == (429, "SHARE_EXCEEDED")
    assert float(refused.headers["retry-after"]) >= 0
    await queue_up(SEARCH_KEY, 20, 2)
    server.engine.let_go()
    await asyncio.gather(*tasks)
    assert server.engine.batches == [[1], [20], [30]]
    assert server.sample("encserve_caller_calls_total", caller="jobs", outcome="SHARE_EXCEEDED") == 1


async def test_bulk_callers_share_half_of_the_queue(start_server: StartServer, tmp_path: Path) -> None:
    """One bulk caller sends calls until it is refused. Another bulk caller still finds room."""
    file = tmp_path / "callers.toml"
    file.write_text(BULK_CALLERS)
    server = await start_server(callers=file, max_queue_tokens=80)
    tasks = []

    def send(key: str, tokens: int) -> "asyncio.Task[bytes]":
        data = pb.EncodeRequest(inputs=[make_input([5] * tokens)]).SerializeToString()
        return asyncio.create_task(server.call("Encode", data, metadata=(("authorization", f"Bearer {key}"),)))

    server.engine.hold()
    tasks.append(send(SEARCH_KEY, 1))
    await asyncio.to_thread(server.engine.started.acquire, timeout=60)
    for waiting in (10, 20):
        tasks.append(send(JOBS_KEY, 10))
        await until(lambda: server.queued() == waiting)  # noqa: B023
    refused = await asyncio.wait_for(refusal(send(JOBS_KEY, 10)), 30)
    assert (refused.reason, "caller jobs has 20 tokens" in refused.text) == ("SHARE_EXCEEDED", True)
    tasks.append(send(SEARCH_KEY, 15))
    await until(lambda: server.queued() == 35)
    server.engine.let_go()
    await asyncio.gather(*tasks)
