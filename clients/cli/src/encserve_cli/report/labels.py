"""Names of tokens, for tables and for pages."""

import unicodedata

from encserve_client import SequenceInfo


def token_names(sequence: SequenceInfo) -> tuple[str, ...]:
    """Return a name for each token: the string, or the id without strings, or the position without ids."""
    if sequence.tokens is not None:
        return tuple(visible(token) for token in sequence.tokens)
    if sequence.token_ids is not None:
        return tuple(str(token_id) for token_id in sequence.token_ids.tolist())
    return tuple(str(position) for position in range(sequence.token_count))


def visible(token: str) -> str:
    """Return a token with visible characters only.

    Control characters and unusual spaces become their code point, such as U+202E. If a token starts or ends with a
    space, its spaces become ␣.
    """
    name = "".join(
        f"U+{ord(char):04X}" if char != " " and unicodedata.category(char)[0] in "CZ" else char for char in token
    )
    if name.strip() != name:
        name = name.replace(" ", "␣")
    return name or "(empty)"
