"""bench/grpc_servers.py: that both sides serve, and that every figure is there."""

import json
import subprocess
import sys
from pathlib import Path

import grpc_servers
import pytest
from tiny_bundle import write_bundle

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_both_sides_are_measured(tmp_path: Path) -> None:
    models, file = write_bundle(tmp_path / "models").parents[1], tmp_path / "found.json"
    command = [
        sys.executable,
        "bench/grpc_servers.py",
        str(models),
        "--rounds",
        "1",
        "--seconds",
        "1",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert set(found["sides"]) == {"encserve", "grpcio"}
    for side in found["sides"].values():
        assert set(side) == set(grpc_servers.UNITS)
        assert all(side[name][0] > 0 for name in ("calls_per_second", "tokens_per_second", "one_caller_p50_seconds"))
    for text, _ in grpc_servers.UNITS.values():
        assert text.split(",")[0] in done.stdout, text
    assert len(found["steal"]) == 2


def test_what_could_not_be_measured_is_left_out() -> None:
    assert grpc_servers._shown([float("nan")], 1) == ""
    assert grpc_servers._shown([float("nan"), 0.002], 1000) == "2 (2 … 2)"
