"""The page of a report: sections of HTML around the figures, in one file that needs nothing else.

Every text that comes from a caller or a server is escaped. A content security policy allows this page's two scripts by
their hashes and no others, so that even markup that slipped through could neither run nor reach a network.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from encserve_cli.report import figures, labels, numbers, palette, sections, stacks
from encserve_cli.report.matches import MOST_COLUMNS, Side, columns_to_show, match, pictured
from encserve_client import EncodeResult, InspectResult, ModelInfo
from encserve_client.scoring import Similarity

TITLE_COLUMNS = 60


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """A section, and what its figures need."""

    html: str
    figures: dict[str, go.Figure]
    stacks: dict[str, stacks.Stack]
    attention: dict[str, Any] | None = None


def build_page(result: InspectResult, model: ModelInfo, text: str | None = None) -> str:
    """The whole page as HTML.

    Args:
        result: What `inspect` returned; sections without numbers are left out.
        model: The model that ran.
        text: The text that was sent; None for ids or vectors.
    """
    names = labels.token_names(result.sequence)
    parts = [
        part
        for part in (_attention(result), _similarity(result), _norms(result, names), _positions(result, model))
        if part is not None
    ]
    body = [sections.top(result, model, names, text)]
    body += [part.html for part in parts]
    body.append(sections.pair(_parameters(model), _times(result)))
    body.append(sections.bottom(result))
    drawn = {"parameters": figures.parameter_bars(model.parameters)} if model.parameters else {}
    drawn["times"] = figures.time_bars(numbers.time_parts(result.timings))
    for part in parts:
        drawn |= part.figures
    data = _data(drawn) | {
        "names": [labels.for_plotly(labels.clip(name, labels.AXIS_COLUMNS)) for name in names],
        "hovers": [labels.clip(name, labels.HOVER_COLUMNS) for name in names],
        "stacks": {name: stack.to_json() for part in parts for name, stack in part.stacks.items()},
        "attention": next((part.attention for part in parts if part.attention), None),
    }
    return _fill(labels.clip(text or f"{len(names)} tokens", TITLE_COLUMNS), "\n".join(body), data)


def build_match_page(query: Side, ranking: Sequence[tuple[Side, float]], by: Similarity, result: EncodeResult) -> str:
    """The page of a query against documents, as HTML.

    Args:
        query: The query, of one vector at least.
        ranking: The documents and their scores, in the order in which they are shown.
        by: How the scores were made.
        result: What names the model.
    """
    body = [sections.match_top(query.text, len(query.vectors), result, by)]
    drawn = {}
    fits = pictured([document for document, _ in ranking], len(query.vectors))
    for place, ((document, score), fit) in enumerate(zip(ranking, fits, strict=True)):
        n_vectors = len(document.vectors)
        if not n_vectors or not fit:
            body.append(sections.no_match(place, document.text, n_vectors, score))
            continue
        found = match(query.vectors, document.vectors, by)
        columns = columns_to_show(found, MOST_COLUMNS)
        drawn[f"match-{place}"] = figures.match_map(found, query.names, document.names, columns)
        end = numbers.widest(found.products)
        body.append(sections.match(place, document.text, (n_vectors, len(columns)), score, end))
    body.append(sections.match_bottom(result))
    return _fill(labels.clip(query.text, TITLE_COLUMNS), "\n".join(body), _data(drawn))


def _data(drawn: Mapping[str, go.Figure]) -> dict[str, Any]:
    """What the script of every page draws from."""
    return {
        "font": figures.FONT,
        "themes": {"light": palette.LIGHT, "dark": palette.DARK},
        "figures": {name: json.loads(figure.to_json()) for name, figure in drawn.items()},
    }


def _attention(result: InspectResult) -> _Part | None:
    stack = stacks.attention_stack(result)
    if stack is None or result.attention is None:
        return None
    kept = [result.attention_layers.index(layer) for layer in stack.layers]
    entropy = numbers.attention_entropy(result.attention[kept])  # (layers, heads, seq)
    n_heads = entropy.shape[1]
    drawn = {"attention": figures.attention_map()}
    if entropy.shape[0] * n_heads > 1:
        drawn["entropy"] = figures.entropy_map(entropy, stack.layers)
    facts = {
        "layers": stack.layers,
        "heads": n_heads,
        "entropy": [[round(value, 4) for value in row] for row in entropy.mean(axis=-1).tolist()],
    }
    html = sections.attention(stack.layers, n_heads, entropy.shape[2], stack.left_out)
    return _Part(html, drawn, {"attention": stack}, facts)


def _similarity(result: InspectResult) -> _Part | None:
    stack = stacks.similarity_stack(result)
    if stack is None or result.hidden_states is None:
        return None
    kept = [result.hidden_state_layers.index(layer) for layer in stack.layers]
    means = numbers.mean_similarity(numbers.cosine_similarity(result.hidden_states[kept]))
    html = sections.similarity([figures.stage(depth) for depth in stack.layers], means.tolist(), stack.left_out)
    return _Part(html, {"similarity": figures.similarity_map()}, {"similarity": stack})


def _norms(result: InspectResult, names: tuple[str, ...]) -> _Part | None:
    if result.hidden_states is None or not result.hidden_states.size:
        return None
    norms = numbers.state_norms(result.hidden_states)
    return _Part(sections.norms(), {"norms": figures.norms_lines(norms, result.hidden_state_layers, names)}, {})


def _positions(result: InspectResult, model: ModelInfo) -> _Part | None:
    stack = stacks.positions_stack(result.positions)
    if stack is None or result.positions is None:
        return None
    dimensions, places = stack.values.shape[1:]
    end, beyond = numbers.contrast(result.positions[:places, :dimensions])
    html = sections.positions(model.position, result.positions.shape, (places, dimensions), end, beyond)
    figure = figures.positions_map(end, is_large=places * dimensions > 20_000)
    return _Part(html, {"positions": figure}, {"positions": stack})


def _parameters(model: ModelInfo) -> str:
    return sections.parameters(model.parameters) if model.parameters else ""


def _times(result: InspectResult) -> str:
    return sections.times(result.timings)


def _fill(title: str, body: str, data: dict[str, Any]) -> str:
    """The template with everything in its place."""
    # Line ends as a browser reads them, or the hashes would not be those of what it runs.
    plotly, script = (code.replace("\r\n", "\n") for code in (get_plotlyjs(), _file("page.js")))
    hashes = " ".join(f"'sha256-{_sha256(code)}'" for code in (plotly, script))
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    return Template(_file("page.html")).substitute(
        policy=policy,
        title=escape(title),
        style=Template(_file("page.css")).substitute(palette.gradients()),
        body=body,
        # "<" would let a text end the element.
        data=json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c"),
        plotly=plotly,
        script=script,
    )


def _file(name: str) -> str:
    return resources.files("encserve_cli.report").joinpath(name).read_text(encoding="utf-8")


def _sha256(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii")
