"""What every kind of output has: a check of what is asked for, the bytes of a reply, the work, and the numbers."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from encserve_server.errors import FieldPath, InvalidField, Part
from encserve_server.outputs.rows import BatchRows, Column
from encserve_server.outputs.spec import OutputSpec
from encserve_server.types.requests import DataType, Output, OutputKind, Task

Wanted = Mapping[Output, Sequence[int]]  # the places of the sequences that want each output, which ascend

# What a CPU of two cores was seen to compute in a model's products: 132 µs for a token of MiniLM, which takes 21 MFLOP.
FLOP_PER_US = 160_000.0

# The fields of an OutputSpec that one kind has, and the names of these in requests.
_OWN_FIELDS = (
    ("max_active_dims", OutputKind.SPARSE, Part.OUTPUT_MAX_ACTIVE_DIMS),
    ("span_pooling", OutputKind.SPANS, Part.OUTPUT_SPAN_POOLING),
    ("pool_factor", OutputKind.MULTI_VECTOR, Part.OUTPUT_POOL_FACTOR),
)


class Kind(ABC):
    """One kind of output of one model.

    Attributes:
        kind: The kind.
        width: The numbers of a row before it is cut.
        per_token: Whether the output tells something of each token.
        data_types: The types that its numbers can have.
    """

    per_token: ClassVar[bool] = False
    data_types: ClassVar[Collection[DataType]] = tuple(DataType)

    def __init__(self, kind: OutputKind, width: int) -> None:
        """Takes the kind and the width of a row."""
        self.kind = kind
        self.width = width

    def check(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """The output that is asked for as number `at`, every default filled in.

        Raises:
            InvalidField: The output cannot be had.
        """
        if spec.max_active_dims or spec.pool_factor or spec.span_pooling is not None:
            self._check_own_fields(spec, at)
        if spec.dimensions > self.width:
            raise InvalidField(
                FieldPath(Part.OUTPUT_DIMENSIONS, at),
                "must be at most {width}, the numbers of a row; was {dimensions}",
                width=self.width,
                dimensions=spec.dimensions,
            )
        if spec.data_type not in self.data_types:
            raise InvalidField(
                FieldPath(Part.DATA_TYPE),
                "{data_type} is not for {kind}, see {output}",
                data_type=spec.data_type,
                kind=self.kind,
                output=FieldPath(Part.OUTPUT, at),
            )
        if spec.data_type is DataType.INT8 and not spec.l2_normalize:  # its range is that of rows of length 1
            spec = spec._replace(l2_normalize=True)
        return self._output(spec, at, task)

    def _check_own_fields(self, spec: OutputSpec, at: int) -> None:
        """Refuses what other kinds have."""
        for name, kind, part in _OWN_FIELDS:
            value = getattr(spec, name)
            if value and kind is not self.kind:
                was = f"{value:g}" if isinstance(value, float) else value
                raise InvalidField(FieldPath(part, at), "is for {kind} alone; was {was}", kind=kind, was=was)

    def _output(self, spec: OutputSpec, at: int, task: Task) -> Output:
        """The output, with the fields that only this kind has.

        Raises:
            InvalidField: One of these has a value that it must not have.
        """
        return Output(self.kind, spec.l2_normalize, spec.data_type, spec.dimensions)

    def row_bytes(self, output: Output) -> int:
        """The bytes of one row."""
        return output.data_type.row_bytes(output.dimensions or self.width)

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """The bytes of the rows of one sequence, for all that is known before these are made.

        Args:
            output: The output.
            tokens: The tokens of the sequence.
            token_rows: Of these the ones that have rows in OutputKind.TOKENS.
            spans: The ranges of the sequence.
        """
        return self.row_bytes(output)

    def head_us(self, tokens: int) -> float:
        """What the head takes for one sequence, whatever outputs are made of that, in µs."""
        return 0.0

    @abstractmethod
    def finish_us(self, output: Output, tokens: int) -> float:
        """What one output of one sequence takes beside others, without a head, in µs on the CPU."""

    def extra_us(self, outputs: Sequence[Output], tokens: int, spans: int) -> float:
        """What outputs of this kind take of one sequence that no ordinary output does, in µs on the CPU."""
        return 0.0

    @abstractmethod
    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Makes all outputs of this kind, of the sequences that want each; what is alike is made once.

        Sequences that have failed are not among these, and ones whose numbers turn out as lost are added to those that
        have failed.
        """


def by_place(wanted: Wanted) -> dict[int, list[Output]]:
    """The outputs of each sequence, by places that ascend."""
    found: dict[int, list[Output]] = {}
    for output, places in wanted.items():
        for i in places:
            found.setdefault(i, []).append(output)
    return dict(sorted(found.items()))


def all_places(wanted: Iterable[Sequence[int]]) -> list[int]:
    """The places of all sequences that want any of several outputs; these ascend."""
    return sorted(set().union(*wanted))
