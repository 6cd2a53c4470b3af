"""If an input, the bundle or the disk is faulty, `encserve embed` prints one line that names the problem.

The command leaves no incomplete output file.
"""

import contextlib
import gzip
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import inputs, table_of
from embed_jobs import check_rows, part_names, run, said, short_texts, write_corpus
from pyarrow import parquet

SOME_REJECTED = 3
MOUNT, UNMOUNT = (shutil.which(it) or it for it in ("mount", "umount"))


def damaged(path: Path) -> None:
    """Overwrite bytes of the text column. The footer of the Parquet file stays valid."""
    text = parquet.read_metadata(path).row_group(0).column(1)
    data = bytearray(path.read_bytes())
    end = text.dictionary_page_offset + text.total_compressed_size
    data[end - 2000 : end] = bytes(2000)
    path.write_bytes(data)


def test_a_damaged_file_stops_the_job_after_the_intact_rows(encoder: Path, tmp_path: Path) -> None:
    """The job keeps the rows before the damage. With an intact copy of the file, a new run continues the job."""
    corpus = write_corpus(tmp_path / "texts", 3000, files=3)
    whole = corpus[1].read_bytes()
    damaged(corpus[1])
    command = ("embed", *inputs(*corpus), "--keep", "id", "--output", f"{tmp_path}/vectors/", "--bundle", encoder)
    done = run(*command)
    assert done.returncode == 1
    assert "corpus-001.parquet: cannot be read" in done.stderr
    assert len(said(done.stderr)) == 1, done.stderr
    assert part_names(tmp_path / "vectors") == ["part-00000-000000.parquet"]
    corpus[1].write_bytes(whole)
    done = run(*command)
    assert done.returncode == SOME_REJECTED, done.stderr
    assert "1 of them made before" in done.stdout
    check_rows(table_of(tmp_path / "vectors"), short_texts(3000))


def test_a_line_of_two_gigabytes(encoder: Path, tmp_path: Path) -> None:
    """The job rejects a line of 2 GB and goes on, although the process has less memory than the line needs."""
    source = tmp_path / "texts.txt.gz"
    with gzip.open(source, "wb", compresslevel=1) as file:
        file.write(b"w1\n")
        for _ in range(256):
            file.write(bytes(8 * 1024 * 1024))
        file.write(b"\nw2\n")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (3 << 29, 3 << 29)); "
    code = limit + "from encserve_cli.commands import cli; cli()"
    arguments = ["embed", *inputs(source), "--output", f"{tmp_path}/vectors/", "--bundle", str(encoder)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == SOME_REJECTED, done.stderr
    assert table_of(tmp_path / "vectors")["text"].to_pylist() == ["w1", None, "w2"]


def test_a_damaged_bundle(encoder: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(encoder, tmp_path / "models" / encoder.parent.name / encoder.name)
    graph = bundle / "model.onnx"
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.write_bytes(data)
    (corpus,) = write_corpus(tmp_path / "texts", 10)
    done = run("embed", *inputs(corpus), "--output", f"{tmp_path}/vectors/", "--bundle", bundle)
    assert done.returncode == 1
    assert "model.onnx" in done.stderr
    assert len(said(done.stderr)) == 1, done.stderr
    assert not (tmp_path / "vectors").exists()


def mount(folder: Path, options: str) -> None:
    subprocess.run([MOUNT, "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system at `folder` until the end of the `with` block.

    If this process may not mount file systems, skip the test.
    """
    folder.mkdir()
    try:
        mount(folder, f"size={size}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not mount a file system: {error}")
    try:
        yield folder
    finally:
        subprocess.run([UNMOUNT, folder], check=True)


def test_a_full_disk(encoder: Path, tmp_path: Path) -> None:
    """If the disk is full, the job fails and keeps the finished output files. With more space, a new run succeeds."""
    corpus = write_corpus(tmp_path / "texts", 12_000, files=12)
    with small_disk(tmp_path / "disk", "700k") as disk:
        command = ("embed", *inputs(*corpus), "--keep", "id", "--output", f"{disk}/vectors/", "--bundle", encoder)
        done = run(*command)
        assert done.returncode == 1
        assert re.search(r"disk/vectors/.*part-00\S+: cannot be written: No space left on device$", done.stderr)
        assert len(said(done.stderr)) == 1, done.stderr
        names = part_names(disk / "vectors")
        assert 0 < len(names) < 12
        assert len(table_of(disk / "vectors")) == 1000 * len(names)
        assert not list((disk / "vectors").glob(".*"))
        mount(disk, "remount,size=50m")
        done = run(*command)
        assert done.returncode == SOME_REJECTED, done.stderr
        check_rows(table_of(disk / "vectors"), short_texts(12_000))


def test_a_read_only_disk(encoder: Path, tmp_path: Path) -> None:
    (corpus,) = write_corpus(tmp_path / "texts", 10)
    with small_disk(tmp_path / "disk", "1m") as disk:
        mount(disk, "remount,ro")
        done = run("embed", *inputs(corpus), "--output", f"{disk}/vectors/", "--bundle", encoder)
        assert done.returncode == 1
        assert done.stderr.endswith("disk/vectors/_job.json: cannot be written: Read-only file system\n")
        assert len(said(done.stderr)) == 1, done.stderr
        assert not list(disk.iterdir())
