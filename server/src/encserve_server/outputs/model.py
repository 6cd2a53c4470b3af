"""What one model can make of a sequence: checked for a call, counted for a queue and a reply, computed for a batch."""

import math
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from encserve_server.engine.base import BatchResult, Head
from encserve_server.errors import FieldPath, InferenceFailed, InvalidField, Part
from encserve_server.outputs.kind import FLOP_PER_US, Kind
from encserve_server.outputs.loading import NotLoaded, OpenHead, load_heads
from encserve_server.outputs.multi_vector import MultiVectors
from encserve_server.outputs.plan import OutputPlan
from encserve_server.outputs.pooled import ModelVector, Pooled
from encserve_server.outputs.rows import BatchRows, Column, HasOutputs
from encserve_server.outputs.spans import Spans
from encserve_server.outputs.sparse import SparseWeights
from encserve_server.outputs.spec import SPAN_POOLINGS, OutputSpec, check_output_count
from encserve_server.outputs.tokens import Tokens
from encserve_server.types.arrays import OutputArrays
from encserve_server.types.bundles import Bundle, StaticSparse
from encserve_server.types.requests import Detail, Output, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

_MIB = 2**20
# What callers ask for differs little.
_MOST_PLANS = 256
_ROWS = OutputSpec(OutputKind.TOKENS)
# A token of a smaller model takes no less: this much goes into its way through the queue and the batch.
_LEAST_TOKEN_US = 20.0
# Of a block of the encoder, for each token: its products have 12 x d_model² weights.
_BLOCK_WEIGHTS = 12
_NO_HEADS: Mapping[OutputKind, Head] = MappingProxyType({})


class ModelOutputs:
    """The outputs of one model.

    Attributes:
        kinds: The kinds that the model has, in the order of OutputKind.
    """

    kinds: Mapping[OutputKind, Kind]

    def __init__(
        self,
        bundle: Bundle,
        heads: Mapping[OutputKind, Head] = _NO_HEADS,
        *,
        max_vocabulary_bytes: int = 512 * _MIB,
    ) -> None:
        """Takes the model, the heads of its kinds, and the memory of one run of a sparse head, in bytes."""
        self._bundle = bundle
        kinds: dict[OutputKind, Kind] = {kind: Pooled(kind, bundle.d_model) for kind in SPAN_POOLINGS}
        kinds[OutputKind.TOKENS] = Tokens(OutputKind.TOKENS, bundle.d_model)
        kinds[OutputKind.SPANS] = Spans(OutputKind.SPANS, bundle.d_model)
        if bundle.pooling is not None:
            head = heads.get(OutputKind.MODEL, None if bundle.pooling.head is None else NotLoaded())
            kinds[OutputKind.MODEL] = ModelVector(bundle.pooling, bundle.d_model, head)
        if bundle.multi_vector is not None:
            head = heads.get(OutputKind.MULTI_VECTOR, NotLoaded())
            kinds[OutputKind.MULTI_VECTOR] = MultiVectors(bundle, bundle.multi_vector, head)
        if bundle.sparse is not None:
            head = heads.get(OutputKind.SPARSE, NotLoaded())
            kinds[OutputKind.SPARSE] = SparseWeights(bundle.sparse, head, max_vocabulary_bytes)
        self.kinds = {kind: kinds[kind] for kind in OutputKind if kind in kinds}
        token_flop = 2.0 * _BLOCK_WEIGHTS * bundle.n_layers * bundle.d_model**2
        self._token_us = max(token_flop / FLOP_PER_US, _LEAST_TOKEN_US)
        self.plan = lru_cache(_MOST_PLANS)(self._plan)

    @classmethod
    def load(cls, bundle: Bundle, open_head: OpenHead, *, max_vocabulary_bytes: int) -> "ModelOutputs":
        """Opens the heads of a model, and tries them.

        Raises:
            BundleError: A head cannot compute, or gives numbers of another width than the manifest says, or what joins
                vectors is needed and not installed.
        """
        return cls(bundle, load_heads(bundle, open_head), max_vocabulary_bytes=max_vocabulary_bytes)

    def check(
        self,
        specs: Sequence[OutputSpec],
        task: Task = Task.NEITHER,
        *,
        skipped_tokens: int = 0,
    ) -> tuple[Output, ...]:
        """The outputs of a call, every default filled in.

        Args:
            specs: What is asked for; nothing stands for OutputKind.TOKENS.
            task: What the texts are; one that the model knows.
            skipped_tokens: How many tokens at the beginning are a prompt that is left out of pooling.

        Raises:
            TooManyOutputs: There are more than MAX_OUTPUTS.
            InvalidField: The model has no such output, or the same is asked for twice.
        """
        specs = specs or [_ROWS]
        if len(specs) > 1:
            _check_distinct(specs)
        outputs = []
        for i, spec in enumerate(specs):
            kind = self.kinds.get(spec.kind)
            if kind is None:
                raise self._lacking(spec.kind, i)
            output = kind.check(spec, i, task)
            if skipped_tokens and output.kind is OutputKind.MODEL:
                output = output._replace(skipped_tokens=skipped_tokens)
            outputs.append(output)
        return tuple(outputs)

    def _plan(self, specs: tuple[OutputSpec, ...], task: Task = Task.NEITHER, skipped_tokens: int = 0) -> OutputPlan:
        """What `check` gives, with what it takes; remembered for the calls that ask for the same.

        Raises:
            EncserveError: As of `check`.
        """
        outputs = self.check(specs, task, skipped_tokens=skipped_tokens)
        kinds = [self.kinds[output.kind] for output in outputs]
        is_fixed = all(isinstance(kind, Pooled | ModelVector) for kind in kinds)
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

    def _lacking(self, kind: OutputKind, at: int) -> InvalidField:
        field, bundle = FieldPath(Part.OUTPUT_KIND, at), self._bundle
        if kind is OutputKind.MODEL and not (bundle.multi_vector or bundle.sparse):
            problem = "model {model} does not say how it was trained to pool; ask for a pooling by its name"
            return InvalidField(field, problem, model=bundle.name)
        problem = "model {model} has no {kind}; it has {there}"
        return InvalidField(field, problem, model=bundle.name, kind=kind, there=tuple(self.kinds))

    def static(self, outputs: Sequence[Output], task: Task, other_input: int | None = None) -> StaticSparse | None:
        """What answers a call without the model, if anything does.

        Args:
            outputs: The outputs of the call.
            task: What the texts are; one that the model knows.
            other_input: The first input that is no text; None where all are.

        Raises:
            InvalidField: Not all of the call can be answered so.
        """
        static = self._bundle.treatment(task).static_sparse
        if static is None or all(output.kind is not OutputKind.SPARSE for output in outputs):
            return None
        how = "model {model} makes {kind} of this task without a run"
        values = {"model": self._bundle.name, "kind": OutputKind.SPARSE}
        for i, output in enumerate(outputs):
            if output.kind is not OutputKind.SPARSE:
                problem = f"{how}: ask for {{other}} in another call"
                raise InvalidField(FieldPath(Part.OUTPUT_KIND, i), problem, other=output.kind, **values)
        if other_input is not None:
            raise InvalidField(FieldPath(Part.INPUT, other_input), f"{how}, from texts only", **values)
        return static

    def check_lengths(self, outputs: Sequence[Output], lengths: Sequence[int]) -> None:
        """Refuses sequences of more tokens than the outputs of a call can be made of.

        Raises:
            TooLongToPool: A sequence has too many tokens for its vectors to be joined.
        """
        for i, output in enumerate(outputs):
            kind = self.kinds[output.kind]
            if isinstance(kind, MultiVectors):
                for input_at, tokens in enumerate(lengths):
                    kind.check_length(output, i, tokens, input_at)

    def width(self, output: Output) -> int:
        """The numbers of a row."""
        return output.dimensions or self.kinds[output.kind].width

    def is_l2_normalized(self, output: Output) -> bool:
        """Whether all rows have length 1, asked for or not."""
        kind = self.kinds[output.kind]
        return output.l2_normalize or (isinstance(kind, ModelVector) and kind.gives_unit_vectors(output))

    def reply_bytes(self, outputs: Sequence[Output], tokens: int, *, token_rows: int, spans: int) -> int:
        """The bytes of the rows of one sequence, but for sparse weights: see `sparse_bytes`.

        Args:
            outputs: The outputs of the call.
            tokens: The tokens of the sequence.
            token_rows: Of these the ones that have rows in OutputKind.TOKENS.
            spans: The ranges of the sequence.
        """
        size = 0
        for output in outputs:
            size += self.kinds[output.kind].reply_bytes(output, tokens, token_rows, spans)
        return size

    def sparse_bytes(self, outputs: Sequence[Output], arrays: OutputArrays) -> int:
        """The bytes that sparse weights of one sequence take; `arrays` has what was made for each output."""
        return sum(
            len(array.rows) * kind.weight_bytes(output)
            for output, array in zip(outputs, arrays, strict=True)
            if isinstance(kind := self.kinds[output.kind], SparseWeights)
        )

    def cost(self, outputs: Sequence[Output], tokens: int, spans: int = 0) -> int:
        """What one sequence takes with all of its outputs, in tokens of this model that are encoded: at least `tokens`.

        One ordinary output is part of that; further ones, ranges, and vectors that are joined are not.
        """
        if len(outputs) == 1:
            only_us = self.kinds[outputs[0].kind].extra_us(outputs, tokens, spans)
            return tokens + math.ceil(only_us / self._token_us)
        wanted: dict[OutputKind, list[Output]] = {}
        for output in outputs:
            wanted.setdefault(output.kind, []).append(output)
        extra_us = [self.kinds[kind].extra_us(alike, tokens, spans) for kind, alike in wanted.items()]
        heads_us = [self.kinds[kind].head_us(tokens) for kind in wanted]
        finish_us = [self.kinds[output.kind].finish_us(output, tokens) for output in outputs]
        ordinary_us = [-max(heads_us, default=0.0), -max(finish_us, default=0.0)]
        return tokens + math.ceil(math.fsum(extra_us + heads_us + finish_us + ordinary_us) / self._token_us)

    def compute(self, result: BatchResult, sequences: Sequence[HasOutputs]) -> list[OutputArrays | None]:
        """Makes of a batch what each of its sequences is wanted for.

        A sequence gets the same numbers alone and beside others, to the last bit, and numbers of one that are not
        finite touch no other; NumPy's warnings of these are for the caller to turn off. It takes few calls of NumPy:
        after a model has run, the code of both is in none of the CPU's caches.

        Args:
            result: What the batch gave; the padding may be written to.
            sequences: The sequences of the batch.

        Returns:
            For each sequence an array of (rows, width) for each output: as many rows as tokens for OutputKind.TOKENS,
            as ranges for OutputKind.SPANS, else one; IndexedRows for MULTI_VECTOR and SPARSE. None for a sequence
            whose rows, or the numbers made of these, are not finite, or zero because a norm overflows. Rows that are
            wanted as they are refer to the batch's own.
        """
        batch = BatchRows(result, sequences)
        alike: dict[tuple[Output, ...], list[int]] = {}  # the places of those that want the same, mostly all
        for i, sequence in enumerate(sequences):
            alike.setdefault(sequence.wanted, []).append(i)
        first = next(iter(alike), ())[:1] if len(alike) == 1 else ()
        batch.look(*first or (None,))
        columns: dict[Output, Column] = {}
        for kind, wanted in _by_kind(alike, batch.failed).items():
            columns.update(self.kinds[kind].compute(batch, wanted))
        if first and not batch.failed:
            return list(zip(*map(columns.__getitem__, sequences[0].wanted), strict=True))
        computed: list[OutputArrays | None] = [None] * len(sequences)
        for outputs, places in alike.items():
            of_group: list[Any] = list(map(columns.get, outputs))
            for i in places:
                if i not in batch.failed:
                    computed[i] = tuple(map(operator.itemgetter(i), of_group))
        return computed

    def compute_empty(self, sequences: Sequence[TokenSequence]) -> None:
        """Gives sequences without tokens their outputs: no rows of tokens, and else what a row of zeros gives."""
        rows = np.zeros((len(sequences), 1, self._bundle.d_model), np.float32)  # (batch, seq, d_model)
        result = BatchResult(rows, [1] * len(sequences), 0.0, 0.0)
        for sequence, arrays in zip(sequences, self.compute(result, sequences), strict=True):
            if arrays is None:
                raise InferenceFailed(
                    "{input}: a row of zeros becomes numbers that are not finite",
                    input=FieldPath(Part.INPUT, sequence.index),
                )
            sequence.outputs = tuple(
                array[:0] if output.kind is OutputKind.TOKENS else array
                for output, array in zip(sequence.wanted, arrays, strict=True)
            )


def _by_kind(
    alike: Mapping[tuple[Output, ...], Sequence[int]], failed: set[int]
) -> dict[OutputKind, dict[Output, list[int]]]:
    """For each kind the outputs that are wanted, and the places of the sequences that want each, which ascend."""
    found: dict[OutputKind, dict[Output, list[int]]] = {}
    for outputs, places in alike.items():
        good = [i for i in places if i not in failed] if failed else places
        for output in dict.fromkeys(outputs) if good else ():
            found.setdefault(output.kind, {}).setdefault(output, []).extend(good)
    if len(alike) > 1:
        for wanted in found.values():
            for at in wanted.values():
                at.sort()
    return found


def _check_distinct(specs: Sequence[OutputSpec]) -> None:
    """Refuse too many outputs, and an output that a call asks for twice."""
    check_output_count(len(specs))
    seen: dict[OutputSpec, int] = {}
    for i, spec in enumerate(specs):
        first = seen.setdefault(spec, i)
        if first != i:
            raise InvalidField(
                FieldPath(Part.OUTPUT, i), "asks for the same as {other}", other=FieldPath(Part.OUTPUT, first)
            )
