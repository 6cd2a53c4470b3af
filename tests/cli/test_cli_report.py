"""Tests of the HTML reports of `inspect` and `similarity`, without a browser.

They test the numbers, the encoding of the numbers, and the text of the page.
"""

import base64
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_inspections import make_inspection, make_model
from made_matches import match_page, side_of, vectors_of

from encserve_cli.report import figures, labels, matches, numbers, stacks
from encserve_cli.report.matches import match
from encserve_cli.report.page import build_page
from encserve_client import maxsim
from encserve_client.results import Timings
from encserve_client.scoring import MaxSimilarity


def data_of(page: str) -> dict[str, Any]:
    """Return the JSON data of the page, which the page's script draws."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def unpacked(stack: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Unpack the numbers of a page as an array of shape (matrices, rows, columns).

    The script of the page unpacks the numbers in the same way.
    """
    values = np.frombuffer(base64.b64decode(stack["data"]), "<u2").reshape(-1, stack["rows"], stack["columns"])
    return np.asarray(stack["low"] + stack["step"] * values)


def test_norms_and_cosines() -> None:
    """Compute norms and cosines of four vectors.

    Two vectors are at a right angle, two have opposite directions, and one is zero. All cosines of the zero vector
    are 0.
    """
    states = np.array([[[3, 4], [-8, 6], [-6, -8], [0, 0]]], np.float16)
    assert numbers.state_norms(states).tolist() == [[5, 10, 10, 0]]
    cosines = numbers.cosine_similarity(states)
    np.testing.assert_allclose(cosines, [[[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]]], atol=1e-15)
    # The four vectors make six pairs. The cosine of one pair is -1, and the cosines of the others are 0.
    np.testing.assert_allclose(numbers.mean_similarity(cosines), [-1 / 6])
    assert numbers.mean_similarity(np.ones((2, 1, 1))).tolist() == [1, 1]


def test_entropy() -> None:
    """The entropy of attention weights is 0 bits for a single weight of 1, and 2 bits for four equal weights.

    The entropy is 1.5 bits for the weights 0.5, 0.25 and 0.25, and 1 bit for two equal weights.
    """
    attention = np.array([[[[0, 1, 0, 0], [0.25] * 4, [0.5, 0.25, 0.25, 0], [0.5, 0.5, 0, 0]]]], np.float32)
    np.testing.assert_allclose(numbers.attention_entropy(attention), [[[0, 2, 1.5, 1]]])


def test_strongest() -> None:
    """For each token, `strongest` returns the position with the largest mean weight over the heads."""
    heads = np.array([[[0.9, 0.1], [0.6, 0.4]], [[0.5, 0.5], [0.0, 1.0]]])
    places, weights = numbers.strongest(heads)
    assert places.tolist() == [0, 1]
    np.testing.assert_allclose(weights, [0.7, 0.7])


def test_time_and_shares() -> None:
    parts = numbers.time_parts(Timings(0.001, 0.002, 0.003, 0.010, messages=1, attempts=1))
    assert parts == pytest.approx({"tokenize": 0.001, "queue": 0.002, "compute": 0.003, "wire and the rest": 0.004})
    assert numbers.time_parts(Timings(1, 1, 1, 2, messages=1, attempts=1))["wire and the rest"] == 0
    assert numbers.shares({"embedding": 3, "norm": 1}) == {"embedding": 0.75, "norm": 0.25}
    assert numbers.shares({"other": 0}) == {"other": 0}


@pytest.mark.parametrize(
    ("count", "at_most", "indices"),
    [(3, 5, [0, 1, 2]), (12, 3, [0, 6, 11]), (12, 2, [0, 11]), (12, 1, [11]), (5, 5, [0, 1, 2, 3, 4])],
)
def test_spread(count: int, at_most: int, indices: list[int]) -> None:
    assert numbers.spread(count, at_most) == indices


def test_quantise() -> None:
    """`quantise` rounds numbers to 65536 evenly spaced values from a lowest to a highest value.

    Both ends are exact, and the error of other numbers is at most half a step. NaN becomes the lowest value.
    """
    values = np.linspace(-1, 1, 1001)
    packed = numbers.quantise(values, -1, 1)
    assert (packed[0], packed[-1]) == (0, 65535)
    np.testing.assert_allclose(packed * (2 / 65535) - 1, values, atol=1 / 65535)
    assert numbers.quantise(np.array([np.nan, np.inf, -np.inf, 7]), 0, 1).tolist() == [0, 65535, 0, 65535]
    assert numbers.widest(np.array([-3.0, 2.0, np.inf])) == 3
    assert numbers.widest(np.zeros(2)) == 1


def test_a_page_holds_the_numbers() -> None:
    """The numbers in the page differ from those of the inspection by at most 2e-5."""
    result, model = make_inspection(n_layers=2, n_heads=3, d_model=16, tokens=5, max_sequence_tokens=20)
    assert result.attention is not None
    assert result.hidden_states is not None
    assert result.positions is not None
    data = data_of(build_page(result, model, "a text"))
    attention = unpacked(data["stacks"]["attention"])
    np.testing.assert_allclose(attention, result.attention.reshape(6, 5, 5), atol=1e-5)
    cosines = numbers.cosine_similarity(result.hidden_states)
    np.testing.assert_allclose(unpacked(data["stacks"]["similarity"]), cosines, atol=2e-5)
    np.testing.assert_allclose(unpacked(data["stacks"]["positions"])[0].T, result.positions, atol=2e-5)
    assert data["attention"]["layers"] == [0, 1]
    assert set(data["figures"]) == {
        *("attention", "entropy", "similarity", "norms", "positions", "parameters", "times")
    }


def test_a_page_needs_nothing_else() -> None:
    """The page loads no other file. Its content security policy allows only the scripts in the page."""
    result, model = make_inspection(n_layers=1, n_heads=2, d_model=8, tokens=3)
    page = build_page(result, model)
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=|@import|url\(", ours)
    assert "default-src 'none'; script-src 'sha256-" in page
    assert page.count("<script>") == 2


def test_sections_without_numbers_are_left_out() -> None:
    result, model = make_inspection(n_layers=1, n_heads=2, d_model=8, tokens=3, position="none")
    assert 'id="positions"' not in build_page(result, model)
    bare = dataclasses.replace(result, attention=None, hidden_states=None, attention_layers=(), hidden_state_layers=())
    page = build_page(bare, dataclasses.replace(model, parameters={}))
    for name in ("attention", "similarity", "norms", "positions", "parameters"):
        assert f'id="{name}"' not in page
    assert 'id="times"' in page
    assert set(data_of(page)["figures"]) == {"times"}


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
    page = build_page(some, model)
    assert data_of(page)["attention"]["layers"] == [2, 5]
    assert [it in page for it in ("input of layer 0", "after layer 2", "after layer 5", "after layer 0")] == [
        *(True, True, True, False)
    ]


def test_what_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_NUMBERS", 3 * 2 * 4 * 4)  # room for the attention of three layers
    result, model = make_inspection(n_layers=6, n_heads=2, d_model=8, tokens=4)
    page = build_page(result, model)
    assert data_of(page)["attention"]["layers"] == [0, 2, 5]
    assert "Left out, so that the page stays small: 1, 3, 4." in page


def test_colours_end_where_nearly_all_numbers_do() -> None:
    """In a position table of 10,000 values, most values are near 0.05, and 50 values are 2.

    The colour scale ends near the small values, so that their differences are visible.
    """
    table = np.random.default_rng(0).normal(0, 0.05, (100, 100)).astype(np.float32)
    table[0, :50] = 2
    end, beyond = numbers.contrast(table)
    assert 0.1 < end < 0.3
    assert beyond == pytest.approx(0.01, abs=1e-3)
    sinusoid = np.sin(np.arange(10_000, dtype=np.float32)).reshape(100, 100)
    assert numbers.contrast(sinusoid) == (numbers.widest(sinusoid), 0.0)
    assert numbers.contrast(np.zeros((2, 2), np.float32)) == (1.0, 0.0)


def test_positions_are_cut_not_thinned() -> None:
    """The page shows only the first positions and dimensions of a large position table.

    If the page showed every second value instead, waves in the table would appear with a wrong length.
    """
    result, model = make_inspection(n_layers=1, n_heads=1, d_model=400, tokens=2, max_sequence_tokens=600)
    page = build_page(result, model)
    assert "The first 512 of 600 places and the first 384 of 400 dimensions." in page
    assert result.positions is not None
    shown = unpacked(data_of(page)["stacks"]["positions"])[0]
    np.testing.assert_allclose(shown, result.positions[:512, :384].T, atol=2e-5)


def test_pages_stay_small() -> None:
    """A usual page has less than 6 MB, and a large page less than 13 MB.

    The plotly library takes 4.8 MB, and each number of a matrix takes 2.7 bytes.
    """
    usual = build_page(*make_inspection(n_layers=6, n_heads=12, d_model=384, tokens=8))
    assert len(usual) < 6e6
    large = build_page(*make_inspection(n_layers=12, n_heads=12, d_model=32, tokens=128, position="none"))
    assert len(large) < 13e6


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


def test_clipping_counts_columns() -> None:
    assert labels.columns("日本語a\u0301") == 7
    assert labels.clip("日本語", 6) == "日本語"
    assert labels.clip("日本語", 5) == "日本…"
    assert labels.clip("understand", 6) == "under…"


def test_markup_is_only_text() -> None:
    assert labels.for_plotly("<b>&amp;</b>") == "\u2068&lt;b&gt;&amp;amp;&lt;/b&gt;\u2069"
    hostile = "</script><script>alert(1)</script>"
    result, model = make_inspection(n_layers=1, n_heads=1, d_model=8, tokens=(hostile, "a"))
    page = build_page(dataclasses.replace(result, model=hostile), model, hostile)
    assert "<script>alert" not in page


@given(n=st.integers(1, 12), m=st.integers(1, 30), by=st.sampled_from(["maxsim", "meanmaxsim"]))
def test_what_the_vectors_add_is_the_score(n: int, m: int, by: MaxSimilarity) -> None:
    found = match(vectors_of(n), vectors_of(m), by)
    assert found.added.sum() == pytest.approx(maxsim(vectors_of(n), vectors_of(m), by), rel=1e-5, abs=1e-6)
    assert found.products[np.arange(n), found.best].tolist() == found.products.max(axis=1).tolist()


@pytest.mark.parametrize("by", ["maxsim", "meanmaxsim"])
def test_a_query_against_documents(by: MaxSimilarity) -> None:
    """The page shows the dot products of all pairs of vectors, and a frame around the largest product of each row.

    A bar shows how much a query vector adds to the score. The sum of all bars is the score.
    """
    query, document = side_of(3, "[MASK]", "a", "a"), side_of(5)
    page = match_page(query, document, side_of(0), by=by)
    products, frames, bars = data_of(page)["figures"]["match-0"]["data"]
    want = query.vectors @ document.vectors.T
    np.testing.assert_allclose(products["z"], want, atol=1e-4)
    assert [products["x"].index(it) for it in frames["x"]] == want.argmax(axis=1).tolist()
    assert len(set(frames["y"])) == 3, "a word that occurs twice must have two rows"
    score = maxsim(query.vectors, document.vectors, by)
    assert sum(bars["x"]) == pytest.approx(score, rel=1e-5)
    assert f"<h2>1. {score:.4f}</h2>" in page
    assert "<h2>2. No vectors</h2>" in page
    assert "match-1" not in data_of(page)["figures"]


def test_of_long_documents_what_is_like_the_query_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a long document, the page shows only the vectors that are most similar to the query.

    The text of the page says how many vectors are left out.
    """
    monkeypatch.setattr(matches, "MOST_COLUMNS", 6)
    monkeypatch.setattr("encserve_cli.report.page.MOST_COLUMNS", 6)
    monkeypatch.setattr(matches, "_MOST_NUMBERS", 4 * 6)
    query, document = side_of(4), side_of(100)
    page = match_page(query, document, side_of(7), side_of(0))
    products, frames, bars = data_of(page)["figures"]["match-0"]["data"]
    assert len(products["x"]) == 6
    assert set(frames["x"]) <= set(products["x"])
    assert sum(bars["x"]) == pytest.approx(maxsim(query.vectors, document.vectors), rel=1e-5)
    assert "the 6 of its 100 vectors that are most similar to a vector of the query" in page
    assert "Its 7 vectors are left out, so that the page stays small" in page
    assert list(data_of(page)["figures"]) == ["match-0"]


def test_hostile_words_of_a_match_are_only_text() -> None:
    hostile = "</script><script>alert(1)</script>"
    page = match_page(side_of(3, hostile, "שלום", "🙂"), side_of(1, hostile))
    assert "<script>alert" not in page


def test_figures() -> None:
    """The figure of norms has one line for each token if there are few tokens.

    Many tokens share one line with gaps. If the norms have a wide range, their axis has a log scale.
    """
    few = figures.norms_lines(np.ones((3, 2)), (0, 1, 2), ["a", "a"])
    assert [trace.name.strip("\u2068\u2069") for trace in few.data] == ["a", "a", "mean"]
    many = figures.norms_lines(np.ones((3, 20)), (0, 1, 2), [str(i) for i in range(20)])
    assert [trace.name for trace in many.data] == ["each token", "mean"]
    assert len(many.data[0].x) == len(many.data[0].text) == len(many.data[0].customdata) == 20 * 4
    assert figures.norms_lines(np.array([[1.0], [99.0]]), (0, 1), ["a"]).layout.yaxis.type == "log"
    assert [figures.amount(count) for count in (7, 1500, 22_713_216, 7e9)] == ["7", "1.5 k", "22.7 M", "7.0 B"]
    assert figures.parameter_bars(make_model().parameters).data[0].text[0].endswith("%")
