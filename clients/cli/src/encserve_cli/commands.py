"""The subcommands of `encserve`: parse, call the client, hand the result to `render`."""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from encserve_cli import render
from encserve_cli.bench import bench
from encserve_cli.inspect import inspect
from encserve_cli.retrieval import embed, similarity
from encserve_cli.shared import calls_server, ids_of, names_model, prints_rows, save_arrays, treats_texts
from encserve_client import EncoderClient, EncodeResult, Task, Tls


@click.group("encserve", context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "ENCSERVE"})
@click.option("--target", default="localhost:50051", show_default=True, show_envvar=True, help="The server, host:port.")
@click.option(
    "--timeout",
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long one message may take, retries included; many texts become several messages.",
)
@click.option("--tls", is_flag=True, help="Encrypt, and check the server's certificate.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM file of the authorities to trust; implies --tls.")
@click.option("--token", show_envvar=True, help="Sent as a bearer token; use it with --tls.")
@click.version_option(package_name="encserve-cli", prog_name="encserve")
@click.pass_context
def cli(context: click.Context, target: str, timeout: float, tls: bool, ca: Path | None, token: str | None) -> None:
    """Ask an encserve server for vectors."""
    # Made when a command needs it, so that `encserve encode --help` reads no files.
    context.obj = functools.partial(
        EncoderClient, target, tls=Tls(ca=ca) if ca else tls, timeout_seconds=timeout, token=token
    )


@cli.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@names_model
@treats_texts
@prints_rows
@click.option("--exclude-special", is_flag=True, help="Leave out the rows of special tokens.")
@calls_server
def encode(
    client: EncoderClient,
    texts: tuple[str, ...],
    model: str | None,
    model_version: str | None,
    as_json: bool,
    task: Task | None,
    prompt_name: str | None,
    truncate: bool,
    output: Path | None,
    max_rows: int,
    exclude_special: bool,
) -> None:
    """Print one vector per token of each TEXT.

    The .npz file holds `rows` (all tokens, d_model), `lengths` (texts,), `token_ids`, and the model's names; the
    rows of each text are np.split(rows, np.cumsum(lengths)[:-1]).
    """
    result = client.run(
        texts,
        model=model,
        version=model_version,
        truncate=truncate,
        exclude_special_tokens=exclude_special,
        include_token_strings=True,
        prompt_name=prompt_name,
        task=task,
    )
    if output is not None:
        _save(output, result)
    if as_json:
        click.echo(json.dumps(_encode_json(texts, result), ensure_ascii=False))
    elif output is not None:
        render.print_saved(output, result)
    else:
        render.print_encoded(texts, result, max_rows)


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
cli.add_command(similarity)
cli.add_command(inspect)
cli.add_command(bench)


def _encode_json(texts: tuple[str, ...], result: EncodeResult) -> dict[str, Any]:
    """Everything that `encode` has to say, as what JSON can hold."""
    sequences = []
    for text, rows, info in zip(texts, result.outputs[0].arrays(), result.sequences, strict=True):
        shown = render.shown_tokens(info, len(rows))
        sequences.append(
            {
                "text": text,
                "shape": rows.shape,
                "truncated": info.truncated,
                "tokens": [token for token, _ in shown],
                "token_ids": [token_id for _, token_id in shown],
                "rows": rows.tolist(),
            }
        )
    return ids_of(result) | {"timings": asdict(result.timings), "sequences": sequences}


def _save(path: Path, result: EncodeResult) -> None:
    """Writes the .npz file; the same ragged form as on the wire."""
    arrays = result.outputs[0].arrays()
    ids = [
        token
        for info, rows in zip(result.sequences, arrays, strict=True)
        for _, token in render.shown_tokens(info, len(rows))
    ]
    save_arrays(
        path,
        result,
        rows=result.outputs[0].matrix(),
        lengths=np.array([len(rows) for rows in arrays], np.int64),
        token_ids=np.array(ids, np.int64),
    )
