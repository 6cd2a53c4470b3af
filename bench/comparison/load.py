"""Callers of a server, in a process of their own, so that Python's lock is not shared with what is compared."""

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc

from comparison.rounds import Measurement
from comparison.workload import Sequence64
from encserve_proto.v1 import encoder_pb2 as pb

_OPTIONS = [("grpc.max_receive_message_length", -1)]
METHOD = "/encserve.v1.EncoderService/Encode"

Call = tuple[int, bytes]  # its tokens, and the serialised request


def make_text_calls(texts: Sequence[str], tokens: Sequence[int], kind: pb.OutputKind) -> list[Call]:
    """Serialises one request for each text; `tokens` are how many each of them has."""
    calls = []
    for text, count in zip(texts, tokens, strict=True):
        options = pb.EncodeOptions(outputs=[pb.OutputSpec(kind=kind)])
        request = pb.EncodeRequest(inputs=[pb.Input(text=text)], options=options)
        calls.append((count, request.SerializeToString()))
    return calls


def make_calls(groups: Sequence[Sequence[Sequence64]], kind: pb.OutputKind) -> list[Call]:
    """Serialises one request for each group of sequences."""
    calls = []
    for group in groups:
        inputs = [pb.Input(token_ids=pb.TokenIds(ids=sequence.tolist())) for sequence in group]
        options = pb.EncodeOptions(outputs=[pb.OutputSpec(kind=kind)])
        request = pb.EncodeRequest(inputs=inputs, options=options)
        calls.append((sum(map(len, group)), request.SerializeToString()))
    return calls


@dataclass(frozen=True, slots=True)
class LoadProcess:
    """The process that asks.

    Attributes:
        pid: Its process id.
        pipe: Where it is told what to ask.
    """

    pid: int
    pipe: Connection

    def ask(self, kind: str, *, callers: int, count: int) -> Measurement:
        """Makes `count` calls of a kind, `callers` at a time; from the first request sent to the last reply read."""
        self.pipe.send((kind, callers, count))
        try:
            measurement: Measurement = self.pipe.recv()
        except EOFError:
            raise RuntimeError("the process that asks the server has ended; its error is above") from None
        return measurement


@contextmanager
def load_process(target: str, kinds: dict[str, list[Call]], method: str = METHOD) -> Iterator[LoadProcess]:
    """Starts a process that asks the server at `target`; `kinds` are its calls by the name of their kind.

    `method` is what they call: encserve's, or that of another gRPC server.
    """
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    process = spawn.Process(target=_ask_when_told, args=(target, method, kinds, far), daemon=True)
    process.start()
    far.close()
    assert process.pid is not None  # noqa: S101 - it has been started
    try:
        yield LoadProcess(process.pid, near)
    finally:
        near.close()
        process.join(timeout=10)
        process.terminate()


def _ask_when_told(target: str, method: str, kinds: dict[str, list[Call]], pipe: Connection) -> None:
    with asyncio.Runner() as runner:
        while True:
            try:
                kind, callers, count = pipe.recv()
            except EOFError:  # nobody will ask any more
                return
            if callers == 1:
                pipe.send(one_caller(target, method, kinds[kind], count=count))
            else:
                pipe.send(runner.run(closed_loop(target, method, kinds[kind], callers=callers, count=count)))


def one_caller(target: str, method: str, calls: Sequence[Call], *, count: int) -> Measurement:
    """Makes `count` calls one after another, each blocking until its reply is there, as `EncoderClient` does."""
    latencies: list[tuple[int, float]] = []
    with grpc.insecure_channel(target, options=_OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        send: Any = channel.unary_unary(method)
        began = time.perf_counter()
        for number in range(count):
            tokens, request = calls[number % len(calls)]
            sent = time.perf_counter()
            send(request)
            latencies.append((tokens, time.perf_counter() - sent))
        seconds = time.perf_counter() - began
    return Measurement(sum(tokens for tokens, _ in latencies), seconds, latencies)


async def closed_loop(target: str, method: str, calls: Sequence[Call], *, callers: int, count: int) -> Measurement:
    """Makes `count` calls, beginning again where they end; each caller sends its next when it has the reply.

    Replies are read and not parsed.
    """
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        await channel.channel_ready()
        send: Any = channel.unary_unary(method)
        numbers = iter(range(count))  # shared by the callers
        latencies: list[tuple[int, float]] = []

        async def caller() -> None:
            for number in numbers:
                tokens, request = calls[number % len(calls)]
                sent = time.perf_counter()
                await send(request)
                latencies.append((tokens, time.perf_counter() - sent))

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        seconds = time.perf_counter() - began
    return Measurement(sum(tokens for tokens, _ in latencies), seconds, latencies)
