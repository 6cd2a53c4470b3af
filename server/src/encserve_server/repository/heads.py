"""Reads a model's heads, and its settings for queries and documents, from a manifest."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.errors import BundleError
from encserve_server.types.bundles import (
    Expansion,
    HeadGraph,
    MultiVector,
    Scores,
    Sparse,
    SparsePooling,
    StaticSparse,
    TaskSettings,
    TextTemplate,
    TokenPooling,
)
from encserve_server.types.requests import Activation, OutputKind, Task

VerifiedPath = Callable[[str, str], Path]  # arguments: the name of a field, and its value, a path in the bundle

_SIMILARITIES = ("maxsim", "meanmaxsim")
_SCORE_POOLINGS = {
    manifest_pb2.POOLING_MEAN: OutputKind.MEAN,
    manifest_pb2.POOLING_CLS: OutputKind.CLS,
    manifest_pb2.POOLING_LAST_TOKEN: OutputKind.LAST_TOKEN,
}
_CUTS_ONLY_SECOND = {
    manifest_pb2.PAIR_TRUNCATION_LONGEST_FIRST: False,
    manifest_pb2.PAIR_TRUNCATION_ONLY_SECOND: True,
}
# Labels are part of the description of a model, and replies have a logit for each label.
_MAX_LABELS = 16_384


class ManifestReader:
    """Reads parts of one manifest. `verified_path` returns the path of a listed file.

    Every method raises BundleError if fields contradict each other. The error names the field.
    """

    def __init__(self, path: Path, manifest: manifest_pb2.Manifest, verified_path: VerifiedPath) -> None:
        """Set the manifest, and its path for error messages."""
        self._path = path
        self._manifest = manifest
        self._verified_path = verified_path

    def multi_vector(self) -> MultiVector | None:
        """Return the head that computes vectors for MaxSim; None if the model has none."""
        if not self._manifest.HasField("multi_vector"):
            return None
        multi_vector, d_model = self._manifest.multi_vector, self._manifest.encoder.d_model
        self._check(multi_vector.width >= 1, f"multi_vector.width must be >= 1; was {multi_vector.width}")
        self._check(
            multi_vector.similarity in _SIMILARITIES,
            f"multi_vector.similarity must be {' or '.join(_SIMILARITIES)}; was {multi_vector.similarity!r}",
        )
        path = self._verified_path("multi_vector.file", multi_vector.file)
        head = HeadGraph(path, (multi_vector.input_name,), multi_vector.output_name, d_model, multi_vector.width)
        return MultiVector(head, multi_vector.similarity, multi_vector.skips_first_token)

    def sparse(self) -> Sparse | None:
        """Return the head that computes weights over the vocabulary; None if the model has none."""
        if not self._manifest.HasField("sparse"):
            return None
        sparse, shape = self._manifest.sparse, self._manifest.encoder
        self._check(
            sparse.pooling in {it.value for it in SparsePooling},
            f"sparse.pooling {sparse.pooling} is not known to this server",
        )
        pooling = SparsePooling(sparse.pooling)
        own_id = pooling is SparsePooling.OWN_ID
        self._check(sparse.width >= 1, f"sparse.width must be >= 1; was {sparse.width}")
        self._check(
            not own_id or 1 <= shape.vocab_size <= sparse.width,
            f"sparse.width must be at least the vocab_size, {shape.vocab_size}; was {sparse.width}",
        )
        self._check(
            bool(sparse.mask_name) != own_id,
            f"sparse.mask_name must be {'empty' if own_id else 'set'} for this pooling; was {sparse.mask_name!r}",
        )
        names = (sparse.rows_name, sparse.mask_name) if sparse.mask_name else (sparse.rows_name,)
        path = self._verified_path("sparse.file", sparse.file)
        head = HeadGraph(path, names, sparse.output_name, shape.d_model, 1 if own_id else sparse.width)
        return Sparse(head, sparse.width, pooling, tuple(sparse.skipped_token_ids), sparse.max_active_dims)

    def scores(self) -> Scores | None:
        """Return the head that computes the logits of labels; None if the model has none."""
        if not self._manifest.HasField("scores"):
            return None
        scores, shape = self._manifest.scores, self._manifest.encoder
        self._check(
            1 <= len(scores.labels) <= _MAX_LABELS,
            f"scores.labels must have 1 to {_MAX_LABELS} names; it has {len(scores.labels)}",
        )
        for field, known in (
            ("pooling", _SCORE_POOLINGS),
            ("activation", set(Activation)),
            ("pair_truncation", _CUTS_ONLY_SECOND),
        ):
            number = getattr(scores, field)
            self._check(number in known, f"scores.{field} {number} is not known to this server")
        last = scores.not_last_token_id if scores.HasField("not_last_token_id") else None
        self._check(
            last is None or (scores.pooling == manifest_pb2.POOLING_LAST_TOKEN and last < shape.vocab_size),
            f"scores.not_last_token_id needs POOLING_LAST_TOKEN and must be below {shape.vocab_size}; was {last}",
        )
        self._check(self._manifest.HasField("text"), "scores needs text, because pairs are texts")
        path = self._verified_path("scores.file", scores.file)
        head = HeadGraph(path, (scores.input_name,), scores.output_name, shape.d_model, len(scores.labels))
        return Scores(
            head,
            tuple(scores.labels),
            _SCORE_POOLINGS[scores.pooling],
            last,
            Activation(scores.activation),
            _CUTS_ONLY_SECOND[scores.pair_truncation],
        )

    def tasks(self) -> dict[Task, TaskSettings]:
        """Return the settings of each task that the model treats differently."""
        manifest = self._manifest
        tasks = {
            task: self._task(field, getattr(manifest, field))
            for task, field in ((Task.QUERY, "query"), (Task.DOCUMENT, "document"))
            if manifest.HasField(field)
        }
        self._check(
            not tasks or not manifest.graph.embeddings_name,
            "query and document need a model that takes texts, not embeddings",
        )
        return tasks

    def max_text_tokens(self) -> int:
        """Return the maximum number of tokens of a text without a task; 0 for the encoder's max_sequence_tokens."""
        longest, most = self._manifest.text.max_tokens, self._manifest.encoder.max_sequence_tokens
        self._check(longest <= most, f"text.max_tokens must be at most max_sequence_tokens, {most}; was {longest}")
        return longest

    def template(self) -> TextTemplate | None:
        """Return the template around every text; None without a template."""
        if not self._manifest.text.HasField("template"):
            return None
        template, most = self._manifest.text.template, self._manifest.encoder.max_sequence_tokens
        kept = template.after_tokens
        self._check(kept < most, f"text.template.after_tokens must be below {most}; was {kept}")
        self._check(not self._manifest.pooling_skips_prompt, "pooling_skips_prompt needs a text without a template")
        between = template.between if template.HasField("between") else None
        self._check(
            between is None or self._manifest.HasField("scores"), "text.template.between needs scores, which is not set"
        )
        return TextTemplate(
            template.before,
            template.before_prompt,
            template.after_prompt,
            template.after,
            template.after_tokens,
            between,
        )

    def _task(self, name: str, settings: manifest_pb2.TaskSettings) -> TaskSettings:
        shape, prompts = self._manifest.encoder, self._manifest.prompts
        self._check(
            not settings.prompt_name or settings.prompt_name in prompts,
            f"{name}.prompt_name is {settings.prompt_name!r}; the prompts are {', '.join(sorted(prompts)) or 'none'}",
        )
        longest = settings.max_tokens or shape.max_sequence_tokens
        self._check(
            longest <= shape.max_sequence_tokens,
            f"{name}.max_tokens must be at most max_sequence_tokens, {shape.max_sequence_tokens}; was {longest}",
        )
        for field in ("skipped_token_ids", "kept_token_ids"):
            largest = max(getattr(settings, field), default=0)
            self._check(
                largest < shape.vocab_size, f"{name}.{field} must be below {shape.vocab_size}; one is {largest}"
            )
        return TaskSettings(
            settings.prompt_name,
            longest,
            self._expansion(f"{name}.expansion", settings.expansion, longest)
            if settings.HasField("expansion")
            else None,
            tuple(settings.skipped_token_ids),
            tuple(settings.kept_token_ids),
            self._pooling(f"{name}.token_pooling", settings.token_pooling)
            if settings.HasField("token_pooling")
            else None,
            self._static(f"{name}.static_sparse", settings.static_sparse)
            if settings.HasField("static_sparse")
            else None,
        )

    def _expansion(self, field: str, expansion: manifest_pb2.Expansion, longest: int) -> Expansion:
        self._check(
            1 <= expansion.min_tokens <= longest,
            f"{field}.min_tokens must be from 1 to the maximum for a text, {longest}; was {expansion.min_tokens}",
        )
        vocab_size = self._manifest.encoder.vocab_size
        self._check(
            expansion.token_id < vocab_size, f"{field}.token_id must be below {vocab_size}; was {expansion.token_id}"
        )
        self._check(
            expansion.attended or not self._manifest.HasField("sparse"),
            f"{field}.attended must be true if sparse is set, because sparse pools all tokens",
        )
        return Expansion(expansion.min_tokens, expansion.token_id, expansion.attended)

    def _pooling(self, field: str, pooling: manifest_pb2.TokenPooling) -> TokenPooling:
        self._check(1 <= pooling.factor < math.inf, f"{field}.factor must be finite and >= 1; was {pooling.factor}")
        return TokenPooling(pooling.factor, pooling.protected_tokens, pooling.l2_normalize)

    def _static(self, field: str, static: manifest_pb2.StaticSparse) -> StaticSparse:
        self._check(self._manifest.HasField("sparse"), f"{field} needs sparse, which is not set")
        path = self._verified_path(f"{field}.weights_file", static.weights_file)
        try:
            weights = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: not a NumPy array: {error}") from error
        width = self._manifest.sparse.width
        if (weights.dtype, weights.shape) != (np.float32, (width,)):
            raise BundleError(
                f"{path}: must be float32 ({width},), from sparse.width; was {weights.dtype} {weights.shape}"
            )
        tokenizer = self._verified_path(f"{field}.tokenizer_file", static.tokenizer_file)
        return StaticSparse(tokenizer, weights, static.max_tokens)

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BundleError(f"{self._path}: {otherwise}")
