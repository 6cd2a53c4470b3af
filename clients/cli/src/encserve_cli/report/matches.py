"""The HTML page of `encserve similarity`: how the vectors of a query match the vectors of documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encserve_cli.report import numbers
from encserve_cli.report.page import as_items, render_page, round_finite, scale_to, shorten
from encserve_client import Array, EncodeResult
from encserve_client.scoring import Similarity

MAX_COLUMNS = 512  # in one figure
MAX_PRODUCTS = 400_000  # in all figures of a page: about 3 MB
_MAX_TEXT = 400  # characters of a document


@dataclass(frozen=True, eq=False, slots=True)
class Side:
    """A text and its vectors.

    Attributes:
        text: The text.
        names: For each vector, the name of its token.
        vectors: (n, width).
    """

    text: str
    names: tuple[str, ...]
    vectors: Array


def build_match_page(query: Side, ranking: Sequence[tuple[Side, float]], by: Similarity, result: EncodeResult) -> str:
    """Return the HTML page of a query and documents.

    Args:
        query: The query, with at least one vector.
        ranking: The documents and their scores, in the order of the page.
        by: The similarity that gave the scores.
        result: The reply with the query's vectors. The page shows the reply's model.
    """
    matches, room = [], MAX_PRODUCTS
    for place, (document, score) in enumerate(ranking, start=1):
        size = len(query.vectors) * min(len(document.vectors), MAX_COLUMNS)
        has_figure = 0 < size <= room
        room -= size if has_figure else 0
        matches.append(_match(place, query, document, score, by, has_figure=has_figure))
    data = {
        "eyebrow": "A query and its matches",
        "facts": as_items(
            {
                "model": result.model,
                "version": result.version,
                "vectors of the query": f"{len(query.vectors):,}",
                "compared by": by,
            }
        ),
        "fingerprint": result.fingerprint,
        "matches": matches,
        "footer": f"Made by encserve similarity from {result.model}, version {result.version}.",
    }
    return render_page(query.text, data)


def _match(
    place: int, query: Side, document: Side, score: float, by: Similarity, *, has_figure: bool
) -> dict[str, Any]:
    count = len(document.vectors)
    match: dict[str, Any] = {"title": f"{place}. {score:.4f}", "text": shorten(document.text, _MAX_TEXT)}
    if not count:
        return match | {"title": f"{place}. No vectors", "lead": "This document has no vectors."}
    if not has_figure:
        return match | {
            "lead": f"This document's {count:,} vectors are left out, so that the page stays small. Try shorter texts."
        }
    products = query.vectors.astype(np.float32) @ document.vectors.astype(np.float32).T  # (query, document)
    largest, best = products.max(axis=1), products.argmax(axis=1)  # (query,)
    # Choose the column with the largest product of each row. Then choose the vectors that are most similar to a query
    # vector.
    most_similar = np.argsort(-products.max(axis=0), kind="stable").tolist()
    columns = sorted([*dict.fromkeys([*best.tolist(), *most_similar])][: max(MAX_COLUMNS, len(set(best.tolist())))])
    shown = f"Each of the {count:,} columns is a vector of the document"
    if len(columns) < count:
        shown = (
            f"Each column is a vector of the document (the {len(columns):,} of {count:,} vectors that are most similar "
            "to a vector of the query)"
        )
    return match | {
        "lead": f"Each row is a vector of the query. {shown}. The colour is the dot product. A frame marks the "
        "largest product of a row. A bar shows how much this product adds to the score.",
        "figure": scale_to(numbers.largest_magnitude(products))
        | {
            "rows": query.names,
            "columns": [{"place": column, "name": document.names[column]} for column in columns],
            "products": round_finite(products[:, columns]),
            "best": [columns.index(column) for column in best.tolist()],
            "added": round_finite(largest / (len(largest) if by == "meanmaxsim" else 1), 7),
        },
    }
