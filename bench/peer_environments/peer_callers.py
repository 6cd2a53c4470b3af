"""Load generator for a peer: another inference server, infinity or Triton.

The generator runs in a separate process, in the peer's virtual environment. A request to infinity is an HTTP request
with one text. The reply has the vector in base64, the faster of infinity's two formats. A request to Triton is a gRPC
call with the ids of one sequence. All requests are built before the load starts. Replies under load are not parsed.
"""

import argparse
import asyncio
import base64
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lines import answer_lines, versions

Ask = Callable[[bytes], Awaitable[bytes]]


class Protocol(NamedTuple):
    """The requests and replies of a peer.

    Attributes:
        given: The field of the workload file with the data for the requests: "texts" or "ids".
        packages: The packages whose versions the report contains.
        request: Makes a request from one text or one list of ids.
        connect: Opens connections to an address and yields a function that makes one call.
        rows: Returns the array in a reply, (seq, d_model) or (1, d_model).
    """

    given: str
    packages: tuple[str, ...]
    request: Callable[[Any], bytes]
    connect: Callable[[str], AbstractAsyncContextManager[Ask]]
    rows: Callable[[bytes], Any]


def infinity_request(text: str) -> bytes:
    """Return a request of OpenAI's embeddings API."""
    return json.dumps({"model": "encoder", "input": [text], "encoding_format": "base64"}).encode()


@asynccontextmanager
async def infinity_connection(address: str) -> AsyncIterator[Ask]:
    """Yield a function that makes one call. Each caller gets a new connection."""
    import aiohttp

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"}, auto_decompress=False
    ) as http:

        async def ask(body: bytes) -> bytes:
            async with http.post(f"http://{address}/embeddings", data=body) as reply:
                reply.raise_for_status()
                content: bytes = await reply.read()
                return content

        yield ask


def infinity_rows(reply: bytes) -> Any:
    """Return the vector in a reply, (1, d_model)."""
    return np.frombuffer(base64.b64decode(json.loads(reply)["data"][0]["embedding"]), np.float32)[None]


def triton_request(ids: list[int]) -> bytes:
    """Return a ModelInferRequest of INT64 [1, seq]."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest(model_name="encoder")
    request.inputs.add(name="ids", datatype="INT64").shape.extend([1, len(ids)])
    request.outputs.add(name="rows")
    request.raw_input_contents.append(np.array(ids, np.int64).tobytes())
    message: bytes = request.SerializeToString()
    return message


@asynccontextmanager
async def triton_connection(address: str) -> AsyncIterator[Ask]:
    """Yield a function that makes one call. All callers share one channel."""
    import grpc

    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        await channel.channel_ready()
        ask: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        yield ask


def triton_rows(reply: bytes) -> Any:
    """Return the hidden states in a reply, (seq, d_model)."""
    from tritonclient.grpc.service_pb2 import ModelInferResponse

    response = ModelInferResponse.FromString(reply)
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)[0]


PROTOCOLS = {
    "infinity": Protocol(
        "texts",
        ("infinity-emb", "torch", "transformers", "optimum", "aiohttp"),
        infinity_request,
        infinity_connection,
        infinity_rows,
    ),
    "triton": Protocol("ids", ("tritonclient", "grpcio"), triton_request, triton_connection, triton_rows),
}


async def closed_loop(
    ask: Ask, requests: list[bytes], *, callers: int, warmup_seconds: float, seconds: float
) -> dict[str, Any]:
    """Run several callers. After each reply, a caller sends the next request.

    Returns:
        `answered`: (index of the request, seconds until the reply) for each reply after the warm-up and before the end.
    """
    order = itertools.cycle(range(len(requests)))  # all callers share this iterator
    begin = time.perf_counter() + warmup_seconds
    end = begin + seconds
    answered: list[tuple[int, float]] = []

    async def caller() -> None:
        while (sent := time.perf_counter()) < end:
            index = next(order)
            await ask(requests[index])
            if begin <= (done := time.perf_counter()) < end:
                answered.append((index, done - sent))

    await asyncio.gather(*(caller() for _ in range(callers)))
    return {"answered": answered}


def main() -> None:
    """Answer the commands "run" and "check" until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=sorted(PROTOCOLS), required=True)
    parser.add_argument("--address", required=True, metavar="HOST:PORT")
    parser.add_argument("--workload", type=Path, required=True)
    options = parser.parse_args()
    protocol = PROTOCOLS[options.peer]

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        requests = [protocol.request(item) for item in json.loads(options.workload.read_text())[protocol.given]]

        async def run(**settings: Any) -> dict[str, Any]:
            async with protocol.connect(options.address) as ask:
                return await closed_loop(ask, requests, **settings)

        async def check(indices: list[int], file: str) -> dict[str, Any]:
            async with protocol.connect(options.address) as ask:
                np.savez(file, *[protocol.rows(await ask(requests[index])) for index in indices])
            return {}

        handlers = {
            "run": lambda **settings: asyncio.run(run(**settings)),
            "check": lambda **settings: asyncio.run(check(**settings)),
        }
        return versions(*protocol.packages), handlers

    answer_lines(prepare)


if __name__ == "__main__":
    main()
