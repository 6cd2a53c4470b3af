"""The colours of a report, for light and for dark pages.

The scales are one hue of rising darkness, and blue against orange: both read the same to the colour-blind, and in grey.
"""

Scale = tuple[str, ...]
Theme = dict[str, object]

_BLUES: Scale = ("#f7f9fc", "#dbe8f4", "#b3d1e8", "#7db1d8", "#4a8fc4", "#2569a6", "#154680", "#0b2550")
_BLUES_ON_DARK: Scale = ("#1b2029", "#1c3150", "#1f4a7c", "#2668a8", "#3b8bcd", "#6cb0e4", "#aad4f3", "#f2f9ff")
_ORANGE_BLUE: Scale = ("#7a3a06", "#bd6a1a", "#e8ad66", "#f8f5f0", "#8bbcdb", "#3479b4", "#0c3567")
_ORANGE_BLUE_ON_DARK: Scale = ("#ffc487", "#cf7d31", "#6e441f", "#1f242d", "#214f7d", "#3f8cc9", "#b4dcfb")


def even(scale: Scale) -> list[list[object]]:
    """A plotly colour scale whose colours are evenly spread."""
    return [[i / (len(scale) - 1), colour] for i, colour in enumerate(scale)]


def root(scale: Scale) -> list[list[object]]:
    """A plotly colour scale that rises with the square root, so that small numbers can be told apart."""
    return [[(i / (len(scale) - 1)) ** 2, colour] for i, colour in enumerate(scale)]


def gradients() -> dict[str, str]:
    """The scales for CSS. A `root` scale is an even one there: its marks are placed by the root instead."""
    scales = {
        "blues": _BLUES,
        "blues_on_dark": _BLUES_ON_DARK,
        "orange_blue": _ORANGE_BLUE,
        "orange_blue_on_dark": _ORANGE_BLUE_ON_DARK,
    }
    return {name: f"linear-gradient(to right, {', '.join(scale)})" for name, scale in scales.items()}


def _theme(blues: Scale, orange_blue: Scale, **colours: object) -> Theme:
    return {"scales": {"root": root(blues), "even": even(blues), "diverging": even(orange_blue)}, **colours}


LIGHT: Theme = _theme(
    _BLUES,
    _ORANGE_BLUE,
    text="#3c4452",
    strong="#161b24",
    grid="#e9ebee",
    surface="#ffffff",
    accent="#1f6fb2",
    muted="#a9b4c2",
    tokens=["#1f6fb2", "#d2691e", "#0f8f6f", "#b04a8b", "#8a6d00", "#3aa0d8", "#c2410c", "#667085"],
)
DARK: Theme = _theme(
    _BLUES_ON_DARK,
    _ORANGE_BLUE_ON_DARK,
    text="#b4bdca",
    strong="#eef2f7",
    grid="#2a313c",
    surface="#171b23",
    accent="#6db3ec",
    muted="#5b6675",
    tokens=["#6db3ec", "#f0a35e", "#4cc9a4", "#e08cc0", "#d8bd4a", "#a5d8f5", "#ff8a5c", "#a3aebd"],
)
