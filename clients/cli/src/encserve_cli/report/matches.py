"""A query against a document: which of their vectors met, how strongly, and what that added to the score."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encserve_client import Array
from encserve_client.scoring import Similarity

MOST_COLUMNS = 512  # of one picture
_MOST_NUMBERS = 400_000  # of all pictures of a page: some 3 MB


@dataclass(frozen=True, eq=False, slots=True)
class Side:
    """A text and its vectors.

    Attributes:
        text: The text.
        names: What stands for each vector: the token that it comes from.
        vectors: (n, width).
    """

    text: str
    names: tuple[str, ...]
    vectors: Array


@dataclass(frozen=True, eq=False, slots=True)
class Match:
    """What MaxSim makes of n vectors of a query and m ≥ 1 of a document, all in float32.

    Attributes:
        products: (n, m), the dot products.
        best: (n,), the place of each row's largest.
        added: (n,), what each vector of the query added to the score: they sum to what `maxsim` returns.
    """

    products: npt.NDArray[np.float32]
    best: npt.NDArray[np.int64]
    added: npt.NDArray[np.float32]


def match(query: Array, document: Array, similarity: Similarity) -> Match:
    """Compares (n, width) with (m, width), m ≥ 1."""
    products = query.astype(np.float32) @ document.astype(np.float32).T  # (n, m)
    largest = products.max(axis=1)
    return Match(products, products.argmax(axis=1), largest / len(query) if similarity == "meanmaxsim" else largest)


def columns_to_show(found: Match, most: int) -> list[int]:
    """The places of at most so many vectors of the document, ascending: those that are most like one of the query."""
    most_like = np.argsort(-found.products.max(axis=0), kind="stable")
    counted = dict.fromkeys(found.best.tolist())  # each is the frame of a row
    return sorted([*counted, *(it for it in most_like.tolist() if it not in counted)][: max(most, len(counted))])


def pictured(documents: Sequence[Side], n_query_vectors: int) -> list[bool]:
    """Which documents get a picture, so that the page stays small: each that still fits, from the first on."""
    numbers, fits = 0, []
    for document in documents:
        size = n_query_vectors * min(len(document.vectors), MOST_COLUMNS)
        fits.append(numbers + size <= _MOST_NUMBERS)
        numbers += size if fits[-1] else 0
    return fits
