"""Tests of scripts/make_figures.py. The figures on the pages must equal the figures of the measurements."""

import json
import re
from pathlib import Path
from typing import Any

import make_figures
import pytest
from harness import plots

ROOT = Path(__file__).parent.parent.parent
PAGES = {str(path.relative_to(ROOT)): path for path in make_figures.pages()}
RUN = {
    "commit": "0123abcd",
    "date": "2026-11-28",
    "command": "python bench/peers.py models --rounds 4",
    "machine": {
        "cpu": "CPU", "family": "model 1", "cpus": 2, "flags": ["avx2", "fma"], "onnxruntime": "1.2", "torch": "3.4",
    },
}  # fmt: skip


def spread(middle: float) -> dict[str, float]:
    return {"low": 0.9 * middle, "median": middle, "high": 1.1 * middle}


def comparison(**more: Any) -> dict[str, Any]:
    """Return a report of the comparison with other programs."""

    def side(name: str, rates: list[float], ratio: float, p50: float | None) -> dict[str, Any]:
        latency = None if p50 is None else spread(p50)
        return {"label": name, "tokens_per_second": rates, "ratio_to_ceiling": spread(ratio), "p50_seconds": latency}

    report = RUN | {
        "model": {"name": "m"},
        "options": {"rounds": "3"},
        "workload": {"sequences": 256, "tokens": 11_000},
        "used_by_others": 0.012,
        "sides": {
            "ceiling": side("ceiling", [7000, 6000, 6543], 1, None),
            "encserve-64": side("encserve | ids", [6000, 6100, 6200], 0.95, 0.3571),
            "triton": side("Triton", [3000, 4000, 5000], 0.61, 0.0042),
        },
        "ratios": {"triton": {"encserve-64": spread(1.5)}},
        "peers": {"triton": {"versions": {"pytriton": "0.7"}}},
        "targets": [
            {"text": "1.6 times Triton", "bound": "≥ 1.6", "measured": spread(1.5), "met": False},
            {"text": "0.88 of the ceiling", "bound": "≥ 0.88", "measured": spread(0.95), "met": True},
        ],
    }
    return report | more


def filled(part: str, folder: Path, **reports: Any) -> str:
    """Write reports, and return the text that `make_figures` then puts into a part of a page."""
    for name, report in reports.items():
        folder.joinpath(f"{name.replace('_', '-')}.json").write_text(json.dumps(report))
    page = f"before <!-- figures: {part} -->old<!-- end of figures --> after"
    text = make_figures.text_of(page, folder)
    assert text.startswith(f"before <!-- figures: {part} -->")
    assert text.endswith("<!-- end of figures --> after")
    return text.partition(" -->")[2].rpartition("<!-- end")[0]


@pytest.mark.parametrize("page", PAGES)
def test_figures_on_pages_are_current(page: str) -> None:
    text = PAGES[page].read_text()
    assert make_figures.text_of(text) == text, "run `make figures`"


def test_each_part_is_on_a_page_once() -> None:
    found = [name for path in PAGES.values() for name in re.findall(r"<!-- figures: ([\w-]+) -->", path.read_text())]
    assert sorted(found) == sorted(make_figures.PARTS)


def test_each_measurement_is_on_a_page() -> None:
    files = {file for part in make_figures.PARTS.values() for file in part.files}
    assert {path.stem for path in make_figures.MEASUREMENTS.glob("*.json")} <= files


@pytest.mark.system
def test_plots_are_current(tmp_path: Path) -> None:
    plots.draw(json.loads(make_figures.MEASUREMENTS.joinpath("scaling.json").read_text()), tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in ROOT.glob("docs/images/performance-*.svg")}, (
        "run `make figures`"
    )


def test_a_comparison_with_other_programs(tmp_path: Path) -> None:
    text = filled("peers", tmp_path, peers=comparison())
    assert text.splitlines()[2:7] == [
        "| side | tokens/s | ratio to the ceiling | p50 ms | encserve (ids in), relative to this side |",
        "| --- | --- | --- | --- | --- |",
        "| ceiling | 6,543 | 1.00 [0.90–1.10] |  |  |",
        r"| encserve \| ids | 6,100 | 0.95 [0.85–1.04] | 357 |  |",
        "| Triton | 4,000 | 0.61 [0.55–0.67] | 4.2 | 1.50 [1.35–1.65] |",
    ]
    assert "3 rounds of 256 sequences, 11,000 tokens. Other processes used 1.2% of the CPUs." in text
    assert "Measured on 2026-11-28 at 0123abcd.\nMachine: 2 CPUs of CPU (model 1) with `avx2`, `fma`." in text
    assert "\n\n```\npython bench/peers.py models --rounds 4\n```\n" in text
    assert text.endswith("\nVersions: `onnxruntime 1.2`, `torch 3.4`.\n\n- Triton: `pytriton 0.7`\n\n")
    assert filled("ratio", tmp_path) == "0.95"
    chart = filled("chart", tmp_path)
    assert 'title "m on 2 CPUs, 64 callers with one text each"' in chart
    assert 'x-axis ["encserve", "Triton"]\n    y-axis "1,000 tokens/s" 0 --> 7\n    bar [6.100, 4.000]\n' in chart


def test_targets_that_are_not_met(tmp_path: Path) -> None:
    report = comparison()
    others: dict[str, Any] = {name: {"targets": []} for name in ("compare", "bulk", "rerank")}
    text = filled("targets", tmp_path, peers=report, **others)
    assert text.splitlines()[4:] == ["| 1.6 times Triton | ≥ 1.6 | 1.50 [1.35–1.65] |", ""]
    for target in report["targets"]:
        target["met"] = True
    assert filled("targets", tmp_path, peers=report).strip() == "All targets are met."


def test_a_comparison_without_latencies_has_no_column_for_them(tmp_path: Path) -> None:
    report = comparison(query_seconds={"p99_alone": 0.0061, "p99_beside": 0.25, "batch_p95": 0.2}, used_by_others=None)
    for side in report["sides"].values():
        side["p50_seconds"] = None
    text = filled("rerank", tmp_path, rerank=report)
    assert "| side | tokens/s | ratio to the ceiling | encserve over gRPC, relative to this side |\n" in text
    assert "Other processes" not in text
    assert "Its p99 is 6.1 ms alone, and 250 ms while the 16 callers also rank. A batch takes 200 ms (p95)." in text
    assert "Another caller" not in filled("rerank", tmp_path, rerank=report | {"query_seconds": {}})


def test_units_and_medians_of_other_parts(tmp_path: Path) -> None:
    """Check the numbers with figures that this test chooses.

    If a formula in the script is wrong, `make figures` writes wrong numbers into the pages, and no other test fails.
    """
    run = RUN | {"rounds": 2, "seconds": 5.0}
    figures = [(1, 100.0, 0.005), (1, 300.0, 0.007), (1, 800.0, 0.021), (64, 9000.0, 0.3)]
    points = [
        {"callers": n, "tokens_per_second": rate, "p50_seconds": p50, "p99_seconds": 10 * p50}
        for n, rate, p50 in figures
    ]
    scaling = {
        "runs": dict.fromkeys(("callers", "front_end", "memory"), run),
        "callers": points,
        "front_end": [
            {
                "sequences_per_call": 4,
                "calls_per_second": 2000.4,
                "sequences_per_second": 8001.6,
                "server_cpu_seconds_per_call": 0.00056,
            }
        ],
        "memory": [{"requests": 20_680, "resident_bytes": 479 * 2**20}],
    }
    text = filled("callers", tmp_path, scaling=scaling)
    assert "| callers | 1 | 64 |\n" in text
    assert "\n| tokens/s | 300 | 9,000 |\n| p50 ms | 7.0 | 300 |\n| p99 ms | 70 | 3,000 |\n" in text
    assert "| server's CPU time of a call, ms | 0.56 |" in filled("calls", tmp_path)
    assert "| 20,680 | 479 MiB |" in filled("memory", tmp_path)
    methods = [
        {"checkout": checkout, "method": "embed", "texts_per_second": [rate, rate + 5000, rate + 1000]}
        for checkout, rate in (("here", 180_000), ("against", 90_000))
    ]
    text = filled("client", tmp_path, client=RUN | {"texts": 30_000, "rounds": 3, "methods": methods})
    assert "|  | embed |\n| --- | --- |\n| texts/s | 181,000 |\n" in text
    exports = [
        {"size": size, "precision": "int8", "route": route, "peak_mb": peak_mb, "cpu_seconds": 35.6}
        for size, route, peak_mb in (("base", "onnx", 1347.4), ("large", "onnx", 2000.0), ("large", "module", 900.0))
    ]
    report = RUN | {"weights_mb": {"base": 438.1}, "exports": exports}
    text = filled("exports", tmp_path, export_memory=report)
    assert "| route | BERT-base, int8 | BERT-large, int8 |" in text
    assert "| `hf --via onnx` | 1,347 MB, 36 s | 2,000 MB, 36 s |" in text
    assert "| `export_module` |  | 900 MB, 36 s |" in text
