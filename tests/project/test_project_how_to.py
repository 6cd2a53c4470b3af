"""Runs the commands and programs of the how-to pages, with small models."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import MODEL, export_minilm, minilm_directory
from exporting import export_once
from page_code import DOCS, blocks, reader, run_commands
from ports import free_port
from prometheus import need
from pyarrow import parquet
from real_server import RealServer, cpu_has_bfloat16, real_server
from score_models import write_scores
from zoo import Zoo

from encserve_export import Target, export_hf

pytestmark = pytest.mark.system

TEXTS = ["The water has 21 degrees.", "Bring a coat.", "Stock markets fell sharply on Monday."]
# For each page, old and new parts of its code. The test replaces the old parts. Pages without changes have no entry.
CHANGES = {
    "call-from-python": {" --target 10.0.0.7:50051 --ca ca.pem": ""},
    "embed-files": {"models/NAME": f"models/{MODEL}"},
    "scale": {"--concurrency 64": "--concurrency 64 --seconds 2 --warmup-seconds 0.1"},
    "load-test": {"encserve bench": "encserve bench --concurrency 2 --seconds 2 --warmup-seconds 0.1"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with all-MiniLM-L6-v2, and small models of other kinds."""
    folder = tmp_path_factory.mktemp("how-to")
    models = folder / "models"
    export_minilm(models)
    Zoo(folder).export("trained-late", models, "late")
    for name, labels in (("reranker", 1), ("sentiment", 2)):
        directory = write_scores(folder / name, labels=labels)
        export_once(export_hf, directory, target=Target(model_repository=models, name=name))
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RealServer]:
    names = (MODEL, "late", "reranker", "sentiment")
    flags = [f"--model={name}" for name in names]
    with real_server(models, *flags, f"--served-model-name=dense={MODEL}") as server:
        yield server


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A folder with the files that the pages read."""
    (tmp_path / "models").symlink_to(models, target_is_directory=True)
    for name in ("texts.txt", "many-lines.txt"):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in TEXTS))
    (tmp_path / "corpus").mkdir()
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    for path in ("corpus.parquet", "corpus/first.parquet", "corpus/second.parquet"):
        parquet.write_table(table, tmp_path / path)
    parquet.write_table(pa.table({"query": TEXTS, "document": TEXTS}), tmp_path / "pairs.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "page", ["call-from-python", "send-many-inputs", "embed-files", "rerank", "inspect", "load-test", "scale", "trace"]
)
def test_page(page: str, folder: Path, server: RealServer) -> None:
    with reader(folder, server.target) as the_page:
        the_page.read(f"how-to/{page}.md", CHANGES.get(page))


def test_serve(tmp_path: Path) -> None:
    """The commands of the page serve, pull, and serve again. A local folder replaces the model of the hub."""
    shutil.copytree(minilm_directory(), tmp_path / "sentence-transformers" / MODEL)
    with reader(tmp_path) as page:
        page.read("how-to/serve.md")
    assert (tmp_path / "models" / MODEL / "1" / "manifest.json").is_file()


def test_migrate_from_tei(tmp_path: Path) -> None:
    """Our server starts with the flags of text-embeddings-inference, and answers the request of the page."""
    shutil.copytree(minilm_directory(), tmp_path / "sentence-transformers" / MODEL)
    port = free_port()
    with reader(tmp_path) as page:
        page.read("how-to/migrate-from-tei.md", {"--host 0.0.0.0": "", "8080": str(port), "curl": "curl --fail"})


def test_monitor(folder: Path) -> None:
    """Prometheus starts with the configuration in deploy/.

    The page's command gives an exported dashboard the format of the dashboards in deploy/.
    """
    need("prometheus")
    shutil.copytree(DOCS.parent / "deploy", folder / "deploy")
    dashboard = "deploy/grafana/dashboards/service.json"
    committed = (DOCS.parent / dashboard).read_text()
    (folder / dashboard).unlink()
    (folder / "exported.json").write_text(json.dumps(dict(reversed(json.loads(committed).items()))))
    with reader(folder) as page:
        page.read("how-to/monitor.md", {"9090": str(free_port()), "/tmp/prometheus": "data"})  # noqa: S108 - the page's
    assert (folder / dashboard).read_text() == committed
    assert (folder / "access.jsonl").is_file()


def test_bfloat16(folder: Path) -> None:
    """If the CPU has no bfloat16 instructions, the page's server does not start. The error names the reason."""
    command = next(it.code for it in blocks("how-to/choose-precision.md") if it.language == "bash")
    one_model = f"{command.strip()} --model {MODEL}"
    refusal = pytest.raises(AssertionError, match="has no instructions for it")
    expected = contextlib.nullcontext() if cpu_has_bfloat16() else refusal
    with expected, reader(folder) as page:
        page.run_commands(one_model)


def test_the_output_of_encode(folder: Path, server: RealServer) -> None:
    (block,) = blocks("start/install.md")
    printed = run_commands(folder, block.code, ENCSERVE_TARGET=server.target, COLUMNS="100")
    lines = [line.strip() for line in printed.splitlines()]
    table = [line.strip() for line in block.output.splitlines()]
    assert table
    assert lines[2 : 2 + len(table)] == table  # the text and an empty line precede the table


def test_shares_of_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has two parts. The page divides the job into shares, and the first two shares write both parts."""
    changes = {"models/NAME": f"models/{MODEL}"}
    for index in range(2):  # the job has two parts
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        with reader(folder) as page:
            page.read("how-to/embed-on-a-cluster.md", changes)
    assert len(list((folder / "vectors").glob("*.parquet"))) == 2
