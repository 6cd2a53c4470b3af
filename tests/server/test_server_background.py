"""Tests that background work continues after an unexpected error."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from fake_clock import FakeClock
from fake_server import StartServer
from waiting import until

from encserve_server import ledger
from encserve_server.system.background import repeat
from encserve_server.transport.grpc import connections, health


async def test_an_error_is_logged_once_and_the_work_continues(caplog: pytest.LogCaptureFixture) -> None:
    clock, calls = FakeClock(), 0

    async def work() -> bool:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5):
            raise ValueError("now and then")
        return calls == 6

    task = asyncio.create_task(repeat(work, 1.0, clock=clock))
    for _ in range(6):
        await until(lambda: clock.sleepers)
        clock.advance(1.0)
    await task
    assert calls == 6
    # Call 3 repeats the error of call 2, so only calls 2 and 5 log an error.
    assert [it.levelname for it in caplog.records] == ["ERROR"] * 2


async def test_an_event_ends_the_pause() -> None:
    wake, calls = asyncio.Event(), 0

    def work() -> bool:
        nonlocal calls
        calls += 1
        return calls == 2

    task = asyncio.create_task(repeat(work, None, wake=wake))
    for count in (1, 2):
        wake.set()
        await until(lambda count=count: calls == count)  # type: ignore[misc]
    await task


@pytest.mark.parametrize(
    ("kind", "look"),
    [(ledger.Places, "_look"), (connections.Connections, "_close_unread"), (health.ModelHealth, "_look")],
    ids=["slow requests", "unread replies", "health"],
)
async def test_a_watch_survives_an_error(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type, look: str
) -> None:
    """A watch, which is a background task, logs an unexpected error and continues.

    For example, without the watch of slow requests, the number of slow requests would have no limit.
    """
    original: Callable[[object], object] = getattr(kind, look)
    calls = 0

    def fail_first(self: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("a mistake of ours")
        return original(self)

    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(connections, "_REPLY_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(kind, look, fail_first)
    server = await start_server()
    await until(lambda: calls > 2)
    assert "background work failed" in caplog.text
    await server.encode([1])
