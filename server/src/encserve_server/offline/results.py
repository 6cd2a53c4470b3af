"""The results of an `Embedder`, and the collection of rows from several threads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from encserve_server.errors import PLAIN, EncserveError, FieldPath, InferenceFailed, RequestError, RequestField
from encserve_server.models.treatment import CallPlan
from encserve_server.offline.options import OutputName
from encserve_server.types.arrays import IndexedRows, OutputArrays, OutputRows
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import OutputKind
from encserve_server.types.sequences import TokenSequence

OnBatch = Callable[[int, int, int], None]
"""Called after each batch, from any thread. Arguments: the number of inputs, of tokens, and of tokens with padding."""


class SparseVector(NamedTuple):
    """The nonzero weights over the vocabulary.

    Attributes:
        indices: (n,) uint32, the token id of each weight, ascending.
        values: (n,), of the requested type.
        width: The size of the vocabulary.
    """

    indices: npt.NDArray[np.uint32]
    values: OutputRows
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """The outputs of all inputs of a call.

    Attributes:
        kind: The kind of output.
        rows: (sum(lengths), width) of the requested type, C-contiguous, in the order of the inputs. For "binary"
            (sum(lengths), ceil(width / 8)) uint8.
        lengths: (inputs,) int64, the number of rows of each input; 0 for a refused input.
        indices: (sum(lengths),) uint32. For "multi_vector": the token index of each row, or None if vectors were
            joined. For "sparse": the token id of each weight. None for other kinds.
        token_ids: (sum(lengths),) int64. For "tokens": the token id of each row, or None if the model takes vectors.
            None for other kinds.
        sparse_width: For "sparse" the size of the vocabulary; otherwise 0.
        l2_normalized: Whether all rows have Euclidean length 1, because the call or the model normalizes them.
        refused: The problems of refused inputs, by index, for people.
        reasons: The reasons of refused inputs, by index, for programs: "SEQUENCE_TOO_LONG".
        token_counts: (inputs,) int64, the number of tokens that the model processed; 0 for a refused input.
        original_token_counts: (inputs,) int64, the number of tokens before truncation; 0 for a refused input.
        tokens: The number of tokens that the engine computed.
        padded_tokens: The number of tokens that the engine computed, with padding.
    """

    kind: OutputName
    rows: OutputRows
    lengths: npt.NDArray[np.int64]
    indices: npt.NDArray[np.uint32] | None
    token_ids: npt.NDArray[np.int64] | None
    sparse_width: int
    l2_normalized: bool
    refused: dict[int, str]
    reasons: dict[int, str]
    token_counts: npt.NDArray[np.int64]
    original_token_counts: npt.NDArray[np.int64]
    tokens: int
    padded_tokens: int

    def arrays(self) -> list[OutputRows]:
        """Return the (rows, width) array of each input, as a view."""
        return np.split(self.rows, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    def sparse_vectors(self) -> list[SparseVector]:
        """Return the sparse vector of each input, as views.

        Raises:
            ValueError: The kind of output is not "sparse".
        """
        if self.kind != "sparse":
            raise ValueError(f'the kind of output must be "sparse"; was {self.kind!r}: use `arrays`')
        if self.indices is None or not len(self.lengths):
            return []
        indices = np.split(self.indices, np.cumsum(self.lengths)[:-1])
        pairs = zip(indices, self.arrays(), strict=True)
        return [SparseVector(places, rows[:, 0], self.sparse_width) for places, rows in pairs]


class RowCollector:
    """Collects the rows of a call in one array. Several threads may add rows at the same time."""

    def __init__(
        self,
        call_plan: CallPlan,
        inputs: int,
        sequences: Sequence[TokenSequence],
        refused: dict[int, EncserveError],
        on_batch: OnBatch | None,
    ) -> None:
        """Allocate the rows.

        Args:
            call_plan: The rules and outputs of the call.
            inputs: The number of inputs.
            sequences: The sequences that will be computed.
            refused: The errors of all other inputs. `refuse` adds errors.
            on_batch: See `OnBatch`.
        """
        plan = call_plan.plan
        self._output = plan.outputs[0]
        self._is_l2_normalized = plan.unit[0]
        self._sequences = sequences
        self._refused = refused
        self._on_batch = on_batch
        self._lock = threading.Lock()
        self._tokens = self._padded_tokens = 0
        self._has_tokens = self._output.kind is OutputKind.TOKENS
        self._without_special = self._has_tokens and call_plan.rules.details
        # For "multi_vector" and "sparse", the number of rows is unknown. The rows are concatenated at the end.
        self._indexed: dict[int, IndexedRows] | None = None
        if self._output.kind in (OutputKind.MULTI_VECTOR, OutputKind.SPARSE):
            self._indexed = {}
        self._lengths = np.zeros(inputs, np.int64)  # the number of rows that have been added
        self._expected = np.zeros(inputs, np.int64)
        if self._indexed is None:
            for it in sequences:
                self._expected[it.index] = len(self._token_rows(it.input, it)) if self._has_tokens else 1
        self._starts = np.cumsum(self._expected) - self._expected
        data_type = self._output.data_type
        columns = data_type.row_bytes(plan.widths[0]) // data_type.dtype.itemsize
        self._rows: OutputRows = np.empty((int(self._expected.sum()), columns), data_type.dtype)

    def add(self, sequences: Sequence[TokenSequence], outputs: Sequence[OutputArrays | None], padded: int) -> None:
        """Add the outputs of a batch.

        Args:
            sequences: The sequences of the batch.
            outputs: The outputs of each sequence; None for a sequence with NaN or infinity, which is then refused.
            padded: The number of tokens of the batch, including padding; 0 if no engine ran.
        """
        for sequence, arrays in zip(sequences, outputs, strict=True):
            if arrays is None:
                self.refuse(sequence, InferenceFailed.NOT_FINITE)
            else:
                self._add(sequence, arrays[0])
        tokens = sum(len(it.input) for it in sequences) if padded else 0
        with self._lock:
            self._tokens += tokens
            self._padded_tokens += padded
        if self._on_batch is not None and sequences:
            self._on_batch(len(sequences), tokens, padded)

    def refuse(self, sequence: TokenSequence, problem: str) -> None:
        """Refuse a sequence."""
        self._refused[sequence.index] = InferenceFailed(sequence.index, problem)

    def embedded(self, kind: OutputName, bundle: Bundle) -> Embedded:
        """Return the result. Call this after all sequences were added or refused."""
        kept = [it for it in self._sequences if it.index not in self._refused]
        indices: npt.NDArray[np.uint32] | None = None
        if self._indexed is not None:
            rows, indices = self._join(self._indexed)
        elif len(kept) < len(self._sequences):
            rows = self._rows[np.repeat(self._lengths > 0, self._expected)]
        else:
            rows = self._rows
        token_ids: npt.NDArray[np.int64] | None = None
        if self._has_tokens and not bundle.graph.takes_vectors:
            token_ids = np.concatenate([np.empty(0, np.int64), *(self._token_rows(it.input, it) for it in kept)])
        counts, original_counts = np.zeros_like(self._lengths), np.zeros_like(self._lengths)
        for it in kept:
            counts[it.index], original_counts[it.index] = len(it.input), it.original_token_count
        return Embedded(
            kind=kind,
            rows=rows,
            lengths=self._lengths,
            indices=indices,
            token_ids=token_ids,
            sparse_width=bundle.sparse.width if bundle.sparse is not None and kind == "sparse" else 0,
            l2_normalized=self._is_l2_normalized,
            refused={i: reason_of(it) for i, it in sorted(self._refused.items())},
            reasons={i: it.reason for i, it in sorted(self._refused.items())},
            token_counts=counts,
            original_token_counts=original_counts,
            tokens=self._tokens,
            padded_tokens=self._padded_tokens,
        )

    def _add(self, sequence: TokenSequence, array: OutputRows | IndexedRows) -> None:
        at = sequence.index
        if isinstance(array, IndexedRows):
            assert self._indexed is not None  # noqa: S101 - set for every kind with IndexedRows
            self._indexed[at] = array
            self._lengths[at] = len(array.rows)
            return
        rows = self._token_rows(array, sequence)
        start = self._starts[at]
        self._rows[start : start + len(rows)] = rows  # a copy, so that the padded batch is freed
        self._lengths[at] = len(rows)

    def _token_rows(self, rows: Any, sequence: TokenSequence) -> Any:
        """Return the rows of a sequence for "tokens", without special tokens if the call excludes them."""
        if self._without_special and sequence.special is not None:
            return rows[~sequence.special]
        return rows

    def _join(self, indexed: dict[int, IndexedRows]) -> tuple[OutputRows, npt.NDArray[np.uint32] | None]:
        parts = [indexed[at] for at in sorted(indexed)]
        rows = np.concatenate([self._rows, *(it.rows for it in parts)])  # `_rows` is empty, but has the right data type
        indices = [it.indices for it in parts if it.indices is not None]
        if len(indices) < len(parts):
            return rows, None
        return rows, np.concatenate([np.empty(0, "<u4"), *indices])


def reason_of(error: EncserveError) -> str:
    """Return the reason why an input was refused, without the index of the input."""
    if not isinstance(error, RequestError):
        return str(error.values["problem"])
    text = error.problem_text(PLAIN)
    if not isinstance(error.field, FieldPath):
        return text
    if error.field.field is RequestField.QUERY:
        return f"query {text}"
    return text if error.field.place is None else f"id {error.field.place} {text}"
