"""A single server is killed and started again during a long call; the call ends well."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import export_small_with_text
from click.testing import CliRunner
from ports import free_port
from real_server import RealServer, real_server
from waiting import PATIENCE_SECONDS

from encserve_cli.commands import cli
from encserve_client import EncoderClient

TEXTS = [f"hello {'new ' * (n % 7)}world {'brave ' * (n % 40)}".strip() for n in range(5000)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, which loads soon."""
    folder = tmp_path_factory.mktemp("small")
    return export_small_with_text(folder / "models", "small", folder / "checkpoint").path.parent.parent


@pytest.fixture(scope="module")
def want(models: Path) -> Any:
    with real_server(models) as server, EncoderClient(server.target) as client:
        return client.embed(TEXTS, pooling="mean")


@contextlib.contextmanager
def killed_in_the_middle(models: Path) -> Iterator[str]:
    """The address of a server that is killed after some texts, and started again two seconds later."""
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
        assert servers[1].metric("encserve_tokens_total") > 0, "everything was done before the restart"


def agree(found: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), want, atol=1e-5)


def test_embed_outlives_a_restart(models: Path, want: Any) -> None:
    with killed_in_the_middle(models) as target, EncoderClient(target) as client:
        agree(client.embed(TEXTS, pooling="mean"), want)


def test_embed_stream_outlives_a_restart(models: Path, want: Any) -> None:
    with killed_in_the_middle(models) as target, EncoderClient(target) as client:
        agree(list(client.embed_stream(TEXTS, pooling="mean")), want)


def test_the_command_outlives_a_restart(models: Path, want: Any, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    output = tmp_path / "vectors.npy"
    with killed_in_the_middle(models) as target:
        arguments = [
            "--target",
            target,
            "embed",
            str(tmp_path / "texts.txt"),
            "--pooling",
            "mean",
            "--output",
            str(output),
        ]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    agree(np.load(output), want)
