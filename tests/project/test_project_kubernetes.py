"""The files of deploy/kubernetes and deploy/envoy: in step with the server and with each other."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from encserve_server.repository.manager import _CLOSE_SECONDS
from encserve_server.rpc.service import SERVICE_NAME
from encserve_server.settings import MIB, Settings
from encserve_server.telemetry.metrics import Metrics

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
SECURE = ROOT / "deploy" / "kubernetes-secure"
RESOURCES = sorted({path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "prometheus-adapter.yaml"})
DEFAULTS: dict[str, Any] = {
    f"--{field.name.replace('_', '-')}": field.default for field in dataclasses.fields(Settings)
}


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def pod() -> Any:
    return load("deployment.yaml")["spec"]["template"]


@pytest.fixture
def container(pod: Any) -> Any:
    (only,) = pod["spec"]["containers"]
    return only


def setting(container: Any, flag: str) -> Any:
    """What a flag of the container's command line says, or the server's default."""
    given = dict(argument.split("=") for argument in container["args"])
    return given.get(flag, DEFAULTS[flag])


def test_kustomization_has_them_all() -> None:
    kustomization = load("kustomization.yaml")
    assert sorted(kustomization["resources"]) == RESOURCES
    (image,) = kustomization["images"]
    assert image["name"] == load("deployment.yaml")["spec"]["template"]["spec"]["containers"][0]["image"]


def test_the_servers_flags_are_its_own(container: Any) -> None:
    assert all(argument.split("=")[0] in DEFAULTS for argument in container["args"])
    mount = next(it["mountPath"] for it in container["volumeMounts"] if it["name"] == "models")
    assert setting(container, "--model-repository") == mount


def test_a_server_that_stops_is_not_killed_in_the_middle(pod: Any, container: Any) -> None:
    longest = float(setting(container, "--drain-delay-seconds")) + float(setting(container, "--grace-seconds"))
    assert pod["spec"]["terminationGracePeriodSeconds"] > longest + _CLOSE_SECONDS


def test_ports_and_probes_are_the_servers(pod: Any, container: Any) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {name: int(setting(container, f"--{name}-port")) for name in ("grpc", "http", "metrics")} == ports
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]
        assert container[probe]["grpc"].get("service", "") in ("", SERVICE_NAME)
    assert [port["targetPort"] for port in load("service.yaml")["spec"]["ports"]] == ["grpc", "http"]
    allowed = [it["port"] for rule in load("network-policy.yaml")["spec"]["ingress"] for it in rule["ports"]]
    assert sorted(allowed) == ["grpc", "http", "metrics"]


def test_a_failing_engine_has_time_to_come_back_before_a_restart(container: Any) -> None:
    """The server itself waits this long until it calls a batch stuck."""
    liveness, readiness = container["livenessProbe"], container["readinessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 2 * DEFAULTS["--stall-seconds"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 15


def patched(name: str, patch: str) -> Any:
    """A resource with one of the patches of deploy/kubernetes-secure, RFC 6902, as kustomize applies it."""
    resource = load(name)
    for it in yaml.safe_load((SECURE / patch).read_text()):
        *way, last = [part.replace("~1", "/") for part in it["path"].split("/")[1:]]
        at = resource
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if isinstance(at, list):
            assert (it["op"], last) == ("add", "-")
            at.append(it["value"])
        elif it["op"] == "remove":
            del at[last]
        else:
            assert (last in at) is (it["op"] == "replace")
            at[last] = it["value"]
    return resource


def test_the_override_with_tls(tmp_path: Path) -> None:
    """It adds TLS to the flags, and every probe asks what needs no client certificate."""
    secure = yaml.safe_load((SECURE / "kustomization.yaml").read_text())
    callers = FOLDER.with_name("kubernetes-callers")
    assert [(SECURE / it).resolve() for it in secure["resources"]] == [callers]  # kustomize takes no folder above
    for it in secure["patches"]:
        assert (SECURE / it["path"]).is_file()
    deployment = patched("deployment.yaml", "deployment-tls.yaml")
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    settings = dict(argument[2:].replace("-", "_").split("=") for argument in container["args"])
    mount = next(it for it in container["volumeMounts"] if it["name"] == "tls")
    assert {str(Path(settings[f"tls_{name}_file"]).parent) for name in ("cert", "key")} == {mount["mountPath"]}
    assert "subPath" not in mount
    assert template["spec"]["volumes"][-1]["name"] == mount["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"scheme": "HTTPS", "port": "metrics", "path": "/healthz"}
        assert "grpc" not in container[probe]
        assert container[probe]["failureThreshold"]
    assert template["metadata"]["annotations"]["prometheus.io/scheme"] == "https"
    service = patched("service.yaml", "service-tls.yaml")
    assert [port["appProtocol"] for port in service["spec"]["ports"]] == ["https", "https"]
    for number, resource in enumerate((deployment, service)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(resource))
        command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--quiet", "--strict", "-k", "1.37"]
        subprocess.run([*command, path], check=True, timeout=60)


def test_everything_selects_the_servers_pods(pod: Any) -> None:
    labels = pod["metadata"]["labels"]
    assert load("deployment.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load("service.yaml")["spec"]["selector"] == labels
    assert load("disruption-budget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load("network-policy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert load("autoscaler.yaml")["spec"]["scaleTargetRef"]["name"] == load("deployment.yaml")["metadata"]["name"]


def test_the_autoscaler_asks_for_metrics_that_exist() -> None:
    (rule,) = load("prometheus-adapter.yaml")["rules"]["external"]
    (wanted,) = load("autoscaler.yaml")["spec"]["metrics"]
    assert wanted["external"]["metric"]["name"] == rule["name"]["as"]
    registry = CollectorRegistry()
    Metrics(registry)
    exported = {family.name for family in registry.collect()}
    assert set(re.findall(r"encserve_\w+", f"{rule['metricsQuery']} {rule['seriesQuery']}")) <= exported
    assert rule["metricsQuery"] in (ROOT / "docs/operations.md").read_text()


def test_envoy_knows_the_servers_limits() -> None:
    text = (ROOT / "deploy/envoy/envoy.yaml").read_text()
    assert f"grpc_health_check: {{ service_name: {SERVICE_NAME} }}" in text
    kept = re.findall(r"request_body_buffer_limit: (\d+)", text)
    assert len(kept) == 2
    assert min(map(int, kept)) > DEFAULTS["--max-request-mib"] * MIB
    assert text.count(f"port_value: {DEFAULTS['--grpc-port']} ") == 3
