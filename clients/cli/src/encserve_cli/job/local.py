"""Encoding in this process, without a server."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from encserve.extras import needs
from encserve_cli.files.rows import Value
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.types import BatchProgress, Encoded, Stopped, ignore_batch
from encserve_client import (
    Block,
    EncodedOutput,
    EncodeResult,
    EncserveError,
    InvalidRequestError,
    SequenceInfo,
    Timings,
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options for running a bundle in this process. None means encserve-server's default.

    Attributes:
        engine: "onnxruntime" or "openvino".
        precision: "model" for the precision of the bundle, "float32", or with OpenVINO "bfloat16".
        device: "auto", "cpu" or "cuda".
        max_batch_tokens: The largest number of tokens in a batch, padding included.
        intra_op_threads: The number of CPU threads that compute batches.
        parallel_batches: The number of batches that run at the same time.
        tokenizer_threads: The number of threads that tokenize.
        cache_dir: The folder of the cache of weights, which processes share; Path("off") for no cache.
    """

    engine: Literal["onnxruntime", "openvino"] = "onnxruntime"
    precision: Literal["model", "float32", "bfloat16"] = "model"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batch_tokens: int | None = None
    intra_op_threads: int | None = None
    parallel_batches: int | None = None
    tokenizer_threads: int = 2
    cache_dir: Path | None = None

    def as_before(self, before: ModelFacts | None) -> "EngineOptions":
        """Return these options. Options that are None get the value from a job's plan."""
        if before is None or before.engine != self.engine:
            return self
        return replace(
            self,
            max_batch_tokens=self.max_batch_tokens or before.max_batch_tokens or None,
            intra_op_threads=self.intra_op_threads or before.threads or None,
            parallel_batches=self.parallel_batches or before.parallel_batches or None,
        )


def open_embedder(bundle: Path, options: EngineOptions) -> Any:
    """Load a bundle.

    Raises:
        ValueError: A package of the extra `cpu` is not installed.
        RuntimeError: The bundle, the engine or the device cannot be used. The message has the reason.
    """
    with needs("--bundle", "cpu", ValueError):
        from encserve_server.errors import EncserveError as ServerError
        from encserve_server.offline import Embedder
    try:
        return Embedder(bundle, **asdict(options))
    except ServerError as error:
        raise RuntimeError(str(error)) from error


class LocalEncoder:
    """An `Encoder` with a model in this process."""

    def __init__(self, embedder: Any, make: MakeOptions) -> None:
        """`embedder` is an `encserve_server.offline.Embedder`; `close` frees it. `make` has the output options."""
        self._embedder = embedder
        self._make = make

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """See `Encoder`.

        Raises:
            RuntimeError: The engine fails for every value.
        """
        began = time.perf_counter()
        made = self.run(values, on_batch)
        good = np.ones(len(values), np.bool_)  # (values,)
        good[list(made.refused)] = False
        refused: dict[int, EncserveError] = {
            index: InvalidRequestError(problem, reason=made.reasons[index]) for index, problem in made.refused.items()
        }
        timings = Timings(0.0, 0.0, 0.0, time.perf_counter() - began, 0, 0)
        return Encoded(self._result(made, good, timings) if good.any() else None, refused)

    def run(self, values: Sequence[Value], on_batch: BatchProgress) -> Any:
        """Return the outputs of the values: an `encserve_server.offline.Embedded`."""
        from encserve_server import offline
        from encserve_server.errors import EncserveError as ServerError

        make = self._make
        try:
            return self._embedder.run(
                values,
                output=make.kind,
                dimensions=make.dimensions,
                dtype=make.dtype,
                task=make.task,
                prompt_name=make.prompt_name,
                truncate=make.truncate,
                exclude_special_tokens=make.exclude_special,
                activation=make.activation or "model",
                on_batch=lambda rows, tokens, _: on_batch(rows, tokens),
            )
        except offline.Stopped as error:
            raise Stopped from error
        except ServerError as error:
            raise RuntimeError(str(error)) from error

    def _result(self, made: Any, good: Any, timings: Timings) -> EncodeResult:
        """Return the outputs of the accepted inputs in the form of a client's result."""
        block = Block(made.rows, made.lengths[good], made.indices)
        output = EncodedOutput(self._make.kind, made.l2_normalized, (block,), made.sparse_width)  # type: ignore[arg-type]
        bundle = self._embedder.bundle
        return EncodeResult(
            bundle.name, bundle.version, bundle.fingerprint, (output,), _infos(made, good), timings, bundle.space_id
        )

    def stop(self) -> None:
        """See `Encoder`."""
        self._embedder.stop()

    def close(self) -> None:
        """See `Encoder`."""
        self._embedder.close()


def _infos(made: Any, good: Any) -> Sequence[SequenceInfo]:
    """Return the token counts of each input. For "tokens", also the ids; the count is the number of rows."""
    counts, originals = made.token_counts[good].tolist(), made.original_token_counts[good].tolist()
    ids: Sequence[Any] = [None] * len(counts)
    if made.token_ids is not None:
        ids = np.split(made.token_ids, np.cumsum(made.lengths[good])[:-1])
    return tuple(
        SequenceInfo(count if its is None else len(its), original, original > count, its, None, None, None)
        for its, count, original in zip(ids, counts, originals, strict=True)
    )


def model_facts(embedder: Any, options: EngineOptions, make: MakeOptions) -> tuple[MakeOptions, ModelFacts]:
    """Return the output of each input with the kind filled in, and the facts about the model for a plan.

    Raises:
        RuntimeError: The model has no such output.
    """
    made = replace(make, kind=make.kind or embedder.trained_kind)
    nothing = LocalEncoder(embedder, made).run([], ignore_batch)  # checks the options, and returns the width of a row
    bundle, info = embedder.bundle, embedder.info
    return made, ModelFacts(
        model=bundle.name,
        version=bundle.version,
        fingerprint=bundle.fingerprint,
        space_id=bundle.space_id,
        pooling="" if bundle.pooling is None else "+".join(it.name.lower() for it in bundle.pooling.kinds),
        width=nothing.rows.shape[1],
        max_tokens=bundle.max_sequence_tokens,
        engine=options.engine,
        precision=info.precision,
        max_batch_tokens=embedder.policy.max_batch_tokens,
        threads=embedder.intra_op_threads,
        parallel_batches=embedder.parallel_batches,
    )


class LocalBackend:
    """A bundle that runs in this process; see `encserve_cli.job.job.Backend`."""

    def __init__(self, bundle: Path, options: EngineOptions) -> None:
        """`bundle` is the folder NAME/VERSION, or NAME for the newest version. `options` are for the engine."""
        self._bundle = bundle
        self._options = options

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        """See `Backend`.

        Raises:
            ValueError: A package of the extra `cpu` is not installed.
            RuntimeError: The bundle, the engine or the device cannot be used, or the model has no such output.
        """
        options = self._options.as_before(before)
        embedder = open_embedder(self._bundle, options)
        try:
            made, facts = model_facts(embedder, options, make)
        except BaseException:
            embedder.close()
            raise
        return LocalWorker(made, facts, LocalEncoder(embedder, made))
