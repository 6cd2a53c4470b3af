"""Runs docs/tutorials/your-own-encoder.md from the page's own text, and compares the output with the page."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from real_server import real_server

pytestmark = pytest.mark.system

PAGE = Path(__file__).parent.parent.parent / "docs/tutorials/your-own-encoder.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.M | re.S)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|s3-[0-9a-f]{32}")


def run(folder: Path, commands: str) -> str:
    """Run the lines of a block with bash, and return their standard output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ENCSERVE_")}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_for_an_own_encoder(tmp_path: Path) -> None:
    """Write each program and run each command in order. The output must have the lines that the page shows.

    Numbers may differ, because rounding depends on the CPU.
    """
    page, target, printed = PAGE.read_text().replace("8080", str(free_port())), "localhost:50051", ""
    with contextlib.ExitStack() as stack:
        for language, block in BLOCK.findall(page):
            if language == "python":
                name = block.splitlines()[0].removeprefix("# ")
                (tmp_path / name).write_text(block.replace("localhost:50051", target))
            elif block.startswith("encserve-server "):
                _, _, repository, *flags = shlex.split(block)
                target = stack.enter_context(real_server(tmp_path / repository, *flags)).target
            elif language == "sh":
                printed = NUMBER.sub("N", run(tmp_path, block))
            else:
                shown = NUMBER.sub("N", block).splitlines()
                assert [line for line in shown if line not in printed.splitlines()] == []
