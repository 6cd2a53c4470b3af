"""Estimates the size of a reply, so that a reply over the limit is refused before any computation."""

from collections.abc import Sequence
from dataclasses import dataclass

from encserve_server.errors import FieldPath, RequestField, ResponseTooLarge
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.outputs import ModelOutputs, OutputPlan
from encserve_server.types.requests import Detail, OffsetUnit, Output, OutputKind
from encserve_server.types.sequences import TokenSequence

# The maximum number of bytes of a reply besides the rows. A token has an id, two offsets, a flag and overhead.
_INFO_BYTES_PER_TOKEN = 24
_STRING_OVERHEAD_BYTES = 6
_INFO_BYTES_PER_SEQUENCE = 64
_INFO_BYTES_PER_REPLY = 1024
_ADVICE = ", and float16 or pooled outputs take less"


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """The format of a reply. The format does not change the values of vectors.

    Attributes:
        detail: The amount of information about each sequence. None means Detail.TOKENS if an output has a row for each
            token, and otherwise Detail.COUNTS.
        with_strings: Whether the reply has the string of each token.
        without_special: Whether OutputKind.TOKENS leaves out the rows of special tokens.
        offset_unit: The unit of positions in a text.
        padded: Whether the rows of shorter sequences are padded to the longest sequence.
    """

    detail: Detail | None = None
    with_strings: bool = False
    without_special: bool = False
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS
    padded: bool = False


class ReplySize:
    """Estimates the largest possible size of a model's replies."""

    def __init__(self, outputs: ModelOutputs, tokenizer: TextTokenizer | None, limit: int) -> None:
        """`limit` is the maximum size of a reply in bytes."""
        self._outputs = outputs
        self._string_bytes = 0 if tokenizer is None else tokenizer.max_token_bytes + _STRING_OVERHEAD_BYTES
        self._limit = limit
        self._span_bytes = outputs.reply_bytes((Output(OutputKind.SPANS, False),), 0, token_rows=0, spans=1)

    def check(
        self, sequences: Sequence[TokenSequence], inputs: int, plan: OutputPlan, detail: Detail, shape: ReplyShape
    ) -> int:
        """Return the size of a reply with these outputs, in bytes, without sparse weights.

        Args:
            sequences: The sequences so far. If the rows of all inputs have the same size, the result also includes the
                rows of later inputs. With padding, the result assumes that each input is as long as the longest
                sequence so far.
            inputs: The number of all inputs.
            plan: The outputs of each sequence.
            detail: The amount of information about each sequence.
            shape: The format of the reply.

        Raises:
            ResponseTooLarge: The reply is over the limit.
        """
        info_bytes = self._info_bytes(shape.with_strings) if detail is Detail.TOKENS else 0
        if plan.row_bytes is not None:
            sizes = [plan.row_bytes + len(it.input) * info_bytes for it in sequences]
            sizes += [plan.row_bytes] * (inputs - len(sequences))
        else:
            sizes = [self._sequence_bytes(it, plan, shape) + len(it.input) * info_bytes for it in sequences]
        if shape.padded:
            sizes = [max(sizes)] * inputs
        return self._sum(sizes, inputs, _ADVICE)

    def check_tokens(self, sequences: Sequence[TokenSequence], inputs: int, with_strings: bool) -> int:
        """Return the size of a reply without vectors, in bytes.

        Args:
            sequences: The sequences so far.
            inputs: The number of all inputs.
            with_strings: Whether the reply has the string of each token.

        Raises:
            ResponseTooLarge: The sequences so far are over the limit.
        """
        info_bytes = self._info_bytes(with_strings)
        return self._sum([len(it.input) * info_bytes for it in sequences], inputs)

    def check_sparse(
        self, reply_bytes: int, plan: OutputPlan, sequences: Sequence[TokenSequence], *, padded: bool
    ) -> int:
        """Return the size of a reply with its sparse weights, in bytes.

        The number of weights is known only after the run.

        Raises:
            ResponseTooLarge: The reply is over the limit.
        """
        sizes = [self._outputs.sparse_bytes(plan.outputs, it.outputs) for it in sequences]
        size = reply_bytes + (max(sizes) * len(sizes) if padded else sum(sizes))
        if size > self._limit:
            raise ResponseTooLarge(
                FieldPath(RequestField.INPUTS),
                "the reply would take {size} bytes, over the limit of {limit} (max_response_bytes); send fewer "
                "inputs, or set {active}",
                size=size,
                limit=self._limit,
                active=FieldPath(RequestField.OUTPUT_MAX_ACTIVE_DIMS),
            )
        return size

    def check_spans(self, spans: int) -> None:
        """Refuse more spans than a reply can hold, before the spans are decoded.

        Raises:
            ResponseTooLarge: There are too many spans.
        """
        size = spans * self._span_bytes
        if size > self._limit:
            raise ResponseTooLarge(
                FieldPath(RequestField.SPANS),
                f"the rows of {spans} spans would take {size} bytes, over the limit of {self._limit} "
                "(max_response_bytes); send fewer spans in a request",
            )

    def _info_bytes(self, with_strings: bool) -> int:
        return _INFO_BYTES_PER_TOKEN + (self._string_bytes if with_strings else 0)

    def _sequence_bytes(self, sequence: TokenSequence, plan: OutputPlan, shape: ReplyShape) -> int:
        """Return the size of one sequence's vectors, in bytes."""
        tokens = token_rows = len(sequence.input)
        if shape.without_special and sequence.special is not None:
            token_rows -= int(sequence.special.sum())
        spans = 0 if sequence.token_spans is None else len(sequence.token_spans)
        return plan.reply_bytes(tokens, token_rows, spans)

    def _sum(self, sizes: Sequence[int], inputs: int, advice: str = "") -> int:
        total = sum(sizes) + len(sizes) * _INFO_BYTES_PER_SEQUENCE + _INFO_BYTES_PER_REPLY
        if total <= self._limit:
            return total
        running, fitting = _INFO_BYTES_PER_REPLY, 0
        for size in sizes:
            running += size + _INFO_BYTES_PER_SEQUENCE
            fitting += running <= self._limit
        part = "" if len(sizes) == inputs else f" for the first {len(sizes)} inputs"
        raise ResponseTooLarge(
            FieldPath(RequestField.INPUTS),
            f"the reply{part} would take {total} bytes, over the limit of {self._limit} (max_response_bytes); the "
            f"first {fitting} of {inputs} inputs would fit{advice}",
        )
