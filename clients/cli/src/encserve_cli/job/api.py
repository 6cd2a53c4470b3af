"""A job as a function call."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath

from encserve_cli.files.reading import InputKind, ReadOptions
from encserve_cli.job.bundles import find_bundle
from encserve_cli.job.job import Backend, EmbedJob
from encserve_cli.job.local import EngineOptions, LocalBackend
from encserve_cli.job.plan import MakeOptions
from encserve_cli.job.run import JobSummary
from encserve_cli.job.server import ServerBackend
from encserve_cli.job.types import Shard
from encserve_cli.progress import OnProgress
from encserve_client import DType, EncoderClient, OutputKind, Task


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The Ray cluster of a job.

    Attributes:
        address: The address, as `ray.init` takes it: "auto", "ray://host:port", or "local" to start a cluster.
        actors: The number of actors, each of which loads the model; None for as many as fit on the present nodes.
        actor_cpus: The CPUs of an actor, and the threads for its batches unless the engine's options have another
            number.
        actor_gpus: The GPUs of an actor.
    """

    address: str = "auto"
    actors: int | None = None
    actor_cpus: float | None = None
    actor_gpus: float | None = None


def backend_of(
    *,
    bundle: str | None = None,
    client: EncoderClient | None = None,
    model: str | None = None,
    model_version: str | None = None,
    engine: EngineOptions | None = None,
    ray: RayOptions | None = None,
) -> Backend:
    """Return the source of vectors; see `embed_files`.

    Raises:
        ValueError: There is neither a bundle nor a client, or both, or the bundle or a package is not there.
        RuntimeError: A bundle cannot be made of the checkpoint.
    """
    if (bundle is None) == (client is None):
        raise ValueError("bundle or client: give one of them")
    if client is not None:
        if engine is not None or ray is not None:
            raise ValueError(f"{'ray' if engine is None else 'engine'}: is for a bundle; a client has none")
        return ServerBackend(client, model, model_version)
    if model is not None or model_version is not None:
        raise ValueError("model, model_version: are for a client; a bundle is one version of one model")
    assert bundle is not None  # noqa: S101 - as the check above has it
    if ray is not None:
        try:
            from encserve_cli.job.ray import RayBackend
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ValueError("--ray needs the package ray: pip install 'encserve-cli[ray]'") from error
        # Nodes copy what a URI names by themselves.
        return RayBackend.of_bundle(
            bundle if "://" in bundle else str(find_bundle(bundle)), engine or EngineOptions(), ray
        )
    return LocalBackend(find_bundle(bundle), engine or EngineOptions())


def embed_files(
    inputs: Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    *,
    bundle: str | PathLike[str] | None = None,
    client: EncoderClient | None = None,
    model: str | None = None,
    model_version: str | None = None,
    engine: EngineOptions | None = None,
    ray: RayOptions | None = None,
    input_kind: InputKind = "text",
    column: str | None = None,
    keep: Sequence[str] = (),
    kind: OutputKind | None = None,
    dimensions: int | None = None,
    dtype: DType = "float32",
    task: Task | None = None,
    prompt_name: str | None = None,
    truncate: bool = False,
    exclude_special_tokens: bool = False,
    part_rows: int | None = None,
    shard: tuple[int, int] | None = None,
    overwrite: bool = False,
    add_inputs: bool = False,
    max_rejected: int | None = None,
    on_progress: OnProgress | None = None,
) -> JobSummary:
    """Embed the rows of files into a folder of Parquet files. Parts that are in the folder are not done again.

        summary = embed_files(["corpus.parquet"], "vectors/", bundle="models/all-MiniLM-L6-v2", column="body")

    Call it again after any failure, a power failure included. A row that cannot be embedded does not stop the job: its
    vector is null in the output, and `_rejected/` there has the reason.

    Args:
        inputs: Files, as paths or as URIs such as s3://bucket/corpus.parquet.
        output: The folder, a path or a URI.
        bundle: Embeds in this process, with the package encserve-server: a bundle, a directory that holds a checkpoint,
            or the name of one on the hub, as `--bundle` takes it.
        client: Embeds through a server; best with `EncoderClient(..., priority="bulk", timeout_seconds=300)`. The job
            survives a full or restarting server for `timeout_seconds`. The client stays open. Ctrl-C waits for the
            running calls, at most `timeout_seconds` if the server does not answer.
        model: The served model. Default: the server's.
        model_version: The version of the model. Default: the model's default version.
        engine: The options for running the bundle. Default: those of encserve-server.
        ray: Runs the bundle on a Ray cluster instead, with the package ray.
        input_kind: The kind of every input: "text", "ids" for token ids, or "vectors".
        column: The column of files that have several. Default: "text", or the only one.
        keep: Other columns to copy into the output, as NAME or NAME:TYPE with the type string, int64, double or bool.
        kind: The kind of the output. Default: the kind that the model was trained for.
        dimensions: The numbers that are left of a row. Default: the model's own.
        dtype: The type of the numbers; "binary" packs 8 numbers into a byte.
        task: Whether the texts are queries or documents. Default: neither.
        prompt_name: The prompt before every text; "" for none. Default: the model's, or the task's.
        truncate: Whether an input that is too long is cut. Otherwise its row is rejected.
        exclude_special_tokens: Whether "tokens" has no rows of special tokens.
        part_rows: The rows of a part of a new job. Default: 2,048, or up to 256 for kinds with many rows.
        shard: The index, from 0, and the number of shares, if several calls do the job together.
        overwrite: Whether to remove the output of another job first.
        add_inputs: Whether to add inputs that the job does not have yet.
        max_rejected: The most rows that may be rejected. Default: any number.
        on_progress: Called with the progress, often and from any thread. It should return soon.

    Returns:
        The summary of the job.

    Raises:
        TooManyRejected: More than `max_rejected` rows were rejected.
        EncserveError: The server does not answer, or refuses the job.
        ValueError: The folder holds the output of another job; an input, a setting or the bundle cannot be used; or a
            package is missing. The text says which.
        RuntimeError: The bundle, the engine or the cluster fails.
        OSError: A file cannot be read or written.
    """
    backend = backend_of(
        bundle=None if bundle is None else fspath(bundle),
        client=client,
        model=model,
        model_version=model_version,
        engine=engine,
        ray=ray,
    )
    job = EmbedJob(
        [fspath(it) for it in inputs],
        fspath(output),
        backend,
        read=ReadOptions(input_kind, column, tuple(keep)),
        make=MakeOptions(
            dimensions=dimensions,
            dtype=dtype,
            task=task,
            prompt_name=prompt_name,
            truncate=truncate,
            exclude_special=exclude_special_tokens,
        ),
        kind=kind,
        part_rows=part_rows,
        shard=None if shard is None else Shard(*shard),
        overwrite=overwrite,
        add_inputs=add_inputs,
    )
    with job:
        return job.run(on_progress=on_progress, max_rejected=max_rejected)
