"""Runs the containers' commands without a container engine. Folders made from the Dockerfiles replace the images.

As in a container, a command runs as user 10001, with a read-only root.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from checkpoints import export_minilm
from deploy_files import DEPLOY, ROOT, container_of, load, mounts, rendered
from fake_hub import fake_hub
from image_folders import Dockerfile, Stage

# pip takes minutes for an image, so the timeout is long. The exporter's image has PyTorch, so its tests are weekly.
pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

COMPOSE = load("../docker-compose.yml")["services"]
TEXTS = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the sunny window.",
    "Stock markets fell sharply on Monday.",
]
COSINES = [[1, 0.657, -0.054], [0.657, 1, 0.016], [-0.054, 0.016, 1]]  # from sentence-transformers
# This program runs in the container. The program starts the container's command, waits for the health check, asks for
# vectors, and stops the command.
DRIVER = """
import json, signal, ssl, subprocess, sys, time, urllib.request
command, health, url, texts, headers = json.loads(sys.argv[1])
server = subprocess.Popen(command)
while subprocess.run(health, capture_output=True).returncode:
    if server.poll() is not None: sys.exit(f"the server ended with exit status {server.returncode}")
    time.sleep(0.2)
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
request = urllib.request.Request(url, json.dumps({"input": texts}).encode(), headers)
reply = urllib.request.urlopen(request, context=context if url.startswith("https") else None)
vectors = [row["embedding"] for row in json.load(reply)["data"]]
server.send_signal(signal.SIGTERM)
print(json.dumps({"vectors": vectors, "status": server.wait(60)}))
"""
# This program runs in the container, and fails unless the page answers 200. The program does not check certificates,
# because the kubelet does not check certificates either.
HEALTHZ = """
import ssl, sys, urllib.request
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
urllib.request.urlopen(sys.argv[1], context=context)
"""
# This program runs in the container, and prints the restrictions that the container should have and lacks.
CONFINED = """
import importlib.util, json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
wrong = []
if (os.getuid(), os.getgid()) != (10001, 10001): wrong.append(f"runs as {os.getuid()}:{os.getgid()}")
if int(status["CapEff"], 16): wrong.append("has capabilities")
if status["NoNewPrivs"].strip() != "1": wrong.append("may gain privileges")
for folder in ("/", "/opt/encserve", "/models", "/usr/local"):
    try: open(os.path.join(folder, "probe"), "w").close(); wrong.append(f"can write to {folder}")
    except OSError: pass
for folder in ("/tmp", "/cache"): open(os.path.join(folder, "probe"), "w").close()
wrong += [f"has the module {it}" for it in ("torch", "transformers", "onnx") if importlib.util.find_spec(it)]
print(json.dumps(wrong))
"""


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with PyTorch's wheel, or an empty folder if pip does not find the wheel on this machine."""
    folder = tmp_path_factory.mktemp("dist")
    (torch,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--dest",
        str(folder),
        torch,
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    return folder


@pytest.fixture(scope="session")
def server_image(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> Stage:
    arguments = COMPOSE["server"]["build"]["args"]
    path = ROOT / COMPOSE["server"]["build"]["dockerfile"]
    return Dockerfile(path, tmp_path_factory.mktemp("s"), arguments, dist).stage()


@pytest.fixture(scope="session")
def export_file(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> Dockerfile:
    arguments = {"TORCH_INDEX_URL": ""} if any(dist.iterdir()) else {}
    return Dockerfile(DEPLOY / "export.Dockerfile", tmp_path_factory.mktemp("e"), arguments, dist)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    export_minilm(folder)
    return folder


def check_server(
    image: Stage,
    command: list[str],
    volumes: Mapping[str, tuple[Path, bool]],
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    tmpfs: Sequence[str] = (),
    health: list[str] | None = None,
    scheme: str = "http",
    key: str = "",
) -> None:
    """Run a server in an image until it is healthy. Check its vectors, and its exit status after SIGTERM.

    Without `health`, the image's HEALTHCHECK says whether the server is healthy.
    """
    for path in volumes:
        image.mount_point(path)
    url = f"{scheme}://127.0.0.1:8080/v1/embeddings"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    job = json.dumps([command, health or image.command("HEALTHCHECK"), url, TEXTS, headers])
    done = image.run(["python", "-c", DRIVER, job], volumes, environment, tmpfs=tmpfs)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout.splitlines()[-1])
    assert reply["status"] == 0, done.stderr
    vectors = np.array(reply["vectors"])
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(units @ units.T, COSINES, atol=2e-3)


def test_a_container_is_confined(server_image: Stage, tmp_path: Path) -> None:
    for name in ("models", "cache"):
        (tmp_path / name).mkdir()
    volumes = {"/models": (tmp_path / "models", True), "/cache": (tmp_path / "cache", False)}
    done = server_image.run(["python", "-c", CONFINED], volumes, tmpfs=COMPOSE["server"]["tmpfs"])
    assert (done.returncode, json.loads(done.stdout or "[]")) == (0, []), done.stderr


def test_the_server_of_compose(server_image: Stage, models: Path, tmp_path: Path) -> None:
    service = COMPOSE["server"]
    folders = {"models": models, "cache": tmp_path}
    volumes = {target: (folders[source], read_only) for source, target, read_only in mounts(service)}
    command = server_image.command("ENTRYPOINT")
    check_server(server_image, command, volumes, service["environment"], tmpfs=service["tmpfs"])
    assert any(tmp_path.iterdir())  # the server has stored its prepacked weights


def test_docker_run_with_a_flag(server_image: Stage, models: Path) -> None:
    """The arguments after the image's name are flags of the server. Only the volume with the models is needed."""
    command = [*server_image.command("ENTRYPOINT"), "--model", "all-MiniLM-L6-v2", "--http-port", "8080"]
    check_server(server_image, command, {"/models": (models, False)}, tmpfs=["/tmp"])  # noqa: S108 - in the container


def volumes_of(container: Any, folders: Mapping[str, Path]) -> dict[str, tuple[Path, bool]]:
    return {
        mount["mountPath"]: (folders[mount["name"]], mount.get("readOnly", False))
        for mount in container["volumeMounts"]
    }


@pytest.mark.parametrize("values", [[], ["values-secure.yaml"]], ids=["plain", "secure"])
def test_the_server_of_kubernetes(server_image: Stage, models: Path, tmp_path: Path, values: list[str]) -> None:
    container = container_of(rendered(*values)["Deployment"])
    folders = {"models": models} | {name: tmp_path / name for name in ("cache", "tmp", "tls", "callers")}
    for name in ("cache", "tmp", "tls", "callers"):
        folders[name].mkdir()
    pair = Authority(tmp_path).issue("encserve.encserve.svc.cluster.local")
    pair.cert.rename(folders["tls"] / "tls.crt")
    pair.key.rename(folders["tls"] / "tls.key")
    key = "a-key-of-a-caller"
    digest = hashlib.sha256(key.encode()).hexdigest()
    (folders["callers"] / "callers.toml").write_text(f'[[caller]]\nname = "search"\nkey_sha256 = ["{digest}"]\n')
    check_server(
        server_image,
        [*server_image.command("ENTRYPOINT"), *container["args"]],
        volumes_of(container, folders),
        health=probe_command(container["readinessProbe"]),
        scheme="https" if values else "http",
        key=key,
    )


def probe_command(probe: Any) -> list[str]:
    """Return a command that does the kubelet's probe."""
    if "grpc" in probe:
        return ["python", "-m", "encserve_server.healthcheck", f"127.0.0.1:{probe['grpc']['port']}"]
    assert (probe["httpGet"]["scheme"], probe["httpGet"]["port"]) == ("HTTPS", "metrics")
    return ["python", "-c", HEALTHZ, f"https://127.0.0.1:9464{probe['httpGet']['path']}"]


def test_the_server_of_kserve(server_image: Stage, models: Path, tmp_path: Path) -> None:
    container = container_of(load("kserve/serving-runtime.yaml"))
    folders = {name: tmp_path / name for name in ("cache", "tmp")}
    for folder in folders.values():
        folder.mkdir()
    arguments = [word.replace("{{.Name}}", "all-MiniLM-L6-v2") for word in container["args"]]
    command = [*server_image.command("ENTRYPOINT"), *arguments, "--http-port=8080"]
    check_server(server_image, command, volumes_of(container, folders) | {"/mnt/models": (models, True)})


@pytest.mark.weekly
def test_the_export_of_compose(export_file: Dockerfile, server_image: Stage, tmp_path: Path) -> None:
    """The service `export` writes the demo's model, without a network. A second run of the service does nothing."""
    service = COMPOSE["export"]
    image = export_file.stage(service["build"]["target"])
    command = [word.replace("$$", "$") for word in (*service["entrypoint"], *service["command"])]
    exported = image.run(command, {"/models": (tmp_path, False)}, tmpfs=service["tmpfs"])
    assert exported.returncode == 0, exported.stderr
    again = image.run(command, {"/models": (tmp_path, False)}, tmpfs=service["tmpfs"])
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    entry_point = server_image.command("ENTRYPOINT")
    server = COMPOSE["server"]
    volumes = {"/models": (tmp_path, True)}
    check_server(server_image, entry_point, volumes, server["environment"], tmpfs=server["tmpfs"])


@pytest.mark.weekly
def test_the_init_container_of_kubernetes(export_file: Dockerfile, server_image: Stage, tmp_path: Path) -> None:
    """The container downloads and exports the model. A second run of the container needs no hub."""
    pod = rendered()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["initContainers"]
    image = export_file.stage()
    folders = {name: tmp_path / name for name in ("models", "cache", "tmp")}
    volumes = volumes_of(container, folders)
    for path in volumes:
        image.mount_point(path)
    for folder in folders.values():
        folder.mkdir()
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    (model,) = load("helm/encserve/values.yaml")["models"]
    with fake_hub(model["source"], export_file.stage("checkpoint").root / "checkpoint") as endpoint:
        variables = environment | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
        pulled = image.run(container["command"], volumes, variables, has_network=True)
    assert pulled.returncode == 0, pulled.stderr
    again = image.run(container["command"], volumes, environment)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    server = container_of(rendered()["Deployment"])
    command = [*server_image.command("ENTRYPOINT"), *server["args"]]
    check_server(server_image, command, volumes_of(server, folders))
