"""docker-compose.yml, the Dockerfiles and what they install: confined, pinned, and of one piece with the rest."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from encserve_server.settings import Settings

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted((ROOT / "deploy").glob("*Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = {name: service for name, service in SERVICES.items() if name.startswith("server")}
GRACE_SECONDS = Settings(model_repository=ROOT).grace_seconds
CLOSE_SECONDS = 5.0

each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def seconds(duration: str) -> float:
    """Of `40s` or `2m`."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def mounts(service: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Of each volume: source, target, whether it is read-only."""
    for volume in service.get("volumes", []):
        source, target, *mode = volume.split(":")
        yield source, target, "ro" in mode


@each_service
def test_a_container_is_confined(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 1024
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc"}
    assert service.get("network_mode") in (None, "none")


@each_service
def test_only_loopback_is_published(service: dict[str, Any]) -> None:
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z]+_PORT:-\d+\}:\d+", port), port


@each_service
def test_an_image_is_pinned_or_built_here(service: dict[str, Any]) -> None:
    name, _, tag = service["image"].rpartition(":")
    if "build" in service:
        dockerfile = ROOT / service["build"]["dockerfile"]
        assert dockerfile in DOCKERFILES
        target = service["build"].get("target")
        assert target is None or re.search(rf"^FROM \S+ AS {target}$", dockerfile.read_text(), flags=re.MULTILINE)
    else:
        assert name.startswith("docker.io/"), "podman asks which registry is meant"
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)


@each_service
def test_what_is_mounted_exists(service: dict[str, Any]) -> None:
    """Files of the checkout are there and read-only; volumes are declared."""
    for source, _, read_only in mounts(service):
        if source.startswith("./"):
            assert any((ROOT / source).iterdir())
            assert read_only
        else:
            assert source in COMPOSE["volumes"]


def test_configurations_are_found_where_they_are_mounted() -> None:
    """Each path that a command or a variable names, through the mounts, is a file of the checkout."""
    named = {
        "prometheus": ["/etc/prometheus/compose.yml"],
        "prometheus-replicas": ["/etc/prometheus/compose-replicas.yml"],
        "envoy": ["/etc/envoy/envoy.yaml"],
        "grafana": [
            "/etc/encserve/provisioning/datasources/prometheus.yml",
            "/etc/encserve/provisioning/dashboards/encserve.yml",
            SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"],
        ],
    }
    for name, paths in named.items():
        folders = {target: ROOT / source for source, target, _ in mounts(SERVICES[name]) if source.startswith("./")}
        for path in paths:
            (local,) = [folder / Path(path).relative_to(at) for at, folder in folders.items() if path.startswith(at)]
            assert local.is_file(), f"{name}: {path}"
    assert "/etc/envoy/envoy.yaml" in SERVICES["envoy"]["command"]


def test_a_server_has_the_time_to_stop() -> None:
    for service in SERVERS.values():
        drain = float(service["environment"]["ENCSERVE_DRAIN_DELAY_SECONDS"])
        assert seconds(service["stop_grace_period"]) > GRACE_SECONDS + drain + CLOSE_SECONDS


def test_a_server_only_reads_its_models_and_has_them_before_it_starts() -> None:
    assert SERVERS
    for service in SERVERS.values():
        assert ("models", "/models", True) in list(mounts(service))
        assert service["depends_on"]["export"]["condition"] == "service_completed_successfully"


def test_profiles() -> None:
    """`docker compose up` is `--profile cpu`; each profile has what answers on port 50051, and only one of it."""
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()
    answering = {
        profile: [
            name
            for name, service in SERVICES.items()
            if profile in service.get("profiles", [profile])
            and "127.0.0.1:${GRPC_PORT:-50051}:50051" in service.get("ports", [])
        ]
        for profile in ("cpu", "gpu", "replicas")
    }
    assert answering == {"cpu": ["server"], "gpu": ["server-gpu"], "replicas": ["envoy"]}
    (device,) = SERVICES["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


@pytest.mark.parametrize("profile", ["cpu", "gpu", "replicas"])
def test_prometheus_scrapes_every_server_of_a_profile(profile: str) -> None:
    """By names that a service has in that profile, on the port where metrics are."""
    services = {name: it for name, it in SERVICES.items() if profile in it.get("profiles", [profile])}
    (prometheus,) = [name for name in services if name.startswith("prometheus")]
    (flag,) = [it for it in services[prometheus]["command"] if it.startswith("--config.file=/etc/prometheus/")]
    config = yaml.safe_load((ROOT / "deploy/prometheus" / Path(flag).name).read_text())
    targets = {
        job["job_name"]: [target for static in job["static_configs"] for target in static["targets"]]
        for job in config["scrape_configs"]
    }
    names = {
        name: {name, *it.get("networks", {}).get("default", {}).get("aliases", [])} for name, it in services.items()
    }
    scraped = [
        owner for target in targets["encserve"] for owner, own in names.items() if target[: -len(":9464")] in own
    ]
    assert sorted(scraped) == sorted(services.keys() & SERVERS.keys())
    assert targets.get("envoy", []) == (["envoy:9902"] if "envoy" in services else [])
    assert "prometheus" in names[prometheus], "where Grafana looks for it"


@each_dockerfile
def test_an_image_runs_as_nobody_and_installs_by_hash(path: Path) -> None:
    stages = re.split(r"^(?=FROM )", path.read_text(), flags=re.MULTILINE)
    assert any("\nUSER 10001:10001\n" in stage for stage in stages)
    for command in re.findall(r"pip\S*(?: --python \S+)? install [^&]*", path.read_text().replace("\\\n", " ")):
        assert "--require-hashes" in command or "--no-index" in command, command
    for entry_point in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", path.read_text(), flags=re.MULTILINE):
        assert entry_point.startswith("["), "not a shell: signals must reach the process"


def locked(name: str) -> dict[NormalizedName, str]:
    """The versions in deploy/requirements/NAME.txt; each has a hash."""
    text = (ROOT / f"deploy/requirements/{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all("--hash=sha256:" in line for line in lines)
    return {canonicalize_name(line.partition("==")[0]): line.split()[0].partition("==")[2] for line in lines}


def wanted(pyproject: Path, extra: str = "") -> list[Requirement]:
    """What a distribution needs from an index, with an extra."""
    project = tomllib.loads(pyproject.read_text())["project"]
    texts = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    return [it for it in map(Requirement, texts) if not it.name.startswith("encserve-")]


IMAGES = {
    "server-cpu": ("server", "cpu"),
    "server-openvino": ("server", "openvino"),
    "server-gpu": ("server", "gpu"),
    "export": ("export", ""),
}


@pytest.mark.parametrize("name", IMAGES)
def test_the_lock_has_what_the_parts_need_as_it_is_tested(name: str) -> None:
    """`make lock` was run after the last change of dependencies: nothing is missing, and versions are those of CI."""
    part, extra = IMAGES[name]
    versions = locked(name) | (locked("torch") if part == "export" else {})
    requirements = [*wanted(ROOT / "proto/pyproject.toml"), *wanted(ROOT / part / "pyproject.toml", extra)]
    if part == "server":
        requirements += wanted(ROOT / part / "pyproject.toml", "tracing")
    for requirement in requirements:
        version = versions[canonicalize_name(requirement.name)].removesuffix("+cpu")
        assert requirement.specifier.contains(version), requirement
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    for package, version in versions.items():
        assert version.removesuffix("+cpu") == tested.get(package, version).removesuffix("+cpu"), package


def test_no_server_image_has_torch_and_none_has_two_onnx_runtimes() -> None:
    for name in ("server-cpu", "server-openvino", "server-gpu"):
        packages = locked(name).keys()
        assert not packages & {"torch", "transformers", "onnx", "pip", "setuptools"}
        assert len(packages & {"onnxruntime", "onnxruntime-gpu"}) == 1
    assert {name for name in locked("server-gpu") if name.startswith("nvidia-")} == {
        "nvidia-cublas",
        "nvidia-cuda-nvrtc",  # cublas depends on it
        "nvidia-cuda-runtime",
        "nvidia-curand",
        "nvidia-ml-py",  # reads the GPU's memory; pure Python
    }


def test_the_override_with_tls() -> None:
    """It sets what the server reads, mounts what it names, and Prometheus asks as the server answers."""
    override = yaml.safe_load((ROOT / "deploy/compose.tls.yml").read_text())["services"]
    assert set(override) == {"server", "server-gpu", "prometheus"}
    fields = Settings.__dataclass_fields__
    for name in ("server", "server-gpu"):
        ((source, target, read_only),) = mounts(
            {"volumes": [it.replace(":-", "-") for it in override[name]["volumes"]]}
        )
        assert (source, target, read_only) == ("${TLS_DIR-./tls}", "/tls", True)
        for variable, path in override[name]["environment"].items():
            assert variable.removeprefix("ENCSERVE_").lower() in fields
            assert Path(path).parent == Path("/tls")
    assert [it.replace("compose-tls", "compose") for it in override["prometheus"]["command"]] == SERVICES["prometheus"][
        "command"
    ]
    config = yaml.safe_load((ROOT / "deploy/prometheus/compose-tls.yml").read_text())
    plain = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())
    (job,) = config["scrape_configs"]
    assert override["prometheus"]["volumes"] == ["${TLS_DIR:-./tls}/ca.crt:/tls/ca.crt:ro"]
    assert job["tls_config"] == {"ca_file": "/tls/ca.crt"}
    assert job.pop("scheme") == "https"
    del job["tls_config"]
    assert config == plain
