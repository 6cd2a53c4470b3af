"""The subcommands of `encserve`: parse, call the client, hand the result to `render`."""

import functools
import json
from dataclasses import asdict
from pathlib import Path

import click

from encserve_cli import render
from encserve_cli.bench import bench
from encserve_cli.files.command import Printing, Sources, deliver, prints_rows, reads_inputs
from encserve_cli.inspect import inspect
from encserve_cli.job_options import SectionCommand, makes_jobs
from encserve_cli.retrieval import embed, similarity
from encserve_cli.shared import calls_server, names_model, treats_texts, warnings_in_one_line
from encserve_cli.tokens import tokenize
from encserve_client import EncoderClient, Output, Task, Tls


@click.group("encserve", context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "ENCSERVE"})
@click.option(
    "--target",
    default="localhost:50051",
    show_default=True,
    show_envvar=True,
    help="The server, host:port. The default port is 50051.",
)
@click.option(
    "--timeout",
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long one message may take, retries included; many texts become several messages.",
)
@click.option("--tls", is_flag=True, help="Encrypt, and check the server's certificate.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM file of the authorities to trust; implies --tls.")
@click.option("--cert", type=click.Path(path_type=Path), help="PEM file of the certificate to show; implies --tls.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM file of the private key of --cert.")
@click.option(
    "--server-name", help="The name of the server's certificate, where it is not the target's; implies --tls."
)
@click.option("--api-key", show_envvar=True, help="The server's key, or any bearer token; use it with --tls.")
@click.option("--metadata", multiple=True, metavar="NAME=VALUE", help="Sent with every call; may be repeated.")
@click.version_option(package_name="encserve-cli", prog_name="encserve")
@click.pass_context
def cli(
    context: click.Context,
    target: str,
    timeout: float,
    tls: bool,
    ca: Path | None,
    cert: Path | None,
    tls_key: Path | None,
    server_name: str | None,
    api_key: str | None,
    metadata: tuple[str, ...],
) -> None:
    """Ask an encserve server for vectors."""
    if (cert is None) != (tls_key is None):
        raise click.UsageError("--cert and --tls-key go together")
    if wrong := [it for it in metadata if not it.partition("=")[1]]:
        raise click.UsageError(f"--metadata wants NAME=VALUE; was {wrong[0]!r}")
    context.with_resource(warnings_in_one_line())
    # Made when a command needs it, so that `encserve encode --help` reads no files.
    context.obj = functools.partial(
        EncoderClient,
        target,
        tls=Tls(ca=ca, cert=cert, key=tls_key, server_name=server_name) if ca or cert or server_name or tls else False,
        timeout_seconds=timeout,
        api_key=api_key,
        metadata=[(name, value) for name, _, value in (it.partition("=") for it in metadata)],
    )


@cli.command(cls=SectionCommand)
@reads_inputs
@names_model
@treats_texts
@prints_rows
@click.option("--exclude-special", is_flag=True, help="Leave out the rows of special tokens.")
@makes_jobs
@calls_server
def encode(
    client: EncoderClient,
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    task: Task | None,
    prompt_name: str | None,
    truncate: bool,
    printing: Printing,
    exclude_special: bool,
) -> None:
    """Print one vector per token of each TEXT.

    A TEXT that ends in .txt, .jsonl, .csv, .tsv or .parquet is a file of texts: a path, or a URI such as
    s3://bucket/texts.csv. All but .parquet may be compressed (.csv.gz, .csv.zst). - is standard input, a text a line.
    With --text every TEXT is a text, whatever it looks like.

    \b
    --output FILE holds, by its suffix:
      .npz          rows (all tokens, d_model), lengths (texts,) and token_ids:
                    np.split(rows, np.cumsum(lengths)[:-1]) is of each text
      .jsonl        a line for each text
      .parquet      text, rows and token_ids

    --output FOLDER/ makes a job: the folder is filled with .parquet files, row by row as the FILEs have them. Run again
    after anything, it does what is missing.
    """  # noqa: D301 - click reads a real \b
    run = functools.partial(
        client.run,
        outputs=[Output("tokens", dimensions=printing.dimensions)],
        dtype=printing.dtype,
        model=model,
        version=model_version,
        truncate=truncate,
        exclude_special_tokens=exclude_special,
        include_token_strings=not sources.ids and printing.names_tokens,
        prompt_name=prompt_name,
        task=task,
    )
    deliver(run, sources, printing, as_json, render.print_made)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@calls_server
def models(client: EncoderClient, as_json: bool) -> None:
    """List the models that the server has loaded."""
    found = client.models()
    if as_json:
        click.echo(json.dumps([asdict(model) for model in found], ensure_ascii=False))
    else:
        render.print_models(found)


cli.add_command(embed)
cli.add_command(tokenize)
cli.add_command(similarity)
cli.add_command(inspect)
cli.add_command(bench)
