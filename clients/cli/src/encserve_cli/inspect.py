"""`encserve inspect`: what a model did with one text, as tables, as JSON, or as a page."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.text import Text

from encserve_cli import render
from encserve_cli.report import numbers
from encserve_cli.report.labels import token_names
from encserve_cli.shared import calls_server, names_model, treats_texts
from encserve_client import InspectResult, ModelInfo, Task

_TOKEN_WIDTH = 16


class Inspector(Protocol):
    """What this command needs of a client."""

    def model(self, name: str | None = None, version: str | None = None) -> ModelInfo:
        """The model's description."""

    def inspect(
        self,
        input: str | Sequence[int],  # noqa: A002 - the client's own name for it
        *,
        attention: bool | Sequence[int] = True,
        hidden_states: bool | Sequence[int] = True,
        positions: bool = False,
        model: str | None = None,
        version: str | None = None,
        truncate: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
    ) -> InspectResult:
        """What the model did with an input."""


def _numbers(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between them. A usage error where it is anything else."""
    if value is None:
        return None
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise click.BadParameter(f"must be whole numbers from 0 with commas between them; was {value!r}")
    return found


@click.command()
@click.argument("text", required=False)
@click.option(
    "--ids",
    callback=_numbers,
    metavar="N,N,…",
    help="Token ids instead of TEXT, special tokens included: 101,2023,102.",
)
@names_model
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with figures to this file.")
@click.option("--layers", callback=_numbers, metavar="N,N,…", help="Only these layers, from 0. Default: all of them.")
@treats_texts
@click.option("--max-rows", type=click.IntRange(min=0), default=32, show_default=True, help="Tokens to print.")
@calls_server
def inspect(
    client: Inspector,
    text: str | None,
    ids: tuple[int, ...] | None,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    html: Path | None,
    layers: tuple[int, ...] | None,
    truncate: bool,
    prompt_name: str | None,
    task: Task | None,
    max_rows: int,
) -> None:
    """Print what the model did with TEXT: attention, norms and similarity, layer by layer.

    With --html the same goes into one page with figures, which needs no network to be read.
    """
    if (text is None) == (ids is None):
        raise click.UsageError("give either a TEXT or --ids")
    info = client.model(model, model_version)
    result = client.inspect(
        _input(text, ids, info),
        attention=True if layers is None else _chosen(layers, info),
        hidden_states=True if layers is None else [0, *(layer + 1 for layer in _chosen(layers, info))],
        positions=html is not None and info.position not in ("", "none", "rotary"),
        model=model,
        version=model_version,
        truncate=truncate,
        prompt_name=prompt_name,
        task=task,
    )
    if html is not None:
        from encserve_cli.report.page import build_page  # plotly takes a second to import

        html.write_text(build_page(result, info, text), encoding="utf-8", newline="\n")
    if as_json:
        click.echo(json.dumps(_json(text, result), ensure_ascii=False))
    elif html is not None:
        _print_saved(html, result)
    else:
        print_inspection(result, max_rows)


def print_inspection(result: InspectResult, max_rows: int) -> None:
    """Two tables: a row for each token, and a row for each layer."""
    console = Console(highlight=False)
    _print_tokens(console, result, max_rows)
    _print_layers(console, result)
    render.print_footer(console, result)


def _input(text: str | None, ids: tuple[int, ...] | None, info: ModelInfo) -> str | list[int]:
    """What to send. ValueError where the model cannot take it."""
    if info.input_kind == "embeddings":
        raise ValueError(f"model {info.name} takes vectors, which no command line holds; call client.inspect")
    if ids is not None:
        return list(ids)
    if not info.has_tokenizer:
        raise ValueError(f"model {info.name} has no tokenizer; give token ids instead: --ids 101,2023,102")
    return text or ""


def _chosen(layers: tuple[int, ...], info: ModelInfo) -> list[int]:
    """The layers in order, each once. ValueError where the model is known to have no such layer."""
    if info.n_layers and max(layers) >= info.n_layers:
        raise ValueError(f"--layers must be from 0 to {info.n_layers - 1}; was {max(layers)}")
    return sorted(set(layers))


def _print_tokens(console: Console, result: InspectResult, max_rows: int) -> None:
    names = token_names(result.sequence)
    ids = result.sequence.token_ids
    table = render.make_table()
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=_TOKEN_WIDTH)
    table.add_column("id", justify="right")
    rows: list[list[Text | str]] = [
        [Text(name), "-" if ids is None else str(ids[place])] for place, name in enumerate(names)
    ]
    if result.hidden_states is not None:
        norms = numbers.state_norms(result.hidden_states)  # (layers, seq)
        for layer in dict.fromkeys((0, len(norms) - 1)):
            depth = result.hidden_state_layers[layer]
            table.add_column("norm in" if depth == 0 else f"after {depth - 1}", justify="right", no_wrap=True)
            for row, norm in zip(rows, norms[layer].tolist(), strict=True):
                row.append(f"{norm:.3f}")
    if result.attention is not None:
        table.add_column(f"in layer {result.attention_layers[-1]} looks at", no_wrap=True, max_width=_TOKEN_WIDTH + 6)
        table.add_column("weight", justify="right", no_wrap=True)
        places, weights = numbers.strongest(result.attention[-1])
        for row, place, weight in zip(rows, places.tolist(), weights.tolist(), strict=True):
            row += [Text(f"{place} {names[place]}"), f"{weight:.3f}"]
    for row in rows[:max_rows]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > max_rows:
        console.print(f"{len(rows) - max_rows} more tokens not shown")
    if result.sequence.truncated:
        info = result.sequence
        console.print(f"cut off after {info.token_count} of {info.original_token_count} tokens")


def _print_layers(console: Console, result: InspectResult) -> None:
    norms, cosines = {}, {}
    if result.hidden_states is not None:
        depths = result.hidden_state_layers
        means = numbers.state_norms(result.hidden_states).mean(axis=1).tolist()
        norms = dict(zip(depths, means, strict=True))
        alike = numbers.mean_similarity(numbers.cosine_similarity(result.hidden_states)).tolist()
        cosines = dict(zip(depths, alike, strict=True))
    entropy = {}
    if result.attention is not None:
        per_head = numbers.attention_entropy(result.attention).mean(axis=-1)  # (layers, heads)
        entropy = dict(zip(result.attention_layers, per_head, strict=True))
    table = render.make_table()
    for name in ("layer", "mean norm", "mean cosine", "mean entropy", "most focused head"):
        table.add_column(name, justify="right")
    for depth in sorted({*norms, *(layer + 1 for layer in entropy)}):
        heads = entropy.get(depth - 1)
        table.add_row(
            "input" if depth == 0 else str(depth - 1),
            f"{norms[depth]:.3f}" if depth in norms else "-",
            f"{cosines[depth]:z.3f}" if depth in cosines else "-",
            "-" if heads is None else f"{heads.mean():.2f} bits",
            "-" if heads is None else f"{heads.argmin()}, {heads.min():.2f} bits",
        )
    console.print(table)
    console.print(Text("looks at: mean of the heads; cosine: mean of all pairs; 0 bits: one token only", "dim"))


def _print_saved(path: Path, result: InspectResult) -> None:
    console = Console(highlight=False)
    console.print(Text(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, {result.sequence.token_count} tokens"))
    render.print_footer(console, result)


def _json(text: str | None, result: InspectResult) -> dict[str, Any]:
    """Everything that was asked for, as what JSON can hold."""
    sequence = result.sequence
    body: dict[str, Any] = {
        "model": result.model,
        "version": result.version,
        "fingerprint": result.fingerprint,
        "space_id": result.space_id,
        "timings": asdict(result.timings),
        "text": text,
        "truncated": sequence.truncated,
        "tokens": sequence.tokens,
        "token_ids": None if sequence.token_ids is None else sequence.token_ids.tolist(),
        "attention_layers": result.attention_layers,
        "hidden_state_layers": result.hidden_state_layers,
    }
    if result.attention is not None:
        body["attention"] = result.attention.tolist()
        body["entropy_bits"] = numbers.attention_entropy(result.attention).tolist()
    if result.hidden_states is not None:
        body["hidden_states"] = result.hidden_states.tolist()
        body["norms"] = numbers.state_norms(result.hidden_states).tolist()
        body["cosine"] = numbers.cosine_similarity(result.hidden_states).tolist()
    return body
