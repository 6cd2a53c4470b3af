"""Compares a bundle with its authors' libraries' own reading of its directory, from text to ids to vectors."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from encserve_export.check.agreement import least_cosine, relative_error
from encserve_export.ground.arrays import Ids, Mask, Rows
from encserve_export.ground.errors import ParityError, UnsupportedModelError, first_line
from encserve_export.ground.precision import Bounds, allowed, bounds_of
from encserve_export.ground.runtime import open_session
from encserve_export.kinds.directory import MODULES, load, quiet
from encserve_export.kinds.recipe import NO_BOUND, TASKS, Recipe
from encserve_export.models import pretrained
from encserve_export.source.texts import TEXTS
from encserve_export.source.tokenizer import BundleTokenizer, difficult_texts, listed_ids, load_tokenizer, shortened
from encserve_export.source.weights import holds_weights
from encserve_proto.bundle.v1 import manifest_pb2

TOLERANCE = 1e-4
# Where neither a directory nor a caller says how long texts may be, at most so many tokens are served:
# all that decoders have positions for is of no use to embeddings, and checking it takes hours.
LONGEST_BY_DEFAULT = 8192
_LEAST_WEIGHT = 1e-5  # by which a weight may differ whatever it is
_SENTENCE = "The cat sleeps on the warm windowsill while it rains. "
_LONG = 200 * _SENTENCE
# Texts whose vectors are compared; the ids of many more are.
_TEXTS = (
    "",
    "Cats",
    _SENTENCE,
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍",
    "  Ｆｕｌｌ ｗｉｄｔｈ,\tﬁnd the oﬀer\n\nzero\u200bwidth and\x07control ",
    f"A WORD of many letters: {'x' * 120}",
    _LONG,
)
_ADVICE = (
    "so it is not the model that the directory describes. Save the directory again with save_pretrained of a recent "
    "sentence-transformers or transformers, and export that"
)


@dataclasses.dataclass(frozen=True)
class Compared:
    """What was found.

    Attributes:
        library: What was compared with, "sentence-transformers" or "transformers".
        texts: How many texts were compared, each with each prompt.
        max_relative_error: The largest ‖got - want‖/‖want‖ of their vectors.
        min_cosine: The least cosine similarity of one of them.
        max_maxsim_error: The largest |got - want| of a MaxSim score between them, as a share of the best score of its
            query; None for models without.
        bounds: What was allowed.
    """

    library: str
    texts: int
    max_relative_error: float
    min_cosine: float
    max_maxsim_error: float | None
    bounds: Bounds


def check_pipeline(
    directory: Path,
    recipe: Recipe,
    requested: int | None,
    progress: Callable[[str], None],
    folder: Path,
    manifest: manifest_pb2.Manifest,
) -> Compared | None:
    """Makes ids and vectors of texts with a bundle's files, and with the libraries that the directory is made for.

    A directory with a modules.json is compared with sentence-transformers, every other with transformers.

    Args:
        directory: What they read.
        recipe: What `kinds.reading.read` made of it.
        requested: The longest sequence that was asked for, in tokens; None where the directory decides.
        progress: Called with what is being done, or why it is not.
        folder: The bundle's files.
        manifest: What is in them.

    Returns:
        What was found; None where there are no weights, or transformers does not know the model.

    Raises:
        UnsupportedModelError: sentence-transformers cannot load the directory.
        ConfigError: transformers cannot load it.
        ParityError: Ids, a length or a vector are others.
    """
    kind, encoder = recipe.kind, recipe.encoder
    if kind == "dense" and not holds_weights(encoder):
        progress("going on without a comparison of texts: there are no weights")
        return None
    ours = _Pipeline(folder, manifest)
    plain = kind == "dense" and not (directory / MODULES).is_file()
    if plain or not manifest.HasField("text"):
        return _compare_rows(encoder, progress, ours)
    progress("comparing texts' ids and vectors with sentence-transformers")
    theirs = load(directory, kind, manifest.source.repository)
    if kind == "static":
        theirs[0].tokenizer.enable_truncation(manifest.encoder.max_sequence_tokens)
        for text in (*TEXTS, _LONG):
            want = theirs[0].tokenizer.encode(text, add_special_tokens=False).ids
            ours.check_ids(text, want, "sentence-transformers")
        return _compare_vectors(theirs, ours)
    (transformer,) = [it for it in theirs.modules() if hasattr(it, "transformer_task")]
    _check_lengths(transformer, requested, manifest)
    _compare_ids(transformer, ours)
    compare = {"dense": _compare_vectors, "multi_vector": _compare_multi_vectors, "sparse": _compare_weights}[kind]
    return compare(theirs, ours)


def _check_lengths(transformer: Any, requested: int | None, manifest: manifest_pb2.Manifest) -> None:
    """Refuses a bundle that cuts texts elsewhere than sentence-transformers; has that cut where it is to.

    Fewer tokens are right where the model has no more positions, and other numbers where they were asked for.
    """
    longest = manifest.encoder.max_sequence_tokens
    positions = pretrained.positions(transformer.model, transformer.config)
    usual = transformer.max_seq_length or NO_BOUND
    for task in ("", *TASKS):
        settings = _settings(manifest, task)
        if settings.HasField("expansion") or settings.HasField("static_sparse"):
            continue  # sentence-transformers decides on their length by itself
        ours = settings.max_tokens or longest
        own = getattr(transformer, f"{task}_length", None) if task else None
        due = min(own or usual, positions or NO_BOUND)
        if requested is not None:
            due = min(own, requested) if own else requested
        if ours != due and not (due >= NO_BOUND or ours == LONGEST_BY_DEFAULT < due):
            asked = f"the task {task}" if task else "no task"
            raise ParityError(
                f"the bundle cuts texts of {asked} to {ours} tokens, sentence-transformers to {due}; {_ADVICE}, or say "
                "--max-sequence-tokens"
            )
        if own:
            setattr(transformer, f"{task}_length", ours)
        elif not task:
            transformer.max_seq_length = ours


def _compare_ids(transformer: Any, ours: "_Pipeline") -> None:
    """Refuses other ids of one of many texts, with each prompt and for each task."""
    texts = [*difficult_texts(transformer.tokenizer), _LONG]
    for prompt, task in ours.ways():
        if _settings(ours.manifest, task).HasField("static_sparse"):
            continue  # they go another way
        arguments = {"task": task} if task else {}
        try:
            with quiet():
                made = transformer.preprocess(texts, prompt=prompt or None, **arguments)
        except Exception as error:  # whatever it raises, it is theirs
            raise ParityError(
                f"sentence-transformers itself fails with the directory: {first_line(error)}, {_ADVICE}"
            ) from error
        seen = made["attention_mask"].bool()  # (texts, seq)
        if "query_expansion_positions" in made:
            seen |= made["query_expansion_positions"].bool()
        for text, ids, kept in zip(texts, made["input_ids"], seen, strict=True):
            ours.check_ids(text, ids[kept].tolist(), "sentence-transformers", prompt, task)


def _compare_rows(directory: Path, progress: Callable[[str], None], ours: "_Pipeline") -> Compared | None:
    """The same with the rows of the model that transformers reads of a directory."""
    manifest = ours.manifest
    try:
        theirs = pretrained.load_reference(directory)
    except UnsupportedModelError as error:
        progress(f"going on without a comparison with transformers: {error}")
        return None
    progress("comparing texts' rows with transformers")
    judge = _Judge(manifest, "transformers")
    for text, features in _features(directory, manifest):
        ids = features["input_ids"][0].numpy()  # (seq)
        if manifest.HasField("text"):
            ours.check_ids(text, ids.tolist(), "transformers")
        if len(ids):
            try:
                with torch.inference_mode():
                    want = theirs(**features).last_hidden_state[0].float().numpy()  # (seq, d_model)
            except Exception as error:  # whatever a model of somebody else's raises
                raise ParityError(
                    f"transformers itself fails with what its tokenizer makes of a text: {first_line(error)}; {_ADVICE}"
                ) from error
            judge.vectors([text], [ours.rows(ids, np.ones_like(ids))], [want], "no prompt")
    return judge.compared


def _features(directory: Path, manifest: manifest_pb2.Manifest) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Texts, and what transformers' tokenizer makes of them, as its models take it; without a tokenizer some ids."""
    longest = manifest.encoder.max_sequence_tokens
    if not manifest.HasField("text"):
        ids = torch.arange(min(longest, 64))[None] % manifest.encoder.vocab_size  # (1, seq)
        yield "", {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return
    tokenizer = load_tokenizer(directory)
    for text in _texts(tokenizer):
        made = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        yield text, {name: it.long() for name, it in made.items()}


def _texts(tokenizer: Any) -> tuple[str, ...]:
    """`_TEXTS`, and one with the special tokens of a tokenizer of transformers' written out."""
    return (*_TEXTS, " ".join(("the", *getattr(tokenizer, "all_special_tokens", [])[:8], "cat")))


def _settings(manifest: manifest_pb2.Manifest, task: str) -> manifest_pb2.TaskSettings:
    """How texts of a task are treated; of no task, without what of a document's does not count here."""
    if not task:
        return manifest_pb2.TaskSettings(max_tokens=manifest.text.max_tokens)
    settings: manifest_pb2.TaskSettings = getattr(manifest, task)
    return settings


class _Judge:
    """Compares what the bundle makes of texts with what sentence-transformers does, and keeps the worst of it."""

    def __init__(self, manifest: manifest_pb2.Manifest, of: str = "sentence-transformers") -> None:
        precision = manifest.graph.precision
        self._precision, self._of = precision, of
        # Where float32 itself is further from float64, so are the library's vectors and the bundle's, both.
        self.tolerance = allowed(TOLERANCE, 2 * manifest.parity.float32_error)
        self.bounds = bounds_of(precision)
        self._texts, self._max_error, self._min_cosine = 0, 0.0, 1.0
        self._max_maxsim_error: float | None = None

    @property
    def compared(self) -> Compared:
        """What was found."""
        return Compared(self._of, self._texts, self._max_error, self._min_cosine, self._max_maxsim_error, self.bounds)

    def vectors(self, texts: Sequence[str], got: Sequence[Rows], want: Sequence[Rows], asked: str) -> None:
        """Refuses the first text of which (vectors, width) are others."""
        for text, ours, theirs in zip(texts, got, want, strict=True):
            where = f"for the text {shortened(text)} with {asked}"
            if ours.shape != theirs.shape:
                raise ParityError(
                    f"the bundle gives {ours.shape} numbers, {self._of} {theirs.shape}, {where}; {_ADVICE}"
                )
            self._vectors(ours, theirs, where)
        self._texts += len(texts)

    def weights(self, got: Rows, want: Rows, asked: str, texts: int) -> None:
        """The same of the weights of so many texts, (rows, width), which in float32 are judged one by one."""
        if self.bounds.cosine is not None:
            for ours, theirs in zip(got, want, strict=True):
                self._vectors(ours[None], theirs[None], f"with {asked}")
        elif (
            not (excess := float((np.abs(got - want) - self.tolerance * np.abs(want)).max(initial=0))) <= _LEAST_WEIGHT
        ):
            raise ParityError(
                f"the bundle gives other weights than sentence-transformers with {asked}: one differs by "
                f"{excess:.1e} more than {self.tolerance:.0e} of it, at most {_LEAST_WEIGHT:.0e}; {_ADVICE}"
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
        if error <= self.tolerance or (least is not None and cosine >= least):
            return
        figures = f"relative error {error:.1e}, tolerance {self.tolerance:.1e}"
        if least is not None:
            figures = f"cosine similarity {cosine:.4f}, at least {least} is required"
        raise ParityError(f"the bundle gives another vector than {self._of} {where}: {figures}; {self._advice}")

    @property
    def _advice(self) -> str:
        return _ADVICE if self.bounds.cosine is None else f"{self._precision} rounds too much here, float32 is exact"


def _compare_vectors(theirs: Any, ours: "_Pipeline") -> Compared:
    manifest, texts = ours.manifest, _texts(theirs.tokenizer)
    judge = _Judge(manifest)
    if {"Pooling", "StaticEmbedding"}.isdisjoint(type(it).__name__ for it in theirs):
        got = [ours.rows(*ours.tokens("", text, "")) for text in texts]
        judge.vectors(texts, got, _rows(theirs, texts), "no prompt")
        return judge.compared
    names = {text: name for name, text in manifest.prompts.items()} | {"": ""}
    for prompt, task in ours.ways():
        settings = _settings(manifest, task)
        if task and not (settings.max_tokens or settings.prompt_name or manifest.default_prompt_name):
            continue  # as without a task
        arguments = {} if task else {"prompt": prompt}
        want = _encode(getattr(theirs, f"encode_{task}") if task else theirs.encode, texts, **arguments)
        got = [ours.vector(prompt, text, task) for text in texts]
        asked = f"the task {task}" if task else f"the prompt {names[prompt]!r}"
        judge.vectors(texts, got, list(want[:, None]), asked)
    if manifest.HasField("multi_vector") or manifest.HasField("sparse"):
        _compare_others(_rows(theirs, texts), texts, ours, judge)
    return judge.compared


def _rows(theirs: Any, texts: Sequence[str]) -> list[Rows]:
    """(seq, d_model) of each text without a prompt."""
    rows = _encode(theirs.encode, texts, output_value="token_embeddings", prompt="")
    return [it.numpy() for it in rows]


def _compare_others(due: Sequence[Rows], texts: Sequence[str], ours: "_Pipeline", judge: _Judge) -> None:
    """The same for what a model makes beside one vector: sentence-transformers knows its rows alone, one set a text."""
    manifest = ours.manifest
    if manifest.HasField("multi_vector"):
        got = [ours.multi_vectors("", text, "") for text in texts]
        want = [ours.multi_vectors("", text, "", its) for text, its in zip(texts, due, strict=True)]
        judge.vectors(texts, got, want, "its vectors for MaxSim")
        judge.scores((got, got), (want, want))
    if manifest.HasField("sparse"):
        got = [ours.token_weights(text) for text in texts]
        want = [ours.token_weights(text, its) for text, its in zip(texts, due, strict=True)]
        joined = np.concatenate(got, axis=1), np.concatenate(want, axis=1)  # (1, tokens of all texts)
        judge.weights(*joined, "its weights of tokens", len(texts))


def _compare_multi_vectors(theirs: Any, ours: "_Pipeline") -> Compared:
    """The same for the vectors of MaxSim, before any token pooling, and for the scores of queries and documents."""
    for module in theirs:
        if hasattr(module, "pool_factor"):  # what it joins turns on the last bit of what is alike
            module.pool_factor, module.normalize_embeddings = 1.0, False
    manifest, texts = ours.manifest, _texts(theirs.tokenizer)
    judge = _Judge(manifest)
    ask = {"": theirs.encode, "query": theirs.encode_query, "document": theirs.encode_document}
    got, want = {}, {}
    for task, encode in ask.items():
        want[task] = _encode(encode, texts, convert_to_numpy=True)
        prompt = getattr(manifest, task).prompt_name if task else manifest.default_prompt_name
        got[task] = [ours.multi_vectors(manifest.prompts.get(prompt, ""), text, task) for text in texts]
        judge.vectors(texts, got[task], want[task], f"the task {task}" if task else "no task")
    judge.scores(*((its["query"], its["document"]) for its in (got, want)))
    return judge.compared


def _compare_weights(theirs: Any, ours: "_Pipeline") -> Compared:
    """The same for weights over the vocabulary, before the smallest are left out."""
    manifest = ours.manifest
    (transformer,) = [it for it in theirs.modules() if hasattr(it, "transformer_task")]
    texts = _texts(transformer.tokenizer)
    judge = _Judge(manifest)
    for task, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        made = _encode(encode, texts, max_active_dims=manifest.sparse.width, convert_to_sparse_tensor=False)
        got = np.concatenate([ours.weights(text, task) for text in texts])  # (texts, width)
        first = 0 if judge.bounds.cosine is None else 1  # an empty text's few weights move most
        judge.weights(got[first:], made.numpy()[first:], f"the task {task}", len(texts) - first)
    return judge.compared


def _maxsim(query: Rows, document: Rows) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def _encode(encode: Callable[..., Any], texts: Sequence[str], **arguments: Any) -> Any:
    try:
        return encode(list(texts), batch_size=1, show_progress_bar=False, **arguments)
    except Exception as error:  # whatever it raises, it is theirs
        raise ParityError(f"sentence-transformers itself fails with the directory: {error!r}, {_ADVICE}") from error


class _Pipeline:
    """A bundle's files put together as the server puts them, one text at a time."""

    def __init__(self, folder: Path, manifest: manifest_pb2.Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._tokenizer = BundleTokenizer(folder, manifest.text) if manifest.HasField("text") else None
        self._graph = open_session(folder / manifest.graph.file)
        self._head = open_session(folder / manifest.head.file) if manifest.HasField("head") else None
        multi_vector = manifest.multi_vector.file
        self._multi_vector = open_session(folder / multi_vector) if multi_vector else None
        self._sparse = open_session(folder / manifest.sparse.file) if manifest.HasField("sparse") else None

    def ways(self) -> list[tuple[str, str]]:
        """The prompts and tasks that texts may have: each prompt without a task, each task with its own prompt."""
        prompts, tasks = self.manifest.prompts, [task for task in TASKS if self.manifest.HasField(task)]
        return [
            *((prompt, "") for prompt in sorted({"", *prompts.values()})),
            *((prompts.get(getattr(self.manifest, task).prompt_name, ""), task) for task in tasks),
        ]

    def vector(self, prompt: str, text: str, task: str) -> Rows:
        """(1, width) of a text behind a prompt."""
        manifest = self.manifest
        rows = self.rows(*self.tokens(prompt, text, task))  # (seq, d_model)
        assert self._tokenizer is not None  # noqa: S101
        skipped = self._tokenizer.count_prompt(prompt) if prompt and manifest.pooling_skips_prompt else 0
        poolings = (manifest.pooling, *manifest.more_poolings)
        vector: Rows = np.concatenate([_pool(rows, it, skipped) for it in poolings])[None]  # (1, poolings x d_model)
        if self._head is not None:
            vector = self._head.run([manifest.head.output_name], {manifest.head.input_name: vector})[0]
        if manifest.l2_normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector[:, : manifest.dimensions or None]

    def multi_vectors(self, prompt: str, text: str, task: str, rows: Rows | None = None) -> Rows:
        """(vectors, width) of a text behind a prompt, before any token pooling; of others' `rows` if there are any."""
        settings, head = getattr(self.manifest, task or "document"), self.manifest.multi_vector
        ids, mask = self.tokens(prompt, text, task)
        counts = ~np.isin(ids, settings.skipped_token_ids)  # (seq)
        if settings.kept_token_ids:
            counts &= np.isin(ids, settings.kept_token_ids)
        counts[: int(head.skips_first_token)] = False
        rows = self.rows(ids, mask) if rows is None else rows  # (seq, d_model)
        assert self._multi_vector is not None  # noqa: S101
        vectors: Rows = self._multi_vector.run([head.output_name], {head.input_name: rows[counts]})[0]
        return vectors

    def weights(self, text: str, task: str) -> Rows:
        """(1, width) of a text of a task, over the vocabulary."""
        sparse, settings = self.manifest.sparse, getattr(self.manifest, task)
        prompt = self.manifest.prompts.get(settings.prompt_name, "")
        if settings.HasField("static_sparse"):
            return self._static_weights(settings.static_sparse, prompt + text)
        rows = self.rows(*self.tokens(prompt, text, task))[None]  # (1, seq, d_model)
        feeds = {sparse.rows_name: rows, sparse.mask_name: np.ones(rows.shape[:2], np.float32)}
        assert self._sparse is not None  # noqa: S101
        weights: Rows = self._sparse.run([sparse.output_name], feeds)[0]
        return weights

    def token_weights(self, text: str, rows: Rows | None = None) -> Rows:
        """(1, tokens) of those that have a weight of their own; of others' `rows` if there are any."""
        sparse, (ids, mask) = self.manifest.sparse, self.tokens("", text, "")
        rows = self.rows(ids, mask) if rows is None else rows  # (seq, d_model)
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

    def tokens(self, prompt: str, text: str, task: str) -> tuple[Ids, Mask]:
        """The ids of a text, (seq), and what attention sees of them, as the graph's mask has it, (seq)."""
        settings = _settings(self.manifest, task)
        assert self._tokenizer is not None  # noqa: S101
        ids = self._tokenizer.ids(text, prompt, settings.max_tokens or self.manifest.encoder.max_sequence_tokens)
        expansion = settings.expansion
        missing = max(expansion.min_tokens - len(ids), 0)
        mask = [1] * len(ids) + [1 if expansion.attended else 2] * missing
        return np.array(ids + [expansion.token_id] * missing, np.int64), np.array(mask, np.int64)

    def check_ids(self, text: str, want: Sequence[int], of: str, prompt: str = "", task: str = "") -> None:
        """Refuses other ids of a text than those of a library."""
        if (got := self.tokens(prompt, text, task)[0].tolist()) != want:
            raise ParityError(
                f"for the text {shortened(text)} with the prompt {prompt!r} and {task or 'no'} task the bundle gives "
                f"the ids {listed_ids(got)}, {of} {listed_ids(want)}; {_ADVICE}"
            )

    def rows(self, ids: Ids, mask: Mask) -> Rows:
        """(seq, d_model)."""
        if not len(ids):
            return np.zeros((0, self.manifest.encoder.d_model), np.float32)
        graph = self.manifest.graph
        feeds = {graph.input_ids_name: ids[None], graph.attention_mask_name: mask[None]}
        if graph.token_type_ids_name:
            feeds[graph.token_type_ids_name] = np.zeros_like(ids[None])
        rows: Rows = self._graph.run([graph.output_name], feeds)[0][0]
        return rows


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
