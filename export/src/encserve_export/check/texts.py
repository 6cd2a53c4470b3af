"""Compares a bundle with sentence-transformers' own reading of its directory, from text to vector."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from encserve_export.check.agreement import least_cosine, relative_error
from encserve_export.ground.arrays import Ids, Mask, Rows
from encserve_export.ground.errors import ParityError
from encserve_export.ground.precision import BOUNDS, Bounds
from encserve_export.ground.runtime import onnxruntime
from encserve_export.kinds.directory import MODULES, kind_of, load
from encserve_export.kinds.recipe import TASKS
from encserve_proto.bundle.v1 import manifest_pb2

TOLERANCE = 1e-4
_LEAST_WEIGHT = 1e-5  # by which a weight may differ whatever it is
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
        min_cosine: The least cosine similarity of one of them.
        max_maxsim_error: The largest |got - want| of a MaxSim score between them, as a share of the best score of its
            query; None for models without.
        bounds: What was allowed.
    """

    texts: int
    max_relative_error: float
    min_cosine: float
    max_maxsim_error: float | None
    bounds: Bounds


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
        What was found; None where there is no text or no pooling to compare.

    Raises:
        ParityError: A vector is another one.
        UnsupportedModelError: sentence-transformers cannot load the directory.
    """
    has_vectors = manifest.HasField("multi_vector") and not manifest.pooling
    by_weights = bool(manifest.sparse.mask_name)
    dense = bool(manifest.pooling) and (directory / MODULES).is_file()
    if not (manifest.HasField("text") and (dense or has_vectors or by_weights)):
        return None
    kind = kind_of(directory)
    progress("comparing texts' vectors with sentence-transformers")
    theirs, ours = load(directory, kind, manifest.source.repository), _Pipeline(folder, manifest)
    if by_weights:
        return _compare_weights(theirs, ours, manifest)
    if kind == "static":
        theirs[0].tokenizer.enable_truncation(manifest.encoder.max_sequence_tokens)
    else:
        _set_lengths(theirs[0], manifest)
    return (_compare_multi_vectors if has_vectors else _compare_vectors)(theirs, ours, manifest)


class _Judge:
    """Compares what the bundle makes of texts with what sentence-transformers does, and keeps the worst of it."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self.bounds = {str(name): its for name, its in BOUNDS.items()}.get(precision, BOUNDS["int8"])
        self._texts, self._max_error, self._min_cosine = 0, 0.0, 1.0
        self._max_maxsim_error: float | None = None

    @property
    def compared(self) -> Compared:
        """What was found."""
        return Compared(self._texts, self._max_error, self._min_cosine, self._max_maxsim_error, self.bounds)

    def vectors(self, got: Sequence[Rows], want: Sequence[Rows], asked: str) -> None:
        """Refuses the first text of which (vectors, width) are others."""
        for text, ours, theirs in zip(_TEXTS, got, want, strict=True):
            where = f"for the text {text[:40]!r} with {asked}"
            if ours.shape != theirs.shape:
                raise ParityError(
                    f"the bundle gives {ours.shape} numbers, sentence-transformers {theirs.shape}, {where}; {_ADVICE}"
                )
            self._vectors(ours, theirs, where)
        self._texts += len(_TEXTS)

    def weights(self, got: Rows, want: Rows, asked: str, texts: int) -> None:
        """The same of the weights of so many texts, (rows, width), which in float32 are judged one by one."""
        if self.bounds.cosine is not None:
            for ours, theirs in zip(got, want, strict=True):
                self._vectors(ours[None], theirs[None], f"with {asked}")
        elif (excess := float((np.abs(got - want) - TOLERANCE * np.abs(want)).max(initial=0))) > _LEAST_WEIGHT:
            raise ParityError(
                f"the bundle gives other weights than sentence-transformers with {asked}: one differs by "
                f"{excess:.1e} more than {TOLERANCE:.0e} of it, at most {_LEAST_WEIGHT:.0e}; {_ADVICE}"
            )
        self._max_error = max(self._max_error, relative_error(got, want))
        self._texts += texts

    def scores(self, got: tuple[Sequence[Rows], Sequence[Rows]], want: tuple[Sequence[Rows], Sequence[Rows]]) -> None:
        """Refuses other MaxSim scores of the vectors of queries and those of documents."""
        ours, theirs = (
            np.array([[_maxsim(query, document) for document in documents] for query in queries])  # (texts, texts)
            for queries, documents in (got, want)
        )
        best = np.abs(theirs).max(axis=1, keepdims=True)  # (texts, 1)
        self._max_maxsim_error = error = float((np.abs(ours - theirs) / np.maximum(best, 1e-12)).max())
        if not error <= self.bounds.maxsim_error:
            raise ParityError(
                f"a MaxSim score differs from sentence-transformers by {error:.1e} of the best of its query, at most "
                f"{self.bounds.maxsim_error:.1e} is allowed; {self._advice}"
            )

    def _vectors(self, ours: Rows, theirs: Rows, where: str) -> None:
        if not len(theirs):
            return
        error, cosine, least = relative_error(ours, theirs), least_cosine(ours, theirs), self.bounds.cosine
        self._max_error, self._min_cosine = max(self._max_error, error), min(self._min_cosine, cosine)
        if error <= TOLERANCE or (least is not None and cosine >= least):
            return
        figures = f"relative error {error:.1e}, tolerance {TOLERANCE:.1e}"
        if least is not None:
            figures = f"cosine similarity {cosine:.4f}, at least {least} is required"
        raise ParityError(
            f"the bundle gives another vector than sentence-transformers {where}: {figures}; {self._advice}"
        )

    @property
    def _advice(self) -> str:
        return _ADVICE if self.bounds.cosine is None else f"{self._precision} rounds too much here, float32 is exact"


def _set_lengths(transformer: Any, manifest: manifest_pb2.Manifest) -> None:
    """Has sentence-transformers cut texts where the bundle does, which may be shorter than the directory says."""
    transformer.max_seq_length = longest = manifest.encoder.max_sequence_tokens
    for task in TASKS:
        settings = getattr(manifest, task)
        if getattr(transformer, f"{task}_length", None) and not settings.HasField("expansion"):
            setattr(transformer, f"{task}_length", settings.max_tokens or longest)


def _compare_vectors(theirs: Any, ours: "_Pipeline", manifest: manifest_pb2.Manifest) -> Compared:
    judge = _Judge(manifest.graph.precision)
    asked = {text: name for name, text in manifest.prompts.items()} | {"": ""}
    calls = [(f"the prompt {name!r}", text, "", {"prompt": text}) for text, name in sorted(asked.items())]
    for task in ours.tasks:
        settings = getattr(manifest, task)
        if settings.max_tokens or settings.prompt_name or manifest.default_prompt_name:
            calls.append((f"the task {task}", manifest.prompts.get(settings.prompt_name, ""), task, {}))
    for what, prompt, task, arguments in calls:
        want = _encode(getattr(theirs, f"encode_{task}") if task else theirs.encode, **arguments)
        got = np.concatenate([ours.vector(prompt, text, task) for text in _TEXTS])
        judge.vectors(list(got[:, None]), list(want[:, None]), what)
    if manifest.HasField("multi_vector") or manifest.HasField("sparse"):
        _compare_others(_encode(theirs.encode, output_value="token_embeddings", prompt=""), ours, manifest, judge)
    return judge.compared


def _compare_others(rows: Sequence[Any], ours: "_Pipeline", manifest: manifest_pb2.Manifest, judge: _Judge) -> None:
    """The same for what a model makes beside one vector: sentence-transformers knows its rows alone, one set a text."""
    due = [it.numpy() for it in rows]  # (seq, d_model) each
    if manifest.HasField("multi_vector"):
        got = [ours.multi_vectors("", text, "") for text in _TEXTS]
        want = [ours.multi_vectors("", text, "", its) for text, its in zip(_TEXTS, due, strict=True)]
        judge.vectors(got, want, "its vectors for MaxSim")
        judge.scores((got, got), (want, want))
    if manifest.HasField("sparse"):
        got = [ours.token_weights(text) for text in _TEXTS]
        want = [ours.token_weights(text, its) for text, its in zip(_TEXTS, due, strict=True)]
        joined = np.concatenate(got, axis=1), np.concatenate(want, axis=1)  # (1, tokens of all texts)
        judge.weights(*joined, "its weights of tokens", len(_TEXTS))


def _compare_multi_vectors(theirs: Any, ours: "_Pipeline", manifest: manifest_pb2.Manifest) -> Compared:
    """The same for the vectors of MaxSim, before any token pooling, and for the scores of queries and documents."""
    for module in theirs:
        if hasattr(module, "pool_factor"):  # what it joins turns on the last bit of what is alike
            module.pool_factor, module.normalize_embeddings = 1.0, False
    judge = _Judge(manifest.graph.precision)
    ask = {"": theirs.encode, "query": theirs.encode_query, "document": theirs.encode_document}
    got, want = {}, {}
    for task, encode in ask.items():
        want[task] = _encode(encode, convert_to_numpy=True)
        prompt = getattr(manifest, task).prompt_name if task else manifest.default_prompt_name
        got[task] = [ours.multi_vectors(manifest.prompts.get(prompt, ""), text, task) for text in _TEXTS]
        judge.vectors(got[task], want[task], f"the task {task}" if task else "no task")
    judge.scores(*((its["query"], its["document"]) for its in (got, want)))
    return judge.compared


def _compare_weights(theirs: Any, ours: "_Pipeline", manifest: manifest_pb2.Manifest) -> Compared:
    """The same for weights over the vocabulary, before the smallest are left out."""
    for module in theirs.modules():
        if hasattr(module, "transformer_task"):
            _set_lengths(module, manifest)
    judge = _Judge(manifest.graph.precision)
    for task, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        made = _encode(encode, max_active_dims=manifest.sparse.width, convert_to_sparse_tensor=False)
        got = np.concatenate([ours.weights(text, task) for text in _TEXTS])  # (texts, width)
        first = 0 if judge.bounds.cosine is None else 1  # nobody looks for an empty text, whose few weights move most
        judge.weights(got[first:], made.numpy()[first:], f"the task {task}", len(_TEXTS) - first)
    return judge.compared


def _maxsim(query: Rows, document: Rows) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def _encode(encode: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return encode(list(_TEXTS), batch_size=1, show_progress_bar=False, **arguments)
    except Exception as error:  # as above
        raise ParityError(f"sentence-transformers itself fails with the directory: {error!r}, {_ADVICE}") from error


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

    def multi_vectors(self, prompt: str, text: str, task: str, rows: Rows | None = None) -> Rows:
        """(vectors, width) of a text behind a prompt, before any token pooling; of others' `rows` if there are any."""
        settings, head = getattr(self._manifest, task or "document"), self._manifest.multi_vector
        ids, mask = self._tokens(prompt + text, task)
        counts = ~np.isin(ids, settings.skipped_token_ids)  # (seq)
        if settings.kept_token_ids:
            counts &= np.isin(ids, settings.kept_token_ids)
        counts[: int(head.skips_first_token)] = False
        rows = self._rows(ids, mask) if rows is None else rows  # (seq, d_model)
        assert self._multi_vector is not None  # noqa: S101
        vectors: Rows = self._multi_vector.run([head.output_name], {head.input_name: rows[counts]})[0]
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

    def token_weights(self, text: str, rows: Rows | None = None) -> Rows:
        """(1, tokens) of those that have a weight of their own; of others' `rows` if there are any."""
        sparse, (ids, mask) = self._manifest.sparse, self._tokens(text, "")
        rows = self._rows(ids, mask) if rows is None else rows  # (seq, d_model)
        rows = rows[~np.isin(ids, sparse.skipped_token_ids)]
        assert self._sparse is not None  # noqa: S101
        weights: Rows = self._sparse.run([sparse.output_name], {sparse.rows_name: rows})[0].T
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
        if not len(ids):
            return np.zeros((0, self._manifest.encoder.d_model), np.float32)
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
        return np.zeros(rows.shape[1], rows.dtype)
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
