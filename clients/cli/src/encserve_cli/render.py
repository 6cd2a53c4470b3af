"""Prints tables for people, with rich. The tables fit into 80 columns, and have no colour in a pipe."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from encserve_client import Array, EncodeResult, InspectResult, ModelInfo, SequenceInfo

_GAP = 2  # columns between two cells of a table
_NUMBER_WIDTH = 7  # "-12.345"
_ID_WIDTH = 6
_TOKEN_WIDTH = 14
_COSINE_WIDTH = 6  # "-0.123"
_NO_VECTORS = "no vectors"  # instead of a score
_MIN_TEXT_WIDTH = 20  # columns of a text in a table of scores


def row_tokens(info: SequenceInfo, n_rows: int) -> list[tuple[str, int]]:
    """Return (token, id) for each row of a text. Special tokens without a row are left out."""
    ids = info.token_ids if info.token_ids is not None else np.full(info.token_count, -1)
    tokens = info.tokens or ("",) * info.token_count
    has_row = np.ones(len(ids), np.bool_)
    if n_rows != info.token_count and info.special is not None:
        has_row = ~info.special
    return [(token, int(token_id)) for token, token_id, is_shown in zip(tokens, ids, has_row, strict=True) if is_shown]


def print_made(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """Print the output of each text, of any kind."""
    printers = {"tokens": print_rows, "multi_vector": print_rows, "sparse": print_sparse}
    printers.get(str(result.outputs[0].kind), print_vectors)(texts, result, max_rows)


def print_rows(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """Print a table for each text: a row for each token or vector, a column for each dimension."""
    console = Console(highlight=False)
    output = result.outputs[0]
    sequences = zip(texts, output.arrays(), output.token_indices(), result.sequences, strict=True)
    for text, rows, positions, info in sequences:
        headings, names = ("token", "id"), row_tokens(info, len(rows))
        if output.kind == "multi_vector":
            numbers = range(len(rows)) if positions is None else positions.tolist()
            headings, names = ("token", "place"), [*zip(vector_names(info, positions, len(rows)), numbers, strict=True)]
        console.print(_clip(text, console.width, "bold"))
        console.print(_rows_table(rows, headings, names, max_rows, console.width))
        notes = [f"shape ({rows.shape[0]}, {rows.shape[1]})", *_hidden(len(rows), max_rows), *_cut_off(info)]
        console.print(Text(", ".join(notes) + "\n"))
    print_footer(console, result)


def print_vectors(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """Print one table of texts × dimensions."""
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


def print_sparse(texts: Sequence[str], result: EncodeResult, max_rows: int) -> None:
    """Print a table of the largest weights of each text. A row names its token only if the token is in the text."""
    console = Console(highlight=False)
    for text, vector, info in zip(texts, result.outputs[0].sparse_vectors(), result.sequences, strict=True):
        tokens_by_id = {token_id: token for token, token_id in row_tokens(info, info.token_count)}
        table = make_table()
        table.add_column("index", justify="right")
        table.add_column("token in the text", no_wrap=True, overflow="ellipsis", max_width=2 * _TOKEN_WIDTH)
        table.add_column("weight", justify="right", no_wrap=True)
        for place in np.argsort(-vector.values, kind="stable")[:max_rows].tolist():
            index = int(vector.indices[place])
            table.add_row(str(index), Text(tokens_by_id.get(index, "")), f"{vector.values[place]:.3f}")
        console.print(_clip(text, console.width, "bold"))
        console.print(table)
        n_weights = len(vector.indices)
        notes = [f"{n_weights} weights of {vector.width} are not 0", *_hidden(n_weights, max_rows), *_cut_off(info)]
        console.print(Text(", ".join(notes) + "\n"))
    print_footer(console, result)


def print_tokens(console: Console, text: str, info: SequenceInfo) -> None:
    """Print a table of the tokens of a text. Special tokens and tokens of a prompt have no start and end."""
    offsets = np.zeros((info.token_count, 2), np.int64) if info.offsets is None else info.offsets
    table = make_table()
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=2 * _TOKEN_WIDTH)
    for name in ("id", "start", "end"):
        table.add_column(name, justify="right")
    for (token, token_id), (start, end) in zip(row_tokens(info, info.token_count), offsets.tolist(), strict=True):
        span = (str(start), str(end)) if end > start else ("", "")
        table.add_row(Text(token), str(token_id), *span)
    console.print(_clip(text, console.width, "bold"))
    console.print(table)
    console.print(Text(", ".join([f"{info.token_count} tokens", *_cut_off(info)]) + "\n"))


def vector_names(info: SequenceInfo, positions: npt.NDArray[np.uint32] | None, count: int) -> list[str]:
    """Return the token of each vector of a text. If `positions` is None, the vectors are merged and have no token."""
    if positions is None:
        return ["(pooled)"] * count
    return [str(position) if info.tokens is None else info.tokens[position] for position in positions.tolist()]


def print_saved(path: Path, result: EncodeResult, inputs: int, rows: int, seconds: float) -> None:
    """Print the size of an output file, the time, and the model. `result` is the last reply."""
    console = Console(highlight=False)
    output = result.outputs[0]
    size = f"{rows:,} weights of {output.sparse_width:,}" if output.kind == "sparse" else f"{rows:,} rows"
    if output.kind != "sparse":
        size += f" of {output.blocks[0].rows.shape[1]}"
    console.print(Text(f"wrote {path}: {inputs:,} texts, {size}, in {seconds:.1f} s, {inputs / seconds:,.0f} a second"))
    console.print(Text(f"model {result.model}, version {result.version}, fingerprint {result.fingerprint}", "dim"))


def print_similarity(
    texts: Sequence[str], scores: npt.NDArray[np.float64], compared_by: str, result: EncodeResult
) -> None:
    """Print the scores, (texts, texts), with the text before each row. A wide matrix becomes several tables."""
    console = Console(highlight=False)
    cells = [[f"{value:.3f}" for value in row] for row in scores.tolist()]
    cell_width = max(_COSINE_WIDTH, *(len(cell) for row in cells for cell in row))
    fixed = 2 + len(str(len(texts))) + _GAP + _GAP  # edges, column of numbers, gap after the text
    per_table = max((console.width - fixed - _MIN_TEXT_WIDTH) // (cell_width + _GAP), 1)
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
    texts: Sequence[str], ranking: Sequence[tuple[int, float | None]], compared_by: str, result: EncodeResult | None
) -> None:
    """Print a query and its documents.

    Args:
        texts: The query, then the documents.
        ranking: (index, score) of each document, in the order of the table. Document i is texts[i + 1].
        compared_by: The name of the similarity.
        result: The reply with the documents' vectors; None if the server has computed the scores.
    """
    console = Console(highlight=False)
    console.print(_clip(texts[0], console.width, "bold"))
    table = make_table()
    table.add_column("", justify="right")
    table.add_column("document", no_wrap=True, overflow="ellipsis")
    table.add_column(compared_by, justify="right", no_wrap=True)
    width = console.width - len(str(len(ranking))) - max(len(compared_by), len(_NO_VECTORS)) - 4 * _GAP
    for place, (index, score) in enumerate(ranking, start=1):
        cell = _NO_VECTORS if score is None else f"{score:.4f}"
        table.add_row(str(place), _clip(texts[index + 1], width), cell)
    console.print(table)
    if result is not None:
        print_footer(console, result)


def print_models(models: Sequence[ModelInfo]) -> None:
    """Print a block for each model."""
    console = Console(highlight=False)
    for model in models:
        table = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _model_facts(model).items():
            table.add_row(f"  {name}", Text.assemble(value))
        heading = Text(model.name, "bold").append(", the default model" if model.is_default else "", "not bold")
        console.print(heading, overflow="fold")
        console.print(table)
        console.print()


def _model_facts(model: ModelInfo) -> dict[str, str | tuple[str, str]]:
    """Return field → value for a model. A value with a style is (text, style)."""
    layers = str(model.n_layers) if model.n_layers else "unknown"  # a model from an ONNX file
    limits = [str(model.max_sequence_tokens), *(f"{task} {info.max_tokens}" for task, info in model.tasks.items())]
    return {
        "version": model.version,
        "fingerprint": model.fingerprint,
        "space id": model.space_id or "unknown",
        "d_model": str(model.d_model),
        "layers": layers,
        "max tokens": ", ".join(limits),
        "outputs": "; ".join(_kinds(model)) or "vectors of tokens only",
        "runs on": f"{model.provider.removesuffix('ExecutionProvider')}, {model.precision}",
        "ready": ("yes", "green") if model.ready else (f"no: {model.not_ready_reason}", "red"),
    }


def _kinds(model: ModelInfo) -> list[str]:
    """Return the outputs of a model and their widths, without token vectors."""
    width = model.default_dimensions or model.vector_width
    kinds = [f"{model.pooling} {width}{', norm 1' if model.l2_normalize else ''}"] if model.pooling else []
    kinds += [f"{model.multi_vector_similarity} {model.multi_vector_width}"] if model.multi_vector_width else []
    kinds += [f"sparse {model.sparse_width}"] if model.sparse_width else []
    if not model.labels:
        return kinds
    return [*kinds, f"scores of {len(model.labels)} labels" if len(model.labels) > 1 else "scores"]


def _hidden(n_rows: int, max_rows: int) -> list[str]:
    return [f"{n_rows - max_rows} more rows not shown"] if n_rows > max_rows else []


def _cut_off(info: SequenceInfo) -> list[str]:
    return [f"cut off after {info.token_count} of {info.original_token_count} tokens"] if info.truncated else []


def _rows_table(
    rows: Array, headings: tuple[str, str], names: Sequence[tuple[str, int]], max_rows: int, width: int
) -> Table:
    """Return a table: the first dimensions that fit, the last dimension, and the norm of each row."""
    d_model = rows.shape[1]
    # Edges, token, id, ellipsis, last dimension and norm.
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
    """Return an empty table in the style of all tables."""
    return Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)


def print_footer(console: Console, result: EncodeResult | InspectResult) -> None:
    """Print the model and the times of a reply."""
    timings = result.timings
    parts = {
        "tokenize": timings.tokenize_seconds,
        "queue": timings.queue_seconds,
        "compute": timings.compute_seconds,
        "total": timings.total_seconds,
    }
    console.print(Text(f"model {result.model}, version {result.version}, fingerprint {result.fingerprint}", "dim"))
    times = (f"{name} {seconds * 1000:.1f} ms" for name, seconds in parts.items() if seconds)
    console.print(Text(", ".join(times), "dim"))


def _clip(text: str, width: int, style: str = "") -> Text:
    """Return the start of a text: one line of at most `width` columns. Wide characters take two columns."""
    line = Text(" ".join(text.split()), style)
    line.truncate(width, overflow="ellipsis")
    return line
