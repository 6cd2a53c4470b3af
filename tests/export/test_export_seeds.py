"""Checkpoints as the code of each seed layout makes them, in full size: whatever computes them, they are exported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from state_dicts import LAYOUTS

# Ten with the usual settings, and a few with each of the others, since an export takes seconds.
USUAL = ("", "1", "1")
SEEDS, FEW_SEEDS = 10, 2
PROGRAM = Path(__file__).parent.parent / "support" / "seed_exports.py"


@pytest.mark.weekly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capability", ["", "avx2", "default"])
@pytest.mark.parametrize(("optimised", "threads"), [("1", "1"), ("0", "2")])
def test_seeds_of_every_layout(layout: str, capability: str, optimised: str, threads: str) -> None:
    """With every instruction, with AVX2 and with neither; ONNX Runtime's optimiser on and off; 1 and 2 threads."""
    seeds = range(SEEDS if (capability, optimised, threads) == USUAL else FEW_SEEDS)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), layout, ",".join(map(str, seeds)), optimised, threads, "64"],
        env=os.environ | ({"ATEN_CPU_CAPABILITY": capability} if capability else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(seeds)
