"""What `encserve` prints for people, with rich. Made to be read at 80 columns, and without colour when piped."""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from encserve_client import Array, EncodeResult, InspectResult, ModelInfo, SequenceInfo

_GAP = 2  # between two columns of a `make_table`
_NUMBER_WIDTH = 7  # "-12.345"
_ID_WIDTH = 6
_TOKEN_WIDTH = 14
_COSINE_WIDTH = 6  # "-0.123"
_NO_VECTORS = "no vectors"  # in place of a score
_TEXT_WIDTH = 20  # the least that a text gets beside its scores
# Least cosine, and the style of a cell from there on. Colour only repeats what the number says.
_STYLES = ((0.999, "dim"), (0.7, "bold green"), (0.4, "green"), (0.2, "yellow"), (-1.0, "red"))


def shown_tokens(info: SequenceInfo, n_rows: int) -> list[tuple[str, int]]:
    """Token and id of each row of a text; special tokens are left out where their rows are."""
    ids = info.token_ids if info.token_ids is not None else np.full(info.token_count, -1)
    tokens = info.tokens or ("",) * info.token_count
    keep = np.ones(len(ids), np.bool_)
    if n_rows != info.token_count and info.special is not None:
        keep = ~info.special
    return [(token, int(token_id)) for token, token_id, kept in zip(tokens, ids, keep, strict=True) if kept]


def print_made(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """What was made of each text, whatever it is."""
    printers = {"tokens": print_encoded, "multi_vector": print_multi_vectors, "sparse": print_sparse}
    printers.get(str(result.outputs[0].kind), print_vectors)(texts, result, max_rows)


def print_encoded(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """A table of tokens × dimensions for each text."""
    console = Console(highlight=False)
    for text, rows, info in zip(texts, result.outputs[0].arrays(), result.sequences, strict=True):
        _print_rows(console, text, rows, ("token", "id"), shown_tokens(info, len(rows)), info, max_rows)
    print_footer(console, result)


def print_vectors(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """One table of texts × dimensions."""
    console = Console(highlight=False)
    rows = result.outputs[0].matrix()
    names = [(" ".join(text.split()), number) for number, text in enumerate(texts, start=1)]
    console.print(_rows_table(rows, ("text", ""), names, max_rows, console.width))
    notes = [f"shape ({rows.shape[0]}, {rows.shape[1]})", *_hidden(len(rows), max_rows)]
    notes += [
        f"text {number}: {note}" for number, info in enumerate(result.sequences, start=1) for note in _cut_off(info)
    ]
    console.print(Text(", ".join(notes)))
    print_footer(console, result)


def print_multi_vectors(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """A table of vectors × dimensions for each text, with the token that each comes from."""
    console = Console(highlight=False)
    output = result.outputs[0]
    found = zip(texts, output.arrays(), output.token_indices(), result.sequences, strict=True)
    for text, rows, places, info in found:
        names = vector_names(info, places, len(rows))
        numbers = range(len(rows)) if places is None else places.tolist()
        _print_rows(console, text, rows, ("token", "place"), list(zip(names, numbers, strict=True)), info, max_rows)
    print_footer(console, result)


def print_sparse(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """A table of each text's largest weights, with the tokens of those that stand in the text."""
    console = Console(highlight=False)
    for text, vector, info in zip(texts, result.outputs[0].sparse_vectors(), result.sequences, strict=True):
        known = {token_id: token for token, token_id in shown_tokens(info, info.token_count)}
        table = make_table()
        table.add_column("index", justify="right")
        table.add_column("token in the text", no_wrap=True, overflow="ellipsis", max_width=2 * _TOKEN_WIDTH)
        table.add_column("weight", justify="right", no_wrap=True)
        for place in np.argsort(-vector.values, kind="stable")[:max_rows].tolist():
            index = int(vector.indices[place])
            table.add_row(str(index), Text(known.get(index, "")), f"{vector.values[place]:.3f}")
        console.print(_clip(text, console.width, "bold"))
        console.print(table)
        n_weights = len(vector.indices)
        notes = [f"{n_weights} weights of {vector.width} are not 0", *_hidden(n_weights, max_rows), *_cut_off(info)]
        console.print(Text(", ".join(notes) + "\n"))
    print_footer(console, result)


def print_tokens(console: Console, text: str, info: SequenceInfo) -> None:
    """A table of a text's tokens; special ones, and those of a prompt, stand nowhere in it."""
    offsets = np.zeros((info.token_count, 2), np.int64) if info.offsets is None else info.offsets
    table = make_table()
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=2 * _TOKEN_WIDTH)
    for name in ("id", "start", "end"):
        table.add_column(name, justify="right")
    for (token, token_id), (start, end) in zip(shown_tokens(info, info.token_count), offsets.tolist(), strict=True):
        places = (str(start), str(end)) if end > start else ("", "")
        table.add_row(Text(token), str(token_id), *places)
    console.print(_clip(text, console.width, "bold"))
    console.print(table)
    console.print(Text(", ".join([f"{info.token_count} tokens", *_cut_off(info)]) + "\n"))


def vector_names(info: SequenceInfo, places: npt.NDArray[np.uint32] | None, count: int) -> list[str]:
    """The token that each vector of a text comes from; "(pooled)" where they come from several."""
    if places is None:
        return ["(pooled)"] * count
    return [str(place) if info.tokens is None else info.tokens[place] for place in places.tolist()]


def print_saved(path: Path, result: EncodeResult, inputs: int, rows: int, seconds: float) -> None:
    """What was written to a file, and what of it came last."""
    console = Console(highlight=False)
    output = result.outputs[0]
    held = f"{rows:,} weights of {output.sparse_width:,}" if output.kind == "sparse" else f"{rows:,} rows"
    if output.kind != "sparse":
        held += f" of {output.blocks[0].rows.shape[1]}"
    console.print(Text(f"wrote {path}: {inputs:,} texts, {held}, in {seconds:.1f} s, {inputs / seconds:,.0f} a second"))
    console.print(Text(f"model {result.model}, version {result.version}, fingerprint {result.fingerprint}", "dim"))


def print_similarity(
    texts: Sequence[str], scores: npt.NDArray[np.float64], compared_by: str, result: EncodeResult
) -> None:
    """The (texts, texts) matrix of scores, with the texts at its left; in several tables if one would be too wide."""
    console = Console(highlight=False)
    cells = [[Text(f"{value:.3f}", style=_style(value, compared_by)) for value in row] for row in scores.tolist()]
    cell_width = max(_COSINE_WIDTH, *(len(cell) for row in cells for cell in row))
    fixed = 2 + len(str(len(texts))) + _GAP + _GAP  # the edges, the column of numbers, the gap after the text
    per_table = max((console.width - fixed - _TEXT_WIDTH) // (cell_width + _GAP), 1)
    for first in range(0, len(texts), per_table):
        numbers = range(first, min(first + per_table, len(texts)))
        text_width = console.width - fixed - len(numbers) * (cell_width + _GAP)
        table = make_table()
        table.add_column("", justify="right")
        table.add_column(f"{compared_by} similarity", no_wrap=True)
        for number in numbers:
            table.add_column(str(number + 1), justify="right", min_width=cell_width, no_wrap=True)
        for number, (text, row) in enumerate(zip(texts, cells, strict=True), start=1):
            table.add_row(str(number), _clip(text, text_width), *(row[column] for column in numbers))
        console.print(table)
    console.print(Text(f"pooling {result.outputs[0].kind}"))
    print_footer(console, result)


def print_ranking(
    texts: Sequence[str], ranking: Sequence[tuple[int, float | None]], compared_by: str, result: EncodeResult
) -> None:
    """The documents, the best first. texts[0] is the query, and of an index i of the ranking texts[i + 1] the text."""
    console = Console(highlight=False)
    console.print(_clip(texts[0], console.width, "bold"))
    table = make_table()
    table.add_column("", justify="right")
    table.add_column("document", no_wrap=True, overflow="ellipsis")
    table.add_column(compared_by, justify="right", no_wrap=True)
    width = console.width - len(str(len(ranking))) - max(len(compared_by), len(_NO_VECTORS)) - 4 * _GAP
    for place, (index, score) in enumerate(ranking, start=1):
        shown = _NO_VECTORS if score is None else f"{score:.4f}"
        table.add_row(str(place), _clip(texts[index + 1], width), shown)
    console.print(table)
    print_footer(console, result)


def print_models(models: Sequence[ModelInfo]) -> None:
    """A table on a terminal; elsewhere a line for each model, its fields between tabs."""
    console = Console(highlight=False)
    if not console.is_terminal:
        for it in models:
            click.echo("\t".join(_model_fields(it)))
        return
    table = make_table()
    table.add_column("model, fingerprint", no_wrap=True)
    table.add_column("version", no_wrap=True)
    for name in ("d_model", "layers", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("makes", "runs on", "ready"):
        table.add_column(name, overflow="fold")
    for it in models:
        ready = Text("yes", "green") if it.ready else Text(f"no: {it.not_ready_reason}", "red")
        table.add_row(
            Text(f"{it.name} *" if it.is_default else it.name).append(f"\n{it.fingerprint}", "dim"),
            Text(it.version),
            str(it.d_model),
            str(it.n_layers or "-"),  # not known of a model that came as ONNX
            "\n".join([str(it.max_sequence_tokens), *(f"{task} {its.max_tokens}" for task, its in it.tasks.items())]),
            "\n".join(_kinds(it)) or "-",
            Text(f"{it.provider.removesuffix('ExecutionProvider')} {it.precision}"),
            ready,
        )
    console.print(table)
    if any(it.is_default for it in models):
        console.print("* answers calls that name no model", style="dim")


def _model_fields(it: ModelInfo) -> list[str]:
    return [
        *(it.name, it.version, it.fingerprint, it.space_id or "-"),
        *(str(it.d_model), str(it.max_sequence_tokens), "; ".join(_kinds(it)) or "-", it.provider, it.precision),
        "ready" if it.ready else f"not ready: {it.not_ready_reason}",
    ]


def _kinds(it: ModelInfo) -> list[str]:
    """What a model makes of a text, besides a row per token."""
    width = it.default_dimensions or it.vector_width
    kinds = [f"{it.pooling} {width}{', norm 1' if it.l2_normalize else ''}"] if it.pooling else []
    kinds += [f"{it.multi_vector_similarity} {it.multi_vector_width}"] if it.multi_vector_width else []
    return kinds + ([f"sparse {it.sparse_width}"] if it.sparse_width else [])


def _print_rows(
    console: Console,
    text: str,
    rows: Array,
    headings: tuple[str, str],
    names: Sequence[tuple[str, int]],
    info: SequenceInfo,
    max_rows: int,
) -> None:
    """A text, its rows as a table, and how many there are."""
    console.print(_clip(text, console.width, "bold"))
    console.print(_rows_table(rows, headings, names, max_rows, console.width))
    notes = [f"shape ({rows.shape[0]}, {rows.shape[1]})", *_hidden(len(rows), max_rows), *_cut_off(info)]
    console.print(Text(", ".join(notes) + "\n"))


def _hidden(n_rows: int, max_rows: int) -> list[str]:
    return [f"{n_rows - max_rows} more rows not shown"] if n_rows > max_rows else []


def _cut_off(info: SequenceInfo) -> list[str]:
    return [f"cut off after {info.token_count} of {info.original_token_count} tokens"] if info.truncated else []


def _rows_table(
    rows: Array, headings: tuple[str, str], names: Sequence[tuple[str, int]], max_rows: int, width: int
) -> Table:
    """As many of the first dimensions as there is room for, the last, and each row's norm."""
    d_model = rows.shape[1]
    # The edges; token, id and the ellipsis; the last dimension and the norm.
    fixed = 2 + (_TOKEN_WIDTH + _GAP) + (_ID_WIDTH + _GAP) + (1 + _GAP) + 2 * (_NUMBER_WIDTH + _GAP)
    n_first = min(max((width - fixed) // (_NUMBER_WIDTH + _GAP), 1), d_model - 1)
    table = make_table()
    table.add_column(headings[0], no_wrap=True, overflow="ellipsis", max_width=_TOKEN_WIDTH)
    table.add_column(headings[1], justify="right")
    for dimension in range(n_first):
        table.add_column(str(dimension), justify="right", no_wrap=True)
    if d_model - 1 > n_first:
        table.add_column("…")
    table.add_column(str(d_model - 1), justify="right", no_wrap=True)
    table.add_column("norm", justify="right", no_wrap=True)
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    for (name, number), row, norm in zip(names[:max_rows], rows, norms, strict=False):
        first = [f"{value:.3f}" for value in row[:n_first].tolist()]
        gap = ["…"] if d_model - 1 > n_first else []
        table.add_row(Text(name), str(number), *first, *gap, f"{row[-1]:.3f}", f"{norm:.3f}")
    return table


def make_table() -> Table:
    """An empty table in the style of all."""
    return Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)


def print_footer(console: Console, result: EncodeResult | InspectResult) -> None:
    """The model that ran, and where the time went."""
    timings = result.timings
    parts = {
        "tokenize": timings.tokenize_seconds,
        "queue": timings.queue_seconds,
        "compute": timings.compute_seconds,
        "total": timings.total_seconds,
    }
    console.print(Text(f"model {result.model}, version {result.version}, fingerprint {result.fingerprint}", "dim"))
    known = (f"{name} {seconds * 1000:.1f} ms" for name, seconds in parts.items() if seconds)
    console.print(Text(", ".join(known), "dim"))


def _style(value: float, compared_by: str) -> str:
    return next((style for least, style in _STYLES if value >= least), "red") if compared_by == "cosine" else ""


def _clip(text: str, width: int, style: str = "") -> Text:
    """A text on one line of so many columns; wide characters take two."""
    line = Text(" ".join(text.split()), style)
    line.truncate(width, overflow="ellipsis")
    return line
