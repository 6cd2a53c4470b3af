"""How queries and documents are compared: MaxSim, and rankings. Pure NumPy."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from encserve_client.exceptions import InvalidInputError
from encserve_client.options import Array
from encserve_client.results import SparseVector

Similarity = Literal["maxsim", "meanmaxsim"]
Encoded = Array | SparseVector
# What sentence-transformers gives a document without vectors.
_NOTHING = -1e9


def maxsim(query: Array, document: Array, similarity: Similarity = "maxsim") -> float:
    """How well a document answers a query, Khattab & Zaharia 2020, section 3.2.

    Args:
        query: (n, width), the query's vectors.
        document: (m, width), the document's.
        similarity: "maxsim" for the sum over the query's vectors of the largest dot product with one of the document's;
            "meanmaxsim" for that sum divided by n. The model says which in `ModelInfo.multi_vector_similarity`.

    Returns:
        The score, computed in float32; -1e9 where the document has no vectors.

    Raises:
        InvalidInputError: They are not two-dimensional arrays that are equally wide, the query has no vectors, or there
            is no such similarity.
    """
    if similarity not in get_args(Similarity):
        raise InvalidInputError(f"similarity must be 'maxsim' or 'meanmaxsim'; was {similarity!r}")
    shapes = [its.shape if isinstance(its, np.ndarray) else type(its).__name__ for its in (query, document)]
    if any(len(shape) != 2 or isinstance(shape, str) for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise InvalidInputError(
            f"query and document must be (n, width) and (m, width) arrays; were {shapes[0]} and {shapes[1]}"
        )
    if not len(query):
        raise InvalidInputError("query must have at least 1 vector; had none")
    if not len(document):
        return _NOTHING
    best = (query.astype(np.float32) @ document.astype(np.float32).T).max(axis=1)  # (n,)
    return float(best.mean() if similarity == "meanmaxsim" else best.sum())


def rank(query: Encoded, documents: Sequence[Encoded], similarity: Similarity = "maxsim") -> list[tuple[int, float]]:
    """Orders documents by how well they answer a query.

    Args:
        query: What `encode_query` gave for it: (width,), (n, width), or a `SparseVector`.
        documents: What `encode_document` gave, one for each document.
        similarity: For (n, width), as for `maxsim`. Other vectors are compared by their dot product.

    Returns:
        The index of each document and its score, the best first; of equal scores the first document's first.

    Raises:
        InvalidInputError: A document is of another kind, or another width, than the query; and as for `maxsim`.
    """
    scores = [_score(query, document, similarity) for document in documents]
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


def _score(query: Encoded, document: Encoded, similarity: Similarity) -> float:
    if isinstance(query, SparseVector) and isinstance(document, SparseVector):
        if query.width != document.width:
            raise InvalidInputError(f"query and document must be equally wide; were {query.width} and {document.width}")
        _, ours, theirs = np.intersect1d(query.indices, document.indices, assume_unique=True, return_indices=True)
        return float(query.values[ours].astype(np.float32) @ document.values[theirs].astype(np.float32))
    if isinstance(query, SparseVector) or isinstance(document, SparseVector) or query.ndim != document.ndim:
        raise InvalidInputError(f"query and document must be of one kind; were {_shape(query)} and {_shape(document)}")
    if query.ndim == 2:
        return maxsim(query, document, similarity)
    if query.shape != document.shape:
        raise InvalidInputError(f"query and document must be equally wide; were {query.shape} and {document.shape}")
    return float(query.astype(np.float32) @ document.astype(np.float32))


def _shape(encoded: Encoded) -> Any:
    return "sparse" if isinstance(encoded, SparseVector) else encoded.shape
