"""Encodes many inputs through one client: in order, in bounded memory, and with the place of a refused input."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from encserve_cli.files.reading import Sent
from encserve_client import EncodeResult, InferenceError, InvalidRequestError

R = TypeVar("R")

# The errors of an input itself. Other errors, such as a crash of the server, hit all inputs of a message.
REFUSALS = (InvalidRequestError, InferenceError)

# A block is several messages, but the rows of its tokens fit into memory: some 16,000 tokens of English, or this many
# short inputs.
_BLOCK_BYTES = 64 * 1024
_BLOCK_INPUTS = 2048
# While the last messages of a block are answered, the client sends those of the next block.
_BLOCKS_AT_ONCE = 2

Run = Callable[[list[Any]], R]


def encode_all(run: Run[R], inputs: Iterable[Sent], stop: Callable[[], object]) -> Iterator[tuple[list[Sent], R]]:
    """Yield blocks of inputs with their results, in the order of the inputs.

    Args:
        run: Encodes the inputs of one block. Several threads call it at a time.
        inputs: The inputs.
        stop: Makes the running calls end soon. It is called after an error or Ctrl-C.

    Raises:
        ValueError: An input cannot be read or is refused. The text names the place of the input.
        EncserveError: `run` failed for another reason.
    """
    with ThreadPoolExecutor(_BLOCKS_AT_ONCE, thread_name_prefix="encserve-block") as pool:
        waiting: deque[tuple[list[Sent], Future[R]]] = deque()
        try:
            for block in _blocks(inputs):
                waiting.append((block, pool.submit(encode_block, run, block)))
                if len(waiting) > _BLOCKS_AT_ONCE:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        except BaseException:
            stop()
            raise
        finally:
            for _, future in waiting:
                future.cancel()


def _next(waiting: "deque[tuple[list[Sent], Future[R]]]") -> tuple[list[Sent], R]:
    block, future = waiting.popleft()
    return block, future.result()


def _blocks(inputs: Iterable[Sent]) -> Iterator[list[Sent]]:
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


def encode_block(run: Run[R], block: Sequence[Sent]) -> R:
    """Return the result of `run` for some inputs.

    Raises:
        ValueError: An input is refused. The text names the place of the input instead of the index.
        EncserveError: `run` failed for another reason.
    """
    try:
        return run([it.value for it in block])
    except REFUSALS as error:
        if error.index is None:
            raise
        raise ValueError(f"{block[error.index].where}: {error.problem}") from error


def check_complete(result: EncodeResult) -> EncodeResult:
    """Return the result if each input has outputs.

    Raises:
        EncserveError: The error of the first refused input. Without a refused input, another error.
    """
    for error in sorted(result.errors.values(), key=lambda it: not isinstance(it, REFUSALS)):
        raise error
    return result


def with_sent_ids(result: EncodeResult, values: Sequence[object]) -> EncodeResult:
    """Return the result with the token ids of the inputs that are lists of ids. The server does not return these."""
    infos = (
        replace(info, token_ids=np.array(value[: info.token_count], np.int64)) if isinstance(value, list) else info
        for info, value in zip(result.sequences, values, strict=True)
    )
    return replace(result, sequences=tuple(infos))
