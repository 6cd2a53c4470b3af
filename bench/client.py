"""Measures how many short texts a second the Python client sends and receives. The server computes nothing.

    python bench/client.py [--texts 30000] [--width 384] [--rounds 7] [--against CHECKOUT] [--only METHOD ...]
                           [--json FILE]

Each round runs `embed` and `stream` of both clients once, in random order. With --against, the client of another
checkout runs in the same rounds. Figures are medians over rounds. Ratios are computed within a round.

With --cpu, a rate is the number of texts divided by the client's CPU time, not by the elapsed time. If other processes
use the machine, use --cpu and compare the fastest rounds.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from harness.machine import describe_run, write_report

from encserve_client import AsyncEncoderClient, EncoderClient
from encserve_proto.v1 import encoder_pb2 as pb

SERVICE = "encserve.v1.EncoderService"
HERE = Path(__file__).parent.parent
PACKAGES = ("proto/src", "clients/python/src")


async def serve(width: int, started: Connection) -> None:
    """Serve a model with pooled vectors of `width` zeros, and send the port through `started`."""

    @cache
    def response(n_inputs: int) -> bytes:
        tensor = pb.RaggedTensor(
            kind=pb.OUTPUT_KIND_MEAN,
            data_type=pb.DATA_TYPE_FLOAT32,
            width=width,
            lengths=[1] * n_inputs,
            data=np.zeros((n_inputs, width), "<f4").tobytes(),
        )
        sequences = [pb.SequenceInfo()] * n_inputs
        return pb.EncodeResponse(outputs=[tensor], sequences=sequences, fingerprint="f").SerializeToString()

    async def encode(request: bytes, context: Any) -> bytes:
        return response(len(pb.EncodeRequest.FromString(request).inputs))

    async def get_model(request: bytes, context: Any) -> bytes:
        model = pb.ModelInfo(
            name="m",
            fingerprint="f",
            d_model=width,
            vector_width=width,
            max_sequence_tokens=512,
            has_tokenizer=True,
            pooling=pb.OUTPUT_KIND_MEAN,
            input_kind=pb.INPUT_KIND_TOKEN_IDS,
        )
        return pb.GetModelResponse(model=model).SerializeToString()

    server = grpc.aio.server()
    methods: dict[str, Any] = {"Encode": encode, "GetModel": get_model}
    handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(it) for name, it in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    started.send(port)
    await server.wait_for_termination()


def run_server(width: int, started: Connection) -> None:
    """Run the server until the process ends. A new process runs this function."""
    asyncio.run(serve(width, started))


@contextmanager
def server_process(width: int) -> Iterator[str]:
    """Run the server in a process until the end of the `with` block. Yield the server's address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=(width, theirs), daemon=True)
    process.start()
    try:
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def embed(target: str, texts: Sequence[str]) -> float:
    """Return the seconds of `embed`."""
    with EncoderClient(target) as client:
        client.embed(texts[:1])
        began = time.perf_counter()
        assert len(client.embed(texts)) == len(texts)  # noqa: S101 - a wrong measurement must fail
        return time.perf_counter() - began


def stream(target: str, texts: Sequence[str]) -> float:
    """Return the seconds of `stream`."""
    with EncoderClient(target) as client:
        client.embed(texts[:1])
        began = time.perf_counter()
        assert sum(1 for _ in client.stream(texts)) == len(texts)  # noqa: S101
        return time.perf_counter() - began


def async_embed(target: str, texts: Sequence[str]) -> float:
    """Return the seconds of `embed` of the asyncio client."""

    async def run() -> float:
        async with AsyncEncoderClient(target) as client:
            await client.embed(texts[:1])
            began = time.perf_counter()
            assert len(await client.embed(texts)) == len(texts)  # noqa: S101
            return time.perf_counter() - began

    return asyncio.run(run())


def async_stream(target: str, texts: Sequence[str]) -> float:
    """Return the seconds of `stream` of the asyncio client, for a list."""
    return asyncio.run(_async_stream(target, texts, texts))


def async_stream_of_async_inputs(target: str, texts: Sequence[str]) -> float:
    """Return the seconds of `stream` of the asyncio client, for an async iterable."""

    async def inputs() -> AsyncIterator[str]:
        for text in texts:
            yield text

    return asyncio.run(_async_stream(target, texts, inputs()))


async def _async_stream(target: str, texts: Sequence[str], inputs: Any) -> float:
    async with AsyncEncoderClient(target) as client:
        await client.embed(texts[:1])
        began = time.perf_counter()
        count = 0
        async for _ in client.stream(inputs):
            count += 1
        assert count == len(texts)  # noqa: S101
        return time.perf_counter() - began


METHODS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "embed": embed,
    "stream": stream,
    "async embed": async_embed,
    "async stream": async_stream,
    "async stream, async inputs": async_stream_of_async_inputs,
}


def work(target: str, n_texts: int) -> None:
    """Read names of methods from standard input. Run each method, and write its elapsed seconds and CPU seconds."""
    texts = [f"short text {index}" for index in range(n_texts)]
    for line in sys.stdin:
        began = time.process_time()
        seconds = METHODS[line.strip()](target, texts)
        print(seconds, time.process_time() - began, flush=True)


class Worker:
    """A process that measures the client of one checkout."""

    def __init__(self, checkout: Path, target: str, n_texts: int) -> None:
        path = ":".join(str(checkout / package) for package in PACKAGES)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", target, "--texts", str(n_texts)],
            env={"PYTHONPATH": path, "PATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, method: str, *, cpu: bool) -> float:
        """Run a method. Return the elapsed seconds, or the CPU seconds if `cpu` is true."""
        assert self._process.stdin is not None  # noqa: S101 - stdin and stdout are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(f"{method}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline().split()[cpu])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Return the texts per second of each method of each checkout, one number for each round."""
    checkouts = {"here": HERE} | ({} if options.against is None else {"against": options.against})
    rates: dict[tuple[str, str], list[float]] = {(side, method): [] for method in options.only for side in checkouts}
    with ExitStack() as stack:
        target = stack.enter_context(server_process(options.width))
        workers = {side: Worker(checkout, target, options.texts) for side, checkout in checkouts.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        for number in range(options.rounds + 1):
            for side, method in random.sample(list(rates), len(rates)):
                rate = options.texts / workers[side].seconds(method, cpu=options.cpu)
                if number:  # the first round warms up
                    rates[side, method].append(rate)
    return rates


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the figures, and write the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=30_000)
    parser.add_argument("--width", type=int, default=384, help="numbers in a vector")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="the methods to measure")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout, measured in the same rounds"
    )
    parser.add_argument("--cpu", action="store_true", help="divide the number of texts by the client's CPU time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--worker", metavar="TARGET", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.texts)
        return
    rates = compare(options)
    for (side, method), found in rates.items():
        print(f"{side:8}{method:28}{statistics.median(found):10,.0f} texts/s ({min(found):,.0f} to {max(found):,.0f})")
        if side == "against":
            ratios = [ours / theirs for ours, theirs in zip(rates["here", method], found, strict=True)]
            print(f"{'':8}{method:28}{statistics.median(ratios):10.2f} here / against")
    ours = [rates["here", method] for method in options.only if method != "async stream, async inputs"]
    for name, figure in (("median", statistics.median), ("fastest", max)):
        figures = [figure(found) for found in ours]
        print(f"slowest / fastest method, without async inputs, {name} rounds: {min(figures) / max(figures):.2f}")
    if options.json:
        entries = [{"checkout": side, "method": method, "texts_per_second": it} for (side, method), it in rates.items()]
        report = describe_run() | {"texts": options.texts, "rounds": options.rounds, "methods": entries}
        write_report(options.json, report)


if __name__ == "__main__":
    main()
