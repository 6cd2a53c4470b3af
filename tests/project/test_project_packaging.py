"""Builds the distribution, installs each row of the table of extras in an empty environment, and uses the packages."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tiny_heads
from certificates import make_certificates
from otlp_receiver import SERVER_KIND, otlp_receiver
from real_server import RealServer, real_server
from serve_command import encserve_serve
from tiny_bundle import write_bundle

ROOT = Path(__file__).parent.parent.parent
PARTS = ("encserve", "encserve_proto", "encserve_export", "encserve_server", "encserve_client", "encserve_cli")
COMMANDS = ("encserve", "encserve-server", "encserve-export")
CLIENT = {"encserve", "grpcio", "numpy", "protobuf", "typing-extensions"}
TEXT = tiny_heads.text(5, 6, 7)

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


def run(*command: str | Path, status: int = 0) -> str:
    """Run a command and return its stdout and stderr. With another exit status, the test fails."""
    clean = {name: it for name, it in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == status, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


class Environment:
    """A new virtual environment.

    Attributes:
        bin: The folder of the programs.
    """

    def __init__(self, folder: Path, python: str | Path = sys.executable) -> None:
        """Create the environment in `folder` with the interpreter `python`, and with the pip of this interpreter."""
        run(python, "-m", "venv", folder)
        self.bin = folder / "bin"

    def pip(self, *arguments: str | Path) -> str:
        """Run the environment's pip."""
        return run(self.bin / "python", "-m", "pip", "--disable-pip-version-check", *arguments)

    def install(self, *requirements: str | Path) -> None:
        """Install requirements in the tested versions, and check that the installed versions are compatible."""
        self.pip("install", "--quiet", "-c", ROOT / "constraints.txt", *requirements)
        self.pip("check")

    def packages(self) -> set[str]:
        """Return the names of the installed distributions, except pip."""
        names = {it["name"].lower().replace("_", "-") for it in json.loads(self.pip("list", "--format=json"))}
        return names - {"pip", "setuptools"}

    def python(self, code: str, *arguments: str | Path) -> str:
        """Run a program, and return the output."""
        return run(self.bin / "python", "-c", code, *arguments).strip()

    def embed(self, server: RealServer, arguments: str = "") -> str:
        """Call a server with the client, and return the shape of the vectors."""
        code = "import sys, encserve_client as e; c = e.EncoderClient(sys.argv[1]{})"
        return self.python(f"{code.format(arguments)}; print(c.embed([sys.argv[2]]).shape)", server.target, TEXT)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive, and build the wheel from the archive. Return the folder of both files."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for an environment. After the test, remove the environment, because it may take gigabytes."""
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment", ignore_errors=True)


@pytest.fixture
def environment(folder: Path) -> Environment:
    return Environment(folder)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Write a tiny model, and return the model repository."""
    write_bundle(tmp_path / "models", tokenizer=tiny_heads.words())
    return tmp_path / "models"


def use_client(own: Environment, models: Path) -> None:
    assert own.packages() == CLIENT
    with real_server(models) as server:
        assert own.embed(server) == "(1, 8)"
    for command in COMMANDS:
        error = run(own.bin / command, status=1)
        assert re.fullmatch(rf'{command} needs \w+: pip install "encserve\[\w+\]"\n', error)
    wanted = 'encserve serve needs onnxruntime: pip install "encserve[cpu]"\n'
    assert run(own.bin / "encserve", "serve", "model", status=1) == wanted


def use_command(own: Environment, models: Path) -> None:
    with real_server(models) as server:
        assert "tiny" in run(own.bin / "encserve", "models", "--target", server.target)
        output = models.parent / "vectors.npy"
        run(own.bin / "encserve", "embed", TEXT, "--output", output, "--target", server.target)
        assert np.load(output).shape == (1, 8)


def use_only_the_command(own: Environment, models: Path) -> None:
    use_command(own, models)
    error = run(own.bin / "encserve", "embed", TEXT, "--bundle", models / "tiny", status=1)
    assert '--bundle needs onnxruntime: pip install "encserve[cpu]"\n' in error


def serve(own: Environment, models: Path, *flags: str, arguments: str = "") -> None:
    """Start the environment's server, and call it with the environment's client."""
    with real_server(models, *flags, program=own.bin / "encserve-server") as server:
        assert own.embed(server, arguments) == "(1, 8)"
        server.terminate()
        assert server.wait() == 0


def use_server(own: Environment, models: Path) -> None:
    packages = own.packages()
    assert {"onnxruntime", "encserve"} <= packages
    assert not packages & {"torch", "transformers", "onnx", "opentelemetry-api", "scipy", "rich", "pyarrow"}
    serve(own, models)
    port = ("--model-repository", str(models), "--http-port", "0")
    error = run(own.bin / "encserve-server", *port, "--grpc-port", "0", "--metrics-port", "0", status=1)
    assert '--http-port needs aiohttp: pip install \\"encserve[http]\\"' in error


def use_openvino(own: Environment, models: Path) -> None:
    serve(own, models, "--engine", "openvino", "--precision", "float32")


def use_http(own: Environment, models: Path) -> None:
    with real_server(models, "--http-port", "0", program=own.bin / "encserve-server") as server:
        body = json.dumps({"input": TEXT}).encode()
        request = urllib.request.Request(f"{server.url}/v1/embeddings", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert len(json.load(reply)["data"][0]["embedding"]) == 8


def use_serve(own: Environment, models: Path) -> None:
    """Serve a bundle, and run the printed curl line. The model's vocabulary lacks the words of the line's text."""

    async def call() -> None:
        command = (str(own.bin / "encserve"),)
        with encserve_serve(models / "tiny", variables={"PYTHONPATH": ""}, cwd=models.parent, command=command) as it:
            await it.serving()
            assert len(json.loads(it.curl())["data"][0]["embedding"]) == 8
            assert it.stop() == 0

    use_http(own, models)
    asyncio.run(call())


def use_tls(own: Environment, models: Path) -> None:
    made = make_certificates(models.parent)
    flags = ("--tls-cert-file", str(made.server.cert), "--tls-key-file", str(made.server.key))
    serve(own, models, *flags, arguments=f", tls=e.Tls(ca={str(made.ca)!r})")


def use_tracing(own: Environment, models: Path) -> None:
    with otlp_receiver() as receiver:
        serve(own, models, "--trace-endpoint", receiver.endpoint)
        receiver.wait_for(lambda spans: any(it.kind == SERVER_KIND for it in spans))


def use_traced_client(own: Environment, models: Path) -> None:
    """The server's span belongs to the trace of the client's program."""
    code = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from encserve_client import EncoderClient
with TracerProvider().get_tracer("program").start_as_current_span("call") as span:
    EncoderClient(sys.argv[1]).embed([sys.argv[2]])
print(format(span.get_span_context().trace_id, "032x"))
"""
    with otlp_receiver() as receiver, real_server(models, "--trace-endpoint", receiver.endpoint) as server:
        trace = own.python(code, server.target, TEXT)
        receiver.wait_for(lambda spans: any(it.trace_id == trace for it in spans))


def use_pooling(own: Environment, models: Path) -> None:
    write_bundle(models, "late", tokenizer=tiny_heads.words(), **tiny_heads.every_kind())
    code = "import sys, encserve_client as e; c = e.EncoderClient(sys.argv[1])"
    call = "c.embed(sys.argv[2], model='late', kind='multi_vector', pool_factor=2.0)"
    with real_server(models, program=own.bin / "encserve-server") as server:
        text = tiny_heads.text(5, 6, 7, 8, 9)  # 7 tokens with the special tokens
        assert own.python(f"{code}; print({call}.shape)", server.target, text) == "(4, 3)"


def embed_corpus(own: Environment, models: Path, *flags: str) -> None:
    """Run a job with the environment's command and without a server."""
    texts, output = models.parent / "texts.txt", models.parent / "vectors"
    texts.write_text(f"{TEXT}\n" * 5)
    run(own.bin / "encserve", "embed", "--input", texts, "--output", f"{output}/", "--bundle", models / "tiny", *flags)
    rows = own.python("import sys, pyarrow.dataset as d; print(d.dataset(sys.argv[1:]).count_rows())",
                      *output.glob("*.parquet"))  # fmt: skip
    assert rows == "5"


def use_jobs(own: Environment, models: Path) -> None:
    embed_corpus(own, models)


def use_ray(own: Environment, models: Path) -> None:
    embed_corpus(own, models, "--ray", "local", "--actors", "1")


def use_exporter(own: Environment, models: Path) -> None:
    config = models.parent / "config.json"
    config.write_text('{"vocab_size": 50, "d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 16}')
    target = ("--config", config, "--model-repository", models, "--name", "random")
    run(own.bin / "encserve-export", "init", *target)
    manifest = json.loads((models / "random/1/manifest.json").read_text())
    version = run(own.bin / "encserve-export", "--version").split()[-1]
    assert manifest["source"]["versions"]["encserve"] == version
    with real_server(models) as server:
        code = "import sys, encserve_client as e; c = e.EncoderClient(sys.argv[1])"
        shape = "c.token_vectors([[1]], model='random')[0].shape"
        assert own.python(f"{code}; print({shape})", server.target) == "(1, 8)"


def use_all(own: Environment, models: Path) -> None:
    use_exporter(own, models)
    shutil.rmtree(models / "random")
    use_serve(own, models)
    use_tls(own, models)
    use_jobs(own, models)


# These functions test the rows of the table. The extra gpu has no function, because gpu needs a GPU; pip only resolves
# its packages. All rows take a quarter of an hour to install, so each change is tested with only four rows.
ROWS_FOR_EACH_CHANGE = ("", "cli", "cpu", "cpu,http")
USES: dict[str, Callable[[Environment, Path], None]] = {
    "": use_client,
    "cli": use_only_the_command,
    "cpu": use_server,
    "openvino": use_openvino,
    "cpu,http": use_serve,
    "cpu,tls": use_tls,
    "cpu,tracing": use_tracing,
    "tracing": use_traced_client,
    "cpu,pooling": use_pooling,
    "cpu,cli": use_jobs,
    "cpu,ray": use_ray,
    "export": use_exporter,
    "all": use_all,
}


def test_each_row_of_the_table_has_a_test() -> None:
    text = (ROOT / "docs/start/install.md").read_text()
    table = text[text.index("\n## Extras") : text.index("\nChoose one of")]
    rows = re.findall(r"`encserve(?:\[([\w,]+)\])?`", "\n".join(re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)))
    assert set(rows) - {"cli", ""} == (USES.keys() | {"gpu"}) - {"cli", ""}


@pytest.mark.parametrize(
    "extras", [pytest.param(it, marks=() if it in ROWS_FOR_EACH_CHANGE else pytest.mark.weekly) for it in USES]
)
def test_a_row_of_the_table(extras: str, environment: Environment, dist: Path, models: Path) -> None:
    environment.install("--find-links", dist, f"encserve[{extras}]" if extras else "encserve")
    USES[extras](environment, models)


def resolved(environment: Environment, *requirements: str | Path, report: Path) -> set[str]:
    """Return the names of the distributions that pip would install in the tested versions."""
    environment.install("--dry-run", "--report", report, *requirements)
    return {it["metadata"]["name"] for it in json.loads(report.read_text())["install"]}


@pytest.mark.weekly
def test_the_packages_for_a_gpu_resolve(environment: Environment, dist: Path, tmp_path: Path) -> None:
    names = resolved(environment, "--find-links", dist, "encserve[gpu]", report=tmp_path / "report.json")
    assert {"onnxruntime-gpu", "nvidia-cublas", "nvidia-ml-py", "encserve"} <= names
    assert not names & {"onnxruntime", "torch", "nvidia-cudnn-cu13"}


def find_python(version: str) -> str | None:
    """Return the path of an interpreter. If pyenv installed the interpreter, PYENV_VERSION must name the version."""
    program, code = shutil.which(f"python{version}"), "import sys; print(sys.executable)"
    if program is None:
        return None
    variables = {**os.environ, "PYENV_VERSION": version}
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, env=variables, check=False)
    return done.stdout.strip() or None


@pytest.mark.weekly
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_another_python(version: str, folder: Path, dist: Path, models: Path, tmp_path: Path) -> None:
    """The server and the command work with another Python version. pip can resolve encserve[gpu,export] too."""
    python = find_python(version)
    if python is None and not os.environ.get("ENCSERVE_REQUIRE_PYTHONS"):
        pytest.skip(f"Python {version} is not installed")
    assert python is not None
    own = Environment(folder, python)
    # PyPI's build of torch for Linux is for CUDA, and requires exact versions of NVIDIA's packages.
    names = resolved(own, "--find-links", dist, "encserve[gpu,export]", report=tmp_path / "report.json")
    assert {"torch", "onnxruntime-gpu", "nvidia-cublas"} <= names
    own.install("--find-links", dist, "encserve[cpu,http,tls,tracing,cli]")
    use_serve(own, models)
    use_tls(own, models)
    use_command(own, models)
    use_jobs(own, models)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree's files into a new git repository, and return this repository."""
    folder = tmp_path_factory.mktemp("checkout")
    files = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(lambda it: (ROOT / it).is_file(), files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    run("git", "init", "--quiet", folder)
    run("git", "-C", folder, "add", ".")
    author = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    run("git", "-C", folder, *author, "commit", "--quiet", "--no-verify", "-m", "all files")
    run("git", "-C", folder, "update-server-info")
    return folder


@pytest.fixture
def url(checkout: Path) -> Iterator[str]:
    """Serve the git repository over HTTP, and return the URL. pip 23.2 refuses git+file:///PATH."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(checkout))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/.git"
        server.shutdown()
        thread.join()


@pytest.mark.weekly
@pytest.mark.parametrize("pip", ["pip==23.2", "pip"])
def test_the_three_ways_to_install(pip: str, environment: Environment, checkout: Path, url: str, dist: Path) -> None:
    """pip 23.2 and the newest pip can install the package from a checkout, from a repository and from wheels."""
    environment.pip("install", "--quiet", "--upgrade", pip)
    for way in ([f"{checkout}[cpu,cli]"], [f"encserve[cpu] @ git+{url}"],
                ["encserve[cpu]", "--find-links", dist]):  # fmt: skip
        environment.install(*way)
        assert "encserve, version" in run(environment.bin / "encserve", "--version")
        assert "encserve-server, version" in run(environment.bin / "encserve-server", "--version")
        environment.pip("uninstall", "--yes", "--quiet", "encserve")


def test_the_wheel_has_all_parts_with_their_types_and_data(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(path).decode())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PARTS)
    assert {f"{part}/py.typed" for part in PARTS} <= set(names)
    assert {f"encserve_cli/report/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert "encserve_cli/load/lengths.json" in names
    plain = [it for it in metadata.get_all("Requires-Dist", []) if "extra ==" not in it]
    assert {re.split(r"[^\w-]", it)[0] for it in plain} == {"grpcio", "numpy", "protobuf"}
    assert metadata["Requires-Python"] == ">=3.11"


def pip_lines() -> list[str]:
    """Return the different commands `pip install` and `pip download` on the pages."""
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))))
    found = re.findall(r"\b(pip (?:install|download) [^`#\n]*[^`#\n ])", text)
    return [it for it in dict.fromkeys(found) if "…" not in it]  # skip error messages, which have an ellipsis


@pytest.mark.weekly
def test_the_pip_lines_of_the_pages(environment: Environment, checkout: Path, url: str, dist: Path) -> None:
    """pip resolves each line in a checkout. Other tests install each extra, so this test installs nothing.

    The test does not run lines with PyTorch's own index, but checks that such a line has the tested version.
    """
    shutil.copytree(dist, checkout / "dist")
    (checkout.parent / "encserve").symlink_to(checkout)  # in the image for Ray, the checkout is named encserve
    for line in pip_lines():
        if "--index-url" in line:
            assert line.split()[2] in (ROOT / "constraints.txt").read_text().splitlines()
            continue
        folder = checkout.parent if "./encserve" in line else checkout
        option = " --dry-run" if line.startswith("pip install") else ""
        command = line.replace("<this repository>", url) + option
        printed = run("/bin/bash", "-euc", f"cd {folder}; PATH={environment.bin}:$PATH; {command}")
        assert "does not provide the extra" not in printed, line
    downloaded = {path.name.partition("-")[0] for path in (checkout / "dist").iterdir()}
    assert {"hatchling", "onnxruntime", "aiohttp", "scipy"} <= downloaded
