"""Runs each program of bench/ for a short time, from its command line. The tests do not check the speeds.

bench/peers.py compares encserve with the sentence-transformers that is installed in this environment.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import bulk
import client
import compare
import export_memory
import gpu
import peers
import pytest
import rerank
import scaling
from click.testing import CliRunner
from harness import programs
from harness.load import LARGE, MANY, ONE, POOLED
from harness.peers import SENTENCES
from harness.report import AGAINST
from harness.sides import BARE, CEILING, NAIVE, TORCH, TORCH_BATCHED
from real_server import COMMAND, cpu_has_bfloat16
from sentence_models import write_model
from tiny_bundle import write_bundle

from encserve_export import Target, export_hf

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SHORT = ["--rounds", "1", "--patience", "0"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rounds.PAUSE_SECONDS", 0)
    monkeypatch.setattr(scaling, "PAUSE_SECONDS", 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small model with sentence-transformers, and return its directory."""
    folder = tmp_path_factory.mktemp("bench") / "directory"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def models(directory: Path) -> Path:
    """Export the model of `directory`, and return the model repository."""
    export_hf(directory, Target(model_repository=directory.parent / "models", name="m"))
    return directory.parent / "models"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Write two models of a few ONNX nodes, and return the model repository."""
    for name in ("one", "two"):
        write_bundle(tmp_path / "models", name)
    return tmp_path / "models"


def figures(file: Path) -> Any:
    return json.loads(file.read_text())


def check_description(run: Any) -> None:
    """Check that a report names the commit, the date, the command and the machine, and no folder of this machine."""
    assert re.fullmatch(r"[0-9a-f]{8,}(-dirty)?|unknown", run["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
    assert run["command"].startswith("python ")
    assert run["machine"]["cpus"] >= 1
    assert not re.findall(r"(?<![\w.])/\w+", " ".join([run["command"], *run.get("options", {}).values()]))


def test_compare_runs_every_side_and_another_checkout(
    models: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "before"
    with pytest.raises(SystemExit):
        compare.read_arguments([str(models), "--against", str(other)])
    assert "before has no .venv/bin/encserve-server; run `make install` there" in capsys.readouterr().err
    (other / ".venv/bin").mkdir(parents=True)
    (other / ".venv/bin/encserve-server").symlink_to(COMMAND)
    command = [str(models), "--checkpoint", str(directory), "--against", str(other), *SHORT]
    command += ["--sequences", "70", "--seconds", "0.5", "--json", str(tmp_path / "found.json")]
    compare.main([*command, "--only", ONE, LARGE, MANY, POOLED, CEILING, BARE, NAIVE, TORCH, TORCH_BATCHED])
    found = figures(tmp_path / "found.json")
    ours = {ONE, LARGE, MANY, POOLED}
    assert set(found["sides"]) == {
        CEILING, BARE, NAIVE, TORCH, TORCH_BATCHED, *ours, *(name + AGAINST for name in ours)
    }  # fmt: skip
    assert set(found["agreement"]) == {"encserve", f"encserve of {other}", "padded graph", "PyTorch"}
    assert found["sides"][CEILING]["ratio_to_ceiling"]["median"] == 1
    assert found["sides"][MANY]["server_cpu_ms"]["median"] > 0
    assert set(found["ratios"]) == ours
    check_description(found)
    assert "ratio to ceiling" in capsys.readouterr().out


def test_bulk_compares_a_job_in_each_precision(
    models: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SWEEP_TEXTS", 10)
    monkeypatch.setattr(bulk, "BATCH_SIZES", (4, 8))
    command = [str(models), "--checkpoint", str(directory), "--texts", "40", "--part-rows", "15", *SHORT]
    bulk.main([*command, "--json", str(tmp_path / "found.json")])
    suffixes = ("", "-bfloat16") if cpu_has_bfloat16() else ("",)
    names = (CEILING, "job", SENTENCES)
    assert set(figures(tmp_path / "found.json")["sides"]) == {name + suffix for name in names for suffix in suffixes}


def test_peers_compares_a_peer_in_its_best_and_its_default_setting(
    models: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "ensure_environment", lambda _: Path(sys.executable).parent)
    monkeypatch.setattr(peers, "IDLE_SECONDS", 0.1)
    command = [str(models), "--checkpoint", str(directory), "--sequences", "20", "--seconds", "0.5", *SHORT]
    peers.main([*command, "--peers", SENTENCES, "--server", "again=", "--json", str(tmp_path / "found.json")])
    found = figures(tmp_path / "found.json")
    assert {CEILING, MANY, POOLED, "encserve-again", SENTENCES, f"{SENTENCES}-pooled"} <= set(found["sides"])
    assert set(found["ratios"][SENTENCES]) == {MANY, POOLED, "encserve-again"}
    assert set(found["peers"][SENTENCES]["agreement"]) == {SENTENCES, f"{SENTENCES}-pooled"}
    assert found["missing"] == {}


def test_rerank_makes_a_model_and_compares_every_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """infinity cannot be installed here, so the report names infinity as missing."""

    def no_environment(peer: str) -> Path:
        raise programs.PeerUnavailable(peer, "cannot be installed")

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    monkeypatch.setattr(rerank, "SHAPE", rerank.SHAPE | small)
    monkeypatch.setattr(rerank, "BATCH_SIZES", (4, 8))
    monkeypatch.setattr("harness.peers.ensure_environment", no_environment)
    command = [str(tmp_path / "models"), "--checkpoint", str(tmp_path / "checkpoint"), "--make-model", *SHORT]
    command += ["--calls", "20", "--documents", "4", "--query-seconds", "0.5", "--json", str(tmp_path / "found.json")]
    with pytest.raises(SystemExit):
        rerank.main(command)
    found = figures(tmp_path / "found.json")
    names = {CEILING, rerank.GRPC, rerank.HTTP, rerank.SENTENCES}
    assert set(found["sides"]) == names
    assert set(found["agreement"]) == names - {CEILING}
    assert found["missing"] == {"infinity": "infinity: cannot be installed"}
    assert set(found["query_seconds"]) == {"p99_alone", "p99_beside", "batch_p95"}
    assert [it["bound"] for it in found["targets"]] == ["≥ 0.93", "≥ 2", "≥ 0.93", "≥ 2", "≤ 2"]


def test_client_compares_its_methods_with_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, file = Path(client.__file__).parent.parent, tmp_path / "found.json"
    command = ["--texts", "500", "--width", "8", "--rounds", "1", "--against", str(checkout), "--json", str(file)]
    client.main(command)
    found = figures(file)
    check_description(found)
    names = [(it["checkout"], it["method"]) for it in found["methods"]]
    assert sorted(names) == sorted((it, method) for it in ("here", "against") for method in client.METHODS)
    assert all(len(it["texts_per_second"]) == 1 for it in found["methods"])
    output = capsys.readouterr().out
    assert output.count("here / against") == len(client.METHODS)
    assert len(re.findall(r"slowest / fastest .*: [01]\.\d\d", output)) == 2


def test_scaling_measures_parts_keeps_the_others_and_draws(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SEQUENCE_TOKENS": (8,), "BATCH_TOKENS": (64, 128), "CALLER_COUNTS": (2,), "LOADS": (0.2,),
        "SEQUENCES_PER_CALL": (4,), "MEMORY_REQUESTS": (1,), "TAIL_SECONDS": 1.0, "CALLERS": 8,
    }.items():  # fmt: skip
        monkeypatch.setattr(scaling, name, value)
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"other": []}))
    command = ["measure", str(tiny), str(file), "--rounds", "1", "--seconds", "0.5"]
    for part in scaling.PARTS:
        command += ["--only", part]
    assert CliRunner().invoke(scaling.main, command, catch_exceptions=False).exit_code == 0
    found = figures(file)
    assert set(found) == {"other", "runs", *scaling.PARTS}
    for part in scaling.PARTS:
        check_description(found["runs"][part])
    for part in ("sequence_tokens", "batch_tokens", "callers", "threads"):
        assert all(point["tokens_per_second"] > 0 for point in found[part])
    assert 0 < found["load"][0]["p50_seconds"] <= found["load"][0]["p99_seconds"]
    assert found["overload"][0]["saturation_per_second"] > 0
    assert found["front_end"][0]["server_cpu_seconds_per_call"] > 0
    assert found["front_end"][0]["sequences_per_second"] == 4 * found["front_end"][0]["calls_per_second"]
    drawn = CliRunner().invoke(scaling.main, ["draw", str(file), str(tmp_path / "plots")], catch_exceptions=False)
    assert len(list((tmp_path / "plots").glob("*.svg"))) == len(drawn.output.split()) == 5


def test_gpu_measures_budgets_and_lanes(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test runs bench/gpu.py on the CPU, so that it needs no GPU."""
    command = [str(tiny), "--model", "one", "--model", "two", "--device", "cpu", "--sequences", "40", "--rounds", "2"]
    gpu.main([*command, "--budgets", "64", "128", "--lanes", "1", "2", "--json", str(tmp_path / "found.json")])
    found = figures(tmp_path / "found.json")
    check_description(found)
    settings = {(it["model"], it["budget"]) for it in found["budget"]}
    assert settings == {(model, budget) for model in ("one@1", "two@1") for budget in (64, 128)}
    assert [(it["model"], it["lanes"]) for it in found["lanes"]] == [
        (model, lanes) for model in ("one@1", "two@1") for lanes in (1, 2)
    ]
    assert re.findall(r"\b[01]\.\d{6}\b", capsys.readouterr().out) == ["1.000000"] * 6


def test_export_memory_measures_every_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setitem(export_memory.SIZES, "base", small)
    monkeypatch.setattr(export_memory, "BOUND_MB", 0)
    file = tmp_path / "found.json"
    with pytest.raises(SystemExit, match=r"an export took more than \d+ MB"):
        export_memory.main(["--precision", "float32", "--json", str(file)])
    found = figures(file)
    check_description(found)
    assert [(it["size"], it["route"]) for it in found["exports"]] == [("base", it) for it in export_memory.ROUTES]
    rows = re.findall(r"^\| (\w+) \| float32 \| \d+ \| ([\d,]+) \|", capsys.readouterr().out, re.MULTILINE)
    assert [route for route, _ in rows] == list(export_memory.ROUTES)
    assert all(int(peak) > 3 for _, peak in rows)
