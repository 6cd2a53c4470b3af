"""The figures of a report, with plotly. Colours are names here: the page puts in those of its light or dark theme.

`layout.meta.scale` names a colour scale and `trace.meta` the colour of a line or bar; see `palette`. Maps of tokens
come without their numbers: the page's script fills one figure with each matrix of a stack.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from encserve_cli.report import numbers
from encserve_cli.report.labels import AXIS_COLUMNS, HOVER_COLUMNS, clip, for_plotly
from encserve_cli.report.matches import Match

MAX_COLOURED_TOKENS = 8  # more lines than these get one colour
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def attention_map() -> go.Figure:
    """One head's attention: the token that looks × the token looked at. The colours rise with the square root."""
    figure = _map("root", 0, 1)
    figure.update_xaxes(title_text="token looked at")
    figure.update_yaxes(title_text="token that looks")
    return figure


def similarity_map() -> go.Figure:
    """The cosine similarity of every two tokens at one depth."""
    return _map("diverging", -1, 1)


def positions_map(end: float, *, is_large: bool) -> go.Figure:
    """What is added for each place, places × dimensions, from -end to end."""
    figure = _map("diverging", -end, end, "place %{x}, dimension %{y}<br><b>%{z:.3f}</b><extra></extra>")
    # One image instead of a rectangle for each number, where there are many; blurred where there are few.
    figure.update_traces(zsmooth="fast" if is_large else False)
    figure.update_xaxes(title_text="place in the sequence")
    figure.update_yaxes(title_text="dimension")
    figure.update_layout(height=400, margin={"l": 56, "r": 8, "t": 8, "b": 48})
    return figure


def entropy_map(entropy: numbers.Float64, layers: Sequence[int]) -> go.Figure:
    """Each head's mean entropy, layers × heads, from (layers, heads, seq)."""
    n_layers, n_heads, seq = entropy.shape
    figure = _map(
        "even",
        0,
        float(np.log2(seq)) or 1.0,
        "layer %{customdata}, head %{x}<br>mean entropy <b>%{z:.2f} bits</b><extra></extra>",
    )
    figure.update_traces(
        z=np.round(entropy.mean(axis=-1), 4).tolist(),
        customdata=[[layer] * n_heads for layer in layers],
    )
    step = -(-n_layers // 16)
    places = list(range(0, n_layers, step))
    figure.update_yaxes(
        title_text="layer", tickvals=places, ticktext=[str(layers[i]) for i in places], autorange="reversed"
    )
    figure.update_xaxes(title_text="head", dtick=-(-n_heads // 16))
    figure.update_layout(
        height=n_layers * min(22, max(14, 170 // n_layers)) + 50,
        margin={"l": 46, "r": 4, "t": 6, "b": 44},
        clickmode="event",
    )
    return figure


def match_map(match: Match, query: Sequence[str], document: Sequence[str], columns: Sequence[int]) -> go.Figure:
    """The dot products of a query's vectors and a document's, each row's largest marked, and what it added.

    Args:
        match: What they are.
        query: What stands for each of the n vectors of the query.
        document: And for each of the m of the document.
        columns: The places of those of the document that are shown; every row's largest is among them.
    """
    end = numbers.widest(match.products)
    figure = _map("diverging", -end, end, "%{y} meets %{x}<br><b>%{z:.4f}</b><extra></extra>")
    # A name for each place, as the same token may be there twice; what hovers tell is the name of a place.
    rows = [for_plotly(f"{i} {clip(name, HOVER_COLUMNS)}") for i, name in enumerate(query)]
    places = {i: for_plotly(f"{i} {clip(document[i], HOVER_COLUMNS)}") for i in columns}
    met = [places[i] for i in match.best.tolist()]
    shown = match.products[:, list(columns)].astype(np.float64)
    figure.update_traces(x=list(places.values()), y=rows, z=np.round(shown, 4).tolist())
    figure.add_scatter(
        x=met,
        y=rows,
        mode="markers",
        marker={"symbol": "square-open", "size": 10, "line": {"width": 2}},
        hoverinfo="skip",
        meta={"colour": "strong"},
    )
    added = match.added.astype(np.float64).tolist()
    figure.add_bar(
        x=added,
        y=rows,
        xaxis="x2",
        orientation="h",
        text=[
            f"{value:.3f} {for_plotly(clip(document[best], AXIS_COLUMNS))}"
            for value, best in zip(added, match.best.tolist(), strict=True)
        ],
        textposition="auto",
        insidetextanchor="start",
        customdata=[f"{row}, most like {column}" for row, column in zip(rows, met, strict=True)],
        hovertemplate="%{customdata}<br>added <b>%{x:.4f}</b><extra></extra>",
        meta={"colour": "accent"},
    )
    ticks = [clip(document[i], AXIS_COLUMNS) for i in columns]
    figure.update_layout(
        xaxis={"type": "category", "domain": [0, 0.72], "tickangle": -90, "range": [-0.5, len(columns) - 0.5]},
        xaxis2={"domain": [0.75, 1], "anchor": "y", "fixedrange": True, "nticks": 3, "title": {"text": "added"}},
        yaxis={"type": "category", "autorange": None, "range": [len(query) - 0.5, -0.5]},
        showlegend=False,
        height=24 * len(query) + 136,
        margin={"l": 108, "r": 8, "t": 8, "b": 120},
    )
    figure.update_layout(xaxis=_ticks(ticks), yaxis=_ticks([clip(name, AXIS_COLUMNS) for name in query]))
    return figure


def norms_lines(norms: numbers.Float64, depths: Sequence[int], names: Sequence[str]) -> go.Figure:
    """The length of each token's row through the layers, (layers, seq), and the mean of all tokens."""
    figure = _figure()
    hover = "%{text}<br>%{customdata}<br>norm <b>%{y:.2f}</b><extra></extra>"
    stages = [stage(depth) for depth in depths]
    texts = [for_plotly(f"{place} {clip(name, HOVER_COLUMNS)}") for place, name in enumerate(names)]
    values = np.round(norms, 4)  # (layers, seq)
    if len(names) <= MAX_COLOURED_TOKENS:
        for place, name in enumerate(names):
            figure.add_scatter(
                x=list(depths),
                y=values[:, place].tolist(),
                text=[texts[place]] * len(depths),
                customdata=stages,
                hovertemplate=hover,
                name=for_plotly(clip(name, AXIS_COLUMNS)),
                mode="lines+markers",
                marker={"size": 5},
                line={"width": 1.6},
                meta={"colour": place},
            )
    else:  # one trace with gaps between the tokens: hundreds of traces would be slow
        figure.add_scatter(
            x=[it for _ in names for it in (*depths, None)],
            y=[it for place in range(len(names)) for it in (*values[:, place].tolist(), None)],
            text=[text for text in texts for _ in range(len(depths) + 1)],
            customdata=[*stages, ""] * len(names),
            hovertemplate=hover,
            name="each token",
            mode="lines+markers",
            marker={"size": 4},
            line={"width": 1},
            opacity=0.55,
            meta={"colour": "accent"},
        )
    figure.add_scatter(
        x=list(depths),
        y=np.round(norms.mean(axis=1), 4).tolist(),
        text=["mean of all tokens"] * len(depths),
        customdata=stages,
        hovertemplate=hover,
        name="mean",
        mode="lines+markers",
        marker={"size": 7},
        line={"width": 3, "dash": "dot"},
        meta={"colour": "strong"},
    )
    is_wide = norms.size > 0 and norms.max() > 30 * max(float(norms.min()), 1e-12)
    if is_wide:
        figure.update_yaxes(title_text="norm, on a log scale", type="log")
    else:
        figure.update_yaxes(title_text="norm", rangemode="tozero")
    shown = numbers.spread(len(depths), 14)
    figure.update_xaxes(
        title_text="after layer",
        tickvals=[depths[i] for i in shown],
        ticktext=["input" if depths[i] == 0 else str(depths[i] - 1) for i in shown],
    )
    figure.update_layout(
        height=400,
        margin={"l": 56, "r": 12, "t": 8, "b": 48},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "font": {"size": 12}},
    )
    return figure


def parameter_bars(counts: Mapping[str, int]) -> go.Figure:
    """How many numbers each part of the model has, with its share."""
    share = numbers.shares(counts)
    texts = [f"{amount(count)} · {share[part]:.1%}" for part, count in counts.items()]
    hovers = [f"{part.replace('_', ' ')}: {count:,}" for part, count in counts.items()]
    return _bars([part.replace("_", " ") for part in counts], list(counts.values()), texts, hovers, "parameters")


def time_bars(parts: Mapping[str, float]) -> go.Figure:
    """Where a call's time went; the parts are in seconds."""
    values = [seconds * 1000 for seconds in parts.values()]
    texts = [f"{value:.1f} ms" for value in values]
    hovers = [f"{part}: {value:.3f} ms" for part, value in zip(parts, values, strict=True)]
    return _bars(list(parts), values, texts, hovers, "milliseconds")


def stage(depth: int) -> str:
    """What a depth of the hidden states is called."""
    return "input of layer 0" if depth == 0 else f"after layer {depth - 1}"


def amount(count: float) -> str:
    """A count in few digits: 22.7 M."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {letter}"
    return f"{count:.0f}"


def _ticks(names: Sequence[str]) -> dict[str, Any]:
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [for_plotly(name) for name in names],
    }


def _bars(
    names: Sequence[str], values: Sequence[float], texts: Sequence[str], hovers: Sequence[str], title: str
) -> go.Figure:
    """Bars from the top down, with what they amount to at their ends."""
    figure = _figure()
    places = list(range(len(names)))
    figure.add_bar(
        x=list(values),
        y=places,
        orientation="h",
        width=0.58,
        text=list(texts),
        textposition="outside",
        cliponaxis=False,
        customdata=[for_plotly(hover) for hover in hovers],
        hovertemplate="%{customdata}<extra></extra>",
        meta={"colour": "accent"},
    )
    longest = max((float(value) for value in values), default=0.0)
    figure.update_xaxes(range=[0, (longest or 1.0) * 1.02], title_text=title, nticks=4)
    figure.update_yaxes(
        tickvals=places, ticktext=[for_plotly(name) for name in names], autorange="reversed", showgrid=False
    )
    figure.update_layout(height=48 * len(names) + 56, margin={"l": 112, "r": 108, "t": 4, "b": 48})
    return figure


def _map(scale: str, low: float, high: float, hover: str | None = None) -> go.Figure:
    """A map with plotly's own label on hovering; without one the page's script shows what it says itself."""
    figure = _figure(meta={"scale": scale})
    label = {"hoverinfo": "none"} if hover is None else {"hovertemplate": hover}
    figure.add_heatmap(zmin=low, zmax=high, showscale=False, **label)
    figure.update_xaxes(showgrid=False, zeroline=False, ticks="")
    figure.update_yaxes(showgrid=False, zeroline=False, ticks="", autorange="reversed")
    return figure


def _figure(**layout: Any) -> go.Figure:
    """An empty figure without a background or buttons of its own, that lets the page scroll."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12},
        hovermode="closest",
        dragmode=False,
        **layout,
    )
    figure.update_xaxes(fixedrange=True, zeroline=False)
    figure.update_yaxes(fixedrange=True, zeroline=False)
    return figure
