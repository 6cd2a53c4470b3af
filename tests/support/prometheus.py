"""Runs Prometheus and promtool from Debian."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml


def need(program: str) -> str:
    """Return the path of a program.

    If the program is missing, skip the test. But with ENCSERVE_REQUIRE_PROMETHEUS=1, fail the test.
    """
    path = shutil.which(program)
    if path is None:
        if os.environ.get("ENCSERVE_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(f"no {program}, and ENCSERVE_REQUIRE_PROMETHEUS is 1")
        pytest.skip(f"no {program} is on the path (apt-get install prometheus)")
    return path


def promtool(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run promtool and return its result."""
    return subprocess.run(
        [need("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=240, check=False
    )


class Prometheus:
    """A client for the HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Request a path of the API and return the data of the reply.

        If the reply is an error, raise an AssertionError with the text of the reply.
        """
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        return data

    def values(self, expr: str) -> list[float]:
        """Evaluate an expression, and return the current value of each series in the result."""
        return [float(series["value"][1]) for series in self.get("query", query=expr)["result"]]

    def ready(self) -> bool:
        """Return whether Prometheus is ready."""
        try:
            urllib.request.urlopen(f"{self._url}/-/ready", timeout=5).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running_prometheus(committed: Path, folder: Path, target: str, *, interval: str) -> Iterator[Prometheus]:
    """Run Prometheus on loopback with a configuration file from deploy/. Stop Prometheus at the end of the block.

    Only the scrape target, the intervals and the paths of the rule files are changed.
    """
    program = need("prometheus")
    config = yaml.safe_load(committed.read_text())
    config["global"] |= {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(committed.parent / pattern) for pattern in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            prometheus = Prometheus(f"http://{address}")
            ends = time.monotonic() + 60
            while not prometheus.ready():
                if process.poll() is not None or time.monotonic() > ends:
                    pytest.fail(f"Prometheus did not start: {(folder / 'log').read_text()}")
                time.sleep(0.1)
            yield prometheus
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
