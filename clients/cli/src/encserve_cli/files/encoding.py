"""Encodes blocks of inputs in threads, in order and in bounded memory. Errors name the file and line."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from encserve_cli.files.reading import Sent
from encserve_client import EncodeResult, EncserveError, InferenceError, InvalidRequestError

T = TypeVar("T")
R = TypeVar("R")

# The errors of an input itself. Other errors, such as a crash of the server, hit all inputs of a message.
REFUSALS = (InvalidRequestError, InferenceError)

# A block is sent as several messages. Its token vectors fit into memory. `_BLOCK_BYTES` is about 16,000 tokens of
# English text. An input of more bytes is a block of its own.
_BLOCK_BYTES = 64 * 1024
_BLOCK_INPUTS = 2048
# One block is computed, one is tokenized or waits, and one is written. Meanwhile a fourth block is read.
_BLOCKS_AT_ONCE = 3


def encode_in_order(
    encode: Callable[[T], R], blocks: Iterable[T], stop: Callable[[], object]
) -> Generator[tuple[T, R], None, None]:
    """Yield (block, `encode(block)`) for each block, in order. Several threads call `encode` at the same time.

    If your loop ends early, for example after an error, close the generator. Then the running calls end.

    Args:
        encode: Encodes a block.
        blocks: The blocks. At most a few blocks are read ahead.
        stop: A function that ends the running calls soon. The generator calls `stop` after an error, after Ctrl-C, and
            when the caller closes the generator.

    Raises:
        Exception: The first error of `encode` or `blocks`. If `blocks` fails, the results of
            earlier blocks are yielded first.
    """
    with ThreadPoolExecutor(_BLOCKS_AT_ONCE, thread_name_prefix="encserve-block") as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        failure: list[Exception] = []
        try:
            for block in _until_failure(blocks, failure):
                waiting.append((block, pool.submit(encode, block)))
                if len(waiting) == _BLOCKS_AT_ONCE:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
            if failure:
                raise failure[0]
        except BaseException:
            stop()
            raise
        finally:
            for _, future in waiting:
                future.cancel()


def _until_failure(blocks: Iterable[T], failure: list[Exception]) -> Iterator[T]:
    """Yield blocks. If a file cannot be read, add the error to `failure` and end, so that earlier rows are not lost."""
    try:
        yield from blocks
    except (ValueError, OSError) as error:
        failure.append(error)


def _next(waiting: "deque[tuple[T, Future[R]]]") -> tuple[T, R]:
    block, future = waiting.popleft()
    return block, future.result()


def blocks_of(inputs: Iterable[Sent]) -> Iterator[list[Sent]]:
    """Yield the inputs in blocks, in order."""
    block: list[Sent] = []
    size = 0
    for it in inputs:
        if block and (len(block) == _BLOCK_INPUTS or size + it.size > _BLOCK_BYTES):
            yield block
            block, size = [], 0
        block.append(it)
        size += it.size
    if block:
        yield block


def encode_block(run: Callable[[list[Any]], R], block: Sequence[Sent]) -> R:
    """Return the result of `run` for some inputs.

    Raises:
        ValueError: An input is refused. The message names the file and line instead of the index.
        EncserveError: `run` failed for another reason.
    """
    try:
        return run([it.value for it in block])
    except REFUSALS as error:
        if error.index is None:
            raise
        raise refused(block[error.index], error) from error


def refused(it: Sent, error: EncserveError) -> ValueError:
    """Return the error of a refused input. The message names the file and line."""
    return ValueError(f"{it.where}: {error.problem}")


def check_complete(result: EncodeResult) -> EncodeResult:
    """Return the result if each input has outputs.

    Raises:
        EncserveError: The error of the first refused input. Without a refused input, another error.
    """
    for error in sorted(result.errors.values(), key=lambda it: not isinstance(it, REFUSALS)):
        raise error
    return result


def with_sent_ids(result: EncodeResult, values: Sequence[object]) -> EncodeResult:
    """Add the token ids to the result for inputs that are lists of ids. The server does not return these ids."""
    infos = (
        replace(info, token_ids=np.array(value[: info.token_count], np.int64)) if isinstance(value, list) else info
        for info, value in zip(result.sequences, values, strict=True)
    )
    return replace(result, sequences=tuple(infos))
