"""Checkpoints as the code of each seed layout makes them, in full size: whatever computes them, they are exported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from state_dicts import LAYOUTS

SEEDS = ",".join(map(str, range(10)))
PROGRAM = Path(__file__).parent.parent / "support" / "seed_exports.py"


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capability", ["", "avx2", "default"])
@pytest.mark.parametrize(("optimised", "threads"), [("1", "1"), ("0", "2")])
def test_ten_seeds_of_every_layout(layout: str, capability: str, optimised: str, threads: str) -> None:
    """With every instruction, with AVX2 and with neither; ONNX Runtime's optimiser on and off; 1 and 2 threads."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), layout, SEEDS, optimised, threads, "64"],
        env=os.environ | ({"ATEN_CPU_CAPABILITY": capability} if capability else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 10
