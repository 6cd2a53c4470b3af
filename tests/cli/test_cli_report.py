"""Tests of the HTML pages of `inspect` and `similarity` without a browser: their numbers, their data and their size."""

import base64
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from made_inspections import make_inspection
from made_matches import match_page, side_of

from encserve_cli.report import labels, matches, numbers, page
from encserve_cli.report.page import build_page
from encserve_client import maxsim
from encserve_client.scoring import MaxSimilarity

HOSTILE = "</script><script>alert(1)</script>"
PARTS = ("attention", "similarity", "norms", "positions")


def data_of(html: str) -> dict[str, Any]:
    """Return the JSON data of a page. Like a browser, refuse NaN and infinity."""
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)
    data: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return data


def unpacked(stack: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Unpack matrices as the page's script does, to the shape (matrices, rows, columns)."""
    values = np.frombuffer(base64.b64decode(stack["data"]), "<u2").reshape(-1, stack["rows"], stack["columns"])
    return np.asarray(stack["low"] + stack["step"] * values)


def test_norms_and_cosines() -> None:
    """Compute norms and cosines of four vectors.

    Among the vectors are a pair at a right angle, a pair with opposite directions, and a zero vector. All cosines of
    the zero vector are 0.
    """
    states = np.array([[[3, 4], [-8, 6], [-6, -8], [0, 0]]], np.float16)
    assert numbers.state_norms(states).tolist() == [[5, 10, 10, 0]]
    cosines = numbers.cosine_similarity(states)
    np.testing.assert_allclose(cosines, [[[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]]], atol=1e-15)
    # The four vectors make six pairs. The cosine of one pair is -1, and the cosines of the other pairs are 0.
    np.testing.assert_allclose(numbers.mean_similarity(cosines), [-1 / 6])
    assert numbers.mean_similarity(np.ones((2, 1, 1))).tolist() == [1, 1]


def test_entropy() -> None:
    """The entropy of attention weights is 0 bits for a single weight of 1, and 2 bits for four equal weights.

    The entropy is 1.5 bits for the weights 0.5, 0.25 and 0.25, and 1 bit for two equal weights.
    """
    attention = np.array([[[[0, 1, 0, 0], [0.25] * 4, [0.5, 0.25, 0.25, 0], [0.5, 0.5, 0, 0]]]], np.float32)
    np.testing.assert_allclose(numbers.attention_entropy(attention), [[[0, 2, 1.5, 1]]])


@pytest.mark.parametrize(
    ("count", "at_most", "indices"),
    [(3, 5, [0, 1, 2]), (12, 3, [0, 6, 11]), (12, 2, [0, 11]), (12, 1, [11]), (5, 5, [0, 1, 2, 3, 4])],
)
def test_spaced_indices(count: int, at_most: int, indices: list[int]) -> None:
    assert numbers.spaced_indices(count, at_most) == indices


def test_outliers_do_not_stretch_the_colour_scale() -> None:
    """In a position table of 10,000 values, most values are near 0.05, and 50 values are 2.

    The colour scale ends near the small values, so that their differences are visible.
    """
    table = np.random.default_rng(0).normal(0, 0.05, (100, 100)).astype(np.float32)
    table[0, :50] = 2
    end, beyond = numbers.colour_limit(table)
    assert 0.1 < end < 0.3
    assert beyond == pytest.approx(0.01, abs=1e-3)
    sinusoid = np.sin(np.arange(10_000, dtype=np.float32)).reshape(100, 100)
    assert numbers.colour_limit(sinusoid) == (numbers.largest_magnitude(sinusoid), 0.0)
    assert numbers.colour_limit(np.zeros((2, 2), np.float32)) == (1.0, 0.0)


def test_names_of_tokens() -> None:
    """The name of a token is its string. Without a string it is the token's id, and without an id its position.

    Invisible characters, and characters that change the text direction, are replaced.
    """
    result, _ = make_inspection(n_layers=1, n_heads=1, d_model=8, tokens=("a b", " ", "", "\u202ex", "日本"))
    sequence = result.sequence
    assert labels.token_names(sequence) == ("a b", "␣", "(empty)", "U+202Ex", "日本")
    without = dataclasses.replace(sequence, tokens=None)
    assert labels.token_names(without) == ("101", "198", "295", "392", "489")
    assert labels.token_names(dataclasses.replace(without, token_ids=None)) == ("0", "1", "2", "3", "4")


def test_a_page_has_the_numbers() -> None:
    """A matrix in the page differs from the matrix of the inspection by at most 2e-5."""
    result, model = make_inspection(n_layers=2, n_heads=3, d_model=16, tokens=5, max_sequence_tokens=20)
    assert result.attention is not None
    assert result.hidden_states is not None
    assert result.positions is not None
    data = data_of(build_page(result, model, "a text"))
    attention = unpacked(data["attention"]["matrices"])
    np.testing.assert_allclose(attention, result.attention.reshape(6, 5, 5), atol=1e-5)
    entropy = numbers.attention_entropy(result.attention).mean(axis=-1)
    np.testing.assert_allclose(data["attention"]["entropy"], entropy, atol=1e-4)
    cosines = numbers.cosine_similarity(result.hidden_states)
    np.testing.assert_allclose(unpacked(data["similarity"]["matrices"]), cosines, atol=2e-5)
    np.testing.assert_allclose(unpacked(data["positions"]["matrices"])[0].T, result.positions, atol=2e-5)
    np.testing.assert_allclose(data["norms"]["norms"], numbers.state_norms(result.hidden_states), atol=1e-4)
    assert not data["norms"]["log"]
    parameters, times = data["totals"]
    assert [bar["text"] for bar in times["bars"]] == ["0.400 ms", "0.100 ms", "11.700 ms", "4.100 ms"]
    shares = ["488,352 · 98.7%", "2,176 · 0.4%", "4,256 · 0.9%", "128 · 0.0%"]
    assert [bar["text"] for bar in parameters["bars"]] == shares
    assert [bar["width"] for bar in parameters["bars"]] == ["100.00%", "0.45%", "0.87%", "0.03%"]


def test_numbers_that_json_lacks() -> None:
    """NaN becomes 0 in a matrix and null in a list. Norms over a wide range have a log scale."""
    result, model = make_inspection(n_layers=1, n_heads=1, d_model=8, tokens=3)
    assert result.attention is not None
    assert result.hidden_states is not None
    result.attention[0, 0, 0] = [np.nan, 0, 1]
    data = data_of(build_page(result, model))
    assert unpacked(data["attention"]["matrices"])[0, 0].tolist() == [0, 0, 1]
    assert data["attention"]["entropy"] == [[None]]
    result.hidden_states[0] *= 99
    assert data_of(build_page(result, model))["norms"]["log"]
    result.hidden_states[1, 2] = np.nan
    assert data_of(build_page(result, model))["norms"]["norms"][1][2] is None


def test_a_page_loads_no_other_file() -> None:
    """The page loads no other file. Its content security policy allows only the scripts in the page.

    The same inspection gives the same bytes.
    """
    result, model = make_inspection(n_layers=1, n_heads=2, d_model=8, tokens=3)
    html = build_page(result, model)
    ours = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=|@import|url\(", ours)
    assert "default-src 'none'; script-src 'sha256-" in html
    assert html.count("<script>") == 2
    assert build_page(result, model) == html


def test_parts_without_numbers_are_left_out() -> None:
    result, model = make_inspection(n_layers=1, n_heads=2, d_model=8, tokens=3, position="none")
    assert [part for part in PARTS if data_of(build_page(result, model))[part] is None] == ["positions"]
    bare = dataclasses.replace(result, attention=None, hidden_states=None, attention_layers=(), hidden_state_layers=())
    data = data_of(build_page(bare, dataclasses.replace(model, parameters={})))
    assert [part for part in PARTS if data[part] is not None] == []
    assert [part["title"] for part in data["totals"]] == ["Time"]


def test_some_layers_only() -> None:
    """Inspect only some layers. The page names each inspected layer by its number in the model."""
    result, model = make_inspection(n_layers=6, n_heads=2, d_model=8, tokens=3)
    assert result.attention is not None
    assert result.hidden_states is not None
    some = dataclasses.replace(
        result,
        attention=result.attention[[2, 5]],
        attention_layers=(2, 5),
        hidden_states=result.hidden_states[[0, 3, 6]],
        hidden_state_layers=(0, 3, 6),
    )
    data = data_of(build_page(some, model))
    assert [layer["name"] for layer in data["attention"]["layers"]] == [2, 5]
    stages = ["input of layer 0", "after layer 2", "after layer 5"]
    assert [panel["stage"] for panel in data["similarity"]["panels"]] == data["norms"]["stages"] == stages


def test_layers_over_the_size_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_NUMBERS", 3 * 2 * 4 * 4)  # enough for the attention of three layers
    data = data_of(build_page(*make_inspection(n_layers=6, n_heads=2, d_model=8, tokens=4)))
    assert [layer["name"] for layer in data["attention"]["layers"]] == [0, 2, 5]
    assert unpacked(data["attention"]["matrices"]).shape == (6, 4, 4)
    assert data["attention"]["omitted"].startswith("Left out, so that the page stays small: 1, 3, 4.")


def test_positions_are_cut_not_thinned() -> None:
    """The page shows only the first positions and dimensions of a large position table.

    If the page showed every second value instead, waves in the table would appear with a wrong length.
    """
    result, model = make_inspection(n_layers=1, n_heads=1, d_model=400, tokens=2, max_sequence_tokens=600)
    data = data_of(build_page(result, model))["positions"]
    assert "The first 512 of 600 positions and the first 384 of 400 dimensions." in data["lead"]
    assert result.positions is not None
    np.testing.assert_allclose(unpacked(data["matrices"])[0].T, result.positions[:512, :384], atol=2e-5)


def test_pages_stay_small() -> None:
    """A usual page has less than 6 MB, and a large page less than 13 MB.

    The plotly library takes 4.8 MB, and each number of a matrix takes 2.7 bytes.
    """
    usual = build_page(*make_inspection(n_layers=6, n_heads=12, d_model=384, tokens=8))
    assert len(usual) < 6e6
    large = build_page(*make_inspection(n_layers=12, n_heads=12, d_model=32, tokens=128, position="none"))
    assert len(large) < 13e6


def test_markup_is_only_text() -> None:
    """Texts occur in the page only as JSON inside a script element. No text in the JSON can end this element."""
    result, model = make_inspection(n_layers=1, n_heads=1, d_model=8, tokens=(HOSTILE, "a"))
    html = build_page(dataclasses.replace(result, model=HOSTILE), model, HOSTILE)
    assert data_of(html)["heading"] == data_of(html)["tokens"][0]["name"] == HOSTILE
    matched = match_page(side_of(3, HOSTILE, "שלום", "🙂"), side_of(1, HOSTILE))
    assert data_of(matched)["matches"][0]["text"] == HOSTILE
    assert "<script>alert" not in html + matched


@pytest.mark.parametrize("by", ["maxsim", "meanmaxsim"])
def test_a_query_against_documents(by: MaxSimilarity) -> None:
    """The page has the dot products of all pairs of vectors, and marks the largest product of each row.

    The page says how much each query vector adds to the score. The sum is the score.
    """
    query, document = side_of(3, "[MASK]", "a", "a"), side_of(5)
    first, second = data_of(match_page(query, document, side_of(0), by=by))["matches"]
    figure = first["figure"]
    want = query.vectors @ document.vectors.T
    np.testing.assert_allclose(figure["products"], want, atol=1e-4)
    assert figure["best"] == want.argmax(axis=1).tolist()
    assert figure["rows"] == ["[MASK]", "a", "a"]
    score = maxsim(query.vectors, document.vectors, by)
    assert sum(figure["added"]) == pytest.approx(score, rel=1e-5)
    assert first["title"] == f"1. {score:.4f}"
    assert second["title"] == "2. No vectors"
    assert "figure" not in second


def test_a_long_document_has_the_most_similar_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a long document, the page shows only the vectors that are most similar to the query.

    The text of the page says how many vectors are left out.
    """
    monkeypatch.setattr(matches, "MAX_COLUMNS", 6)
    monkeypatch.setattr(matches, "MAX_PRODUCTS", 4 * 6)
    query, document = side_of(4), side_of(100)
    first, second, third = data_of(match_page(query, document, side_of(7), side_of(0)))["matches"]
    figure = first["figure"]
    products = query.vectors @ document.vectors.T
    best = products.argmax(axis=1).tolist()
    shown = [column["place"] for column in figure["columns"]]
    assert [shown[column] for column in figure["best"]] == best
    by_similarity = [column for column in (-products.max(axis=0)).argsort().tolist() if column not in best]
    assert shown == sorted([*set(best), *by_similarity[: 6 - len(set(best))]])
    assert sum(figure["added"]) == pytest.approx(maxsim(query.vectors, document.vectors), rel=1e-5)
    assert "the 6 of 100 vectors that are most similar to a vector of the query" in first["lead"]
    assert "This document's 7 vectors are left out, so that the page stays small" in second["lead"]
    assert "figure" not in second | third
