"""The `Embedder`: loads a bundle, and computes the outputs of inputs in threads.

The tokenizer's threads check and tokenize the inputs of a call. Then the inputs are grouped into batches by length,
within the server's limits for batches. The batches of all calls run in one pool of threads. The pool has a thread for
each batch that the engine can run at a time. A batch that fails is split into smaller and smaller batches, so that only
the input that causes the failure is refused.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import numpy as np

from encserve_server.errors import EncserveError, InferenceFailed, RequestError
from encserve_server.models.inputs import SentInput, pieces
from encserve_server.models.scoring import activate
from encserve_server.models.treatment import CallPlan, CallPlanner
from encserve_server.models.turns import FairThreadPool
from encserve_server.offline.options import (
    EmbedOptions,
    Input,
    LoadOptions,
    OutputName,
    to_activation,
    to_call,
    to_sent,
)
from encserve_server.offline.results import Embedded, OnBatch, RowCollector, reason_of
from encserve_server.outputs import static_weights
from encserve_server.repository.bundle import MANIFEST_NAME
from encserve_server.repository.loaded import batch_policy
from encserve_server.repository.loading import load_model
from encserve_server.repository.scan import newest_version
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.runner import in_halves, probe, run_batch, start_thread
from encserve_server.settings import Settings
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.arrays import OutputArrays, TokenIds
from encserve_server.types.bundles import Bundle
from encserve_server.types.sequences import Batch, TokenSequence

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Stopped(Exception):
    """The embedder has been stopped."""


class Embedder:
    """A loaded bundle for any number of threads. Call `close` at the end, or use the embedder as a context manager.

    If the engine can run several batches at a time, no batch uses the whole device. So a result
    does not depend on the batches that run at the same time.

    Attributes:
        bundle: The loaded bundle.
        info: The device and the runtime of the model.
        policy: The limits of a batch.
        intra_op_threads: The number of CPU threads that run batches.
        parallel_batches: The number of batches that run at a time.
    """

    def __init__(self, bundle: Path | str, **options: Unpack[LoadOptions]) -> None:
        """Verify a bundle, load and warm up its model, and measure the best size of a batch.

        Args:
            bundle: The folder of a bundle, such as models/NAME/VERSION; or models/NAME for the newest version.
            **options: See `LoadOptions`.

        Raises:
            ValueError: An option is out of range.
            BundleError: The bundle is missing, altered or unreadable, or its model cannot compute.
            DeviceError: The device or the precision is not available.
            EngineMissing: The package of the engine is not installed.
        """
        folder = Path(bundle).absolute()
        if not (folder / MANIFEST_NAME).is_file():
            folder = newest_version(folder)
        settings = Settings(model_repository=folder.parent.parent, **options)
        loaded = load_model(folder, settings, FairThreadPool(1))  # an unused pool: `_tokenizing` has the threads
        self._engine, self._outputs = loaded.engine, loaded.outputs
        self._run = partial(run_batch, loaded.engine, loaded.outputs.compute)
        self.bundle: Bundle = loaded.bundle
        self.info = loaded.engine.info
        self.policy: BatchPolicy = batch_policy(settings, self.info.device, loaded.job_batch_tokens)
        self.intra_op_threads: int = settings.intra_op_threads or usable_cpus()
        self.parallel_batches: int = loaded.engine.max_parallel_runs
        self._planner = CallPlanner(
            self.bundle, loaded.tokenizer, loaded.outputs, settings.max_text_bytes, loaded.static_tokenizers
        )
        self._tokenizing = ThreadPoolExecutor(settings.tokenizer_threads, "encserve-tokenize")
        self._computing = ThreadPoolExecutor(self.parallel_batches, "encserve-engine", start_thread)
        self._stopped = False  # not an Event, which may deadlock if a signal handler calls `stop`
        self._closing = threading.Lock()
        self._closed = False

    @property
    def trained_kind(self) -> OutputName:
        """The kind of output that the model was trained for: "model", "multi_vector" or "sparse"."""
        bundle = self.bundle
        if bundle.pooling is None and bundle.multi_vector is not None:
            return "multi_vector"
        if bundle.pooling is None and bundle.sparse is not None:
            return "sparse"
        return "model"

    def embed(self, inputs: Iterable[Input], **options: Unpack[EmbedOptions]) -> Any:
        """Compute the outputs of inputs as arrays.

        Args:
            inputs: Texts, pairs of texts, (seq,) token ids, or (seq, d_model) float32 vectors, as the model takes them.
            **options: See `EmbedOptions`.

        Returns:
            For "tokens" and "multi_vector": a list of (rows, width) arrays. For "sparse": a list of SparseVector. For
            other outputs: one (inputs, width) array.

        Raises:
            RequestError: The model does not have the output, or refuses an input. The error names the first such input.
            InferenceFailed: The model cannot compute an input.
            EngineUnhealthy: The engine fails for every input.
            Stopped: `stop` was called.
        """
        made = self._make(inputs, None, options, raises=True)
        if made.kind == "sparse":
            return made.sparse_vectors()
        return made.arrays() if made.kind in ("tokens", "multi_vector") else made.rows

    def run(
        self, inputs: Iterable[Input], on_batch: OnBatch | None = None, **options: Unpack[EmbedOptions]
    ) -> Embedded:
        """Compute the outputs of inputs for a job. Unlike in `embed`, a refused input does not fail the call.

        The options are checked even without inputs.

        Args:
            inputs: As for `embed`.
            on_batch: See `OnBatch`. If `on_batch` raises an error, `run` raises this error.
            **options: See `EmbedOptions`.

        Raises:
            RequestError: The model does not have the output.
            EngineUnhealthy: The engine fails for every input.
            Stopped: `stop` was called. The running batches have finished.
        """
        return self._make(inputs, on_batch, options, raises=False)

    def tokenize(self, texts: Iterable[str | tuple[str, str]], **options: Unpack[EmbedOptions]) -> list[TokenIds | str]:
        """Return the ids that the model gets for each text, without running the model.

        Args:
            texts: The texts, or pairs of texts.
            **options: See `EmbedOptions`. The prompt, the task and `truncate` change the ids.

        Returns:
            For each text: (seq,) int64 ids, or the reason why the text is refused.

        Raises:
            RequestError: The model does not have the output, the prompt or the task of the options.
            Stopped: `stop` was called.
        """
        self._check_running()
        sent: dict[int, SentInput] = {at: to_sent(at, it, self.bundle) for at, it in enumerate(texts)}
        call = to_call(list(sent.values()), options.get("output") or "tokens", options)
        sequences, refused = self._check(self._planner.plan_call(call), sent)
        ids = {it.index: np.asarray(it.input, np.int64) for it in sequences}
        return [reason_of(refused[at]) if at in refused else ids[at] for at in sent]

    def stop(self) -> None:
        """Make all current and later calls raise Stopped. Running batches finish first. Any thread may call `stop`."""
        self._stopped = True

    def close(self) -> None:
        """Stop, wait for the running batches, and free the model. A second `close` does nothing."""
        self.stop()
        with self._closing:
            if not self._closed:
                self._tokenizing.shutdown()
                self._computing.shutdown()
                self._engine.close()
                self._closed = True

    def __enter__(self) -> "Embedder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make(
        self, inputs: Iterable[Input], on_batch: OnBatch | None, options: EmbedOptions, *, raises: bool
    ) -> Embedded:
        """Compute the outputs. If `raises` is true, raise the error of the first refused input."""
        if isinstance(inputs, str):
            raise TypeError(f"inputs must be a list; for one text pass [{inputs[:20]!r}]")
        self._check_running()
        given = list(inputs)
        sent: dict[int, SentInput] = {}
        refused: dict[int, EncserveError] = {}
        for at, value in enumerate(given):
            try:
                sent[at] = to_sent(at, value, self.bundle)
            except RequestError as error:
                refused[at] = error.with_traceback(None)  # the traceback would keep all inputs in memory
        kind = options.get("output") or self.trained_kind
        call_plan = self._planner.plan_call(to_call(list(sent.values()), kind, options))
        activation = to_activation(options, self.bundle)
        sequences, invalid = self._check(call_plan, sent)
        refused |= invalid
        if raises and refused:
            raise refused.pop(min(refused))
        rows = RowCollector(call_plan, len(given), sequences, refused, on_batch)
        self._compute(call_plan, sequences, rows)
        if raises and refused:
            raise refused.pop(min(refused))
        made = rows.embedded(kind, self.bundle)
        if kind != "scores":
            return made
        found = activate(made.rows.astype(np.float32, copy=False), activation)
        return replace(made, rows=found.astype(made.rows.dtype, copy=False))

    def _check(
        self, call_plan: CallPlan, sent: dict[int, SentInput]
    ) -> tuple[list[TokenSequence], dict[int, RequestError]]:
        """Check and tokenize inputs in threads. Return the sequences in order, and the errors by index."""
        items = list(sent.items())
        work = [partial(self._check_piece, call_plan, dict(items[a:b])) for a, b in pieces(list(sent.values()))]
        sequences: list[TokenSequence] = []
        refused: dict[int, RequestError] = {}
        for checked, errors in self._in_threads(self._tokenizing, work):
            sequences += checked
            refused |= errors
        return sequences, refused

    def _check_piece(
        self, call_plan: CallPlan, sent: dict[int, SentInput]
    ) -> tuple[list[TokenSequence], dict[int, RequestError]]:
        self._check_running()
        plan = call_plan.plan
        checked, refused, _ = call_plan.checker.check_now(sent, call_plan.rules)
        for at, sequence in checked.items():
            sequence.index, sequence.wanted = at, plan.outputs
            if plan.bounds_length:
                try:
                    self._outputs.check_lengths(plan.outputs, [len(sequence.input)])
                except RequestError as error:
                    error.move(at)
                    refused[at] = error.with_traceback(None)
        return [it for at, it in checked.items() if at not in refused], refused

    def _compute(self, call_plan: CallPlan, sequences: Sequence[TokenSequence], rows: RowCollector) -> None:
        """Compute the outputs of sequences, and add them to the rows."""
        if call_plan.static is not None:
            static, outputs = call_plan.static, call_plan.plan.outputs
            rows.add(sequences, [static_weights(static, it.input, outputs) for it in sequences], 0)
            return
        empty = [it for it in sequences if not len(it.input)]
        if empty:
            rows.add(empty, self._compute_empty(empty), 0)
        full = [it for it in sequences if len(it.input)]
        cut = batches([len(it.input) for it in full], self.policy)
        work = [partial(self._compute_batch, [full[i] for i in places], rows) for places in cut]
        self._in_threads(self._computing, work)

    def _compute_empty(self, sequences: Sequence[TokenSequence]) -> list[OutputArrays | None]:
        """Return the outputs of sequences without tokens; None for outputs with NaN or infinity."""
        try:
            with np.errstate(all="ignore"):
                self._outputs.compute_empty(sequences)
        except InferenceFailed:  # all sequences are equal, so all fail
            return [None] * len(sequences)
        return [it.outputs for it in sequences]

    def _compute_batch(self, sequences: list[TokenSequence], rows: RowCollector) -> None:
        """Run a batch, and add the outputs to the rows. If the batch fails, run each half of the batch.

        Raises:
            Stopped: `stop` was called.
            EngineUnhealthy: The engine fails for every input.
        """

        def run(part: Batch) -> None:
            self._check_running()
            self._run(part)
            if part.outputs.count(None) == len(part.outputs):
                probe(self._run, self.bundle.sample(1))
            rows.add(part.sequences, part.outputs, part.padded_tokens)

        def on_failure(part: Batch, error: BaseException | None) -> None:
            logger.warning("a batch failed", extra={"sequences": len(part.sequences), "error": repr(error)})
            if len(part.sequences) == 1:
                probe(self._run, self.bundle.sample(1))
                rows.refuse(part.sequences[0], InferenceFailed.NOT_COMPUTED)

        in_halves(Batch(sequences, alone=not self._engine.has_wide_session), run, on_failure)

    def _check_running(self) -> None:
        if self._stopped:
            raise Stopped("the embedder has been stopped")

    def _in_threads(self, pool: ThreadPoolExecutor, work: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Do work in threads, and return the results in order.

        If a piece of work raises an error, pieces that have not started are cancelled. The method raises the error when
        the running pieces have ended.
        """
        futures: list[Future[_Result]] = []
        try:
            futures.extend(map(pool.submit, work))
            return [it.result() for it in futures]
        except RuntimeError:
            self._check_running()  # a pool that was shut down raises RuntimeError
            raise
        finally:
            wait([it for it in futures if not it.cancel()])


def batches(lengths: Sequence[int], policy: BatchPolicy) -> list[list[int]]:
    """Group inputs into batches, from the longest input to the shortest.

    Inputs of the same length stay in their order. A batch ends before the input that would exceed a limit. Later inputs
    would exceed the limit too, because they are padded to the same length. An input that alone exceeds a
    limit gets a separate batch.

    Args:
        lengths: The number of tokens of each input, at least 1.
        policy: The limits.

    Returns:
        The indices of the inputs of each batch.
    """
    cut: list[list[int]] = []
    longest = real = 0
    for at in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # a stable sort
        count = len(cut[-1]) + 1 if cut else 1
        padded = longest * count
        real += lengths[at]
        if (
            not cut
            or count > policy.max_batch_sequences
            or padded > policy.max_batch_tokens
            or padded - real > policy.max_padding_fraction * padded
        ):
            cut.append([])
            longest = real = lengths[at]
        cut[-1].append(at)
    return cut
