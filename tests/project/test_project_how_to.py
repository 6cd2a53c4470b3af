"""Run the commands and programs of the how-to pages about clients, with small models."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import MODEL, export_minilm, minilm_directory
from exporting import export_once
from page_code import reader
from pyarrow import parquet
from real_server import RealServer, real_server
from score_models import write_scores
from zoo import Zoo

from encserve_export import Target, export_hf

pytestmark = pytest.mark.system

TEXTS = ["The water has 21 degrees.", "Bring a coat.", "Stock markets fell sharply on Monday."]
# The changes of the code of each page. Pages without changes have no entry in this table.
CHANGES = {
    "call-from-python": {" --target 10.0.0.7:50051 --ca ca.pem": ""},
    "embed-files": {"models/NAME": f"models/{MODEL}"},
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
    return tmp_path


@pytest.mark.parametrize(
    "page", ["call-from-python", "send-many-inputs", "embed-files", "rerank", "inspect", "load-test"]
)
def test_page(page: str, folder: Path, server: RealServer) -> None:
    with reader(folder, server.target) as the_page:
        the_page.read(f"how-to/{page}.md", CHANGES.get(page))


def test_serve(tmp_path: Path) -> None:
    """The page serves, pulls, and serves again. A folder with the checkpoint has the name of the model on the hub."""
    shutil.copytree(minilm_directory(), tmp_path / "sentence-transformers" / MODEL)
    with reader(tmp_path) as page:
        page.read("how-to/serve.md")
    assert (tmp_path / "models" / MODEL / "1" / "manifest.json").is_file()


def test_shares_of_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two shares make both parts of the job."""
    changes = {"models/NAME": f"models/{MODEL}"}
    for index in range(2):  # the job has two parts
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        with reader(folder) as page:
            page.read("how-to/embed-on-a-cluster.md", changes)
    assert len(list((folder / "vectors").glob("*.parquet"))) == 2
