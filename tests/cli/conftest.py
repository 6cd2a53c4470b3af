"""A small encoder service on a real grpc.aio server, for the command."""

from collections.abc import AsyncIterator

import pytest
from fake_encoder import FakeEncoder


@pytest.fixture
async def service() -> AsyncIterator[FakeEncoder]:
    """The started service."""
    it = FakeEncoder()
    await it.start()
    yield it
    await it.server.stop(None)
