"""A single server is killed during a long call, and starts again. The call succeeds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_server import RealServer, killed_server, real_server

from encserve_client import EncoderClient

TEXTS = [f"hello {'new ' * (n % 7)}world {'brave ' * (n % 40)}".strip() for n in range(5000)]


@pytest.fixture(scope="module")
def want(small_models: Path) -> Any:
    with real_server(small_models) as server, EncoderClient(server.target) as client:
        return client.embed(TEXTS, pooling="mean")


def embed(target: str) -> Any:
    with EncoderClient(target) as client:
        return client.embed(TEXTS, pooling="mean")


def stream(target: str) -> Any:
    with EncoderClient(target) as client:
        return [vector for _, vector in client.stream(TEXTS, pooling="mean")]


@pytest.mark.parametrize("call", [embed, stream])
def test_a_long_call_survives_a_restart(small_models: Path, want: Any, call: Callable[[str], Any]) -> None:
    """The server is killed when it has computed 2,000 tokens."""

    def is_time(server: RealServer) -> bool:
        return server.metric("encserve_tokens_total") >= 2000

    with killed_server(small_models, is_time, "--intra-op-threads", "1") as target:
        vectors = call(target)
    np.testing.assert_allclose(np.asarray(vectors), want, atol=1e-5)
