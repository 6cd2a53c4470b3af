"""Compares a bundle's token ids and vectors of texts with the outputs of sentence-transformers or transformers.

The bundle runs in `encserve_server.offline`, so the comparison covers the code that serves the bundle. If the exported
directory has modules.json, its bundle is compared with sentence-transformers, else with transformers.
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

from encserve_export.check.agreement import Comparison, compare
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

LONGEST_BY_DEFAULT = 8192  # for models without a stated limit; longer texts would take hours to check

_SENTENCE = "The cat sleeps on the warm windowsill while it rains. "
# The ids and vectors of these texts are compared. For many more texts, only the ids are compared.
_TEXTS = (
    "",
    "Cats",
    _SENTENCE,
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍",
    "  Ｆｕｌｌ ｗｉｄｔｈ,\tﬁnd the oﬀer\n\nzero\u200bwidth and\x07control ",
    f"A WORD of many letters: {'x' * 120}",
    200 * _SENTENCE,
)
LONG_TEXT = 3000 * _SENTENCE  # longer than the longest sequence of any model
_TYPES_ADVICE = (
    "The tokenizer gives token_type_ids, which this model reads as tokens. If the model was trained without "
    'token_type_ids, write "model_input_names": ["input_ids", "attention_mask"] into tokenizer_config.json'
)
ADVICE = (
    "So the directory describes another model. Save the directory again with save_pretrained of a recent "
    "sentence-transformers or transformers, and export the new directory"
)


@dataclasses.dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Attributes:
        library: The library, "sentence-transformers" or "transformers".
        texts: The number of compared texts. A text counts once for each prompt and each task.
        max_relative_error: The largest ‖got - want‖ / ‖want‖ of a vector.
        min_cosine: The least cosine similarity of a vector.
        max_maxsim_error: The largest error of a MaxSim score: |got - want|, divided by the query's best score. None for
            models without MaxSim vectors.
        bounds: The allowed differences.
    """

    library: str
    texts: int
    max_relative_error: float
    min_cosine: float
    max_maxsim_error: float | None
    bounds: Bounds


@dataclasses.dataclass(frozen=True)
class _Way:
    """How texts are encoded: with a prompt, for a task, or with neither.

    Attributes:
        options: The arguments of the call that encodes texts with the bundle.
        label: The description of the prompt or the task in error messages.
        prompt: The text of the prompt; empty without a prompt.
    """

    options: Mapping[str, Any]
    label: str
    prompt: str = ""

    @property
    def task(self) -> str:
        return str(self.options.get("task", ""))


_NO_PROMPT = _Way({"prompt_name": ""}, "no prompt")


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The library's output for each text.

    If `output` is "ids", the output of a text is a list of ids. Otherwise the output is an array (vectors, width).
    """

    way: _Way
    output: str
    texts: Sequence[Any]
    outputs: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _Answers:
    """All outputs of a library, and advice for the error message if a vector differs."""

    library: str
    answers: Sequence[_Answer]
    advice: str = ADVICE


_ROWS = {"output_value": "token_embeddings"}  # makes sentence-transformers return hidden states
PipelineCheck = Callable[[Path, manifest_pb2.Manifest], Compared | None]


def prepare_comparison(
    spec: ModelSpec, *, takes_text: bool, asked: int | None, progress: Callable[[str], None]
) -> PipelineCheck:
    """Return a function that compares a bundle with sentence-transformers or transformers.

    The function takes the bundle's folder and manifest as arguments.

    sentence-transformers computes its outputs in this call, so that the model can be freed before the graph is written.
    transformers computes its outputs when the bundle is compared.

    Vectors are not compared if the directory has no weights or if transformers does not know the model. The returned
    function then returns None.

    Args:
        spec: The description of the directory's model.
        takes_text: Whether the bundle has a tokenizer.
        asked: The longest sequence that the user asked for, in tokens; None for the directory's own limit.
        progress: Called with each step.

    Raises:
        UnsupportedModelError: A prompt has at least as many tokens as a text may have, and pooling leaves out the
            prompt. Then pooling would have no tokens.
        ParityError: sentence-transformers fails for the directory. The returned function raises a ParityError if ids or
            vectors differ.
    """
    if spec.loaded is None or not takes_text:
        plain = dataclasses.replace(spec, loaded=None)  # so that sentence-transformers' model can be freed
        return partial(_compare, lambda manifest: _ask_transformers(plain, manifest, progress), progress)
    progress("computing the ids and vectors of texts with sentence-transformers")
    answers = _ask_static(spec, asked) if spec.kind == "static" else _ask_sentence_transformers(spec, asked)
    return partial(_compare, lambda _: answers, progress)


def _compare(
    ask: Callable[[manifest_pb2.Manifest], _Answers],
    progress: Callable[[str], None],
    folder: Path,
    manifest: manifest_pb2.Manifest,
) -> Compared | None:
    answers = ask(manifest)
    progress(f"comparing the ids and vectors of texts with {answers.library}")
    differences: list[Comparison] = []
    # Maps each task to the vectors of the bundle and of the library.
    multi_vectors: dict[str, tuple[Sequence[Rows], Sequence[Rows]]] = {}
    with open_bundle(folder, manifest) as embedder:
        for answer in answers.answers:
            if answer.output == "ids":
                found = embedder.tokenize(answer.texts, truncate=True, **answer.way.options)
                described = [f"the text {shortened(text)} with {answer.way.label}" for text in answer.texts]
                check_ids(described, found, answer.outputs, answers.library, manifest.encoder.vocab_size)
                continue
            vectors = _embed(embedder, answer)
            differences += _check_vectors(vectors, answer, answers, manifest)
            if answer.output == "multi_vector":
                multi_vectors[answer.way.task] = vectors, answer.outputs
    if not differences:
        return None
    bounds = bounds_of(manifest.graph.precision)
    return Compared(
        answers.library,
        len(differences),
        max(it.error for it in differences),
        min(it.cosine for it in differences),
        _check_scores(multi_vectors, answers, bounds) if multi_vectors else None,
        bounds,
    )


@contextlib.contextmanager
def open_bundle(folder: Path, manifest: manifest_pb2.Manifest) -> Iterator[Embedder]:
    """Load a bundle that is not published yet, without token pooling and without a limit on sparse weights.

    Rounding may change which tokens are pooled together and which weights are kept. Such a change would cause a large
    difference in the output.
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
        bundle = Path(repository) / manifest.name / manifest.version  # the server requires these folder names
        bundle.parent.mkdir()
        bundle.symlink_to(folder.absolute(), target_is_directory=True)
        try:
            embedder = Embedder(
                bundle,
                max_text_bytes=2**24,
                device="cpu",
                tune_batches=False,
                cache_dir=Path("off"),  # an export must not write to the user's cache
                parallel_batches=1,
            )
        except EncserveError as error:
            raise ParityError(f"the server does not load the bundle: {error}") from error
        with embedder:
            yield embedder


def check_ids(
    described: Sequence[str], found: Sequence[Any], wanted: Sequence[Any], library: str, vocab_size: int
) -> None:
    """Raise a ParityError if the bundle's ids differ from the library's.

    If the library's list of ids is empty or has an id outside the vocabulary, the server must refuse the input.

    Args:
        described: The inputs, for the error.
        found: For each input the bundle's array of ids, or the text of the server's error.
        wanted: For each input the library's list of ids.
        library: The name of the library.
        vocab_size: The number of ids in the vocabulary.
    """
    for sent, got, want in zip(described, found, wanted, strict=True):
        if (not in_vocabulary(want, vocab_size)) if isinstance(got, str) else got.tolist() == want:
            continue
        ids = f"(refused: {got})" if isinstance(got, str) else shortened(got)
        raise ParityError(f"for {sent} the bundle gives the ids {ids}, but {library} gives {shortened(want)}. {ADVICE}")


def in_vocabulary(ids: Sequence[int], vocab_size: int) -> bool:
    """Return whether the list of ids is not empty and all ids are in the vocabulary."""
    return max(ids, default=vocab_size) < vocab_size


def _embed(embedder: Embedder, answer: _Answer) -> list[Rows]:
    """Return the bundle's array (vectors, width) for each text. Sparse weights become an array (1, vocab_size)."""
    way, texts = answer.way, answer.texts
    result: Any = embedder.run(texts, truncate=True, output=answer.output, **way.options)  # type: ignore[arg-type]
    if result.refused:
        place, reason = next(iter(result.refused.items()))
        raise ParityError(f"the server refuses the text {shortened(texts[place])} with {way.label}: {reason}. {ADVICE}")
    if answer.output != "sparse":
        arrays: list[Rows] = result.arrays()
        return arrays
    dense = np.zeros((len(texts), result.sparse_width), np.float32)
    for row, vector in zip(dense, result.sparse_vectors(), strict=True):
        row[vector.indices] = vector.values
    return list(dense[:, None])


def _check_vectors(
    vectors: Sequence[Rows], answer: _Answer, answers: _Answers, manifest: manifest_pb2.Manifest
) -> Iterator[Comparison]:
    """Raise a ParityError if vectors or sparse weights differ too much. Yield the difference of each text."""
    # The library's vectors and the bundle's vectors both have the model's float32 error. So the tolerance grows with
    # twice this error.
    tolerance = tolerance_for(PIPELINE_TOLERANCE, 2 * manifest.parity.float32_error)
    cosine = bounds_of(manifest.graph.precision).cosine
    limit = Bounds(error=tolerance) if cosine is None else Bounds(cosine=cosine)
    advice = f". {answers.advice}" if cosine is None else ""
    for text, got, want in zip(answer.texts, vectors, answer.outputs, strict=True):
        where = f"{answers.library} for the text {shortened(text)} with {answer.way.label}"
        if got.shape != want.shape:
            raise ParityError(f"the bundle gives the shape {got.shape}, not {want.shape} of {where}. {ADVICE}")
        if answer.output == "sparse" and cosine is not None and text == "":
            continue  # the empty text: rounding changes its few weights too much
        difference = compare(got, want, limit) if want.size else Comparison(error=0, cosine=1, excess="")
        if answer.output == "sparse" and cosine is None:
            excess = float((np.abs(got - want) - tolerance * np.abs(want)).max())
            if not excess <= PIPELINE_WEIGHT_TOLERANCE:
                raise ParityError(
                    f"the bundle gives other weights than {where}: one weight w differs by {tolerance:.0e}·w + "
                    f"{excess:.1e}; at most {tolerance:.0e}·w + {PIPELINE_WEIGHT_TOLERANCE:.0e} is allowed{advice}"
                )
        elif difference.excess:
            raise ParityError(f"the bundle gives another vector than {where}: {difference.excess}{advice}")
        yield difference


def _check_scores(
    multi_vectors: Mapping[str, tuple[Sequence[Rows], Sequence[Rows]]], answers: _Answers, bounds: Bounds
) -> float:
    """Raise a ParityError if MaxSim scores differ too much. Return the largest error.

    Each text is a query and a document. Each query is scored against each document.
    """
    without_task = next(iter(multi_vectors.values()))
    queries, documents = (multi_vectors.get(task, without_task) for task in TASKS)
    got, want = (
        np.array([[_maxsim(query, document) for document in documents[i]] for query in queries[i]]) for i in range(2)
    )  # (texts, texts)
    best = np.abs(want).max(axis=1, keepdims=True)  # (texts, 1)
    error = float((np.abs(got - want) / np.maximum(best, 1e-12)).max())
    if not error <= bounds.maxsim_error:
        advice = answers.advice if bounds.cosine is None else "Export in float32 instead"
        raise ParityError(
            f"a MaxSim score differs from {answers.library} by {error:.1e} of its query's best score; at most "
            f"{bounds.maxsim_error:.1e} is allowed. {advice}"
        )
    return error


def _maxsim(query: Rows, document: Rows) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def _ask_transformers(spec: ModelSpec, manifest: manifest_pb2.Manifest, progress: Callable[[str], None]) -> _Answers:
    """Compute ids and hidden states of texts with transformers.

    If the bundle has no tokenizer, compute the hidden states of fixed ids.
    """
    longest, vocab_size = manifest.encoder.max_sequence_tokens, manifest.encoder.vocab_size
    answers = []
    texts: Sequence[Any]
    if manifest.HasField("text"):
        tokenize = partial(spec.tokenizer, truncation=True, max_length=longest)
        probes = [*difficult_texts(spec.tokenizer), LONG_TEXT]
        answers.append(_Answer(_NO_PROMPT, "ids", probes, tokenize(probes)["input_ids"]))
        texts = _texts(spec.tokenizer)
        inputs = [{name: it.long() for name, it in tokenize(text, return_tensors="pt").items()} for text in texts]
    else:
        ids = torch.arange(min(longest, 64))[None] % vocab_size  # (1, seq)
        texts, inputs = [ids[0].numpy()], [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    try:
        if not holds_weights(spec.encoder):
            raise UnsupportedModelError("the directory has no weights")
        model = pretrained.load_reference(spec.encoder)
    except UnsupportedModelError as error:
        progress(f"continuing without a comparison of hidden states: {error}")
        return _Answers("transformers", answers)
    texts_of_rows, rows = [], []
    for text, tensors in zip(texts, inputs, strict=True):
        if in_vocabulary(tensors["input_ids"][0].tolist(), vocab_size):
            with library_failure(f"transformers itself fails for the text {shortened(text)}"), torch.inference_mode():
                rows.append(model(**tensors).last_hidden_state[0].float().numpy())  # (seq, d_model)
            texts_of_rows.append(text)
    answers.append(_Answer(_NO_PROMPT, "tokens", texts_of_rows, rows))
    return _Answers("transformers", answers, _advice(model, inputs[0]))


@contextlib.contextmanager
def library_failure(problem: str) -> Iterator[None]:
    """If the `with` block raises an error, raise a ParityError that begins with `problem`."""
    try:
        yield
    except Exception as error:  # models and tokenizers may raise any exception
        raise ParityError(f"{problem}: {type(error).__name__}: {first_line(error)}. {ADVICE}") from error


def _advice(model: Any, inputs: Mapping[str, Any]) -> str:
    """Return the advice for the error message if a vector differs.

    Some models, such as GPT-2, have no table of token types. Such a model looks up token types in the token table, and
    adds the found embeddings.
    """
    reads_types = "token_type_ids" in inputs and not hasattr(model.config, "type_vocab_size")
    return _TYPES_ADVICE if reads_types else ADVICE


def _ask_static(spec: ModelSpec, asked: int | None) -> _Answers:
    spec.tokenizer.enable_truncation(asked or spec.max_seq_length)
    probes = [*TEXTS, LONG_TEXT]
    ids = [spec.tokenizer.encode(text, add_special_tokens=False).ids for text in probes]
    answers = [_Answer(_NO_PROMPT, "ids", probes, ids), *_ask_vectors(spec, _TEXTS)]
    return _Answers("sentence-transformers", answers)


def _ask_sentence_transformers(spec: ModelSpec, asked: int | None) -> _Answers:
    transformer = transformer_of(spec.loaded)
    longest = set_lengths(transformer, spec, asked)
    vocab_size = transformer.model.get_input_embeddings().num_embeddings
    if spec.skips_prompt:
        _check_prompts(transformer.tokenizer, spec.prompts.values(), longest)
    probes, texts = difficult_texts(transformer.tokenizer), _texts(transformer.tokenizer)
    answers: list[_Answer] = []
    for way in _ways(spec):
        if way.task and spec.tasks[way.task].HasField("static_sparse"):
            continue  # static weights have another tokenizer than `transformer`
        # The long text gets a separate call, because a call pads all texts to the length of the longest text.
        ids = _ids(transformer, probes, way) + _ids(transformer, [LONG_TEXT], way)
        answers.append(_Answer(way, "ids", [*probes, LONG_TEXT], ids))
        pairs = zip(texts, _ids(transformer, texts, way), strict=True)
        texts = [text for text, text_ids in pairs if in_vocabulary(text_ids, vocab_size)]
    if not texts:
        raise ParityError(f"no text has token ids below {vocab_size}, the number of rows of the model's table")
    answers += _ask_vectors(spec, texts)
    if spec.kind == "dense" and (spec.multi_vector or spec.sparse):
        answers += _ask_heads(spec, texts)
    return _Answers("sentence-transformers", answers, _advice(transformer.model, transformer.preprocess(["a"])))


def set_lengths(transformer: Any, spec: ModelSpec, asked: int | None) -> int:
    """Set the length limits of sentence-transformers to the limits of the bundle.

    sentence-transformers does not know the user's limit. For some models, sentence-transformers does not know the
    number of positions.

    Returns:
        The limit for a text without a task, in tokens.
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
                f"the prompt {shortened(prompt)} has {count} tokens, but a text may have at most {longest} "
                "(max_seq_length). Pooling leaves out the prompt (include_prompt is false), and no other token fits. "
                "Remove the prompt, or give a larger --max-sequence-tokens"
            )


def _ways(spec: ModelSpec) -> list[_Way]:
    """Return one `_Way` for each prompt and task that changes the vectors of a model."""
    tasks = [
        _Way({"task": task}, f"the task {task}", spec.prompts.get(settings.prompt_name, ""))
        for task, settings in spec.tasks.items()
    ]
    if spec.kind == "sparse":
        return tasks
    if spec.kind == "multi_vector":
        return [_Way({}, "no task", spec.prompts.get(spec.default_prompt_name, "")), *tasks]
    names = {text: name for name, text in spec.prompts.items() if text}
    prompts = [_Way({"prompt_name": name}, f"the prompt {name!r}", text) for text, name in sorted(names.items())]
    differ = [way for way in tasks if way.prompt or spec.default_prompt_name or spec.tasks[way.task].max_tokens]
    return [_NO_PROMPT, *prompts, *differ]


def _ids(transformer: Any, texts: Sequence[str], way: _Way) -> list[list[int]]:
    task = {"task": way.task} if way.task else {}
    with library_failure(f"sentence-transformers itself fails with {way.label}"), quiet():
        batch = transformer.preprocess(texts, prompt=way.prompt or None, **task)
    seen = batch["attention_mask"].bool()  # (texts, seq)
    if "query_expansion_positions" in batch:
        seen |= batch["query_expansion_positions"].bool()
    return [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], seen, strict=True)]


def _ask_vectors(spec: ModelSpec, texts: Sequence[str]) -> list[_Answer]:
    """Compute the vectors of texts with sentence-transformers, for each prompt and each task.

    If the model has no pooling, compute hidden states, and use no prompt.
    """
    ways, output = _ways(spec), "model"
    arguments: Mapping[str, Any] = {}
    if spec.kind == "multi_vector":
        output, arguments = "multi_vector", {"convert_to_numpy": True}
        for module in spec.loaded:
            if hasattr(module, "pool_factor"):
                module.pool_factor, module.normalize_embeddings = 1.0, False
    elif spec.kind == "sparse":
        output, arguments = "sparse", {"convert_to_sparse_tensor": False}
        spec.loaded.max_active_dims = None
    elif spec.kind == "dense" and not any(type(it).__name__ == "Pooling" for it in spec.loaded):
        ways, output, arguments = ways[:1], "tokens", _ROWS
    return [_Answer(way, output, texts, [_encode(spec, way, text, arguments) for text in texts]) for way in ways]


def _encode(spec: ModelSpec, way: _Way, text: str, arguments: Mapping[str, Any]) -> Rows:
    encode = getattr(spec.loaded, f"encode_{way.task}") if way.task else spec.loaded.encode
    prompt = {"prompt": way.prompt} if "prompt_name" in way.options else {}
    with library_failure(f"sentence-transformers itself fails for the text {shortened(text)} with {way.label}"):
        vectors = encode([text], show_progress_bar=False, **prompt, **arguments)[0]
    return np.atleast_2d(np.asarray(vectors, np.float32))


def _ask_heads(spec: ModelSpec, texts: Sequence[str]) -> Iterator[_Answer]:
    """Compute BGE-M3's multi-vectors and sparse weights from sentence-transformers' hidden states."""
    rows = [_encode(spec, _NO_PROMPT, text, _ROWS) for text in texts]
    if spec.multi_vector is not None:
        first = int(spec.multi_vector.skips_first_token)
        vectors = [spec.multi_vector.module(torch.from_numpy(it[first:])).numpy() for it in rows]
        yield _Answer(_NO_PROMPT, "multi_vector", texts, vectors)
    if spec.sparse is not None:
        transformer, weights = transformer_of(spec.loaded), []
        width = transformer.model.get_input_embeddings().num_embeddings
        for ids, row in zip(_ids(transformer, texts, _NO_PROMPT), rows, strict=True):
            weights.append(np.zeros((1, width), np.float32))
            np.maximum.at(weights[-1][0], ids, spec.sparse.module(torch.from_numpy(row)).numpy()[:, 0])
            weights[-1][0, list(spec.sparse.skipped_token_ids)] = 0
        yield _Answer(_NO_PROMPT, "sparse", texts, weights)


def _texts(tokenizer: Any) -> Sequence[str]:
    """Return `_TEXTS`, and a text that contains the tokenizer's special tokens as plain text."""
    return [*_TEXTS, " ".join(("the", *tokenizer.all_special_tokens[:8], "cat"))]


def shortened(value: Any) -> str:
    """Shorten a text or a list of ids for an error message: the first 60 characters, escaped, or the first 20 ids."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else f"{value[:60]!a}... ({len(value)} characters)"
    ids = [str(it) for it in value]
    return f"[{', '.join([*ids[:20], '...'] if len(ids) > 20 else ids)}]"
