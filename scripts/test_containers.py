"""Builds the images, starts docker-compose.yml, restarts its servers under load, and removes everything.

The script needs docker with compose, or podman with podman-compose. Without these commands, the script prints SKIPPED
and exits with status 0, or with status 1 if ENCSERVE_REQUIRE_CONTAINERS=1.

Containers, networks and volumes belong to a new compose project, which uses free ports. If the image of Grafana or
Envoy cannot be pulled, the script prints a message and does not test this service.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import yaml
from container_engine import ROOT, Engine, EngineFailed

from encserve_client import EncoderClient, EncserveError, RetryPolicy, ServerUnavailableError

WHEELS = ROOT / "dist"
BUILT = {  # for each image: the Dockerfile, and the flags of the build
    "encserve-server:cpu": ("deploy/server.Dockerfile", ["--build-arg", "EXTRA=cpu"]),
    "encserve-export:demo": ("deploy/export.Dockerfile", ["--target", "demo"]),
}
STOP_SECONDS = 40
# sentence-transformers computed these expected values with the demo's model. IDS has the token ids of TEXT. NORMS has
# the norm of each token's hidden state. COSINES has the similarities of SENTENCES.
TEXT = "I understand this"
IDS = [101, 1045, 3305, 2023, 102]
NORMS = [6.521, 9.838, 11.576, 8.945, 11.774]
SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the sunny window.",
    "Stock markets fell sharply on Monday.",
    "Shares dropped at the start of the week.",
]
COSINES = [[1, 0.657, -0.054, -0.053], [0.657, 1, 0.016, -0.009], [-0.054, 0.016, 1, 0.589], [-0.053, -0.009, 0.589, 1]]
# This program runs in the server's container, and prints the missing restrictions to stderr. If none is missing, the
# exit status is 0.
CONFINED = """
import importlib.util, os, shutil
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
wrong = []
if os.getuid() != 10001 or os.getgid() != 10001: wrong.append(f"runs as {os.getuid()}:{os.getgid()}")
if int(status["CapEff"], 16) or int(status["CapBnd"], 16): wrong.append("has capabilities")
if status["NoNewPrivs"].strip() != "1": wrong.append("may gain privileges")
for folder in ("/", "/opt/encserve", "/models", "/usr/local"):
    try: open(os.path.join(folder, "probe"), "w").close(); wrong.append(f"can write to {folder}")
    except OSError: pass
open("/tmp/probe", "w").close()
wrong += [f"has the module {it}" for it in ("torch", "transformers", "onnx") if importlib.util.find_spec(it)]
wrong += [f"has {it}" for it in ("gcc", "cc", "g++", "c++", "clang", "ld", "make") if shutil.which(it)]
first = open("/proc/1/cmdline").read().split("\\0")
if not any(part.endswith("encserve-server") for part in first[:2]): wrong.append(f"runs {first} as process 1")
raise SystemExit("; ".join(wrong) or 0)
"""


class Failed(Exception):
    """A check failed. The message describes the failure."""


def expect(condition: bool, message: str) -> None:
    """Raise Failed with `message` unless `condition` is true."""
    if not condition:
        raise Failed(message)


def until(condition: Callable[[], bool], description: str, seconds: float) -> None:
    """Wait until a condition is true. Raise Failed if the condition is not true after `seconds`."""
    ends = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < ends, f"not true within {seconds:g} s: {description}")
        time.sleep(0.5)


def step(text: str) -> None:
    """Print the name of the next step."""
    print(f"--- {text}", flush=True)


@contextmanager
def torch_wheel() -> Iterator[bool]:
    """Put PyTorch's CPU wheel into dist/ until the end of the `with` block, if pip finds the wheel locally.

    pip searches only the folders in its find-links settings.

    Yields:
        Whether the wheel was found. If not, the image build downloads the wheel from the URL in TORCH_INDEX_URL. If
        this variable is not set, the build downloads the wheel from PyTorch's index.
    """
    before = set(WHEELS.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", WHEELS, "-c", ROOT / "constraints.txt", "torch"],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    try:
        yield done.returncode == 0
    finally:
        for wheel in set(WHEELS.glob("*.whl")) - before:
            wheel.unlink()


def build(engine: Engine) -> None:
    """Build the images that the compose profiles cpu and replicas use."""
    common = ["--network", "host"] + (["--format", "docker"] if engine.is_podman else [])
    indexes = {name: os.environ[name] for name in ("PIP_INDEX_URL", "TORCH_INDEX_URL") if name in os.environ}
    with torch_wheel() as has_torch:
        indexes |= {"TORCH_INDEX_URL": ""} if has_torch else {}
        for image, (dockerfile, given) in BUILT.items():
            began = time.monotonic()
            declared = [name for name in indexes if f"ARG {name}=" in (ROOT / dockerfile).read_text()]
            flags = [*given, *(word for name in declared for word in ("--build-arg", f"{name}={indexes[name]}"))]
            engine.run("build", *common, *flags, "--file", dockerfile, "--tag", image, ".", timeout=1200)
            mib = int(engine.run("image", "inspect", "--format", "{{.Size}}", image).stdout) / 2**20
            step(f"built {image}: {mib:.0f} MiB in {time.monotonic() - began:.0f} s")


def check_rows(port: int) -> None:
    """Compare the server's token ids, norms of hidden states and cosine similarities with the expected values."""
    with EncoderClient(f"127.0.0.1:{port}") as client:
        result = client.run([TEXT], outputs=["tokens"])
        vectors = client.embed(SENTENCES)
    (rows,) = result.outputs[0].arrays()
    ids = np.asarray(result.sequences[0].token_ids)
    expect(np.array_equal(ids, IDS), f"token ids are {ids}, not {IDS}")
    expect(rows.shape == (len(IDS), 384), f"the hidden states have the shape {rows.shape}, not {(len(IDS), 384)}")
    norms = np.linalg.norm(rows, axis=1)
    expect(np.allclose(norms, NORMS, atol=2e-3), f"norms are {norms}, not {NORMS}")
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expect(np.allclose(units @ units.T, COSINES, atol=2e-3), f"cosines are {units @ units.T}, not {COSINES}")


def query(engine: Engine, promql: str) -> dict[str, float]:
    """Run a Prometheus query. Return the value for each instance, or {} if Prometheus does not answer."""
    url = f"http://127.0.0.1:{engine.ports['prometheus']}/api/v1/query?" + urllib.parse.urlencode({"query": promql})
    try:
        with urllib.request.urlopen(url, timeout=10) as page:
            results = json.load(page)["data"]["result"]
    except OSError:
        return {}
    return {it["metric"].get("instance", ""): float(it["value"][1]) for it in results}


class Load:
    """Threads that encode one text again and again until the end of the `with` block.

    Attributes:
        answered: The number of replies with hidden states of the right shape.
        failed: The number of failed calls by reason. A reason is an error's name, or a message that
            gives the wrong shape of the hidden states.
    """

    def __init__(self, port: int, callers: int, retry: RetryPolicy | None = None) -> None:
        """Prepare `callers` threads that call the server at `port`. If `retry` is None, use the client's default."""
        self.answered = 0
        self.failed: Counter[str] = Counter()
        self._port, self._retry = port, retry or RetryPolicy()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def __enter__(self) -> "Load":
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads and wait for the last replies."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def more(self, calls: int, seconds: float = 60) -> None:
        """Wait until `calls` more calls have been answered. Raise Failed if this takes longer than `seconds`."""
        total = self.answered + calls
        until(lambda: self.answered >= total, f"{calls} more replies", seconds)

    def _call(self) -> None:
        with EncoderClient(f"127.0.0.1:{self._port}", retry=self._retry) as client:
            while not self._stop.is_set():
                try:
                    (row,) = client.token_vectors([TEXT])
                    outcome = "" if row.shape == (len(IDS), 384) else f"hidden states of the shape {row.shape}"
                except EncserveError as error:
                    outcome = type(error).__name__
                with self._lock:
                    if outcome:
                        self.failed[outcome] += 1
                    else:
                        self.answered += 1


def start(engine: Engine, profile: str, services: list[str]) -> None:
    """Start services, and wait until all of them except `export` are healthy. `export` exits after its work."""
    step(f"docker compose --profile {profile} up: {', '.join(services)}")
    engine.compose(profile, "up", "--detach", "--no-build", *services, timeout=400)
    for service in services:
        if service != "export":
            until(partial(engine.healthy, service), f"{service} is healthy", 120)


def restart(engine: Engine, service: str) -> None:
    """Stop a service with SIGTERM, start it again, and wait until it is healthy."""
    container = engine.container(service)
    engine.run("stop", "-t", str(STOP_SECONDS), container, timeout=STOP_SECONDS + 30)
    state = engine.inspect(service)["State"]
    expect(state["ExitCode"] == 0, f"{service} ended with exit status {state['ExitCode']}")
    engine.run("start", container)
    until(lambda: engine.healthy(service), f"{service} is healthy again", 120)


def check_one_server(engine: Engine, services: list[str]) -> None:
    """Check one server with Prometheus: vectors, confinement, metrics and a restart under load.

    Confinement means that the container has no privileges, and no tools that an attacker could use.
    """
    start(engine, "cpu", services)
    step("check the token ids, norms and cosines of real text")
    check_rows(engine.ports["grpc"])
    step("the server's container is confined: user, file system, capabilities, no torch, no compiler")
    done = engine.run("exec", engine.container("server"), "python", "-c", CONFINED, check=False)
    expect(done.returncode == 0, f"the container {done.stderr}")
    step("check that Prometheus scrapes the server")
    until(lambda: query(engine, "up{job='encserve'}") == {"server:9464": 1}, "Prometheus scrapes the server", 60)
    until(lambda: sum(query(engine, "encserve_tokens_total").values()) > 0, "encserve_tokens_total is above 0", 60)
    step("docker compose up again: the model exists, so the service export writes nothing")
    began = engine.inspect("export")["State"]["StartedAt"]
    before = engine.run("logs", engine.container("export"))
    engine.compose("cpu", "up", "--detach", "--no-build", "export")
    until(lambda: not engine.inspect("export")["State"]["Running"], "export has ended", 60)
    expect(engine.inspect("export")["State"]["StartedAt"] != began, "export did not run again")
    log = engine.run("logs", engine.container("export"))
    expect(log.stdout + log.stderr == before.stdout + before.stderr, f"export printed {log.stdout + log.stderr!r}")
    step("the server restarts under load: 8 callers with default retries, 8 with many retries")
    patient = RetryPolicy(max_attempts=1000, max_backoff_seconds=0.5)
    with Load(engine.ports["grpc"], 8) as default, Load(engine.ports["grpc"], 8, patient) as waiting:
        default.more(50)
        expect(not default.failed, f"calls failed before the restart: {default.failed}")
        restart(engine, "server")
        failed = default.failed.copy()
        default.more(50)
        waiting.more(50)
    print(f"    default retries: {default.answered} answered, failed during the restart: {dict(failed)}")
    print(f"    many retries: {waiting.answered} answered, failed: {dict(waiting.failed)}")
    # During the restart, calls with default retries may fail with ServerUnavailableError, because only one server
    # runs. Calls with many retries must not fail.
    expect(set(default.failed) <= {ServerUnavailableError.__name__}, f"calls failed with: {default.failed}")
    expect(default.failed == failed, f"calls failed after the restart: {default.failed}")
    expect(not waiting.failed, f"calls with many retries failed: {waiting.failed}")


def check_replicas(engine: Engine) -> None:
    """Check that no call fails while two servers behind Envoy restart one after the other."""
    start(engine, "replicas", ["export", "prometheus-replicas", "server-a", "server-b", "envoy"])
    both = {"server-a:9464": 1.0, "server-b:9464": 1.0}
    # The services prometheus and prometheus-replicas use the same volume. For five minutes, queries also return the
    # last values from the service prometheus. So the result may contain more instances than `both`.
    until(lambda: query(engine, "up{job='encserve'}").items() >= both.items(), "Prometheus scrapes both servers", 60)
    balanced = "envoy_cluster_membership_healthy{envoy_cluster_name='encserve'}"
    until(lambda: query(engine, balanced) == {"envoy:9902": 2.0}, "Envoy has two healthy servers", 60)
    check_rows(engine.ports["grpc"])
    with Load(engine.ports["grpc"], 16) as load:
        load.more(100)
        for service in ("server-a", "server-b"):
            step(f"{service} restarts under load: 16 callers with default retries")
            restart(engine, service)
            load.more(100)
    print(f"    {load.answered} answered, failed: {dict(load.failed)}")
    expect(not load.failed, f"calls failed: {load.failed}")
    share = "sum by (instance) (encserve_tokens_total{instance=~'server-[ab]:9464'})"
    until(lambda: query(engine, share).keys() == both.keys(), "Prometheus has the tokens of both servers", 60)
    until(lambda: min(query(engine, share).values()) > 0, "both servers have encoded tokens", 60)


def check(engine: Engine) -> list[str]:
    """Run all checks. Return the services that are left out because their images cannot be pulled."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    missing = [name for name in ("prometheus", "grafana", "envoy") if not engine.has(services[name]["image"])]
    for name in missing:
        step(f"left out: {name} (cannot pull {services[name]['image']})")
    expect("prometheus" not in missing, "the checks need the image of Prometheus")
    build(engine)
    check_one_server(engine, ["export", "server", "prometheus"] + ([] if "grafana" in missing else ["grafana"]))
    engine.compose("cpu", "down")
    if "envoy" not in missing:
        check_replicas(engine)
    return missing


def main() -> int:
    """Run all checks and return the exit status."""
    engine = Engine.find()
    if engine is None:
        print("SKIPPED, not passed: this script needs docker with compose, or podman with podman-compose.")
        return 1 if os.environ.get("ENCSERVE_REQUIRE_CONTAINERS") == "1" else 0
    step(f"use {engine.command}, with the compose project {engine.project}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so that `finally` runs
    began = time.monotonic()
    try:
        missing = check(engine)
    except (Failed, EngineFailed, EncserveError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}")
        print(engine.logs())
        return 1
    finally:
        step("remove containers, networks and volumes")
        for profile in ("cpu", "replicas"):
            engine.compose(profile, "down", "--volumes", "--timeout", "10")
    leftovers = engine.leftovers()
    if leftovers:
        print(f"FAILED: these containers, volumes or networks still exist: {leftovers}")
        return 1
    print(f"PASSED in {time.monotonic() - began:.0f} s" + "".join(f"\n  without {name}" for name in missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
