"""Runs a real `encserve-server` process on free loopback ports."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from waiting import PATIENCE_SECONDS

COMMAND = Path(sys.executable).parent / "encserve-server"


class RealServer:
    """A running server process.

    Attributes:
        target: The gRPC address.
        url: The URL of the HTTP port. Invalid if the server has no HTTP port.
        tls: The TLS context for the metrics page. None if the page has no TLS.
        log: The parsed log lines so far. If a line is not JSON, the test fails.
    """

    def __init__(
        self, process: "subprocess.Popen[str]", start_seconds: float = 120, *, is_log_read: bool = True
    ) -> None:
        """Wait until the server logs that it is ready for requests.

        If `is_log_read` is false, the log is not read after the start.
        """
        self.process = process
        self._is_log_read = is_log_read
        self.tls: ssl.SSLContext | None = None
        self.log: list[dict[str, Any]] = []
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._serving.wait(timeout=start_seconds)
        serving = [line for line in self.log if line["message"] == "serving"]
        assert serving, f"the server did not start: {self.log}"
        self.grpc_port: int = serving[0]["grpc_port"]
        self.metrics_port: int = serving[0]["metrics_port"]
        self.http_port: int | None = serving[0]["http_port"]
        self.target = f"127.0.0.1:{self.grpc_port}"
        self.url = f"http://127.0.0.1:{serving[0]['http_port']}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if self.log[-1]["message"] == "serving":
                self._serving.set()
                if not self._is_log_read:
                    return
        self._serving.set()

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until the process ends, and return the exit status."""
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        return status

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60, context=self.tls) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def resident_bytes(self) -> int:
        """Return the resident memory of the process, in bytes."""
        return int(self.metric("process_resident_memory_bytes"))


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions, according to /proc/cpuinfo."""
    return bool({"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split()))


@contextlib.contextmanager
def real_server(
    model_repository: Path,
    *flags: str,
    program: Path = COMMAND,
    start_seconds: float = 120,
    variables: Mapping[str, str] | None = None,
    log_bytes: int | None = None,
) -> Iterator[RealServer]:
    """Run a server. At the end of the block, stop the process if the server still runs.

    By default, the server does not measure the batch budget, because the measurement takes seconds for each model.
    `flags` may turn the measurement on.

    If `log_bytes` is given, the log is a pipe of this size. The pipe is not read after the start.
    """
    cache = "ENCSERVE_CACHE_DIR"  # this variable is passed on, so all tests share one cache
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ENCSERVE_") or key == cache}
    environment |= variables or {}
    command: list[str | Path] = [program, "--model-repository", model_repository, "--no-tune-batches"]
    command += ["--grpc-port", "0", "--metrics-port", "0", *flags]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, pipesize=log_bytes or -1, text=True, env=environment
    ) as process:
        try:
            yield RealServer(process, start_seconds, is_log_read=log_bytes is None)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextlib.contextmanager
def killed_server(model_repository: Path, is_time: Callable[[RealServer], bool], *flags: str) -> Iterator[str]:
    """Run a server, and yield the server's address. When `is_time` returns true, kill the server, and start a new one.

    At the end of the block, check that the second server has encoded tokens.
    """
    flags = ("--grpc-port", str(free_port()), *flags)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(real_server(model_repository, *flags))]

        def restart() -> None:
            ends = time.monotonic() + PATIENCE_SECONDS
            while not is_time(servers[0]) and time.monotonic() < ends:
                time.sleep(0.01)
            servers[0].process.kill()
            servers[0].wait()
            servers.append(stack.enter_context(real_server(model_repository, *flags)))

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            yield servers[0].target
        finally:
            thread.join()
        assert servers[1].metric("encserve_tokens_total") > 0, "everything was encoded before the restart"
