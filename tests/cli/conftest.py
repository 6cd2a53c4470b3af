"""Fixtures of the command's tests: a fake encoder service on a real grpc.aio server."""

from collections.abc import AsyncIterator

import pytest
from fake_encoder import FakeEncoder


@pytest.fixture
async def service() -> AsyncIterator[FakeEncoder]:
    """Yield a running `FakeEncoder`, and stop its server after the test."""
    it = FakeEncoder()
    await it.start()
    yield it
    await it.server.stop(None)
