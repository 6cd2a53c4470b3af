"""Programs that nobody here wrote, each in an environment of its own under .venv-judges."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness.programs import peer_environment

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / ".venv-judges"
JUDGES = ROOT / "tests/judges"
_SECONDS = 480
# Judges reach loopback alone: what looks something up elsewhere fails here, as it would where there is no network.
_OFFLINE = {"NO_PROXY": "localhost,127.0.0.1"} | dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
_OFFLINE |= {name.lower(): value for name, value in _OFFLINE.items()}


def missing(what: str) -> NoReturn:
    """A judge cannot be had: in CI that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"no judge: {what}")
    pytest.skip(f"no judge: {what}")


@contextlib.contextmanager
def _installing(folder: Path, requirements: Path) -> Iterator[bool]:
    """Whether a folder has yet to be made of what a file asks for; one process at a time makes it, from nothing."""
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = folder / ".installed"
    ENVIRONMENTS.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield True
        stamp.write_text(wanted)


def python_environment(name: str, *, beside_this: bool = False) -> Path:
    """The folder of commands of the environment that NAME.txt in tests/judges describes.

    Nothing else is in it; `beside_this` has its Python look into this environment too, for what is large.
    """
    folder, requirements = ENVIRONMENTS / name, JUDGES / f"{name}.txt"
    with _installing(folder, requirements) as needed:
        if needed:
            uv = [sys.executable, "-m", "uv"]  # takes a tenth of pip's time
            run([*uv, "venv", "--quiet", "--python", sys.executable, folder], may_fail_to_install=True)
            install = [*uv, "pip", "sync", "--quiet", "--python", folder / "bin/python", requirements]
            run(install, may_fail_to_install=True)
            if beside_this:
                (packages,) = folder.glob("lib/python*/site-packages")
                line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
                (packages / "beside.pth").write_text(line)
    return folder / "bin"


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
    """What a judge writes to stdout; AssertionError with all that it wrote if it ends otherwise than with 0.

    Only what installs reaches the network.
    """
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=cwd,
        env=peer_environment() | ({} if may_fail_to_install else _OFFLINE) | dict(environment or {}),
        check=False,
    )
    if done.returncode and may_fail_to_install:
        missing(f"{' '.join(map(str, command))}: {done.stderr[-1500:]}")
    assert not done.returncode, f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def source_folder(package: str) -> Path:
    """The sources of a package, which PACKAGE-tests.txt in tests/judges pins."""
    folder, requirements = ENVIRONMENTS / f"{package}-tests", JUDGES / f"{package}-tests.txt"
    with _installing(folder, requirements) as needed:
        if needed:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
            run([*pip, "--dest", folder, "-r", requirements], may_fail_to_install=True)
            (archive,) = folder.glob("*.tar.gz")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def npm_folder(source: Path) -> Path:
    """A copy of a folder with what its package-lock.json pins beside it."""
    folder = ENVIRONMENTS / source.name
    with _installing(folder, source / "package-lock.json") as needed:
        if needed:
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules"))
            npm = program("npm", "npm")
            run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], may_fail_to_install=True, cwd=folder)
    for file in source.glob("*.js"):
        shutil.copy(file, folder)
    return folder
