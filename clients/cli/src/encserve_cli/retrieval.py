"""`encserve embed` and `encserve similarity`: the options. `similarity_run` compares the texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from encserve_cli.connection import connection_options
from encserve_cli.files.command import Sources, prints_rows, reads_inputs, reads_texts
from encserve_cli.job_options import makes_jobs
from encserve_cli.shared import SectionCommand, check_pooling, model_options, text_options, with_client

if TYPE_CHECKING:
    from encserve_client import EncoderClient, Pooling
    from encserve_client.options import TrainedKind

_KIND = click.option(
    "--kind",
    type=click.Choice(["model", "multi_vector", "sparse"]),
    help="model: one vector for each text. multi_vector: several vectors for MaxSim. sparse: weights over the "
    "vocabulary. Default: the kind that the model was trained for.",
)
_POOLING = click.option(
    "--pooling",
    type=click.Choice(["model", "mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]),
    help="Pool token vectors into one vector. Default: the pooling that the model was trained for.",
)

_MOST_TEXTS = 1000


@click.command(cls=SectionCommand)
@connection_options
@reads_inputs
@prints_rows
@model_options
@_KIND
@_POOLING
@text_options
@makes_jobs
def embed(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Print the vector of each TEXT.

    A model for MaxSim gives several vectors, and a sparse model gives weights over the vocabulary.

    \b
    The suffix of --output FILE sets the format:
      .npy, .csv    one vector for each text
      .npz          one vector: rows (texts, width)
                    MaxSim: rows (all vectors, width), lengths (texts,) and, if
                    no vectors were merged, token_indices
                    weights: the format of scipy.sparse.load_npz
      .jsonl        a line for each text
      .parquet      text or ids, and one of: vector; rows and token_indices;
                    indices and values

    --output FOLDER/ runs a job. The job fills the folder with .parquet files. The rows are in the order of the inputs.
    After a stop, the same command computes the missing rows.
    """  # noqa: D301 - click reads a real \b
    from encserve_cli.job.command import run_embedding  # imports pyarrow, which is slow

    run_embedding(given, options)


@click.command(cls=SectionCommand)
@connection_options
@reads_texts
@model_options
@_KIND
@_POOLING
@text_options
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML page with the matches of MaxSim to this file.",
)
@with_client
def similarity(
    client: "EncoderClient",
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    kind: "TrainedKind | None",
    pooling: "Pooling | None",
    html: Path | None,
    **options: Any,
) -> None:
    """Print the similarity of TEXTs.

    If the model gives one vector for each text, the command prints the similarity of every two texts. The similarity
    function is the model's, or cosine if the model has none. If the kind is multi_vector or sparse, the first
    text is the query and the other texts are documents. The command then prints the similarity of each
    document to the query. --task sets the same task for all texts.
    """
    from encserve_cli import similarity_run

    inputs = sources.read_few(_MOST_TEXTS, "similarity compares no more")
    if len(inputs) < 2:
        raise ValueError(f"similarity needs at least 2 texts; was {len(inputs)}")
    check_pooling(kind, pooling)
    options |= {"model": model, "version": model_version}
    similarity_run.run(client, inputs, options, kind=kind, pooling=pooling, html=html, as_json=as_json)
