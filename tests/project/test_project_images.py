"""Tests of the Dockerfiles, and of the package versions that the images contain."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = sorted((ROOT / "deploy").glob("*Dockerfile"))
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_no_root_user_and_installs_tested_versions(path: Path) -> None:
    stages = re.split(r"^(?=FROM )", path.read_text(), flags=re.MULTILINE)
    assert any("\nUSER 10001:10001\n" in stage for stage in stages)
    for command in re.findall(r"pip\S*(?: --python \S+)? install [^&\n]*", path.read_text().replace("\\\n", " ")):
        assert "--constraint wheels/constraints.txt" in command or "--no-deps ." in command, command
        for extras in re.findall(r"\[([\w,]+)\]", command.replace("${EXTRA}", "cpu")):
            assert set(extras.split(",")) <= EXTRAS.keys()
    for entry_point in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", path.read_text(), flags=re.MULTILINE):
        assert entry_point.startswith("["), f"not a JSON list, so a shell would get the signals: {entry_point}"


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_constraints_have_a_version_for_each_requirement(extra: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name != "encserve":
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def all_of(extra: str) -> set[str]:
    """Return the names of the packages that an extra requires directly.

    If the extra contains other extras, include the packages of the other extras.
    """
    found = list(map(Requirement, EXTRAS[extra]))
    inner = [name for it in found if it.name == "encserve" for name in it.extras]
    return {it.name for it in found if it.name != "encserve"}.union(*map(all_of, inner))


@pytest.mark.parametrize(
    ("extra", "runtime"), [("cpu", "onnxruntime"), ("openvino", "onnxruntime"), ("gpu", "onnxruntime-gpu")]
)
def test_a_server_has_one_onnx_runtime_and_no_torch(extra: str, runtime: str) -> None:
    packages = all_of(extra)
    assert packages & {"onnxruntime", "onnxruntime-gpu"} == {runtime}
    assert not packages & {"torch", "transformers", "onnx", "scipy"}
