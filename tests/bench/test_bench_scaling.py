"""bench/scaling.py: what is drawn of points, and that it measures a real server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from curves import measure
from curves.plots import draw, spread_by
from tiny_bundle import write_bundle

ROOT = Path(__file__).parents[2]

POINTS: list[dict[str, Any]] = [
    {"callers": 2, "tokens_per_second": 30.0},
    {"callers": 1, "tokens_per_second": 10.0},
    {"callers": 2, "tokens_per_second": 50.0},
    {"callers": 2, "tokens_per_second": None},
]


def test_points_become_quartiles_in_ascending_order() -> None:
    xs, quartiles = spread_by(POINTS, "callers", "tokens_per_second")
    assert xs == [1, 2]
    assert quartiles.tolist() == [[10.0, 35.0], [10.0, 40.0], [10.0, 45.0]]


def test_the_same_points_give_the_same_files(tmp_path: Path) -> None:
    """They are committed, and a difference should mean something."""
    load = [{"load": 0.5, "p50_seconds": 0.01, "p99_seconds": 0.1, "alone_p50_seconds": 0.008}]
    found: dict[str, Any] = {"callers": POINTS, "load": load, "machine": {}, "memory": []}
    first, second = (draw(found, tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["performance-callers.svg", "performance-load.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert b"<svg" in one.read_bytes()


def test_it_measures_and_keeps_what_was_measured_before(tmp_path: Path) -> None:
    models, file = write_bundle(tmp_path / "models").parents[1], tmp_path / "found.json"
    file.write_text(json.dumps({"load": []}))
    command = [sys.executable, "bench/scaling.py", "measure", str(models), str(file), "--only", "threads"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--seconds", "0.2"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["load"] == []
    assert {point["round"] for point in found["threads"]} == {0, 1}
    assert all(point["tokens_per_second"] > 0 for point in found["threads"])
    assert found["machine"]["threads"]["rounds"] == 2


def test_load_and_overload_are_told_with_all_that_the_documents_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = write_bundle(tmp_path / "models").parents[1]
    monkeypatch.setattr(measure, "LOADS", (0.2, 0.4))
    said: list[str] = []
    bench = measure.Bench(models, None, rounds=1, seconds=0.3, seed=0, say=said.append, tail_seconds=0.3)
    points = measure.by_load(bench)
    assert {point["load"] for point in points} == {0.2, 0.4}
    for point in points:
        assert point["errors"] == 0
        assert 0 < point["p50_seconds"] <= point["p99_seconds"]
        assert point["alone_p50_seconds"] > 0
        assert point["lateness_p99_seconds"] >= 0
    (over,) = measure.overload(bench)
    assert over["saturation_per_second"] > 0
    assert over["goodput_share"] > 0
    assert over["goodput_tokens_share"] > 0
    # A model of a few nodes is faster than gRPC's intake, which drops what it cannot keep.
    assert set(over["errors"]) <= {"CANCELLED"}
    assert over["generator_cpu_share"] > 0
    assert len(said) == 3


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--rounds", "0"]])
def test_what_it_cannot_measure(tmp_path: Path, wrong: list[str]) -> None:
    command = [sys.executable, "bench/scaling.py", "measure", str(tmp_path), str(tmp_path / "f.json"), *wrong]
    assert subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 2
