"""Reads from a manifest what a model makes of its rows, and how it treats queries and documents."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.errors import BundleError
from encserve_server.types import (
    Expansion,
    HeadGraph,
    MultiVector,
    Sparse,
    SparsePooling,
    StaticSparse,
    Task,
    TaskSettings,
    TokenPooling,
)

VerifiedPath = Callable[[str, str], Path]  # the path of a listed file, for the field that names it

_SIMILARITIES = ("maxsim", "meanmaxsim")


class ManifestReader:
    """Reads parts of one manifest, each of whose files `verified_path` finds.

    Every method raises BundleError, naming the field, where the manifest contradicts itself.
    """

    def __init__(self, path: Path, manifest: manifest_pb2.Manifest, verified_path: VerifiedPath) -> None:
        """Takes the manifest, and its path for errors."""
        self._path = path
        self._manifest = manifest
        self._verified_path = verified_path

    def multi_vector(self) -> MultiVector | None:
        """What makes the vectors of MaxSim, if anything does."""
        if not self._manifest.HasField("multi_vector"):
            return None
        its, d_model = self._manifest.multi_vector, self._manifest.encoder.d_model
        self._check(its.width >= 1, f"multi_vector.width must be >= 1; was {its.width}")
        self._check(
            its.similarity in _SIMILARITIES,
            f"multi_vector.similarity must be {' or '.join(_SIMILARITIES)}; was {its.similarity!r}",
        )
        path = self._verified_path("multi_vector.file", its.file)
        head = HeadGraph(path, (its.input_name,), its.output_name, d_model, its.width)
        return MultiVector(head, its.similarity, its.skips_first_token)

    def sparse(self) -> Sparse | None:
        """What makes weights over the vocabulary, if anything does."""
        if not self._manifest.HasField("sparse"):
            return None
        its, shape = self._manifest.sparse, self._manifest.encoder
        self._check(
            its.pooling in {it.value for it in SparsePooling},
            f"sparse.pooling {its.pooling} is not known to this server",
        )
        pooling = SparsePooling(its.pooling)
        own_id = pooling is SparsePooling.OWN_ID
        self._check(its.width >= 1, f"sparse.width must be >= 1; was {its.width}")
        self._check(
            not own_id or 1 <= shape.vocab_size <= its.width,
            f"sparse.width must hold every id of a vocabulary of {shape.vocab_size}; was {its.width}",
        )
        self._check(
            bool(its.mask_name) != own_id,
            f"sparse.mask_name must be {'empty' if own_id else 'set'} for this pooling; was {its.mask_name!r}",
        )
        names = (its.rows_name, its.mask_name) if its.mask_name else (its.rows_name,)
        path = self._verified_path("sparse.file", its.file)
        head = HeadGraph(path, names, its.output_name, shape.d_model, 1 if own_id else its.width)
        return Sparse(head, its.width, pooling, tuple(its.skipped_token_ids), its.max_active_dims)

    def tasks(self) -> dict[Task, TaskSettings]:
        """How texts of each task are treated that the model knows."""
        manifest = self._manifest
        tasks = {
            task: self._task(field, getattr(manifest, field))
            for task, field in ((Task.QUERY, "query"), (Task.DOCUMENT, "document"))
            if manifest.HasField(field)
        }
        self._check(not tasks or not manifest.graph.embeddings_name, "query and document are of texts, not embeddings")
        return tasks

    def _task(self, name: str, its: manifest_pb2.TaskSettings) -> TaskSettings:
        shape, prompts = self._manifest.encoder, self._manifest.prompts
        self._check(
            not its.prompt_name or its.prompt_name in prompts,
            f"{name}.prompt_name is {its.prompt_name!r}; the prompts are {', '.join(sorted(prompts)) or 'none'}",
        )
        longest = its.max_tokens or shape.max_sequence_tokens
        self._check(
            longest <= shape.max_sequence_tokens,
            f"{name}.max_tokens must be at most {shape.max_sequence_tokens}, the encoder's; was {longest}",
        )
        for field in ("skipped_token_ids", "kept_token_ids"):
            largest = max(getattr(its, field), default=0)
            self._check(
                largest < shape.vocab_size, f"{name}.{field} must be below {shape.vocab_size}; one is {largest}"
            )
        return TaskSettings(
            its.prompt_name,
            longest,
            self._expansion(f"{name}.expansion", its.expansion, longest) if its.HasField("expansion") else None,
            tuple(its.skipped_token_ids),
            tuple(its.kept_token_ids),
            self._pooling(f"{name}.token_pooling", its.token_pooling) if its.HasField("token_pooling") else None,
            self._static(f"{name}.static_sparse", its.static_sparse) if its.HasField("static_sparse") else None,
        )

    def _expansion(self, field: str, its: manifest_pb2.Expansion, longest: int) -> Expansion:
        self._check(
            1 <= its.min_tokens <= longest,
            f"{field}.min_tokens must be from 1 to the longest text's, {longest}; was {its.min_tokens}",
        )
        vocab_size = self._manifest.encoder.vocab_size
        self._check(its.token_id < vocab_size, f"{field}.token_id must be below {vocab_size}; was {its.token_id}")
        self._check(
            its.attended or not self._manifest.HasField("sparse"),
            f"{field}.attended must be true beside sparse, which pools the rows of all tokens",
        )
        return Expansion(its.min_tokens, its.token_id, its.attended)

    def _pooling(self, field: str, its: manifest_pb2.TokenPooling) -> TokenPooling:
        self._check(1 <= its.factor < math.inf, f"{field}.factor must be a number from 1; was {its.factor}")
        return TokenPooling(its.factor, its.protected_tokens, its.l2_normalize)

    def _static(self, field: str, its: manifest_pb2.StaticSparse) -> StaticSparse:
        self._check(self._manifest.HasField("sparse"), f"{field} needs sparse, which is not set")
        path = self._verified_path(f"{field}.weights_file", its.weights_file)
        try:
            weights = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: not an array of NumPy: {error}") from error
        width = self._manifest.sparse.width
        if (weights.dtype, weights.shape) != (np.float32, (width,)):
            raise BundleError(
                f"{path}: must be float32 ({width},) as sparse.width; was {weights.dtype} {weights.shape}"
            )
        tokenizer = self._verified_path(f"{field}.tokenizer_file", its.tokenizer_file)
        return StaticSparse(tokenizer, weights, its.max_tokens)

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BundleError(f"{self._path}: {otherwise}")
