"""Fixtures of the client's tests: a fake encoder service on a real grpc.aio server, and both clients."""

from collections.abc import AsyncIterator

import pytest
from fake_encoder import Caller, FakeEncoder, service

__all__ = ["caller", "service"]


@pytest.fixture(params=["sync", "async"])
async def caller(request: pytest.FixtureRequest, service: FakeEncoder) -> AsyncIterator[Caller]:
    """Yield a `Caller` with the sync client and, in a second run of the test, with the async client."""
    it = Caller(request.param, service)
    yield it
    for client in it.clients:
        await it.close(client)
