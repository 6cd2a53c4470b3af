"""Numbers as JSON, in pieces: orjson keeps Python's lock, and a large array takes it for a second."""

import base64
import io
import time
from collections.abc import Iterable, Iterator

import numpy as np
import orjson

from encserve_server.models.served import EncodeReply
from encserve_server.types.arrays import IndexedRows, OutputRows

# The longest number is -1.1754944e-38 or so, with a comma 17 characters instead of 4 bytes.
JSON_GROWTH = 5.0
# A sparse weight is {"index":4294967295,"value":-1.1754944e-38} or so, with a comma 46 characters instead of 8 bytes.
SPARSE_GROWTH = 6.0
_PIECE_NUMBERS = 16_384
_TURN_BYTES = 64 * 1024


def joined(pieces: Iterable[bytes]) -> bytes:
    """Pieces back to back; each is freed before the next is made, so that an answer is in memory once."""
    answer, turn = io.BytesIO(), _TURN_BYTES
    for piece in pieces:
        answer.write(piece)
        if answer.tell() >= turn:
            turn = answer.tell() + _TURN_BYTES
            time.sleep(0)  # lets the event loop run, which would otherwise wait 5 ms for Python's lock, many times
    return answer.getvalue()


def pooled_rows(reply: EncodeReply) -> OutputRows:
    """(inputs, width) the one vector of each input."""
    rows: OutputRows = np.concatenate([sequence.outputs[0] for sequence in reply.sequences])
    return rows


def rows_as_json(rows: OutputRows) -> Iterator[bytes]:
    """A list of lists of numbers, each in as few digits as say which float32 it is."""
    step = max(1, _PIECE_NUMBERS // rows.shape[1])
    yield b"["
    for begin in range(0, len(rows), step):
        piece = orjson.dumps(rows[begin : begin + step], option=orjson.OPT_SERIALIZE_NUMPY)
        yield b"," + piece[1:-1] if begin else piece[1:-1]
    yield b"]"


def row_as_json(row: OutputRows, *, as_base64: bool) -> bytes:
    """One vector as a list of numbers; or any rows as a string: base64 of their little-endian float32."""
    if as_base64:
        return b'"' + base64.b64encode(row.data) + b'"'
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)


def sparse_as_json(weights: IndexedRows) -> Iterator[bytes]:
    """The weights of one input as a list of objects, by their places in the vocabulary, which ascend."""
    rows, indices = weights.rows[:, 0], weights.indices
    assert indices is not None  # noqa: S101 - sparse weights have places
    yield b"["
    for begin in range(0, len(rows), _PIECE_NUMBERS):
        end = begin + _PIECE_NUMBERS
        values = orjson.dumps(np.ascontiguousarray(rows[begin:end]), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        pairs = zip(indices[begin:end].tolist(), values.split(b","), strict=True)
        objects = b",".join([b'{"index":%d,"value":%b}' % pair for pair in pairs])
        yield b"," + objects if begin else objects
    yield b"]"


def usage_of(reply: EncodeReply) -> dict[str, int]:
    """How many tokens the model saw, as OpenAI's clients expect it."""
    tokens = sum(len(it.input) for it in reply.sequences)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
