"""What Ray costs a job: how it grows with the actors, what the driver keeps, and the time against the plain command.

    python bench/ray_scaling.py scaling [--actors 1,4,16] [--seconds 2] [--parts 12]
    python bench/ray_scaling.py memory [--parts 3000]
    python bench/ray_scaling.py overhead BUNDLE [--rounds 5] [--threads 2] [--parts 12] [--rows 400]

Each starts a Ray cluster on this machine, without a dashboard, which is not part of what is timed. `scaling` has a
model that sleeps for some seconds a part, so that actors need no CPU; the time counts from when all actors are up, and
1.0 is a job that takes the actors' sleep and nothing else. `memory` has a model that does nothing. `overhead` embeds
the same rows with one actor and in this process, in turn, with as many threads; the time counts from when the model is
loaded.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from ray_sources import FakeSource, OnRay, SmallCluster

from encserve_cli.job.api import RayOptions
from encserve_cli.job.job import EmbedJob, Source
from encserve_cli.job.local import EngineOptions, LocalSource
from encserve_cli.job.plan import MakeOptions
from encserve_cli.job.ray import RaySource
from encserve_cli.job.run import JobProgress, JobSummary
from encserve_cli.job.types import PartLimits, ReadOptions
from encserve_cli.load import real_text_lengths, sample_lengths

SUPPORT = Path(__file__).parent.parent / "tests/support"
MIB = 1024 * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    scaling = commands.add_parser("scaling")
    scaling.add_argument("--actors", type=lambda text: [int(it) for it in text.split(",")], default=[1, 4, 16])
    scaling.add_argument("--seconds", type=float, default=2.0, help="of sleep for a part")
    scaling.add_argument("--parts", type=int, default=12, help="of each actor")
    memory = commands.add_parser("memory")
    memory.add_argument("--parts", type=int, default=3000)
    overhead = commands.add_parser("overhead")
    overhead.add_argument("bundle", type=Path)
    overhead.add_argument("--rounds", type=int, default=5)
    overhead.add_argument("--threads", type=int, default=2)
    overhead.add_argument("--parts", type=int, default=12)
    overhead.add_argument("--rows", type=int, default=400, help="of a part")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        {"scaling": _scaling, "memory": _memory, "overhead": _overhead}[options.command](options, Path(folder))


@contextmanager
def _cluster(cpus: int) -> Iterator[str]:
    """The address of a cluster of one node."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(SUPPORT)}
    with closing(SmallCluster(1, cpus)) as cluster:
        yield cluster.address


def _corpus(folder: Path, texts: Sequence[str]) -> str:
    path = folder / "texts.txt"
    path.write_text("".join(f"{it}\n" for it in texts))
    return str(path)


def _run(
    corpus: str, output: Path, source: Source, rows: int, on_progress: Callable[[JobProgress], None] | None = None
) -> JobSummary:
    job = EmbedJob(
        [corpus], str(output), source, read=ReadOptions(), make=MakeOptions(), limits=PartLimits(max_rows=rows)
    )
    with job:
        return job.run(on_progress=on_progress)


def _scaling(options: argparse.Namespace, folder: Path) -> None:
    with _cluster(max(options.actors)) as address:
        for actors in options.actors:
            parts = actors * options.parts
            corpus = _corpus(folder, [f"text {i}" for i in range(parts)])
            up = folder / f"up-{actors}"
            up.mkdir()
            source = FakeSource(options.seconds, (up, actors))
            _run(corpus, folder / f"out-{actors}", OnRay(source, RayOptions(address, actors)), 1)
            began = max(it.stat().st_mtime for it in up.iterdir())
            ended = max(it.stat().st_mtime for it in (folder / f"out-{actors}").glob("part-*"))
            ideal = options.parts * options.seconds
            print(f"{actors:3} actors: {parts} parts in {ended - began:.1f} s, {ideal / (ended - began):.3f} of linear")


def _memory(options: argparse.Namespace, folder: Path) -> None:
    seen: dict[int, int] = {}  # bytes, by the parts that are done

    def on_progress(progress: JobProgress) -> None:
        if progress.parts % 100 == 0 and progress.parts not in seen:
            seen[progress.parts] = _own_bytes()

    with _cluster(2) as address:
        corpus = _corpus(folder, [f"text {i}" for i in range(options.parts)])
        began = time.perf_counter()
        _run(corpus, folder / "out", OnRay(FakeSource(), RayOptions(address)), 1, on_progress)
        seconds = time.perf_counter() - began
    first, last = min(it for it in seen if it >= options.parts // 4), max(seen)
    grown = (seen[last] - seen[first]) / MIB
    print(
        f"the driver held {seen[first] / MIB:.1f} MiB after {first} parts and {seen[last] / MIB:.1f} MiB after {last}: "
        f"{1024 * grown / (last - first):+.2f} KiB a part; {options.parts / seconds:.0f} parts/s"
    )


def _own_bytes() -> int:
    """The memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _overhead(options: argparse.Namespace, folder: Path) -> None:
    lengths = sample_lengths(real_text_lengths(), options.parts * options.rows, seed=0)
    corpus = _corpus(folder, [" ".join(["word"] * max(1, int(it) - 2)) for it in lengths])
    engine = EngineOptions(intra_op_threads=options.threads, parallel_batches=options.threads, max_batch_tokens=2048)
    with _cluster(options.threads) as address:
        ray_options = RayOptions(address, 1, options.threads)
        sides: dict[str, Source] = {
            "plain": LocalSource(options.bundle, engine),
            "on Ray": RaySource(str(options.bundle), engine, ray_options),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name, source in sides.items():
                summary = _run(corpus, folder / f"{name}-{number}", source, options.rows)
                seconds[name].append(summary.seconds)
    ratios = [after / before for before, after in zip(seconds["plain"], seconds["on Ray"], strict=True)]
    for name, its in seconds.items():
        print(f"{name:6}: {statistics.median(its):.2f} s, the median of {', '.join(f'{it:.2f}' for it in its)}")
    print(f"Ray takes {statistics.median(ratios):.3f} of the time, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
