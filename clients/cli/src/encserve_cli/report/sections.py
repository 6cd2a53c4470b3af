"""The sections of a report as HTML. What is not from here is escaped."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from encserve_cli.report.figures import amount
from encserve_client import EncodeResult, InspectResult, ModelInfo, Timings

_LONG_TEXT = 90  # characters; a longer one is set smaller
_MAX_TEXT = 2000
_MAX_DOCUMENT = 400


def top(result: InspectResult, model: ModelInfo, names: Sequence[str], text: str | None) -> str:
    """The text, its tokens, and the model that ran."""
    sequence = result.sequence
    if text is None:
        shown, size = f"{sequence.token_count} {'token' if sequence.token_count == 1 else 'tokens'}", ""
    else:
        shown, size = _text(text)
    special = sequence.special if sequence.special is not None else np.zeros(len(names), np.bool_)
    ids = [""] * len(names)
    if sequence.token_ids is not None and sequence.tokens is not None:
        ids = [f"<small>{token_id}</small>" for token_id in sequence.token_ids.tolist()]
    chips = "".join(
        f'<li class="{"special" if is_special else "word"}"><bdi>{escape(name)}</bdi>{token_id}</li>'
        for name, token_id, is_special in zip(names, ids, special.tolist(), strict=True)
    )
    cut = ""
    if sequence.truncated:
        cut = f'<p class="note">Cut off after {sequence.token_count:,} of {sequence.original_token_count:,} tokens.</p>'
    return (
        f'<header class="top"><p class="eyebrow">What {escape(result.model)} did with</p>'
        f'<h1{size} dir="auto">{escape(shown)}</h1><ul class="tokens" aria-label="Tokens">{chips}</ul>{cut}</header>'
        f'<section class="card" id="model"><dl class="facts">{_facts(result, model)}</dl></section>'
    )


def match_top(query: str, n_vectors: int, result: EncodeResult, compared_by: str) -> str:
    """The query, and the model that ran."""
    shown, size = _text(query)
    facts = {
        "model": result.model,
        "version": result.version,
        "vectors of the query": f"{n_vectors:,}",
        "compared by": compared_by,
    }
    return (
        f'<header class="top"><p class="eyebrow">A query, and what answers it</p>'
        f'<h1{size} dir="auto">{escape(shown)}</h1></header>'
        f'<section class="card" id="model"><dl class="facts">{_cells(facts, result.fingerprint)}</dl></section>'
    )


def match(place: int, text: str, vectors: tuple[int, int], score: float, end: float) -> str:
    """A document with so many vectors, of which so many are shown, and its figure; the colours end at ±end."""
    n_vectors, n_shown = vectors
    columns = f"each of the {n_vectors:,} columns one of the document"
    if n_shown < n_vectors:
        columns = (
            f"each column one of the document (the {n_shown:,} of its {n_vectors:,} vectors that are most similar to a "
            "vector of the query)"
        )
    return _card(
        f"match-{place}",
        f"{place + 1}. {score:.4f}",
        f"{_document(text)}Each row is a vector of the query, {columns}, and a colour is their "
        "dot product. Framed is the largest of a row, which alone counts: the bar is what it adds to the score.",
        _scale("diverging", "dot product", [(0, f"−{end:.2g}"), (0.5, "0"), (1, f"{end:.2g}")]),
        f'<div class="plot" data-figure="match-{place}"></div>',
    )


def no_match(place: int, text: str, n_vectors: int, score: float) -> str:
    """A document without a picture: nothing of it counts, or the page would become too large."""
    title, why = f"{place + 1}. No vectors", "Nothing of this text counts."
    if n_vectors:
        title = f"{place + 1}. {score:.4f}"
        why = f"Its {n_vectors:,} vectors are left out, so that the page stays small: take fewer or shorter texts."
    return _card(f"match-{place}", title, f"{_document(text)}{why}", "", "")


def match_bottom(result: EncodeResult) -> str:
    """Where the page comes from."""
    return (
        f"<footer>Made by encserve similarity from {escape(result.model)}, version {escape(result.version)}.</footer>"
    )


def _text(text: str) -> tuple[str, str]:
    """As much of a text as is shown, and the class of its heading."""
    shown = _shortened(text, _MAX_TEXT)
    return shown, ' class="long"' if len(shown) > _LONG_TEXT else ""


def _document(text: str) -> str:
    """The text of a document, as HTML."""
    return f'<bdi dir="auto">{escape(_shortened(text, _MAX_DOCUMENT))}</bdi><br>'


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + "…"


def _facts(result: InspectResult, model: ModelInfo) -> str:
    pooling = f"{model.pooling or 'not known'}{', norm 1' if model.l2_normalize else ''}"
    total = sum(model.parameters.values())
    facts = {
        "model": result.model,
        "version": result.version,
        "layers × heads": f"{model.n_layers} × {model.n_heads}",
        "numbers in a row": f"{model.d_model:,}",
        "tokens, of at most": f"{result.sequence.token_count:,} of {model.max_sequence_tokens:,}",
        "vocabulary": f"{model.vocab_size:,}" if model.vocab_size else "vectors as input",
        "parameters": amount(total) if total else "not known",
        "positions": model.position or "not known",
        "pooling": pooling,
        "runs on": f"{model.provider.removesuffix('ExecutionProvider')}, {model.precision}",
    }
    return _cells(facts, result.fingerprint)


def _cells(facts: Mapping[str, str], fingerprint: str) -> str:
    cells = [f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()]
    code = f'<div class="wide"><dt>fingerprint</dt><dd class="code">{escape(fingerprint)}</dd></div>'
    return "".join([*cells, code])


def attention(layers: Sequence[int], n_heads: int, seq: int, left_out: Sequence[int]) -> str:
    """The maps of a layer's heads, one of them large, and which heads look at few tokens."""
    choices = "".join(
        f'<label><input type="radio" name="layer" value="{place}" aria-label="layer {layer}">'
        f"<span>{layer}</span></label>"
        for place, layer in enumerate(layers)
    )
    layout, is_single = ("attention single", True) if len(layers) * n_heads == 1 else ("attention", False)
    heads = "".join(
        f'<div class="head" data-head="{head}"><button type="button">head {head}</button>'
        f'<div class="frame"><div class="plot" data-figure="attention" data-stack="attention" data-fit="bare"'
        f' data-head="{head}" data-index="{head}"></div></div></div>'
        for head in range(n_heads)
    )
    overview = (
        '<div class="head-row small"><div><h3>How focused each head is</h3><p class="note">Mean entropy of a head’s '
        f"rows. A click shows that head.</p></div>{_scale('even', 'bits', _entropy_marks(seq))}</div>"
        '<div class="plot" data-figure="entropy"></div>'
    )
    side = "" if is_single else f'<div><div class="heads">{heads}</div>{overview}</div>'
    return _card(
        "attention",
        "Attention",
        "How much each token, a row, looks at each token, a column. Every row sums to 1. Colours rise with the square "
        "root, so that small weights can be seen.",
        _scale("root", "attention weight", [(value**0.5, f"{value:g}") for value in (0, 0.01, 0.1, 0.25, 0.5, 1)]),
        f'<fieldset class="layers"><legend>Layer</legend>{choices}</fieldset>'
        f'<div class="{layout}"><div><div class="caption"><h3 id="which"></h3>'
        '<span id="focus"></span></div><div class="plot" data-figure="attention" data-stack="attention" data-fit="full"'
        f' data-index="0" id="large"></div></div>{side}</div>{_left_out(left_out)}',
    )


def _entropy_marks(seq: int) -> list[tuple[float, str]]:
    return [(0, "0, one token"), (1, f"{np.log2(seq) or 1.0:.1f}, all {seq} alike")]


def similarity(stages: Sequence[str], means: Sequence[float], left_out: Sequence[int]) -> str:
    """A map for every depth, side by side."""
    panels = "".join(
        f'<figure data-stage="{stage}"><figcaption>{stage}<small>mean {mean:z.2f}</small></figcaption>'
        '<div class="plot" data-figure="similarity" data-stack="similarity" data-fit="panel"'
        f' data-index="{index}"></div></figure>'
        for index, (stage, mean) in enumerate(zip(stages, means, strict=True))
    )
    return _card(
        "similarity",
        "How alike the tokens become",
        "The cosine similarity of every two tokens’ rows, before the first layer and after each. The mean is that of "
        "different tokens.",
        _scale("diverging", "cosine similarity", [(0, "−1"), (0.5, "0"), (1, "1")]),
        f'<div class="panels">{panels}</div>{_left_out(left_out)}',
    )


def norms() -> str:
    """The length of the rows through the layers."""
    return _card(
        "norms",
        "How long the rows are",
        "The Euclidean norm of each token’s row as it passes through the layers.",
        "",
        '<div class="plot" data-figure="norms"></div>',
    )


def positions(kind: str, whole: Sequence[int], shown: Sequence[int], end: float, beyond: float) -> str:
    """What is added for each place; shapes are (places, dimensions), colours end at ±end, a share lies beyond."""
    extent = f"All {whole[0]:,} places and {whole[1]:,} dimensions."
    if tuple(whole) != tuple(shown):
        extent = f"The first {shown[0]:,} of {whole[0]:,} places and the first {shown[1]:,} of {whole[1]:,} dimensions."
    if beyond:
        extent += f" {100 * beyond:.1f} % of the numbers lie beyond the colours; hovering tells them."
    return _card(
        "positions",
        "What is added for each place",
        f"The model’s {escape(kind)} positional encoding, the same for every text. {extent}",
        _scale("diverging", "value", [(0, f"−{end:.2g}"), (0.5, "0"), (1, f"{end:.2g}")]),
        '<div class="plot" data-figure="positions" data-stack="positions" data-index="0"></div>',
    )


def parameters(counts: Mapping[str, int]) -> str:
    """How many numbers each part has."""
    total = sum(counts.values())
    return _card(
        "parameters",
        "Where the parameters are",
        f"{total:,} numbers in all.",
        "",
        '<div class="plot" data-figure="parameters"></div>',
    )


def times(timings: Timings) -> str:
    """Where the call's time went."""
    return _card(
        "times",
        "Where the time went",
        f"{timings.total_seconds * 1000:.1f} ms from the call to its answer. The first call also waits, in the queue, "
        "for its graph to be loaded.",
        "",
        '<div class="plot" data-figure="times"></div>',
    )


def pair(*cards: str) -> str:
    """Cards side by side where there is room; empty ones are left out."""
    kept = [card for card in cards if card]
    return f'<div class="two">{"".join(kept)}</div>' if len(kept) > 1 else "".join(kept)


def bottom(result: InspectResult) -> str:
    """Where the page comes from."""
    return (
        f"<footer>Made by encserve inspect from {escape(result.model)}, version {escape(result.version)}. "
        "Layers and heads count from 0. Attention weights and similarities are exact to 3 digits.</footer>"
    )


def _card(name: str, title: str, lead: str, scale: str, content: str) -> str:
    return (
        f'<section class="card" id="{name}"><div class="head-row"><div><h2>{title}</h2><p class="lead">{lead}</p></div>'
        f"{scale}</div>{content}</section>"
    )


def _scale(name: str, title: str, marks: Sequence[tuple[float, str]]) -> str:
    """A colour bar with its title; a mark's place is from 0 to 1."""
    spans = "".join(f'<span style="left:{place:.1%}">{text}</span>' for place, text in marks)
    return (
        f'<div class="scale"><span class="name">{title}</span><div class="bar" style="background:var(--{name})"></div>'
        f'<div class="marks">{spans}</div></div>'
    )


def _left_out(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    listed = ", ".join(map(str, layers))
    return f'<p class="note">Left out, so that the page stays small: {listed}. --layers chooses which are shown.</p>'
