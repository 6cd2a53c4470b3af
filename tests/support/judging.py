"""Programs that nobody here wrote, each in an environment of its own under .venv-judges."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness.programs import PeerUnavailable, ensure_environment, peer_environment

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / ".venv-judges"
JUDGES = ROOT / "tests/judges"
_SECONDS = 240


def missing(what: str) -> NoReturn:
    """A judge cannot be had: in CI that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"no judge: {what}")
    pytest.skip(f"no judge: {what}")


def python_environment(name: str) -> Path:
    """The folder of commands of the environment that NAME.txt in tests/judges describes."""
    try:
        return ensure_environment(name, JUDGES / f"{name}.txt", ENVIRONMENTS)
    except PeerUnavailable as error:
        missing(str(error))


def program(name: str, package: str) -> str:
    """The path of a program of the system."""
    path = shutil.which(name)
    if path is None:
        missing(f"no {name} is on the path (apt-get install {package})")
    return path


def run(
    command: Sequence[Any],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    may_fail_to_install: bool = False,
) -> str:
    """What a judge writes to stdout; AssertionError with all that it wrote if it ends otherwise than with 0."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=cwd,
        env=peer_environment() | dict(environment or {}),
        check=False,
    )
    if done.returncode and may_fail_to_install:
        missing(f"{' '.join(map(str, command))}: {done.stderr[-1500:]}")
    assert not done.returncode, f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def npm_folder(example: Path) -> Path:
    """A copy of an example with what its package-lock.json pins beside it."""
    folder = ENVIRONMENTS / example.name
    wanted = hashlib.sha256((example / "package-lock.json").read_bytes()).hexdigest()
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(example, folder, ignore=shutil.ignore_patterns("node_modules"))
        npm = program("npm", "npm")
        run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], may_fail_to_install=True, cwd=folder)
        stamp.write_text(wanted)
    for file in example.glob("*.js"):
        shutil.copy(file, folder)
    return folder
