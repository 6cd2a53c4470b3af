"""The RayJob of deploy/kuberay: what KubeRay's and Kubernetes' schemas allow, and in step with the command."""

import copy
import json
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

from encserve_cli.commands import cli

ROOT = Path(__file__).parent.parent.parent
# The fields of a RayJob of KubeRay 1.7, with their types, written by hand; templates of pods are Kubernetes' own.
SCHEMA = ROOT / "tests/data/kuberay-rayjob.json"


@pytest.fixture
def job() -> Any:
    return yaml.safe_load((ROOT / "deploy/kuberay/embed-rayjob.yaml").read_text())


@pytest.fixture
def groups(job: Any) -> list[Any]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_kuberays_schema_allows_it(job: Any) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert not [f"{it.json_path}: {it.message}" for it in validator.iter_errors(job)]
    wrong = copy.deepcopy(job)
    wrong["spec"]["rayClusterSpec"]["autoscalerOptions"]["idleTimeoutSeconds"] = "60"
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxreplicas"] = 8
    assert len(list(validator.iter_errors(wrong))) == 2


def test_kubernetes_schema_allows_its_pods(groups: list[Any], tmp_path: Path) -> None:
    for number, group in enumerate(groups):
        path = tmp_path / f"{number}.yaml"
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "m"}, "template": group["template"]}
        path.write_text(yaml.safe_dump(pod))
        command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--quiet", "--strict", "-k", "1.37"]
        subprocess.run([*command, path], check=True, timeout=60)


def test_its_command_is_one_of_ours_and_its_actors_fit_the_workers(job: Any, groups: list[Any]) -> None:
    line, _, on_rejected_rows = job["spec"]["entrypoint"].partition(" || ")
    assert on_rejected_rows == "test $? -eq 3"
    program, name, *words = shlex.split(line)
    assert (program, name) == ("encserve", "embed")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert set(given) <= {flag for it in command.params for flag in it.opts}
    _, worker = groups
    (container,) = worker["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["cpu"]) % int(given["--actor-cpus"]) == 0
    mounts = {it["mountPath"] for it in container["volumeMounts"]}
    assert {f"/{Path(it).parts[1]}" for it in (words[0], given["--output"], given["--bundle"])} == mounts


def test_its_ray_is_the_one_that_we_test_with(job: Any) -> None:
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")
