"""Tests of the files in deploy/.

The files agree with the server and with each other. They match the schemas of Kubernetes, KServe and KubeRay.
"""

import copy
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry

from encserve_cli.commands import cli
from encserve_server.protocols.encserve.service import SERVICE_NAME
from encserve_server.settings import MIB, Settings
from encserve_server.telemetry.metrics import Metrics

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
CLOSE_SECONDS = 5.0  # the longest time that the server needs to close its models
POD_GRACE_SECONDS = 30  # Kubernetes' default
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


COMPOSE = load("../docker-compose.yml")
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVERS = {name: service for name, service in SERVICES.items() if name.startswith("server")}
OVERRIDES = {name: load(f"compose.{name}.yml")["services"] for name in ("callers", "tls")}


def container_of(resource: Any) -> Any:
    (container,) = resource["spec"].get("template", resource)["spec"]["containers"]
    return container


def settings_of(container: Any) -> dict[str, str]:
    """Return the server settings in the arguments of a container. The keys are field names of Settings."""
    return {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in (argument.split("=", 1) for argument in container["args"])
    }


def environment_of(service: Any) -> dict[str, str]:
    """Return the server settings in the environment of a Compose service. The keys are field names of Settings."""
    return {
        name.removeprefix("ENCSERVE_").lower(): value
        for name, value in service.get("environment", {}).items()
        if name.startswith("ENCSERVE_")
    }


def mounts(service: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the source, the target and the read-only flag of each volume of a Compose service."""
    for volume in service.get("volumes", []):
        source, target, *mode = volume.replace(":-", "=").split(":")
        yield source, target, "ro" in mode


def patched(resource: Any, patch: str) -> Any:
    """Apply a JSON patch (RFC 6902) to a copy of a resource, as kustomize does."""
    made = copy.deepcopy(resource)
    for operation in load(patch):
        *parents, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        at = made
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if isinstance(at, list):
            assert (operation["op"], last) == ("add", "-")
            at.append(operation["value"])
        elif operation["op"] == "remove":
            del at[last]
        else:
            assert (last in at) is (operation["op"] == "replace")
            at[last] = operation["value"]
    return made


DEPLOYMENT = load("kubernetes/deployment.yaml")
WITH_CALLERS = patched(DEPLOYMENT, "kubernetes-callers/deployment-callers.yaml")
WITH_TLS = patched(WITH_CALLERS, "kubernetes-secure/deployment-tls.yaml")
SERVICE_WITH_TLS = patched(load("kubernetes/service.yaml"), "kubernetes-secure/service-tls.yaml")
RUNTIME = load("kserve/serving-runtime.yaml")
RAY_JOB = load("kuberay/embed-rayjob.yaml")
GIVEN = {
    **{f"compose {name}": environment_of(service) for name, service in SERVERS.items()},
    **{f"compose {name} with {its}": environment_of(OVERRIDES[its][name]) for its in OVERRIDES for name in ("server",)},
    "kubernetes": settings_of(container_of(DEPLOYMENT)),
    "kubernetes-callers": settings_of(container_of(WITH_CALLERS)),
    "kubernetes-secure": settings_of(container_of(WITH_TLS)),
    "kserve": settings_of(container_of(RUNTIME)),
}


@pytest.mark.parametrize("settings", GIVEN.values(), ids=GIVEN)
def test_settings_exist(settings: dict[str, str]) -> None:
    assert settings.keys() <= DEFAULTS.keys()


@pytest.mark.parametrize(
    ("settings", "stop_seconds"),
    [
        *((environment_of(server), float(server["stop_grace_period"][:-1])) for server in SERVERS.values()),
        (GIVEN["kubernetes"], DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]),
        (GIVEN["kserve"], POD_GRACE_SECONDS),
    ],
)
def test_a_server_has_time_to_stop(settings: dict[str, str], stop_seconds: float) -> None:
    given = DEFAULTS | settings
    assert float(given["drain_delay_seconds"]) + float(given["grace_seconds"]) + CLOSE_SECONDS < stop_seconds


# Kubernetes


def kubernetes_accepts(folder: Path, *resources: Any) -> None:
    for number, resource in enumerate(resources):
        path = folder / f"{number}.yaml"
        path.write_text(yaml.safe_dump(resource))
        command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--quiet", "--strict", "-k", "1.37"]
        subprocess.run([*command, path], check=True, timeout=60)


def test_kubernetes_schema_accepts_patched_and_embedded_resources(tmp_path: Path) -> None:
    """The Kubernetes schema accepts the patched resources, and the pods in the RayJob.

    `make lint` validates the files without patches.
    """
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "m"}, "template": group["template"]}
        for group in ray_groups()
    ]
    kubernetes_accepts(tmp_path, WITH_TLS, SERVICE_WITH_TLS, *pods)


def test_kustomizations() -> None:
    names = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    plain = load("kubernetes/kustomization.yaml")
    assert set(plain["resources"]) == names - {"kustomization.yaml", "prometheus-adapter.yaml"}
    assert plain["images"][0]["name"] == container_of(DEPLOYMENT)["image"]
    for folder, base in {"kubernetes-callers": "../kubernetes", "kubernetes-secure": "../kubernetes-callers"}.items():
        kustomization = load(f"{folder}/kustomization.yaml")
        assert kustomization["resources"] == [base]
        for patch in kustomization["patches"]:
            assert (DEPLOY / folder / patch["path"]).is_file()
            assert patch["target"]["name"] == DEPLOYMENT["metadata"]["name"]


def test_ports_and_probes() -> None:
    container, pod = container_of(DEPLOYMENT), DEPLOYMENT["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = DEFAULTS | GIVEN["kubernetes"]
    assert {name: int(given[f"{name}_port"]) for name in ("grpc", "http", "metrics")} == ports
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    for probe in PROBES:
        assert container[probe]["grpc"]["port"] == ports["grpc"]
        assert container[probe]["grpc"].get("service", "") in ("", SERVICE_NAME)
    assert [port["targetPort"] for port in load("kubernetes/service.yaml")["spec"]["ports"]] == ["grpc", "http"]
    allowed = [
        port["port"] for rule in load("kubernetes/network-policy.yaml")["spec"]["ingress"] for port in rule["ports"]
    ]
    assert sorted(allowed) == ["grpc", "http", "metrics"]


def test_probes_wait_for_a_stalled_engine() -> None:
    """Kubernetes restarts a pod only if the liveness probe fails for twice the server's `stall_seconds` or longer.

    A pod gets no more calls after its readiness probe has failed for 15 s or less.
    """
    seconds = {
        probe: container_of(DEPLOYMENT)[probe]["periodSeconds"] * container_of(DEPLOYMENT)[probe]["failureThreshold"]
        for probe in PROBES
    }
    assert seconds["livenessProbe"] >= 2 * DEFAULTS["stall_seconds"]
    assert seconds["readinessProbe"] <= 15


@pytest.mark.parametrize(("name", "deployment"), [("models", DEPLOYMENT), ("callers", WITH_CALLERS), ("tls", WITH_TLS)])
def test_files_are_mounted(name: str, deployment: Any) -> None:
    container, settings = container_of(deployment), settings_of(container_of(deployment))
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == name]
    assert name in [volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]]
    assert "subPath" not in mount  # Kubernetes never updates the files of a mount with subPath
    paths = {
        "models": [f"{settings['model_repository']}/x"],
        "callers": [settings.get("callers", "")],
        "tls": [settings.get("tls_cert_file", ""), settings.get("tls_key_file", "")],
    }
    assert {str(Path(path).parent) for path in paths[name]} == {mount["mountPath"]}


def test_probes_and_ports_with_tls() -> None:
    """With TLS, the probes use /healthz on the metrics port. The other ports require client certificates."""
    container = container_of(WITH_TLS)
    for probe in PROBES:
        assert container[probe]["httpGet"] == {"scheme": "HTTPS", "port": "metrics", "path": "/healthz"}
        assert "grpc" not in container[probe]
    assert WITH_TLS["spec"]["template"]["metadata"]["annotations"]["prometheus.io/scheme"] == "https"
    assert [port["appProtocol"] for port in SERVICE_WITH_TLS["spec"]["ports"]] == ["https", "https"]


def test_selectors() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert load("kubernetes/service.yaml")["spec"]["selector"] == labels
    assert load("kubernetes/disruption-budget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load("kubernetes/network-policy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    target = load("kubernetes/autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert target["name"] == DEPLOYMENT["metadata"]["name"]


def test_the_autoscaler_uses_metrics_that_exist() -> None:
    """The autoscaler's query uses only metrics of the server, and subtracts the tokens of bulk calls.

    docs/operations.md has the same query for KEDA.
    """
    (rule,) = load("kubernetes/prometheus-adapter.yaml")["rules"]["external"]
    (metric,) = load("kubernetes/autoscaler.yaml")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    registry = CollectorRegistry()
    Metrics(registry)
    exported = {family.name for family in registry.collect()}
    assert set(re.findall(r"encserve_\w+", f"{rule['metricsQuery']} {rule['seriesQuery']}")) <= exported
    assert "- avg_over_time(encserve_queue_bulk_tokens[1m])" in rule["metricsQuery"]
    assert rule["metricsQuery"] in (ROOT / "docs/operations.md").read_text()


def test_envoy_has_the_servers_limits() -> None:
    text = (DEPLOY / "envoy/envoy.yaml").read_text()
    assert f"grpc_health_check: {{ service_name: {SERVICE_NAME} }}" in text
    limits = re.findall(r"request_body_buffer_limit: (\d+)", text)
    assert len(limits) == 2
    assert min(map(int, limits)) > DEFAULTS["max_request_mib"] * MIB
    assert text.count(f"port_value: {DEFAULTS['grpc_port']} ") == 3


# KServe and KubeRay


def closed(schema: Any) -> Any:
    """Return a copy of a schema that refuses unknown fields. Kubernetes would drop such fields without an error."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "spec" not in made["properties"]:
        made.setdefault("additionalProperties", False)
    return made


def schema_errors(name: str, resource: Any) -> list[str]:
    schema = closed(json.loads((ROOT / "tests/data" / name).read_text()))
    return [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(resource)
    ]


def kserve_errors(resource: Any) -> list[str]:
    """Check a resource with KServe's schema; return the errors.

    The schema is the CRD servingruntimes from KServe's commit aaac4e294. Descriptions and unused fields are left out.
    """
    return schema_errors("kserve-serving-runtime.json", resource)


def kuberay_errors(resource: Any) -> list[str]:
    """Check a resource with a schema of KubeRay 1.7; return the errors.

    The schema is written by hand. It does not check the pod templates, because kubernetes-validate checks them.
    """
    return schema_errors("kuberay-rayjob.json", resource)


def ray_groups() -> list[Any]:
    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_schemas_accept_the_files_and_refuse_faults() -> None:
    assert kserve_errors(RUNTIME) == kuberay_errors(RAY_JOB) == []
    wrong = copy.deepcopy(RUNTIME)
    container_of(wrong)["ports"][0]["containerport"] = 1
    wrong["spec"]["protocolVersion"] = ["grpc-v2"]
    assert len(kserve_errors(wrong)) == 2
    wrong = copy.deepcopy(RAY_JOB)
    wrong["spec"]["rayClusterSpec"]["autoscalerOptions"]["idleTimeoutSeconds"] = "60"
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxreplicas"] = 8
    assert len(kuberay_errors(wrong)) == 2


def test_the_serving_runtime() -> None:
    container = container_of(RUNTIME)
    assert container["ports"] == [{"name": "h2c", "containerPort": DEFAULTS["grpc_port"], "protocol": "TCP"}]
    assert container["readinessProbe"]["grpc"] == {"port": DEFAULTS["grpc_port"], "service": SERVICE_NAME}


def test_the_http_settings_in_the_docs() -> None:
    page = (ROOT / "docs/open-inference.md").read_text()
    (lines,) = re.findall(r"^```yaml\n(metadata:\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown, container = yaml.safe_load(lines), container_of(RUNTIME)
    changed = container | container_of(shown) | {"args": container["args"] + container_of(shown)["args"]}
    assert kserve_errors(RUNTIME | shown | {"spec": RUNTIME["spec"] | shown["spec"] | {"containers": [changed]}}) == []
    settings = settings_of(changed)
    assert settings.keys() <= DEFAULTS.keys()
    assert [str(port["containerPort"]) for port in changed["ports"]] == [settings["http_port"]]


def test_the_ray_job() -> None:
    """The job's command and flags exist, and the job's paths are mounted.

    A worker has a whole number of times the CPUs of an actor. The job and the tests use the same version of Ray.
    """
    line, _, after = RAY_JOB["spec"]["entrypoint"].partition(" || ")
    assert after == "test $? -eq 3"  # exit status 3 means that some texts were rejected; the job has not failed
    program, name, *words = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    assert program == "encserve"
    assert command is not None
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options.keys() <= {flag for parameter in command.params for flag in parameter.opts}
    (container,) = ray_groups()[1]["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["cpu"]) % int(options["--actor-cpus"]) == 0
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {
        f"/{Path(path).parts[1]}" for path in (options["--input"], options["--output"], options["--bundle"])
    } == mounted
    assert RAY_JOB["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")


# Compose


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_is_confined_and_pinned(service: Any) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 1024
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc"}
    assert service.get("network_mode") in (None, "none")
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z]+_PORT:-\d+\}:\d+", port), port
    if "build" in service:
        dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
        target = service["build"].get("target")
        assert target is None or re.search(rf"^FROM \S+ AS {target}$", dockerfile, flags=re.MULTILINE)
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
