"""How cost grows: with the length of sequences, the size of batches, the number of callers, the threads and the load.

    python bench/scaling.py measure MODEL_REPOSITORY FILE [--only PART ...] [--rounds 3] [--seconds 5]
    python bench/scaling.py draw FILE FOLDER

`measure` starts servers, loads them with `encserve bench`'s generator, or for `load` and `overload` with one that takes
next to no CPU (`curves.light_load`), and writes every figure to FILE as JSON; a part that FILE has already is replaced
by what is measured now. `draw` makes the plots of docs/performance.md of it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from comparison.machine import describe_machine
from curves import measure as parts
from curves.front_end import by_sequences_per_call
from curves.measure import Bench
from curves.plots import draw as draw_figures

from encserve_server.system.cpus import usable_cpus

MEMORY_REQUESTS = (20_000, 200_000)
PARTS: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "sequence_tokens": parts.by_sequence_tokens,
    "batch_tokens": parts.by_batch_tokens,
    "callers": parts.by_callers,
    "threads": lambda bench: parts.by_threads(bench, usable_cpus()),
    "load": parts.by_load,
    "overload": parts.overload,
    "front_end": by_sequences_per_call,
    "memory": lambda bench: parts.memory(bench, MEMORY_REQUESTS),
    "memory_short": lambda bench: parts.memory(bench, MEMORY_REQUESTS, range(1, 17)),
}
LONG = ("memory", "memory_short")  # some 20 and 5 minutes with 2 CPUs; only where they are asked for by name

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """How cost grows, measured and drawn."""


@main.command()
@click.argument("model_repository", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="NAME or NAME@VERSION; the first one without it.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="A part; may be given several times.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(0.1), help="Of each measurement.")
@click.option("--seed", default=0, show_default=True)
def measure(
    model_repository: Path, file: Path, model: str | None, only: tuple[str, ...], rounds: int, seconds: float, seed: int
) -> None:
    """Measure."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in only or [it for it in PARTS if it not in LONG]:
        console.print(f"[bold]{name}[/]")
        bench = Bench(model_repository, model, rounds, seconds, seed, lambda line: console.print(f"  {line}"))
        found[name] = PARTS[name](bench)
        found.setdefault("machine", {})[name] = describe_machine() | {"rounds": rounds, "seconds": seconds}
        file.write_text(json.dumps(found, indent=1) + "\n")


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def draw(file: Path, folder: Path) -> None:
    """Draw."""
    for path in draw_figures(json.loads(file.read_text()), folder):
        console.print(str(path))


if __name__ == "__main__":
    main()
