"""Installs and runs the judges. A judge is a program that calls our server with another project's client.

The judges run in virtual environments under .venv-judges. Each environment has two variants. `pinned` has the package
versions in tests/judges/NAME.txt. `newest` has the newest versions that tests/judges/NAME.in allows.
"""

import contextlib
import datetime
import fcntl
import hashlib
import os
import re
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
from real_server import RealServer

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / ".venv-judges"
JUDGES = ROOT / "tests/judges"
TEXTS = ["I understand this", "and that", "🌍 ein längerer Satz, der in mehr Tokens zerfällt als andere", "a" * 300]
DEBIAN_GO = (  # the same package names are in .ci/run
    "golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protobuf-compiler protoc-gen-go "
    "protoc-gen-go-grpc"
)
_TIMEOUT_SECONDS = 480
# The clients may use loopback only. Requests to other hosts go to a proxy that does not exist, so these requests fail.
_OFFLINE = {"NO_PROXY": "localhost,127.0.0.1"} | dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
_OFFLINE |= {name.lower(): value for name, value in _OFFLINE.items()}


def missing(reason: str) -> NoReturn:
    """Skip the test. If the environment variable CI is set, fail the test instead."""
    if os.environ.get("CI"):
        pytest.fail(f"no judge: {reason}")
    pytest.skip(f"no judge: {reason}")


@contextlib.contextmanager
def _installing(folder: Path, wanted: str) -> Iterator[bool]:
    """Lock `folder` against other processes. Yield True if the caller must fill the folder.

    `wanted` identifies the expected content. If the folder has other content, delete the folder first.
    """
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


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def python_environment(name: str, versions: str = "pinned", *, with_encserve: bool = False) -> Path:
    """Create a virtual environment if needed. Return the environment's bin folder.

    If `with_encserve` is true, programs in the environment can also import the packages of the running Python. The
    variant `newest` is installed again each week.
    """
    uv = [sys.executable, "-m", "uv"]
    if versions == "pinned":
        folder, requirements = ENVIRONMENTS / name, JUDGES / f"{name}.txt"
        install, wanted = [*uv, "pip", "sync"], _digest(requirements)
    else:
        folder, requirements = ENVIRONMENTS / f"{name}-newest", JUDGES / f"{name}.in"
        year, week, _ = datetime.datetime.now(datetime.UTC).date().isocalendar()
        install, wanted = [*uv, "pip", "install", "--upgrade", "-r"], f"{_digest(requirements)} {year}-{week}"
    with _installing(folder, wanted) as needed:
        if needed:
            run([*uv, "venv", "--quiet", "--python", sys.executable, folder], installs=True)
            run([*install, requirements, "--quiet", "--python", folder / "bin/python"], installs=True)
            if with_encserve:
                (packages,) = folder.glob("lib/python*/site-packages")
                line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
                (packages / "ours.pth").write_text(line)
    return folder / "bin"


def program(name: str, package: str) -> str:
    """Return the path of a system program. If the program is not installed, call `missing`.

    `package` is the Debian package that contains the program.
    """
    path = shutil.which(name)
    if path is None:
        missing(f"no {name} is on the path (apt-get install {package})")
    return path


def with_ports(lines: str, server: RealServer) -> str:
    """Replace the default ports in a code block by the ports of the test's server."""
    ports = {"50051": server.grpc_port, "8080": server.http_port, "9464": server.metrics_port}
    return re.sub("|".join(ports), lambda match: str(ports[match[0]]), lines)


def run(
    command: Sequence[Any],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    installs: bool = False,
) -> str:
    """Run a program and return the program's stdout.

    If `installs` is true, the program may use the network. If the program fails, call `missing`.

    If `installs` is false, the program may use loopback only. If the program fails, raise an AssertionError with the
    output.
    """
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        cwd=cwd,
        env=peer_environment() | ({} if installs else _OFFLINE) | dict(environment or {}),
        check=False,
    )
    if done.returncode and installs:
        missing(f"{' '.join(map(str, command))}: {done.stderr[-1500:]}")
    assert not done.returncode, f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def source_folder(package: str) -> Path:
    """Download and unpack the sources of a package. Return the folder.

    tests/judges/PACKAGE-tests.txt contains the version to download.
    """
    folder, requirements = ENVIRONMENTS / f"{package}-tests", JUDGES / f"{package}-tests.txt"
    with _installing(folder, _digest(requirements)) as needed:
        if needed:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
            run([*pip, "--dest", folder, "-r", requirements], installs=True)
            (archive,) = folder.glob("*.tar.gz")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def npm_folder(source: Path) -> Path:
    """Copy a folder, and install the packages of the folder's package-lock.json. Return the copy."""
    folder = ENVIRONMENTS / source.name
    with _installing(folder, _digest(source / "package-lock.json")) as needed:
        if needed:
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules"))
            npm = program("npm", "npm")
            run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], installs=True, cwd=folder)
    for file in source.glob("*.js"):
        shutil.copy(file, folder)
    return folder


def go_example(folder: Path) -> Path:
    """Build the program of clients/examples/go in `folder`. The README of the example has the same steps."""
    go = program("go", DEBIAN_GO)
    for plugin in ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
        program(plugin, DEBIAN_GO)
    stubs = folder / "build"
    (stubs / "src").mkdir(parents=True)
    out = [f"--go_out={stubs}/src", f"--go-grpc_out={stubs}/src"]
    run(["protoc", "-I", ROOT / "proto", *out, "encserve/v1/encoder.proto"])
    shutil.copy(ROOT / "clients/examples/go/main.go", folder)
    environment = {"GO111MODULE": "off", "GOPATH": f"{stubs}:/usr/share/gocode", "GOCACHE": str(ROOT / ".cache/go")}
    run([go, "build", "-o", folder / "encode", "main.go"], cwd=folder, environment=environment)
    return folder / "encode"
