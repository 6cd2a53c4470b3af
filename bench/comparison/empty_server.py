"""A gRPC server that computes nothing, in a process of its own: what a call costs before anybody has done anything."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from comparison.child import serving
from comparison.load import METHOD, Call
from comparison.workload import Sequence64

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
    """Starts it on a free loopback port and gives its target. It has the event loop and the options of encserve."""
    with serving(_serve) as port:
        yield f"127.0.0.1:{port}"


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        service, _, method = METHOD.strip("/").partition("/")
        server = grpc.aio.server()
        handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(_answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


async def _answer(request: bytes, context: Any) -> bytes:
    del context
    return bytes(int.from_bytes(request[:_LENGTH_BYTES], "little"))
