"""The programs and the curl line of README.md run as they are written, and print the output that README.md shows."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from docs_text import code_blocks
from judging import ROOT, python_environment, run, with_ports
from real_server import RealServer

README = (ROOT / "README.md").read_text()
(_, OWN_PROGRAM), (_, OPENAI_PROGRAM) = code_blocks(README, "python")
(_, CURL_OUTPUT), (_, OWN_OUTPUT) = code_blocks(README, "text")


def test_the_curl_line(minilm: RealServer) -> None:
    """README.md shows the first numbers of the vector. `…` replaces all other numbers."""
    (line,) = re.findall(r"^ +(curl .*)$", README, re.MULTILINE)
    command = shlex.split(with_ports(line, minilm))
    reply = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    shown = json.loads(CURL_OUTPUT.replace(",…", ""))
    first = shown["data"][0]["embedding"]
    np.testing.assert_allclose(reply["data"][0]["embedding"][: len(first)], first, atol=1e-4)
    reply["data"][0]["embedding"] = first
    assert reply == shown


def test_the_python_client(minilm: RealServer) -> None:
    command = [sys.executable, "-c", with_ports(OWN_PROGRAM, minilm)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == OWN_OUTPUT


def test_the_client_of_openai(minilm: RealServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{with_ports(OPENAI_PROGRAM, minilm)}assert len(reply.data[0].embedding) == 384\n")
    run([python_environment("clients") / "python", program])
