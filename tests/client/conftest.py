"""Fixtures of the client's tests: a fake encoder service on a real grpc.aio server, and both clients."""

from collections.abc import AsyncIterator

import pytest
from fake_encoder import Caller, FakeEncoder


@pytest.fixture
async def service() -> AsyncIterator[FakeEncoder]:
    """Yield a running `FakeEncoder`, and stop its server after the test."""
    it = FakeEncoder()
    await it.start()
    yield it
    await it.server.stop(None)


@pytest.fixture(params=["sync", "async"])
async def caller(request: pytest.FixtureRequest, service: FakeEncoder) -> AsyncIterator[Caller]:
    """Yield a `Caller` with the sync client and, in a second run of the test, with the async client."""
    it = Caller(request.param, service)
    yield it
    for client in it.clients:
        await it.close(client)
