"""A row for each token."""

from collections.abc import Mapping

from encserve_server.outputs.kind import Kind, Wanted
from encserve_server.outputs.rows import BatchRows, Column, finish
from encserve_server.outputs.spec import FLOAT_TYPES
from encserve_server.types.requests import Output

# NumPy's calls for one sequence, and of each number what normalising, another type and the reply take.
_SEQUENCE_US = 5.0
_NUMBER_US = 0.0025


class Tokens(Kind):
    """OutputKind.TOKENS. Rows that are wanted as they are refer to the batch's own."""

    per_token = True
    data_types = FLOAT_TYPES

    def reply_bytes(self, output: Output, tokens: int, token_rows: int, spans: int) -> int:
        """A row for each token that has one."""
        return token_rows * self.row_bytes(output)

    def finish_us(self, output: Output, tokens: int) -> float:
        """Of each number the same."""
        return _SEQUENCE_US + tokens * self.width * _NUMBER_US

    def compute(self, batch: BatchRows, wanted: Wanted) -> Mapping[Output, Column]:
        """Of each sequence apart: normalising is all that there is to do."""
        rows = batch.result.rows
        columns = {}
        for output, places in wanted.items():
            finished = [finish(rows[i], output, finite=True) for i in places]
            batch.failed.update(i for i, (_, lost) in zip(places, finished, strict=True) if lost is not None)
            columns[output] = batch.column([rows_of_one for rows_of_one, _ in finished], places)
        return columns
