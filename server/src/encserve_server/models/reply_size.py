"""How large a reply will be, so that one over the limit is refused before any compute."""

from collections.abc import Sequence

from encserve_server.errors import ResponseTooLarge
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.types import Bundle, CheckedSequence, Detail, EncodedSequence, Output, OutputKind

# What a reply holds besides its rows, at most: an id, two offsets and a flag for each token, and a little more.
_INFO_BYTES_PER_TOKEN = 24
_STRING_OVERHEAD_BYTES = 6
_INFO_BYTES_PER_SEQUENCE = 64
_INFO_BYTES_PER_REPLY = 1024
_INDEX_BYTES = 4
_COUNT_BYTES = 5
_FLOAT_BYTES = 4


class ReplySize:
    """Reckons what a model's replies take, in bytes, at most."""

    def __init__(self, bundle: Bundle, tokenizer: TextTokenizer | None, limit: int) -> None:
        """Takes the model, its tokenizer, and the largest reply in bytes."""
        self._bundle = bundle
        self._string_bytes = 0 if tokenizer is None else tokenizer.max_token_bytes + _STRING_OVERHEAD_BYTES
        self._limit = limit

    def check(
        self,
        sequences: Sequence[CheckedSequence],
        outputs: Sequence[Output],
        detail: Detail,
        *,
        with_strings: bool,
        without_special: bool,
        padded: bool,
    ) -> int:
        """What a reply with these outputs takes, but for sparse weights.

        Args:
            sequences: What it is about.
            outputs: What it holds of each.
            detail: How much it tells of each.
            with_strings: Whether that is the vocabulary's strings too.
            without_special: Whether special tokens have no rows in OutputKind.TOKENS.
            padded: Whether all have as many rows as the longest.

        Raises:
            ResponseTooLarge: It is over the limit.
        """
        info_bytes = self._info_bytes(with_strings) if detail is Detail.TOKENS else 0
        sizes = [self._row_bytes(it, outputs, without_special) + len(it.input) * info_bytes for it in sequences]
        if padded:
            sizes = [max(sizes)] * len(sizes)
        return self._sum("inputs", sizes, ", and float16 or pooled outputs take less")

    def check_tokens(self, field: str, sequences: Sequence[CheckedSequence], with_strings: bool) -> int:
        """What a reply without rows takes; `field` is where its texts came in.

        Raises:
            ResponseTooLarge: It is over the limit.
        """
        info_bytes = self._info_bytes(with_strings)
        return self._sum(field, [len(it.input) * info_bytes for it in sequences])

    def check_sparse(self, others: int, outputs: Sequence[Output], encoded: Sequence[EncodedSequence]) -> int:
        """What sparse weights add to a reply of so many bytes: how many they are is known only when they are there.

        Raises:
            ResponseTooLarge: With them it is over the limit.
        """
        size = 0
        for i, output in enumerate(outputs):
            if output.kind is OutputKind.SPARSE:
                size += sum(len(it.outputs[i][0]) for it in encoded) * (output.data_type.row_bytes(1) + _INDEX_BYTES)
        if size and others + size > self._limit:
            raise ResponseTooLarge(
                "inputs",
                f"the reply would take {others + size} bytes, over the limit of {self._limit} (max_response_bytes); "
                "fewer inputs, or max_active_dims in options.outputs, take less",
            )
        return size

    def _info_bytes(self, with_strings: bool) -> int:
        """What is told of a token."""
        return _INFO_BYTES_PER_TOKEN + (self._string_bytes if with_strings else 0)

    def _row_bytes(self, sequence: CheckedSequence, outputs: Sequence[Output], without_special: bool) -> int:
        """The rows of one sequence."""
        tokens = token_rows = len(sequence.input)
        if without_special and sequence.special is not None:
            token_rows -= int(sequence.special.sum())
        size = 0
        for it in outputs:
            row_bytes = it.data_type.row_bytes(self._bundle.width(it))
            if it.kind is OutputKind.TOKENS:
                size += token_rows * row_bytes
            elif it.kind is OutputKind.MULTI_VECTOR:
                size += tokens * (row_bytes + _INDEX_BYTES)
            elif it.kind is OutputKind.SPANS:  # as they are made: their number has no other bound in all
                spans = 0 if sequence.token_spans is None else len(sequence.token_spans)
                size += spans * (self._bundle.d_model * _FLOAT_BYTES + _COUNT_BYTES)
            elif it.kind is not OutputKind.SPARSE:
                size += row_bytes
        return size

    def _sum(self, field: str, sizes: Sequence[int], advice: str = "") -> int:
        total = _INFO_BYTES_PER_REPLY
        fitting = 0
        for size in sizes:
            total += size + _INFO_BYTES_PER_SEQUENCE
            fitting += total <= self._limit
        if total > self._limit:
            raise ResponseTooLarge(
                field,
                f"the reply would take {total} bytes, over the limit of {self._limit} (max_response_bytes); the first "
                f"{fitting} of {len(sizes)} inputs would fit{advice}",
            )
        return total
