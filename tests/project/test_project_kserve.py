"""The ServingRuntime of deploy/kserve: what KServe's own schema allows, and in step with the server."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from encserve_server.repository.manager import _CLOSE_SECONDS
from encserve_server.rpc.service import SERVICE_NAME
from encserve_server.settings import Settings

ROOT = Path(__file__).parent.parent.parent
# Of KServe's config/crd/full/serving.kserve.io_servingruntimes.yaml at aaac4e294, without its prose and without
# affinity, volumes, workers and adapters, which we do not use.
SCHEMA = ROOT / "tests/data/kserve-serving-runtime.json"
DEFAULTS = {f"--{it.name.replace('_', '-')}": it.default for it in dataclasses.fields(Settings)}
DEFAULT_GRACE_SECONDS = 30  # of a pod that says nothing; Kubernetes


def closed(schema: Any) -> Any:
    """The schema with nothing allowed that it does not name: Kubernetes would drop that in silence."""
    if isinstance(schema, list):
        return [closed(it) for it in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(it) for key, it in schema.items()}
    if isinstance(made.get("properties"), dict) and "spec" not in made["properties"]:
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture
def runtime() -> Any:
    return yaml.safe_load((ROOT / "deploy/kserve/serving-runtime.yaml").read_text())


@pytest.fixture
def container(runtime: Any) -> Any:
    (only,) = runtime["spec"]["containers"]
    return only


def test_kserves_schema_allows_it(runtime: Any) -> None:
    validator = jsonschema.Draft202012Validator(closed(json.loads(SCHEMA.read_text())))
    assert not [f"{it.json_path}: {it.message}" for it in validator.iter_errors(runtime)]
    wrong = copy.deepcopy(runtime)
    wrong["spec"]["containers"][0]["ports"][0]["containerport"] = 1
    wrong["spec"]["protocolVersion"] = ["grpc-v2"]
    assert len(list(validator.iter_errors(wrong))) == 2


def test_the_lines_for_http_that_the_page_shows(runtime: Any, container: Any) -> None:
    page = (ROOT / "docs/open-inference.md").read_text()
    (lines,) = re.findall(r"^```yaml\n(metadata:\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = yaml.safe_load(lines)
    (its,) = shown["spec"]["containers"]
    its = container | its | {"args": container["args"] + its["args"]}
    made = runtime | shown | {"spec": runtime["spec"] | shown["spec"] | {"containers": [its]}}
    validator = jsonschema.Draft202012Validator(closed(json.loads(SCHEMA.read_text())))
    assert not [f"{it.json_path}: {it.message}" for it in validator.iter_errors(made)]
    flags = dict(argument.split("=", 1) for argument in its["args"])
    assert set(flags) <= set(DEFAULTS)
    assert [f"{port['containerPort']}" for port in its["ports"]] == [flags["--http-port"]]


def test_flags_port_and_probe_are_the_servers(container: Any) -> None:
    flags = dict(argument.split("=", 1) for argument in container["args"])
    assert set(flags) <= set(DEFAULTS)
    assert container["ports"] == [{"name": "h2c", "containerPort": DEFAULTS["--grpc-port"], "protocol": "TCP"}]
    assert container["readinessProbe"]["grpc"] == {"port": DEFAULTS["--grpc-port"], "service": SERVICE_NAME}
    longest = float(flags["--drain-delay-seconds"]) + float(flags["--grace-seconds"])
    assert longest + _CLOSE_SECONDS < DEFAULT_GRACE_SECONDS
