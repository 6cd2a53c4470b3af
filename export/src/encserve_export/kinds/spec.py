"""The spec of a model: how texts become vectors. It comes from a directory or from options."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from encserve_export.core.arrays import Rows
from encserve_export.core.errors import ConfigError
from encserve_proto.bundle.v1 import manifest_pb2

Kind = Literal["dense", "multi_vector", "sparse", "static"]
TASKS = ("query", "document")
# transformers writes a number of 31 digits as the longest text of a tokenizer without a limit.
NO_BOUND = 1_000_000
# By the names that clients use.
POOLINGS = {
    "mean": manifest_pb2.POOLING_MEAN,
    "cls": manifest_pb2.POOLING_CLS,
    "max": manifest_pb2.POOLING_MAX,
    "last_token": manifest_pb2.POOLING_LAST_TOKEN,
    "weighted_mean": manifest_pb2.POOLING_WEIGHTED_MEAN,
    "mean_sqrt_length": manifest_pb2.POOLING_MEAN_SQRT_LENGTH,
}
# The other names that sentence-transformers has.
POOLING_ALIASES = {
    "lasttoken": "last_token",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
}


def read_pooling(name: str) -> manifest_pb2.Pooling:
    """Return the pooling by the clients' name, or by sentence-transformers' name.

    Raises:
        ConfigError: No pooling has that name.
    """
    pooling = POOLINGS.get(POOLING_ALIASES.get(name, name))
    if pooling is None:
        raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}; was {name!r}")
    return pooling


@dataclasses.dataclass(frozen=True)
class ModuleFacts:
    """A module as part of the space_id, see docs/models.md.

    Attributes:
        kind: The documented kind, such as "Dense", "Normalize", "LayerNorm" or "SpladePooling".
        settings: The settings that differ from their defaults.
        tensors: The tensors of the module's own files, by their names in the files; empty if the encoder's files hold
            them.
    """

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Steps(nn.Module):
    """A chain of modules of sentence-transformers that read and write the feature with this name."""

    def __init__(self, modules: Iterable[nn.Module], feature: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.feature = feature
        self.eval().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (n, width) to (n, width of the last module)."""
        features = {self.feature: inputs}
        for step in self.steps:
            features = step(features)
        return features[self.feature]


@dataclasses.dataclass(frozen=True)
class MultiVectorHead:
    """Turns rows into vectors for MaxSim.

    Attributes:
        module: (tokens, d_model) -> (tokens, width).
        similarity: "maxsim" or "meanmaxsim".
        skips_first_token: Whether the first token has no vector.
    """

    module: nn.Module
    similarity: str
    skips_first_token: bool = False


@dataclasses.dataclass(frozen=True)
class SparseHead:
    """Turns rows into weights over the vocabulary.

    Attributes:
        module: (batch, seq, d_model) and a mask (batch, seq) of 1 and 0 -> (batch, width), pooled; with
            SPARSE_POOLING_OWN_ID (tokens, d_model) -> (tokens, 1).
        pooling: How the weights of the tokens are pooled.
        skipped_token_ids: Tokens without a weight; only with SPARSE_POOLING_OWN_ID.
        max_active_dims: How many of the largest weights are kept; 0 for all.
    """

    module: nn.Module
    pooling: manifest_pb2.SparsePooling
    skipped_token_ids: tuple[int, ...] = ()
    max_active_dims: int = 0


class StaticWeights(nn.Module):
    """A fixed weight for each token of the vocabulary. A text needs no run of the encoder.

    Attributes:
        weight: float32 (width,).
        tokenizer: A parsed tokenizer.json without special tokens around a text.
        files: The names of both files in a bundle, and the longest text.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, tokenizer: Mapping[str, Any], files: manifest_pb2.StaticSparse) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float())
        self.tokenizer = tokenizer
        self.files = files

    def write(self, folder: Path) -> list[Path]:
        """Write both files."""
        tokenizer, weights = folder / self.files.tokenizer_file, folder / self.files.weights_file
        tokenizer.write_text(json.dumps(self.tokenizer, ensure_ascii=False), encoding="utf-8")
        np.save(weights, self.weight.numpy())
        return [tokenizer, weights]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """How a text becomes rows, and how rows become the vectors that the model was trained for.

    Attributes:
        pooling: How rows become one vector; unspecified if the checkpoint does not say.
        l2_normalize: Whether the vector is scaled to length 1, after the head.
        kind: The kind of the model.
        encoder: The folder of the encoder and its tokenizer, for a model in a directory.
        loaded: The model as sentence-transformers loads it; None if sentence-transformers does not load the directory.
        tokenizer: The loaded tokenizer: a PreTrainedTokenizer, or a tokenizers.Tokenizer of a static embedding. None
            without a tokenizer.
        max_seq_length: The longest text in tokens, special tokens included; None if no file states one.
        max_tokens: The longest text without a task, in tokens, prompt and special tokens included; 0 for the longest
            sequence.
        template: The fixed texts around every text; None without a chat template.
        prompts: The prompts that the model was trained with, by name.
        default_prompt_name: The prompt that is used unless another one is named; empty for none.
        tasks: How queries and documents are treated, by "query" and "document"; empty if the directory has no
            modules.json.
        more_poolings: Further poolings, with their vectors appended to the vector of `pooling`.
        skips_prompt: Whether pooling leaves out the tokens of a prompt.
        head: The modules after pooling, (batch, poolings x d_model) -> (batch, width); None without any.
        dimensions: The number of dimensions to keep, from the first on; 0 for all.
        similarity: How vectors are compared; empty if the checkpoint does not say.
        multi_vector: The head for MaxSim, or None.
        sparse: The head for weights over the vocabulary, or None.
        static_weights: The fixed weights that replace the encoder for a task; `tasks` names their files.
        table: The rows of a static embedding, float32 (vocab_size, d_model), or None.
        modules: The modules after the encoder, for the space_id, without Pooling. `l2_normalize` stands for the last
            Normalize modules.
        used_parts: The parts of the encoder's own weights that a head uses.
        remark: A note for the user.
    """

    pooling: manifest_pb2.Pooling = manifest_pb2.POOLING_UNSPECIFIED
    l2_normalize: bool = False
    kind: Kind = "dense"
    encoder: Path = Path()
    loaded: Any = None
    tokenizer: Any = None
    max_seq_length: int | None = None
    max_tokens: int = 0
    template: manifest_pb2.TextTemplate | None = None
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt_name: str = ""
    tasks: Mapping[str, manifest_pb2.TaskSettings] = dataclasses.field(default_factory=dict)
    more_poolings: tuple[manifest_pb2.Pooling, ...] = ()
    skips_prompt: bool = False
    head: nn.Module | None = None
    dimensions: int = 0
    similarity: str = ""
    multi_vector: MultiVectorHead | None = None
    sparse: SparseHead | None = None
    static_weights: tuple[StaticWeights, ...] = ()
    table: Rows | None = None
    modules: tuple[ModuleFacts, ...] = ()
    used_parts: tuple[str, ...] = ()
    remark: str = ""

    def __post_init__(self) -> None:
        if self.l2_normalize and not self.pooling:
            raise ConfigError("l2_normalize is for pooled vectors; give the pooling too")


def spec_from_options(pooling: str | None, *, l2_normalize: bool) -> ModelSpec:
    """Return the spec of a model that is not in a directory.

    Args:
        pooling: One of `POOLINGS`, or sentence-transformers' name; None if only rows are known.
        l2_normalize: Whether the vector is scaled to length 1.

    Raises:
        ConfigError: No pooling has that name, or `l2_normalize` is set without a pooling.
    """
    return ModelSpec(manifest_pb2.POOLING_UNSPECIFIED if pooling is None else read_pooling(pooling), l2_normalize)
