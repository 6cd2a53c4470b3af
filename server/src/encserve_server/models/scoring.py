"""Plans the encode calls of a score call, and computes the scores from their results. Independent of protocols."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_server.errors import FieldPath, InferenceFailed, InvalidField, RequestField
from encserve_server.models.pairs import SentPair
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.similarity import (
    SPARSE_SIMILARITIES,
    VECTOR_SIMILARITIES,
    maxsim_scores,
    sparse_scores,
    vector_scores,
)
from encserve_server.models.treatment import EncodeCall
from encserve_server.outputs import OutputSpec
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import Bundle
from encserve_server.types.callers import Priority
from encserve_server.types.requests import Activation, Detail, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

_SHAPE = ReplyShape(Detail.COUNTS)
Indices = npt.NDArray[np.int64]


class ScoreMethod(IntEnum):
    """The way in which a model computes scores. The protobuf enum of the same name has the same values."""

    NONE = 0
    LABELS = 1
    VECTORS = 2
    MULTI_VECTORS = 3
    SPARSE = 4


# The outputs of the encoder that the methods need.
_OUTPUTS = {
    ScoreMethod.LABELS: OutputKind.SCORES,
    ScoreMethod.VECTORS: OutputKind.MODEL,
    ScoreMethod.MULTI_VECTORS: OutputKind.MULTI_VECTOR,
    ScoreMethod.SPARSE: OutputKind.SPARSE,
}


@dataclass(frozen=True, slots=True)
class DocumentVectors:
    """The vectors of documents that the caller has sent.

    Attributes:
        kind: The kind of the rows.
        width: The number of components of a row.
        arrays: For each document (1, width) float32, or IndexedRows for OutputKind.MULTI_VECTOR and SPARSE.
    """

    kind: OutputKind
    width: int
    arrays: Sequence[Any]


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """A decoded score call, not yet checked against its model.

    Attributes:
        pairs: The pairs of texts. The pairs of a query with its documents share the query. With `vectors`, one pair has
            the query, and its document is not used.
        texts: The texts to classify; empty with pairs.
        vectors: The vectors of the documents; None for texts.
        top_k: The number of scores to return, the largest first; 0 for all, in the order of the call.
        activation: The function that turns logits into scores; None for the model's own.
        truncate: Whether inputs that are too long are cut instead of refused.
        prompt_name: See `EncodeCall`.
        priority: The requested priority.
        max_document_tokens: The maximum number of tokens of a document; 0 for as many as the model takes. The end of a
            longer document is cut.
        max_tokens: The maximum number of tokens of a pair or a text; 0 for as many as the model takes.
    """

    pairs: Sequence[SentPair] = ()
    texts: Sequence[str] = ()
    vectors: DocumentVectors | None = None
    top_k: int = 0
    activation: Activation | None = None
    truncate: bool = True
    prompt_name: str | None = None
    priority: Priority = Priority.INTERACTIVE
    max_document_tokens: int = 0
    max_tokens: int = 0

    @property
    def count(self) -> int:
        """The number of documents, vectors, pairs or texts."""
        return len(self.pairs or self.texts) if self.vectors is None else len(self.vectors.arrays)


@dataclass(slots=True)
class Scored:
    """The scores of a call.

    Attributes:
        scores: (n, labels) float32, in the order of the call. With `indices`, only the chosen ones, the largest first.
        labels: The names of the labels; empty unless the model computes logits of labels.
        indices: (n,) for each score, the index of its input in the call; None if the scores have the order of the call.
        sequences: The sequence of each document, pair or text; empty if the caller sent vectors.
        queries: The sequences of the distinct queries; empty for ScoreMethod.LABELS.
        tokenize_seconds: The time for tokenizing, including the wait for a thread.
        queue_seconds: The longest queue time of a sequence.
        compute_seconds: The longest run time of a batch.
    """

    scores: Numbers
    labels: tuple[str, ...]
    indices: Indices | None = None
    sequences: Sequence[TokenSequence] = ()
    queries: Sequence[TokenSequence] = ()
    tokenize_seconds: float = 0.0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def token_count(self) -> int:
        """The number of tokens that the model processed."""
        return sum(len(it.input) for it in (*self.queries, *self.sequences))

    @property
    def truncated(self) -> list[int]:
        """The indices of the inputs that were cut."""
        return [i for i, it in enumerate(self.sequences) if it.truncated]


def score_method(bundle: Bundle) -> ScoreMethod:
    """Return the way in which a model computes scores."""
    if bundle.scores is not None:
        return ScoreMethod.LABELS
    if bundle.pooling is not None:
        return ScoreMethod.VECTORS
    if bundle.multi_vector is not None:
        return ScoreMethod.MULTI_VECTORS
    return ScoreMethod.NONE if bundle.sparse is None else ScoreMethod.SPARSE


@dataclass(slots=True)
class ScorePlan:
    """The encode calls of a score call, and the way from their results to scores.

    Attributes:
        method: The way in which the model computes scores.
        inputs: The call for the documents, pairs or texts; None if the caller sent vectors.
        queries: The encode call for the queries, each distinct text once; None for ScoreMethod.LABELS.
    """

    bundle: Bundle
    call: ScoreCall
    method: ScoreMethod
    inputs: EncodeCall | None
    queries: EncodeCall | None
    _query_of: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # (documents,): indices of `queries`

    def scores(self, queries: Sequence[Any], inputs: Sequence[Any]) -> Scored:
        """Compute the scores.

        Args:
            queries: The output of each query of `queries`.
            inputs: The output of each input of `inputs`, or the caller's vectors.

        Raises:
            InferenceFailed: A score is NaN or infinity.
        """
        scores = self._labelled(inputs) if self.method is ScoreMethod.LABELS else self._similar(queries, inputs)
        finite = np.isfinite(scores).all(axis=1)
        if not finite.all():
            raise InferenceFailed(int(np.argmin(finite)), InferenceFailed.NOT_FINITE)
        labels = () if self.bundle.scores is None else self.bundle.scores.labels
        if not self.call.top_k:
            return Scored(scores, labels)
        best = np.argsort(-scores[:, 0], kind="stable")[: self.call.top_k]
        return Scored(scores[best], labels, best)

    def query_of_pair(self, path: FieldPath) -> FieldPath:
        """Return the field of the request for a field of `queries`: the query of the first pair with this query."""
        if path.at is None or path.field not in (RequestField.INPUT, RequestField.TEXT):
            return path
        return FieldPath(RequestField.QUERY, int(np.argmax(self._query_of == path.at)))

    def _labelled(self, logits: Sequence[Numbers]) -> Numbers:
        assert self.bundle.scores is not None  # noqa: S101 - the method is LABELS
        return activate(np.concatenate(logits), self.call.activation or self.bundle.scores.activation)

    def _similar(self, queries: Sequence[Any], documents: Sequence[Any]) -> Numbers:
        """Return the (documents, 1) similarities of each document and its query."""
        scores = np.empty((len(documents), 1), np.float32)
        order = np.argsort(self._query_of, kind="stable")
        bounds = np.searchsorted(self._query_of[order], np.arange(len(queries) + 1))
        for query, start, end in zip(queries, bounds[:-1], bounds[1:], strict=True):
            places = order[start:end]
            scores[places, 0] = self._compare(query, [documents[i] for i in places])
        return scores

    def _compare(self, query: Any, documents: Sequence[Any]) -> Numbers:
        bundle = self.bundle
        if self.method is ScoreMethod.VECTORS:
            return vector_scores(query, documents, bundle.similarity or "cosine")
        if self.method is ScoreMethod.MULTI_VECTORS:
            assert bundle.multi_vector is not None  # noqa: S101 - the method is MULTI_VECTORS
            rows = [it.rows for it in documents]
            return maxsim_scores(query.rows, rows, bundle.multi_vector.similarity)
        assert bundle.sparse is not None  # noqa: S101 - the method is SPARSE
        return sparse_scores(query, documents, bundle.sparse.width, bundle.similarity or "dot")


def plan_score(bundle: Bundle, call: ScoreCall) -> ScorePlan:
    """Check a score call against its model, and return the encode calls that it needs.

    Raises:
        InvalidField: The model cannot compute the scores of this call.
    """
    method = score_method(bundle)
    _check(bundle, call, method)
    outputs = (OutputSpec(_OUTPUTS[method]),)
    if method is ScoreMethod.LABELS:
        inputs = call.pairs or call.texts
        encode = EncodeCall(
            inputs,
            outputs,
            call.truncate,
            call.prompt_name,
            shape=_SHAPE,
            priority=call.priority,
            document_tokens=call.max_document_tokens,
            max_tokens=call.max_tokens,
        )
        return ScorePlan(bundle, call, method, encode, None)
    places: dict[str, int] = {}  # by query text
    query_of = [places.setdefault(pair.query.text, len(places)) for pair in call.pairs]
    if call.vectors is not None:
        query_of *= len(call.vectors.arrays)

    def encode_texts(texts: Sequence[str], task: Task) -> EncodeCall:
        known = task if task in bundle.tasks else Task.NEITHER
        return EncodeCall(
            texts,
            outputs,
            call.truncate,
            task=known,
            shape=_SHAPE,
            priority=call.priority,
            max_tokens=call.max_tokens,
        )

    documents = None
    if call.vectors is None:
        documents = encode_texts([pair.document for pair in call.pairs], Task.DOCUMENT)
        limit = bundle.treatment(documents.task).max_tokens
        if 0 < call.max_document_tokens < min(call.max_tokens or limit, limit):
            documents = replace(documents, max_tokens=call.max_document_tokens, truncate=True)
    return ScorePlan(
        bundle, call, method, documents, encode_texts(list(places), Task.QUERY), np.array(query_of, np.int64)
    )


def check_activation(bundle: Bundle, activation: Activation | None) -> None:
    """Refuse softmax for a model with one label.

    Raises:
        InvalidField: All scores would be 1.
    """
    if activation is Activation.SOFTMAX and bundle.scores is not None and len(bundle.scores.labels) == 1:
        problem = f"must not be softmax, because all scores of model {bundle.name}, with 1 label, would be 1"
        raise InvalidField(FieldPath(RequestField.ACTIVATION), f"{problem}; choose sigmoid or none")


def activate(logits: Numbers, activation: Activation) -> Numbers:
    """Turn (n, labels) float32 logits into scores."""
    if activation is Activation.NONE:
        return logits
    with np.errstate(over="ignore"):
        if activation is Activation.SIGMOID:
            return np.asarray(1 / (1 + np.exp(-logits)), np.float32)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


def _check(bundle: Bundle, call: ScoreCall, method: ScoreMethod) -> None:
    """Refuse a call that does not fit the model."""
    name = bundle.name
    if method is ScoreMethod.NONE:
        raise InvalidField(
            FieldPath(RequestField.MODEL),
            f"{name} cannot compute scores: the model is neither a cross-encoder nor a classifier, and the pooling is "
            "unknown. Export the model with --pooling",
        )
    if method is ScoreMethod.LABELS:
        assert bundle.scores is not None  # noqa: S101 - the method is LABELS
        if call.vectors is not None:
            problem = f"must be empty, because model {name} compares texts and not vectors; send documents"
            raise InvalidField(FieldPath(RequestField.VECTORS), problem)
        if call.top_k and len(bundle.scores.labels) > 1:
            problem = f"must be 0, because model {name} has {len(bundle.scores.labels)} labels; was {call.top_k}"
            raise InvalidField(FieldPath(RequestField.TOP_K), problem)
        check_activation(bundle, call.activation)
        return
    if call.texts:
        problem = f"model {name} is not a classifier; send a query and documents, or pairs"
        raise InvalidField(FieldPath(RequestField.INPUTS), problem)
    if call.activation is not None:
        problem = f"must not be set, because the scores of model {name} are similarities"
        raise InvalidField(FieldPath(RequestField.ACTIVATION), problem)
    if call.prompt_name is not None:
        problem = f"must not be set, because model {name} uses the prompts of its tasks for queries and documents"
        raise InvalidField(FieldPath(RequestField.PROMPT_NAME), problem)
    known = {ScoreMethod.VECTORS: tuple(VECTOR_SIMILARITIES), ScoreMethod.SPARSE: SPARSE_SIMILARITIES}.get(method, ())
    if bundle.similarity and known and bundle.similarity not in known:
        problem = f"{name} has the similarity {bundle.similarity!r}; scores need {' or '.join(known)}"
        raise InvalidField(FieldPath(RequestField.MODEL), problem)
    if call.vectors is not None:
        _check_vectors(bundle, call.vectors, method)


def _check_vectors(bundle: Bundle, vectors: DocumentVectors, method: ScoreMethod) -> None:
    """Refuse vectors that the model's queries cannot be compared with."""
    field = FieldPath(RequestField.VECTORS)
    is_alike = {
        ScoreMethod.VECTORS: vectors.kind not in (OutputKind.TOKENS, OutputKind.MULTI_VECTOR, OutputKind.SPARSE),
        ScoreMethod.MULTI_VECTORS: vectors.kind is OutputKind.MULTI_VECTOR,
        ScoreMethod.SPARSE: vectors.kind is OutputKind.SPARSE,
    }[method]
    if not is_alike:
        raise InvalidField(
            field,
            "must have rows of {wanted} for model {model}; was {kind}",
            wanted=_OUTPUTS[method],
            model=bundle.name,
            kind=vectors.kind,
        )
    if method is ScoreMethod.SPARSE:
        assert bundle.sparse is not None  # noqa: S101 - the method is SPARSE
        for i, it in enumerate(vectors.arrays):
            largest = 0 if it.indices is None else int(it.indices.max(initial=0))
            if largest >= bundle.sparse.width:
                problem = f"must have indices below {bundle.sparse.width}; was {largest}"
                raise InvalidField(FieldPath(RequestField.VECTORS, i), problem)
        return
    pooling, multi_vector = bundle.pooling, bundle.multi_vector
    width = 0
    if method is ScoreMethod.VECTORS and pooling is not None:
        width = pooling.dimensions or pooling.width
    elif multi_vector is not None:
        width = multi_vector.head.width
    if vectors.width != width:
        raise InvalidField(field, f"must have rows of {width} numbers for model {bundle.name}; was {vectors.width}")
