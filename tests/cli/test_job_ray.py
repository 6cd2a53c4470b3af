"""Tests of jobs on a Ray cluster of three nodes. All nodes run on this machine.

An actor is a Ray process that encodes parts of the inputs. Starting the nodes takes some seconds.
"""

import gzip
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray_sources
from checkpoints import export_small_with_text
from ray_sources import DEADLY, FakeSource, OnRay, SmallCluster

from encserve_cli.job.api import RayOptions
from encserve_cli.job.job import EmbedJob, Source
from encserve_cli.job.local import EngineOptions, LocalSource
from encserve_cli.job.plan import MakeOptions
from encserve_cli.job.ray import RaySource
from encserve_cli.job.run import JobProgress, JobSummary
from encserve_cli.job.sample import take_sample
from encserve_cli.job.store import open_store
from encserve_cli.job.types import PartLimits, ReadOptions, Stopped

pytestmark = pytest.mark.system

WORDS = ("a cat", "a dog sat", "the cat", "on the mat", "a mat")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # the cluster must not use the developer's own Ray token
        patch.setenv("PYTHONPATH", str(Path(ray_sources.__file__).parent))  # actors import modules of the tests
        with closing(SmallCluster(3)) as made:
            yield made


@pytest.fixture
def options(cluster: SmallCluster) -> RayOptions:
    return RayOptions(cluster.address)


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Write two input files, and return their paths.

    The first file has 40 parts of 5 rows. The second file has 6 parts. Only one actor can
    read the second file, because it is compressed.
    """
    lines = [f"{WORDS[i % 5]} {i}" for i in range(230)]
    (tmp_path / "a.txt").write_text("".join(f"{it}\n" for it in lines[:200]))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.writelines(f"{it}\n" for it in lines[200:])
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]


def embed(
    inputs: list[str], output: Path, source: Source, on_parts: Callable[[int, EmbedJob], None] | None = None
) -> JobSummary:
    """Run a job with parts of 5 rows.

    Each time a part is finished, `on_parts` is called with the number of finished parts and the job.
    """
    job = EmbedJob(
        inputs, str(output), source, read=ReadOptions(), make=MakeOptions(), kind="mean", limits=PartLimits(max_rows=5)
    )
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
    alone = embed(corpus, tmp_path / "alone", LocalSource(bundle, engine))
    on_ray = embed(corpus, tmp_path / "ray", RaySource(str(bundle), engine, options))
    assert (on_ray.rows, on_ray.parts, on_ray.tokens) == (alone.rows, alone.parts, alone.tokens)
    assert files(tmp_path / "ray") == files(tmp_path / "alone")


def test_a_node_is_lost_and_another_one_comes(tmp_path: Path, corpus: list[str], cluster: SmallCluster) -> None:
    def on_parts(count: int, job: EmbedJob) -> None:
        if count == 10:
            cluster.kill(2)
        if count == 20:
            cluster.add()

    source = FakeSource(seconds=0.5)
    summary = embed(corpus, tmp_path / "ray", OnRay(source, RayOptions(cluster.address)), on_parts)
    embed(corpus, tmp_path / "alone", FakeSource())
    assert summary.rows == 230
    open_store(str(tmp_path / "ray"))  # removes the unfinished file of the killed node
    assert files(tmp_path / "ray") == files(tmp_path / "alone")


def test_a_part_that_ends_three_actors_ends_the_job(tmp_path: Path, options: RayOptions) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{DEADLY if i == 22 else i}\n" for i in range(60)))
    with pytest.raises(RuntimeError, match=r"part-00000-000004 .*a\.txt, rows 21 to 25\): 3 actors died"):
        embed([str(path)], tmp_path / "out", OnRay(FakeSource(), options))
    assert not (tmp_path / "out" / "part-00000-000004.parquet").exists()


def test_an_actor_with_another_model_ends_the_job(tmp_path: Path, corpus: list[str], options: RayOptions) -> None:
    (tmp_path / "fingerprint").write_text("sha256:fake")
    source = FakeSource(fingerprint_of=tmp_path)
    embed(corpus, tmp_path / "out", source)
    for part in (tmp_path / "out").glob("part-*"):
        part.unlink()

    class Changed(OnRay):
        """A source whose model gets another fingerprint after the first actor has loaded the model."""

        def open(self, *arguments: Any) -> Any:
            opened = super().open(*arguments)
            (tmp_path / "fingerprint").write_text("sha256:other")
            return opened

    with pytest.raises(RuntimeError, match=r"^node 127.0.0.\d \(\w{8}\): .*fingerprint is 'sha256:other'; the job has"):
        embed(corpus, tmp_path / "out", Changed(FakeSource(seconds=0.5, fingerprint_of=tmp_path), options))


def test_a_bundle_that_a_node_does_not_have_ends_the_job(
    tmp_path: Path, corpus: list[str], options: RayOptions
) -> None:
    source = RaySource(str(tmp_path / "nothing"), EngineOptions(), options)
    with pytest.raises(RuntimeError, match=r"^node 127.0.0.\d \(\w{8}\): the bundle .*/nothing is not there; put it"):
        embed(corpus, tmp_path / "out", source)


def test_what_an_actor_cannot_write_ends_the_job_with_one_line(
    tmp_path: Path, corpus: list[str], options: RayOptions
) -> None:
    def on_parts(count: int, job: EmbedJob) -> None:
        (tmp_path / "out" / "part-00000-000030.parquet").mkdir(exist_ok=True)

    with pytest.raises(RuntimeError, match=r"^node 127.0.0.\d \(\w{8}\): .*Is a directory[^\n]*$"):
        embed(corpus, tmp_path / "out", OnRay(FakeSource(seconds=0.1), options), on_parts)


def test_a_job_that_is_stopped_goes_on_where_it_was(tmp_path: Path, corpus: list[str], options: RayOptions) -> None:
    def on_parts(count: int, job: EmbedJob) -> None:
        if count == 10:
            job.stop()

    source = FakeSource(seconds=0.1)
    with pytest.raises(Stopped):
        embed(corpus, tmp_path / "out", OnRay(source, options), on_parts)
    summary = embed(corpus, tmp_path / "out", OnRay(source, options))
    assert 10 <= summary.parts_before < summary.parts == 46
    embed(corpus, tmp_path / "alone", source)
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def test_a_dry_run_takes_its_sample_on_an_actor(tmp_path: Path, corpus: list[str], cluster: SmallCluster) -> None:
    """In a dry run, an actor encodes the sample for the time estimate. No file is written.

    The number of workers is the requested number of actors, but at most the number that fits on the cluster.
    """
    for options, workers in ((RayOptions(cluster.address), 3), (RayOptions(cluster.address, actors=2), 2)):
        with EmbedJob(
            corpus,
            str(tmp_path / "out"),
            OnRay(FakeSource(seconds=0.1), options),
            read=ReadOptions(),
            make=MakeOptions(),
            kind="mean",
            save=False,
        ) as job:
            sample = take_sample(job.plan, job.plan.parts[0], job.opened.encoder())
            assert sample is not None
            assert sample.tokens == sample.rows
            assert sample.seconds >= 0.1
            assert job.opened.workers() == workers
    assert not (tmp_path / "out").exists()


def test_a_sample_that_ends_its_actor_is_one_line(tmp_path: Path, options: RayOptions) -> None:
    (tmp_path / "a.txt").write_text(f"{DEADLY}\n")
    job = EmbedJob(
        [str(tmp_path / "a.txt")],
        str(tmp_path / "out"),
        OnRay(FakeSource(), options),
        read=ReadOptions(),
        make=MakeOptions(),
        kind="mean",
        save=False,
    )
    with job, pytest.raises(RuntimeError, match="the first actor died while it encoded a sample: "):
        take_sample(job.plan, job.plan.parts[0], job.opened.encoder())


def test_where_no_cluster_runs_the_error_says_how_to_start_one(tmp_path: Path, corpus: list[str]) -> None:
    with pytest.raises(RuntimeError, match="--ray 127.0.0.2:1: no Ray cluster answers there .*`ray start --head`"):
        embed(corpus, tmp_path / "out", OnRay(FakeSource(), RayOptions("127.0.0.2:1")))
