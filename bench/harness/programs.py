"""Creates virtual environments for peers, and runs programs in these environments.

Peers are the other inference programs with which bench/peers.py compares encserve.
"""

import contextlib
import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "bench/peer_environments"
ENVIRONMENTS = ROOT / ".venv-peers"
START_SECONDS = 240.0
ANSWER_SECONDS = 600.0
LOG_CHARACTERS = 1500  # an error contains this many characters from the end of a log


class PeerUnavailable(Exception):
    """A peer cannot be installed, started or called.

    Attributes:
        peer: The peer's name.
        reason: The reason, in a few lines.
    """

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


def ensure_environment(
    peer: str, requirements: Path | None = None, environments: Path = ENVIRONMENTS, python: str = sys.executable
) -> Path:
    """Create the virtual environment of a peer, unless it exists with the same requirements.

    Args:
        peer: The peer's name.
        requirements: The requirements file for pip; default: bench/peer_environments/PEER.txt.
        environments: The folder of all environments.
        python: The interpreter for `-m venv`.

    Returns:
        The bin folder of the environment.

    Raises:
        PeerUnavailable: venv or pip fails.
    """
    requirements = requirements or FOLDER / f"{peer}.txt"
    folder = environments / peer
    stamp, digest = folder / ".installed", hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        create: list[str | Path] = [python, "-m", "venv", folder]
        install: list[str | Path] = [folder / "bin/python", "-m", "pip", "install", "--quiet", "-r", requirements]
        for command in (create, install):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                raise PeerUnavailable(peer, f"cannot be installed:\n{done.stdout.strip()[-LOG_CHARACTERS:]}")
        stamp.write_text(digest)
    return folder / "bin"


def peer_environment() -> dict[str, str]:
    """Return the environment variables of a peer.

    The variables contain no Python paths of this process. They turn off telemetry and downloads of models.
    """
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    # Triton loads libpython by name through LD_LIBRARY_PATH. This path may contain the libpython of another Python
    # installation. Such a libpython fails with this installation's standard library, so this LIBDIR comes first.
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    return {
        **{key: value for key, value in os.environ.items() if key not in ours},
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "DO_NOT_TRACK": "1",
    }


def free_ports(count: int) -> list[int]:
    """Return different free ports of the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for it in sockets:
            it.bind(("127.0.0.1", 0))
        return [it.getsockname()[1] for it in sockets]


class Program:
    """A process of a peer. The process writes its log to a file."""

    def __init__(self, peer: str, command: Sequence[Any], log: Path) -> None:
        """Start the process."""
        self.peer = peer
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=peer_environment(),
                start_new_session=True,
            )

    def failure(self, reason: str) -> PeerUnavailable:
        """Return an error with the end of the log."""
        log = self._log.read_text(errors="replace")[-LOG_CHARACTERS:]
        return PeerUnavailable(self.peer, f"{reason}; its log ends:\n{log}")

    def read(self, seconds: float) -> dict[str, Any]:
        """Wait for the next answer. An answer is a line of JSON on the program's standard output.

        Raises:
            PeerUnavailable: The process ended, or does not answer in time.
        """
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise self.failure(f"does not answer within {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.failure("has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a question, and wait for the answer. bench/peer_environments/lines.py defines the format of both."""
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("has ended") from None
        return self.read(ANSWER_SECONDS)

    def wait_for_page(self, url: str, seconds: float = START_SECONDS) -> None:
        """Wait until an HTTP GET of `url` succeeds."""
        until = time.monotonic() + seconds
        while True:
            if self.process.poll() is not None:
                raise self.failure("has ended")
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own address
                return
            if time.monotonic() > until:
                raise self.failure(f"does not serve within {seconds:.0f} s")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the process and its children. First close the pipes: many programs exit when standard input ends."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        for sign in (None, signal.SIGTERM, signal.SIGKILL):  # None sends no signal
            with contextlib.suppress(ProcessLookupError):
                if sign is not None:
                    os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
                return


@contextlib.contextmanager
def running(peer: str, command: Sequence[Any], log: Path) -> Iterator[Program]:
    """Run a program until the end of the `with` block."""
    program = Program(peer, command, log)
    try:
        yield program
    finally:
        program.stop()


def script(peer: str, name: str, flags: Mapping[str, Any]) -> list[Any]:
    """Return the command that runs a program of bench/peer_environments. A flag may have several values."""
    command: list[Any] = [ensure_environment(peer) / "python", FOLDER / name]
    for flag, value in flags.items():
        command += [flag, *(value if isinstance(value, list | tuple) else (value,))]
    return command
