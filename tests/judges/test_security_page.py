"""Runs the code blocks of docs/how-to/tls.md and docs/how-to/keys-and-shares.md in order. No block fails.

The test replaces the ports in the code by free ports.
"""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_text import code_blocks
from judging import ROOT, python_environment, with_ports
from real_server import RealServer, real_server
from tiny_bundle import write_bundle
from tiny_heads import words

pytestmark = pytest.mark.timeout(900)  # the first run installs openai

MODEL = "all-MiniLM-L6-v2"


@contextlib.contextmanager
def started(lines: str, folder: Path, variables: dict[str, str]) -> Iterator[RealServer]:
    """Run the server command of a code block with free ports and a tiny model."""
    program, *flags = shlex.split(lines.replace("\\\n", " "))
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (program, given.pop("--model-repository"), given.pop("--http-port")) == ("encserve-server", "models", "8080")
    files = [word for flag, name in given.items() for word in (flag, str(folder / name))]
    alias = ("--served-model-name", f"{MODEL}=tiny")
    with real_server(folder / "models", "--http-port", "0", *files, *alias, variables=variables) as server:
        yield server


@pytest.mark.parametrize(("page", "expected"), [("tls.md", 7), ("keys-and-shares.md", 5)])
def test_no_code_block_fails(tmp_path: Path, page: str, expected: int) -> None:
    write_bundle(tmp_path / "models", tokenizer=words())
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": commands, "NO_PROXY": "*"}
    exported: dict[str, str] = {}
    ran = 0
    with contextlib.ExitStack() as stack:
        server: RealServer | None = None
        for language, lines in code_blocks((ROOT / "docs/how-to" / page).read_text(), "sh", "python", "toml"):
            if language == "toml":
                (tmp_path / "callers.toml").write_text(lines.replace(MODEL, "tiny"))
                exported.clear()  # the next server has --callers, and refuses to start with ENCSERVE_API_KEY
                continue
            if lines.startswith("encserve-server"):
                stack.close()
                server = stack.enter_context(started(lines, tmp_path, exported))
                continue
            if server is not None:
                lines = with_ports(lines, server)
                environment["ENCSERVE_TARGET"] = f"localhost:{server.grpc_port}"
            command = ["bash", "-euo", "pipefail", "-c", f"{lines}\nenv -0 > exported"]
            if language == "python":
                python = python_environment("clients") / "python" if "import openai" in lines else sys.executable
                command = [str(python), "-c", f"{lines}\nassert vectors is not None"]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment | exported,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
            if language == "sh":
                after = dict(line.split("=", 1) for line in (tmp_path / "exported").read_text().split("\0") if line)
                exported |= {name: after[name] for name in after if name == "ENCSERVE_API_KEY"}
            ran += 1
    assert ran == expected
