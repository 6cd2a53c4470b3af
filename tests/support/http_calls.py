"""Functions that call the HTTP routes of a fake server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
from fake_server import FakeServer

from encserve_proto.v1 import encoder_pb2 as pb


def connect(server: FakeServer) -> httpx.AsyncClient:
    """Return a client for a server's HTTP port.

    Proxy settings and certificates are slow to read, so the client does not read them.
    """
    url = f"http://127.0.0.1:{server.app.http_port}"
    return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=30)  # noqa: S501


async def post(server: FakeServer, path: str, body: Any, **options: Any) -> httpx.Response:
    """Send a POST request with an object as JSON, or with raw bytes. `options` are options of httpx."""
    async with connect(server) as client:
        if isinstance(body, bytes):
            return await client.post(path, content=body, **options)
        return await client.post(path, json=body, **options)


async def get(server: FakeServer, path: str) -> httpx.Response:
    """Send a GET request for a path."""
    async with connect(server) as client:
        return await client.get(path)


@contextlib.asynccontextmanager
async def raw(server: FakeServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a plain TCP connection, to send bytes that no HTTP library sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def vectors_over_grpc(
    server: FakeServer,
    *inputs: Any,
    kind: pb.OutputKind = pb.OUTPUT_KIND_MODEL_POOLING,
    l2_normalize: bool = True,
    dimensions: int = 0,
    data_type: pb.DataType = pb.DATA_TYPE_FLOAT32,
) -> Any:
    """Call Encode with these inputs. Return the vectors of the output, in the shape (vectors, width).

    The server truncates long inputs.
    """
    outputs = [pb.OutputSpec(kind=kind, l2_normalize=l2_normalize, dimensions=dimensions)]
    options = pb.EncodeOptions(outputs=outputs, truncation=pb.TRUNCATION_END, data_type=data_type)
    (tensor,) = (await server.encode(*inputs, options=options)).outputs
    dtype = {pb.DATA_TYPE_INT8: "i1", pb.DATA_TYPE_BINARY: "u1"}.get(data_type, "<f4")
    return np.frombuffer(tensor.data, dtype).reshape(sum(tensor.lengths), -1)
