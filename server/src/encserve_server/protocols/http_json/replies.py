"""Writes numbers as JSON in pieces. For a large array, orjson would hold Python's lock for a second."""

import base64
import io
import time
from collections.abc import Iterable, Iterator

import numpy as np
import orjson

from encserve_server.models.served import EncodeReply
from encserve_server.system.background import TURN_BYTES
from encserve_server.types.arrays import IndexedRows, OutputRows

# The longest number is like `-0.0000063184107,`: 17 characters, comma included, for 4 bytes.
JSON_GROWTH = 5.0
# The longest sparse weight is like `{"index":4294967295,"value":-0.0000063184107},`: 46 characters, comma included, for
# 8 bytes.
SPARSE_GROWTH = 6.0
PIECE_NUMBERS = 16_384


def joined(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Join pieces. Each piece is freed before the next piece is computed, so memory holds the reply only once."""
    answer, turn = io.BytesIO(), TURN_BYTES
    for piece in pieces:
        answer.write(piece)
        if answer.tell() >= turn:
            turn = answer.tell() + TURN_BYTES
            time.sleep(0)  # lets the event loop run; otherwise it would wait 5 ms for Python's lock after each piece
    return answer.getvalue()


def pooled_rows(reply: EncodeReply) -> OutputRows:
    """Return the vectors of the inputs, (inputs, width): one vector for each input."""
    rows: OutputRows = np.concatenate([sequence.outputs[0] for sequence in reply.sequences])
    return rows


def rows_as_json(rows: OutputRows) -> Iterator[bytes]:
    """Write a list of lists of numbers. Each float32 gets the minimum number of digits that identify the number."""
    step = max(1, PIECE_NUMBERS // rows.shape[1])
    yield b"["
    for begin in range(0, len(rows), step):
        piece = orjson.dumps(rows[begin : begin + step], option=orjson.OPT_SERIALIZE_NUMPY)
        yield b"," + piece[1:-1] if begin else piece[1:-1]
    yield b"]"


def row_as_json(row: OutputRows, *, as_base64: bool) -> bytes:
    """Write one vector as a list of numbers, or rows of any shape as base64 of little-endian float32."""
    if as_base64:
        return b'"' + base64.b64encode(row.data) + b'"'
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)


def sparse_as_json(weights: IndexedRows) -> Iterator[bytes]:
    """Write the weights of one input as a list of objects, in the order of the vocabulary."""
    rows, indices = weights.rows[:, 0], weights.indices
    assert indices is not None  # noqa: S101 - sparse weights have indices
    yield b"["
    for begin in range(0, len(rows), PIECE_NUMBERS):
        end = begin + PIECE_NUMBERS
        values = orjson.dumps(np.ascontiguousarray(rows[begin:end]), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        pairs = zip(indices[begin:end].tolist(), values.split(b","), strict=True)
        objects = b",".join([b'{"index":%d,"value":%b}' % pair for pair in pairs])
        yield b"," + objects if begin else objects
    yield b"]"


def usage_of(reply: EncodeReply) -> dict[str, int]:
    """Write the number of tokens that the model saw, in OpenAI's form."""
    tokens = sum(len(it.input) for it in reply.sequences)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
