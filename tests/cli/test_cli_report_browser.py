"""Tests of the HTML reports in a real browser.

They test drawing, layout, mouse actions, and the protection against scripts in texts.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from browser import OpenPage, chromium
from made_inspections import TOKENS, make_inspection
from made_matches import match_page, side_of
from playwright.sync_api import Browser

from encserve_cli.report.numbers import cosine_similarity, state_norms
from encserve_cli.report.page import build_page

pytestmark = pytest.mark.system

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "<s>",
    "שלום",
    "日本語",
    "a",
    "a",
    "%{z}",
    "$x$",
)
# Returns for each figure: the name, the number of drawn marks, and the shortest side of the drawing areas in pixels.
DRAWN = """() => [...document.querySelectorAll(".plot")].map((box) => {
    const drawn = [...box.querySelectorAll("svg.main-svg")].map((it) => it.getBoundingClientRect());
    const marks = box.querySelectorAll(".hm image, .trace.scatter path, .trace.bars path").length;
    return {name: box.dataset.figure, marks, size: Math.min(...drawn.map((it) => Math.min(it.width, it.height)))};
})"""
# Returns the elements that extend beyond the right edge of the window.
WIDER = """() => [...document.querySelectorAll("main *")]
    .filter((it) => !it.closest("svg") && it.getBoundingClientRect().right > window.innerWidth + 0.5)
    .map((it) => it.outerHTML.slice(0, 90))"""

TIP_FITS = """() => {
    const tip = document.getElementById("tip").getBoundingClientRect();
    return 0 <= tip.left && tip.left < tip.right && tip.right <= window.innerWidth;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of an inspection with 6 layers and 12 heads, and return its path."""
    return _write(tmp_path_factory.mktemp("usual"), "I understand this, I think")


@pytest.fixture(scope="module", params=[(1400, "light"), (390, "dark")], ids=["wide, light", "narrow, dark"])
def opened(request: pytest.FixtureRequest, browser: Browser, usual: Path) -> Iterator[OpenPage]:
    """Open the page of the fixture `usual` in a wide or a narrow window.

    All tests share the opened page, so a test must not change it.
    """
    width, scheme = request.param
    it = OpenPage(browser, usual, width, scheme=scheme)
    yield it
    it.close()


def _write(folder: Path, text: str | None, *, n_layers: int = 6, n_heads: int = 12, **options: object) -> Path:
    path = folder / "report.html"
    result, model = make_inspection(n_layers, n_heads, 64, max_sequence_tokens=128, **options)  # type: ignore[arg-type]
    path.write_text(build_page(result, model, text), encoding="utf-8", newline="\n")
    return path


def test_everything_is_drawn_and_fits(opened: OpenPage) -> None:
    figures = opened.page.evaluate(DRAWN)
    assert [figure["name"] for figure in figures] == [
        *["attention"] * 13,
        "entropy",
        *["similarity"] * 7,
        *("norms", "positions"),
    ]
    assert all(figure["marks"] >= 1 and figure["size"] >= 50 for figure in figures), figures
    assert opened.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") == 0
    assert opened.page.evaluate(WIDER) == []
    assert opened.complaints == []


def test_the_tooltip_shows_tokens_and_number(opened: OpenPage) -> None:
    """Hover over the large attention map, a small attention map, a similarity map and a point of a line.

    For each of the four, the tooltip shows the tokens and the number.
    """
    it = opened
    result, _ = make_inspection(6, 12, 64)
    assert result.attention is not None
    assert result.hidden_states is not None
    weight = result.attention[0, 0, 2, 1]
    assert it.hover("#large", 1.5 / 8, 2.5 / 8) == f"understand 2 attends to i 1 {weight:.3f} layer 0, head 0"
    weight = result.attention[0, 9, 7, 3]
    assert (
        it.hover(".head:nth-child(10)", 3.5 / 8, 7.5 / 8) == f"[SEP] 7 attends to this 3 {weight:.3f} layer 0, head 9"
    )
    cosine = cosine_similarity(result.hidden_states)[6, 1, 5]
    assert it.hover("figure:nth-child(7)", 5.5 / 8, 1.5 / 8) == f"i 1 and i 5 {cosine:.3f} after layer 5"
    assert it.page.evaluate(TIP_FITS)
    it.page.mouse.move(2, 2)
    it.page.wait_for_selector("#tip", state="hidden")
    norms = state_norms(result.hidden_states)[6]
    token = int(norms.argmax())  # no other point is near this point
    it.page.locator("#norms .trace.scatter").nth(token).locator("path.point").last.hover(force=True)
    it.page.wait_for_selector("#tip", state="visible")
    said = " ".join((it.page.locator("#tip").text_content() or "").split())
    assert said == f"{TOKENS[token]} {token} {norms[token]:.2f} norm, after layer 5"
    it.page.mouse.move(2, 2)
    it.page.wait_for_selector("#tip", state="hidden")
    assert it.complaints == []


def test_choosing_a_layer_and_a_head(browser: Browser, usual: Path) -> None:
    """Choose a layer and a head with the keyboard. The maps show this layer and this head.

    A click on a cell of the overview selects both a layer and a head. If the browser changes to a dark theme, the
    colours of the page change.
    """
    it = OpenPage(browser, usual, 1400)
    result, _ = make_inspection(6, 12, 64)
    assert result.attention is not None
    it.page.get_by_role("radio", name="0").press("ArrowLeft")
    it.page.get_by_role("radio", name="5").press("ArrowLeft")
    it.wait()
    it.page.get_by_role("button", name="head 7").press("Enter")
    it.wait()
    assert it.page.locator("#which").text_content() == "Layer 4, head 7"
    assert it.page.get_by_role("button", pressed=True).all_text_contents() == ["head 7"]
    shown = it.page.evaluate("[...document.getElementById('large').data[0].z[3]]")
    assert shown == pytest.approx(result.attention[4, 7, 3].tolist(), abs=2e-5)
    small = it.page.evaluate("[...document.querySelector('.head:nth-child(3) .plot').data[0].z[3]]")
    assert small == pytest.approx(result.attention[4, 2, 3].tolist(), abs=2e-5)
    overview = it.page.locator('.plot[data-figure="entropy"]')
    overview.scroll_into_view_if_needed()
    box = overview.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    it.page.mouse.click(box["x"] + box["width"] * 11.5 / 12, box["y"] + box["height"] * 1.5 / 6)
    it.wait_until("document.getElementById('which').textContent === 'Layer 1, head 11'")
    it.wait()
    colour = "getComputedStyle(document.querySelector('#large .ytick text')).fill"
    assert it.page.evaluate(colour) == "rgb(60, 68, 82)"
    it.page.emulate_media(color_scheme="dark")
    it.wait_until(f"{colour} === 'rgb(180, 189, 202)'")
    assert it.complaints == []
    it.close()


@pytest.mark.parametrize("width", [1200, 390])
def test_a_query_against_documents(browser: Browser, tmp_path: Path, width: int) -> None:
    """The figures of a short and of a long document are drawn and fit into the window.

    Markup in tokens is shown as text.
    """
    sides = [side_of(len(HOSTILE), *HOSTILE), side_of(300), side_of(12)]
    path = tmp_path / "met.html"
    path.write_text(match_page(*sides), encoding="utf-8", newline="\n")
    it = OpenPage(browser, path, width)
    figures = it.page.evaluate(DRAWN)
    assert [figure["name"] for figure in figures] == ["match", "match"]
    assert all(figure["marks"] >= 1 and figure["size"] >= 50 for figure in figures), figures
    product = (sides[0].vectors @ sides[2].vectors.T)[8, 0]
    said = it.hover("section:last-of-type", 0.5 / 12, 8.5 / 9)
    assert said == f"$x$ 8 and w0 0 {product:.4f}"
    assert it.page.evaluate(WIDER) == []
    assert it.page.locator("img").count() == 0
    assert it.complaints == []
    it.close()


def test_a_hostile_text_is_only_text(browser: Browser, tmp_path: Path) -> None:
    """Markup in texts and tokens is shown as text. It creates no element and runs no script."""
    path = _write(tmp_path, " ".join(HOSTILE), n_layers=2, n_heads=2, tokens=HOSTILE)
    it = OpenPage(browser, path, 390)
    said = it.hover("#large", 0.5 / 9, 1.5 / 9)
    assert said.startswith("</script><script>alert(2)</script> 1 attends to <img src=x onerror=alert(1)> 0 ")
    assert it.page.evaluate(TIP_FITS)
    assert it.page.locator("img").count() == 0
    assert it.page.locator("script").count() == 3
    assert it.page.locator("h1").text_content() == " ".join(HOSTILE)
    names = it.page.locator("#large .ytick text").all_text_contents()
    assert [name.strip("\u2068\u2069") for name in names][2:7] == ["<s>", "שלום", "日本語", "a", "a"]
    assert it.page.evaluate(WIDER) == []
    assert it.complaints == []
    it.close()


def test_the_policy_blocks_inserted_elements(browser: Browser, usual: Path) -> None:
    """The test inserts an image with an event handler into the page.

    The content security policy blocks the handler, and blocks the request for the image.
    """
    it = OpenPage(browser, usual, 1400)
    it.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=http://192.0.2.1/x onerror=\"run=1\">')")
    it.page.wait_for_timeout(200)
    assert it.page.evaluate("typeof run") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in it.complaints)
    assert not [complaint for complaint in it.complaints if complaint.startswith("request")]
    it.close()


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "n_tokens", "figures"),
    [(1, 1, 1, 1 + 2 + 2), (1, 2, 3, 3 + 1 + 2 + 2), (12, 12, 64, 13 + 1 + 13 + 2), (2, 2, 256, 3 + 1 + 3 + 2)],
)
def test_figures_of_every_size_fit(
    browser: Browser, tmp_path: Path, n_layers: int, n_heads: int, n_tokens: int, figures: int
) -> None:
    """Draw pages with one token and one layer, and pages with many tokens or layers.

    The figures fit into the window, and the token names do not overlap.
    """
    path = _write(tmp_path, "word " * n_tokens, n_layers=n_layers, n_heads=n_heads, tokens=n_tokens)
    it = OpenPage(browser, path, 390)
    drawn = it.page.evaluate(DRAWN)
    assert len(drawn) == figures
    assert all(figure["marks"] >= 1 for figure in drawn), drawn
    assert it.page.evaluate(WIDER) == []
    names = it.page.locator("#large .ytick text").all()
    boxes = [box for box in (name.bounding_box() for name in names) if box]
    assert all(above["y"] + above["height"] * 0.8 <= below["y"] + 1 for above, below in pairwise(boxes))
    it.page.set_viewport_size({"width": 1400, "height": 900})
    it.wait_until("document.getElementById('large').clientWidth > 400")
    it.page.wait_for_timeout(300)
    it.wait()
    assert it.page.evaluate(WIDER) == []
    assert it.complaints == []
    it.close()
