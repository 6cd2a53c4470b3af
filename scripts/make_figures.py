"""Writes the measured figures of docs/measurements into the pages. `make figures` runs this script.

A page encloses a part with figures in two comments, `<!-- figures: NAME -->` and `<!-- end of figures -->`. The script
replaces the text between the comments. A file in docs/measurements is the output of a program in bench/ with --json.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
MEASUREMENTS = ROOT / "docs/measurements"
_PART = re.compile(r"(?P<begin><!-- figures: (?P<name>[\w-]+) -->)(?P<text>.*?)(?P<end><!-- end of figures -->)", re.S)
# The programs in the chart: the key of each program in the reports, and its label in the chart.
_CHART = {
    "encserve-64": "encserve",
    "triton": "Triton",
    "sentence-transformers": "sentence-transformers",
    "infinity": "infinity",
}
_OURS = "encserve-64"  # the side with 64 callers, one sequence a call, and a vector for each token
_CALLERS = (1, 4, 16, 64, 256, 1024)
_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
_ROUTES = {
    "transformers": "`hf`",
    "onnx": "`hf --via onnx`",
    "checkpoint": "`checkpoint`",
    "module": "`export_module`",
}

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of a page.

    Attributes:
        files: The names of the files in docs/measurements that the part needs, without `.json`.
        text: Makes the text from the reports of these files.
        is_inline: Whether the text is inside a sentence. Otherwise blank lines surround the text.
    """

    files: Sequence[str]
    text: Callable[..., str]
    is_inline: bool = False


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def with_quartiles(spread: Mapping[str, float] | None, digits: int = 2) -> str:
    """Return a median with its quartiles in brackets, or "" if `spread` is None."""
    if spread is None:
        return ""
    return f"{spread['median']:.{digits}f} [{spread['low']:.{digits}f}–{spread['high']:.{digits}f}]"


def milliseconds(seconds: float) -> str:
    """Return a duration in ms. A duration below 10 ms has one digit after the decimal point."""
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:,.0f}"


def describe(run: Report, first: str = "") -> str:
    """Return the caption of a table: the sentence `first`, the commit, the date, the machine and the command."""
    caption = f"{first} Measured on {run['date']} at {run['commit']}.".strip()
    if machine := run.get("machine"):
        flags = ", ".join(f"`{flag}`" for flag in machine["flags"])
        caption += f"\nMachine: {machine['cpus']} CPUs of {machine['cpu']} ({machine['family']}) with {flags}."
    return f"{caption}\n\n```\n{run['command']}\n```"


def versions_of(packages: Mapping[str, str]) -> str:
    """Return the names and versions of packages in a sentence."""
    return ", ".join(f"`{name} {version}`" for name, version in packages.items())


def sides(report: Report, ours: str = "", ours_name: str = "") -> str:
    """Return the table of a comparison.

    Each row is a side: one way to run the workload, for example a program. The ceiling is the side that runs only the
    inference engine, with batches sorted by length. If `ours` names a side, one column has the ratio of `ours` to the
    side of each row.
    """
    found = report["sides"].values()
    has_p50 = any(side["p50_seconds"] for side in found)
    head = ["side", "tokens/s", "ratio to the ceiling"]
    head += ["p50 ms"] * has_p50 + [f"{ours_name}, relative to this side"] * bool(ours)
    rows = []
    for name, side in report["sides"].items():
        row = [side["label"], f"{median(side['tokens_per_second']):,.0f}", with_quartiles(side["ratio_to_ceiling"])]
        p50 = side["p50_seconds"]
        row += [milliseconds(p50["median"]) if p50 else ""] * has_p50
        row += [with_quartiles(report["ratios"].get(name, {}).get(ours))] * bool(ours)
        rows.append(row)
    rounds, workload, others = report["options"]["rounds"], report["workload"], report["used_by_others"]
    caption = f"{rounds} rounds of {workload['sequences']:,} sequences, {workload['tokens']:,} tokens."
    if others is not None:
        caption += f" Other processes used {others:.1%} of the CPUs."
    versions = {name: report["machine"][name] for name in ("onnxruntime", "torch")}
    return f"{table(head, rows)}\n\n{describe(report, caption)}\n\nVersions: {versions_of(versions)}."


def peers(report: Report) -> str:
    """Return the table of the comparison with other programs, and the versions of these programs."""
    versions = [f"- {_CHART[peer]}: {versions_of(found['versions'])}" for peer, found in report["peers"].items()]
    return "\n".join([sides(report, _OURS, "encserve (ids in)"), "", *versions])


def rerank(report: Report) -> str:
    """Return the table that compares cross-encoders, and sentences about the latency of another caller.

    The other caller ranks one document, first alone, and then while the 16 callers also rank.
    """
    text = sides(report, "encserve-grpc", "encserve over gRPC")
    if query := report["query_seconds"]:
        text += (
            f"\n\nAnother caller ranks one document. Its p99 is {milliseconds(query['p99_alone'])} ms alone, and "
            f"{milliseconds(query['p99_beside'])} ms while the 16 callers also rank. "
            f"A batch takes {milliseconds(query['batch_p95'])} ms (p95)."
        )
    return text


def chart(report: Report) -> str:
    """Return a bar chart of tokens/s, with its caption."""
    rates = {
        label: median(report["sides"][name]["tokens_per_second"]) / 1000
        for name, label in _CHART.items()
        if name in report["sides"]
    }
    title = f"{report['model']['name']} on {report['machine']['cpus']} CPUs, 64 callers with one text each"
    lines = [
        "```mermaid",
        '%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#4477aa"}}}}%%',
        "xychart-beta horizontal",
        f'    title "{title}"',
        f"    x-axis {json.dumps(list(rates))}",
        f'    y-axis "1,000 tokens/s" 0 --> {math.ceil(max(rates.values()))}',
        f"    bar [{', '.join(f'{rate:.3f}' for rate in rates.values())}]",
        "```",
        "",
        f"Each program runs at its best setting, in float32, on {report['date']} at {report['commit']}.",
    ]
    return "\n".join(lines)


def ratio(report: Report) -> str:
    """Return the ratio of encserve's throughput to the ceiling's throughput."""
    return f"{report['sides'][_OURS]['ratio_to_ceiling']['median']:.2f}"


def targets(*reports: Report) -> str:
    """Return the table of targets that a comparison did not meet."""
    rows = [
        [target["text"], target["bound"], with_quartiles(target["measured"])]
        for report in reports
        for target in report["targets"]
        if not target["met"]
    ]
    return table(["target", "bound", "measured"], rows) if rows else "All targets are met."


def _medians(points: Sequence[Report], by: str, value: str) -> dict[Any, float]:
    """Return the median of a figure over rounds, for each value of the field `by`."""
    keys = sorted({point[by] for point in points})
    return {key: median(it[value] for it in points if it[by] == key) for key in keys}


def _shown(field: str, number: float) -> str:
    """Return a figure of bench/scaling.py in the unit that its row of the table has."""
    if field.endswith("_seconds"):
        return milliseconds(number)
    return f"{1000 * number:.2f}" if field.endswith("_seconds_per_call") else f"{number:,.0f}"


def _points(
    report: Report, part: str, by: str, head: str, rows: Mapping[str, str], columns: Sequence[Any] | None = None
) -> str:
    """Return a table of one part of the report of bench/scaling.py, and the caption of the table.

    The table has a row for each figure, and a column for each measured point of `columns`. If `columns` is None,
    each point has a column.
    """
    known = sorted({point[by] for point in report[part]})
    shown = known if columns is None else [it for it in columns if it in known]
    cells = []
    for label, field in rows.items():
        found = _medians(report[part], by, field)
        cells.append([label, *(_shown(field, found[column]) for column in shown)])
    run = report["runs"][part]
    caption = describe(run, f"{run['rounds']} rounds of {run['seconds']:g} s for each point.")
    return f"{table([head, *(f'{column:,}' for column in shown)], cells)}\n\n{caption}"


def callers(report: Report) -> str:
    """Return the table of speed and latency by the number of callers."""
    rows = {"tokens/s": "tokens_per_second", "p50 ms": "p50_seconds", "p99 ms": "p99_seconds"}
    return _points(report, "callers", "callers", "callers", rows, _CALLERS)


def load(report: Report) -> str:
    """Return the table of latency by load."""
    head = "load, relative to the throughput of 64 callers"
    return _points(report, "load", "load", head, {"p50 ms": "p50_seconds", "p99 ms": "p99_seconds"}, _LOADS)


def calls(report: Report) -> str:
    """Return the table of the calls/s that a server without a model reaches."""
    rows = {
        "calls/s": "calls_per_second",
        "sequences/s": "sequences_per_second",
        "server's CPU time of a call, ms": "server_cpu_seconds_per_call",
    }
    return _points(report, "front_end", "sequences_per_call", "sequences in a call", rows)


def memory(report: Report) -> str:
    """Return the table of a server's memory after many requests."""
    rows = [[f"{it['requests']:,}", f"{it['resident_bytes'] / 2**20:,.0f} MiB"] for it in report["memory"]]
    return f"{table(['requests', 'resident memory'], rows)}\n\n{describe(report['runs']['memory'])}"


def client(report: Report) -> str:
    """Return the table of how many texts a second the Python client sends."""
    found = [it for it in report["methods"] if it["checkout"] == "here"]
    rates = [f"{median(it['texts_per_second']):,.0f}" for it in found]
    text = table(["", *(it["method"] for it in found)], [["texts/s", *rates]])
    rounds = f"{report['rounds']} rounds of {report['texts']:,} texts."
    return f"{text}\n\n{describe(report, rounds)}"


def exports(report: Report) -> str:
    """Return the table of the memory and the CPU time of exports."""
    found = {
        (it["size"], it["precision"], it["route"]): f"{it['peak_mb']:,.0f} MB, {it['cpu_seconds']:.0f} s"
        for it in report["exports"]
    }
    columns = list(dict.fromkeys((size, precision) for size, precision, _ in found))
    head = ["route", *(f"BERT-{size}, {precision}" for size, precision in columns)]
    rows = [[name, *(found.get((*column, route), "") for column in columns)] for route, name in _ROUTES.items()]
    weights = " and ".join(f"BERT-{size} has {mb:,.0f} MB" for size, mb in report["weights_mb"].items())
    return f"{table(head, rows)}\n\n{describe(report, weights + ' of weights in float32.')}"


def bulk(report: Report) -> str:
    """Return the table that compares a job over files with the ceiling and with sentence-transformers."""
    return sides(report, "job", "the job in float32")


PARTS = {
    "ratio": Part(["peers"], ratio, is_inline=True),
    "chart": Part(["peers"], chart),
    "peers": Part(["peers"], peers),
    "compare": Part(["compare"], sides),
    "callers": Part(["scaling"], callers),
    "load": Part(["scaling"], load),
    "calls": Part(["scaling"], calls),
    "memory": Part(["scaling"], memory),
    "rerank": Part(["rerank"], rerank),
    "bulk": Part(["bulk"], bulk),
    "client": Part(["client"], client),
    "exports": Part(["export-memory"], exports),
    "targets": Part(["compare", "peers", "bulk", "rerank"], targets),
}


def pages() -> list[Path]:
    """Return the pages that have figures."""
    return [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if _PART.search(path.read_text())]


def text_of(page: str, measurements: Path = MEASUREMENTS) -> str:
    """Return a page's text. Take the figures from the reports in the folder `measurements`."""

    def replace(found: re.Match[str]) -> str:
        part = PARTS[found["name"]]
        files = (measurements / f"{name}.json" for name in part.files)
        text = part.text(*(json.loads(path.read_text(encoding="utf-8")) for path in files))
        space = "" if part.is_inline else "\n\n"
        return f"{found['begin']}{space}{text}{space}{found['end']}"

    return _PART.sub(replace, page)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in pages():
        path.write_text(text_of(path.read_text(encoding="utf-8")), encoding="utf-8")
