"""bench/scaling.py: what is drawn of points, what is made of a load's figures, and that it measures a real server."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from curves import measure
from curves.light_load import LightResult, light_closed_loop, light_open_loop
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


@pytest.mark.bench
def test_it_measures_and_keeps_what_was_measured_before(tmp_path: Path) -> None:
    models, file = write_bundle(tmp_path / "models").parents[1], tmp_path / "found.json"
    file.write_text(json.dumps({"load": []}))
    command = [sys.executable, "bench/scaling.py", "measure", str(models), str(file), "--only", "threads"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--seconds", "1.5"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["load"] == []
    assert {point["round"] for point in found["threads"]} == {0}
    assert all(point["tokens_per_second"] > 0 for point in found["threads"])
    assert found["machine"]["threads"]["rounds"] == 1


def bench_of(models: Path, said: list[str], rounds: int = 1) -> measure.Bench:
    return measure.Bench(models, None, rounds=rounds, seconds=0.5, seed=0, say=said.append, tail_seconds=1.0)


def test_every_point_is_measured_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order of its own in each."""
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0)
    said: list[str] = []
    bench = bench_of(tmp_path, said, rounds=3)
    found = bench.interleaved(range(8), lambda point, number: {"point": point, "share": (point + number) / 16})
    rounds = [[it["point"] for it in found if it["round"] == number] for number in range(3)]
    assert [sorted(it) for it in rounds] == [list(range(8))] * 3
    assert rounds[0] != rounds[1] != rounds[2]
    assert found == sorted(found, key=lambda it: it["round"])
    assert all(it["share"] == (it["point"] + it["round"]) / 16 for it in found)
    assert len(said) == 24
    assert f"round 0, point {rounds[0][0]}, share {rounds[0][0] / 16:.4g}" == said[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, int]]:
    """The open loops that were asked for: rates, seconds and seeds; their figures and those of closed ones are made up.

    64 callers get 50 calls of 400 tokens a second, one gets 10; where calls come at random 40 of 300 are answered.
    """
    loops: list[tuple[float, float, int]] = []

    def closed(*_: Any, callers: int, seconds: float, **__: Any) -> LightResult:
        answered = int((50 if callers == measure.CALLERS else 10) * seconds)
        return LightResult(seconds, answered, 400 * answered, [1 / callers] * answered)

    def opened(*_: Any, rate_per_second: float, seconds: float, seed: int) -> LightResult:
        loops.append((rate_per_second, seconds, seed))
        many = rate_per_second > 50
        result = LightResult(seconds, int(40 * seconds), int(300 * 40 * seconds), [0.1] * 99 + [0.3] * 2)
        result.refused, result.lateness, result.cpu_seconds = [0.01] * 20 * many + [0.02], [0.0] * 99 + [0.01] * 2, 0.25
        result.errors["CANCELLED"] += 2
        return result

    monkeypatch.setattr(measure, "light_closed_loop", closed)
    monkeypatch.setattr(measure, "light_open_loop", opened)
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(measure.Bench, "server", lambda *_: contextlib.nullcontext(SimpleNamespace(target="it")))
    monkeypatch.setattr(measure.Bench, "calls", lambda *_: [])
    return loops


def test_load_is_a_share_of_what_64_callers_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[float, float, int]]
) -> None:
    monkeypatch.setattr(measure, "LOADS", (0.2, 0.4))
    said: list[str] = []
    points = measure.by_load(bench_of(tmp_path, said, rounds=2))
    assert sorted(asked) == [(10.0, 1.0, 0), (10.0, 1.0, 1000), (20.0, 1.0, 0), (20.0, 1.0, 1000)]
    assert sorted((it["round"], it["load"], it["rate_per_second"]) for it in points) == [
        (0, 0.2, 10.0), (0, 0.4, 20.0), (1, 0.2, 10.0), (1, 0.4, 20.0)
    ]  # fmt: skip
    for point in points:
        assert (point["p50_seconds"], point["p99_seconds"], point["alone_p50_seconds"]) == (0.1, 0.3, 1.0)
        assert (point["lateness_p99_seconds"], point["errors"]) == (0.01, 3)
    assert len(said) == 4


def test_overload_is_three_times_what_64_callers_get(tmp_path: Path, asked: list[tuple[float, float, int]]) -> None:
    (over,) = measure.overload(bench_of(tmp_path, []))
    assert asked == [(150.0, 1.0, 0)]
    assert over == {
        "round": 0,
        "factor": 3.0,
        "saturation_per_second": 50.0,
        "goodput_share": 0.8,
        "goodput_tokens_share": 0.6,
        "refused": 21,
        "refused_p50_seconds": 0.01,
        "refused_p99_seconds": pytest.approx(0.018),
        "lateness_p99_seconds": 0.01,
        "generator_cpu_share": 0.25,
        "p99_seconds": 0.3,
        "errors": {"CANCELLED": 2},
    }


@pytest.mark.bench
def test_load_and_overload_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = write_bundle(tmp_path / "models").parents[1]
    monkeypatch.setattr(measure, "LOADS", (0.2,))
    for name, loop in (("light_closed_loop", light_closed_loop), ("light_open_loop", light_open_loop)):

        def hasty(*arguments: Any, loop: Any = loop, **settings: Any) -> LightResult:
            result: LightResult = loop(*arguments, **settings | {"warmup_seconds": 0.2})
            return result

        monkeypatch.setattr(measure, name, hasty)
    bench = bench_of(models, [])
    bench.seconds = 1.0
    (point,) = measure.by_load(bench)
    assert 0 < point["p50_seconds"] <= point["p99_seconds"]
    assert point["alone_p50_seconds"] > 0
    assert point["lateness_p99_seconds"] >= 0
    (over,) = measure.overload(bench)
    assert over["saturation_per_second"] > 0
    # A model of a few nodes is faster than gRPC's intake, which drops what it cannot keep.
    assert set(over["errors"]) <= {"CANCELLED"}
    assert over["generator_cpu_share"] > 0


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--rounds", "0"]])
def test_what_it_cannot_measure(tmp_path: Path, wrong: list[str]) -> None:
    command = [sys.executable, "bench/scaling.py", "measure", str(tmp_path), str(tmp_path / "f.json"), *wrong]
    assert subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 2
