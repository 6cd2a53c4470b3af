"""Debian's Prometheus and its promtool."""

import os
import shutil
import subprocess

import pytest


def need(program: str) -> str:
    """The path of a program. Where it is missing the test is skipped, or fails if ENCSERVE_REQUIRE_PROMETHEUS is 1."""
    path = shutil.which(program)
    if path is None:
        if os.environ.get("ENCSERVE_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(f"no {program}, and ENCSERVE_REQUIRE_PROMETHEUS is 1")
        pytest.skip(f"no {program} is on the path (apt-get install prometheus)")
    return path


def promtool(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs promtool to its end."""
    return subprocess.run(
        [need("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
