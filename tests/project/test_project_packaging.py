"""Build the five wheels and install them in empty environments.

The tests check the requirements, the files and the versions of the wheels. A client also calls a server.
"""

import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from real_server import real_server
from tiny_bundle import write_bundle

ROOT = Path(__file__).parent.parent.parent
PARTS = {
    "proto": "encserve_proto",
    "export": "encserve_export",
    "server": "encserve_server",
    "clients/python": "encserve_client",
    "clients/cli": "encserve_cli",
}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

pytestmark = pytest.mark.system


def run(*command: str | Path) -> str:
    """Run a command and return its stdout. If the command fails, the test fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the five wheels, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    for part in PARTS:
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT / part)
    return folder


def environment(folder: Path, wheels: Path, requirement: str) -> Path:
    """Make a virtual environment with one wheel and its requirements. Return the environment's bin folder."""
    venv.create(folder)
    pip = (*PIP, "--python", folder)
    run(*pip, "install", "--quiet", "--find-links", wheels, "-c", ROOT / "constraints.txt", requirement)
    run(*pip, "check")
    return folder / "bin"


def installed(bin_folder: Path) -> set[str]:
    lines = run(*PIP, "--python", bin_folder.parent, "list", "--format=freeze").splitlines()
    return {re.split("[=@ ]", line)[0].lower().replace("_", "-") for line in lines}


@pytest.fixture(scope="session")
def server_bin(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("server"), wheels, "encserve-server[cpu]")


@pytest.fixture(scope="session")
def client_bin(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("client"), wheels, "encserve-client")


@pytest.fixture(scope="session")
def command_bin(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("command"), wheels, "encserve-cli")


def test_the_server_has_no_torch(server_bin: Path) -> None:
    packages = installed(server_bin)
    assert {"onnxruntime", "encserve-server"} <= packages
    assert not packages & {"torch", "transformers", "onnx", "opentelemetry-api", "encserve-export", "encserve-client"}


def test_the_client_needs_only_grpc_protobuf_and_numpy(client_bin: Path) -> None:
    ours = {"encserve-client", "encserve-proto"}
    assert installed(client_bin) == ours | {"grpcio", "numpy", "protobuf", "typing-extensions"}


def test_the_client_and_the_command_call_the_server(
    server_bin: Path, client_bin: Path, command_bin: Path, tmp_path: Path
) -> None:
    """The client and the command call a server. The client, the command and the server run from their wheels."""
    write_bundle(tmp_path)
    code = "import sys, encserve_client as e; print(e.EncoderClient(sys.argv[1]).token_vectors([[1, 2, 3]])[0].shape)"
    with real_server(tmp_path, program=server_bin / "encserve-server") as server:
        assert run(client_bin / "python", "-c", code, server.target).strip() == "(3, 8)"
        assert "tiny" in run(command_bin / "encserve", "--target", server.target, "models")
        server.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize("part", PARTS.values())
def test_a_wheel_has_one_package_and_its_types(wheels: Path, part: str) -> None:
    (wheel,) = wheels.glob(f"{part}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {part}
    assert f"{part}/py.typed" in names


def test_the_command_has_its_data_files(wheels: Path) -> None:
    (wheel,) = wheels.glob("encserve_cli-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {f"encserve_cli/report/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert "encserve_cli/load/lengths.json" in names


def test_all_parts_require_the_same_version(wheels: Path) -> None:
    versions, needs = set(), {}
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(archive.read(name).decode())
        versions.add(metadata["Version"])
        needs[metadata["Name"]] = [it for it in metadata.get_all("Requires-Dist", []) if it.startswith("encserve-")]
    (version,) = versions
    contracts = [f"encserve-proto=={version}"]
    assert needs == {
        "encserve-proto": [],
        "encserve-export": [*contracts, f"encserve-server=={version}"],
        "encserve-server": contracts,
        "encserve-client": contracts,
        "encserve-cli": [f"encserve-client=={version}", f"encserve-server=={version}; extra == 'local'"],
    }
