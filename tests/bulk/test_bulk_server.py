"""`encserve embed` uses a server that fails, and still writes all vectors that the server can compute.

The server restarts, refuses calls for some seconds, or crashes when it gets a certain text.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from agreement import worst_relative_error
from command import inputs, table_of
from embed_jobs import check_rows, kill, part_names, run, said, short_texts, vectors_of, write_corpus
from fake_encoder import FakeEncoder, Refused, rows_of_input
from ports import free_port
from real_server import killed_server
from waiting import PATIENCE_SECONDS

from encserve_proto.v1 import encoder_pb2 as pb

ROWS, FILES = 20_000, 20
REFUSAL_SECONDS = 2.0  # the time in which the server refuses calls
SOME_REJECTED = 3
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
TOLERANCE = 1e-5  # the largest relative difference between vectors of one text from different batches


def test_a_job_survives_a_restart_of_the_server(encoder: Path, tmp_path: Path) -> None:
    """After the restart, the job goes on. A job without a server writes the same vectors."""
    corpus, output = write_corpus(tmp_path / "texts", ROWS, FILES), tmp_path / "vectors"
    job = ("embed", *inputs(*corpus), "--keep", "id", "--output")
    alone = run(*job, f"{tmp_path}/alone/", "--bundle", encoder)
    assert alone.returncode == SOME_REJECTED, alone.stderr
    with killed_server(encoder.parent.parent, lambda _: len(part_names(output)) >= 3) as target:
        done = run("--target", target, *job, f"{output}/")
    assert done.returncode == SOME_REJECTED, done.stderr
    away, back = said(done.stderr)
    assert re.fullmatch(rf"server {target} is away: trying again for \d+ s", away)
    assert back == f"server {target} is back"
    found, want = table_of(output), table_of(tmp_path / "alone")
    check_rows(found, short_texts(ROWS))
    assert worst_relative_error(vectors_of(found)[0], vectors_of(want)[0]) <= TOLERANCE


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
    table = table_of(tmp_path / "vectors")
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


@contextlib.contextmanager
def dying_server(starts: Path) -> Iterator[str]:
    """Run a server that crashes when it gets the text "deadly", and yield the address. A shell restarts the server.

    Each start adds a byte to the file `starts`.
    """
    target = f"127.0.0.1:{free_port()}"
    loop = f'while true; do printf . >> "{starts}"; "$0" -c "$1" {target.rpartition(":")[2]}; done'
    command = ["/bin/sh", "-c", loop, sys.executable, DYING_SERVER]
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True) as process:
        try:
            with grpc.insecure_channel(target) as channel:
                grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
            yield target
        finally:
            kill(process)


def test_a_text_that_makes_the_server_die_is_rejected(tmp_path: Path) -> None:
    """The job finds the text, rejects it and goes on. The server crashes fewer than 40 times."""
    texts = [f"text {i}" if i != 2500 else "deadly" for i in range(5000)]
    (tmp_path / "texts.txt").write_text("".join(f"{it}\n" for it in texts))
    files = inputs(tmp_path / "texts.txt")
    with dying_server(tmp_path / "starts") as target:
        done = run("--target", target, "--timeout", "5", "embed", *files, "--output", f"{tmp_path}/vectors/")
    assert done.returncode == SOME_REJECTED, done.stderr
    assert f"{tmp_path}/texts.txt, line 2501: makes the server fail each time: " in done.stdout
    table = table_of(tmp_path / "vectors")
    assert table["text"].to_pylist() == texts
    assert [it for it, vector in zip(texts, table["vector"].to_pylist(), strict=True) if vector is None] == ["deadly"]
    assert (tmp_path / "starts").stat().st_size < 40
