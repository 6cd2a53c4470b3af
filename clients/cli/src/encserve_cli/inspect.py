"""The options of `encserve inspect`. The slow imports are in `inspect_run`, so that the help is fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from encserve_cli.connection import connection_options
from encserve_cli.files.command import Sources, reads_inputs
from encserve_cli.shared import SectionCommand, model_options, rare_option, text_options, with_client

if TYPE_CHECKING:
    from encserve_client import EncoderClient


def _numbers(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse whole numbers with commas between them."""
    if value is None:
        return None
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise click.BadParameter(f"must be whole numbers of at least 0, with commas between them; was {value!r}")
    return found


@click.command(cls=SectionCommand, short_help="Print the layers of the model for one TEXT.")
@connection_options
@reads_inputs
@model_options
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with figures to this file.")
@click.option(
    "--layers", callback=_numbers, metavar="N,N,…", help="Print only these layers. The first is 0. Default: all layers."
)
@text_options
@rare_option(
    "--max-rows",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    metavar="N",
    help="The number of tokens to print.",
)
@with_client
def inspect(
    client: "EncoderClient",
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    html: Path | None,
    layers: tuple[int, ...] | None,
    max_rows: int,
    **options: Any,
) -> None:
    """Print attention, norms and similarity for TEXT, layer by layer.

    The norms are the lengths of the hidden states. The similarity is the mean cosine of all pairs of tokens.

    --html writes one page with figures. The page needs no network.
    """
    from encserve_cli import inspect_run

    [source] = sources.read_few(1, "inspect takes one text")
    options |= {"model": model, "version": model_version}
    inspect_run.run(client, source, options, html=html, layers=layers, max_rows=max_rows, as_json=as_json)
