"""Compares a bundle with sentence-transformers' own reading of its directory, from text to vector."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from encserve_export.errors import ParityError
from encserve_export.precision import BOUNDS
from encserve_export.runtime import onnxruntime
from encserve_export.verify import Rows, least_cosine, relative_error
from encserve_proto.v1 import manifest_pb2

TOLERANCE = 1e-4
_LEAST_COSINE = 0.99  # of precisions that have no bounds of their own
_SENTENCE = "The cat sleeps on the warm windowsill while it rains. "
_TEXTS = ("", "Cats", _SENTENCE, "Grüße aus Köln, 東京 и Москва: naïve café 🌍", 200 * _SENTENCE)
_ADVICE = (
    "so it is not the model that the directory describes. Most often tokenizer.json and tokenizer_config.json "
    "contradict each other: save the tokenizer anew with save_pretrained"
)


@dataclasses.dataclass(frozen=True)
class Compared:
    """What was found.

    Attributes:
        texts: How many texts were compared, each with each prompt.
        max_relative_error: The largest ‖got - want‖/‖want‖ of their vectors.
    """

    texts: int
    max_relative_error: float


def check_pipeline(
    directory: Path, progress: Callable[[str], None], folder: Path, manifest: manifest_pb2.Manifest
) -> Compared | None:
    """Makes vectors of a few texts with a bundle's files, and with sentence-transformers.

    Args:
        directory: What sentence-transformers reads.
        progress: Called with what is being done, or why it is not.
        folder: The bundle's files.
        manifest: What is in them.

    Returns:
        What was found; None where sentence-transformers is not installed or cannot read the directory, or there is no
        text or no pooling to compare.

    Raises:
        ParityError: A vector is another one.
    """
    if not (manifest.HasField("text") and manifest.pooling and (directory / "modules.json").is_file()):
        return None
    theirs = _load(directory, progress)
    if theirs is None:
        return None
    progress("comparing texts' vectors with sentence-transformers")
    theirs.max_seq_length = manifest.encoder.max_sequence_tokens
    ours = _Pipeline(folder, manifest)
    errors = []
    prompts = {text: name for name, text in manifest.prompts.items()} | {"": ""}
    for prompt, name in sorted(prompts.items()):
        want = _encode(theirs, prompt)
        got = np.concatenate([ours.vector(prompt, text) for text in _TEXTS])
        _refuse(got, want, manifest.graph.precision, name)
        errors.append(relative_error(got, want))
    return Compared(len(_TEXTS) * len(errors), max(errors))


def _load(directory: Path, progress: Callable[[str], None]) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        progress("texts' vectors are not compared: sentence-transformers is not installed")
        return None
    with _quiet():
        try:
            return SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        except Exception as error:  # whatever it raises, it is theirs
            progress(f"texts' vectors are not compared: sentence-transformers does not read the directory: {error}")
            return None


def _encode(theirs: Any, prompt: str) -> Rows:
    try:
        vectors: Rows = theirs.encode(list(_TEXTS), prompt=prompt, batch_size=1, show_progress_bar=False)
    except Exception as error:  # as above
        raise ParityError(f"sentence-transformers itself fails with the directory: {error!r}, {_ADVICE}") from error
    return vectors


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Pipeline:
    """A bundle's files put together as the server puts them, one text at a time."""

    def __init__(self, folder: Path, manifest: manifest_pb2.Manifest) -> None:
        self._manifest = manifest
        self._tokenizer = Tokenizer.from_file(str(folder / manifest.text.tokenizer_file))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(manifest.encoder.max_sequence_tokens)
        self._graph = _session(folder / manifest.graph.file)
        self._head = _session(folder / manifest.head.file) if manifest.HasField("head") else None

    def vector(self, prompt: str, text: str) -> Rows:
        """(1, width) of a text behind a prompt."""
        manifest, graph = self._manifest, self._manifest.graph
        ids = np.array([self._tokenizer.encode(prompt + text).ids], np.int64)  # (1, seq)
        feeds = {graph.input_ids_name: ids, graph.attention_mask_name: np.ones_like(ids)}
        if graph.token_type_ids_name:
            feeds[graph.token_type_ids_name] = np.zeros_like(ids)
        rows = self._graph.run([graph.output_name], feeds)[0][0]  # (seq, d_model)
        skipped = self._prompt_tokens(prompt) if prompt and manifest.pooling_skips_prompt else 0
        poolings = (manifest.pooling, *manifest.more_poolings)
        vector: Rows = np.concatenate([_pool(rows, it, skipped) for it in poolings])[None]  # (1, poolings x d_model)
        if self._head is not None:
            vector = self._head.run([manifest.head.output_name], {manifest.head.input_name: vector})[0]
        if manifest.l2_normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector[:, : manifest.dimensions or None]

    def _prompt_tokens(self, prompt: str) -> int:
        special = self._tokenizer.encode(prompt).special_tokens_mask
        return len(special) - bool(special and special[-1])


def _pool(rows: Rows, pooling: int, skipped: int) -> Rows:
    """(seq, d_model) to (d_model,)."""
    weights = np.arange(1, len(rows) + 1, dtype=np.float32)[skipped:, None]  # (kept, 1)
    kept = rows[skipped:]  # (kept, d_model)
    if pooling == manifest_pb2.POOLING_CLS:
        first: Rows = (kept if len(kept) else rows)[0]
        return first
    if not len(kept):
        return np.zeros_like(rows[0])
    pooled: dict[int, Callable[[], Rows]] = {
        manifest_pb2.POOLING_MEAN: lambda: kept.mean(axis=0),
        manifest_pb2.POOLING_MAX: lambda: kept.max(axis=0),
        manifest_pb2.POOLING_LAST_TOKEN: lambda: kept[-1],
        manifest_pb2.POOLING_WEIGHTED_MEAN: lambda: (kept * weights).sum(axis=0) / weights.sum(),
        manifest_pb2.POOLING_MEAN_SQRT_LENGTH: lambda: kept.sum(axis=0) / np.float32(len(kept) ** 0.5),
    }
    return pooled[pooling]()


def _session(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def _refuse(got: Rows, want: Rows, precision: str, prompt_name: str) -> None:
    if got.shape != want.shape:
        raise ParityError(
            f"the bundle gives {got.shape[1]} numbers where sentence-transformers gives {want.shape[1]}, {_ADVICE}"
        )
    bounds = {str(name): its for name, its in BOUNDS.items()}.get(precision)
    exact, least = bounds is not None and bounds.cosine is None, (bounds and bounds.cosine) or _LEAST_COSINE
    for text, ours, theirs in zip(_TEXTS, got, want, strict=True):
        error, cosine = relative_error(ours, theirs), least_cosine(ours, theirs)
        if error <= TOLERANCE or (not exact and cosine >= least):
            continue
        figures = f"relative error {error:.1e}, tolerance {TOLERANCE:.1e}"
        if not exact:
            figures = f"cosine similarity {cosine:.4f}, at least {least} is required"
        prompt = f" with the prompt {prompt_name!r}" if prompt_name else ""
        raise ParityError(
            f"the bundle gives another vector than sentence-transformers for the text {text[:40]!r}{prompt}: "
            f"{figures}; {_ADVICE}"
        )
