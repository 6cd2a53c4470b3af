"""`encserve rank`: documents sorted by their score for a query."""

import json
from typing import TYPE_CHECKING

import click

from encserve_cli.connection import connection_options
from encserve_cli.files.command import Sources, reads_texts
from encserve_cli.shared import SectionCommand, model_options, rare_option, with_client

if TYPE_CHECKING:
    from encserve_client import Activation, EncoderClient

_MOST_DOCUMENTS = 100_000


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
@rare_option(
    "--activation",
    type=click.Choice(["none", "sigmoid", "softmax"]),
    help="Turn the logits of a cross-encoder into scores. none prints the logits. Default: the model's own.",
)
@rare_option(
    "--prompt-name",
    metavar="NAME",
    help='The name of the prompt before the query of a cross-encoder; "" for no prompt. Default: the model\'s own.',
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
        model=model,
        version=model_version,
    )
    if as_json:
        documents = [{"text": texts[index], "index": index, "score": score} for index, score in ranking]
        click.echo(json.dumps({"query": query, "documents": documents}, ensure_ascii=False))
    else:
        render.print_ranking([query, *texts], ranking, "score", None)
