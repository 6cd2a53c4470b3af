"""Reads the files of deploy/, renders the Helm chart, and finds the server's settings in containers."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from click.core import ParameterSource
from render_manifests import render

from encserve_server.__main__ import main
from encserve_server.options import read_settings
from encserve_server.settings import Settings

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def load(path: str) -> Any:
    """Parse a YAML file. `path` is relative to deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())


def rendered(*files: str, **values: Any) -> dict[str, Any]:
    """Render the Helm chart; return the resources by kind.

    Args:
        files: Files with values, relative to deploy/helm/.
        values: Further values.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged |= load(f"helm/{file}")
    resources = list(yaml.safe_load_all(render(merged | values)))
    return {resource["kind"]: resource for resource in resources if resource is not None}


def container_of(resource: Any) -> Any:
    """Return the only container of a pod or of a pod's template."""
    (container,) = resource["spec"].get("template", resource)["spec"]["containers"]
    return container


def settings_of(container: Any) -> dict[str, Any]:
    """Parse the arguments of a container as the server does. Return the settings that the arguments set, by field.

    Raises:
        ClickException: The server would refuse the arguments.
    """
    context = main.make_context("encserve-server", list(container["args"]))
    read_settings(context, context.params)
    given = context.get_parameter_source
    return {name: value for name, value in context.params.items() if given(name) is ParameterSource.COMMANDLINE}


def environment_of(service: Any) -> dict[str, str]:
    """Return the server settings in the environment of a Compose service. The keys are field names of Settings."""
    return {
        name.removeprefix("ENCSERVE_").lower(): value
        for name, value in service.get("environment", {}).items()
        if name.startswith("ENCSERVE_")
    }


def stop_seconds(settings: dict[str, Any]) -> float:
    """Return the longest time that a server with these settings needs to stop, in seconds.

    The sum includes 5 s for closing the models.
    """
    given = DEFAULTS | settings
    return float(given["drain_delay_seconds"]) + float(given["grace_seconds"]) + 5.0


def mounts(service: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the source, the target and the read-only flag of each volume of a Compose service."""
    for volume in service.get("volumes", []):
        source, target, *mode = re.sub(r"(\$\{\w+):-", r"\1=", volume).split(":")
        yield source, target, "ro" in mode
