"""Tests of the Helm chart, of deploy/kubernetes, which is the chart's output, and of the files for KServe and KubeRay.

The resources agree with the server and with each other. They match the schemas of Kubernetes, the Prometheus operator,
KEDA, KServe and KubeRay.
"""

import copy
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from deploy_files import DEFAULTS, DEPLOY, PROBES, ROOT, container_of, load, rendered, settings_of, stop_seconds
from prometheus_client import CollectorRegistry
from render_manifests import ChartError

from encserve import __version__
from encserve_cli.commands import cli
from encserve_server.protocols.encserve.service import SERVICE_NAME
from encserve_server.telemetry.metrics import Metrics

EXAMPLES = ("secure", "replicas", "gpu")
PLAIN = rendered()
SECURE, REPLICAS, GPU = (rendered(f"values-{name}.yaml") for name in EXAMPLES)
EVERYTHING = rendered(
    *(f"values-{name}.yaml" for name in EXAMPLES),
    models=[
        {"name": "one", "source": "owner/one@main", "version": "2", "options": ["--precision=float16"]},
        {"name": "two", "source": "owner/two"},
    ],
    settings={"max-queue-tokens": 32768, "log-format": "text"},
    image={"server": "registry/s", "serverTag": "1", "export": "registry/e", "exportTag": "2", "pullSecrets": ["key"]},
    pull={"tokenSecret": "hub", "env": {"HF_ENDPOINT": "https://hub.example.com"}},
    tls={"secret": "encserve-tls", "clientCa": True},
    modelVolume={"accessMode": "ReadWriteMany", "storageClass": "shared"},
    cacheVolume={"claim": "cache", "accessMode": "ReadWriteMany"},
    networkPolicy={"egress": [{"ports": [{"port": 4317}]}]},
    nodeSelector={"pool": "encoders"},
    affinity={
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
            }
        }
    },
    runtimeClassName="nvidia",
)
OWN = rendered(
    engine="openvino",
    models=[],
    modelVolume={"claim": "mine"},
    cacheVolume={"claim": "cache"},
    networkPolicy={"enabled": False},
    settings={
        "tune-batches": False,
        "strict-http": True,
        "cors-allow-origin": ["https://one.example.com", "https://two.example.com"],
        "max-queue-tokens": 2_000_000,
        "max-padding-fraction": 0.25,
        "served-model-name": ["true=one"],
        "grace-seconds": "100.5",
        "drain-delay-seconds": 0,
    },
)
RENDERINGS = {
    "plain": PLAIN, "secure": SECURE, "replicas": REPLICAS, "gpu": GPU, "everything": EVERYTHING, "own": OWN,
}  # fmt: skip
OPERATORS = {"PodMonitor", "PrometheusRule", "ScaledObject"}  # kinds of resources that operators add to Kubernetes
RUNTIME = load("kserve/serving-runtime.yaml")
PULL_JOB = load("kubernetes/pull-job.yaml")
RAY_JOB = load("kuberay/embed-rayjob.yaml")


def pod_of(resources: dict[str, Any]) -> Any:
    return resources["Deployment"]["spec"]["template"]["spec"]


def server_of(resources: dict[str, Any]) -> Any:
    return container_of(resources["Deployment"])


def mounts_of(container: Any) -> dict[str, Any]:
    return {mount["name"]: mount for mount in container["volumeMounts"]}


# Tests of the chart and its output.


def test_the_committed_output_is_current() -> None:
    """`make manifests` writes deploy/kubernetes/encserve.yaml, the chart's output with the default values."""
    committed = [it for it in yaml.safe_load_all((DEPLOY / "kubernetes/encserve.yaml").read_text()) if it is not None]
    assert {resource["kind"]: resource for resource in committed} == PLAIN
    kustomization = load("kubernetes/kustomization.yaml")
    assert kustomization["resources"] == ["namespace.yaml", "encserve.yaml"]
    assert kustomization["namespace"] == load("kubernetes/namespace.yaml")["metadata"]["name"]
    images = {f"{image['name']}:{image['newTag']}" for image in kustomization["images"]}
    assert images == {server_of(PLAIN)["image"], pod_of(PLAIN)["initContainers"][0]["image"]}
    chart = load("helm/encserve/Chart.yaml")
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"replica": 2}, "replica"),
        ({"tls": {"secrets": "x"}}, "secrets"),
        ({"engine": "cuda"}, "engine"),
        ({"replicas": 2}, "set modelVolume.accessMode to ReadWriteMany"),
        ({"replicas": None}, "more than one server needs volumes that several nodes can mount"),
        ({"autoscaling": {"enabled": True}}, "more than one server needs volumes that several nodes can mount"),
        ({"models": [{"name": "a/b", "source": "a/b"}]}, "name"),
        ({"models": ["a/b"]}, "models"),
        ({"gpus": 1}, "gpus is 1, but engine is cpu; set engine to gpu"),
        ({"replicas": 2, "modelVolume": {"claim": "mine"}}, "set modelVolume.accessMode to ReadWriteMany"),
        (
            {"replicas": 2, "modelVolume": {"accessMode": "ReadWriteMany"}, "cacheVolume": {"claim": "cache"}},
            "set cacheVolume.accessMode to ReadWriteMany",
        ),
        *(
            ({"settings": {flag: value}}, f"settings.{flag}: the chart sets this flag; {advice}")
            for flag, value, advice in (
                ("model-repository", "/x", "remove the setting"),
                ("cache-dir", "/x", "remove the setting"),
                ("host", "127.0.0.1", "remove the setting"),
                ("grpc-port", 1, "remove the setting"),
                ("http-port", 1, "remove the setting"),
                ("metrics-port", 1, "remove the setting"),
                ("engine", "openvino", "use the value engine"),
                ("tls-cert-file", "/x", "use the value tls.secret"),
                ("tls-key-file", "/x", "use the value tls.secret"),
                ("tls-client-ca-file", "/x", "use the value tls.clientCa"),
                ("callers", "/x", "use the value callers.secret"),
            )
        ),
        ({"settings": {"no-inspect": True}}, "no-inspect"),
        ({"settings": {"inspect": {"on": True}}}, "settings"),
        ({"models": [{"name": "a", "source": "a", "options": [256]}]}, "options"),
    ],
)
def test_the_chart_refuses_bad_values(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ChartError, match=re.escape(problem)):
        rendered(**values)


def kubernetes_accepts(folder: Path, *resources: Any) -> None:
    for number, resource in enumerate(resources):
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(resource))
    for release in ("1.31", "1.37"):
        command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--quiet", "--strict", "-k", release]
        subprocess.run([*command, *sorted(folder.glob("*.yaml"))], check=True, timeout=120)


@pytest.mark.system
@pytest.mark.parametrize("resources", RENDERINGS.values(), ids=RENDERINGS)
def test_kubernetes_accepts_every_rendering(tmp_path: Path, resources: dict[str, Any]) -> None:
    kubernetes_accepts(tmp_path, *(it for kind, it in resources.items() if kind not in OPERATORS))


@pytest.mark.system
def test_kubernetes_accepts_the_namespace_and_the_pods_of_jobs(tmp_path: Path) -> None:
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "m"}, "template": group["template"]}
        for group in ray_groups()
    ]
    kubernetes_accepts(tmp_path, load("kubernetes/namespace.yaml"), PULL_JOB, *pods)


def test_kinds() -> None:
    kinds = {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy"}
    assert PLAIN.keys() == SECURE.keys() == GPU.keys() == kinds
    assert REPLICAS.keys() == kinds | OPERATORS
    assert rendered(modelVolume={"claim": "mine"}).keys() == kinds - {"PersistentVolumeClaim"}
    assert rendered(networkPolicy={"enabled": False}).keys() == kinds - {"NetworkPolicy"}


# Tests of the pod.


@pytest.mark.parametrize("resources", RENDERINGS.values(), ids=RENDERINGS)
def test_the_server_of_a_rendering(resources: dict[str, Any]) -> None:
    """The server knows each setting, and has enough time to stop. Ports, selectors and mounts agree."""
    server, pod = server_of(resources), pod_of(resources)
    given = DEFAULTS | settings_of(server)
    assert given.keys() == DEFAULTS.keys()
    assert stop_seconds(given) < pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {name: int(given[f"{name}_port"]) for name in ("grpc", "http", "metrics")} == ports
    service = resources["Service"]["spec"]
    assert {port["name"]: (port["port"], port["targetPort"]) for port in service["ports"]} == {
        name: (port, name) for name, port in ports.items()
    }
    assert service["clusterIP"] == "None"
    labels = resources["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= resources["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert labels == service["selector"]
    assert labels == resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    if "NetworkPolicy" in resources:
        policy = resources["NetworkPolicy"]["spec"]
        assert sorted(port["port"] for rule in policy["ingress"] for port in rule["ports"]) == sorted(ports)
        assert labels == policy["podSelector"]["matchLabels"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (server, *pod.get("initContainers", [])):
        assert mounts_of(container).keys() <= volumes
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not any("subPath" in mount for mount in container["volumeMounts"])


def test_settings_of_every_kind_reach_the_server() -> None:
    """The settings are booleans, lists, numbers and strings. The settings replace the chart's defaults."""
    settings = settings_of(server_of(OWN))
    assert (
        settings.items()
        >= {
            "tune_batches": False,
            "strict_http": True,
            "cors_allow_origin": ("https://one.example.com", "https://two.example.com"),
            "max_queue_tokens": 2_000_000,
            "max_padding_fraction": 0.25,
            "served_model_name": ("true=one",),
            "grace_seconds": 100.5,
            "drain_delay_seconds": 0.0,
            "max_connection_age_seconds": 300.0,
            "engine": "openvino",
        }.items()
    )
    assert pod_of(OWN)["terminationGracePeriodSeconds"] == 116


def test_options_of_a_model_are_strings() -> None:
    """The chart quotes the options. Without quotes, YAML reads 256 as a number, yes as a boolean, #x as a comment."""
    words = ["--max-sequence-tokens", "256", "yes", "#x", 'a"b']
    model = {"name": "one", "source": "owner/one", "options": words}
    (pull,) = pod_of(rendered(models=[model]))["initContainers"]
    assert pull["command"][-len(words) :] == words


def test_containers_can_write_where_they_must() -> None:
    """The pod has an fsGroup, because a new volume belongs to root. Pods can write to /tmp and /cache.

    The server can only read bundles, but the container that pulls models can write bundles.
    """
    pod, server = pod_of(PLAIN), server_of(PLAIN)
    (pull,) = pod["initContainers"]
    user = {pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")}
    assert user == {10001}
    assert {mount["mountPath"] for mount in pull["volumeMounts"]} == {"/models", "/cache", "/tmp"}  # noqa: S108
    assert {name for name, mount in mounts_of(server).items() if mount.get("readOnly")} == {"models"}
    assert not any(mount.get("readOnly") for mount in pull["volumeMounts"])
    folders = {name: value for it in pull["env"] for name, value in [it.values()] if isinstance(value, str)}
    assert all(Path(folder).is_relative_to("/cache") for folder in folders.values())
    assert settings_of(server)["cache_dir"].is_relative_to("/cache")
    assert settings_of(server)["model_repository"] == Path("/models")
    assert "--to=/models" in pull["command"]


def test_models_are_pulled_in_order() -> None:
    assert [container["command"][3:] for container in pod_of(EVERYTHING)["initContainers"]] == [
        ["/models/one/2/manifest.json", "one=owner/one@main", "--to=/models", "--version=2", "--precision=float16"],
        ["/models/two/1/manifest.json", "two=owner/two", "--to=/models", "--version=1"],
    ]
    environment = pod_of(EVERYTHING)["initContainers"][0]["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in environment
    assert {"name": "HF_ENDPOINT", "value": "https://hub.example.com"} in environment
    nothing = rendered(models=[])
    assert "initContainers" not in pod_of(nothing)
    assert nothing["NetworkPolicy"]["spec"]["egress"] == []
    assert PLAIN["NetworkPolicy"]["spec"]["egress"][1] == {"ports": [{"port": 443, "protocol": "TCP"}]}


def test_the_values_of_a_new_version_in_the_docs() -> None:
    """With the values from docs/how-to/kubernetes.md, the init container exports version 2 of the model."""
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    (lines,) = re.findall(r"^```yaml\n(models:\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    (pull,) = pod_of(rendered(**yaml.safe_load(lines)))["initContainers"]
    assert "--version=2" in pull["command"]


def test_the_job_pulls_as_the_init_container_does() -> None:
    """The job's container equals the init container. The job runs on the server's node, because both mount one volume.

    The selectors of the server do not select the job's pods.
    """
    template, pod = PULL_JOB["spec"]["template"], pod_of(PLAIN)
    job, (pull,) = container_of(PULL_JOB), pod["initContainers"]
    same = ("image", "env", "resources", "securityContext", "volumeMounts")
    assert {field: job[field] for field in same} == {field: pull[field] for field in same}
    assert [*job["command"][2:-1], "--version=1"] == pull["command"][4:]
    assert template["spec"]["securityContext"] == pod["securityContext"]
    assert template["spec"]["volumes"] == pod["volumes"]
    (near,) = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["labelSelector"] == PLAIN["Deployment"]["spec"]["selector"]
    assert "metadata" not in template


def test_the_claim_fits_the_number_of_servers() -> None:
    """If only one node can mount the volume, only one server runs, and stops before a new server starts."""
    assert PLAIN["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert PLAIN["Deployment"]["spec"]["replicas"] == 1
    assert PLAIN["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert REPLICAS["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert REPLICAS["Deployment"]["spec"]["strategy"] == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert "replicas" not in REPLICAS["Deployment"]["spec"]
    assert OWN["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    own = rendered(replicas=None, modelVolume={"claim": "mine", "accessMode": "ReadWriteMany"})
    assert own["Deployment"]["spec"]["strategy"] == REPLICAS["Deployment"]["spec"]["strategy"]
    cache = rendered(cacheVolume={"claim": "cache"}, modelVolume={"accessMode": "ReadWriteMany"})
    assert cache["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert "replicas" not in own["Deployment"]["spec"]
    assert "ScaledObject" not in own


def test_a_gpu_and_the_nodes() -> None:
    assert server_of(GPU)["image"] == f"encserve-server:{__version__}-gpu"
    assert server_of(GPU)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod_of(GPU)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert not {"nodeSelector", "affinity", "tolerations", "runtimeClassName"} & pod_of(PLAIN).keys()
    assert pod_of(EVERYTHING)["nodeSelector"] == {"pool": "encoders"}
    assert pod_of(EVERYTHING)["affinity"].keys() == {"nodeAffinity"}
    assert pod_of(EVERYTHING)["runtimeClassName"] == "nvidia"
    shared = rendered("values-gpu.yaml", modelVolume={"accessMode": "ReadWriteMany"})
    assert shared["Deployment"]["spec"]["strategy"] == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


def test_envoy_may_call_from_the_namespace_of_the_server() -> None:
    callers, monitoring = (rule["from"] for rule in PLAIN["NetworkPolicy"]["spec"]["ingress"])
    label = {"matchLabels": {"encserve-caller": "true"}}
    assert callers == [{"namespaceSelector": label}, {"podSelector": label}]
    assert monitoring == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


# Tests of the probes.


def test_probes_ask_health_over_grpc() -> None:
    for probe, service in zip(PROBES, (SERVICE_NAME, SERVICE_NAME, None), strict=True):
        grpc = {"port": DEFAULTS["grpc_port"]} | ({"service": service} if service else {})
        assert server_of(PLAIN)[probe]["grpc"] == grpc


def test_probes_wait_for_a_stalled_engine() -> None:
    """Kubernetes restarts a pod only if the liveness probe fails for twice the server's `stall_seconds` or longer.

    A pod gets no more calls after its readiness probe has failed for 15 s or less. `startupSeconds` bounds the start.
    """
    slow = rendered(startupSeconds=1801)
    seconds = {
        probe: server_of(slow)[probe]["periodSeconds"] * server_of(slow)[probe]["failureThreshold"] for probe in PROBES
    }
    assert seconds["livenessProbe"] >= 2 * DEFAULTS["stall_seconds"]
    assert seconds["readinessProbe"] <= 15
    assert seconds["startupProbe"] == 1805


def test_tls_and_keys() -> None:
    """The files of TLS and of callers are mounted at the paths in the settings.

    Probes use /healthz, because this route needs no client certificate.
    """
    server, settings = server_of(EVERYTHING), settings_of(server_of(EVERYTHING))
    assert settings_of(server_of(SECURE)).keys() == settings_of(server_of(PLAIN)).keys() | {
        "tls_cert_file", "tls_key_file", "callers",
    }  # fmt: skip
    files = {"tls": ("tls_cert_file", "tls_key_file", "tls_client_ca_file"), "callers": ("callers",)}
    for name, fields in files.items():
        assert {str(Path(settings[field]).parent) for field in fields} == {mounts_of(server)[name]["mountPath"]}
    for probe in PROBES:
        assert server[probe]["httpGet"] == {"scheme": "HTTPS", "port": "metrics", "path": "/healthz"}
        assert "grpc" not in server[probe]
    assert {port["appProtocol"] for port in SECURE["Service"]["spec"]["ports"]} == {"https"}


# Tests of metrics and autoscaling.


def test_the_job_name_is_the_one_of_the_rules() -> None:
    """The operator takes the job name "encserve" from a pod label. The chart's rules equal deploy/prometheus/rules."""
    monitor, rules = REPLICAS["PodMonitor"], REPLICAS["PrometheusRule"]
    labels = REPLICAS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["spec"]["jobLabel"]] == "encserve"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["labels"]["release"] == rules["metadata"]["labels"]["release"]
    assert rules["spec"]["groups"] == [
        group for path in ("alerts", "recording") for group in load(f"prometheus/rules/{path}.yml")["groups"]
    ]
    (endpoint,) = REPLICAS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    # A pod has an address even while its init container runs, so Prometheus must scrape only running pods.
    (running,) = endpoint["relabelings"]
    phase = "__meta_kubernetes_pod_phase"
    assert running == {"sourceLabels": [phase], "regex": "Running", "action": "keep"}
    second = rendered("values-replicas.yaml", monitoring={"enabled": True, "rules": False})
    assert "PodMonitor" in second
    assert "PrometheusRule" not in second
    (endpoint,) = EVERYTHING["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"].keys() == {"serverName", "ca", "cert", "keySecret"}


def test_the_autoscaler_uses_metrics_that_exist() -> None:
    """The query uses only metrics of the server and the pods of the release, and subtracts the tokens of bulk calls.

    docs/how-to/kubernetes.md has the same query without the limit to pods of the release.
    """
    scaler = REPLICAS["ScaledObject"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == REPLICAS["Deployment"]["metadata"]["name"]
    (trigger,) = scaler["triggers"]
    query = trigger["metadata"]["query"]
    registry = CollectorRegistry()
    Metrics(registry)
    assert set(re.findall(r"encserve_\w+", query)) <= {family.name for family in registry.collect()}
    pods = '{namespace="encserve",pod=~"encserve-[0-9a-z]+(-[0-9a-z]+)?"}'
    assert query.count(pods) == 3
    assert query.replace(pods, "") in (ROOT / "docs/how-to/kubernetes.md").read_text()
    (pattern,) = set(re.findall(r'pod=~"([^"]+)"', query))
    assert re.fullmatch(pattern, "encserve-7d9f8c6b5-x2k4q")
    assert not re.fullmatch(pattern, "encserve-large-7d9f8c6b5-x2k4q")
    assert trigger["metadata"]["ignoreNullValues"] == "false"


# Tests with the schemas of operators.


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
    """Check a resource with a schema in tests/data. Return the errors.

    kserve-serving-runtime.json is the CRD servingruntimes of KServe's commit aaac4e294, without descriptions and unused
    fields. The other schemas are written by hand: for KubeRay 1.7, for monitoring.coreos.com/v1 of the Prometheus
    operator, and for keda.sh/v1alpha1 of KEDA. The schema of KubeRay does not check pods, because kubernetes-validate
    checks them.
    """
    schema = closed(json.loads((ROOT / "tests/data" / name).read_text()))
    return [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(resource)
    ]


def ray_groups() -> list[Any]:
    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def changed(resource: Any, path: str, value: Any) -> Any:
    """Return a copy of a resource with another value at a path, such as spec.containers.0.image."""
    made = copy.deepcopy(resource)
    *parents, last = path.split(".")
    at = made
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[last] = value
    return made


@pytest.mark.parametrize(
    ("schema", "resource", "faults"),
    [
        (
            "kserve-serving-runtime.json",
            RUNTIME,
            {
                "spec.containers.0.ports.0.containerport": 1,
                "spec.protocolVersion": ["grpc-v2"],
                "spec.volumes.0.emptyDir.size": "1Gi",
            },
        ),
        (
            "kuberay-rayjob.json",
            RAY_JOB,
            {
                "spec.rayClusterSpec.autoscalerOptions.idleTimeoutSeconds": "60",
                "spec.rayClusterSpec.workerGroupSpecs.0.maxreplicas": 8,
            },
        ),
        (
            "operator-pod-monitor.json",
            REPLICAS["PodMonitor"],
            {"spec.joblabel": "x", "spec.podMetricsEndpoints.0.port": 9464},
        ),
        (
            "operator-prometheus-rule.json",
            REPLICAS["PrometheusRule"],
            {"spec.groups.0.rules.0.for": 5, "spec.rules": []},
        ),
        (
            "keda-scaled-object.json",
            REPLICAS["ScaledObject"],
            {"spec.triggers.0.metadata.threshold": 0.1, "spec.minReplicas": 1},
        ),
    ],
)
def test_schemas_of_operators_accept_the_resources_and_refuse_faults(
    schema: str, resource: Any, faults: dict[str, Any]
) -> None:
    assert schema_errors(schema, resource) == []
    for path, value in faults.items():
        assert len(schema_errors(schema, changed(resource, path, value))) == 1


def test_the_schema_of_the_operator_accepts_tls() -> None:
    assert schema_errors("operator-pod-monitor.json", EVERYTHING["PodMonitor"]) == []


# Tests of the files for KServe and KubeRay.


def test_the_serving_runtime() -> None:
    container = container_of(RUNTIME)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    volumes = {volume["name"]: volume.keys() - {"name"} for volume in RUNTIME["spec"]["volumes"]}
    assert {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]} == {
        "/cache": {"emptyDir"}, "/tmp": {"emptyDir"},  # noqa: S108 - paths in the container
    }  # fmt: skip
    settings = DEFAULTS | settings_of(container)
    assert settings.keys() == DEFAULTS.keys()
    assert stop_seconds(settings) < 30  # Kubernetes' default
    assert container["ports"] == [{"name": "h2c", "containerPort": DEFAULTS["grpc_port"], "protocol": "TCP"}]
    assert container["readinessProbe"]["grpc"] == {"port": DEFAULTS["grpc_port"], "service": SERVICE_NAME}


def test_the_http_settings_in_the_docs() -> None:
    page = (ROOT / "docs/how-to/kserve-and-triton.md").read_text()
    (lines,) = re.findall(r"^```yaml\n(metadata:\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown, container = yaml.safe_load(lines), container_of(RUNTIME)
    both = container | container_of(shown) | {"args": container["args"] + container_of(shown)["args"]}
    spec = RUNTIME["spec"] | shown["spec"] | {"containers": [both]}
    assert schema_errors("kserve-serving-runtime.json", RUNTIME | shown | {"spec": spec}) == []
    settings = settings_of(both)
    assert settings.keys() <= DEFAULTS.keys()
    assert [port["containerPort"] for port in both["ports"]] == [settings["http_port"]]


def test_the_ray_job() -> None:
    """The job's command and flags exist, and the job's paths are mounted.

    The CPUs of a worker are a multiple of the CPUs of an actor. The job and the tests use the same version of Ray.
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
