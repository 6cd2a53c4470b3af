"""Verifies, loads and warms up a model. The functions block, so they run in a thread."""

import functools
import itertools
import logging
import time
from pathlib import Path

import numpy as np

from encserve_server.engine.base import Engine, Head, Inspector
from encserve_server.engine.opening import check_installed, open_engine, open_head, open_inspector
from encserve_server.engine.prepacked import PrepackedWeights, open_weights
from encserve_server.errors import BundleError
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.turns import FairThreadPool
from encserve_server.outputs import ModelOutputs
from encserve_server.repository.bundle import read_bundle, verify_unchanged
from encserve_server.repository.loaded import LoadedModel, ServedAlready, batch_policy
from encserve_server.repository.scan import tuned_file
from encserve_server.repository.tuning import tune
from encserve_server.settings import MIB, Settings
from encserve_server.system.cpus import cpu_model, usable_cpus
from encserve_server.types.bundles import Bundle, HeadGraph, InspectGraph
from encserve_server.types.requests import Task

logger = logging.getLogger(__name__)


def load_model(
    directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served_fingerprint: str = ""
) -> LoadedModel:
    """Load the bundle in a directory, unless the bundle has `served_fingerprint`.

    Raises:
        ServedAlready: The bundle has `served_fingerprint`, and its files are unaltered.
        BundleError: The bundle is missing, altered or unreadable, or its model cannot compute.
        DeviceError: The requested device or precision is not available.
        EngineMissing: The package of the engine is not installed.
    """
    began = time.perf_counter()
    check_installed(settings.engine)
    bundle = read_bundle(directory)
    if bundle.fingerprint == served_fingerprint:
        raise ServedAlready
    load_tokenizer = functools.partial(_load_tokenizer, settings, tokenize_pool)
    tokenizer = load_tokenizer(bundle.tokenizer_file, bundle.vocab_size, bundle) if bundle.tokenizer_file else None
    statics = {task: bundle.treatment(task).static_sparse for task in (Task.NEITHER, *bundle.tasks)}
    static_tokenizers = {
        task: load_tokenizer(its.tokenizer_file, len(its.weights)) for task, its in statics.items() if its is not None
    }
    threads = settings.intra_op_threads or usable_cpus()
    weights = None
    if bundle.graph.precision == "float32":  # ONNX Runtime crashes with mapped float16 weights
        weights = open_weights(
            settings.cache_dir,
            bundle.fingerprint,
            directory,
            lambda: read_bundle(directory).fingerprint == bundle.fingerprint,
        )
    engine = open_engine(
        bundle.graph,
        engine=settings.engine,
        precision=settings.precision,
        device=settings.device,
        intra_op_threads=threads,
        parallel_runs=settings.parallel_batches,
        weights=weights,
    )
    try:
        if advice := precision_advice(engine.info.precision, engine.info.device):
            logger.warning(advice, extra={"model": bundle.name, "precision": engine.info.precision})
        outputs = load_outputs(bundle, settings, engine, threads)
        loaded = time.perf_counter()
        warm_up(engine, bundle, settings.batch_tokens_for(engine.info.device))
        max_batch_tokens, job_batch_tokens = _tune(engine, bundle, settings, directory, threads)
    except BaseException:
        engine.close()  # at once, because the device may have no free memory
        raise
    warm = time.perf_counter()
    logger.info(
        "model loaded",
        extra={
            "model": bundle.name,
            "version": bundle.version,
            "fingerprint": bundle.fingerprint,
            "provider": engine.info.provider,
            "precision": engine.info.precision,
            "runtime": engine.info.runtime,
            "requested_device": settings.device,
            "intra_op_threads": threads,
            "parallel_batches": engine.max_parallel_runs,
            "max_batch_tokens": max_batch_tokens,
            "load_seconds": round(loaded - began, 3),
            "warmup_seconds": round(warm - loaded, 3),
        },
    )
    inspect = bundle.inspect_graph
    load = None if inspect is None else functools.partial(load_inspector, inspect, engine.info.device, weights)
    return LoadedModel(
        bundle,
        tokenizer,
        outputs,
        engine,
        loaded - began,
        warm - loaded,
        load,
        max_batch_tokens,
        job_batch_tokens,
        static_tokenizers,
    )


def precision_advice(precision: str, device: str) -> str:
    """Return why a model of this precision is slow on this device; empty if the model is not slow."""
    if precision == "float16" and device == "cpu":
        return "a float16 bundle is for GPUs: this CPU casts every number and is slower than with float32"
    if precision == "int8" and device == "cuda":
        return "an int8 bundle is for CPUs: CUDA leaves its linear layers to the CPU; export float16"
    return ""


def _tune(engine: Engine, bundle: Bundle, settings: Settings, directory: Path, threads: int) -> tuple[int, int]:
    """Return the maximum number of tokens in a batch, padding included: for a server, and for a job.

    The number is a setting, a measured number, or a constant for the device.
    """
    device = engine.info.device
    constant = settings.batch_tokens_for(device)
    if settings.max_batch_tokens is not None or not settings.tune_batches:
        return constant, constant
    tuned = tune(
        engine,
        bundle,
        lambda budget: batch_policy(settings, device, budget),
        path=tuned_file(directory),
        machine={
            "cpu": cpu_model(),
            "intra_op_threads": threads,
            "parallel_runs": engine.max_parallel_runs,
            "runtime": engine.info.runtime,
        },
    )
    what = "remembered" if tuned.remembered else "measured" if tuned.max_batch_tokens else "not measurable now"
    rates = {} if tuned.remembered else {budget: round(rate) for budget, rate in tuned.tokens_per_second.items()}
    extra = {"model": bundle.name, "max_batch_tokens": tuned.max_batch_tokens}
    logger.info("batch budget %s", what, extra=extra | ({"tokens_per_second": rates} if rates else {}))
    return tuned.max_batch_tokens or constant, tuned.job_batch_tokens or constant


def load_outputs(bundle: Bundle, settings: Settings, engine: Engine, threads: int) -> ModelOutputs:
    """Load the heads of a model, and run each head once."""

    def open_one(graph: HeadGraph, *, on_device: bool, all_threads: bool) -> Head:
        device = engine.info.device if on_device else "cpu"
        its_threads = threads if all_threads else 1
        return open_head(graph, engine=settings.engine, device=device, threads=its_threads)

    share = settings.max_vocabulary_mib * MIB // engine.max_parallel_runs
    return ModelOutputs.load(bundle, open_one, max_vocabulary_bytes=share)


def load_inspector(inspect: InspectGraph, device: str, weights: PrepackedWeights | None = None) -> Inspector:
    """Load the graph for inspections on the model's device.

    Raises:
        BundleError: A file of the bundle has changed since the model was loaded, or is not usable.
        EngineMissing: ONNX Runtime is not installed.
    """
    verify_unchanged(inspect.files)
    return open_inspector(inspect, device=device, weights=weights)


def _load_tokenizer(
    settings: Settings, tokenize_pool: FairThreadPool, path: Path, vocab_size: int, encoders: Bundle | None = None
) -> TextTokenizer:
    """Load a tokenizer of a bundle, and refuse a tokenizer with ids that the model does not have.

    Args:
        settings: The server's settings.
        tokenize_pool: The threads that tokenize.
        path: The file of the tokenizer.
        vocab_size: 1 more than the largest allowed token id.
        encoders: The bundle, for the tokenizer of the encoder; None for the tokenizer of a table of weights.
    """
    tokenizer = TextTokenizer(
        path,
        tokenize_pool,
        settings.max_queue_text_mib * MIB,
        split_special_tokens=encoders is not None and encoders.split_special_tokens,
        template=None if encoders is None else encoders.template,
    )
    # An added token may have an id beyond the embedding table: texts with this token are refused later. Texts for a
    # table of static weights are not checked later, so the added tokens are checked here.
    added = tokenizer.added_tokens if encoders is None else ()
    largest_id = max((tokenizer.largest_id, *added))
    if largest_id >= vocab_size:
        raise BundleError(
            f"{path}: its largest token id is {largest_id}, but the model's largest token id is "
            f"{vocab_size - 1}; the tokenizer belongs to another model"
        )
    return tokenizer


def warm_up(engine: Engine, bundle: Bundle, batch_tokens: int) -> None:
    """Run typical batch shapes, so that the first caller does not wait for kernels and memory.

    Raises:
        BundleError: The model cannot compute, or its results have NaN or infinity.
    """
    longest = bundle.max_sequence_tokens
    typical = max(1, min(32, longest))
    # This batch has as much padding as real batches have. With more padding, a very long text would take minutes.
    padded = [1, typical, min(longest, max(typical, batch_tokens // 3))]
    batches = [[1], [typical] * max(1, batch_tokens // typical), [longest], padded]
    ways = [True, False] if engine.has_wide_session else [True]
    for lengths, alone in itertools.product(batches, ways):
        try:
            # Use the first and the last id. If the embedding table is smaller than the vocabulary, this run fails.
            sequences = [bundle.sample(length, last=i % 2 == 0) for i, length in enumerate(lengths)]
            result = engine.run(sequences, alone=alone)
        except Exception as error:  # any exception of the runtime
            raise BundleError(
                f"{bundle.graph.path}: the model fails for sequences of {lengths} tokens: {error}"
            ) from error
        if not all(np.isfinite(rows).all() for rows in result.rows):
            raise BundleError(f"{bundle.graph.path}: the model returns NaN or infinity for {lengths} tokens")
