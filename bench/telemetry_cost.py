"""What metrics and traces cost: servers with and without them, asked in turns.

    python bench/telemetry_cost.py MODELS [--model NAME] [--rounds 4] [--sequences 600] [--json FILE]
    python bench/telemetry_cost.py --engine fake [--rounds 4] [--sequences 4000]

Each side is a whole server in a process of its own, the same in everything but what it tells:

    neither     no metrics, no traces
    metrics     the server's metrics
    unsampled   metrics, and tracing with a ratio of 0
    both        metrics, and every request traced, its spans sent to a receiver that throws them away

64 callers ask for the rows of single sequences whose lengths are those of real texts. Rounds are interleaved, in random
order; what is reported are ratios of throughput to `neither`, round by round, and the server's CPU time for a call.
With `--engine fake` the model takes no time: then the CPU time shows what a call costs, the throughput what it costs at
most. The receiver and the callers run on the same CPUs, so what they take is part of the cost.

A server without metrics is none that anybody could want, so there is no setting for it: it is given an object in their
place that takes every call and does nothing.
"""

import argparse
import asyncio
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from comparison.child import serving
from comparison.load import load_process
from comparison.machine import OtherWork, cpu_seconds, describe_machine, load_average
from comparison.rounds import Measurement, Patience, Side, measure, ratios, spread
from comparison.sides import calls_of
from comparison.workload import LENGTHS, read_workload

CALLERS = 64
WANTED = 0.97  # of the throughput without
NEITHER, METRICS, UNSAMPLED, BOTH = "neither", "metrics", "unsampled", "both"
SIDES = (NEITHER, METRICS, UNSAMPLED, BOTH)
# Made for no engine that computes: of those only the ids and lengths matter.
_FAKE = {"vocab_size": 1000, "longest": 32}

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


class Nothing:
    """Takes every call, has every attribute, and does nothing."""

    def __getattr__(self, name: str) -> "Nothing":
        found = Nothing()
        self.__dict__[name] = found  # the next time it is found at once
        return found

    def __iter__(self) -> "Iterator[Nothing]":
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> "Nothing":
        """Gives itself, so that what is asked of a result is there too."""
        return self


@dataclass
class Server:
    """One side's server, and what it computed for each round's calls.

    Attributes:
        target: Its address.
        pid: Its process.
        cpu_seconds: For a call, by round.
    """

    target: str
    pid: int
    cpu_seconds: list[float] = field(default_factory=list)


def serve(pipe: Connection, *, side: str, models: Path | None, model: str | None, endpoint: str) -> None:
    """Runs a server; without `models` one whose engine takes no time."""
    from encserve_server import app as app_module
    from encserve_server.settings import Settings

    if side == NEITHER:
        setattr(app_module, "Metrics", lambda registry: Nothing())  # noqa: B010 - not exported
    traces: dict[str, Any] = {}
    if side in (UNSAMPLED, BOTH):
        traces = {"trace_endpoint": endpoint, "trace_sample_ratio": 1.0 if side == BOTH else 0.0}

    async def run() -> None:
        if models is None:
            from fake_server import start_fake_server

            app = (await start_fake_server(Path(tempfile.mkdtemp()), **traces)).app
        else:
            ports: dict[str, Any] = {"grpc_port": 0, "metrics_port": 0}
            chosen = (model,) if model else ()
            settings = Settings(model_repository=models, model=chosen, device="cpu", **ports, **traces)
            app = app_module.App(settings)
            await app.start()
        pipe.send(Server(f"127.0.0.1:{app.grpc_port}", os.getpid()))
        await asyncio.Event().wait()

    uvloop.run(run())


def receive(pipe: Connection) -> None:
    """Runs an OTLP receiver that throws away what it is sent."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    export: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
    pipe.send((f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", os.getpid()))
    server.start()
    server.wait_for_termination()


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="?", help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    parser.add_argument("--engine", choices=("real", "fake"), default="real")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, help=f"sides; {NEITHER} is always one")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS", help="as for compare.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")
    options = parser.parse_args()
    if (options.engine == "real") != (options.models is not None):
        parser.error("give a model repository, or --engine fake")
    return options


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Starts everything, runs the rounds, and gives every figure."""
    endpoint, receiver_pid = stack.enter_context(serving(receive))
    servers: dict[str, Server] = {}
    loads = {}
    workload = None
    for side in (it for it in SIDES if it == NEITHER or it in options.only):
        start = functools.partial(serve, side=side, models=options.models, model=options.model, endpoint=endpoint)
        servers[side] = stack.enter_context(serving(start))
        if workload is None:
            kind = _FAKE if options.engine == "fake" else _sizes(servers[side].target)
            workload = read_workload(LENGTHS, count=options.sequences, seed=options.seed, **kind)
        loads[side] = stack.enter_context(load_process(servers[side].target, calls_of(workload)))
    pids = (os.getpid(), receiver_pid, *(it.pid for it in servers.values()), *(it.pid for it in loads.values()))

    def run(side: str) -> Measurement:
        server = servers[side]
        began = cpu_seconds([server.pid])
        found = loads[side].ask("tokens", callers=CALLERS, count=options.sequences)
        server.cpu_seconds.append((cpu_seconds([server.pid]) - began) / options.sequences)
        return found

    for side in servers:
        run(side)  # memory is taken now
        servers[side].cpu_seconds.clear()
    sides = [Side(name, name, functools.partial(run, name)) for name in servers]
    patience = Patience(options.patience, lambda: OtherWork(pids).share)
    found = measure(sides, options.rounds, options.seed, show_round, patience)
    return {
        "machine": describe_machine(),
        "load_average": load_average(),
        "callers": CALLERS,
        "engine": options.engine,
        "sides": {
            name: {
                "tokens_per_second": [it.tokens_per_second for it in found[name]],
                "ratio_to_neither": ratios(found[name], found[NEITHER]),
                "cpu_seconds_per_call": servers[name].cpu_seconds,
                "others": [it.others for it in found[name]],
            }
            for name in servers
        },
    }


def _sizes(target: str) -> dict[str, int]:
    from encserve_client import EncoderClient

    with EncoderClient(target) as client:
        info = client.model()
    return {"vocab_size": info.vocab_size, "longest": info.max_sequence_tokens}


def show_round(number: int, found: Mapping[str, Measurement]) -> None:
    """Says how a round went."""
    base = found[NEITHER].tokens_per_second
    shown = ", ".join(f"{name} {it.tokens_per_second / base:.3f}" for name, it in found.items() if name != NEITHER)
    console.print(f"round {number + 1}: {NEITHER} {base:,.0f} tokens/s; {shown}")


def show(report: Mapping[str, Any]) -> None:
    """Prints the medians with their quartiles."""
    table = Table("side", "tokens/s", f"ratio to {NEITHER}", "CPU of the server for a call, ms", "most used by others")
    for name, side in report["sides"].items():
        table.add_row(
            name,
            f"{spread(side['tokens_per_second']).median:,.0f}",
            "" if name == NEITHER else _shown(side["ratio_to_neither"], 1),
            _shown(side["cpu_seconds_per_call"], 1000),
            f"{max(it or 0 for it in side['others']):.0%}",
        )
    console.print(table)
    both = report["sides"].get(BOTH)
    if both and report["engine"] == "real":
        median = spread(both["ratio_to_neither"]).median
        console.print(f"{BOTH}: {median:.3f} of {NEITHER}; wanted {WANTED}: {'met' if median >= WANTED else 'NOT met'}")


def _shown(values: Sequence[float], factor: float) -> str:
    found = spread(values)
    return f"{found.median * factor:.3f} ({found.low * factor:.3f} … {found.high * factor:.3f})"


def main() -> None:
    """Runs the comparison, prints it, and writes it down if asked."""
    options = read_arguments()
    with ExitStack() as stack:
        report = compare(options, stack)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
