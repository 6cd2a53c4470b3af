"""`encserve embed` with a server writes all vectors after interruptions.

The job is killed, the server restarts, or the server refuses calls for some seconds.
"""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from agreement import worst_relative_error
from command import inputs
from embed_jobs import (
    check_rows,
    kill,
    output_of,
    part_names,
    run,
    running,
    said,
    short_texts,
    vectors_of,
    write_corpus,
)
from fake_encoder import FakeEncoder, Refused, rows_of_input
from ports import free_port
from real_server import RealServer, real_server
from waiting import PATIENCE_SECONDS

from encserve_proto.v1 import encoder_pb2 as pb

ROWS, FILES = 20_000, 20
# The time in which the server refuses calls. Set ENCSERVE_BULK_REFUSAL_SECONDS=60 to test a long refusal.
REFUSAL_SECONDS = float(os.environ.get("ENCSERVE_BULK_REFUSAL_SECONDS", "4"))
SOME_REJECTED = 3
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
TOLERANCE = 1e-5  # largest relative error between two vectors of a text, computed in different batches


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", ROWS, FILES)


@pytest.fixture(scope="module")
def want(corpus: list[Path], encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output table of a job that runs the model in its own process, without a server."""
    output = tmp_path_factory.mktemp("want") / "vectors"
    done = run("embed", *inputs(*corpus), "--keep", "id", "--output", f"{output}/", "--bundle", encoder)
    assert done.returncode == SOME_REJECTED, done.stderr
    return output_of(output)


def command(target: str, corpus: list[Path], output: Path) -> tuple[object, ...]:
    return ("--target", target, "embed", *inputs(*corpus), "--keep", "id", "--output", f"{output}/")


def check_agreement(found: Any, want: Any) -> None:
    check_rows(found, short_texts(ROWS))
    vectors, expected = vectors_of(found)[0], vectors_of(want)[0]
    assert worst_relative_error(vectors, expected) <= TOLERANCE


def wait_for_parts(output: Path, count: int) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while len(part_names(output)) < count and time.monotonic() < ends:
        time.sleep(0.01)


def test_a_killed_job_continues(corpus: list[Path], want: Any, encoder: Path, tmp_path: Path) -> None:
    output = tmp_path / "vectors"
    with real_server(encoder.parent.parent) as server:
        for parts in (3, 9):
            with running(*command(server.target, corpus, output)) as process:
                wait_for_parts(output, parts)
                kill(process)
        assert 0 < len(part_names(output)) < FILES
        last = run(*command(server.target, corpus, output))
    assert last.returncode == SOME_REJECTED, last.stderr
    check_agreement(output_of(output), want)


@contextlib.contextmanager
def killed_after(parts: int, output: Path, bundle: Path) -> Iterator[str]:
    """Run a server and yield its address.

    The server is killed after the job has finished `parts` output files, and starts again two seconds later.
    """
    flags = ("--grpc-port", str(free_port()))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(real_server(bundle.parent.parent, *flags))]

        def restart() -> None:
            wait_for_parts(output, parts)
            servers[0].process.kill()
            servers[0].wait()
            time.sleep(2)
            servers.append(stack.enter_context(real_server(bundle.parent.parent, *flags)))

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            yield servers[0].target
        finally:
            thread.join()
        check_both_worked(servers)


def check_both_worked(servers: list[RealServer]) -> None:
    assert servers[1].metric("encserve_tokens_total") > 0, "the job ended before the restart: the test tested nothing"


def test_a_job_survives_a_restart_of_the_server(corpus: list[Path], want: Any, encoder: Path, tmp_path: Path) -> None:
    output = tmp_path / "vectors"
    with killed_after(3, output, encoder) as target:
        done = run(*command(target, corpus, output))
    assert done.returncode == SOME_REJECTED, done.stderr
    away, back = said(done.stderr)
    assert re.fullmatch(rf"server {target} is away: trying again for \d+ s", away)
    assert back == f"server {target} is back"
    check_agreement(output_of(output), want)


@pytest.mark.timeout(300 + REFUSAL_SECONDS)
@pytest.mark.parametrize(
    ("code", "reason", "lines"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", []),
        (grpc.StatusCode.UNAVAILABLE, "NOT_READY", ["is away: trying again", "is back"]),
    ],
    ids=["no room", "not ready"],
)
async def test_a_job_waits_for_a_server_that_refuses(
    service: FakeEncoder, tmp_path: Path, code: grpc.StatusCode, reason: str, lines: list[str]
) -> None:
    texts = [f"{'word ' * (i % 9)}{i}" for i in range(4000)]
    (tmp_path / "texts.txt").write_text("".join(f"{it}\n" for it in texts))
    began: list[float] = []

    async def refuse(request: pb.EncodeRequest) -> None:
        if len(service.requests) > 3:
            began.append(time.monotonic())
            if began[-1] < began[0] + REFUSAL_SECONDS:
                raise Refused(code, "not now", reason, pushback="200")

    service.before = refuse
    files = inputs(tmp_path / "texts.txt")
    arguments = ("--target", service.target, "embed", *files, "--output", f"{tmp_path}/vectors/")
    done = await asyncio.to_thread(run, *arguments)
    assert done.returncode == 0, done.stderr
    assert [re.sub(r" for \d+ s$", "", line) for line in said(done.stderr)] == [
        f"server {service.target} {line}" for line in lines
    ]
    table = output_of(tmp_path / "vectors")
    assert table["text"].to_pylist() == texts
    expected = [rows_of_input(pb.Input(text=it)).mean(axis=0) for it in texts]
    np.testing.assert_allclose(vectors_of(table)[0], expected, rtol=1e-6)


DYING_SERVER = """
import asyncio, os, sys
from fake_encoder import FakeEncoder

async def die(request):
    if any(item.text == "deadly" for item in request.inputs):
        os._exit(1)

async def main():
    service = FakeEncoder(before=die)
    await service.start(int(sys.argv[1]))
    await asyncio.Event().wait()

asyncio.run(main())
"""


def wait_for_server(port: int) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


@contextlib.contextmanager
def restarted(port: int) -> Iterator[list[int]]:
    """Run a server that dies when it gets the text "deadly". A thread starts it again each time.

    Yield a list that gets an element at each start.
    """
    starts: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()

    def keep_running() -> None:
        while not is_over.is_set():
            processes.append(subprocess.Popen([sys.executable, "-c", DYING_SERVER, str(port)], env=ENVIRONMENT))
            starts.append(len(starts))
            processes[-1].wait()

    thread = threading.Thread(target=keep_running)
    thread.start()
    try:
        yield starts
    finally:
        is_over.set()
        processes[-1].kill()
        thread.join()


def test_a_text_that_makes_the_server_die_is_rejected(tmp_path: Path) -> None:
    """The job finds the text, rejects it and goes on. Few starts of the server are needed."""
    texts = [f"text {i}" if i != 2500 else "deadly" for i in range(5000)]
    (tmp_path / "texts.txt").write_text("".join(f"{it}\n" for it in texts))
    port = free_port()
    with restarted(port) as starts:
        wait_for_server(port)
        done = run(
            *("--target", f"127.0.0.1:{port}", "--timeout", "5", "embed"),
            *(*inputs(tmp_path / "texts.txt"), "--output", f"{tmp_path}/vectors/"),
        )
    assert done.returncode == SOME_REJECTED, done.stderr
    assert f"{tmp_path}/texts.txt, line 2501: makes the server fail each time: " in done.stdout
    table = output_of(tmp_path / "vectors")
    assert table["text"].to_pylist() == texts
    assert [it for it, vector in zip(texts, table["vector"].to_pylist(), strict=True) if vector is None] == ["deadly"]
    assert len(starts) < 40
