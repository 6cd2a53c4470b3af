"""Tests of the extras of the distribution, and of the errors for an extra that is not installed."""

import subprocess
import sys
from importlib.metadata import packages_distributions, requires, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import encserve
from encserve.extras import MODULES, install_line, needs

# This program runs one of our commands in an environment without some modules.
WITHOUT = """
import sys
program, missing, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = program
for module in missing.split(","):
    sys.modules[module] = None
from encserve import commands
getattr(commands, program.replace("-", "_"))()
"""
# Large modules that the extra `cli` installs.
LARGE = "rich,pyarrow,plotly"


def run(program: str, missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the modules `missing`."""
    command = [sys.executable, "-c", WITHOUT, program, missing, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def required(extra: str) -> set[str]:
    """Return the distributions that an extra installs directly."""
    found = map(Requirement, requires("encserve") or [])
    return {canonicalize_name(it.name) for it in found if it.marker and it.marker.evaluate({"extra": extra})}


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_are_in_its_distributions(extra: str) -> None:
    """Each distribution of an extra has a module in MODULES, and each module is in a distribution of the extra.

    NumPy is not in MODULES, because the plain distribution requires NumPy. If an extra contains another extra, MODULES
    lists the modules of the other extra separately.
    """
    homes = dict(packages_distributions()) | {"google.rpc": ["googleapis-common-protos"]}
    listed = {canonicalize_name(home) for it in MODULES[extra] for home in homes[it]}
    inner = {"openvino": "cpu", "ray": "cli"}.get(extra)
    assert required(extra) - {"numpy"} - (required(inner) if inner else set()) <= listed
    assert not {it for it in MODULES[extra] if not required(extra) & {canonicalize_name(home) for home in homes[it]}}


def test_the_version_is_that_of_the_distribution() -> None:
    assert encserve.__version__ == version("encserve")


@pytest.mark.parametrize(
    ("extra", "missing", "text"),
    [
        ("http", "aiohttp.web", "--flag needs aiohttp.web: "),
        ("http", "msgspec", "--flag needs msgspec: "),
        ("http", "scipy.cluster", "--flag needs scipy.cluster: "),
        ("cli", "google.rpc.status_pb2", "--flag needs google.rpc.status_pb2: "),
    ],
)
def test_the_error_names_the_extra_that_brings_the_module(extra: str, missing: str, text: str) -> None:
    brings = {"aiohttp.web": "http", "msgspec": "http", "scipy.cluster": "pooling"}.get(missing, "cpu")
    with pytest.raises(ValueError, match="needs") as error, needs("--flag", extra, ValueError):
        raise ModuleNotFoundError("no", name=missing)
    assert str(error.value) == text + install_line(brings)


@pytest.mark.parametrize("missing", ["encserve_server.no", "clicker", "google.rp", None])
def test_other_modules_keep_their_error(missing: str | None) -> None:
    with pytest.raises(ModuleNotFoundError), needs("--flag", "cpu", ValueError):
        raise ModuleNotFoundError("no", name=missing)


@pytest.mark.system
@pytest.mark.parametrize(
    ("program", "missing", "arguments", "line"),
    [
        ("encserve", "click", [], 'encserve needs click: pip install "encserve[cli]"'),
        ("encserve", "click", ["models"], 'encserve models needs click: pip install "encserve[cli]"'),
        ("encserve", "click,onnxruntime", ["serve"], 'encserve serve needs onnxruntime: pip install "encserve[cpu]"'),
        ("encserve", "click,torch", ["pull"], 'encserve pull needs torch: pip install "encserve[export]"'),
        ("encserve-server", "click", [], 'encserve-server needs click: pip install "encserve[cpu]"'),
        ("encserve-server", "uvloop,onnxruntime", [], 'encserve-server needs onnxruntime: pip install "encserve[cpu]"'),
        ("encserve-export", "click,torch", [], 'encserve-export needs torch: pip install "encserve[export]"'),
        ("encserve-export", "torch", ["hf", "x"], 'encserve-export needs torch: pip install "encserve[export]"'),
        ("encserve-export", "transformers", ["--version"], None),
        # `encserve embed` imports pyarrow only when the command runs.
        (
            "encserve",
            "pyarrow",
            ["embed", "--input", "no.parquet", "--output", "/nowhere/x/"],
            'encserve embed needs pyarrow: pip install "encserve[cli]"',
        ),
        ("encserve", LARGE, ["embed", "--help"], None),
        ("encserve", LARGE, ["--version"], None),
        ("encserve-server", LARGE, ["--version"], None),
    ],
)
def test_a_command_without_its_extra_says_so_in_one_line(
    program: str, missing: str, arguments: list[str], line: str | None
) -> None:
    done = run(program, missing, *arguments)
    if line is None:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{line}\n")
