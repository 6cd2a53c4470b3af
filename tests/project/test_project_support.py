"""docs/reference/support.md lists the architectures that the tests export, and the versions that the tests use."""

import re
from pathlib import Path

import pytest
from architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT.joinpath("docs/reference/support.md").read_text()
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", ROOT.joinpath("constraints.txt").read_text(), flags=re.M))


def test_the_page_lists_the_tested_architectures() -> None:
    table = PAGE[PAGE.index("| architecture | `model_type` |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| `(\w[\w-]*)` \| (?:yes|no) \|$", table, flags=re.M)
    assert rows == [(it.name, it.model_type) for it in ARCHITECTURES]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("ONNX Runtime", "onnxruntime"),
        ("OpenVINO", "openvino"),
        ("PyTorch", "torch"),
        ("transformers", "transformers"),
        ("sentence-transformers", "sentence-transformers"),
    ],
)
def test_the_page_names_the_tested_versions(name: str, package: str) -> None:
    assert f" {name} {PINS[package]}" in PAGE
