"""A single server is killed during a long call, and starts again. The call succeeds."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from ports import free_port
from real_server import RealServer, real_server
from waiting import PATIENCE_SECONDS

from encserve_cli.commands import cli
from encserve_client import EncoderClient

TEXTS = [f"hello {'new ' * (n % 7)}world {'brave ' * (n % 40)}".strip() for n in range(5000)]


@pytest.fixture(scope="module")
def want(small_models: Path) -> Any:
    with real_server(small_models) as server, EncoderClient(server.target) as client:
        return client.embed(TEXTS, pooling="mean")


@contextlib.contextmanager
def killed_in_the_middle(models: Path) -> Iterator[str]:
    """Yield the address of a server. The server is killed after 2,000 tokens, and starts again two seconds later."""
    flags = ("--grpc-port", str(free_port()), "--intra-op-threads", "1")
    servers: list[RealServer] = []
    with contextlib.ExitStack() as stack:
        servers.append(stack.enter_context(real_server(models, *flags)))

        def restart() -> None:
            ends = time.monotonic() + PATIENCE_SECONDS
            while servers[0].metric("encserve_tokens_total") < 2000 and time.monotonic() < ends:
                time.sleep(0.01)
            servers[0].process.kill()
            servers[0].wait()
            time.sleep(2)
            servers.append(stack.enter_context(real_server(models, *flags)))

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            yield servers[0].target
        finally:
            thread.join()
        assert servers[1].metric("encserve_tokens_total") > 0, "all texts were encoded before the restart"


def embed(target: str, _: Path) -> Any:
    with EncoderClient(target) as client:
        return client.embed(TEXTS, pooling="mean")


def embed_stream(target: str, _: Path) -> Any:
    with EncoderClient(target) as client:
        return [vector for _, vector in client.stream(TEXTS, pooling="mean")]


def command(target: str, folder: Path) -> Any:
    file, output = folder / "texts.txt", folder / "vectors.npy"
    file.write_text("\n".join(TEXTS))
    arguments = ["--target", target, "embed", "--input", str(file), "--pooling", "mean", "--output", str(output)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return np.load(output)


@pytest.mark.parametrize("call", [embed, embed_stream, command])
def test_a_long_call_survives_a_restart(
    small_models: Path, want: Any, tmp_path: Path, call: Callable[[str, Path], Any]
) -> None:
    with killed_in_the_middle(small_models) as target:
        vectors = call(target, tmp_path)
    np.testing.assert_allclose(np.asarray(vectors), want, atol=1e-5)
