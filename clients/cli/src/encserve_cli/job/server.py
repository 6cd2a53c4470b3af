"""The encoder of jobs that uses a server. Inputs of similar length share a call, and a refused input fails alone."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import numpy.typing as npt

from encserve_cli.files.encoding import CALLS_AT_ONCE, cut_calls, patiently, with_sent_ids
from encserve_cli.files.rows import Value
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.types import BatchProgress, Encoded, Stopped
from encserve_cli.progress import counting
from encserve_client import (
    Block,
    EncodedOutput,
    EncoderClient,
    EncodeResult,
    EncserveError,
    InferenceError,
    InvalidRequestError,
    ModelInfo,
    SequenceInfo,
)
from encserve_client.options import TrainedKind

Indexed = tuple[int, Value]  # the index of a value in the block, and the value
# The indices of the encoded values, their result, and the reasons of the refused values by index.
Call = tuple[list[int], EncodeResult | None, dict[int, str]]


class ServerEncoder:
    """Encodes through a client. Several threads may use it at a time."""

    def __init__(self, client: EncoderClient, info: ModelInfo, make: MakeOptions) -> None:
        """Take the client, the model and the output. The caller closes the client."""
        self._info = info
        self._is_tokens = make.kind == "tokens"
        self._run = partial(
            client.run,
            outputs=[make.output],
            model=info.name,
            version=info.version,
            dtype=make.dtype,
            truncate=make.truncate,
            exclude_special_tokens=make.exclude_special,
            prompt_name=make.prompt_name,
            task=make.task,
        )
        self._stopping = threading.Event()
        self._answered = threading.Event()
        self._answered.set()  # the server has described the model
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="encserve-call")

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """See `Encoder`.

        Raises:
            ValueError: The server has replaced the bundle since the job began.
        """
        in_order = sorted(enumerate(values), key=lambda it: (len(it[1]), it[0]))
        calls: list[Future[Call]] = [
            self._pool.submit(self._call, call, on_batch) for call in cut_calls(in_order, lambda it: _size(it[1]))
        ]
        try:
            made = [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()
        refused = {place: why for _, _, its in made for place, why in its.items()}
        results = [(places, result) for places, result, _ in made if result is not None]
        return Encoded(_joined(results) if results else None, refused)

    def stop(self) -> None:
        """See `Encoder`."""
        self._stopping.set()

    def close(self) -> None:
        """See `Encoder`."""
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)

    def _call(self, call: list[Indexed], on_batch: BatchProgress) -> Call:
        """Encode the values of a call. After each refusal, send the call again without the refused value."""
        refused: dict[int, str] = {}
        progress = counting(lambda rows: on_batch(rows, 0, 0))
        while call:
            if self._stopping.is_set():
                raise Stopped
            try:
                run = partial(self._run, [value for _, value in call], progress=progress)
                result = patiently(run, self._stopping, self._answered)
            except (InvalidRequestError, InferenceError) as error:
                if error.index is None:
                    raise
                place, _ = call.pop(error.index)
                refused[place] = _without_place(str(error))
                continue
            except EncserveError:
                if self._stopping.is_set():  # the error comes from closing the client
                    raise Stopped from None
                raise
            if result.fingerprint != self._info.fingerprint:
                raise ValueError(
                    f"the server has replaced the model: {self._info.fingerprint} by {result.fingerprint}; serve that "
                    "version again, or begin again with --overwrite"
                )
            on_batch(0, sum(it.token_count for it in result.sequences), 0)
            if self._is_tokens:
                result = with_sent_ids(result, [value for _, value in call])
            return [place for place, _ in call], result, refused
        return [], None, refused


def _size(value: Value) -> int:
    """Return the approximate size of a value, in bytes of text."""
    return len(value) if isinstance(value, str) else 4 * np.size(value)


def _without_place(problem: str) -> str:
    """Return the text of an error without the index of the input in the call."""
    field, colon, rest = problem.partition(": ")
    return rest if colon and "[" in field and " " not in field else problem


def _joined(results: Sequence[tuple[list[int], EncodeResult]]) -> EncodeResult:
    """Merge results. The inputs of the merged result are in the order of their indices."""
    places = np.concatenate([np.array(its, np.int64) for its, _ in results])  # (inputs,)
    order = np.argsort(places)  # (inputs,)
    first = results[0][1]
    output = first.outputs[0]
    blocks = [block for _, result in results for block in result.outputs[0].blocks]
    lengths = np.concatenate([block.lengths for block in blocks]).astype(np.int64)  # (inputs,)
    rows_in_order = _rows_in_order(lengths, order)  # (rows,)
    indices = None
    if output.kind in ("multi_vector", "sparse"):  # a message without rows has no indices
        parts = [block.indices for block in blocks if len(block.rows) and block.indices is not None]
        if sum(map(len, parts)) == len(rows_in_order):
            indices = np.concatenate([np.empty(0, np.uint32), *parts])[rows_in_order]
    block = Block(np.concatenate([block.rows for block in blocks])[rows_in_order], lengths[order], indices)
    infos: list[SequenceInfo] = [info for _, result in results for info in result.sequences]
    joined = EncodedOutput(output.kind, output.l2_normalized, (block,), output.sparse_width)
    return replace(first, outputs=(joined,), sequences=tuple(infos[i] for i in order.tolist()))


def _rows_in_order(lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the indices of rows, (rows,), for inputs in another order.

    Args:
        lengths: (inputs,) The number of rows of each input.
        order: (inputs,) The inputs in the new order.
    """
    starts = np.cumsum(lengths) - lengths
    ordered = lengths[order]
    offsets = np.arange(int(ordered.sum())) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    return np.repeat(starts[order], ordered) + offsets


def server_facts(info: ModelInfo, make: MakeOptions) -> ModelFacts:
    """Return the facts about a served model that a plan has."""
    task = info.tasks.get(make.task) if make.task else None
    width = info.width(make.output)
    return ModelFacts(
        model=info.name,
        version=info.version,
        fingerprint=info.fingerprint,
        space_id=info.space_id,
        pooling=str(info.pooling or ""),
        width=(width + 7) // 8 if make.dtype == "binary" else width,
        max_tokens=task.max_tokens if task else info.max_sequence_tokens,
        precision=info.precision,
    )


def _check(info: ModelInfo, make: MakeOptions) -> None:
    """Check that the model has the output, before a plan is made or parts are removed.

    Raises:
        ValueError: The model lacks the output, the task or the prompt. The text lists what the model has.
    """
    name = f"model {info.name}"
    has = ["model" if kind == "vector" else kind for kind in info.kinds]
    if make.kind in get_args(TrainedKind) and make.kind not in has:
        there = ", ".join(has) or "none of these; --pooling mean makes vectors"
        raise ValueError(f"--kind {make.kind}: {name} does not have it; it has {there}")
    if make.task and make.task not in info.tasks:
        raise ValueError(f"--task {make.task}: {name} does not know it; it knows {', '.join(info.tasks) or 'none'}")
    if make.prompt_name and make.prompt_name not in info.prompts:
        there = ", ".join(map(repr, info.prompts)) or "none"
        raise ValueError(f"--prompt-name {make.prompt_name!r}: {name} does not have it; it has {there}")
    width = info.width(replace(make.output, dimensions=None))
    if make.dimensions and (make.kind == "sparse" or make.dimensions > max(width, info.vector_width)):
        raise ValueError(f"--dimensions {make.dimensions}: must be at most {width}, the numbers of a row of {name}")
    if make.dtype in ("int8", "binary") and make.kind in ("tokens", "multi_vector", "sparse"):
        raise ValueError(f"--dtype {make.dtype}: is not for {make.kind}")


class ServerBackend:
    """A server, through a client; see `encserve_cli.job.job.Backend`."""

    def __init__(self, client: EncoderClient, model: str | None = None, version: str | None = None) -> None:
        """Take the client and the model; None for the server's defaults. The caller closes the client."""
        self._client = client
        self._model = model
        self._version = version

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> LocalWorker:
        """See `Backend`.

        Raises:
            EncserveError: The server does not answer, or does not have the model.
        """
        info = self._client.model(self._model, self._version)
        if self._version is None and before is not None and (info.name, info.version) != (before.model, before.version):
            # The default version has changed since the job began. The job goes on with its own version if it is served.
            known = [it for it in self._client.models() if (it.name, it.version) == (info.name, before.version)]
            info = known[0] if known else info
        made = replace(make, kind=kind or info.trained_kind)
        _check(info, made)
        return LocalWorker(made, server_facts(info, made), ServerEncoder(self._client, info, made))
