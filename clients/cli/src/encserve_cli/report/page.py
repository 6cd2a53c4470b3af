"""The HTML page of `encserve inspect`: one file that needs no network.

The file has all data in one JSON object. `page.js` fills in the templates of `page.html` and draws the figures. Data
become text only, never HTML. A content security policy allows only the page's two scripts, by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from encserve_cli.report import numbers
from encserve_cli.report.labels import token_names
from encserve_client import Array, InspectResult, ModelInfo, SequenceInfo, Timings

# The largest number of values in one part of the page. This many values take 32 MB. 12 layers × 12 heads × 256² weights
# are 9.4 million.
MAX_NUMBERS = 12_000_000
MAX_POSITIONS = 512
MAX_DIMENSIONS = 384
_MAX_TEXT = 2000  # characters
_LONG_TEXT = 90  # characters; a longer text gets smaller letters
_STEPS = 65535  # the largest uint16


def build_page(result: InspectResult, model: ModelInfo, text: str | None = None) -> str:
    """Return the HTML page of an inspection. Parts without numbers are left out.

    Args:
        result: The result of `inspect`.
        model: The inspected model.
        text: The inspected text; None for token ids or vectors.
    """
    sequence = result.sequence
    count = sequence.token_count
    parts = {
        "attention": _attention(result),
        "similarity": _similarity(result),
        "norms": _norms(result),
        "positions": _positions(result, model),
        "totals": [*_parameters(model), _times(result.timings)],
    }
    header = {
        "eyebrow": f"What {result.model} did with",
        "tokens": _tokens(sequence),
        "facts": as_items(_facts(result, model)),
        "fingerprint": result.fingerprint,
        "footer": f"Made by encserve inspect from {result.model}, version {result.version}. Layers and heads count "
        "from 0. Attention weights and similarities are exact to 3 digits.",
    }
    if sequence.truncated:
        header["truncated"] = f"Cut off after {count:,} of {sequence.original_token_count:,} tokens."
    return render_page(text or f"{count} {'token' if count == 1 else 'tokens'}", header | parts)


def render_page(heading: str, data: dict[str, Any]) -> str:
    """Return a page with a heading and the data of its templates."""
    from plotly.offline import get_plotlyjs  # slow: the import takes a second

    data = {"heading": shorten(heading, _MAX_TEXT), "size": "long" if len(heading) > _LONG_TEXT else ""} | data
    # A browser changes \r\n to \n before it hashes a script.
    plotly, script = (code.replace("\r\n", "\n") for code in (get_plotlyjs(), _file("page.js")))
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in (plotly, script)
    )
    return Template(_file("page.html")).substitute(
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'",
        style=_file("page.css"),
        # Without "<", a text with "</script>" does not end the script.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=plotly,
        script=script,
    )


def as_items(facts: dict[str, str]) -> list[dict[str, str]]:
    """Return facts as items of a template."""
    return [{"name": name, "value": value} for name, value in facts.items()]


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters of a text, and an ellipsis if the text has more characters."""
    return text if len(text) <= most else f"{text[:most]}…"


def round_finite(values: Array, decimals: int = 4) -> list[Any]:
    """Return rounded values. NaN and infinity become None, because JSON has neither."""
    rounded = np.round(values.astype(np.float64), decimals).astype(object)
    rounded[~np.isfinite(values)] = None
    return list(rounded.tolist())


def scale_to(limit: float) -> dict[str, Any]:
    """Return a colour scale from -limit to limit, and the labels of both ends."""
    return {"limit": limit, "lowest": f"−{limit:.2g}", "highest": f"{limit:.2g}"}


def _tokens(sequence: SequenceInfo) -> list[dict[str, Any]]:
    names = token_names(sequence)
    ids: Sequence[int | None] = [None] * len(names)
    if sequence.tokens is not None and sequence.token_ids is not None:
        ids = sequence.token_ids.tolist()
    special = [False] * len(names) if sequence.special is None else sequence.special.tolist()
    return [
        {"name": name, "id": token_id, "kind": "special" if is_special else "word"}
        for name, token_id, is_special in zip(names, ids, special, strict=True)
    ]


def _facts(result: InspectResult, model: ModelInfo) -> dict[str, str]:
    total = sum(model.parameters.values())
    return {
        "model": result.model,
        "version": result.version,
        "layers × heads": f"{model.n_layers} × {model.n_heads}",
        "hidden size": f"{model.d_model:,}",
        "tokens": f"{result.sequence.token_count:,} of at most {model.max_sequence_tokens:,}",
        "vocabulary": f"{model.vocab_size:,}" if model.vocab_size else "none, takes vectors",
        "parameters": f"{total:,}" if total else "unknown",
        "positions": model.position or "unknown",
        "pooling": f"{model.pooling or 'unknown'}{', norm 1' if model.l2_normalize else ''}",
        "runs on": f"{model.provider.removesuffix('ExecutionProvider')}, {model.precision}",
    }


def _attention(result: InspectResult) -> dict[str, Any] | None:
    if result.attention is None or not result.attention.size:
        return None
    shown = _indices_with_room(result.attention, result.attention[0].size)
    attention = result.attention[shown]  # (layers, heads, seq, seq)
    n_layers, n_heads, seq, _ = attention.shape
    layers = [result.attention_layers[index] for index in shown]
    max_bits = float(np.log2(seq)) or 1.0
    overview = {
        "heads": [{"head": head, "name": f"head {head}"} for head in range(n_heads)],
        "uniform": f"{max_bits:.1f}, all {seq} tokens",
    }
    return {
        "layers": [{"name": layer} for layer in layers],
        "entropy": round_finite(numbers.attention_entropy(attention).mean(axis=-1)),  # (layers, heads)
        "max_bits": max_bits,
        "overview": overview if n_layers * n_heads > 1 else None,
        "matrices": _pack(attention.reshape(-1, seq, seq), 0, 1),
        "omitted": _omitted(result.attention_layers, layers),
    }


def _similarity(result: InspectResult) -> dict[str, Any] | None:
    if result.hidden_states is None or not result.hidden_states.size:
        return None
    shown = _indices_with_room(result.hidden_states, result.hidden_states.shape[1] ** 2)
    cosines = numbers.cosine_similarity(result.hidden_states[shown])  # (layers, seq, seq)
    depths = [result.hidden_state_layers[index] for index in shown]
    panels = zip(depths, numbers.mean_similarity(cosines), strict=True)
    return {
        "panels": [
            {"index": index, "stage": _stage(depth), "mean": f"mean {mean:z.2f}"}
            for index, (depth, mean) in enumerate(panels)
        ],
        "matrices": _pack(cosines, -1, 1),
        "omitted": _omitted(result.hidden_state_layers, depths),
    }


def _norms(result: InspectResult) -> dict[str, Any] | None:
    if result.hidden_states is None or not result.hidden_states.size:
        return None
    norms = numbers.state_norms(result.hidden_states)  # (layers, seq)
    return {
        "depths": result.hidden_state_layers,
        "stages": [_stage(depth) for depth in result.hidden_state_layers],
        "norms": round_finite(norms),
        "means": round_finite(norms.mean(axis=1)),
        "log": bool(norms.max() > 30 * max(float(norms.min()), 1e-12)),
    }


def _positions(result: InspectResult, model: ModelInfo) -> dict[str, Any] | None:
    """Return the first positions and dimensions. A sample of evenly spaced positions would show false waves."""
    if result.positions is None or not result.positions.size:
        return None
    table = result.positions[:MAX_POSITIONS, :MAX_DIMENSIONS]  # (positions, dimensions)
    (n_all, d_all), (n, d) = result.positions.shape, table.shape
    extent = f"All {n:,} positions and {d:,} dimensions."
    if table.shape != result.positions.shape:
        extent = f"The first {n:,} of {n_all:,} positions and the first {d:,} of {d_all:,} dimensions."
    limit, beyond = numbers.colour_limit(table)
    if beyond:
        extent += f" {beyond:.1%} of the values are beyond the colour scale; point at a cell to see its value."
    largest = numbers.largest_magnitude(table)
    return scale_to(limit) | {
        "lead": f"The model’s {model.position} positional encoding, the same for every text. {extent}",
        "matrices": _pack(table.T[None], -largest, largest),
    }


def _parameters(model: ModelInfo) -> list[dict[str, Any]]:
    if not model.parameters:
        return []
    counts = {part.replace("_", " "): count for part, count in model.parameters.items()}
    total = sum(counts.values())
    texts = [f"{count:,} · {count / max(total, 1):.1%}" for count in counts.values()]
    return [{"title": "Parameters", "lead": f"{total:,} parameters in all.", "bars": _bars(counts, texts)}]


def _times(timings: Timings) -> dict[str, Any]:
    seconds = {
        "tokenize": timings.tokenize_seconds,
        "queue": timings.queue_seconds,
        "compute": timings.compute_seconds,
    }
    seconds["network and other"] = max(timings.total_seconds - sum(seconds.values()), 0.0)
    return {
        "title": "Time",
        "lead": f"{timings.total_seconds * 1000:.1f} ms from the call to the reply. The first call also waits in the "
        "queue until the server has loaded the graph of inspections.",
        "bars": _bars(seconds, [f"{part * 1000:.3f} ms" for part in seconds.values()]),
    }


def _bars(values: Mapping[str, float], texts: Sequence[str]) -> list[dict[str, str]]:
    longest = max(values.values()) or 1
    return [
        {"name": name, "text": text, "width": f"{value / longest:.2%}"}
        for (name, value), text in zip(values.items(), texts, strict=True)
    ]


def _indices_with_room(layers: Array, numbers_each: int) -> list[int]:
    return numbers.spaced_indices(len(layers), max(MAX_NUMBERS // numbers_each, 1))


def _omitted(layers: Sequence[int], shown: Sequence[int]) -> str | None:
    omitted = ", ".join(str(layer) for layer in layers if layer not in shown)
    return f"Left out, so that the page stays small: {omitted}. --layers selects layers." if omitted else None


def _stage(depth: int) -> str:
    return "input of layer 0" if depth == 0 else f"after layer {depth - 1}"


def _pack(matrices: Array, low: float, high: float) -> dict[str, Any]:
    """Return matrices (count, rows, columns) as base64 of uint16, from 0 for low to 65535 for high.

    Values below low become 0, values above high become 65535, and NaN becomes 0. The error of other values is at most
    half a step.
    """
    scaled = np.nan_to_num((matrices.astype(np.float64) - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0)
    steps = np.rint(np.clip(scaled, 0, 1) * _STEPS).astype("<u2")
    return {
        "data": base64.b64encode(steps.tobytes()).decode("ascii"),
        "rows": matrices.shape[1],
        "columns": matrices.shape[2],
        "low": low,
        "step": (high - low) / _STEPS,
    }


def _file(name: str) -> str:
    return resources.files("encserve_cli.report").joinpath(name).read_text(encoding="utf-8")
