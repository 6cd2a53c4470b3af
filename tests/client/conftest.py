"""A small encoder service on a real grpc.aio server, and both clients of the service."""

from collections.abc import AsyncIterator

import pytest
from fake_encoder import Caller, FakeEncoder


@pytest.fixture
async def service() -> AsyncIterator[FakeEncoder]:
    """The started service."""
    it = FakeEncoder()
    await it.start()
    yield it
    await it.server.stop(None)


@pytest.fixture(params=["sync", "async"])
async def caller(request: pytest.FixtureRequest, service: FakeEncoder) -> AsyncIterator[Caller]:
    """Calls the service with either client."""
    it = Caller(request.param, service)
    yield it
    for client in it.clients:
        await it.close(client)
