"""Similarities of vectors, MaxSim, and dot products of sparse weights, in NumPy.

All functions work on blocks of documents, so that they need little memory besides the vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.types.arrays import IndexedRows, Numbers

_BLOCK_NUMBERS = 2**18  # 1 MB of float32, which fits into a CPU cache
# sentence-transformers gives this score to a document without vectors.
_NO_VECTORS_SCORE = -1e9
_LEAST_NORM = np.finfo(np.float32).tiny


def _cosines(block: Numbers, query: Numbers) -> Numbers:
    norms = np.maximum(np.linalg.norm(block, axis=1), _LEAST_NORM)
    return np.asarray(block @ (query / max(np.linalg.norm(query), _LEAST_NORM)) / norms)


# Functions from (documents, width) and (width,) to the score of each document, (documents,). Distances are negative.
VECTOR_SIMILARITIES: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "cosine": _cosines,
    "dot": lambda block, query: block @ query,
    "euclidean": lambda block, query: -np.linalg.norm(block - query, axis=1),
    "manhattan": lambda block, query: -np.abs(block - query).sum(axis=1),
}
SPARSE_SIMILARITIES = ("dot", "cosine")


def vector_scores(query: Numbers, documents: Sequence[Numbers], similarity: str) -> Numbers:
    """Return the similarity of a query and each document.

    Args:
        query: (1, width) float32.
        documents: (1, width) float32 each.
        similarity: One of VECTOR_SIMILARITIES.

    Returns:
        (documents,) float32.
    """
    compare, scores = VECTOR_SIMILARITIES[similarity], np.empty(len(documents), np.float32)
    for group in _groups(np.full(len(documents), query.size)):
        scores[group] = compare(np.concatenate(documents[group]), query[0])
    return scores


def maxsim_scores(query: Numbers, documents: Sequence[Numbers], similarity: str) -> Numbers:
    """Return the MaxSim score of a query and each document (Khattab & Zaharia 2020, section 3.2).

    Args:
        query: (n, width) float32.
        documents: (m, width) float32 each. A document without vectors has the score -1e9.
        similarity: "maxsim", or "meanmaxsim" for the mean over the query's vectors.

    Returns:
        (documents,) float32.
    """
    scores = np.full(len(documents), _NO_VECTORS_SCORE, np.float32)
    lengths = np.array([len(document) for document in documents], np.int64)
    for group in _groups(lengths * max(*query.shape, 1)):
        places = np.flatnonzero(lengths[group]) + group.start  # documents that have vectors
        if not places.size or not len(query):
            continue
        vectors = np.concatenate([documents[place] for place in places])
        starts = np.cumsum(lengths[places]) - lengths[places]
        best = np.maximum.reduceat(vectors @ query.T, starts, axis=0)  # (documents, n)
        scores[places] = best.mean(axis=1) if similarity == "meanmaxsim" else best.sum(axis=1)
    return scores


def sparse_scores(query: IndexedRows, documents: Sequence[IndexedRows], width: int, similarity: str) -> Numbers:
    """Return the similarity of the weights of a query and of each document.

    Args:
        query: (n, 1) float32 weights with their (n,) token ids.
        documents: The weights of each document.
        width: The size of the vocabulary.
        similarity: One of SPARSE_SIMILARITIES.

    Returns:
        (documents,) float32.
    """
    dense = np.zeros(width)
    dense[query.indices] = query.rows[:, 0]
    scores = np.empty(len(documents), np.float32)
    for group in _groups(np.array([len(document.rows) for document in documents], np.int64)):
        block = documents[group]
        owners = np.repeat(np.arange(len(block)), [len(document.rows) for document in block])
        values = np.concatenate([document.rows[:, 0] for document in block]).astype(np.float64)
        products = dense[np.concatenate([np.asarray(document.indices) for document in block])] * values
        totals: Any = np.bincount(owners, products, minlength=len(block))
        if similarity == "cosine":
            norms = np.sqrt(np.bincount(owners, values * values, minlength=len(block)))
            totals = totals / np.maximum(norms * np.linalg.norm(dense), _LEAST_NORM)
        scores[group] = totals
    return scores


def _groups(sizes: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Yield groups of successive documents: at most `_BLOCK_NUMBERS` numbers, or one larger document."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        limit = ends[start] - sizes[start] + _BLOCK_NUMBERS
        stop = max(int(np.searchsorted(ends, limit, side="right")), start + 1)
        yield slice(start, stop)
        start = stop
