"""Converts outputs to JSON values."""

from collections.abc import Iterator
from typing import Any

from encserve_cli import render
from encserve_client import EncodeResult


def records(result: EncodeResult) -> Iterator[dict[str, Any]]:
    """Yield a JSON record for each input.

    Each record has the key "truncated". The other keys depend on the kind of output.
    """
    output = result.outputs[0]
    made: Iterator[dict[str, Any]]
    if output.kind == "sparse":
        made = (
            {"indices": its.indices.tolist(), "values": its.values.tolist(), "width": its.width}
            for its in output.sparse_vectors()
        )
    elif output.kind == "multi_vector":
        made = (
            {
                "tokens": render.vector_names(info, places, len(rows)),
                "token_indices": None if places is None else places.tolist(),
                "rows": rows.tolist(),
            }
            for rows, places, info in zip(output.arrays(), output.token_indices(), result.sequences, strict=True)
        )
    elif output.kind == "tokens":
        made = (
            {
                "shape": rows.shape,
                "tokens": [token for token, _ in shown],
                "token_ids": [token_id for _, token_id in shown],
                "rows": rows.tolist(),
            }
            for info, rows in zip(result.sequences, output.arrays(), strict=True)
            for shown in [render.row_tokens(info, len(rows))]
        )
    else:
        made = ({"vector": row} for row in output.matrix().tolist())
    for info, its in zip(result.sequences, made, strict=True):
        yield {"truncated": info.truncated} | its
