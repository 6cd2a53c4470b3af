"""Runs the code of a docs page in the same way as a reader: all blocks in order, in one folder and one Python session.

A block in `bash` has commands, and a block in `python` is a program. If a block in `text` follows a program directly,
the program must print this text. A server from `encserve serve` runs until the end of the page. `encserve-server` and
Prometheus are stopped when they first answer.
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
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from serve_command import Serve, clean_environment, encserve_serve

DOCS = Path(__file__).parent.parent.parent / "docs"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
_ADDRESS = "localhost:50051"
# For each program that runs until it is stopped: an HTTP path that answers when the program is ready.
_READY = {"encserve-server": "/health", "prometheus": "/-/ready"}
_SERVER_VARIABLES = {"ENCSERVE_GRPC_PORT": "0", "ENCSERVE_METRICS_PORT": "0", "ENCSERVE_TUNE_BATCHES": "false"}
_POLL_SECONDS, _START_SECONDS = 0.1, 120.0


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: "bash" or "python".
        code: The code.
        output: The expected output of a program. Empty if the page shows no output.
    """

    language: str
    code: str
    output: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that contain commands or a program. `page` is a path such as "how-to/rerank.md"."""
    return [Block(*groups) for groups in _BLOCK.findall((DOCS / page).read_text())]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command, with our programs on the path. `variables` take precedence."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment({"PATH": path, **variables})


def run_commands(folder: Path, commands: str, **variables: str) -> str:
    """Run lines with bash in a folder, and return their standard output. If a command fails, the test fails."""
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=_environment(variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
    return done.stdout


def run_until_ready(folder: Path, command: str, port: int, **variables: str) -> None:
    """Run a program that ends only if it is stopped. When the program's HTTP port answers, stop the program."""
    url = f"http://127.0.0.1:{port}{_READY[command.split()[0]]}"
    log = folder / "log.txt"
    with (
        log.open("w") as output,
        subprocess.Popen(
            ["/bin/bash", "-c", f"exec {command}"],
            cwd=folder,
            env=_environment(variables),
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            ends, is_ready = time.monotonic() + _START_SECONDS, False
            while not is_ready and process.poll() is None and time.monotonic() < ends:
                time.sleep(_POLL_SECONDS)
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
                    is_ready = reply.status == HTTPStatus.OK
            process.terminate()
            assert (is_ready, process.wait(timeout=60)) == (True, 0), f"{command}{log.read_text()}"
        finally:
            process.kill()


class Reader:
    """A reader of one page.

    Attributes:
        names: The Python variables that the programs of the page share.
        target: The address of the server.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack, target: str = "") -> None:
        """`folder` is the current folder. If the page starts no server, `target` is a running server."""
        self.names: dict[str, Any] = {}
        self._folder = folder
        self._stack = stack
        self._server: Serve | None = None
        self.target = target or f"127.0.0.1:{free_port()}"

    def read(self, page: str, changes: Mapping[str, str] | None = None) -> None:
        """Run all blocks of a page. In the code, replace each key of `changes` by the value."""
        for block in blocks(page):
            code = block.code
            for old, new in (changes or {}).items():
                code = code.replace(old, new)
            if block.language == "bash":
                self.run_commands(code)
            else:
                printed = self._run_program(page, code)
                assert not block.output or printed == block.output

    def run_commands(self, code: str) -> None:
        """Run the lines of one block."""
        lines = [line for line in code.splitlines() if not line.startswith("pip install")]
        if any(line.startswith("encserve serve") for line in lines):
            (line,) = lines
            self._serve(*shlex.split(line)[2:])
            return
        if lines and lines[0].split()[0] in _READY:
            (line,) = lines
            # The line of Prometheus contains a port. `encserve-server` gets its port from ENCSERVE_HTTP_PORT.
            given = re.search(r"listen-address=127\.0\.0\.1:(\d+)", line)
            port = int(given[1]) if given else free_port()
            run_until_ready(self._folder, line, port, ENCSERVE_HTTP_PORT=str(port), **_SERVER_VARIABLES)
            return
        run_commands(self._folder, "\n".join(lines), ENCSERVE_TARGET=self.target)

    def _serve(self, *arguments: str) -> None:
        """Start a server. If the page has already started a server, stop that server first."""
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
    """Yield a reader. Until the end of the block, `folder` is the current folder. Then stop the server of the page."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Reader(folder, stack, target)
