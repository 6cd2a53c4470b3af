"""The base class of all kinds of output. A kind checks requests, and computes the size, the cost and the arrays."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from encserve_server.errors import FieldPath, InvalidField, RequestField
from encserve_server.outputs.rows import BatchRows, Column
from encserve_server.outputs.spec import OutputSpec
from encserve_server.types.requests import DataType, Output, OutputKind, Task

# For each output, the sequences that need the output, as indices in the batch, in ascending order. Here, a place is the
# index of a sequence in the batch.
Wanted = Mapping[Output, Sequence[int]]

# The fields of an OutputSpec that only one kind has: the field, the kind, and the name of the field in requests.
_OWN_FIELDS = (
    ("max_active_dims", OutputKind.SPARSE, RequestField.OUTPUT_MAX_ACTIVE_DIMS),
    ("span_pooling", OutputKind.SPANS, RequestField.OUTPUT_SPAN_POOLING),
    ("pool_factor", OutputKind.MULTI_VECTOR, RequestField.OUTPUT_POOL_FACTOR),
)


class Kind(ABC):
    """One kind of output of one model.

    Attributes:
        kind: The kind.
        width: The number of components of a row before it is cut to the requested dimensions.
        per_token: Whether callers need the tokens to understand the output. Then replies have tokens by default.
        data_types: The data types that a request may ask for.
    """

    per_token: ClassVar[bool] = False
    data_types: ClassVar[Collection[DataType]] = tuple(DataType)

    def __init__(self, kind: OutputKind, width: int) -> None:
        """Set the kind and the width of a row."""
        self.kind = kind
        self.width = width

    def check(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """Return the output with index `at` in a request, with all defaults filled in.

        Raises:
            InvalidField: The kind does not support a field's value.
        """
        if spec.max_active_dims or spec.pool_factor or spec.span_pooling is not None:
            self._check_own_fields(spec, at)
        if spec.dimensions > self.width:
            raise InvalidField(
                FieldPath(RequestField.OUTPUT_DIMENSIONS, at),
                "must be at most {width}, the length of a row; was {dimensions}",
                width=self.width,
                dimensions=spec.dimensions,
            )
        if spec.data_type not in self.data_types:
            raise InvalidField(
                FieldPath(RequestField.DATA_TYPE),
                "{data_type} is not available for {kind}, see {output}",
                data_type=spec.data_type,
                kind=self.kind,
                output=FieldPath(RequestField.OUTPUT, at),
            )
        if spec.data_type is DataType.INT8 and not spec.l2_normalize:  # quantization to int8 needs rows of norm 1
            spec = spec._replace(l2_normalize=True)
        return self._output(spec, at, task)

    def _refuse_cut_and_norm(self, spec: OutputSpec, at: int, reason: str) -> None:
        """Refuse to cut or to normalize the rows. `reason` follows "which" in the error.

        Raises:
            InvalidField: A request asks for one of the two.
        """
        for field, value in (
            (RequestField.OUTPUT_NORMALIZE, spec.l2_normalize),
            (RequestField.OUTPUT_DIMENSIONS, spec.dimensions),
        ):
            if value:
                problem = f"is not available for {{kind}}, which {reason}; was {{was}}"
                raise InvalidField(FieldPath(field, at), problem, kind=self.kind, was=value)

    def _check_own_fields(self, spec: OutputSpec, at: int) -> None:
        for name, kind, field in _OWN_FIELDS:
            value = getattr(spec, name)
            if value and kind is not self.kind:
                was = f"{value:g}" if isinstance(value, float) else value
                raise InvalidField(FieldPath(field, at), "is available for {kind} only; was {was}", kind=kind, was=was)

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """Return the output, with the fields that only this kind has.

        Raises:
            InvalidField: One of these fields has a value that is not allowed.
        """
        return Output(self.kind, spec.l2_normalize, spec.data_type, spec.dimensions)

    def row_bytes(self, output: Output) -> int:
        """Return the size of one row in bytes."""
        return output.data_type.row_bytes(output.dimensions or self.width)

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """Return the size of one sequence's rows in bytes, or an upper bound, before the rows are computed.

        Args:
            output: The output.
            tokens: The number of tokens of the sequence.
            token_rows: The number of tokens that have a row in OutputKind.TOKENS.
            spans: The number of spans of the sequence.
        """
        return self.row_bytes(output)

    def extra_cost(self, output: Output, tokens: int, spans: int) -> int:
        """Return the extra cost of an expensive output in tokens; 0 for other outputs. See `ModelOutputs.cost`."""
        return 0

    @abstractmethod
    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Compute all outputs of this kind for a batch.

        If several outputs need the same work, do this work only once.

        `wanted` has no sequence of `batch.failed`. The method adds sequences with invalid rows to `batch.failed`.
        """


def outputs_by_place(wanted: Wanted) -> dict[int, list[Output]]:
    """Return the outputs that each sequence needs, by the place of the sequence, in ascending order."""
    outputs: dict[int, list[Output]] = {}
    for output, places in wanted.items():
        for i in places:
            outputs.setdefault(i, []).append(output)
    return dict(sorted(outputs.items()))


def all_places(wanted: Iterable[Sequence[int]]) -> list[int]:
    """Return the places of all sequences that need at least one output, in ascending order."""
    return sorted(set().union(*wanted))
