"""What `encserve bench` prints for people."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from encserve_cli.load.samples import PERCENTILES, LoadResult, percentile
from encserve_cli.load.server_view import ServerView
from encserve_cli.load.workload import Workload
from encserve_cli.render import make_table
from encserve_client import ModelInfo

_MIB = 2**20


def print_bench(settings: Any, info: ModelInfo, workload: Workload, results: Sequence[LoadResult]) -> None:
    """A row for each run: what callers saw, then what the server says; below, everything that is worth knowing."""
    console = Console(highlight=False)
    console.print(Text("latency in ms", "dim"))
    table = make_table()
    for name in (
        _run_heading(results),
        "seq/s",
        "tokens/s",
        *(f"p{it:g}" for it in PERCENTILES),
        "errors",
        "gen. CPUs",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for it in results:
        times = (_ms(it.latency_percentile_seconds(percent)) for percent in PERCENTILES)
        table.add_row(
            _run_name(it),
            f"{it.sequences_per_second:,.1f}",
            f"{it.tokens_per_second:,.0f}",
            *times,
            f"{sum(it.errors.values()):,}",
            f"{it.generator_cpu_seconds / it.seconds:.2f}" if it.seconds else "-",
        )
    console.print(table)
    _print_server(console, results)
    for line in _notes(settings, info, workload, results):
        console.print(Text(line, "dim"), soft_wrap=False)


def _print_server(console: Console, results: Sequence[LoadResult]) -> None:
    """The server's own view, of the runs that have one."""
    views = [(it, it.server) for it in results if it.server is not None]
    if not views:
        return
    columns: list[tuple[str, Callable[[ServerView], str]]] = [
        ("batch", lambda it: _number(it.batch_sequences, ".1f")),
        ("tokens", lambda it: _number(it.batch_tokens, ".0f")),
        ("padding", lambda it: _number(it.padding_fraction, ".1%")),
        ("tokenize", lambda it: _ms(it.tokenize_seconds)),
        ("queue", lambda it: _ms(it.queue_seconds)),
        ("compute", lambda it: _ms(it.compute_seconds)),
        ("encode", lambda it: _ms(it.encode_seconds)),
        ("CPUs", lambda it: "-" if it.cpu_seconds is None else f"{it.cpu_seconds / it.seconds:.2f}"),
        ("MiB", lambda it: "-" if it.resident_bytes is None else f"{it.resident_bytes / _MIB:.0f}"),
    ]
    console.print(Text("the server's own view: sequences and tokens of a batch, times in ms; all means", "dim"))
    if all(view.tokenize_seconds is None for _, view in views):
        columns = [it for it in columns if it[0] != "tokenize"]
    table = make_table()
    for name in (_run_heading(results), *(name for name, _ in columns)):
        table.add_column(name, justify="right", no_wrap=True)
    for result, view in views:
        table.add_row(_run_name(result), *(show(view) for _, show in columns))
    console.print(table)


def _notes(settings: Any, info: ModelInfo, workload: Workload, results: Sequence[LoadResult]) -> list[str]:
    wanted = f"pooling {settings.pooling}" if settings.pooling else "a row per token"
    many = settings.sequences_per_call
    lines = [
        f"model {info.name}, version {info.version}, fingerprint {info.fingerprint}",
        f"{'EncodeStream' if settings.stream else 'Encode'}, {many} sequence{'s' if many > 1 else ''} a call, "
        f"{wanted}, {settings.dtype}, {settings.seconds:g} s each",
        _source(workload),
    ]
    if workload.cut_sequences:
        lines.append(
            f"{workload.cut_sequences} of {workload.sequences} sequences were cut to the model's longest, "
            f"{info.max_sequence_tokens} tokens"
        )
    for it in results:
        name = f"{_run_heading(results)} {_run_name(it)}"
        if len(it.lateness_seconds):
            p99, most = (percentile(it.lateness_seconds, percent) for percent in (99, 100))
            lines.append(f"{name}: the generator sent calls late by {_ms(p99)} ms (p99), {_ms(most)} ms at most")
        if it.held_calls:
            lines.append(f"{name}: {it.held_calls:,} calls had to wait, because {it.concurrency} were out")
        if it.interrupted:
            lines.append(f"{name}: interrupted after {it.seconds:.1f} s")
        lines += [
            f"{name}: {count:,} x {status}: {it.error_examples.get(status, '')}" for status, count in it.errors.items()
        ]
        if len(it.error_latency_seconds):
            p50, p99 = (percentile(it.error_latency_seconds, percent) for percent in (50, 99))
            lines.append(f"{name}: errors came {_ms(p50)} ms after the call (p50), {_ms(p99)} ms (p99)")
        if it.server is not None:
            if _is_another(it, it.server, workload):
                lines.append(
                    f"{name}: the server ran {it.server.sequences:,} sequences, {it.sequences:,} were answered here: "
                    "others call it too, or the metrics are another server's"
                )
            lines += [f"{name}: the server refused {count:,}: {why}" for why, count in it.server.refused.items()]
    missing = dict.fromkeys(it.server_missing for it in results if it.server_missing)
    return [*lines, *(f"the server's own view is missing: {why}" for why in missing)]


def _is_another(result: LoadResult, view: ServerView, workload: Workload) -> bool:
    """Whether the server counts so differently that its view is not of this load alone.

    What is out when counting begins and ends makes a difference of its own.
    """
    slack = 0.2 * result.sequences + min(result.concurrency, 64) * workload.calls[0].sequences
    return abs(view.sequences - result.sequences) > slack


def _source(workload: Workload) -> str:
    if workload.mean_tokens is None:
        return f"{workload.sequences} texts of {workload.source}"
    what = "vectors" if workload.kind == "embeddings" else "ids"
    return (
        f"random {what}, lengths of {workload.source}: mean {workload.mean_tokens:.1f}, "
        f"longest {workload.longest_tokens} tokens"
    )


def _run_heading(results: Sequence[LoadResult]) -> str:
    return "calls/s" if results and results[0].mode == "open" else "callers"


def _run_name(result: LoadResult) -> str:
    return str(result.concurrency) if result.rate_per_second is None else f"{result.rate_per_second:g}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
