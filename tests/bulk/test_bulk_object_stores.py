"""`encserve embed` reads and writes files on S3 and Google Cloud Storage.

Emulators on this machine replace the two object stores.
"""

import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command import inputs
from cut_proxy import CutProxy, Direction
from embed_jobs import check_rows, run, said, short_texts, write_corpus
from moto.server import ThreadedMotoServer
from ports import free_port
from pyarrow import fs, parquet

ROWS, FILES = 6000, 12
SOME_REJECTED = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Input files in three formats: Parquet, JSON lines and compressed JSON lines.

    When a job continues, the job skips finished row groups of Parquet files. The job reads other files from the
    beginning.
    """
    paths = write_corpus(tmp_path_factory.mktemp("corpus") / "texts", ROWS, FILES)
    for i, suffix in ((2, ".jsonl"), (4, ".jsonl.gz")):
        lines = parquet.read_table(paths[i]).to_pandas().to_json(orient="records", lines=True)
        paths[i] = paths[i].with_name(paths[i].stem + suffix)
        with pa.output_stream(paths[i]) as stream:  # PyArrow compresses files with the suffix .gz
            stream.write(lines.encode())
    return paths


class Bucket:
    """The bucket "corpus" of an emulated object store. The methods call the emulator directly, not through a proxy."""

    def __init__(self, files: Any, root: str, options: str = "") -> None:
        """Every URI begins with `root`, and ends with `options`, a query string."""
        self.files, self.root, self.options = files, root, options

    def uri(self, path: str) -> str:
        return f"{self.root}/{path}{self.options}"

    def upload(self, paths: list[Path]) -> list[str]:
        """Upload files, and return their URIs."""
        for path in paths:
            fs.copy_files(str(path), f"corpus/texts/{path.name}", fs.LocalFileSystem(), self.files, use_threads=False)
        return [self.uri(f"texts/{it.name}") for it in paths]

    def contents(self, folder: str) -> dict[str, bytes]:
        """Return the content of each output file in a job's folder, except _job.json. The keys are the file names."""
        found = self.files.get_file_info(fs.FileSelector(f"corpus/{folder}", recursive=True, allow_not_found=True))
        paths = [it.path for it in found if it.type == fs.FileType.File and it.base_name != "_job.json"]
        return {it.removeprefix(f"corpus/{folder}/"): self.files.open_input_stream(it).read() for it in paths}


def output_of(contents: dict[str, bytes]) -> Any:
    return pa.concat_tables(
        [parquet.read_table(pa.BufferReader(contents[it])) for it in sorted(contents) if it.startswith("part-")]
    )


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Bucket, CutProxy]]:
    """A bucket of an S3 emulator, and a proxy that can cut connections. Jobs call the emulator through this proxy."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    files = fs.S3FileSystem(
        access_key="name",
        secret_key="secret",
        endpoint_override=f"127.0.0.1:{port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    files.create_dir("corpus")
    with CutProxy(port) as proxy:
        yield Bucket(files, "s3://corpus"), proxy
    server.stop()


def environment(proxy: CutProxy, temporary: Path) -> dict[str, str]:
    temporary.mkdir(exist_ok=True)
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "TMPDIR": str(temporary),
    }


@pytest.fixture(scope="module")
def command(s3: tuple[Bucket, CutProxy], corpus: list[Path], encoder: Path) -> tuple[object, ...]:
    files = inputs(*s3[0].upload(corpus))
    return ("embed", *files, "--keep", "id", "--bundle", encoder, "--max-batch-tokens", 1024, "--output")


@dataclass(frozen=True)
class Alone:
    """The results of an uninterrupted job.

    Attributes:
        contents: The contents of the output files; the keys are file names.
        passed: The number of bytes that went through the proxy in each direction.
    """

    contents: dict[str, bytes]
    passed: dict[Direction, int]


@pytest.fixture(scope="module")
def alone(s3: tuple[Bucket, CutProxy], command: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Alone:
    bucket, proxy = s3
    proxy.mend()
    done = run(*command, bucket.uri("alone"), variables=environment(proxy, tmp_path_factory.mktemp("temporary")))
    assert done.returncode == SOME_REJECTED, done.stderr
    return Alone(bucket.contents("alone"), proxy.passed)


def test_input_and_output_on_s3(alone: Alone) -> None:
    check_rows(output_of(alone.contents), short_texts(ROWS))


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_job_continues_after_a_lost_connection_to_s3(
    s3: tuple[Bucket, CutProxy], command: tuple[object, ...], alone: Alone, tmp_path: Path, direction: Direction
) -> None:
    """If the proxy cuts the connection, the job prints one error line and leaves only complete files.

    A second run writes the missing files.
    """
    (bucket, proxy), folder = s3, f"cut-{direction}"
    variables = environment(proxy, tmp_path / "temporary")
    proxy.mend()
    proxy.cut_after[direction] = int(0.8 * alone.passed[direction])
    try:
        cut = run(*command, bucket.uri(folder), variables=variables)
        assert proxy.is_cut
    finally:
        proxy.mend()
    assert cut.returncode == 1, cut
    assert len(said(cut.stderr)) == 1, cut.stderr
    assert "NETWORK_CONNECTION" in cut.stderr
    assert not list((tmp_path / "temporary").iterdir())
    present = bucket.contents(folder)
    assert present.items() < alone.contents.items()
    done = run(*command, bucket.uri(folder), variables=variables)
    assert done.returncode == SOME_REJECTED, done.stderr
    before = sum(it.endswith(".parquet") for it in present)
    assert before
    assert f"{before} of them made before" in done.stdout
    assert bucket.contents(folder) == alone.contents


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    program, port = Path(sys.executable).parent / "gcp-storage-emulator", free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--in-memory", "--default-bucket", "corpus"]
    log = tmp_path_factory.mktemp("gcs") / "log"
    with log.open("w") as file, subprocess.Popen([program, "start", *options], stdout=file, stderr=file) as process:
        try:
            asks = f"?scheme=http&endpoint_override={urllib.parse.quote(f'127.0.0.1:{port}')}&retry_limit_seconds=60"
            files, _ = fs.FileSystem.from_uri(f"gs://anonymous@corpus{asks}")
            assert files.get_file_info("corpus").type == fs.FileType.Directory, log.read_text()
            yield Bucket(files, "gs://anonymous@corpus", asks)
        finally:
            process.terminate()


def test_input_and_output_on_google_cloud_storage(gcs: Bucket, corpus: list[Path], encoder: Path) -> None:
    """A job writes the expected vectors. After one output file is deleted, the next run writes only this file again."""
    command = ("embed", *inputs(*gcs.upload(corpus)), "--keep", "id", "--bundle", encoder, "--max-batch-tokens", 1024)
    output = gcs.uri("vectors")
    done = run(*command, "--output", output)
    assert done.returncode == SOME_REJECTED, done.stderr
    made = gcs.contents("vectors")
    check_rows(output_of(made), short_texts(ROWS))
    gcs.files.delete_file("corpus/vectors/part-00003-000000.parquet")
    again = run(*command, "--output", output)
    assert f"{FILES - 1} of them made before" in again.stdout
    assert gcs.contents("vectors") == made
