"""Many inputs through one client: in order, a bounded number at a time, and each error by the input's own place."""

import functools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from encserve_cli.files.reading import Sent
from encserve_client import DeadlineError, OverloadedError, ServerUnavailableError

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
    """What `run` makes of the inputs, in their order, some at a time.

    Args:
        run: Encodes the inputs of one call. Several threads call it at a time.
        inputs: The inputs.
        stop: Makes the running calls end soon. It is called after an error or Ctrl-C.

    Raises:
        ValueError: An input cannot be had, or is refused; the text says where it comes from.
        EncserveError: Whatever else `run` raises. A server without room is asked again, for five minutes; so is one
            that is away after it has answered a call.
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
    """Cuts inputs into calls of neither too many nor too long ones; `size_of` says how many bytes an input has."""
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
    """What `run` returns. A server that has no room is asked again for five minutes, until `stopping` is set.

    So is a server that is away or too slow, if it has answered before: `answered` says so, and a call that succeeds
    sets it.
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


def _located(problem: str, call: list[Sent]) -> str:
    """An error's text with an input's own place for its place in the call."""

    def own(found: re.Match[str]) -> str:
        place = int(found[1])
        return call[place].where if place < len(call) else found[0]

    return re.sub(r"\b(?:inputs|texts)\[(\d+)\]", own, problem)
