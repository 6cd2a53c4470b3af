"""`embed_files` embeds the rows of files into a folder of Parquet files."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal

from encserve.extras import needs
from encserve_cli.files.reading import ReadOptions
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
        address: The address for `ray.init`: "auto", "ray://host:port", or "local" to start a cluster.
        actors: The number of actors. Each actor loads the model. None: as many actors as fit on the current nodes.
        actor_cpus: The number of CPUs of an actor. An actor uses this many threads for batches, unless `EngineOptions`
            has another number.
        actor_gpus: The number of GPUs of an actor.
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
    include_token_strings: bool = False,
) -> Backend:
    """Return the source of vectors; see `embed_files`.

    `include_token_strings` adds the token strings to the output; only with `client`.

    Raises:
        ValueError: Not exactly one of `bundle` and `client` is given, or the bundle or a package is missing.
        RuntimeError: The export of the checkpoint failed.
    """
    if (bundle is None) == (client is None):
        raise ValueError("bundle or client: give one of them")
    if client is not None:
        if engine is not None or ray is not None:
            raise ValueError(f"{'ray' if engine is None else 'engine'} can be used only with bundle, not with client")
        return ServerBackend(client, model, model_version, include_token_strings=include_token_strings)
    if model is not None or model_version is not None:
        raise ValueError("model, model_version: are for a client; a bundle is one version of one model")
    assert bundle is not None  # noqa: S101 - the check above ensures this
    from encserve_cli.bundles.finding import find_bundle  # imports the server

    if ray is not None:
        with needs("--ray", "ray", ValueError):
            from encserve_cli.job.ray import RayBackend
        # If `bundle` is a URI, each node downloads the bundle itself.
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
    input_kind: Literal["text", "ids", "vectors"] = "text",
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
    """Embed the rows of files into a folder of Parquet files. Parts that are already in the folder are skipped.

        summary = embed_files(["corpus.parquet"], "vectors/", bundle="models/all-MiniLM-L6-v2", column="body")

    After a failure, call the function again. No failure loses a finished part, not even a power failure. A row that
    cannot be embedded does not stop the job. The vector of the row is null, and the folder `_rejected/` in the output
    has the reason.

    Args:
        inputs: Files, as paths or as URIs such as s3://bucket/corpus.parquet.
        output: The folder, a path or a URI.
        bundle: The model to run in this process: a bundle, a directory with a checkpoint, or the name of a checkpoint
            on the hub; see `--bundle`. Needs `encserve[cpu]`.
        client: The client of a server that embeds. Recommended: `EncoderClient(..., priority="bulk",
            timeout_seconds=300)`. If the server is full or restarts, the job waits up to `timeout_seconds`. The client
            stays open. Ctrl-C ends the job within about a second, even if the server does not answer.
        model: The name of the served model. Default: the server's default model.
        model_version: The version of the model. Default: the model's default version.
        engine: The options for running the bundle. Default: `EngineOptions()`, which has encserve-server's defaults
            except for 2 tokenizer threads.
        ray: The Ray cluster to run the bundle on. Needs the package ray. Default: run in this process.
        input_kind: The kind of every input: "text", "ids" for token ids, or "vectors".
        column: The column to embed, if a file has several columns. Default: "text", or the only column.
        keep: Other columns to copy into the output, as NAME or NAME:TYPE. TYPE is string, int64, double or bool.
        kind: The kind of the output. Default: the kind that the model was trained for.
        dimensions: Keep only the first `dimensions` numbers of each vector. Default: the model's default.
        dtype: The type of the numbers; "binary" packs 8 numbers into a byte.
        task: Whether the texts are queries or documents. Default: no task.
        prompt_name: The name of the prompt before every text; "" for no prompt. Default: the prompt of the task, or
            else the model's default prompt.
        truncate: Whether to cut an input that is too long. Otherwise the row is rejected.
        exclude_special_tokens: With kind "tokens": whether to leave out the vectors of special tokens.
        part_rows: Rows per part of a new job. Default: 2,048. For the kinds "tokens", "multi_vector" and "sparse": at
            most 256.
        shard: (index from 0, number of shares), if several calls do the job together. Default: the whole job.
        overwrite: Whether to remove the output of another job first; not with `shard`.
        add_inputs: Whether to add inputs that the job does not have yet.
        max_rejected: The largest allowed number of rejected rows. Default: no limit.
        on_progress: A function that is called with the progress, often and from any thread. The function should return
            soon.

    Returns:
        The summary of the job.

    Raises:
        TooManyRejected: More than `max_rejected` rows were rejected.
        EncserveError: The server does not answer, or refuses the job.
        ValueError: The folder has the output of another job. Or an input, a setting or the bundle cannot be used. Or a
            package is missing. The message has the reason.
        RuntimeError: The bundle, the engine or the cluster fails.
        OSError: A file cannot be read or written.
    """
    if input_kind not in ("text", "ids", "vectors"):
        raise ValueError(f"input_kind must be 'text', 'ids' or 'vectors'; was {input_kind!r}")
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
            kind or "",
            dimensions=dimensions,
            dtype=dtype,
            task=task,
            prompt_name=prompt_name,
            truncate=truncate,
            exclude_special=exclude_special_tokens,
        ),
        part_rows=part_rows,
        shard=None if shard is None else Shard(*shard),
        overwrite=overwrite,
        add_inputs=add_inputs,
    )
    with job:
        return job.run(on_progress=on_progress, max_rejected=max_rejected)
