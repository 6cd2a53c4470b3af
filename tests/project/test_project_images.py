"""Tests of the Dockerfiles, and of the lock files deploy/requirements/*.txt. `make lock` writes the lock files."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted((ROOT / "deploy").glob("*Dockerfile"))
IMAGES = {
    "server-cpu": ("server", "cpu"),
    "server-openvino": ("server", "openvino"),
    "server-gpu": ("server", "gpu"),
    "export": ("export", ""),
}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_no_root_user_and_installs_by_hash(path: Path) -> None:
    stages = re.split(r"^(?=FROM )", path.read_text(), flags=re.MULTILINE)
    assert any("\nUSER 10001:10001\n" in stage for stage in stages)
    for command in re.findall(r"pip\S*(?: --python \S+)? install [^&]*", path.read_text().replace("\\\n", " ")):
        assert "--require-hashes" in command or "--no-index" in command, command
    for entry_point in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", path.read_text(), flags=re.MULTILINE):
        assert entry_point.startswith("["), f"not a JSON list, so a shell would get the signals: {entry_point}"


def locked(name: str) -> dict[NormalizedName, str]:
    """Return the version of each package in deploy/requirements/NAME.txt. Fail if a line has no hash."""
    text = (ROOT / f"deploy/requirements/{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all("--hash=sha256:" in line for line in lines)
    return {canonicalize_name(line.partition("==")[0]): line.split()[0].partition("==")[2] for line in lines}


def required(pyproject: Path, extra: str = "") -> list[Requirement]:
    """Return the requirements of a distribution and of one extra, without our own packages."""
    project = tomllib.loads(pyproject.read_text())["project"]
    texts = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    return [requirement for requirement in map(Requirement, texts) if not requirement.name.startswith("encserve-")]


@pytest.mark.parametrize("name", IMAGES)
def test_the_lock_has_all_requirements_in_the_versions_of_ci(name: str) -> None:
    """An image's lock file has all requirements of the image, in the versions of constraints.txt.

    If this test fails after a change of dependencies, run `make lock`.
    """
    part, extra = IMAGES[name]
    versions = locked(name) | (locked("torch") if part == "export" else {})
    requirements = [*required(ROOT / "proto/pyproject.toml"), *required(ROOT / part / "pyproject.toml", extra)]
    if part == "server":
        requirements += required(ROOT / part / "pyproject.toml", "tracing")
    for requirement in requirements:
        version = versions[canonicalize_name(requirement.name)].removesuffix("+cpu")
        assert requirement.specifier.contains(version), requirement
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    for package, version in versions.items():
        assert version.removesuffix("+cpu") == tested.get(package, version).removesuffix("+cpu"), package


def test_server_images_have_one_onnx_runtime_and_no_torch() -> None:
    for name in ("server-cpu", "server-openvino", "server-gpu"):
        packages = locked(name).keys()
        assert not packages & {"torch", "transformers", "onnx", "pip", "setuptools"}
        assert len(packages & {"onnxruntime", "onnxruntime-gpu"}) == 1
    assert {name for name in locked("server-gpu") if name.startswith("nvidia-")} == {
        "nvidia-cublas",
        "nvidia-cuda-nvrtc",  # cublas depends on this package
        "nvidia-cuda-runtime",
        "nvidia-curand",
        "nvidia-ml-py",  # reads the GPU's memory use; has only Python files
    }
