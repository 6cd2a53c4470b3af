"""Encodes many inputs through one client, in order and in bounded memory. Errors name the file and line."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from encserve_cli.files.reading import Sent
from encserve_client import EncodeResult, EncserveError

R = TypeVar("R")

# A block has several messages, and its token vectors fit into memory. The limits are about 16,000 tokens of English
# text, and this many short inputs.
_BLOCK_BYTES = 64 * 1024
_BLOCK_INPUTS = 2048
# The client sends messages of the next block while it waits for the last answers of a block.
_BLOCKS_AT_ONCE = 2

Run = Callable[[list[Any]], R]


def encode_all(run: Run[R], inputs: Iterable[Sent], stop: Callable[[], object]) -> Iterator[tuple[list[Sent], R]]:
    """Yield blocks of inputs with their results, in the order of the inputs.

    Args:
        run: Encodes the inputs of one block. Several threads call `run` at the same time.
        inputs: The inputs.
        stop: Ends the running calls soon. Called after an error or Ctrl-C.

    Raises:
        ValueError: An input cannot be read or is refused. The message names the file and line of the input.
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
        ValueError: An input is refused. The message names the file and line instead of the index.
        EncserveError: `run` failed for another reason.
    """
    try:
        return run([it.value for it in block])
    except EncserveError as error:
        if error.index is None:
            raise
        raise ValueError(f"{block[error.index].where}: {error.problem}") from error


def with_sent_ids(result: EncodeResult, values: Sequence[object]) -> EncodeResult:
    """Add the token ids to the result for inputs that are lists of ids. The server does not return these ids."""
    infos = (
        replace(info, token_ids=np.array(value[: info.token_count], np.int64)) if isinstance(value, list) else info
        for info, value in zip(result.sequences, values, strict=True)
    )
    return replace(result, sequences=tuple(infos))
