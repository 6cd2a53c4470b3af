"""Tests of jobs on a Ray cluster of three nodes. All nodes run on this machine.

An actor is a Ray process that encodes parts of the inputs. Starting the nodes takes some seconds.
"""

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray_sources
from checkpoints import export_small_with_text
from ray_sources import DEADLY, FakeBackend, SmallCluster

from encserve_cli.files.reading import ReadOptions
from encserve_cli.job.api import RayOptions
from encserve_cli.job.job import Backend, EmbedJob
from encserve_cli.job.local import EngineOptions, LocalBackend
from encserve_cli.job.plan import MakeOptions
from encserve_cli.job.ray import RayBackend
from encserve_cli.job.run import JobSummary, Worker
from encserve_cli.job.store import open_store
from encserve_cli.job.types import Stopped
from encserve_cli.progress import JobProgress

pytestmark = pytest.mark.system

WORDS = ("a cat", "a dog sat", "the cat", "on the mat", "a mat")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # the cluster must not use the developer's own Ray token
        # The actors are separate processes. They must find the module `ray_sources`, which the tests use.
        patch.setenv("PYTHONPATH", str(Path(ray_sources.__file__).parent), prepend=os.pathsep)
        with closing(SmallCluster(3)) as made:
            yield made


@pytest.fixture
def options(cluster: SmallCluster) -> RayOptions:
    return RayOptions(cluster.address)


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Write two input files, and return their paths.

    The first file has 40 parts of 5 rows. The second file has 6 parts. A single actor reads the whole second file,
    because the file is compressed.
    """
    lines = [f"{WORDS[i % 5]} {i}" for i in range(230)]
    (tmp_path / "a.txt").write_text("".join(f"{it}\n" for it in lines[:200]))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.writelines(f"{it}\n" for it in lines[200:])
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]


def embed(
    inputs: list[str], output: Path, backend: Backend, on_parts: Callable[[int, EmbedJob], None] | None = None
) -> JobSummary:
    """Run a job with parts of 5 rows.

    Each time the number of finished parts grows, `on_parts` is called with this number and the job.
    """
    job = EmbedJob(inputs, str(output), backend, read=ReadOptions(), make=MakeOptions("mean"), part_rows=5)
    seen = -1

    def on_progress(progress: JobProgress) -> None:
        nonlocal seen
        if on_parts is not None and progress.parts > seen:
            seen = progress.parts
            on_parts(seen, job)

    with job:
        return job.run(on_progress=on_progress)


def files(folder: Path) -> dict[str, bytes]:
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def test_the_files_are_those_of_the_same_job_in_one_process(
    tmp_path: Path, corpus: list[str], options: RayOptions
) -> None:
    models = tmp_path / "models"
    bundle = export_small_with_text(models, "small", tmp_path / "checkpoint").path
    engine = EngineOptions(intra_op_threads=1, parallel_batches=1, max_batch_tokens=256)
    alone = embed(corpus, tmp_path / "alone", LocalBackend(bundle, engine))
    on_ray = embed(corpus, tmp_path / "ray", RayBackend.of_bundle(str(bundle), engine, options))
    assert (on_ray.rows, on_ray.parts, on_ray.tokens) == (alone.rows, alone.parts, alone.tokens)
    assert files(tmp_path / "ray") == files(tmp_path / "alone")


def test_a_node_is_lost_and_another_one_comes(tmp_path: Path, corpus: list[str], cluster: SmallCluster) -> None:
    def on_parts(count: int, job: EmbedJob) -> None:
        if count == 10:
            cluster.kill(2)
        if count == 20:
            cluster.add()

    backend = FakeBackend(seconds=0.1)
    summary = embed(corpus, tmp_path / "ray", RayBackend(backend, RayOptions(cluster.address)), on_parts)
    embed(corpus, tmp_path / "alone", FakeBackend())
    assert summary.rows == 230
    open_store(str(tmp_path / "ray"))  # removes the unfinished file of the killed node
    assert files(tmp_path / "ray") == files(tmp_path / "alone")


def test_a_part_that_ends_an_actor_three_times_ends_the_job(tmp_path: Path, options: RayOptions) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{DEADLY if i == 22 else i}\n" for i in range(60)))
    with pytest.raises(
        RuntimeError, match=r"^an actor died 3 times while it made part-00000-000004 or .*a\.txt\. Perhaps"
    ):
        embed([str(path)], tmp_path / "out", RayBackend(FakeBackend(), options))
    assert not (tmp_path / "out" / "part-00000-000004.parquet").exists()


def test_an_actor_with_another_model_ends_the_job(tmp_path: Path, corpus: list[str], options: RayOptions) -> None:
    (tmp_path / "fingerprint").write_text("sha256:fake")
    embed(corpus, tmp_path / "out", FakeBackend(fingerprint_of=tmp_path))
    for part in (tmp_path / "out").glob("part-*"):
        part.unlink()
    # Because one part exists, the next job keeps the plan of the first job, and expects the fingerprint in this plan.
    (tmp_path / "out" / "part-00000-000000.parquet").touch()

    class Changed(RayBackend):
        """A backend whose model gets another fingerprint after the first actor has loaded the model."""

        def open(self, *arguments: Any) -> Worker:
            worker = super().open(*arguments)
            (tmp_path / "fingerprint").write_text("sha256:other")
            return worker

    with pytest.raises(RuntimeError, match=r"^node 127.0.0.\d \(\w{8}\): .*fingerprint is 'sha256:other'; the job has"):
        embed(corpus, tmp_path / "out", Changed(FakeBackend(seconds=0.5, fingerprint_of=tmp_path), options))


def test_a_bundle_that_a_node_does_not_have_ends_the_job(
    tmp_path: Path, corpus: list[str], options: RayOptions
) -> None:
    backend = RayBackend.of_bundle(str(tmp_path / "nothing"), EngineOptions(), options)
    with pytest.raises(RuntimeError, match=r"^node 127.0.0.\d \(\w{8}\): the bundle .*/nothing is missing; put"):
        embed(corpus, tmp_path / "out", backend)


def test_an_actor_that_cannot_write_ends_the_job_with_one_line(
    tmp_path: Path, corpus: list[str], options: RayOptions
) -> None:
    def on_parts(count: int, job: EmbedJob) -> None:
        (tmp_path / "out" / "part-00000-000030.parquet").mkdir(exist_ok=True)

    with pytest.raises(RuntimeError, match=r"^node 127.0.0.\d \(\w{8}\): .*Is a directory[^\n]*$"):
        embed(corpus, tmp_path / "out", RayBackend(FakeBackend(seconds=0.1), options), on_parts)


def test_a_stopped_ray_job_continues(tmp_path: Path, corpus: list[str], options: RayOptions) -> None:
    def on_parts(count: int, job: EmbedJob) -> None:
        if count == 10:
            job.stop()

    backend = FakeBackend(seconds=0.1)
    with pytest.raises(Stopped):
        embed(corpus, tmp_path / "out", RayBackend(backend, options), on_parts)
    summary = embed(corpus, tmp_path / "out", RayBackend(backend, options))
    assert 10 <= summary.parts_before < summary.parts == 46
    embed(corpus, tmp_path / "alone", backend)
    open_store(str(tmp_path / "out"))  # removes the unfinished files of the stopped actors
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def test_the_error_without_a_cluster_says_how_to_start_one(tmp_path: Path, corpus: list[str]) -> None:
    with pytest.raises(RuntimeError, match="--ray 127.0.0.2:1: no Ray cluster answers .*`ray start --head`"):
        embed(corpus, tmp_path / "out", RayBackend(FakeBackend(), RayOptions("127.0.0.2:1")))
