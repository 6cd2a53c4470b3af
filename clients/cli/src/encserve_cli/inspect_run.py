"""Runs `encserve inspect`: attention, norms and similarity for one text, as tables, as JSON or as an HTML page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from encserve_cli import render
from encserve_cli.files.reading import Sent
from encserve_cli.report import numbers
from encserve_cli.report.labels import token_names
from encserve_cli.report.page import build_page
from encserve_client import EncoderClient, InspectResult, ModelInfo

_TOKEN_WIDTH = 16


def run(
    client: EncoderClient,
    source: Sent,
    options: Mapping[str, Any],
    *,
    html: Path | None,
    layers: Sequence[int] | None,
    max_rows: int,
    as_json: bool,
) -> None:
    """Inspect one input, and print tables or JSON, or write a page.

    Args:
        client: The client.
        source: The text, or the token ids.
        options: More arguments of `EncoderClient.inspect`, with the name and the version of the model.
        html: The file of the page; None for no page.
        layers: The indices of layers, from 0; None for all layers.
        max_rows: The number of tokens to print.
        as_json: Whether to print JSON.

    Raises:
        EncserveError: The server is not reachable, refuses the input, or the model does not have a layer.
        ValueError: The model does not take such an input.
        OSError: The page cannot be written.
    """
    text = source.value if isinstance(source.value, str) else None
    info = client.model(options["model"], options["version"])
    _check_input(source, info)
    selected = None if layers is None else sorted(set(layers))
    result = client.inspect(
        source.value,
        attention=True if selected is None else selected,
        hidden_states=True if selected is None else [0, *(layer + 1 for layer in selected)],
        positions=html is not None and info.position not in ("", "none", "rotary"),
        **options,
    )
    if html is not None:
        html.write_text(build_page(result, info, text), encoding="utf-8", newline="\n")
    console = Console(highlight=False)
    if as_json:
        click.echo(json.dumps(_to_json(text, result), ensure_ascii=False))
        return
    if html is not None:
        size = html.stat().st_size / 1e6
        console.print(Text(f"wrote {html}: {size:.1f} MB, {result.sequence.token_count} tokens"))
    else:
        _print_tokens(console, result, max_rows)
        _print_layers(console, result)
    render.print_footer(console, result)


def _check_input(source: Sent, info: ModelInfo) -> None:
    if info.input_kind == "embeddings":
        raise ValueError(f"model {info.name} takes vectors, and this command takes none; call client.inspect in Python")
    if isinstance(source.value, str) and not info.has_tokenizer:
        raise ValueError(f"model {info.name} has no tokenizer; give token ids instead: --ids 101,2023,102")


def _print_tokens(console: Console, result: InspectResult, max_rows: int) -> None:
    names = token_names(result.sequence)
    ids = result.sequence.token_ids
    table = render.make_table()
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=_TOKEN_WIDTH)
    table.add_column("id", justify="right")
    rows: list[list[Text | str]] = [
        [Text(name), "-" if ids is None else str(ids[position])] for position, name in enumerate(names)
    ]
    if result.hidden_states is not None:
        norms = numbers.state_norms(result.hidden_states)  # (layers, seq)
        for index in dict.fromkeys((0, len(norms) - 1)):
            depth = result.hidden_state_layers[index]
            table.add_column("norm in" if depth == 0 else f"after {depth - 1}", justify="right", no_wrap=True)
            for row, norm in zip(rows, norms[index].tolist(), strict=True):
                row.append(f"{norm:.3f}")
    if result.attention is not None:
        heading = f"attends to (layer {result.attention_layers[-1]})"
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=_TOKEN_WIDTH + 6)
        table.add_column("weight", justify="right", no_wrap=True)
        positions, weights = numbers.most_attended(result.attention[-1])
        for row, position, weight in zip(rows, positions.tolist(), weights.tolist(), strict=True):
            row += [Text(f"{position} {names[position]}"), f"{weight:.3f}"]
    for row in rows[:max_rows]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > max_rows:
        console.print(f"{len(rows) - max_rows} more tokens not shown")
    if result.sequence.truncated:
        console.print(f"cut off after {len(rows)} of {result.sequence.original_token_count} tokens")


def _print_layers(console: Console, result: InspectResult) -> None:
    columns: dict[str, dict[int, str]] = {  # column → depth → cell
        "mean norm": {},
        "mean cosine": {},
        "mean entropy": {},
        "most focused head": {},
    }
    if result.hidden_states is not None:
        norms = numbers.state_norms(result.hidden_states).mean(axis=1)
        cosines = numbers.mean_similarity(numbers.cosine_similarity(result.hidden_states))
        for depth, norm, cosine in zip(result.hidden_state_layers, norms, cosines, strict=True):
            columns["mean norm"][depth] = f"{norm:.3f}"
            columns["mean cosine"][depth] = f"{cosine:z.3f}"
    if result.attention is not None:
        entropy = numbers.attention_entropy(result.attention).mean(axis=-1)  # (layers, heads)
        for layer, heads in zip(result.attention_layers, entropy, strict=True):
            columns["mean entropy"][layer + 1] = f"{heads.mean():.2f} bits"
            columns["most focused head"][layer + 1] = f"{heads.argmin()}, {heads.min():.2f} bits"
    table = render.make_table()
    for name in ("layer", *columns):
        table.add_column(name, justify="right")
    for depth in sorted({depth for cells in columns.values() for depth in cells}):
        table.add_row("input" if depth == 0 else str(depth - 1), *(cells.get(depth, "-") for cells in columns.values()))
    console.print(table)
    console.print(Text("weight: mean of the heads; cosine: mean of all pairs; 0 bits: one token only", "dim"))


def _to_json(text: str | None, result: InspectResult) -> dict[str, Any]:
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
