"""Compares a bundle with the library that its directory was saved for: ids of texts, and vectors.

The bundle runs in `encserve_server.offline`, so the comparison covers the code that serves the bundle. A directory with
modules.json is compared with sentence-transformers, any other directory with transformers.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encserve_export.check.agreement import compare, relative_error
from encserve_export.core.arrays import Rows
from encserve_export.core.errors import ParityError, UnsupportedModelError, first_line
from encserve_export.core.precision import (
    PIPELINE_TOLERANCE,
    PIPELINE_WEIGHT_TOLERANCE,
    Bounds,
    bounds_of,
    tolerance_for,
)
from encserve_export.core.quiet import quiet
from encserve_export.kinds.directory import transformer_of
from encserve_export.kinds.spec import NO_BOUND, TASKS, ModelSpec
from encserve_export.models import pretrained
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.source.tokenizer_probes import TEXTS, difficult_texts
from encserve_export.source.weights import holds_weights
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint, to_fields
from encserve_server.errors import EncserveError
from encserve_server.offline import Embedder

LONGEST_BY_DEFAULT = 8192  # the default without a stated limit; the checks of longer texts take hours

_SENTENCE = "The cat sleeps on the warm windowsill while it rains. "
# For these texts vectors are compared; for many more only ids.
_TEXTS = (
    "",
    "Cats",
    _SENTENCE,
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍",
    "  Ｆｕｌｌ ｗｉｄｔｈ,\tﬁnd the oﬀer\n\nzero\u200bwidth and\x07control ",
    f"A WORD of many letters: {'x' * 120}",
    200 * _SENTENCE,
)
_CUT = 3000 * _SENTENCE  # longer than any model takes
_TYPES_ADVICE = (
    'its tokenizer gives token_type_ids, which this model reads as tokens: write "model_input_names": ["input_ids", '
    '"attention_mask"] into tokenizer_config.json if the model was trained without'
)
_ADVICE = (
    "so the directory describes another model. Save the directory again with save_pretrained of a recent "
    "sentence-transformers or transformers, and export that"
)


@dataclasses.dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Attributes:
        library: The library, "sentence-transformers" or "transformers".
        texts: The number of compared texts; each counts once for each prompt and task.
        max_relative_error: The largest ‖got - want‖ / ‖want‖ of a vector.
        min_cosine: The least cosine similarity of a vector.
        max_maxsim_error: The largest |got - want| of a MaxSim score, as a share of the best score of its query; None
            for models without.
        bounds: The allowed differences.
    """

    library: str
    texts: int
    max_relative_error: float
    min_cosine: float
    max_maxsim_error: float | None
    bounds: Bounds


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to send texts: with a prompt, for a task, or neither.

    Attributes:
        options: The options of the server's call.
        label: The way in words, for errors.
        prompt: The prompt before each text.
    """

    options: Mapping[str, Any]
    label: str
    prompt: str = ""

    @property
    def task(self) -> str:
        """The task, or an empty text."""
        return str(self.options.get("task", ""))


_NO_PROMPT = Way({"prompt_name": ""}, "no prompt")


@dataclasses.dataclass(frozen=True)
class Answers:
    """The library's answers.

    Attributes:
        library: The library.
        ids: For each way the texts, and the ids of each text.
        outputs: For each way the server's name of the output, the texts, and the (rows, width) array of each text.
        advice: The advice if a vector differs.
    """

    library: str
    ids: Sequence[tuple[Way, Sequence[str], Sequence[list[int]]]]
    outputs: Sequence[tuple[Way, str, Sequence[Any], Sequence[Rows]]]
    advice: str = _ADVICE


PipelineCheck = Callable[[Path, manifest_pb2.Manifest], Compared | None]


def prepare_comparison(
    spec: ModelSpec, *, takes_text: bool, asked: int | None, progress: Callable[[str], None]
) -> PipelineCheck:
    """Return a function that compares a bundle, given its folder and its manifest.

    sentence-transformers answers at once, so that its model can be freed before the graph is written. transformers
    answers when the bundle is compared. The function returns None if transformers has no reference: the directory has
    no weights, or transformers does not know the model.

    Args:
        spec: The spec of the directory.
        takes_text: Whether the bundle has a tokenizer.
        asked: The longest sequence that the user asked for, in tokens; None for the directory's own.
        progress: Called with each step.

    Raises:
        UnsupportedModelError: A prompt fills the longest text, and pooling leaves it out.
        ParityError: sentence-transformers fails with the directory. The function raises it if ids or vectors differ.
    """
    if spec.loaded is None or not takes_text:
        plain = dataclasses.replace(spec, loaded=None)  # without sentence-transformers' model there is room for weights
        return partial(_compare, lambda manifest: _ask_transformers(plain, manifest, progress), progress)
    progress("asking sentence-transformers for texts' ids and vectors")
    answers = _ask_static(spec, asked) if spec.kind == "static" else _ask_sentence_transformers(spec, asked)
    return partial(_compare, lambda _: answers, progress)


def _compare(
    ask: Callable[[manifest_pb2.Manifest], Answers],
    progress: Callable[[str], None],
    folder: Path,
    manifest: manifest_pb2.Manifest,
) -> Compared | None:
    answers = ask(manifest)
    progress(f"comparing texts' ids and vectors with {answers.library}")
    comparison = Comparison(manifest, answers)
    with _open(folder, manifest) as embedder:
        for way, texts, ids in answers.ids:
            got = embedder.tokenize(texts, truncate=True, **way.options)
            for text, ours, theirs in zip(texts, got, ids, strict=True):
                comparison.ids(text, way, ours if isinstance(ours, str) else ours.tolist(), theirs)
        for way, output, texts, want in answers.outputs:
            comparison.output(way, output, texts, _embed(embedder, way, output, texts), want)
    comparison.scores()
    return comparison.compared if answers.outputs else None


@contextlib.contextmanager
def _open(folder: Path, manifest: manifest_pb2.Manifest) -> Iterator[Embedder]:
    """Load the bundle in a draft folder, with a manifest that keeps all vectors and all weights.

    Token pooling and a limit on the weights turn rounding into large differences.
    """
    whole = manifest_pb2.Manifest()
    whole.CopyFrom(manifest)
    for task in filter(whole.HasField, TASKS):
        getattr(whole, task).ClearField("token_pooling")
    if whole.HasField("sparse"):
        whole.sparse.max_active_dims = 0
    whole.fingerprint = fingerprint(whole)
    (folder / "manifest.json").write_text(json.dumps(to_fields(whole)), encoding="utf-8")
    with tempfile.TemporaryDirectory() as repository, quiet():
        bundle = Path(repository) / manifest.name / manifest.version  # the server compares both names
        bundle.parent.mkdir()
        bundle.symlink_to(folder.absolute(), target_is_directory=True)
        options: dict[str, Any] = {
            "device": "cpu",
            "tune_batches": False,
            "cache_dir": Path("off"),  # an export leaves no weights in the user's cache
            "parallel_batches": 1,
        }
        try:
            embedder = Embedder(bundle, max_text_bytes=2**24, **options)
        except EncserveError as error:
            raise ParityError(f"the server does not load the bundle: {error}") from error
        with embedder:
            yield embedder


def _embed(embedder: Embedder, way: Way, output: str, texts: Sequence[Any]) -> list[Rows]:
    """The (rows, width) array of each text; (1, width) for weights over the vocabulary."""
    made: Any = embedder.run(texts, truncate=True, output=output, **way.options)  # type: ignore[arg-type]
    if made.refused:
        place, reason = next(iter(made.refused.items()))
        raise ParityError(f"the server refuses the text {_short(texts[place])} with {way.label}: {reason}; {_ADVICE}")
    if output != "sparse":
        arrays: list[Rows] = made.arrays()
        return arrays
    dense = np.zeros((len(texts), made.sparse_width), np.float32)
    for row, vector in zip(dense, made.sparse_vectors(), strict=True):
        row[vector.indices] = vector.values
    return list(dense[:, None])


class Comparison:
    """Compares the bundle's ids and vectors with the library's, and stores the largest differences."""

    def __init__(self, manifest: manifest_pb2.Manifest, answers: Answers) -> None:
        self._library = answers.library
        self._advice = answers.advice
        self._vocab_size = manifest.encoder.vocab_size
        # If float32 itself is far from float64, both the library's vectors and the bundle's are.
        self._tolerance = tolerance_for(PIPELINE_TOLERANCE, 2 * manifest.parity.float32_error)
        self._bounds = bounds_of(manifest.graph.precision)
        exact = self._bounds.cosine is None
        self._allowed = Bounds(error=self._tolerance) if exact else Bounds(cosine=self._bounds.cosine)
        self._texts, self._max_error, self._min_cosine = 0, 0.0, 1.0
        self._max_maxsim_error: float | None = None
        self._vectors: dict[str, tuple[Sequence[Rows], Sequence[Rows]]] = {}  # of MaxSim, by task

    @property
    def compared(self) -> Compared:
        """The differences so far."""
        return Compared(
            self._library, self._texts, self._max_error, self._min_cosine, self._max_maxsim_error, self._bounds
        )

    def ids(self, text: str, way: Way, got: list[int] | str, want: list[int]) -> None:
        """Refuse other ids. The server must refuse a text without tokens, or with an id outside the vocabulary."""
        refused = max(want, default=self._vocab_size) >= self._vocab_size
        if got == want or (refused and isinstance(got, str)):
            return
        raise ParityError(
            f"for the text {_short(text)} with {way.label} the bundle gives the ids {_listed(got)}, {self._library} "
            f"{_listed(want)}; {_ADVICE}"
        )

    def output(self, way: Way, output: str, texts: Sequence[Any], got: Sequence[Rows], want: Sequence[Rows]) -> None:
        """Refuse other rows or weights."""
        exact_weights = output == "sparse" and self._bounds.cosine is None
        refuse_other = self._refuse_other_weights if exact_weights else self._refuse_other_rows
        for text, ours, theirs in zip(texts, got, want, strict=True):
            where = f"for the text {_short(text)} with {way.label}"
            if ours.shape != theirs.shape:
                raise ParityError(
                    f"the bundle gives {ours.shape} numbers, {self._library} {theirs.shape}, {where}; {_ADVICE}"
                )
            if output == "sparse" and self._bounds.cosine is not None and text == "":
                continue  # rounding moves the few weights of an empty text most
            if theirs.size:
                refuse_other(ours, theirs, where)
            self._texts += 1
        if output == "multi_vector":
            self._vectors[way.task] = got, want

    def scores(self) -> None:
        """Refuse other MaxSim scores of queries and documents."""
        if not self._vectors:
            return
        neither = next(iter(self._vectors.values()))
        queries, documents = (self._vectors.get(task, neither) for task in TASKS)
        ours, theirs = (
            np.array([[_maxsim(query, document) for document in documents[i]] for query in queries[i]])
            for i in range(2)
        )  # (texts, texts)
        best = np.abs(theirs).max(axis=1, keepdims=True)  # (texts, 1)
        self._max_maxsim_error = error = float((np.abs(ours - theirs) / np.maximum(best, 1e-12)).max())
        if not error <= self._bounds.maxsim_error:
            advice = "float32 is exact" if self._bounds.cosine is not None else self._advice
            raise ParityError(
                f"a MaxSim score differs from {self._library} by {error:.1e} of the best score of its query, at most "
                f"{self._bounds.maxsim_error:.1e} is allowed; {advice}"
            )

    def _refuse_other_rows(self, got: Rows, want: Rows, where: str) -> None:
        difference = compare(got, want, self._allowed)
        self._max_error = max(self._max_error, difference.error)
        self._min_cosine = min(self._min_cosine, difference.cosine)
        if difference.excess:
            advice = f"; {self._advice}" if self._bounds.cosine is None else ""
            raise ParityError(
                f"the bundle gives another vector than {self._library} {where}: {difference.excess}{advice}"
            )

    def _refuse_other_weights(self, got: Rows, want: Rows, where: str) -> None:
        self._max_error = max(self._max_error, relative_error(got, want))
        excess = float((np.abs(got - want) - self._tolerance * np.abs(want)).max())
        if not excess <= PIPELINE_WEIGHT_TOLERANCE:
            raise ParityError(
                f"the bundle gives other weights than {self._library} {where}: one differs by {excess:.1e} more than "
                f"{self._tolerance:.0e} of the weight, at most {PIPELINE_WEIGHT_TOLERANCE:.0e} is allowed; {_ADVICE}"
            )


def _ask_transformers(spec: ModelSpec, manifest: manifest_pb2.Manifest, progress: Callable[[str], None]) -> Answers:
    """Ask transformers for ids and rows of texts; without a tokenizer, for rows of fixed ids."""
    longest, way = manifest.encoder.max_sequence_tokens, _NO_PROMPT
    ids: list[Any] = []
    texts: Sequence[Any]
    if manifest.HasField("text"):
        call = partial(spec.tokenizer, truncation=True, max_length=longest)
        probes = [*difficult_texts(spec.tokenizer), _CUT]
        ids = [(way, probes, call(probes)["input_ids"])]
        texts = _texts(spec.tokenizer)
        inputs = [{name: it.long() for name, it in call(text, return_tensors="pt").items()} for text in texts]
    else:
        some = torch.arange(min(longest, 64))[None] % manifest.encoder.vocab_size  # (1, seq)
        texts, inputs = [some[0].numpy()], [{"input_ids": some, "attention_mask": torch.ones_like(some)}]
    outputs = []
    if not holds_weights(spec.encoder):
        progress("going on without a comparison of rows: the directory has no weights")
    else:
        try:
            model = pretrained.load_reference(spec.encoder)
        except UnsupportedModelError as error:
            progress(f"going on without a comparison of rows: {error}")
        else:
            usable = [i for i, it in enumerate(inputs) if _usable(it["input_ids"][0].tolist(), manifest)]
            rows = [_rows(model, inputs[i], texts[i]) for i in usable]
            outputs = [(way, "tokens", [texts[i] for i in usable], rows)]
            return Answers("transformers", ids, outputs, _advice(model, inputs[0]))
    return Answers("transformers", ids, outputs)


def _advice(model: Any, inputs: Mapping[str, Any]) -> str:
    """The advice if a vector differs: GPT-2 has no table of token types, and adds the row of a token."""
    reads_types = "token_type_ids" in inputs and not hasattr(model.config, "type_vocab_size")
    return _TYPES_ADVICE if reads_types else _ADVICE


def _usable(ids: Sequence[int], manifest: manifest_pb2.Manifest) -> bool:
    return 0 <= max(ids, default=-1) < manifest.encoder.vocab_size


def _rows(model: Any, inputs: Mapping[str, Any], text: Any) -> Rows:
    try:
        with torch.inference_mode():
            rows: Rows = model(**inputs).last_hidden_state[0].float().numpy()  # (seq, d_model)
    except Exception as error:  # a model raises any class
        raise ParityError(
            f"transformers itself fails for the text {_short(text)}: {first_line(error)}; {_ADVICE}"
        ) from error
    return rows


def _ask_static(spec: ModelSpec, asked: int | None) -> Answers:
    tokenizer = spec.tokenizer
    tokenizer.enable_truncation(asked or spec.max_seq_length)
    probes = [*TEXTS, _CUT]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in probes]
    return Answers("sentence-transformers", [(_NO_PROMPT, probes, ids)], _vectors(spec, {}))


def _ask_sentence_transformers(spec: ModelSpec, asked: int | None) -> Answers:
    transformer = transformer_of(spec.loaded)
    longest = _set_lengths(transformer, spec, asked)
    vocab_size = transformer.model.get_input_embeddings().num_embeddings
    if spec.skips_prompt:
        _check_prompts(transformer.tokenizer, spec.prompts.values(), longest)
    probes, texts = [*difficult_texts(transformer.tokenizer), _CUT], _texts(transformer.tokenizer)
    ids, usable = [], {}
    for way in _prompt_task_pairs(spec):
        if way.task and spec.tasks[way.task].HasField("static_sparse"):
            continue  # another tokenizer
        ids.append((way, probes, _ids(transformer, probes[:-1], way) + _ids(transformer, probes[-1:], way)))
        pairs = zip(texts, _ids(transformer, texts, way), strict=True)
        usable[way.label] = [text for text, text_ids in pairs if 0 <= max(text_ids, default=-1) < vocab_size]
        if not usable[way.label]:
            raise ParityError(
                f"no text with {way.label} has token ids below {vocab_size}, the rows of the model's table"
            )
    advice = _advice(transformer.model, transformer.preprocess(["a"]))
    return Answers("sentence-transformers", ids, _vectors(spec, usable), advice)


def _set_lengths(transformer: Any, spec: ModelSpec, asked: int | None) -> int:
    """Set sentence-transformers' text lengths to the bundle's. Return the longest text without a task, in tokens.

    sentence-transformers knows neither the user's length nor, for some models, the number of positions.
    """
    positions = pretrained.positions(transformer.model, transformer.config) or NO_BOUND
    usual = min(transformer.max_seq_length or NO_BOUND, positions)
    if spec.max_seq_length is None:
        usual = min(usual if usual < NO_BOUND else DEFAULT_LONGEST, LONGEST_BY_DEFAULT)
    limit = positions if asked is None else min(asked, positions)
    for task in TASKS:
        if length := getattr(transformer, f"{task}_length", None):
            setattr(transformer, f"{task}_length", min(length, limit))
    transformer.max_seq_length = limit if asked is not None and not spec.max_tokens else min(usual, limit)
    return int(transformer.max_seq_length)


def _check_prompts(tokenizer: Any, prompts: Iterable[str], longest: int) -> None:
    for prompt in filter(None, prompts):
        count = len(tokenizer(prompt)["input_ids"])
        if count >= longest:
            raise UnsupportedModelError(
                f"the prompt {_short(prompt)} has {count} tokens, and a text at most {longest} (max_seq_length): "
                "pooling leaves out the prompt (include_prompt is false), so it would pool nothing. Remove the prompt, "
                "or give a larger --max-sequence-tokens"
            )


def _prompt_task_pairs(spec: ModelSpec) -> list[Way]:
    """The prompts and tasks that change the vectors of a model."""
    tasks = [
        Way({"task": task}, f"the task {task}", spec.prompts.get(settings.prompt_name, ""))
        for task, settings in spec.tasks.items()
    ]
    if spec.kind == "sparse":
        return tasks
    if spec.kind == "multi_vector":
        return [Way({}, "no task", spec.prompts.get(spec.default_prompt_name, "")), *tasks]
    names = {text: name for name, text in spec.prompts.items() if text}
    prompts = [Way({"prompt_name": name}, f"the prompt {name!r}", text) for text, name in sorted(names.items())]
    differ = [way for way in tasks if way.prompt or spec.default_prompt_name or spec.tasks[way.task].max_tokens]
    return [_NO_PROMPT, *prompts, *differ]


def _ids(transformer: Any, texts: Sequence[str], way: Way) -> list[list[int]]:
    try:
        with quiet():
            made = transformer.preprocess(texts, prompt=way.prompt or None, **({"task": way.task} if way.task else {}))
    except Exception as error:  # a tokenizer raises any class
        raise ParityError(
            f"sentence-transformers itself fails with {way.label}: {first_line(error)}; {_ADVICE}"
        ) from error
    seen = made["attention_mask"].bool()  # (texts, seq)
    if "query_expansion_positions" in made:
        seen |= made["query_expansion_positions"].bool()
    return [ids[kept].tolist() for ids, kept in zip(made["input_ids"], seen, strict=True)]


def _vectors(spec: ModelSpec, usable: Mapping[str, Sequence[str]]) -> list[tuple[Way, str, Sequence[str], list[Rows]]]:
    """The vectors of texts, for each way; `usable` has the texts of a way if some texts have no vector."""
    rows: dict[str, Any] = {"output_value": "token_embeddings"}
    output, arguments = {
        "dense": ("model", {}) if any(type(it).__name__ == "Pooling" for it in spec.loaded) else ("tokens", rows),
        "static": ("model", {}),
        "multi_vector": ("multi_vector", {"convert_to_numpy": True}),
        "sparse": ("sparse", {"convert_to_sparse_tensor": False}),
    }[spec.kind]
    for module in spec.loaded:
        if hasattr(module, "pool_factor"):
            module.pool_factor, module.normalize_embeddings = 1.0, False
    if spec.kind == "sparse":
        spec.loaded.max_active_dims = None
    usual = next(iter(usable.values())) if usable else _TEXTS
    found = []
    for way in _prompt_task_pairs(spec) if output != "tokens" else _prompt_task_pairs(spec)[:1]:
        texts = usable.get(way.label, usual)
        found.append((way, output, texts, [_encode(spec, way, text, arguments) for text in texts]))
    if spec.kind == "dense" and (spec.multi_vector or spec.sparse):
        found += _heads(spec, usual, [_encode(spec, _NO_PROMPT, text, rows) for text in usual])
    return found


def _encode(spec: ModelSpec, way: Way, text: str, arguments: Mapping[str, Any]) -> Rows:
    encode = getattr(spec.loaded, f"encode_{way.task}") if way.task else spec.loaded.encode
    prompt = {"prompt": way.prompt} if "prompt_name" in way.options else {}
    try:
        made = encode([text], show_progress_bar=False, **prompt, **arguments)[0]
    except Exception as error:  # it raises many classes
        raise ParityError(
            f"sentence-transformers itself fails for the text {_short(text)} with {way.label}: {error!r}; {_ADVICE}"
        ) from error
    return np.atleast_2d(np.asarray(made, np.float32))


def _heads(spec: ModelSpec, texts: Sequence[str], rows: Sequence[Rows]) -> Iterator[tuple[Way, str, Any, list[Rows]]]:
    """The multi-vectors and weights of BGE-M3: its heads applied to the rows of sentence-transformers."""
    if spec.multi_vector is not None:
        first = int(spec.multi_vector.skips_first_token)
        vectors = [spec.multi_vector.module(torch.from_numpy(it[first:])).numpy() for it in rows]
        yield Way(_NO_PROMPT.options, "its vectors for MaxSim"), "multi_vector", texts, vectors
    if spec.sparse is not None:
        transformer, weights = transformer_of(spec.loaded), []
        width = transformer.model.get_input_embeddings().num_embeddings
        for ids, row in zip(_ids(transformer, texts, _NO_PROMPT), rows, strict=True):
            weights.append(np.zeros((1, width), np.float32))
            np.maximum.at(weights[-1][0], ids, spec.sparse.module(torch.from_numpy(row)).numpy()[:, 0])
            weights[-1][0, list(spec.sparse.skipped_token_ids)] = 0
        yield Way(_NO_PROMPT.options, "its weights of tokens"), "sparse", texts, weights


def _texts(tokenizer: Any) -> tuple[str, ...]:
    """`_TEXTS`, and a text with the tokenizer's special tokens written out."""
    return (*_TEXTS, " ".join(("the", *tokenizer.all_special_tokens[:8], "cat")))


def _maxsim(query: Rows, document: Rows) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def _short(text: Any) -> str:
    """A text for an error, at most 60 characters, with control characters escaped; ids as they are."""
    if not isinstance(text, str):
        return _listed(text)
    return ascii(text) if len(text) <= 60 else f"{text[:60]!a}... ({len(text)} characters)"


def _listed(ids: Any) -> str:
    """At most 20 ids for an error, or the reason of a refusal."""
    if isinstance(ids, str):
        return f"(refused: {ids})"
    listed = [str(it) for it in ids]
    return f"[{', '.join([*listed[:20], '...'] if len(listed) > 20 else listed)}]"
