"""Runs the code of a page of the docs as a reader would: all blocks in order, in one folder and one Python session.

A block in `bash` has commands, and a block in `python` is a program. If a block in `text` follows a program directly,
the program must print this text.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from serve_command import Serve, clean_environment, encserve_serve

DOCS = Path(__file__).parent.parent.parent / "docs"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
_ADDRESS = "localhost:50051"


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: "bash" or "python".
        code: The code.
        output: The expected output of a program; "" if the page has none.
    """

    language: str
    code: str
    output: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of commands and programs of a page, such as "how-to/rerank.md"."""
    return [Block(*groups) for groups in _BLOCK.findall((DOCS / page).read_text())]


def run_commands(folder: Path, commands: str, **variables: str) -> str:
    """Run lines with bash in a folder, and return their standard output. A command that fails ends the test."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=clean_environment({"PATH": path, **variables}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
    return done.stdout


class Reader:
    """A reader of one page.

    Attributes:
        names: The variables of the programs.
        target: The address of the server.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack, target: str = "") -> None:
        """`folder` is the current folder. `target` is a running server, for a page that starts none."""
        self.names: dict[str, Any] = {}
        self._folder = folder
        self._stack = stack
        self._server: Serve | None = None
        self.target = target or f"127.0.0.1:{free_port()}"

    def read(self, page: str, changes: Mapping[str, str] | None = None) -> None:
        """Run all blocks of a page, with some changes of their code."""
        for block in blocks(page):
            code = block.code
            for old, new in (changes or {}).items():
                code = code.replace(old, new)
            if block.language == "bash":
                self._run_commands(code)
            else:
                printed = self._run_program(page, code)
                assert not block.output or printed == block.output

    def _run_commands(self, code: str) -> None:
        lines = [line for line in code.splitlines() if not line.startswith("pip install")]
        if any(line.startswith("encserve serve") for line in lines):
            (line,) = lines
            self._serve(*shlex.split(line)[2:])
            return
        run_commands(self._folder, "\n".join(lines), ENCSERVE_TARGET=self.target)

    def _serve(self, *arguments: str) -> None:
        """Start a server. It takes the place of an earlier server."""
        if self._server is not None:
            assert self._server.stop() == 0
        flags = ("--grpc-port", self.target.rpartition(":")[2])
        serving = encserve_serve(*flags, *arguments, variables={}, cwd=self._folder)
        self._server = self._stack.enter_context(serving)
        asyncio.run(self._server.serving())

    def _run_program(self, page: str, code: str) -> str:
        """Run a program, which may use `await` outside of functions. Return its output."""
        code = code.replace(_ADDRESS, self.target)
        compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            waiting = eval(compiled, self.names)  # noqa: S307 - our own page
            if inspect.iscoroutine(waiting):
                asyncio.run(waiting)
        return output.getvalue()


@contextlib.contextmanager
def reader(folder: Path, target: str = "") -> Iterator[Reader]:
    """Yield a reader in a folder, which is the current folder meanwhile. At the end, stop the server of the page."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Reader(folder, stack, target)
