"""bench/telemetry_cost.py: that its sides serve, and that what is compared is what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import telemetry_cost

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_every_side_serves(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--engine", "fake", "--rounds", "1", "--sequences", "128", "--patience", "0", "--json", str(file)]
    command = [sys.executable, str(ROOT / "bench/telemetry_cost.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    sides = json.loads(file.read_text())["sides"]
    assert list(sides) == list(telemetry_cost.SIDES)
    assert sides[telemetry_cost.NEITHER]["ratio_to_neither"] == [1.0]
    assert all(side["tokens_per_second"][0] > 0 for side in sides.values())


def test_nothing_takes_everything() -> None:
    nothing = telemetry_cost.Nothing()
    assert nothing.labels("a", b="c").observe(1.0) is nothing.labels.observe
    assert list(nothing.children) == []
