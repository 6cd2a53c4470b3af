"""Measures what a caller of Inspect costs those who call Encode.

    python bench/inspect_interference.py MODELS [--rounds 10] [--seconds 5] [--callers 16] [--tokens 128]

MODELS is a model repository; its first model is used. Two servers run, A and B. Callers of Encode always ask A. In each
round, in random order, for some seconds each: nobody inspects; one caller inspects on A without a pause; one does so on
B, which is an unrelated process that does the same work on the same CPUs. What Inspect costs beyond its CPU time is the
ratio of Encode's tokens/s between the last two, round by round, so that a slow moment of the machine hits both.

Callers run in processes of their own, but on the same CPUs as the servers.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from encserve_client import EncoderClient
from encserve_proto.v1 import encoder_pb2 as pb

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from real_server import real_server

PHASES = ("nobody", "same server", "other process")
# The lengths of what is encoded: as of a mixture of queries and passages.
MEDIAN_TOKENS, SIGMA, LONGEST = 30, 0.9, 256


def requests(vocab_size: int, count: int = 512) -> list[tuple[int, bytes]]:
    """Serialised requests of one sequence each, with their tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, count), 1, LONGEST).astype(int)
    made = []
    for length in lengths.tolist():
        ids = rng.integers(0, vocab_size, length).tolist()
        made.append((length, pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=ids))]).SerializeToString()))
    return made


def encode_for_ever(target: str, callers: int, vocab_size: int, pipe: Connection) -> None:
    """Calls Encode without a pause; whenever asked, tells the tokens so far."""

    async def main() -> None:
        tokens = 0
        work = requests(vocab_size)
        async with grpc.aio.insecure_channel(target) as channel:
            call: Any = channel.unary_unary("/encserve.v1.EncoderService/Encode")

            async def caller(rng: random.Random) -> None:
                nonlocal tokens
                while True:
                    count, data = rng.choice(work)
                    await call(data)
                    tokens += count

            tasks = [asyncio.create_task(caller(random.Random(i))) for i in range(callers)]
            loop = asyncio.get_running_loop()
            asked = asyncio.Queue[None]()
            loop.add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
            while not any(task.done() for task in tasks):
                await asked.get()
                pipe.send(tokens)
            await asyncio.gather(*tasks)

    asyncio.run(main())


def inspect_when_told(targets: dict[str, str], n_tokens: int, vocab_size: int, pipe: Connection) -> None:
    """Inspects without a pause on the server of the phase that it is told; tells how many it did."""
    ids = np.random.default_rng(1).integers(0, vocab_size, n_tokens)
    clients = {name: EncoderClient(target) for name, target in targets.items()}
    for client in clients.values():
        client.inspect(ids)  # the graph is loaded now
    pipe.send(0)
    phase, done = "nobody", 0
    while True:
        if phase not in clients or pipe.poll():
            phase = pipe.recv()
            pipe.send(done)
            done = 0
        if phase in clients:
            clients[phase].inspect(ids)
            done += 1


def measure(encoder: Connection, inspector: Connection, phase: str, seconds: float) -> tuple[float, float]:
    """Tokens/s and inspections/s of one phase."""
    inspector.send(phase)
    inspector.recv()
    time.sleep(0.5)  # what the phase before had queued
    encoder.send(None)
    before, began = encoder.recv(), time.perf_counter()
    time.sleep(seconds)
    encoder.send(None)
    after, elapsed = encoder.recv(), time.perf_counter() - began
    inspector.send("nobody")
    return (after - before) / elapsed, inspector.recv() / (elapsed + 0.5)


def main() -> None:
    """Runs the rounds and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of what is inspected")
    options = parser.parse_args()
    console = Console()
    spawn = multiprocessing.get_context("spawn")
    flags = ("--tune-batches",)
    with real_server(options.models, *flags) as a, real_server(options.models, *flags) as b:
        with EncoderClient(a.target) as client:
            info = client.model()
        encoder, far_encoder = spawn.Pipe()
        inspector, far_inspector = spawn.Pipe()
        targets = {"same server": a.target, "other process": b.target}
        processes = [
            spawn.Process(
                target=encode_for_ever, args=(a.target, options.callers, info.vocab_size, far_encoder), daemon=True
            ),
            spawn.Process(
                target=inspect_when_told, args=(targets, options.tokens, info.vocab_size, far_inspector), daemon=True
            ),
        ]
        for process in processes:
            process.start()
        inspector.recv()
        found: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
        for number in range(options.rounds):
            for phase in random.Random(number).sample(PHASES, len(PHASES)):
                found[phase].append(measure(encoder, inspector, phase, options.seconds))
            shown = ", ".join(f"{phase} {found[phase][-1][0]:,.0f}" for phase in PHASES)
            console.print(f"round {number + 1}: {shown} tokens/s")
        for process in processes:
            process.terminate()
    table = Table(box=None, pad_edge=False)
    for name in ("inspecting on", "Encode tokens/s", "inspections/s", "ratio to other process"):
        table.add_column(name, justify="right")
    for phase in PHASES:
        tokens, inspections = (statistics.median(column) for column in zip(*found[phase], strict=True))
        ratios = [mine[0] / other[0] for mine, other in zip(found[phase], found["other process"], strict=True)]
        table.add_row(phase, f"{tokens:,.0f}", f"{inspections:.1f}", f"{statistics.median(ratios):.3f}")
    console.print(f"{info.name}, {options.callers} callers of Encode, inspections of {options.tokens} tokens")
    console.print(table)


if __name__ == "__main__":
    main()
