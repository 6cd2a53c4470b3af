"""Makes queries and documents with random vectors, and the HTML page that shows which vectors match."""

import numpy as np

from encserve_cli.report.matches import Side, build_match_page
from encserve_client import Array, EncodeResult, maxsim
from encserve_client.results import Timings
from encserve_client.scoring import MaxSimilarity


def vectors_of(n: int, width: int = 8) -> Array:
    rows = np.random.default_rng(n).standard_normal((n, width))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def side_of(n: int, *names: str) -> Side:
    return Side(" ".join(names) or f"{n} vectors", names or tuple(f"w{i}" for i in range(n)), vectors_of(n))


def match_page(query: Side, *documents: Side, by: MaxSimilarity = "maxsim") -> str:
    ranking = [(it, maxsim(query.vectors, it.vectors, by)) for it in documents]
    result = EncodeResult("late", "1", "f" * 32, (), (), Timings(0, 0, 0, 0, messages=1, attempts=1))
    return build_match_page(query, ranking, by, result)
