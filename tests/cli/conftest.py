"""A small encoder service on a real grpc.aio server, for the command to call."""

from collections.abc import AsyncIterator

import pytest
from fake_encoder import FakeEncoder


@pytest.fixture
async def service() -> AsyncIterator[FakeEncoder]:
    """The service, started."""
    it = FakeEncoder()
    await it.start()
    yield it
    await it.server.stop(None)
