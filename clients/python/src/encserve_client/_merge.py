"""The answers to one call's messages, put together."""

from collections.abc import Sequence

import numpy as np

from encserve_client._decode import Part
from encserve_client._exceptions import FingerprintError, ProtocolError
from encserve_client._options import Options
from encserve_client._results import Block, EncodedOutput, EncodeResult, ModelInfo, Timings


def merge_parts(parts: Sequence[Part], total_seconds: float, attempts: int) -> EncodeResult:
    """Makes one result of one answer or more, which are in the order of the inputs.

    Raises:
        FingerprintError: The answers are from different vector spaces.
        ProtocolError: They differ in width, or in what their rows are.
    """
    first = parts[0]
    for part in parts:
        check_fingerprint(first.fingerprint, part.fingerprint)
        if part.kinds != first.kinds or _widths(part) != _widths(first):
            raise ProtocolError(
                f"all answers of a call must have the same outputs; were {first.kinds} of widths {_widths(first)} "
                f"and {part.kinds} of widths {_widths(part)}"
            )
    outputs = tuple(
        EncodedOutput(kind, normalized, tuple(part.blocks[index] for part in parts))
        for index, (kind, normalized) in enumerate(first.kinds)
    )
    tokenize, queue, compute = map(max, zip(*(part.timings for part in parts), strict=True))
    timings = Timings(tokenize, queue, compute, total_seconds, len(parts), attempts)
    sequences = tuple(info for part in parts for info in part.sequences)
    return EncodeResult(first.model, first.version, first.fingerprint, outputs, sequences, timings)


def check_fingerprint(first: str, other: str) -> None:
    """Raises FingerprintError if two answers of one call are from different vector spaces."""
    if first != other:
        raise FingerprintError(
            f"answers of one call have different fingerprints, {first} and {other}: the model was replaced in between; "
            "call again, and name the version if this happens often"
        )


def check_expected(expected: str, fingerprint: str) -> None:
    """Raises FingerprintError for an answer from another vector space than expected; an empty one expects nothing.

    A server refuses such a request itself, unless it is older than that field.
    """
    if expected and expected != fingerprint:
        raise FingerprintError(f"fingerprint {expected} is expected, but the answer has {fingerprint}")


def empty_result(info: ModelInfo, options: Options, total_seconds: float) -> EncodeResult:
    """The result for no inputs: arrays of no rows, as wide as the model's."""
    block = Block(np.empty((0, info.d_model), options.numpy_dtype), np.empty(0, np.int64))
    outputs = tuple(EncodedOutput(output.kind, output.l2_normalize, (block,)) for output in options.outputs)
    return EncodeResult(
        info.name, info.version, info.fingerprint, outputs, (), Timings(0.0, 0.0, 0.0, total_seconds, 0, 0)
    )


def _widths(part: Part) -> list[int]:
    return [block.rows.shape[1] for block in part.blocks]
