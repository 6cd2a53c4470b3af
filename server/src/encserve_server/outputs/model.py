"""The outputs of one model: checks the outputs of a call, returns their size and cost, and computes the arrays."""

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from encserve_server.engine.base import BatchResult, Head
from encserve_server.errors import FieldPath, InferenceFailed, InvalidField, RequestField
from encserve_server.outputs.kind import Kind
from encserve_server.outputs.loading import NotLoaded, OpenHead, load_heads
from encserve_server.outputs.multi_vector import MultiVectors
from encserve_server.outputs.plan import OutputPlan
from encserve_server.outputs.pooled import ModelVector, Pooled
from encserve_server.outputs.rows import BatchRows, Column, HasOutputs
from encserve_server.outputs.scores import LabelScores
from encserve_server.outputs.spans import Spans
from encserve_server.outputs.sparse import SparseWeights
from encserve_server.outputs.spec import SPAN_POOLINGS, OutputSpec, check_output_count
from encserve_server.outputs.tokens import Tokens
from encserve_server.types.arrays import OutputArrays
from encserve_server.types.bundles import Bundle, StaticSparse
from encserve_server.types.requests import Detail, Output, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

_MIB = 2**20
_MAX_PLANS = 256
_DEFAULT_SPEC = OutputSpec(OutputKind.TOKENS)
_NO_HEADS: Mapping[OutputKind, Head] = MappingProxyType({})


class ModelOutputs:
    """The outputs of one model.

    Attributes:
        kinds: The kinds that the model supports, in the order of OutputKind.
    """

    kinds: Mapping[OutputKind, Kind]

    def __init__(
        self,
        bundle: Bundle,
        heads: Mapping[OutputKind, Head] = _NO_HEADS,
        *,
        max_vocabulary_bytes: int = 512 * _MIB,
    ) -> None:
        """Set the model, its loaded heads, and the memory for one run of a sparse head in bytes."""
        self._bundle = bundle
        kinds: dict[OutputKind, Kind] = {kind: Pooled(kind, bundle.d_model) for kind in SPAN_POOLINGS}
        kinds[OutputKind.TOKENS] = Tokens(OutputKind.TOKENS, bundle.d_model)
        kinds[OutputKind.SPANS] = Spans(OutputKind.SPANS, bundle.d_model)
        if bundle.pooling is not None:
            head = heads.get(OutputKind.MODEL, None if bundle.pooling.head is None else NotLoaded())
            kinds[OutputKind.MODEL] = ModelVector(bundle.pooling, head)
        if bundle.multi_vector is not None:
            head = heads.get(OutputKind.MULTI_VECTOR, NotLoaded())
            kinds[OutputKind.MULTI_VECTOR] = MultiVectors(bundle, bundle.multi_vector, head)
        if bundle.sparse is not None:
            head = heads.get(OutputKind.SPARSE, NotLoaded())
            kinds[OutputKind.SPARSE] = SparseWeights(bundle.sparse, head, max_vocabulary_bytes)
        if bundle.scores is not None:
            kinds[OutputKind.SCORES] = LabelScores(bundle.scores, heads.get(OutputKind.SCORES, NotLoaded()))
        self.kinds = {kind: kinds[kind] for kind in OutputKind if kind in kinds}
        self.plan = lru_cache(_MAX_PLANS)(self._plan)

    @classmethod
    def load(cls, bundle: Bundle, open_head: OpenHead, *, max_vocabulary_bytes: int) -> "ModelOutputs":
        """Load and test the heads of a model; see `load_heads`."""
        return cls(bundle, load_heads(bundle, open_head), max_vocabulary_bytes=max_vocabulary_bytes)

    def check(
        self,
        specs: Sequence[OutputSpec],
        task: Task = Task.NEITHER,
        *,
        skipped_tokens: int = 0,
    ) -> tuple[Output, ...]:
        """Return the outputs of a call, with all defaults filled in.

        Args:
            specs: The requested outputs. The default is OutputKind.TOKENS.
            task: The task of the texts, which the model supports.
            skipped_tokens: The number of prompt tokens to leave out of OutputKind.MODEL.

        Raises:
            InvalidField: The model does not support an output, or the call asks for an output twice.
        """
        specs = specs or [_DEFAULT_SPEC]
        if len(specs) > 1:
            _check_distinct(specs)
        outputs = []
        for i, spec in enumerate(specs):
            kind = self.kinds.get(spec.kind)
            if kind is None:
                raise self._unsupported(spec.kind, i)
            output = kind.check(spec, i, task)
            if skipped_tokens and output.kind is OutputKind.MODEL:
                output = output._replace(skipped_tokens=skipped_tokens)
            outputs.append(output)
        return tuple(outputs)

    def _plan(self, specs: tuple[OutputSpec, ...], task: Task = Task.NEITHER, skipped_tokens: int = 0) -> OutputPlan:
        """Return the outputs from `check`, with their size and cost."""
        outputs = self.check(specs, task, skipped_tokens=skipped_tokens)
        kinds = [self.kinds[output.kind] for output in outputs]
        is_fixed = all(isinstance(kind, Pooled | ModelVector | LabelScores) for kind in kinds)
        return OutputPlan(
            outputs,
            tuple(self.width(output) for output in outputs),
            tuple(self.is_l2_normalized(output) for output in outputs),
            Detail.TOKENS if any(kind.per_token for kind in kinds) else Detail.COUNTS,
            self.reply_bytes(outputs, 1, token_rows=1, spans=0) if is_fixed else None,
            is_fixed and len(outputs) == 1,
            any(isinstance(kind, SparseWeights) for kind in kinds),
            any(isinstance(kind, MultiVectors) for kind in kinds),
            partial(self.cost, outputs),
            lambda tokens, token_rows, spans: self.reply_bytes(outputs, tokens, token_rows=token_rows, spans=spans),
        )

    def _unsupported(self, kind: OutputKind, at: int) -> InvalidField:
        field, bundle = FieldPath(RequestField.OUTPUT_KIND, at), self._bundle
        if kind is OutputKind.MODEL and not (bundle.multi_vector or bundle.sparse or bundle.scores):
            problem = "the pooling of model {model} is unknown; ask for a pooling by its name"
            return InvalidField(field, problem, model=bundle.name)
        problem = "model {model} has no {kind}; it has {supported}"
        return InvalidField(field, problem, model=bundle.name, kind=kind, supported=tuple(self.kinds))

    def static(self, outputs: Sequence[Output], task: Task, other_input: int | None = None) -> StaticSparse | None:
        """Return the table of token weights if the table answers the call instead of the model, else None.

        Args:
            outputs: The outputs of the call.
            task: The task of the texts, which the model supports.
            other_input: The index of the first input that is not a text; None if all inputs are texts.

        Raises:
            InvalidField: Only a part of the call can use the table.
        """
        static = self._bundle.treatment(task).static_sparse
        if static is None or all(output.kind is not OutputKind.SPARSE for output in outputs):
            return None
        reason = "model {model} computes {kind} for this task from a table"
        values = {"model": self._bundle.name, "kind": OutputKind.SPARSE}
        for i, output in enumerate(outputs):
            if output.kind is not OutputKind.SPARSE:
                problem = f"{reason}: ask for {{other}} in another call"
                raise InvalidField(FieldPath(RequestField.OUTPUT_KIND, i), problem, other=output.kind, **values)
        if other_input is not None:
            raise InvalidField(FieldPath(RequestField.INPUT, other_input), f"{reason}, which needs a text", **values)
        return static

    def check_lengths(self, outputs: Sequence[Output], lengths: Sequence[int]) -> None:
        """Refuse sequences that are too long for an output.

        Raises:
            TooLongToPool: The call or the model joins vectors, and a sequence has too many tokens.
        """
        for i, output in enumerate(outputs):
            kind = self.kinds[output.kind]
            if isinstance(kind, MultiVectors):
                for input_at, tokens in enumerate(lengths):
                    kind.check_length(output, i, tokens, input_at)

    def width(self, output: Output) -> int:
        """Return the number of components of a row."""
        return output.dimensions or self.kinds[output.kind].width

    def is_l2_normalized(self, output: Output) -> bool:
        """Return whether all rows have norm 1, because the call or the model normalizes them."""
        kind = self.kinds[output.kind]
        return output.l2_normalize or (isinstance(kind, ModelVector) and kind.gives_unit_vectors(output))

    def reply_bytes(self, outputs: Sequence[Output], tokens: int, *, token_rows: int, spans: int) -> int:
        """Return the size of one sequence's rows in bytes, without sparse weights (see `sparse_bytes`).

        See `Kind.reply_bytes` for the arguments.
        """
        size = 0
        for output in outputs:
            size += self.kinds[output.kind].reply_bytes(output, tokens, token_rows, spans)
        return size

    def sparse_bytes(self, outputs: Sequence[Output], arrays: OutputArrays) -> int:
        """Return the size of one sequence's sparse weights in bytes. `arrays` has the array of each output."""
        return sum(
            len(array.rows) * kind.weight_bytes(output)
            for output, array in zip(outputs, arrays, strict=True)
            if isinstance(kind := self.kinds[output.kind], SparseWeights)
        )

    def cost(self, outputs: Sequence[Output], tokens: int, spans: int = 0) -> int:
        """Return the cost of one sequence in tokens.

        The cost is the number of tokens, plus 1 for each output after the first, plus the extra cost of joined vectors
        and of spans.
        """
        extra = sum(self.kinds[output.kind].extra_cost(output, tokens, spans) for output in outputs)
        return tokens + len(outputs) - 1 + extra

    def compute(self, result: BatchResult, sequences: Sequence[HasOutputs]) -> list[OutputArrays | None]:
        """Compute the outputs of each sequence of a batch.

        The outputs of a sequence have the same bits in every batch. Invalid rows of one sequence do not change other
        sequences. The caller turns off NumPy's warnings about NaN and infinity.

        Args:
            result: The rows of the batch. The method may overwrite the padding.
            sequences: The sequences of the batch.

        Returns:
            For each sequence, an array for each output, or None if a row is invalid (see `outputs.rows`). An array has
            the shape (rows, width): one row for each token (TOKENS), one for each span (SPANS), or a single row. For
            MULTI_VECTOR and SPARSE, the array is an IndexedRows. Rows that need no conversion are views of the batch.
        """
        batch = BatchRows(result, sequences)
        batch.find_nonfinite()
        groups: dict[tuple[Output, ...], list[int]] = {}  # the indices of the sequences with these outputs
        for i, sequence in enumerate(sequences):
            groups.setdefault(sequence.wanted, []).append(i)
        columns: dict[Output, Column] = {}
        for kind, wanted in _by_kind(groups, batch.failed).items():
            columns.update(self.kinds[kind].compute(batch, wanted))
        if len(groups) == 1 and columns and not batch.failed:
            return list(zip(*map(columns.__getitem__, sequences[0].wanted), strict=True))
        computed: list[OutputArrays | None] = [None] * len(sequences)
        for outputs, places in groups.items():
            group_columns: list[Any] = list(map(columns.get, outputs))
            for i in places:
                if i not in batch.failed:
                    computed[i] = tuple(map(operator.itemgetter(i), group_columns))
        return computed

    def compute_empty(self, sequences: Sequence[TokenSequence]) -> None:
        """Set the outputs of sequences without tokens.

        OutputKind.TOKENS has no rows. Other outputs are computed from one row of zeros.

        Raises:
            InferenceFailed: An output is invalid.
        """
        rows = np.zeros((len(sequences), 1, self._bundle.d_model), np.float32)  # (batch, seq, d_model)
        result = BatchResult(rows, [1] * len(sequences), 0.0, 0.0)
        for sequence, arrays in zip(sequences, self.compute(result, sequences), strict=True):
            if arrays is None:
                raise InferenceFailed(sequence.index, "the model gives an invalid output for a text without tokens")
            sequence.outputs = tuple(
                array[:0] if output.kind is OutputKind.TOKENS else array
                for output, array in zip(sequence.wanted, arrays, strict=True)
            )


def _by_kind(
    groups: Mapping[tuple[Output, ...], Sequence[int]], failed: set[int]
) -> dict[OutputKind, dict[Output, list[int]]]:
    """Return, for each kind and output, the indices of the sequences that need the output and have not failed."""
    by_kind: dict[OutputKind, dict[Output, list[int]]] = {}
    for outputs, places in groups.items():
        valid = [i for i in places if i not in failed] if failed else places
        for output in dict.fromkeys(outputs) if valid else ():
            by_kind.setdefault(output.kind, {}).setdefault(output, []).extend(valid)
    if len(groups) > 1:
        for wanted in by_kind.values():
            for output_places in wanted.values():
                output_places.sort()
    return by_kind


def _check_distinct(specs: Sequence[OutputSpec]) -> None:
    """Refuse a call with too many outputs, or with the same output twice."""
    check_output_count(len(specs))
    seen: dict[OutputSpec, int] = {}
    for i, spec in enumerate(specs):
        first = seen.setdefault(spec, i)
        if first != i:
            raise InvalidField(
                FieldPath(RequestField.OUTPUT, i),
                "is the same as {other}: remove one of them",
                other=FieldPath(RequestField.OUTPUT, first),
            )
