"""`encserve tokenize`: the tokens of texts."""

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from encserve_cli.connection import connection_options
from encserve_cli.files.command import Sources, reads_texts
from encserve_cli.shared import SectionCommand, model_options, rare_option, text_options, with_client

if TYPE_CHECKING:
    from encserve_client import EncoderClient, SequenceInfo
    from encserve_client.options import OffsetUnit


@click.command(cls=SectionCommand, short_help="Print the tokens of each TEXT.")
@connection_options
@reads_texts
@model_options
@text_options
@rare_option(
    "--offset-unit",
    type=click.Choice(["code_points", "utf8_bytes"]),
    default="code_points",
    show_default=True,
    help="The unit of the start and the end of tokens.",
)
@with_client
def tokenize(
    client: "EncoderClient",
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    truncate: bool,
    offset_unit: "OffsetUnit",
    **options: Any,
) -> None:
    """Print the tokens of each TEXT: the string in the vocabulary, the id, the start and the end.

    The model does not run and need not be ready. Without --truncate the command prints all tokens of a text.
    --json prints a line for each text.
    """
    from rich.console import Console

    from encserve_cli import render
    from encserve_cli.files.encoding import blocks_of, encode_block, encode_in_order

    console = Console(highlight=False)

    def run(texts: list[str]) -> "list[SequenceInfo]":
        return client.tokenize(
            texts,
            model=model,
            version=model_version,
            truncate=truncate or None,
            include_token_strings=True,
            offset_unit=offset_unit,
            **options,
        )

    blocks = blocks_of(sources.read())
    with closing(encode_in_order(lambda it: encode_block(run, it), blocks, client.close)) as results:
        for block, infos in results:
            for text, info in zip(block, infos, strict=True):
                if as_json:
                    click.echo(json.dumps({"text": text.value} | _record(info), ensure_ascii=False))
                else:
                    render.print_tokens(console, str(text.value), info)


def _record(info: "SequenceInfo") -> dict[str, Any]:
    arrays = {"token_ids": info.token_ids, "offsets": info.offsets, "special": info.special}
    return {
        "token_count": info.token_count,
        "original_token_count": info.original_token_count,
        "tokens": info.tokens or (),
        **{name: [] if array is None else array.tolist() for name, array in arrays.items()},
    }
