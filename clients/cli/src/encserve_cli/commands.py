"""The options of `encserve`, and the commands `encode` and `models`."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from encserve import __version__
from encserve_cli.bench import bench
from encserve_cli.connection import connection_options
from encserve_cli.files.command import prints_rows, reads_inputs
from encserve_cli.inspect import inspect
from encserve_cli.interrupts import Interrupts
from encserve_cli.job_options import makes_jobs
from encserve_cli.pull import pull
from encserve_cli.rank import rank, score
from encserve_cli.repository import bundle
from encserve_cli.retrieval import embed, similarity
from encserve_cli.serve import serve
from encserve_cli.shared import (
    STOPPED,
    SectionCommand,
    model_options,
    text_options,
    warnings_in_one_line,
    with_client,
    write_sections,
)
from encserve_cli.tokens import tokenize

if TYPE_CHECKING:
    from encserve_client import EncoderClient


class _Group(click.Group):
    """The command `encserve`. After Ctrl-C it writes one line and ends."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands before the options."""
        self.format_commands(ctx, formatter)
        write_sections(self, ctx, formatter)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        with Interrupts() as interrupts:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                interrupts.show()
                ctx.exit(STOPPED)


@click.group(
    "encserve",
    cls=_Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "ENCSERVE",
        "max_content_width": 140,
    },
)
@connection_options
@click.version_option(__version__, prog_name="encserve")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve encoder models, and get vectors from a server."""
    context.with_resource(warnings_in_one_line())


@cli.command(cls=SectionCommand)
@connection_options
@reads_inputs
@partial(prints_rows, suffixes=(".npz", ".jsonl", ".parquet"), dtypes=("float32", "float16"))
@model_options
@text_options
@click.option("--exclude-special", is_flag=True, help="Leave out the rows of special tokens.")
@makes_jobs
def encode(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Print one vector per token of each TEXT.

    \b
    The suffix of --output FILE sets the format:
      .npz          rows (all tokens, d_model), lengths (texts,) and token_ids;
                    rows by text: np.split(rows, np.cumsum(lengths)[:-1])
      .jsonl        a line for each text
      .parquet      text, rows and token_ids

    --output FOLDER/ runs a job. The job fills the folder with .parquet files. The rows are in the order of the inputs.
    After a stop, the same command computes the missing rows.
    """  # noqa: D301 - click reads a real \b
    from encserve_cli.job.command import run_embedding  # imports pyarrow, which is slow

    run_embedding(given, options)


@cli.command(cls=SectionCommand)
@partial(connection_options, has_input=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_client
def models(client: "EncoderClient", as_json: bool) -> None:
    """List the models that the server has loaded."""
    from encserve_cli import render

    loaded = client.models()
    if as_json:
        click.echo(json.dumps([asdict(model) for model in loaded], ensure_ascii=False))
    else:
        render.print_models(loaded)
        if not loaded:
            click.echo("no models: the server may still be loading; see the server's log", err=True)


cli.add_command(serve)
cli.add_command(pull)
cli.add_command(embed)
cli.add_command(tokenize)
cli.add_command(similarity)
cli.add_command(rank)
cli.add_command(score)
cli.add_command(inspect)
cli.add_command(bench)
cli.add_command(bundle)
