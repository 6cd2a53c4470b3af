"""Runs docs/tutorials/your-own-encoder.md from the page's own text, and compares the output with the page."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from docs_text import code_blocks
from page_code import run_commands
from ports import free_port
from real_server import real_server

pytestmark = pytest.mark.system

PAGE = Path(__file__).parent.parent.parent / "docs/tutorials/your-own-encoder.md"
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|s3-[0-9a-f]{32}")


def test_the_tutorial_for_an_own_encoder(tmp_path: Path) -> None:
    """Write each program and run each command in order. The output must have the lines that the page shows.

    Numbers may differ, because rounding depends on the CPU.
    """
    page, target, printed = PAGE.read_text().replace("8080", str(free_port())), "localhost:50051", ""
    with contextlib.ExitStack() as stack:
        for language, block in code_blocks(page, "python", "sh", ""):
            if language == "python":
                name = block.splitlines()[0].removeprefix("# ")
                (tmp_path / name).write_text(block.replace("localhost:50051", target))
            elif block.startswith("encserve-server "):
                _, _, repository, *flags = shlex.split(block)
                target = stack.enter_context(real_server(tmp_path / repository, *flags)).target
            elif language == "sh":
                printed = NUMBER.sub("N", run_commands(tmp_path, block))
            else:
                shown = NUMBER.sub("N", block).splitlines()
                assert [line for line in shown if line not in printed.splitlines()] == []
