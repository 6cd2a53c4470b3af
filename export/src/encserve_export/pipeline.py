"""Compares a bundle with sentence-transformers' own reading of its directory, from text to vector."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from encserve_export.errors import ParityError
from encserve_export.precision import BOUNDS
from encserve_export.runtime import onnxruntime
from encserve_export.sentence_transformers import TASKS
from encserve_export.sparse import load_sparse_encoder
from encserve_export.verify import Ids, Mask, Rows, least_cosine, relative_error
from encserve_proto.bundle.v1 import manifest_pb2

TOLERANCE = 1e-4
_LEAST_WEIGHT = 1e-5  # by which a weight may differ whatever it is
_EXACT = {"model_kwargs": {"dtype": "float32"}}  # whatever the checkpoint was saved in
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
        max_maxsim_error: The largest |got - want|/|want| of a MaxSim score between them; 0 for models without.
    """

    texts: int
    max_relative_error: float
    max_maxsim_error: float = 0.0


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
    if manifest.HasField("text") and manifest.sparse.mask_name:
        progress("comparing texts' weights with sentence-transformers")
        return _compare_weights(load_sparse_encoder(directory), _Pipeline(folder, manifest), manifest)
    has_vectors = manifest.HasField("multi_vector") and not manifest.pooling
    dense = bool(manifest.pooling) and (directory / "modules.json").is_file()
    if not (manifest.HasField("text") and (dense or has_vectors)):
        return None
    theirs = _load(directory, progress, "MultiVectorEncoder" if has_vectors else "SentenceTransformer")
    if theirs is None:
        return None
    progress("comparing texts' vectors with sentence-transformers")
    _set_lengths(theirs[0], manifest)
    ours = _Pipeline(folder, manifest)
    return (_compare_multi_vectors if has_vectors else _compare_vectors)(theirs, ours, manifest)


def _set_lengths(transformer: Any, manifest: manifest_pb2.Manifest) -> None:
    """Has sentence-transformers cut texts where the bundle does, which may be shorter than the directory says."""
    transformer.max_seq_length = longest = manifest.encoder.max_sequence_tokens
    for task in TASKS:
        settings = getattr(manifest, task)
        if getattr(transformer, f"{task}_length", None) and not settings.HasField("expansion"):
            setattr(transformer, f"{task}_length", settings.max_tokens or longest)


def _compare_vectors(theirs: Any, ours: "_Pipeline", manifest: manifest_pb2.Manifest) -> Compared:
    errors = []
    asked = {text: name for name, text in manifest.prompts.items()} | {"": ""}
    calls = [(f"the prompt {name!r}", text, "", {"prompt": text}) for text, name in sorted(asked.items())]
    for task in ours.tasks:
        settings = getattr(manifest, task)
        if settings.max_tokens or settings.prompt_name or manifest.default_prompt_name:
            calls.append((f"the task {task}", manifest.prompts.get(settings.prompt_name, ""), task, {}))
    for what, prompt, task, arguments in calls:
        want = _encode(getattr(theirs, f"encode_{task}") if task else theirs.encode, **arguments)
        got = np.concatenate([ours.vector(prompt, text, task) for text in _TEXTS])
        _refuse(list(got[:, None]), list(want[:, None]), manifest.graph.precision, what)
        errors.append(relative_error(got, want))
    return Compared(len(_TEXTS) * len(calls), max(errors))


def _compare_multi_vectors(theirs: Any, ours: "_Pipeline", manifest: manifest_pb2.Manifest) -> Compared:
    """The same for the vectors of MaxSim, before any token pooling, and for the scores of queries and documents."""
    for module in theirs:
        if hasattr(module, "pool_factor"):  # what it joins turns on the last bit of what is alike
            module.pool_factor, module.normalize_embeddings = 1.0, False
    ask = {"": theirs.encode, "query": theirs.encode_query, "document": theirs.encode_document}
    errors, vectors = [], {}
    for task, encode in ask.items():
        want = _encode(encode, convert_to_numpy=True)
        prompt = getattr(manifest, task).prompt_name if task else manifest.default_prompt_name
        got = [ours.multi_vectors(manifest.prompts.get(prompt, ""), text, task) for text in _TEXTS]
        _refuse(got, want, manifest.graph.precision, f"the task {task}" if task else "no task")
        errors += [relative_error(mine, its) for mine, its in zip(got, want, strict=True) if len(its)]
        vectors[task] = got, want
    scores = [
        np.array(
            [[_maxsim(query, document) for document in vectors["document"][side]] for query in vectors["query"][side]]
        )
        for side in (0, 1)
    ]
    change = float((np.abs(scores[0] - scores[1]) / np.maximum(np.abs(scores[1]), 1e-12)).max())
    return Compared(len(_TEXTS) * len(ask), max(errors), change)


def _compare_weights(theirs: Any, ours: "_Pipeline", manifest: manifest_pb2.Manifest) -> Compared:
    """The same for weights over the vocabulary, before the smallest are left out."""
    for module in theirs.modules():
        if hasattr(module, "transformer_task"):
            _set_lengths(module, manifest)
    errors = []
    for task, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        made = _encode(encode, max_active_dims=manifest.sparse.width, convert_to_sparse_tensor=False)
        want: Rows = made.numpy()  # (texts, width)
        got = np.concatenate([ours.weights(text, task) for text in _TEXTS])
        if manifest.graph.precision != "float32":
            _refuse(list(got[:, None]), list(want[:, None]), manifest.graph.precision, f"the task {task}")
        elif (excess := float((np.abs(got - want) - TOLERANCE * np.abs(want)).max())) > _LEAST_WEIGHT:
            raise ParityError(
                f"the bundle gives other weights than sentence-transformers with the task {task}: one differs by "
                f"{excess:.1e} more than {TOLERANCE:.0e} of it, at most {_LEAST_WEIGHT:.0e}; {_ADVICE}"
            )
        errors.append(relative_error(got, want))
    return Compared(len(_TEXTS) * len(errors), max(errors))


def _maxsim(query: Rows, document: Rows) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def _load(directory: Path, progress: Callable[[str], None], kind: str) -> Any:
    try:
        import sentence_transformers
    except ImportError:
        progress("texts' vectors are not compared: sentence-transformers is not installed")
        return None
    with _quiet():
        try:
            return getattr(sentence_transformers, kind)(str(directory), device="cpu", local_files_only=True, **_EXACT)
        except Exception as error:  # whatever it raises, it is theirs
            progress(f"texts' vectors are not compared: sentence-transformers does not read the directory: {error}")
            return None


def _encode(encode: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return encode(list(_TEXTS), batch_size=1, show_progress_bar=False, **arguments)
    except Exception as error:  # as above
        raise ParityError(f"sentence-transformers itself fails with the directory: {error!r}, {_ADVICE}") from error


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
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / manifest.text.tokenizer_file))
        self._tokenizer.no_padding()
        self._graph = _session(folder / manifest.graph.file)
        self._head = _session(folder / manifest.head.file) if manifest.HasField("head") else None
        multi_vector = manifest.multi_vector.file
        self._multi_vector = _session(folder / multi_vector) if multi_vector else None
        self._sparse = _session(folder / manifest.sparse.file) if manifest.HasField("sparse") else None

    @property
    def tasks(self) -> list[str]:
        """The tasks that texts may have."""
        return [task for task in TASKS if self._manifest.HasField(task)]

    def vector(self, prompt: str, text: str, task: str) -> Rows:
        """(1, width) of a text behind a prompt."""
        manifest = self._manifest
        ids, mask = self._tokens(prompt + text, task)
        rows = self._rows(ids, mask)  # (seq, d_model)
        skipped = self._prompt_tokens(prompt) if prompt and manifest.pooling_skips_prompt else 0
        poolings = (manifest.pooling, *manifest.more_poolings)
        vector: Rows = np.concatenate([_pool(rows, it, skipped) for it in poolings])[None]  # (1, poolings x d_model)
        if self._head is not None:
            vector = self._head.run([manifest.head.output_name], {manifest.head.input_name: vector})[0]
        if manifest.l2_normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector[:, : manifest.dimensions or None]

    def multi_vectors(self, prompt: str, text: str, task: str) -> Rows:
        """(vectors, width) of a text behind a prompt, before any token pooling."""
        settings, head = getattr(self._manifest, task or "document"), self._manifest.multi_vector
        ids, mask = self._tokens(prompt + text, task)
        counts = ~np.isin(ids, settings.skipped_token_ids)  # (seq)
        if settings.kept_token_ids:
            counts &= np.isin(ids, settings.kept_token_ids)
        counts[: int(head.skips_first_token)] = False
        rows = self._rows(ids, mask)[counts]  # (vectors, d_model)
        assert self._multi_vector is not None  # noqa: S101
        vectors: Rows = self._multi_vector.run([head.output_name], {head.input_name: rows})[0]
        return vectors

    def weights(self, text: str, task: str) -> Rows:
        """(1, width) of a text of a task, over the vocabulary."""
        sparse, settings = self._manifest.sparse, getattr(self._manifest, task)
        text = self._manifest.prompts.get(settings.prompt_name, "") + text
        if settings.HasField("static_sparse"):
            return self._static_weights(settings.static_sparse, text)
        rows = self._rows(*self._tokens(text, task))[None]  # (1, seq, d_model)
        feeds = {sparse.rows_name: rows, sparse.mask_name: np.ones(rows.shape[:2], np.float32)}
        assert self._sparse is not None  # noqa: S101
        weights: Rows = self._sparse.run([sparse.output_name], feeds)[0]
        return weights

    def _static_weights(self, static: manifest_pb2.StaticSparse, text: str) -> Rows:
        tokenizer = Tokenizer.from_file(str(self._folder / static.tokenizer_file))
        if static.max_tokens:
            tokenizer.enable_truncation(static.max_tokens)
        ids, table = tokenizer.encode(text).ids, np.load(self._folder / static.weights_file)
        weights: Rows = np.zeros_like(table)[None]
        weights[0, ids] = table[ids]
        return weights

    def _tokens(self, text: str, task: str) -> tuple[Ids, Mask]:
        """The ids of a text of a task, (seq), and what attention sees of them, as the graph's mask has it, (seq)."""
        settings = getattr(self._manifest, task) if task else manifest_pb2.TaskSettings()
        self._tokenizer.enable_truncation(settings.max_tokens or self._manifest.encoder.max_sequence_tokens)
        ids = self._tokenizer.encode(text).ids
        expansion = settings.expansion
        missing = max(expansion.min_tokens - len(ids), 0)
        mask = [1] * len(ids) + [1 if expansion.attended else 2] * missing
        return np.array(ids + [expansion.token_id] * missing, np.int64), np.array(mask, np.int64)

    def _rows(self, ids: Ids, mask: Mask) -> Rows:
        """(seq, d_model)."""
        graph = self._manifest.graph
        feeds = {graph.input_ids_name: ids[None], graph.attention_mask_name: mask[None]}
        if graph.token_type_ids_name:
            feeds[graph.token_type_ids_name] = np.zeros_like(ids[None])
        rows: Rows = self._graph.run([graph.output_name], feeds)[0][0]
        return rows

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


def _refuse(got: Sequence[Rows], want: Sequence[Rows], precision: str, asked: str) -> None:
    """Compares each text's (vectors, width) with sentence-transformers' own."""
    bounds = {str(name): its for name, its in BOUNDS.items()}.get(precision)
    exact, least = bounds is not None and bounds.cosine is None, (bounds and bounds.cosine) or _LEAST_COSINE
    for text, ours, theirs in zip(_TEXTS, got, want, strict=True):
        where = f"for the text {text[:40]!r} with {asked}"
        if ours.shape != theirs.shape:
            raise ParityError(
                f"the bundle gives {ours.shape} numbers, sentence-transformers {theirs.shape}, {where}; {_ADVICE}"
            )
        if not len(theirs):
            continue
        error, cosine = relative_error(ours, theirs), least_cosine(ours, theirs)
        if error <= TOLERANCE or (not exact and cosine >= least):
            continue
        figures = f"relative error {error:.1e}, tolerance {TOLERANCE:.1e}"
        if not exact:
            figures = f"cosine similarity {cosine:.4f}, at least {least} is required"
        raise ParityError(f"the bundle gives another vector than sentence-transformers {where}: {figures}; {_ADVICE}")
