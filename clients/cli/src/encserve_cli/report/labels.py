"""What stands for each token on a page: short names for axes, long ones for hovering, safe for plotly."""

import unicodedata

from encserve_client import SequenceInfo

AXIS_COLUMNS = 14  # of a name beside a map
HOVER_COLUMNS = 60
# Around a name, so that a right-to-left one does not turn the words beside it round.
_FIRST_STRONG_ISOLATE, _POP_ISOLATE = "\u2068", "\u2069"


def token_names(sequence: SequenceInfo) -> tuple[str, ...]:
    """A name for each token: its string, or its id, or its place where it was sent as a vector."""
    if sequence.tokens is not None:
        return tuple(visible(token) for token in sequence.tokens)
    if sequence.token_ids is not None:
        return tuple(str(token_id) for token_id in sequence.token_ids.tolist())
    return tuple(str(place) for place in range(sequence.token_count))


def visible(token: str) -> str:
    """A token without characters that draw nothing or steer the text around them: those show as their number."""
    shown = "".join(f"U+{ord(it):04X}" if unicodedata.category(it)[0] in "CZ" and it != " " else it for it in token)
    if shown.strip() != shown:
        shown = shown.replace(" ", "␣")
    return shown or "(empty)"


def columns(text: str) -> int:
    """How wide a text is, in columns: East Asian wide characters take two, combining ones none."""
    return sum(_columns(it) for it in text)


def clip(text: str, width: int) -> str:
    """A text of at most so many columns; what is cut off becomes an ellipsis."""
    if columns(text) <= width:
        return text
    kept, used = "", 0
    for it in text:
        used += _columns(it)
        if used > width - 1:
            break
        kept += it
    return kept + "…"


def for_plotly(text: str) -> str:
    """A text that plotly draws as it stands.

    plotly reads <b>, <a href=…> and entities in every text; nothing that could be markup is left.
    """
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"{_FIRST_STRONG_ISOLATE}{safe}{_POP_ISOLATE}"


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
