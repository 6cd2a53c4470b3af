"""The overrides with keys, for Compose and Kubernetes, are in step with the server and with what they change."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from encserve_server.settings import Settings

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
NAMES = [field.name for field in dataclasses.fields(Settings)]


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def test_compose_gives_every_server_the_file() -> None:
    services = load("../docker-compose.yml")["services"]
    servers = {name for name, it in services.items() if "encserve-server" in it.get("image", "")}
    changed = load("compose.callers.yml")["services"]
    assert changed.keys() == servers
    for service in changed.values():
        ((variable, path),) = service["environment"].items()
        assert variable.removeprefix("ENCSERVE_").lower() in NAMES
        (volume,) = service["volumes"]
        assert volume.endswith(f":{Path(path).parent}:ro")


def test_kubernetes_mounts_the_secret_where_the_flag_says() -> None:
    kustomization = load("kubernetes-callers/kustomization.yaml")
    assert kustomization["resources"] == ["../kubernetes"]
    (patch,) = kustomization["patches"]
    assert patch["target"]["name"] == load("kubernetes/deployment.yaml")["metadata"]["name"]
    argument, mount, volume = (it["value"] for it in load(f"kubernetes-callers/{patch['path']}"))
    flag, path = argument.split("=")
    assert flag.removeprefix("--").replace("-", "_") in NAMES
    assert mount["name"] == volume["name"]
    assert (mount["mountPath"], mount["readOnly"]) == (str(Path(path).parent), True)
    assert "subPath" not in mount  # a file that is mounted so never changes


def test_compose_takes_keys_and_tls_together() -> None:
    """Compose merges mappings, and lists of volumes by where they are mounted; nothing of the one is in the other."""
    keys, tls = (load(f"compose.{name}.yml")["services"]["server"] for name in ("callers", "tls"))
    assert keys.keys() == tls.keys() == {"environment", "volumes"}
    assert not keys["environment"].keys() & tls["environment"].keys()
    assert len({volume.split(":")[-2] for it in (keys, tls) for volume in it["volumes"]}) == 2
