"""Runs `encserve serve` in a separate process, on free loopback ports."""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ports import free_port

_POLL_SECONDS = 0.05
COMMAND = (sys.executable, "-m", "encserve_cli")


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this process, and `variables`.

    Variables of this process named HF_*, COLUMNS or ENCSERVE_* are left out, except ENCSERVE_CACHE_DIR.
    """
    kept = {key: it for key, it in os.environ.items() if not key.startswith(("HF_", "ENCSERVE_", "COLUMNS"))}
    return {**kept, "ENCSERVE_CACHE_DIR": os.environ["ENCSERVE_CACHE_DIR"], **variables}


def without_packages(folder: Path, *names: str) -> dict[str, str]:
    """Return environment variables for a process that must not import the packages `names`.

    Python imports sitecustomize.py at its start. This function writes such a file into `folder`. The file makes imports
    of the packages fail.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({names!r}))\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


class Serve:
    """A running `encserve serve`.

    Attributes:
        process: The process.
        url: The URL of the HTTP port.
        out: The lines on standard output so far.
        err: The lines on standard error so far.
        seen: The replies of /health so far, without repetitions.
    """

    def __init__(
        self,
        *arguments: object,
        variables: Mapping[str, str],
        cwd: Path,
        limit: Callable[[], None] | None,
        command: tuple[str, ...],
    ):
        """Start the command. The output goes to pipes, not to a terminal."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--grpc-port", "0", "--metrics-port", "0", "--http-port", port, "--no-tune-batches"]
        self.process = subprocess.Popen(
            [*command, "serve", *map(str, (*flags, *arguments))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=clean_environment(variables),
            preexec_fn=limit,  # noqa: PLW1509 - only tests of a full disk use it
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=its, daemon=True)
            for its in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        self.seen: list[str] = []
        self._readers.append(threading.Thread(target=self._watch, daemon=True))
        for reader in self._readers:
            reader.start()

    def _watch(self) -> None:
        """Request /health again and again, and collect the replies.

        Every export takes much longer than the interval between two requests. So no stage is missed.
        """
        while self.process.poll() is None:
            if (body := self.health()[1]) not in self.seen[-1:]:
                self.seen.append(body)
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def _read(stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))  # noqa: PERF401 - the test reads the list meanwhile

    def health(self) -> tuple[int, str]:
        """Return the status and the body of /health. If the port is closed, return 0 and an empty body."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    async def stage(self, stage: str) -> None:
        """Wait until a reply of /health has named this stage of the start."""
        await self._until(lambda: any(f"the server is still {stage}" in body for body in self.seen))

    async def serving(self) -> None:
        """Wait until the command has printed how to call the server."""
        await self._until(lambda: "Try it:" in self.out[:-1])

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true. Only pytest's timeout ends the wait, because an export may take minutes."""
        while not condition():
            assert self.process.poll() is None, "\n".join([*self.out, *self.err])
            await asyncio.sleep(_POLL_SECONDS)

    def curl(self) -> str:
        """Run the curl line that the command printed, and return the reply."""
        (line,) = (it.strip() for it in self.out if it.strip().startswith("curl "))
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process ends, and return the exit status."""
        status = self.process.wait(timeout=60)
        for reader in self._readers:
            reader.join(timeout=10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status

    def error(self) -> str:
        """Wait until the start has failed, and return the text of the error."""
        assert self.wait() != 0
        (line,) = (it for it in self.err if "cannot start: " in it or it.startswith("Error: "))
        assert not any("Traceback" in it for it in self.err)
        return line.partition("cannot start: ")[2] or line.removeprefix("Error: ")


@contextlib.contextmanager
def encserve_serve(
    *arguments: object,
    variables: Mapping[str, str],
    cwd: Path,
    limit: Callable[[], None] | None = None,
    command: tuple[str, ...] = COMMAND,
) -> Iterator[Serve]:
    """Run `encserve serve`. At the end of the block, end the process if it still runs.

    `limit` is a function that sets limits of the new process. The process calls the function before the command.
    `command` are the words that run the program `encserve`.
    """
    serve = Serve(*arguments, variables=variables, cwd=cwd, limit=limit, command=command)
    try:
        yield serve
    finally:
        if serve.process.poll() is None:
            serve.process.terminate()  # a killed process would leave its temporary folder
        try:
            serve.wait()
        finally:
            serve.process.kill()
