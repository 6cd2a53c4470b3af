"""Vectors from a bundle in this process: no gRPC, no asyncio, no queue.

    with Embedder("models/all-MiniLM-L6-v2") as embedder:
        vectors = embedder.embed(["a text", "another"])  # (2, width)

The inputs of a call are checked and tokenized in the threads of the tokenizer, sorted by length, and cut into batches
within the bounds that the server has. The batches of all calls go one after another to one pool of threads, as many as
the engine runs batches at once. A batch that fails runs again in halves, so that only the culprit is refused.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, get_args

import numpy as np
import numpy.typing as npt

from encserve_server.errors import (
    EncserveError,
    EngineUnhealthy,
    FieldPath,
    InferenceFailed,
    InvalidField,
    Part,
    PlainNaming,
    RequestError,
)
from encserve_server.models.inputs import SentIds, SentInput, SentVectors, pieces
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.treatment import CallPlan, CallPlanner, EncodeCall
from encserve_server.models.turns import FairThreadPool
from encserve_server.outputs import OutputPlan, OutputSpec, static_weights
from encserve_server.repository.bundle import MANIFEST_NAME
from encserve_server.repository.loaded import batch_policy
from encserve_server.repository.loading import load_model
from encserve_server.repository.scan import newest_version
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.settings import Settings
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.arrays import IndexedRows, OutputArrays, OutputRows, TokenIds
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import DataType, Detail, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

logger = logging.getLogger(__name__)

Input = str | Sequence[int] | npt.NDArray[Any]
"""A text, (seq,) token ids, or (seq, d_model) vectors."""
OnBatch = Callable[[int, int, int], None]
"""Is told of each batch that has run: its inputs, their tokens, and the same with padding. Called from any thread."""
OutputName = Literal[
    "model", "mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length", "tokens", "multi_vector", "sparse"
]
_INDEXED = (OutputKind.MULTI_VECTOR, OutputKind.SPARSE)
_Made = TypeVar("_Made")


class Stopped(Exception):
    """The embedder has been stopped."""


class LoadOptions(TypedDict, total=False):
    """Settings of the server that an `Embedder` has too, with the same meaning and defaults; see docs/settings.md."""

    engine: Literal["onnxruntime", "openvino"]
    precision: Literal["model", "float32", "bfloat16"]
    device: Literal["auto", "cpu", "cuda"]
    cache_dir: Path | None
    max_batch_tokens: int | None
    max_batch_sequences: int
    max_padding_fraction: float | None
    tune_batches: bool
    intra_op_threads: int | None
    parallel_batches: int | None
    tokenizer_threads: int
    max_text_bytes: int
    max_vocabulary_mib: int


class EmbedOptions(TypedDict, total=False):
    """What is made of inputs, and how these are treated; all as for the client's `run`.

    Attributes:
        output: The kind of output. Default: `Embedder.trained_kind`.
        l2_normalize: Whether each row is scaled to Euclidean length 1, after it has been cut.
        dtype: The type of the numbers.
        dimensions: To how many of its first numbers a row is cut.
        max_active_dims: How many weights of "sparse" are kept.
        pool_factor: How many vectors of "multi_vector" become one.
        task: "query" or "document".
        prompt_name: The prompt before every text; "" for none. Default: the prompt of the task, or of the model.
        truncate: Whether an input that is too long is cut; otherwise it is refused.
        exclude_special_tokens: Whether special tokens have no rows in "tokens".
    """

    output: OutputName | None
    l2_normalize: bool
    dtype: Literal["float32", "float16", "int8", "binary"]
    dimensions: int | None
    max_active_dims: int | None
    pool_factor: float | None
    task: Literal["query", "document"] | None
    prompt_name: str | None
    truncate: bool
    exclude_special_tokens: bool


class SparseVector(NamedTuple):
    """Weights over the vocabulary, those that are not 0.

    Attributes:
        indices: (n,) uint32, their places in the vocabulary, ascending.
        values: (n,), of the type that was asked for.
        width: The size of the vocabulary.
    """

    indices: npt.NDArray[np.uint32]
    values: OutputRows
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """What was made of inputs.

    Attributes:
        kind: The kind of output, as it was asked for.
        rows: (sum(lengths), width) of the type that was asked for, C-contiguous, in the order of the inputs; of
            "binary" (sum(lengths), ceil(width / 8)) uint8.
        lengths: (inputs,) int64, how many rows each has; 0 for one that was refused.
        indices: (sum(lengths),) uint32: of "multi_vector" the token of each row, of "sparse" its place in the
            vocabulary; None for other kinds, and where vectors were pooled.
        token_ids: (sum(lengths),) int64, of "tokens" the id of each row; None for other kinds, and for vectors.
        sparse_width: Of "sparse" the size of the vocabulary; otherwise 0.
        l2_normalized: Whether all rows have Euclidean length 1, asked for or not.
        refused: Why inputs were refused, by their places.
        token_counts: (inputs,) int64, the tokens that the model saw; 0 for an input that was refused.
        original_token_counts: (inputs,) int64, the same before truncation.
        tokens: The tokens that were computed.
        padded_tokens: The same with padding.
    """

    kind: OutputName
    rows: OutputRows
    lengths: npt.NDArray[np.int64]
    indices: npt.NDArray[np.uint32] | None
    token_ids: npt.NDArray[np.int64] | None
    sparse_width: int
    l2_normalized: bool
    refused: dict[int, str]
    token_counts: npt.NDArray[np.int64]
    original_token_counts: npt.NDArray[np.int64]
    tokens: int
    padded_tokens: int

    def arrays(self) -> list[OutputRows]:
        """For each input its (rows, width); views."""
        return np.split(self.rows, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    def sparse_vectors(self) -> list[SparseVector]:
        """Of "sparse" the vector of each input; views."""
        if self.indices is None or not len(self.lengths):
            return []
        indices = np.split(self.indices, np.cumsum(self.lengths)[:-1])
        pairs = zip(indices, self.arrays(), strict=True)
        return [SparseVector(places, rows[:, 0], self.sparse_width) for places, rows in pairs]


class Embedder:
    """A loaded bundle. Any number of threads may use it at a time; `close` it, or use it as a context manager.

    Where batches run side by side, no batch gets the whole device: so what batches an input runs in, and what comes
    of it, do not depend on timing.

    Attributes:
        bundle: What is loaded.
        info: What it runs on.
        policy: The bounds of a batch.
        intra_op_threads: The CPU's threads that run batches.
        parallel_batches: How many batches run at once.
    """

    def __init__(self, bundle: Path | str, **options: Unpack[LoadOptions]) -> None:
        """Verifies a bundle, loads its model, warms it up, and measures how large batches should be.

        Args:
            bundle: The folder of a bundle, NAME/VERSION; or NAME, for its newest version.
            **options: See `LoadOptions`.

        Raises:
            ValueError: An option is out of its bounds.
            BundleError: The bundle is missing, altered or unreadable, or its model cannot compute.
            DeviceError: The device or the precision cannot be had.
            EngineMissing: What runs models is not installed.
        """
        folder = Path(bundle).absolute()
        if not (folder / MANIFEST_NAME).is_file():
            folder = newest_version(folder)
        settings = Settings(model_repository=folder.parent.parent, **options)
        loaded = load_model(folder, settings, FairThreadPool(1))  # it never begins: threads of this tokenize
        self._engine, self._outputs = loaded.engine, loaded.outputs
        self.bundle: Bundle = loaded.bundle
        self.info = loaded.engine.info
        self.policy: BatchPolicy = batch_policy(settings, self.info.device, loaded.job_batch_tokens)
        self.intra_op_threads: int = settings.intra_op_threads or usable_cpus()
        self.parallel_batches: int = loaded.engine.max_parallel_runs
        self._planner = CallPlanner(
            self.bundle, loaded.tokenizer, loaded.outputs, settings.max_text_bytes, loaded.static_tokenizers
        )
        self._tokenizing = ThreadPoolExecutor(settings.tokenizer_threads, "encserve-tokenize")
        self._computing = ThreadPoolExecutor(self.parallel_batches, "encserve-engine")
        self._stopped = False  # no Event: `stop` may be called from a signal's handler
        self._closing = threading.Lock()
        self._closed = False

    @property
    def trained_kind(self) -> OutputName:
        """What the model was trained to make of a text: the first that it has of "model", "multi_vector", "sparse"."""
        if self.bundle.pooling is None and self.bundle.multi_vector is not None:
            return "multi_vector"
        return "sparse" if self.bundle.pooling is None and self.bundle.sparse is not None else "model"

    def embed(self, inputs: Iterable[Input], **options: Unpack[EmbedOptions]) -> Any:
        """Makes arrays of inputs.

        Args:
            inputs: Texts, (seq,) token ids, or (seq, d_model) float32 vectors, whichever the model takes.
            **options: See `EmbedOptions`.

        Returns:
            (inputs, width) for outputs of one vector; for "tokens" and "multi_vector" a list of (rows, width), and for
            "sparse" a list of SparseVector.

        Raises:
            RequestError: The model does not have what is asked for, or an input is refused; of several the first.
            InferenceFailed: The model cannot compute an input.
            EngineUnhealthy: The engine fails whatever it is given.
            Stopped: `stop` was called.
        """
        made = self._make(inputs, None, options, raises=True)
        if made.kind == "sparse":
            return made.sparse_vectors()
        return made.arrays() if made.kind in ("tokens", "multi_vector") else made.rows

    def tokenize(self, texts: Iterable[str], **options: Unpack[EmbedOptions]) -> list[TokenIds | str]:
        """Return the ids that the model gets for each text, without running the model.

        Args:
            texts: The texts.
            **options: See `EmbedOptions`. The prompt, the task and `truncate` change the ids.

        Returns:
            For each text (seq,) int64 ids, or the reason why the text is refused.

        Raises:
            RequestError: The model does not have what the options ask for.
            Stopped: `stop` was called.
        """
        self._check_running()
        sent: dict[int, SentInput] = dict(enumerate(texts))
        call, _ = _call(list(sent.values()), "tokens", **options)
        checked = self._check(self._planner.plan_call(call), sent)
        return [
            _reason(it) if isinstance(it, EncserveError) else np.asarray(it.input, np.int64) for it in checked.values()
        ]

    def run(
        self, inputs: Iterable[Input], on_batch: OnBatch | None = None, **options: Unpack[EmbedOptions]
    ) -> Embedded:
        """As `embed`, for jobs: an input that is refused keeps no other from being done.

        Without inputs nothing is computed, and what is asked for is checked all the same.

        Raises:
            RequestError: The model does not have what is asked for.
            EngineUnhealthy: The engine fails whatever it is given.
            Stopped: `stop` was called; batches that ran then have been finished.
            Exception: Whatever `on_batch` raises.
        """
        return self._make(inputs, on_batch, options, raises=False)

    def stop(self) -> None:
        """Has `run` and `embed` raise Stopped after the batches that run now, for good; any thread may call."""
        self._stopped = True

    def close(self) -> None:
        """Stops, waits for the batches that run now, and frees the model. Callable again."""
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
        """As `run`; or, where it `raises`, as `embed`."""
        if isinstance(inputs, str):
            raise TypeError(f"inputs must be a list; for one text pass [{inputs[:20]!r}]")
        self._check_running()
        given = list(inputs)
        sent: dict[int, SentInput] = {}
        refused: dict[int, EncserveError] = {}
        for i, it in enumerate(given):
            try:
                sent[i] = _sent(i, it, self.bundle)
            except RequestError as problem:
                refused[i] = problem
        call, name = _call(list(sent.values()), self.trained_kind, **options)
        treatment = self._planner.plan_call(call)
        checked = self._check(treatment, sent)
        refused |= {i: it for i, it in checked.items() if isinstance(it, EncserveError)}
        for error in refused.values():
            error.__traceback__ = None  # its frames hold all inputs and the error itself, until garbage is collected
        if raises and refused:
            raise refused[min(refused)]
        sequences = [it for it in checked.values() if not isinstance(it, EncserveError)]
        rows = _Rows(treatment, len(given), sequences, refused, on_batch)
        self._compute_all(treatment, sequences, rows)
        if raises and refused:
            raise refused[min(refused)]
        return rows.embedded(name, self.bundle)

    def _check(self, treatment: CallPlan, sent: Mapping[int, SentInput]) -> dict[int, TokenSequence | RequestError]:
        """Checks and tokenizes inputs; for each its sequence, or why it is refused, by its place."""
        places, values = list(sent), list(sent.values())

        def check(begin: int, end: int) -> list[TokenSequence | RequestError]:
            self._check_running()
            checked = treatment.checker.check_here(values[begin:end], treatment.rules)
            for i, it in enumerate(checked):
                checked[i] = self._judged(treatment.plan, it, i, places[begin + i])
            return checked

        parts = self._in_threads(self._tokenizing, [partial(check, *its) for its in pieces(values)] if values else [])
        return dict(zip(places, itertools.chain.from_iterable(parts), strict=True))

    def _judged(
        self, plan: OutputPlan, checked: TokenSequence | RequestError, among: int, place: int
    ) -> TokenSequence | RequestError:
        """What was checked as one of several, which now knows its place among all and what it is wanted for."""
        if not isinstance(checked, RequestError):
            checked.index, checked.wanted = place, plan.outputs
            if not plan.bounds_length:
                return checked
            try:
                self._outputs.check_lengths(plan.outputs, [len(checked.input)])
            except RequestError as error:
                checked, among = error, 0
            else:
                return checked
        checked.move(place - among)
        return checked

    def _compute_all(self, treatment: CallPlan, sequences: Sequence[TokenSequence], rows: "_Rows") -> None:
        """Makes the outputs of sequences, and puts them among the rows."""
        if treatment.static is not None:
            static, outputs = treatment.static, treatment.plan.outputs
            rows.put(sequences, [static_weights(static, it.input, outputs) for it in sequences], 0)
            return
        empty = [it for it in sequences if not len(it.input)]
        if empty:
            rows.put(empty, self._of_nothing(empty), 0)
        full = [it for it in sequences if len(it.input)]
        cut = batches([len(it.input) for it in full], self.policy)
        work = [partial(self._compute_parts, [full[i] for i in places], rows) for places in cut]
        self._in_threads(self._computing, work)

    def _of_nothing(self, sequences: Sequence[TokenSequence]) -> list[OutputArrays | None]:
        """The outputs of sequences without tokens; None where these are not finite."""
        try:
            with np.errstate(all="ignore"):
                self._outputs.compute_empty(sequences)
        except InferenceFailed:  # they are all alike
            return [None] * len(sequences)
        return [it.outputs for it in sequences]

    def _compute_parts(self, batch: list[TokenSequence], rows: "_Rows") -> None:
        """Runs a batch, and if that fails its halves and theirs.

        Raises:
            Stopped: `stop` was called.
            EngineUnhealthy: The engine fails whatever it is given.
        """
        parts = [batch]
        while parts:
            self._check_running()
            part = parts.pop()
            try:
                outputs, padded_tokens = self._compute(part)
            except Exception as error:  # whatever the runtime raises
                logger.warning("a batch failed", extra={"sequences": len(part), "error": repr(error)})
                half = len(part) // 2
                if half:
                    parts += [part[half:], part[:half]]
                    continue
                self._probe(error)
                rows.refuse(part[0], "the model could not compute it")
                continue
            if outputs.count(None) == len(outputs):
                self._probe(ArithmeticError("no input of a batch had finite numbers"))
            rows.put(part, outputs, padded_tokens)

    def _compute(self, sequences: Sequence[TokenSequence]) -> tuple[list[OutputArrays | None], int]:
        """The outputs of one batch, None where they are not finite; and its tokens with padding.

        Raises:
            RuntimeError: The engine's rows are not those of the inputs.
            Exception: Whatever the runtime raises.
        """
        inputs = [it.input for it in sequences]
        attended = [it.attended for it in sequences]
        # Never the whole device: whether a batch runs alone depends on timing.
        result = self._engine.run(inputs, attended=attended if any(attended) else (), alone=not self._engine.widens)
        lengths = [len(it) for it in inputs]
        if result.lengths != lengths or result.output.shape[:2] != (len(lengths), max(lengths)):
            raise RuntimeError("the engine gave rows that are not those of the sequences")
        with np.errstate(all="ignore"):  # numbers that are not finite are looked for
            outputs = self._outputs.compute(result, sequences)
        return outputs, result.padded_tokens

    def _probe(self, error: Exception) -> None:
        """Tells whether an input or the engine is to blame.

        Raises:
            EngineUnhealthy: The engine fails for an input that any model can compute.
        """
        probe = self.bundle.sample(1)
        try:
            outputs, _ = self._compute([TokenSequence(probe, len(probe))])
        except Exception as failed:  # whatever the runtime raises
            raise EngineUnhealthy(f"the engine fails for everything: {failed!r}") from failed
        if outputs == [None]:
            raise EngineUnhealthy(f"the engine gives no finite numbers for anything: {error}") from error

    def _check_running(self) -> None:
        if self._stopped:
            raise Stopped("the embedder has been stopped")

    def _in_threads(self, pool: ThreadPoolExecutor, work: Iterable[Callable[[], _Made]]) -> list[_Made]:
        """What all of some work gives, in its order; of work that fails nothing goes on in the background.

        Raises:
            Exception: Whatever the first work raises that fails.
        """
        futures: list[Future[_Made]] = []
        try:
            futures.extend(map(pool.submit, work))
            return [it.result() for it in futures]
        except RuntimeError:
            self._check_running()  # a pool that has been shut down takes nothing
            raise
        finally:
            wait([it for it in futures if not it.cancel()])


class _Rows:
    """The rows of all inputs of a call, on their way into one array. Several threads may put rows in at a time."""

    def __init__(
        self,
        treatment: CallPlan,
        inputs: int,
        sequences: Sequence[TokenSequence],
        refused: dict[int, EncserveError],
        on_batch: OnBatch | None,
    ) -> None:
        """Takes how many inputs there are, those that are to be computed, and the others, to which more are added."""
        plan = treatment.plan
        self._output = plan.outputs[0]
        self._width, self._is_l2_normalized = plan.widths[0], plan.unit[0]
        self._sequences = sequences
        self._refused = refused
        self._on_batch = on_batch
        self._lock = threading.Lock()
        self._tokens = self._padded_tokens = 0
        self._lengths = np.zeros(inputs, np.int64)  # of what has been put in
        self._without_special = treatment.rules.details and self._output.kind is OutputKind.TOKENS
        self._indexed: dict[int, IndexedRows] = {}  # by place; how many rows there will be is not known before
        expected = np.zeros(inputs, np.int64)
        if self._output.kind not in _INDEXED:
            for it in sequences:
                expected[it.index] = len(self._kept(it)) if self._output.kind is OutputKind.TOKENS else 1
        self._expected = expected
        self._starts = np.cumsum(expected) - expected
        data_type = self._output.data_type
        columns = data_type.row_bytes(self._width) // data_type.dtype.itemsize
        self._rows: OutputRows = np.empty((int(expected.sum()), columns), data_type.dtype)

    def put(self, sequences: Sequence[TokenSequence], outputs: Sequence[OutputArrays | None], padded: int) -> None:
        """Takes what was made of sequences, None of those whose numbers are not finite, in so many padded tokens."""
        for sequence, arrays in zip(sequences, outputs, strict=True):
            if arrays is None:
                self.refuse(sequence, "the model's numbers for it are not finite")
            else:
                self._put(sequence, arrays[0])
        tokens = sum(len(it.input) for it in sequences) if padded else 0
        with self._lock:
            self._tokens += tokens
            self._padded_tokens += padded
        if self._on_batch is not None and sequences:
            self._on_batch(len(sequences), tokens, padded)

    def refuse(self, sequence: TokenSequence, problem: str) -> None:
        """Refuses a sequence."""
        place = FieldPath(Part.INPUT, sequence.index)
        self._refused[sequence.index] = InferenceFailed("{input}: {problem}", input=place, problem=problem)

    def embedded(self, kind: OutputName, bundle: Bundle) -> Embedded:
        """All of it, once everything has been put in or refused."""
        lengths, kept = self._lengths, [it for it in self._sequences if it.index not in self._refused]
        rows, indices = self._rows, None
        if self._output.kind in _INDEXED:
            rows, indices = self._joined()
        elif len(rows) > lengths.sum():  # some have been refused since
            rows = rows[np.repeat(lengths > 0, self._expected)]
        token_ids = None
        if self._output.kind is OutputKind.TOKENS and not bundle.graph.takes_vectors:
            token_ids = np.concatenate([np.empty(0, np.int64), *(self._kept(it) for it in kept)])
        counts, original_counts = np.zeros_like(lengths), np.zeros_like(lengths)
        places = [it.index for it in kept]
        counts[places] = [len(it.input) for it in kept]
        original_counts[places] = [it.original_token_count for it in kept]
        return Embedded(
            kind=kind,
            rows=rows,
            lengths=lengths,
            indices=indices,
            token_ids=token_ids,
            sparse_width=bundle.sparse.width if bundle.sparse is not None and kind == "sparse" else 0,
            l2_normalized=self._is_l2_normalized,
            refused={i: _reason(it) for i, it in sorted(self._refused.items())},
            token_counts=counts,
            original_token_counts=original_counts,
            tokens=self._tokens,
            padded_tokens=self._padded_tokens,
        )

    def _put(self, sequence: TokenSequence, array: OutputRows | IndexedRows) -> None:
        at = sequence.index
        if isinstance(array, IndexedRows):
            self._indexed[at] = array
            self._lengths[at] = len(array.rows)
            return
        if self._without_special and sequence.special is not None:
            array = array[~sequence.special]
        start = self._starts[at]
        self._rows[start : start + len(array)] = array  # a copy: the batch, with its padding, is freed
        self._lengths[at] = len(array)

    def _joined(self) -> tuple[OutputRows, npt.NDArray[np.uint32] | None]:
        """The rows that have indices, and these."""
        parts = [self._indexed[i] for i in sorted(self._indexed)]
        rows = np.concatenate([self._rows, *(it.rows for it in parts)])
        indices = [it.indices for it in parts if it.indices is not None]
        if len(indices) < len(parts):
            return rows, None
        return rows, np.concatenate([np.empty(0, "<u4"), *indices])

    def _kept(self, sequence: TokenSequence) -> Any:
        """Of (seq, …) inputs those that have rows."""
        if self._without_special and sequence.special is not None:
            return sequence.input[~sequence.special]
        return sequence.input


def batches(lengths: Sequence[int], policy: BatchPolicy) -> list[list[int]]:
    """Cuts inputs into batches, the longest first.

    Inputs are taken from the longest to the shortest, of one length in their order. A batch ends before the input that
    would break a bound of the policy; as the next one is no longer than that, no later one would fit either. An input
    that breaks a bound by itself is a batch of its own.

    Args:
        lengths: The tokens of each input, at least 1.
        policy: The bounds.

    Returns:
        For each batch the places of its inputs. All of it is decided by the arguments alone.
    """
    cut: list[list[int]] = []
    longest = real = 0
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable
        count = len(cut[-1]) + 1 if cut else 1
        padded = longest * count
        real += lengths[place]
        if (
            not cut
            or count > policy.max_batch_sequences
            or padded > policy.max_batch_tokens
            or padded - real > policy.max_padding_fraction * padded
        ):
            cut.append([])
            longest = real = lengths[place]
        cut[-1].append(place)
    return cut


def _call(
    inputs: Sequence[SentInput],
    trained_kind: OutputName,
    *,
    output: OutputName | None = None,
    l2_normalize: bool = False,
    dtype: str = "float32",
    dimensions: int | None = None,
    max_active_dims: int | None = None,
    pool_factor: float | None = None,
    task: str | None = None,
    prompt_name: str | None = None,
    truncate: bool = False,
    exclude_special_tokens: bool = False,
) -> tuple[EncodeCall, OutputName]:
    """What a call of the server would be, and the name of its output; see `EmbedOptions`.

    Raises:
        InvalidField: A value is none of those that there are.
    """
    name = output or trained_kind
    _check_choice("output", name, get_args(OutputName))
    _check_choice("dtype", dtype, [it.name.lower() for it in DataType])
    _check_choice("task", task, [None, *(it.name.lower() for it in Task if it)])
    for field, value in (("dimensions", dimensions), ("max_active_dims", max_active_dims)):
        if value is not None and value < 0:
            raise InvalidField(field, f"must be at least 1, or left out; was {value}")
    spec = OutputSpec(
        OutputKind[name.upper()],
        l2_normalize=l2_normalize,
        data_type=DataType[dtype.upper()],
        dimensions=dimensions or 0,
        max_active_dims=max_active_dims or 0,
        pool_factor=pool_factor or 0.0,
    )
    without_special = exclude_special_tokens and name == "tokens"
    return EncodeCall(
        inputs,
        (spec,),
        truncate=truncate,
        prompt_name=prompt_name,
        task=Task.NEITHER if task is None else Task[task.upper()],
        # Where each token stands in its text nobody asks for.
        shape=ReplyShape(Detail.COUNTS, without_special=without_special),
    ), name


def _check_choice(field: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise InvalidField(field, f"must be one of {', '.join(map(repr, choices))}; was {value!r}")


def _sent(at: int, value: Input, bundle: Bundle) -> SentInput:
    """An input as the server has it.

    Raises:
        InvalidField: It is neither a text, nor token ids, nor vectors.
    """
    if isinstance(value, str):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if not array.size and array.dtype != object:
        if bundle.graph.takes_vectors:
            return SentVectors(np.empty((0, bundle.d_model), np.float32), 0)
        return SentIds(np.empty(0, np.int64), 0)
    if array.ndim == 1 and array.dtype.kind in "iu":
        return SentIds(array.astype(np.int64, copy=False), len(array))
    if array.ndim == 2 and array.dtype.kind in "iuf":
        return SentVectors(array.astype(np.float32, copy=False), len(array))
    raise InvalidField(
        FieldPath(Part.INPUT, at),
        "must be a text, a list of ids of 64 bits, or a (seq, d_model) array of numbers; was "
        f"{type(value).__name__} of {array.dtype} {array.shape}",
    )


def _reason(error: EncserveError) -> str:
    """Why an input was refused, without its place among the inputs."""
    if not isinstance(error, RequestError):
        return str(error.values["problem"])
    text = error.problem_text(PlainNaming())
    place = error.field.place if isinstance(error.field, FieldPath) else None
    return text if place is None else f"id {place} {text}"
