"""Measures what a refused call costs the server, and what wrong keys take away from callers with right ones.

    python bench/refusals.py MODEL_REPOSITORY [--rounds 6] [--seconds 3] [--calls 2000]

The CPU time of a refusal is compared with that of the smallest grpc.aio server, which refuses and does nothing else;
both are asked by 8 callers on 4 connections, in turns. Then 32 callers with a right key ask for one short text each, as
fast as they can: in turns alone, beside 300 wrong keys a second from 4 other connections, and beside 300 wrong keys a
second that the smallest server refuses. The last shows what those who send wrong keys take of the machine's CPUs.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import grpc
from harness.rounds import spread
from real_server import real_server

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.callers.keys import digest_of, make_key

METHOD = "/encserve.v1.EncoderService/Encode"
REQUEST = pb.EncodeRequest(inputs=[pb.Input(text="a cat sat on the mat and looked at the dog")]).SerializeToString()
CONNECTIONS, REFUSED_CALLERS, CALLERS, WRONG_PER_SECOND = 4, 8, 32, 300
SMALLEST = """
import asyncio, grpc, uvloop

class Refusals(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(refuse)

async def refuse(request, context):
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusals(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

uvloop.run(main())
"""


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, of user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def call(target: str, key: str, callers: int, *, calls: int = 0, seconds: float = 0, rate: float = 0) -> int:
    """Calls so often, or for so long; how many calls were answered, or refused for their key."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target, options) for _ in range(CONNECTIONS)]
    ends_at, done = time.monotonic() + seconds, 0

    async def ask(place: int) -> None:
        nonlocal done
        rpc: Any = channels[place % CONNECTIONS].unary_unary(METHOD)
        due = time.monotonic() + place / (rate or 1)
        while (time.monotonic() < ends_at) if seconds else (done < calls):
            if rate:
                await asyncio.sleep(max(due - time.monotonic(), 0))
                due += callers / rate
            try:
                await rpc(REQUEST, metadata=(("authorization", f"Bearer {key}"),))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
            done += 1

    await asyncio.gather(*map(ask, range(callers)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return done


def cost_of_refusals(processes: dict[str, tuple[int, str]], rounds: int, calls: int) -> dict[str, float]:
    """CPU time of a refusal, in ms, by server: the median of the rounds, but for a first one."""
    found: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(rounds + 1):
        for name, (pid, target) in processes.items():
            began = cpu_seconds(pid)
            done = asyncio.run(call(target, "wrong", REFUSED_CALLERS, calls=calls))
            found[name].append((cpu_seconds(pid) - began) / done * 1000)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def throughput(target: str, elsewhere: str, key: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Answered calls a second of each round: alone, and beside wrong keys that this server, or another, refuses."""
    sides = {"alone": "", "beside_wrong_keys": target, "beside_wrong_keys_elsewhere": elsewhere}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            wrong = None
            if sides[name]:
                wrong = subprocess.Popen([sys.executable, __file__, "--wrong", sides[name], str(seconds + 2)])
                time.sleep(1)
            found[name].append(asyncio.run(call(target, key, CALLERS, seconds=seconds)) / seconds)
            if wrong is not None:
                wrong.wait()
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--calls", type=int, default=2000)
    chosen = parser.parse_args(arguments)
    key = make_key()
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "callers.toml"
        file.write_text(f'[[caller]]\nname = "bench"\nkey_sha256 = ["{digest_of(key).hex()}"]\n')
        process = subprocess.Popen([sys.executable, "-c", SMALLEST], stdout=subprocess.PIPE, text=True)
        smallest = stack.enter_context(process)
        stack.callback(smallest.terminate)
        assert smallest.stdout is not None  # noqa: S101 - a pipe
        port = int(smallest.stdout.readline())
        server = stack.enter_context(real_server(chosen.model_repository, "--callers", str(file)))
        processes = {"smallest": (smallest.pid, f"127.0.0.1:{port}"), "encserve": (server.process.pid, server.target)}
        cost = cost_of_refusals(processes, chosen.rounds, chosen.calls)
        rates = throughput(server.target, processes["smallest"][1], key, chosen.rounds, chosen.seconds)
    print(json.dumps({"refusal_cpu_ms": cost, "calls_per_second": rates}))
    print(f"CPU of a refusal, against the smallest server: {cost['encserve'] / cost['smallest']:.2f}")
    for name in list(rates)[1:]:
        its = spread([it / alone for it, alone in zip(rates[name], rates["alone"], strict=True)])
        print(f"throughput {name}, against alone: {its.median:.2f} [{its.low:.2f}, {its.high:.2f}]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--wrong"]:
        rate = WRONG_PER_SECOND
        asyncio.run(call(sys.argv[2], "wrong", REFUSED_CALLERS, seconds=float(sys.argv[3]), rate=rate))
    else:
        main()
