"""Starts `encserve serve`, encodes a sentence, compares four sentences, prints latencies, and stops the server.

The server is a real process, and the calls go over gRPC. The latencies come from the server's metrics page.
"""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

BIN = Path(sys.executable).parent
SENTENCE = "I understand this"
SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the sunny window.",
    "Stock markets fell sharply on Monday.",
    "Shares dropped at the start of the week.",
]
STAGES = ["tokenize", "queue", "compute", "encode"]
console = Console()


@contextmanager
def server(model: str) -> Iterator[tuple[int, int]]:
    """Run a server until the end of the `with` block. Yield its gRPC port and its metrics port when it is ready."""
    command: list[str | Path] = [
        BIN / "encserve",
        "serve",
        model,
        "--grpc-port",
        "0",
        "--metrics-port",
        "0",
        "--http-port",
        "0",
    ]
    command += ["--log-format", "json", "--log-level", "info"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        try:
            serving = next((line for line in map(_shown, process.stderr) if line.get("message") == "serving"), None)
            if serving is None:
                raise click.ClickException(f"encserve serve did not start; its exit status is {process.wait()}")
            yield serving["grpc_port"], serving["metrics_port"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()  # empties the pipe, because a full pipe would block the server's last log lines
            status = process.wait(timeout=60)
    console.print(f"The server got SIGTERM, finished its work and ended with exit status {status}.")
    if status:
        raise click.ClickException(f"encserve serve did not stop cleanly: its exit status is {status}, not 0")


def _shown(line: str) -> dict[str, Any]:
    """Return a line of the server's log as an object. Print errors, and the stages of the first start."""
    if not line.startswith("{"):  # an error before the server starts its JSON log
        console.print(line.rstrip(), markup=False)
        return {}
    parsed: dict[str, Any] = json.loads(line)
    if "stage" in parsed or parsed["level"] == "ERROR":
        console.print(parsed.get("stage", parsed["message"]), markup=False)
    return parsed


def client(port: int, *arguments: str) -> None:
    """Print an `encserve` command and run it."""
    console.print(f"\n[bold]$ encserve {' '.join(repr(it) if ' ' in it else it for it in arguments)}[/]")
    sys.stdout.flush()
    subprocess.run([BIN / "encserve", "--target", f"127.0.0.1:{port}", *arguments], check=True)


def quantile_ms(buckets: list[tuple[float, float]], q: float) -> float:
    """Estimate a quantile in milliseconds by interpolation in a histogram, like Prometheus' histogram_quantile.

    Args:
        buckets: For each bucket: the upper bound in seconds, and the cumulative count.
        q: The quantile, from 0 to 1.
    """
    rank, low, below = q * buckets[-1][1], 0.0, 0.0
    for high, count in buckets:
        if count >= rank:
            if high == float("inf"):
                return low * 1000
            return (low + (high - low) * (rank - below) / (count - below)) * 1000
        low, below = high, count
    return low * 1000


def latency_table(port: int) -> Table:
    """Read the server's metrics page at `port`. Return a table with the latencies of each stage."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = next(family for family in families if family.name == "encserve_stage_seconds").samples
    table = Table(title="Latency by stage, from the server's metrics (ms)", box=box.SIMPLE, title_justify="left")
    for heading in ("stage", "count", "mean", "p50", "p99"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage in STAGES:
        of_stage = [sample for sample in samples if sample.labels["stage"] == stage]
        value = {sample.name.rpartition("_")[2]: sample.value for sample in of_stage}
        buckets = [(float(it.labels["le"]), it.value) for it in of_stage if it.name.endswith("_bucket")]
        figures = ["-", "-", "-"]
        if value["count"]:
            milliseconds = (1000 * value["sum"] / value["count"], *(quantile_ms(buckets, q) for q in (0.5, 0.99)))
            figures = [f"{figure:.2f}" for figure in milliseconds]
        table.add_row(stage, f"{value['count']:.0f}", *figures)
    return table


@click.command()
@click.argument("model")
def main(model: str) -> None:
    """Run the demo with a MODEL of `encserve serve`: encode and compare sentences, and print latencies."""
    with server(model) as (grpc_port, metrics_port):
        client(grpc_port, "models")
        client(grpc_port, "encode", SENTENCE)
        client(grpc_port, "similarity", *SENTENCES)
        console.print()
        console.print(latency_table(metrics_port))


if __name__ == "__main__":
    main()
