"""What the server can do at most if its engine takes no time: what gRPC and Python cost a call."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from comparison.child import serving

from curves.measure import CALLERS, Bench
from encserve_client import EncoderClient
from encserve_client._bench import closed_loop, make_calls

SEQUENCES_PER_CALL = (1, 4, 16, 64)
SEQUENCE_TOKENS = 20
_QUEUE_TOKENS = 2 * CALLERS * SEQUENCES_PER_CALL[-1] * SEQUENCE_TOKENS


@contextmanager
def fake_engine_server() -> Iterator[tuple[str, str]]:
    """A whole server whose engine answers at once, in a process of its own; its target and its metrics page."""
    with serving(_serve) as (grpc_port, metrics_port):
        yield f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{metrics_port}/metrics"


def _serve(pipe: Connection) -> None:
    from fake_server import start_fake_server

    async def serve() -> None:
        server = await start_fake_server(Path(tempfile.mkdtemp()), max_queue_tokens=_QUEUE_TOKENS)
        pipe.send((server.app.grpc_port, server.app.metrics_port))
        await asyncio.Event().wait()

    uvloop.run(serve())


def by_sequences_per_call(bench: Bench) -> list[dict[str, Any]]:
    """Calls and sequences a second, and the server's CPU time for a call, 64 callers."""
    with fake_engine_server() as (target, metrics_url):
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
