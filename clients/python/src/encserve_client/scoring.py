"""Comparison of queries with documents: similarities, MaxSim, and rankings, in NumPy."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from encserve_client._arguments import as_int, check_type
from encserve_client.exceptions import InvalidInputError
from encserve_client.options import Array, TrainedKind
from encserve_client.results import ModelInfo, SparseVector

VectorSimilarity = Literal["cosine", "dot", "euclidean", "manhattan"]
BitSimilarity = Literal["hamming"]
MaxSimilarity = Literal["maxsim", "meanmaxsim"]
Similarity = Literal[VectorSimilarity, BitSimilarity, MaxSimilarity]
Vectors = Array | SparseVector
Floats = npt.NDArray[Any]

# sentence-transformers gives this score to a document without vectors.
_NO_VECTORS_SCORE = -1e9
_BLOCK_NUMBERS = 2**18  # 1 MB of float32, which fits into a CPU cache
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).sum(axis=1)  # (256,): bits set in a byte
# The similarities of each kind of result. The first similarity is the default, except for sparse weights.
_CHOICES: dict[str, Any] = {
    "a vector": VectorSimilarity,
    "packed bits": BitSimilarity,
    "vectors for MaxSim": MaxSimilarity,
    "sparse weights": VectorSimilarity,
}


def maxsim(query: Array, document: Array, similarity: MaxSimilarity = "maxsim") -> float:
    """Return the MaxSim score of a document for a query (Khattab & Zaharia 2020, section 3.2).

    Args:
        query: (n, width), the query's vectors.
        document: (m, width), the document's vectors.
        similarity: "maxsim" finds the largest dot product of each query vector with any document vector. The score is
            the sum over the query's vectors. "meanmaxsim" divides this sum by n.
            `ModelInfo.multi_vector_similarity` is the similarity that the model was trained for.

    Returns:
        The score, computed in float32; -1e9 if the document has no vectors.

    Raises:
        InvalidInputError: An argument is not a two-dimensional array, the widths differ, the query has no vectors, or
            the similarity is unknown.
    """
    if similarity not in get_args(MaxSimilarity):
        raise InvalidInputError(f"must be 'maxsim' or 'meanmaxsim'; was {similarity!r}", field="similarity")
    if (kind := _kind("query", query)) != "vectors for MaxSim":
        raise InvalidInputError(f"must be a (n, width) array of numbers; was {kind}", field="query")
    _check_document("document", document, query)
    return float(_maxsim_scores(query, [document], similarity)[0])


def rank(
    query: Vectors,
    documents: Array | Sequence[Vectors],
    similarity: Similarity | ModelInfo | None = None,
    *,
    top_k: int | None = None,
) -> list[tuple[int, float]]:
    """Sort documents by similarity to a query.

        rank(client.embed("a text", task="query"), client.embed(texts, task="document"), client.model(), top_k=10)

    Args:
        query: The result of `embed` for one text: (width,), (n, width), or a `SparseVector`.
        documents: The result of `embed` for a list of texts: (documents, width), or a list with one array or one
            `SparseVector` for each document.
        similarity: A ModelInfo or a name. A ModelInfo, from `client.model()`, selects the similarity that the model was
            trained for. Names for single vectors and sparse weights: "cosine", "dot", "euclidean", "manhattan". Names
            for (n, width): "maxsim" and "meanmaxsim", as in `maxsim`. Packed bits (uint8, from dtype="binary") have
            only "hamming". Defaults: "cosine" for single vectors, "dot" for sparse weights, "maxsim" for (n, width),
            "hamming" for packed bits.
        top_k: The number of documents to return. Default: all.

    Returns:
        (index, score) of each document, the best first. Equal scores keep the order of the documents. Distances
        ("euclidean", "manhattan", "hamming") are negative: a document that equals the query has 0. A document without
        vectors for MaxSim has -1e9.

    Raises:
        InvalidInputError: An argument has the wrong type, a document differs from the query in kind or width, or the
            similarity is not for this kind.
    """
    by = _similarity_for(_kind("query", query), similarity)
    _check_documents(documents, query)
    most = len(documents) if top_k is None else as_int("top_k", top_k)
    if top_k is not None and most < 1:
        raise InvalidInputError(f"must be >= 1; was {top_k}", field="top_k")
    if isinstance(query, SparseVector):
        scores = _sparse_scores(query, cast("Sequence[SparseVector]", documents), by)
    elif query.ndim == 2:
        scores = _maxsim_scores(query, cast("Sequence[Array]", documents), by)
    else:
        scores = _vector_scores(query, cast("Sequence[Array]", documents), by)
    scores += 0.0  # turn -0.0 into 0.0
    best = np.argsort(-scores, kind="stable")[:most]
    return list(zip(best.tolist(), scores[best].tolist(), strict=True))


def similarity_of(model: ModelInfo, kind: TrainedKind) -> Similarity:
    """Return the similarity for results of one kind from this model.

    `ModelInfo.similarity` is for the kind that the model was trained for. For another kind, or if the model has no
    similarity: "cosine" for single vectors, "dot" for sparse weights.
    """
    if kind == "multi_vector":
        return cast("Similarity", model.multi_vector_similarity or "maxsim")
    trained = model.similarity if model.trained_kind == kind else ""
    return cast("Similarity", trained or ("dot" if kind == "sparse" else "cosine"))


def _kind(name: str, encoded: object) -> str:
    """Return the key of `_CHOICES` for a result. Raise InvalidInputError for any other value."""
    if isinstance(encoded, SparseVector):
        return "sparse weights"
    array = check_type(name, encoded, np.ndarray, "an array or a SparseVector")
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiu":
        raise InvalidInputError(
            f"must be a (width,) or (n, width) array of numbers; was {array.shape} of {array.dtype}",
            field=name,
        )
    if array.dtype == np.uint8:
        if array.ndim == 2:
            raise InvalidInputError(
                f"must be one vector of packed bits, (bytes,); was {array.shape} of uint8", field=name
            )
        return "packed bits"
    return "a vector" if array.ndim == 1 else "vectors for MaxSim"


def _check_documents(documents: object, query: Vectors) -> None:
    """Raise InvalidInputError if `documents` is neither a list nor an array, or does not fit the query."""
    if isinstance(documents, np.ndarray) and documents.ndim == 2:
        if len(documents):
            _check_document("a row of documents", documents[0], query)
        return
    if isinstance(documents, np.ndarray) and documents.ndim != 3:
        raise InvalidInputError(
            f"must be a list, or a (documents, width) array; was {documents.shape}", field="documents"
        )
    items = check_type("documents", documents, (list, tuple, np.ndarray), "a list or an array")
    for index, document in enumerate(items):
        _check_document(f"documents[{index}]", document, query)


def _check_document(name: str, document: object, query: Vectors) -> None:
    """Raise InvalidInputError if a document cannot be compared with the query."""
    if isinstance(document, np.ndarray) and isinstance(query, np.ndarray):
        is_same = (query.ndim, query.dtype, query.shape[-1:]) == (document.ndim, document.dtype, document.shape[-1:])
        if is_same:  # the common case, fast for many documents
            return
    kind, query_kind = _kind(name, document), _kind("query", query)
    if kind != query_kind:
        advice = "; for one query embed a str, not a list" if (query_kind, kind) == _LISTED_QUERY else ""
        raise InvalidInputError(f"must be {query_kind}, as query is; was {kind}{advice}", field=name)
    if _width(document) != _width(query):
        raise InvalidInputError(
            f"must have {_width(query)} numbers, as query has; had {_width(document)}. Embed both with one model",
            field=name,
        )


# The kinds that result if the caller embeds the query as a list of one text.
_LISTED_QUERY = ("vectors for MaxSim", "a vector")


def _width(encoded: Any) -> int:
    return int(encoded.width if isinstance(encoded, SparseVector) else encoded.shape[-1])


def _similarity_for(kind: str, similarity: Similarity | ModelInfo | None) -> Similarity:
    """Return the name of the similarity. Raise InvalidInputError if the similarity is not for this kind."""
    choices = get_args(_CHOICES[kind])
    if kind == "packed bits" and isinstance(similarity, ModelInfo):
        similarity = None
    if similarity is None:
        return cast("Similarity", "dot" if kind == "sparse weights" else choices[0])
    if isinstance(similarity, ModelInfo):
        trained: dict[str, TrainedKind] = {"vectors for MaxSim": "multi_vector", "sparse weights": "sparse"}
        if (made := trained.get(kind)) and made not in similarity.kinds:
            there = ", ".join(map(repr, similarity.kinds)) or "none"
            raise InvalidInputError(
                f"must be the model of the query; model {similarity.name} does not return {kind} (kinds: {there})",
                field="similarity",
            )
        similarity = similarity_of(similarity, made or "model")
    if similarity not in choices:
        allowed = " or ".join(map(repr, choices))
        raise InvalidInputError(f"must be {allowed} for {kind}, or a ModelInfo; was {similarity!r}", field="similarity")
    return similarity


def _vector_scores(query: Array, documents: Sequence[Array], by: str) -> Floats:
    """Return the scores, (documents,), for documents of (width,)."""
    scores = np.empty(len(documents))
    for group in _groups(np.full(len(documents), query.size)):
        block = np.asarray(documents[group])  # (rows, width)
        if by != "hamming":
            block = block.astype(np.result_type(block, query, np.float32), copy=False)
        scores[group] = _COMPARE[by](block, query)
    return scores


def _cosines(block: Array, query: Array) -> Floats:
    norms = np.sqrt(np.einsum("ij,ij->i", block, block))
    products = block @ (query / max(np.linalg.norm(query.astype(block.dtype)), np.finfo(block.dtype).tiny))
    cosines: Floats = np.clip(products / np.maximum(norms, np.finfo(block.dtype).tiny), -1, 1)
    return cosines


# Functions from (rows, width) and (width,) to the score of each row, (rows,).
_COMPARE: dict[str, Callable[[Array, Array], Floats]] = {
    "cosine": _cosines,
    "dot": lambda block, query: block @ query.astype(block.dtype),
    "euclidean": lambda block, query: -np.linalg.norm(block - query, axis=1),
    "manhattan": lambda block, query: -np.abs(block - query).sum(axis=1),
    "hamming": lambda block, query: -_BITS[block ^ query].sum(axis=1, dtype=np.float64),
}


def _maxsim_scores(query: Array, documents: Sequence[Array], by: str) -> Floats:
    """Return the scores, (documents,), for a query of (n, width) and documents of (m, width)."""
    if not len(query):
        raise InvalidInputError("must have at least 1 vector; had none", field="query")
    query = query.astype(np.float32)
    scores = np.full(len(documents), _NO_VECTORS_SCORE)
    lengths = np.array([len(document) for document in documents], np.int64)
    for group in _groups(lengths * max(query.shape)):
        indices = np.flatnonzero(lengths[group]) + group.start  # documents that have vectors
        if not indices.size:
            continue
        vectors = np.concatenate([documents[index] for index in indices.tolist()]).astype(np.float32, copy=False)
        starts = np.cumsum(lengths[indices]) - lengths[indices]
        best = np.maximum.reduceat(vectors @ query.T, starts, axis=0)  # (documents, n)
        scores[indices] = best.mean(axis=1) if by == "meanmaxsim" else best.sum(axis=1)
    return scores


def _sparse_scores(query: SparseVector, documents: Sequence[SparseVector], by: str) -> Floats:
    """Return the scores, (documents,).

    A distance is the distance to a document without weights, plus a correction for each weight of the document.
    """
    dense = query.dense().astype(np.float64)  # (width,)
    norm = np.linalg.norm(dense)
    scores = np.empty(len(documents))
    for group in _groups(np.array([document.indices.size for document in documents], np.int64)):
        block = documents[group]
        owners = np.repeat(np.arange(len(block)), [document.indices.size for document in block])
        document_values = np.concatenate([document.values for document in block]).astype(np.float64)
        query_values = dense[np.concatenate([document.indices for document in block])]

        def total(terms: Floats, owners: Floats = owners, count: int = len(block)) -> Floats:
            return np.bincount(owners, terms, minlength=count)

        if by == "euclidean":
            squares = norm**2 + total((query_values - document_values) ** 2 - query_values**2)
            scores[group] = -np.sqrt(np.maximum(squares, 0))
        elif by == "manhattan":
            corrections = total(np.abs(query_values - document_values) - np.abs(query_values))
            scores[group] = -(np.abs(dense).sum() + corrections)
        elif by == "cosine":
            lengths = np.maximum(norm * np.sqrt(total(document_values**2)), np.finfo(np.float64).tiny)
            scores[group] = np.clip(total(query_values * document_values) / lengths, -1, 1)
        else:
            scores[group] = total(query_values * document_values)
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
