"""Tests that docker-compose.yml, Envoy's configuration files and the systemd unit agree with the server."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deploy_files import DEFAULTS, DEPLOY, ROOT, environment_of, load, mounts, stop_seconds
from docs_text import code_blocks

from encserve_server.protocols.encserve.service import SERVICE_NAME
from encserve_server.settings import MIB

COMPOSE = load("../docker-compose.yml")
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVERS = {name: service for name, service in SERVICES.items() if name.startswith("server")}
OVERRIDES = {name: load(f"compose.{name}.yml")["services"] for name in ("callers", "tls")}
UNIT = DEPLOY / "systemd/encserve.service"


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_the_settings_of_a_server_exist_and_leave_time_to_stop(server: Any) -> None:
    given = environment_of(server)
    assert given.keys() <= DEFAULTS.keys()
    assert stop_seconds(given) < float(server["stop_grace_period"][:-1])


@pytest.mark.parametrize("override", OVERRIDES.values(), ids=OVERRIDES)
def test_the_settings_of_an_override_exist(override: Any) -> None:
    assert environment_of(override["server"]).keys() <= DEFAULTS.keys()


def test_envoy_has_the_servers_limits() -> None:
    text = (DEPLOY / "envoy/envoy.yaml").read_text()
    assert f"grpc_health_check: {{ service_name: {SERVICE_NAME} }}" in text
    limits = re.findall(r"request_body_buffer_limit: (\d+)", text)
    assert len(limits) == 2
    assert min(map(int, limits)) > DEFAULTS["max_request_mib"] * MIB
    assert text.count(f"port_value: {DEFAULTS['grpc_port']} ") == 3


# Tests of docker-compose.yml and of Envoy's files.


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_is_confined_and_pinned(service: Any) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert service["cpus"] in (1, "${SERVER_CPUS:-2}")
    assert 0 < service["pids_limit"] <= 1024
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc"}
    assert service.get("network_mode") in (None, "none")
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z]+_PORT:-\d+\}:\d+", port), port
    if "build" in service:
        dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
        target = service["build"].get("target") or f"server-{service['build']['args']['EXTRA']}"
        assert re.search(rf"^FROM \S+ AS {target}$", dockerfile, flags=re.MULTILINE)
    else:
        assert re.fullmatch(r"docker\.io/\S+:v?\d+\.\d+\.\d+", service["image"])
    for source, _, read_only in mounts(service):
        if source.startswith("./"):
            assert read_only
            assert any((ROOT / source).iterdir())
        else:
            assert source in COMPOSE["volumes"]


def test_mounted_configuration_files_exist() -> None:
    paths = {
        "prometheus": ["/etc/prometheus/compose.yml", "/etc/prometheus/compose-tls.yml"],
        "prometheus-replicas": ["/etc/prometheus/compose-replicas.yml"],
        "envoy": ["/etc/envoy/envoy.yaml"],
        "grafana": [
            "/etc/encserve/provisioning/datasources/prometheus.yml",
            "/etc/encserve/provisioning/dashboards/encserve.yml",
            SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"],
        ],
    }
    for name, files in paths.items():
        folders = {target: ROOT / source for source, target, _ in mounts(SERVICES[name]) if source.startswith("./")}
        for file in files:
            (local,) = [folder / Path(file).relative_to(at) for at, folder in folders.items() if file.startswith(at)]
            assert local.is_file(), f"{name}: {file}"


def test_servers_start_after_the_export() -> None:
    for service in SERVERS.values():
        assert ("models", "/models", True) in list(mounts(service))
        assert service["depends_on"]["export"]["condition"] == "service_completed_successfully"


@pytest.mark.parametrize(("profile", "entry"), [("cpu", "server"), ("gpu", "server-gpu"), ("replicas", "envoy")])
def test_a_profile(profile: str, entry: str) -> None:
    """In each profile, only one service publishes port 50051.

    Grafana finds the profile's Prometheus by the host name "prometheus". Prometheus scrapes all servers of the profile.
    """
    services = {name: service for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}
    port = "127.0.0.1:${GRPC_PORT:-50051}:50051"
    assert [name for name, service in services.items() if port in service.get("ports", [])] == [entry]
    hosts = {
        name: {name, *service.get("networks", {}).get("default", {}).get("aliases", [])}
        for name, service in services.items()
    }
    (prometheus,) = [name for name in services if name.startswith("prometheus")]
    assert "prometheus" in hosts[prometheus]
    (flag,) = [word for word in services[prometheus]["command"] if word.startswith("--config.file=")]
    jobs = load(f"prometheus/{Path(flag).name}")["scrape_configs"]
    targets = {job["job_name"]: [target for it in job["static_configs"] for target in it["targets"]] for job in jobs}
    scraped = [name for target in targets["encserve"] for name in hosts if target.removesuffix(":9464") in hosts[name]]
    assert sorted(scraped) == sorted(services.keys() & SERVERS.keys())
    assert targets.get("envoy", []) == (["envoy:9902"] if "envoy" in services else [])


def test_the_default_profile_and_the_gpu() -> None:
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()
    (device,) = SERVICES["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


@pytest.mark.parametrize(
    ("override", "services"),
    [("callers", set(SERVERS)), ("tls", {"server", "server-gpu"})],
)
def test_an_override_mounts_its_files(override: str, services: set[str]) -> None:
    changed = OVERRIDES[override]
    assert changed.keys() - {"prometheus"} == services
    for name in services:
        assert changed[name].keys() == {"environment", "volumes"}
        ((_, target, read_only),) = mounts(changed[name])
        assert read_only
        assert {str(Path(path).parent) for path in environment_of(changed[name]).values()} == {target}


def test_overrides_can_be_combined() -> None:
    keys, tls = OVERRIDES["callers"]["server"], OVERRIDES["tls"]["server"]
    assert not keys["environment"].keys() & tls["environment"].keys()
    assert {target for _, target, _ in mounts(keys)}.isdisjoint(target for _, target, _ in mounts(tls))


def test_prometheus_with_tls() -> None:
    override = OVERRIDES["tls"]["prometheus"]
    command = [word.replace("compose-tls", "compose") for word in override["command"]]
    assert command == SERVICES["prometheus"]["command"]
    assert override["volumes"] == ["${TLS_DIR:-./tls}/ca.crt:/tls/ca.crt:ro"]
    plain, encrypted = load("prometheus/compose.yml"), load("prometheus/compose-tls.yml")
    (job,) = encrypted["scrape_configs"]
    assert (job.pop("scheme"), job.pop("tls_config")) == ("https", {"ca_file": "/tls/ca.crt"})
    assert encrypted == plain


# Tests of the systemd unit.


def unit_values() -> dict[str, list[str]]:
    """Return the values of each key of the section Service. The value of an empty assignment is ""."""
    values: dict[str, list[str]] = {}
    (section,) = re.findall(r"^\[Service\]\n(.*?)^\[", UNIT.read_text(), re.DOTALL | re.MULTILINE)
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        values.setdefault(key, []).append(value)
    return values


def test_the_unit_gives_the_server_its_folders() -> None:
    """The unit's settings are settings of the server, and name folders that systemd makes for the unit's user."""
    unit = unit_values()
    (variables,) = unit["Environment"]
    settings = environment_of({"environment": dict(word.split("=") for word in variables.split())})
    assert settings == {"model_repository": "%S/encserve/models", "cache_dir": "%C/encserve/weights"}
    assert settings.keys() <= DEFAULTS.keys()
    assert unit["StateDirectory"] == unit["CacheDirectory"] == unit["User"] == ["encserve"]
    assert unit["CacheDirectoryMode"] == ["0700"]  # the server refuses a folder that others may write
    assert unit["ProtectSystem"] == ["strict"]
    assert stop_seconds({}) < float(unit["TimeoutStopSec"][0])


@pytest.mark.system
def test_systemd_accepts_the_unit_and_finds_it_confined(tmp_path: Path) -> None:
    """`systemd-analyze` finds no unknown key in the unit and the drop-ins of the pages.

    `systemd-analyze` gives the unit the exposure level that docs/how-to/systemd.md states.
    """
    analyze = shutil.which("systemd-analyze")
    if analyze is None and "CI" not in os.environ:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    assert analyze is not None
    for program in ("opt/encserve/bin/encserve-server", "bin/kill"):
        (tmp_path / program).parent.mkdir(parents=True)
        (tmp_path / program).touch(mode=0o755)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for target in ("sysinit", "basic", "shutdown", "network-online", "multi-user"):
        (units / f"{target}.target").write_text("[Unit]\nDescription=a target of every system\n")
    shutil.copy(UNIT, units)
    drop_ins = units / f"{UNIT.name}.d"
    drop_ins.mkdir()
    for page in ("systemd", "gpu"):
        ((_, text),) = code_blocks((ROOT / f"docs/how-to/{page}.md").read_text(), "ini")
        (drop_ins / f"{page}.conf").write_text(text)

    def run(*arguments: str | Path) -> str:
        done = subprocess.run([analyze, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert run("verify", "--man=no", f"--root={tmp_path}", UNIT.name) == ""
    (exposure,) = re.findall(r"exposure level for encserve.service: ([\d.]+)", run("security", "--offline=yes", UNIT))
    assert f"rates it {exposure} of 10" in (ROOT / "docs/how-to/systemd.md").read_text()
