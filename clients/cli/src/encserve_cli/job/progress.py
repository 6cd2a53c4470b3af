"""The progress of a job: a bar on a terminal, a line every 30 s in a log, or JSON for programs."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from encserve_cli.job.run import JobProgress, OnProgress

Clock = Callable[[], float]

_BAR_SECONDS = 0.1
_JSON_SECONDS = 1.0
_LOG_SECONDS = 30.0


@contextmanager
def shown_progress(total_rows: int | None, *, as_json: bool, clock: Clock = time.monotonic) -> Iterator[OnProgress]:
    """Give a function that shows progress. Any thread may call the function, at any rate.

    Args:
        total_rows: The rows of the job; None if they are not known.
        as_json: Whether to write JSON to standard output; otherwise the progress goes to standard error.
        clock: Tells the time in seconds.
    """
    console = Console(stderr=True)
    if as_json:
        yield _every(_JSON_SECONDS, lambda it: click.echo(json.dumps({"event": "progress"} | as_record(it))), clock)
    elif console.is_terminal:
        with _bar(console, total_rows) as show:
            yield _every(_BAR_SECONDS, show, clock)
    else:
        yield _every(_LOG_SECONDS, lambda it: click.echo(_line(it), err=True), clock, first_at=clock() + _LOG_SECONDS)


def _every(seconds: float, show: OnProgress, clock: Clock, first_at: float = float("-inf")) -> OnProgress:
    """Return a function that shows progress at most once in so many seconds."""
    lock = threading.Lock()
    next_at = first_at

    def told(progress: JobProgress) -> None:
        nonlocal next_at
        with lock:
            if (now := clock()) >= next_at:
                next_at = now + seconds
                show(progress)

    return told


@contextmanager
def _bar(console: Console, total_rows: int | None) -> Iterator[OnProgress]:
    columns = (MofNCompleteColumn(), TextColumn("rows"), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total_rows)
        yield lambda it: bar.update(task, completed=it.rows, description=", ".join(_facts(it)))


def as_record(progress: JobProgress) -> dict[str, object]:
    """Return the progress as JSON values."""
    return asdict(progress) | {"tokens_per_second": progress.tokens_per_second}


def _line(it: JobProgress) -> str:
    total = "" if it.total_rows is None else f" of {it.total_rows:,}"
    done = f"{it.rows:,}{total} rows, {it.parts:,} parts"
    rejected = [f"{it.rejected:,} rejected"] if it.rejected else []
    return ", ".join([done, *rejected, *_facts(it)])


def _facts(it: JobProgress) -> list[str]:
    """Return the known ones of the speed, the padding and the time left."""
    facts = [f"{it.tokens_per_second:,.0f} tokens/s"] if it.tokens else []
    facts += [] if it.padding is None else [f"{it.padding:.1%} padding"]
    return facts + ([] if it.seconds_left is None else [f"{duration(it.seconds_left)} left"])


def duration(seconds: float) -> str:
    """Return a time for people: "0:00:07", or "2 days, 3:00:00"."""
    return str(timedelta(seconds=round(seconds)))
