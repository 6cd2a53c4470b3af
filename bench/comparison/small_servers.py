"""gRPC servers of a few lines, each in a process of its own: what a call costs anybody, whatever the server.

They have the event loop and the options of encserve, and read and write plain bytes.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from comparison.child import serving
from comparison.load import METHOD, Call
from comparison.workload import Sequence64
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.repository.bundle import read_bundle

_LENGTH_BYTES = 8


def empty_calls(sequences: Sequence[Sequence64], d_model: int) -> list[Call]:
    """Requests as large as those for encserve, more or less; each begins with how large a reply it wants."""
    itemsize = 4  # float32
    return [
        (len(it), (len(it) * d_model * itemsize).to_bytes(_LENGTH_BYTES, "little") + bytes(2 * len(it)))
        for it in sequences
    ]


@contextmanager
def empty_server() -> Iterator[str]:
    """Starts one that computes nothing and answers with zeros, on a free loopback port; gives its target."""
    with serving(_serve_nothing) as port:
        yield f"127.0.0.1:{port}"


def _serve_nothing(pipe: Connection) -> None:
    async def answer(request: bytes, _: Any) -> bytes:
        return bytes(int.from_bytes(request[:_LENGTH_BYTES], "little"))

    uvloop.run(_serve(answer, pipe))


def minimal_calls(sequences: Sequence[Sequence64]) -> list[Call]:
    """Requests that are the ids themselves, int64."""
    return [(len(it), it.tobytes()) for it in sequences]


@contextmanager
def minimal_server(bundle: Path, threads: int) -> Iterator[str]:
    """Starts one that runs a bundle's model in a thread and answers with the rows' bytes; gives its target."""
    with serving(partial(_serve_model, bundle=bundle, threads=threads)) as port:
        yield f"127.0.0.1:{port}"


def _serve_model(pipe: Connection, bundle: Path, threads: int) -> None:
    engine = OnnxEngine(read_bundle(bundle).graph, device="cpu", intra_op_threads=threads)
    pool = ThreadPoolExecutor(1)

    def run(request: bytes) -> bytes:
        return engine.run([np.frombuffer(request, np.int64)]).rows[0].tobytes()

    async def answer(request: bytes, _: Any) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(pool, run, request)

    uvloop.run(_serve(answer, pipe))


async def _serve(answer: Any, pipe: Connection) -> None:
    """Answers every call so, and says on which port."""
    service, _, method = METHOD.strip("/").partition("/")
    server = grpc.aio.server()
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()
