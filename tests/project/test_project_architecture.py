"""Who may import whom, and how large a module may grow."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PARTS = {
    "encserve_proto": ROOT / "proto/src/encserve_proto",
    "encserve_export": ROOT / "export/src/encserve_export",
    "encserve_server": ROOT / "server/src/encserve_server",
    "encserve_client": ROOT / "clients/python/src/encserve_client",
}
# In the server only these speak gRPC and protobuf: batching, scheduling and engines know neither.
TRANSPORT = {"app.py", "codec.py", "health.py", "healthcheck.py", "service.py", "status.py"}


def modules() -> Iterator[tuple[str, Path]]:
    for part, folder in PARTS.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                yield part, path


def imported(path: Path) -> set[str]:
    """The dotted names that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


ALL = [pytest.param(part, path, id=str(path.relative_to(ROOT))) for part, path in modules()]


@pytest.mark.parametrize(("part", "path"), ALL)
def test_no_part_imports_another(part: str, path: Path) -> None:
    """Every part may import itself and the contracts."""
    assert top(imported(path)) & set(PARTS) <= {part, "encserve_proto"}


@pytest.mark.parametrize(("part", "path"), ALL)
def test_heavy_libraries_stay_where_they_belong(part: str, path: Path) -> None:
    names = top(imported(path))
    if part != "encserve_export":
        assert "torch" not in names
    if part == "encserve_server" and path.name != "onnx.py":
        assert "onnxruntime" not in names
    if part == "encserve_server" and path.name != "openvino.py":
        assert "openvino" not in names
    if part == "encserve_server" and path.parent.name != "tracing":
        assert "opentelemetry" not in names
    if part == "encserve_server" and path.parent.name != "http2":
        assert "hpack" not in names
    assert "transformers" not in names


@pytest.mark.parametrize("path", [path for part, path in modules() if part == "encserve_server"], ids=lambda p: p.name)
def test_in_the_server_only_the_transport_speaks_grpc(path: Path) -> None:
    names = imported(path)
    if path.name not in TRANSPORT and path.parent.name != "http2":
        assert not top(names) & {"grpc", "grpc_health", "grpc_reflection"}
        if path.name != "bundle.py":  # the manifest is a contract too
            assert not {name for name in names if name.startswith(("encserve_proto", "google."))}


def test_the_own_grpc_server_knows_nothing_of_encoders() -> None:
    """It could serve anything: gRPC's types, HPACK, and itself."""
    allowed = {"grpc", "hpack"} | sys.stdlib_module_names
    for path in (PARTS["encserve_server"] / "http2").glob("*.py"):
        names = imported(path)
        assert {name for name in names if name.startswith("encserve")} <= {
            name for name in names if name.startswith("encserve_server.http2")
        }
        assert top(names) - {"encserve_server"} <= allowed


def test_the_client_needs_three_packages() -> None:
    """What its command, its load generator and its report need beside them is imported by those alone."""
    allowed = {"encserve_client", "encserve_proto", "grpc", "google", "numpy"} | sys.stdlib_module_names
    extras = {
        "_bench": {"prometheus_client"},
        "_cli": {"click", "rich"},
        "_report": {"plotly"},
        "_tracing.py": {"opentelemetry"},
    }
    folder = PARTS["encserve_client"]
    for path in folder.rglob("*.py"):
        extra = extras.get(path.relative_to(folder).parts[0], set())
        assert top(imported(path)) <= allowed | extra, path


@pytest.mark.parametrize(("part", "path"), ALL)
def test_no_module_outgrows_400_lines(part: str, path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_no_top_level_folder_is_a_package() -> None:
    """With an __init__.py in it, `import server` would find the folder."""
    assert not [
        name for name in ("proto", "server", "export", "clients", "tests") if (ROOT / name / "__init__.py").exists()
    ]
