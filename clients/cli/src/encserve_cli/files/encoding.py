"""Encodes many inputs through one client: in order, in bounded memory, and with the place of a refused input."""

import functools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from encserve_cli.files.reading import Sent
from encserve_client import DeadlineError, EncodeResult, OverloadedError, ServerUnavailableError

R = TypeVar("R")
V = TypeVar("V")

# Of one call: some 8,000 tokens of English, so that no call takes long, or this many short inputs.
_CALL_BYTES = 32 * 1024
_CALL_INPUTS = 256
# Enough for the server to choose among a thousand short inputs when it makes batches.
CALLS_AT_ONCE = 6
_PATIENCE_SECONDS = 300.0  # with a server that has no room, or that has answered and is away

Run = Callable[[list[Any]], R]


def encode_all(run: Run[R], inputs: Iterable[Sent], stop: Callable[[], object]) -> Iterator[tuple[list[Sent], R]]:
    """Yield calls of inputs with their results, in the order of the inputs.

    Args:
        run: Encodes the inputs of one call. Several threads call it at a time.
        inputs: The inputs.
        stop: Makes the running calls end soon. It is called after an error or Ctrl-C.

    Raises:
        ValueError: An input cannot be read or is refused. The text names the place of the input.
        EncserveError: `run` failed for another reason, also after the retries of `patiently`.
    """
    stopping = threading.Event()  # nobody waits for the others once one has failed
    answered = threading.Event()  # the server has answered a call, so it exists
    with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="encserve-call") as pool:
        waiting: deque[tuple[list[Sent], Future[R]]] = deque()
        try:
            for call in cut_calls(inputs, lambda it: it.size):
                waiting.append((call, pool.submit(_encode, run, call, stopping, answered)))
                if len(waiting) > CALLS_AT_ONCE:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        except BaseException:
            stop()
            raise
        finally:
            stopping.set()
            for _, future in waiting:
                future.cancel()


def _next(waiting: "deque[tuple[list[Sent], Future[R]]]") -> tuple[list[Sent], R]:
    call, future = waiting.popleft()
    return call, future.result()


def cut_calls(inputs: Iterable[V], size_of: Callable[[V], int]) -> Iterator[list[V]]:
    """Cut inputs into calls with a bounded number of inputs and bytes. `size_of` returns the bytes of an input."""
    call: list[V] = []
    size = 0
    for it in inputs:
        its_size = size_of(it)
        if call and (len(call) == _CALL_INPUTS or size + its_size > _CALL_BYTES):
            yield call
            call, size = [], 0
        call.append(it)
        size += its_size
    if call:
        yield call


def patiently(run: Callable[[], R], stopping: threading.Event, answered: threading.Event) -> R:
    """Return the result of `run`. If the server is full, call `run` again for five minutes, or until `stopping` is set.

    `answered` tells whether the server has answered before. Then a server that is away or too slow is called again too.
    """
    gives_up_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            result = run()
        except (OverloadedError, ServerUnavailableError, DeadlineError) as error:
            if not (isinstance(error, OverloadedError) or answered.is_set()):
                raise
            delay_seconds = (error.retry_delay_seconds if isinstance(error, OverloadedError) else None) or 1.0
            if time.monotonic() + delay_seconds > gives_up_at or stopping.wait(delay_seconds):
                raise
        else:
            answered.set()
            return result


def _encode(run: Run[R], call: list[Sent], stopping: threading.Event, answered: threading.Event) -> R:
    try:
        return patiently(functools.partial(run, [it.value for it in call]), stopping, answered)
    except ValueError as error:
        error.args = (_located(str(error), call),)  # the class stays, because errors of arguments are shown by class
        raise


def with_sent_ids(result: EncodeResult, values: Sequence[object]) -> EncodeResult:
    """Return the result with the token ids of the inputs that are lists of ids. The server does not return these."""
    infos = (
        replace(info, token_ids=np.array(value[: info.token_count], np.int64)) if isinstance(value, list) else info
        for info, value in zip(result.sequences, values, strict=True)
    )
    return replace(result, sequences=tuple(infos))


def _located(problem: str, call: list[Sent]) -> str:
    """Return the text of an error, with the place of the input in its file instead of the index in the call."""

    def own(found: re.Match[str]) -> str:
        place = int(found[1])
        return call[place].where if place < len(call) else found[0]

    return re.sub(r"\b(?:inputs|texts)\[(\d+)\]", own, problem)
