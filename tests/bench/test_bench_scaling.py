"""bench/scaling.py: what is drawn of points, what is made of a load's figures, and that it measures a real server."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scaling
from click.testing import CliRunner
from harness.load import CALLERS
from harness.plots import draw, spread_by
from tiny_bundle import write_bundle

from encserve_cli.load import LoadResult, closed_loop, open_loop

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


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads without much of a warm-up."""

    def shortened(loop: Callable[..., LoadResult]) -> Callable[..., LoadResult]:
        return lambda *arguments, **settings: loop(*arguments, **settings | {"warmup_seconds": 0.2})

    monkeypatch.setattr(scaling, "closed_loop", shortened(closed_loop))
    monkeypatch.setattr(scaling, "open_loop", shortened(open_loop))
    monkeypatch.setattr(scaling, "PAUSE_SECONDS", 0)


@pytest.mark.system
@pytest.mark.usefixtures("hasty")
def test_it_measures_and_keeps_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, file = write_bundle(tmp_path / "models").parents[1], tmp_path / "found.json"
    file.write_text(json.dumps({"load": []}))
    monkeypatch.setattr(scaling, "SEQUENCES_PER_CALL", (4,))
    command = ["measure", str(models), str(file), "--only", "threads", "--only", "front_end"]
    done = CliRunner().invoke(scaling.main, [*command, "--rounds", "1", "--seconds", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["load"] == []
    assert {point["round"] for point in found["threads"]} == {0}
    assert all(point["tokens_per_second"] > 0 for point in found["threads"])
    assert found["machine"]["threads"]["rounds"] == 1
    (point,) = found["front_end"]
    assert (point["sequences_per_call"], point["errors"]) == (4, 0)
    assert point["sequences_per_second"] == 4 * point["calls_per_second"]
    assert min(point["server_cpu_seconds_per_call"], point["generator_cpu_seconds_per_call"]) > 0


def bench_of(models: Path, said: list[str], rounds: int = 1) -> scaling.Bench:
    return scaling.Bench(models, None, rounds=rounds, seconds=0.5, seed=0, say=said.append, tail_seconds=1.0)


def test_every_point_is_measured_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order of its own in each."""
    monkeypatch.setattr(scaling, "PAUSE_SECONDS", 0)
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

    def result(calls: int, tokens: int, seconds: float, latencies: list[float], **others: Any) -> LoadResult:
        known: dict[str, Any] = {"mode": "open", "concurrency": 1, "rate_per_second": None, "processes": 1}
        known |= {"stream": False, "seconds": seconds, "calls": calls, "sequences": calls, "tokens": tokens}
        return LoadResult(**known | {"latency_seconds": np.array(latencies), "errors": {}} | others)

    def closed(*_: Any, concurrency: int, seconds: float, **__: Any) -> LoadResult:
        answered = int((50 if concurrency == CALLERS else 10) * seconds)
        return result(answered, 400 * answered, seconds, [1 / concurrency] * answered)

    def opened(*_: Any, rate_per_second: float, seconds: float, seed: int) -> LoadResult:
        loops.append((rate_per_second, seconds, seed))
        refused = 21 if rate_per_second > 50 else 1
        return result(
            int(40 * seconds),
            int(300 * 40 * seconds),
            seconds,
            [0.1] * 99 + [0.3] * 2,
            rate_per_second=rate_per_second,
            errors={"CANCELLED": 2, "RESOURCE_EXHAUSTED QUEUE_FULL": refused - 1, "RESOURCE_EXHAUSTED": 1},
            error_latency_seconds=np.array([0.01] * 20 + [0.02]),
            lateness_seconds=np.array([0.0] * 99 + [0.01] * 2),
            generator_cpu_seconds=0.25,
        )

    monkeypatch.setattr(scaling, "closed_loop", closed)
    monkeypatch.setattr(scaling, "open_loop", opened)
    monkeypatch.setattr(scaling, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(scaling.Bench, "server", lambda *_: contextlib.nullcontext(SimpleNamespace(target="it")))
    monkeypatch.setattr(scaling.Bench, "calls", lambda *_: [])
    return loops


def test_load_is_a_share_of_what_64_callers_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[float, float, int]]
) -> None:
    monkeypatch.setattr(scaling, "LOADS", (0.2, 0.4))
    said: list[str] = []
    points = scaling.by_load(bench_of(tmp_path, said, rounds=2))
    assert sorted(asked) == [(10.0, 1.0, 0), (10.0, 1.0, 1000), (20.0, 1.0, 0), (20.0, 1.0, 1000)]
    assert sorted((it["round"], it["load"], it["rate_per_second"]) for it in points) == [
        (0, 0.2, 10.0), (0, 0.4, 20.0), (1, 0.2, 10.0), (1, 0.4, 20.0)
    ]  # fmt: skip
    for point in points:
        assert (point["p50_seconds"], point["p99_seconds"], point["alone_p50_seconds"]) == (0.1, 0.3, 1.0)
        assert (point["lateness_p99_seconds"], point["errors"]) == (0.01, 3)
    assert len(said) == 4


def test_overload_is_three_times_what_64_callers_get(tmp_path: Path, asked: list[tuple[float, float, int]]) -> None:
    (over,) = scaling.overload(bench_of(tmp_path, []))
    assert asked == [(150.0, 1.0, 0)]
    assert over == {
        "round": 0,
        "factor": 3.0,
        "saturation_per_second": 50.0,
        "goodput_share": 0.8,
        "goodput_tokens_share": 0.6,
        "refused": 21,
        "failed_p50_seconds": 0.01,
        "failed_p99_seconds": pytest.approx(0.018),
        "lateness_p99_seconds": 0.01,
        "generator_cpu_share": 0.25,
        "p99_seconds": 0.3,
        "errors": {"CANCELLED": 2},
    }


@pytest.mark.system
@pytest.mark.usefixtures("hasty")
def test_load_and_overload_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = write_bundle(tmp_path / "models").parents[1]
    monkeypatch.setattr(scaling, "LOADS", (0.2,))
    bench = bench_of(models, [])
    bench.seconds = 1.0
    (point,) = scaling.by_load(bench)
    assert 0 < point["p50_seconds"] <= point["p99_seconds"]
    assert point["alone_p50_seconds"] > 0
    assert point["lateness_p99_seconds"] >= 0
    (over,) = scaling.overload(bench)
    assert over["saturation_per_second"] > 0
    # A model of a few nodes is faster than the generator, whose calls then wait for a place.
    assert set(over["errors"]) <= {"NOT_SENT"}
    assert over["generator_cpu_share"] > 0


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--rounds", "0"]])
def test_what_it_cannot_measure(tmp_path: Path, wrong: list[str]) -> None:
    command = ["measure", str(tmp_path), str(tmp_path / "f.json"), *wrong]
    assert CliRunner().invoke(scaling.main, command).exit_code == 2
