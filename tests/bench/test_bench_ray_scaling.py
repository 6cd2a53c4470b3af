"""bench/ray_scaling.py: that it measures what it says, on a cluster of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).parent.parent.parent / "bench/ray_scaling.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=200
    )
    return done.stdout


def test_the_share_of_linear() -> None:
    found = re.findall(r"^ *(\d+) actors: (\d+) parts in [0-9.]+ s, [0-9.]+ of linear$", run(
        "scaling", "--actors", "1,2", "--seconds", "0.1", "--parts", "3"
    ), re.MULTILINE)  # fmt: skip
    assert found == [("1", "3"), ("2", "6")]


def test_the_memory_of_the_driver() -> None:
    assert re.search(
        r"^the driver held [0-9.]+ MiB after 100 parts and .* after 200: ", run("memory", "--parts", "200")
    )
