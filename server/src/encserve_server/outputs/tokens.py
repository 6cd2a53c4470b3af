"""A row for each token."""

from collections.abc import Mapping

from encserve_server.outputs.kind import Kind, Wanted
from encserve_server.outputs.rows import BatchRows, Column, finish
from encserve_server.outputs.spec import FLOAT_TYPES
from encserve_server.types.requests import Output


class Tokens(Kind):
    """OutputKind.TOKENS. Rows that need no conversion are views of the batch."""

    per_token = True
    data_types = FLOAT_TYPES

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """Return the size of the token rows in bytes."""
        return token_rows * self.row_bytes(output)

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Normalize and convert the rows of each sequence."""
        rows = batch.result.rows
        columns = {}
        for output, places in wanted.items():
            finished = [finish(rows[i], output, is_finite=True) for i in places]
            batch.failed.update(i for i, (_, invalid) in zip(places, finished, strict=True) if invalid is not None)
            columns[output] = batch.column([token_rows for token_rows, _ in finished], places)
        return columns
