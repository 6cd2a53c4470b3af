"""`encserve rank`: documents sorted by their score for a query. `encserve score`: a job over pairs of texts."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from encserve_cli.connection import connection_options
from encserve_cli.files.command import Sources, fills_folder, reads_pairs, reads_texts
from encserve_cli.job_options import makes_jobs
from encserve_cli.shared import SectionCommand, model_options, rare_option, with_client, with_options

if TYPE_CHECKING:
    from encserve_client import Activation, EncoderClient

_MOST_DOCUMENTS = 100_000


def score_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --activation and --prompt-name."""
    return with_options(
        command,
        rare_option(
            "--activation",
            type=click.Choice(["none", "sigmoid", "softmax"]),
            help="Turn the logits of a cross-encoder into scores. With none, the scores are the logits. softmax is "
            "only for models with several labels. Default: the model's own.",
        ),
        rare_option(
            "--prompt-name",
            metavar="NAME",
            help='The name of the prompt before the query of a cross-encoder; "" for no prompt. Default: the model\'s '
            "own.",
        ),
    )


@click.command(cls=SectionCommand, short_help="Sort TEXTs by their score for a query.")
@connection_options
@click.argument("query")
@reads_texts
@model_options
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="The number of documents to print, the best first.",
)
@score_options
@rare_option(
    "--max-document-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="The largest number of tokens of a TEXT. The end of a longer TEXT is cut. Default: the model's limit.",
)
@with_client
def rank(
    client: "EncoderClient",
    query: str,
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    top_k: int,
    activation: "Activation | None",
    prompt_name: str | None,
    max_document_tokens: int | None,
) -> None:
    """Print the TEXTs with the largest scores for QUERY.

    A cross-encoder compares QUERY with each TEXT. With any other model, the score is the similarity of their vectors.
    Texts that are too long are cut.
    """
    from encserve_cli import render

    inputs = sources.read_few(_MOST_DOCUMENTS, "rank compares no more")
    texts = [it.text for it in inputs]
    ranking = client.rank(
        query,
        texts,
        top_k=top_k,
        activation=activation,
        prompt_name=prompt_name,
        max_document_tokens=max_document_tokens,
        model=model,
        version=model_version,
    )
    if as_json:
        documents = [{"text": texts[index], "index": index, "score": score} for index, score in ranking]
        click.echo(json.dumps({"query": query, "documents": documents}, ensure_ascii=False))
    else:
        render.print_ranking([query, *texts], ranking, "score", None)


@click.command(cls=SectionCommand, short_help="Compute the scores of pairs of texts in files.")
@connection_options
@reads_pairs
@fills_folder
@model_options
@score_options
@partial(makes_jobs, without=("--vectors",))
def score(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Write the score of each pair of a query and a document.

    The pairs are two columns of the inputs. The job fills the folder with .parquet files, in the order of the inputs.

    \b
    The columns:
      query, document    the pair
      score              the score, for a model with one label
      scores             the scores of all labels, for a model with several
      others             the columns of --keep

    After a stop, the same command computes the missing rows. Pairs that are too long are cut. With --bundle, the model
    must be a cross-encoder or a classifier. A server also computes scores with embedding models.
    """  # noqa: D301 - click reads a real \b
    from encserve_cli.job.command import run_embedding  # imports pyarrow, which is slow

    run_embedding(given, options)
