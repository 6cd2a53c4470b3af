"""Compares a bundle's token ids and logits of pairs and texts with the outputs of sentence-transformers.

The bundle runs in `encserve_server.offline`, so the comparison covers the code that serves the bundle. The logits of
sentence-transformers are computed in float32, and in float64 if the model runs in float64. The difference between the
two results shows how much rounding changes the logits of this model on this CPU.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from encserve_export.check.pipeline import (
    ADVICE,
    LONG_TEXT,
    check_ids,
    in_vocabulary,
    library_failure,
    open_bundle,
    set_lengths,
    shortened,
)
from encserve_export.core.arrays import Rows
from encserve_export.core.errors import ParityError, UnsupportedModelError
from encserve_export.core.float64 import in_float64
from encserve_export.core.precision import SCORE_TOLERANCE, Bounds, bounds_of, tolerance_for
from encserve_export.core.quiet import quiet
from encserve_export.kinds.directory import transformer_of
from encserve_export.kinds.spec import ModelSpec
from encserve_export.source.tokenizer_probes import difficult_texts
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.offline import Embedder

Sent = str | tuple[str, str]
ScoreCheck = Callable[[Path, manifest_pb2.Manifest], "ComparedScores"]

_SENTENCE = "The cat sleeps on the warm windowsill while it rains. "
# The logits of all pairs of these texts and of two long texts are compared. For many more pairs, only the ids are
# compared.
_QUERIES = ("", "how warm is the windowsill?", "Grüße aus Köln, 東京 и Москва: naïve café 🌍")
_DOCUMENTS = (
    "",
    "Cats",
    _SENTENCE,
    "Stock markets fell sharply on Monday. ",
    "  Ｆｕｌｌ ｗｉｄｔｈ,\tﬁnd the oﬀer\n\nzero\u200bwidth and\x07control ",
    f"A WORD of many letters: {'x' * 120}",
    "Ein langer Satz über das Wetter in Köln, und noch ein Satz über Züge und Straßenbahnen. ",
)
# The long texts have about 1.4 and 2.8 times the longest sequence of the model, but at most this many sentences. If
# both texts of a pair are truncated, the tokenizers library combines each cut-off piece of one text with each cut-off
# piece of the other text. So longer texts would need too much time and memory.
_MOST_SENTENCES = 200


# Each function turns logits, (sent, labels), into scores. `sent` is the number of pairs and texts.
_ACTIVATIONS: Mapping[int, Callable[[Rows], Rows]] = {
    manifest_pb2.ACTIVATION_NONE: lambda logits: logits,
    manifest_pb2.ACTIVATION_SIGMOID: lambda logits: torch.from_numpy(logits).sigmoid().numpy(),
    manifest_pb2.ACTIVATION_SOFTMAX: lambda logits: torch.from_numpy(logits).softmax(dim=1).numpy(),
}


@dataclasses.dataclass(frozen=True)
class ComparedScores:
    """The result of a comparison.

    Attributes:
        library: The library, "sentence-transformers".
        pairs: The number of compared pairs and texts. A pair counts once for each prompt.
        max_error: The largest |got - want| / max(1, |want|) of a logit.
        tolerance: The largest allowed `max_error`. This tolerance applies only to float32 bundles.
        min_rank_correlation: The least rank correlation between the bundle's and the library's logits of a label.
        max_change: The largest difference between the bundle's and the library's score. A score is a logit after the
            activation.
        bounds: The allowed differences.
    """

    library: str
    pairs: int
    max_error: float
    tolerance: float
    min_rank_correlation: float
    max_change: float
    bounds: Bounds


@dataclasses.dataclass(frozen=True)
class _Answers:
    """The library's ids and logits with one prompt.

    Attributes:
        prompt_name: The name of the prompt; "" for no prompt.
        probes: The pairs and texts whose ids are compared.
        ids: The ids of each probe.
        sent: The pairs and texts whose logits are compared.
        logits: (sent, labels).
        float32_error: The largest |float32 - float64| / max(1, |float64|) of the library's logits; 0 without float64.
    """

    prompt_name: str
    probes: Sequence[Sent]
    ids: Sequence[list[int]]
    sent: Sequence[Sent]
    logits: Rows
    float32_error: float


def prepare_scores(
    spec: ModelSpec, *, asked: int | None, precision: str, progress: Callable[[str], None]
) -> ScoreCheck:
    """Compute ids and logits with sentence-transformers. Return a function that compares a bundle with these outputs.

    The function takes the bundle's folder and manifest. sentence-transformers computes its outputs in this call, so
    that the model can be freed before the graph is written.

    Args:
        spec: The description of the directory's model.
        asked: The longest sequence that the user asked for, in tokens; None for the directory's own limit.
        precision: The precision of the bundle.
        progress: Called with each step.

    Raises:
        ParityError: sentence-transformers fails for the directory. The returned function raises a ParityError if ids or
            logits differ.
    """
    progress("computing the ids and logits of pairs with sentence-transformers")
    transformer = transformer_of(spec.loaded)
    longest = set_lengths(transformer, spec, asked)
    long_texts = [_SENTENCE * min(longest // part + 1, _MOST_SENTENCES) for part in (8, 4)]
    exact = precision == "float32"
    answers = [_ask(spec, transformer, name, long_texts, exact=exact) for name in _prompt_names(spec)]
    return partial(_compare, answers, progress)


def _prompt_names(spec: ModelSpec) -> list[str]:
    """Return the names of the prompts that change the logits of a model, and "" for no prompt."""
    names = {text: name for name, text in spec.prompts.items() if text}
    return ["", *sorted(names.values())]


def _ask(spec: ModelSpec, transformer: Any, prompt_name: str, long_texts: Sequence[str], *, exact: bool) -> _Answers:
    prompt = spec.prompts.get(prompt_name) or None
    pairs_only = spec.template is not None and spec.template.HasField("between")
    probes = [it for it in _probes(transformer.tokenizer, *long_texts) if not (pairs_only and isinstance(it, str))]
    ids = [_ids(transformer, it, prompt) for it in probes]
    vocab_size = transformer.model.get_input_embeddings().num_embeddings
    special = " ".join(("the", *transformer.tokenizer.all_special_tokens[:8], "cat"))
    queries, documents = (*_QUERIES, long_texts[0]), (*_DOCUMENTS, long_texts[1], special)
    sent: list[Sent] = [*itertools.product(queries, documents), (special, _SENTENCE), (special, special)]
    if not pairs_only:
        sent += documents
    sent = [it for it in sent if in_vocabulary(_ids(transformer, it, prompt), vocab_size)]
    if not sent:
        raise ParityError(f"no pair has token ids below {vocab_size}, the number of rows of the model's table")
    float32 = _logits(spec, sent, prompt)
    logits, error = float32, 0.0
    if exact and (float64 := _logits_in_float64(spec, sent, prompt)) is not None:
        logits, error = float64, float(_errors(float32, float64).max())
    return _Answers(prompt_name, probes, ids, sent, logits, error)


def _probes(tokenizer: Any, long: str, longer: str) -> Iterator[Sent]:
    """Yield difficult pairs and texts. Each difficult text is once the first and once the second text of a pair."""
    texts = difficult_texts(tokenizer)
    yield from zip(texts, reversed(texts), strict=True)
    yield from itertools.permutations((long, longer, "a", ""), 2)
    yield from ((longer, longer), ("", ""))
    yield from (*texts, long, LONG_TEXT)


def _ids(transformer: Any, sent: Sent, prompt: str | None) -> list[int]:
    with library_failure(f"sentence-transformers itself fails for {_shown(sent)}"), quiet():
        batch = transformer.preprocess([sent], prompt=prompt)
    ids: list[int] = batch["input_ids"][0][batch["attention_mask"][0].bool()].tolist()
    return ids


def _logits(spec: ModelSpec, sent: Sequence[Sent], prompt: str | None) -> Rows:
    """Return the library's logits, (sent, labels). Each pair or text runs alone."""
    rows = []
    for it in sent:
        with library_failure(f"sentence-transformers itself fails for {_shown(it)}"), quiet():
            # `predict` would treat a list with one text as a pair.
            given = it if isinstance(it, str) else [it]
            logits = spec.loaded.predict(
                given, prompt=prompt or "", activation_fn=nn.Identity(), show_progress_bar=False
            )
        rows.append(np.ravel(logits))
    return np.array(rows, np.float32)


def _logits_in_float64(spec: ModelSpec, sent: Sequence[Sent], prompt: str | None) -> Rows | None:
    """Return the library's logits in float64, rounded to float32; None if the model does not run in float64."""
    try:
        with in_float64(spec.loaded):
            logits = _logits(spec, sent, prompt)
    except (ParityError, UnsupportedModelError):  # some modules use float32 constants
        return None
    return logits if np.isfinite(logits).all() else None


def _compare(
    answers: Sequence[_Answers], progress: Callable[[str], None], folder: Path, manifest: manifest_pb2.Manifest
) -> ComparedScores:
    progress("comparing the ids and logits of pairs with sentence-transformers")
    bounds = bounds_of(manifest.graph.precision)
    tolerance = tolerance_for(SCORE_TOLERANCE, max(it.float32_error for it in answers))
    activate = _ACTIVATIONS[manifest.scores.activation]
    errors, correlations, changes = [], [], []
    with open_bundle(folder, manifest) as embedder:
        for answer in answers:
            found = embedder.tokenize(answer.probes, truncate=True, output="scores", **_options(answer))
            described = [f"{_shown(it)} with the prompt {answer.prompt_name!r}" for it in answer.probes]
            check_ids(described, found, answer.ids, "sentence-transformers", manifest.encoder.vocab_size)
            got = _run(embedder, answer)
            errors.append(_errors(got, answer.logits))
            changes.append(float(np.abs(activate(got) - activate(answer.logits)).max()))
            correlations.append(min(map(_rank_correlation, got.T, answer.logits.T)))
            if bounds.rank_correlation is None and not errors[-1].max() <= tolerance:
                place = int(np.argmax(errors[-1].max(axis=1)))
                raise ParityError(
                    f"the bundle gives other logits than sentence-transformers for {_shown(answer.sent[place])}: "
                    f"{got[place][:3]} instead of {answer.logits[place][:3]}. The error is {errors[-1].max():.1e}; at "
                    f"most {tolerance:.1e} is allowed. {ADVICE}"
                )
    if bounds.rank_correlation is not None and not min(correlations) >= bounds.rank_correlation:
        raise ParityError(
            f"the logits have the rank correlation {min(correlations):.4f} with sentence-transformers' logits; at "
            f"least {bounds.rank_correlation} is required. Export in float32 instead"
        )
    return ComparedScores(
        "sentence-transformers",
        sum(len(it.sent) for it in answers),
        max(float(it.max()) for it in errors),
        tolerance,
        min(correlations),
        max(changes),
        bounds,
    )


def _run(embedder: Embedder, answer: _Answers) -> Rows:
    """Return the bundle's logits, (sent, labels)."""
    result: Any = embedder.run(answer.sent, truncate=True, output="scores", **_options(answer))
    if result.refused:
        place, reason = next(iter(result.refused.items()))
        raise ParityError(f"the server refuses {_shown(answer.sent[place])}: {reason}. {ADVICE}")
    rows: Rows = result.rows
    return rows


def _options(answer: _Answers) -> Mapping[str, Any]:
    return {"prompt_name": answer.prompt_name}


def _errors(got: Rows, want: Rows) -> Rows:
    """Return |got - want| / max(1, |want|) of each logit; infinite for NaN."""
    errors = np.abs(got.astype(np.float64) - want) / np.maximum(1, np.abs(want))
    return np.where(np.isnan(errors), np.inf, errors)


def _rank_correlation(got: Rows, want: Rows) -> float:
    """Return Spearman's rank correlation of two lists of numbers; 1 for a single number."""
    ranks = [np.unique(it, return_inverse=True)[1].astype(np.float64) for it in (got, want)]
    centred = [it - it.mean() for it in ranks]
    norm = float(np.linalg.norm(centred[0]) * np.linalg.norm(centred[1]))
    return float(centred[0] @ centred[1]) / norm if norm else 1.0


def _shown(sent: Sent) -> str:
    if isinstance(sent, str):
        return f"the text {shortened(sent)}"
    return f"the pair {shortened(sent[0])}, {shortened(sent[1])}"
