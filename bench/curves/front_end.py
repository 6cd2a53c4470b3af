"""What the server can do at most if its engine takes no time: what gRPC and Python cost a call."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from comparison.child import serving

from curves.measure import CALLERS, Bench
from encserve_cli.load import closed_loop, make_calls
from encserve_client import EncoderClient

SEQUENCES_PER_CALL = (1, 4, 16, 64)
SEQUENCE_TOKENS = 20
_QUEUE_TOKENS = 2 * CALLERS * SEQUENCES_PER_CALL[-1] * SEQUENCE_TOKENS


class FakeEngineServer(NamedTuple):
    """Where it is to be asked, its process, and its metrics page."""

    target: str
    pid: int
    metrics_url: str


@contextmanager
def fake_engine_server(grpc_server: str) -> Iterator[FakeEngineServer]:
    """A whole server whose engine answers at once, in a process of its own."""
    with serving(partial(_serve, grpc_server=grpc_server)) as found:
        yield found


def _serve(pipe: Connection, grpc_server: str) -> None:
    from fake_server import start_fake_server

    async def serve() -> None:
        directory = Path(tempfile.mkdtemp())
        app = (await start_fake_server(directory, max_queue_tokens=_QUEUE_TOKENS, grpc_server=grpc_server)).app
        metrics_url = f"http://127.0.0.1:{app.metrics_port}/metrics"
        pipe.send(FakeEngineServer(f"127.0.0.1:{app.grpc_port}", os.getpid(), metrics_url))
        await asyncio.Event().wait()

    uvloop.run(serve())


def by_sequences_per_call(bench: Bench) -> list[dict[str, Any]]:
    """Calls and sequences a second, and the server's CPU time for a call, 64 callers."""
    with fake_engine_server("encserve") as (target, _, metrics_url):
        with EncoderClient(target) as client:
            info = client.model()

        def measure(count: int, _: int) -> dict[str, Any]:
            calls = make_calls([SEQUENCE_TOKENS] * 1024, info, sequences_per_call=count)
            result = closed_loop(
                target, calls, concurrency=CALLERS, seconds=bench.seconds, warmup_seconds=1.0, metrics_url=metrics_url
            )
            cpu = result.server.cpu_seconds if result.server is not None else None
            return {
                "sequences_per_call": count,
                "calls_per_second": result.calls_per_second,
                "sequences_per_second": result.sequences_per_second,
                "server_cpu_seconds_per_call": None if cpu is None else cpu / result.calls,
                "errors": sum(result.errors.values()),
            }

        return bench.interleaved(SEQUENCES_PER_CALL, measure)
