"""The progress of many inputs: a bar on a terminal, a line every 30 s in a log, or JSON for programs."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import click
from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

Clock = Callable[[], float]

_JSON_SECONDS = 1.0
_LOG_SECONDS = 30.0
_INTERRUPT_COLUMNS = 3  # columns kept free: the terminal prints ^C there, and the bar does not wrap


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job, or of a command that writes one file.

    Attributes:
        rows: The number of finished rows, earlier runs included. Encoded rows of unfinished parts count too.
        total_rows: The number of rows of the job; None if unknown.
        parts: The number of finished parts.
        rejected: The number of rejected rows.
        tokens: The number of tokens that this run computed, without padding.
        seconds: The duration of this run so far.
        rows_before: The number of rows from earlier runs.
    """

    rows: int
    total_rows: int | None
    parts: int
    rejected: int
    tokens: int
    seconds: float
    rows_before: int = 0

    @property
    def tokens_per_second(self) -> float:
        """The number of tokens per second in this run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        """The number of rows per second in this run."""
        return (self.rows - self.rows_before) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The time for the remaining rows at the same speed, in seconds; None if unknown."""
        if self.total_rows is None or not self.rows_per_second:
            return None
        return max(self.total_rows - self.rows, 0) / self.rows_per_second


OnProgress = Callable[[JobProgress], None]


class ProgressCounter:
    """Counts the work of a run, and reports the progress after each count. Any thread may call the methods.

    Attributes:
        progress: The progress at the last count.
    """

    def __init__(
        self,
        total_rows: int | None,
        on_progress: OnProgress | None,
        *,
        rows: int = 0,
        parts: int = 0,
        rejected: int = 0,
    ) -> None:
        """Begin a run. `rows`, `parts` and `rejected` count the work of earlier runs."""
        self.progress = JobProgress(rows, total_rows, parts, rejected, tokens=0, seconds=0.0, rows_before=rows)
        self._on_progress = on_progress
        self._lock = threading.Lock()  # held while reporting, so that progress is reported in the order of the counts
        self._began = time.monotonic()
        self._part_rows = rows
        self._batch_rows = 0

    def count_batch(self, rows: int, tokens: int) -> None:
        """Count encoded rows and their tokens. If the number of tokens is unknown, `tokens` is 0."""
        self._count(batch_rows=rows, tokens=tokens)

    def count_part(self, rows: int, rejected: int) -> JobProgress:
        """Count a written part, and return the progress."""
        return self._count(part_rows=rows, rejected=rejected, parts=1)

    def report(self) -> JobProgress:
        """Report the progress so far, and return the progress."""
        return self._count()

    def _count(
        self, *, batch_rows: int = 0, part_rows: int = 0, parts: int = 0, rejected: int = 0, tokens: int = 0
    ) -> JobProgress:
        with self._lock:
            self._batch_rows += batch_rows
            self._part_rows += part_rows
            before = self.progress
            self.progress = replace(
                before,
                rows=max(self._part_rows, before.rows_before + self._batch_rows),
                parts=before.parts + parts,
                rejected=before.rejected + rejected,
                tokens=before.tokens + tokens,
                seconds=time.monotonic() - self._began,
            )
            if self._on_progress is not None:
                self._on_progress(self.progress)
            return self.progress


class _BarConsole(Console):
    """A console without the last columns of the terminal.

    If the bar used these columns, the terminal's ^C would wrap the bar.
    """

    @property
    def options(self) -> ConsoleOptions:
        return super().options.update_width(self.width - _INTERRUPT_COLUMNS)


@contextmanager
def shown_progress(
    total_rows: int | None, unit: str, *, as_json: bool = False, clock: Clock = time.monotonic
) -> Iterator[OnProgress]:
    """Yield a function that shows progress. Any thread may call the function, at any time.

    Args:
        total_rows: The number of rows of the job; None if unknown.
        unit: The name of the inputs, such as "texts".
        as_json: Whether to write JSON to standard output; otherwise the progress goes to standard error.
        clock: Returns the time in seconds.
    """
    console = _BarConsole(stderr=True)
    if as_json:
        yield _every(_JSON_SECONDS, lambda it: click.echo(json.dumps({"event": "progress"} | as_record(it))), clock)
    elif console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, total_rows, unit) as show:
            yield show
    else:
        log = lambda it: click.echo(_line(it, unit), err=True)  # noqa: E731
        yield _every(_LOG_SECONDS, log, clock, first_at=clock() + _LOG_SECONDS)


def _every(seconds: float, show: OnProgress, clock: Clock, first_at: float = float("-inf")) -> OnProgress:
    """Return a function that shows progress at most once in `seconds`."""
    lock = threading.Lock()
    next_at = first_at

    def show_if_due(progress: JobProgress) -> None:
        nonlocal next_at
        with lock:
            if (now := clock()) >= next_at:
                next_at = now + seconds
                show(progress)

    return show_if_due


@contextmanager
def _bar(console: Console, total_rows: int | None, unit: str) -> Iterator[OnProgress]:
    """Yield a function that shows a bar. The bar gets the columns that the text leaves free."""
    columns = (BarColumn(None, table_column=Column(ratio=1)), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=total_rows)
        yield lambda it: bar.update(task, completed=it.rows, description=_line(it, unit))


def as_record(progress: JobProgress) -> dict[str, object]:
    """Return the progress as JSON values."""
    names = ("tokens_per_second", "rows_per_second", "seconds_left")
    return asdict(progress) | {name: getattr(progress, name) for name in names}


def _line(it: JobProgress, unit: str) -> str:
    """Return the progress on one line of at most 80 columns. Unknown numbers are left out."""
    total = "" if it.total_rows is None else f" of {it.total_rows:,}"
    facts = [f"{it.rows:,}{total} {unit}"]
    if it.rejected:
        facts.append(f"{it.rejected:,} rejected")
    if rate := it.rows_per_second:
        facts.append(f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.1f} {unit}/s")
    if it.seconds_left is not None:
        facts.append(f"{duration(it.seconds_left)} left")
    return ", ".join(facts)


def duration(seconds: float) -> str:
    """Format a duration: "0:00:07", or "2 days, 3:00:00"."""
    return str(timedelta(seconds=round(seconds)))
