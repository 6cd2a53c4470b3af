"""How the rows of a text become what the model was trained to give: the result of reading a directory."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from encserve_export.ground.arrays import Rows
from encserve_export.ground.errors import ConfigError
from encserve_proto.bundle.v1 import manifest_pb2

Kind = Literal["dense", "multi_vector", "sparse", "static"]
TASKS = ("query", "document")
# Where no longest text is set for a tokenizer, transformers writes a number of 31 digits.
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
# Where sentence-transformers has another name for one of them.
POOLING_ALIASES = {
    "lasttoken": "last_token",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
}


def read_pooling(name: str) -> manifest_pb2.Pooling:
    """The pooling of that name, the clients' or sentence-transformers'.

    Raises:
        ConfigError: No pooling has that name.
    """
    pooling = POOLINGS.get(POOLING_ALIASES.get(name, name))
    if pooling is None:
        raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}; was {name!r}")
    return pooling


@dataclasses.dataclass(frozen=True)
class ModuleFacts:
    """What a module after the encoder adds to the name of a vector space, see docs/models.md.

    Attributes:
        kind: Its documented kind, such as "Dense", "Normalize", "LayerNorm" or "SpladePooling".
        settings: Its settings; those at their default are left out.
        tensors: The tensors of the module's own files, by the names there; none where its weights lie among the
            encoder's.
    """

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Steps(nn.Module):
    """Modules of sentence-transformers one after another, of which each reads and writes one feature.

    Attributes:
        feature: The name of that feature.
    """

    def __init__(self, modules: Iterable[nn.Module], feature: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.feature = feature
        self.eval().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, width) to (n, the last module's width)."""
        features = {self.feature: inputs}
        for step in self.steps:
            features = step(features)
        return features[self.feature]


@dataclasses.dataclass(frozen=True)
class MultiVectorHead:
    """What makes the vectors of MaxSim of a model's rows.

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
    """What makes weights over the vocabulary of a model's rows.

    Attributes:
        module: (batch, seq, d_model) and a mask (batch, seq) of 1 and 0 -> (batch, width), pooled; with
            SPARSE_POOLING_OWN_ID (tokens, d_model) -> (tokens, 1).
        pooling: How it pools.
        skipped_token_ids: Tokens that have no weight; only with SPARSE_POOLING_OWN_ID.
        max_active_dims: How many of the largest weights are kept; 0 for all.
    """

    module: nn.Module
    pooling: manifest_pb2.SparsePooling
    skipped_token_ids: tuple[int, ...] = ()
    max_active_dims: int = 0


class StaticWeights(nn.Module):
    """A weight for each token that occurs in a text, without a run of the model.

    Attributes:
        weight: float32 (width,).
        tokenizer: A tokenizer.json, parsed, that puts nothing around a text.
        files: Where both lie in a bundle, and the longest text.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, tokenizer: Mapping[str, Any], files: manifest_pb2.StaticSparse) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float())
        self.tokenizer = tokenizer
        self.files = files

    def write(self, folder: Path) -> list[Path]:
        """Writes its two files."""
        tokenizer, weights = folder / self.files.tokenizer_file, folder / self.files.weights_file
        tokenizer.write_text(json.dumps(self.tokenizer, ensure_ascii=False), encoding="utf-8")
        np.save(weights, self.weight.numpy())
        return [tokenizer, weights]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the rows of a text become the vectors that the model was trained to give.

    Attributes:
        kind: What kind of model it is.
        encoder: Where the encoder and its tokenizer lie, of a model that comes as a directory.
        max_seq_length: The longest text, in tokens, special ones included; None where nothing says so.
        tokenizer: The tokenizer as sentence-transformers loads it, one of transformers; None where it loads none.
        table: The rows of a static embedding, float32 (vocab_size, d_model); None of any other model.
        inline: The parts among the encoder's own weights that make vectors of its rows.
        modules: What comes after pooling, or after the rows where nothing pools them, in order; without the Normalize
            modules at the end that `l2_normalize` stands for, and without those that `tasks` stand for.
        pooling: How rows become one vector; unspecified where the checkpoint does not say.
        l2_normalize: Whether the vector is scaled to length 1, behind the head.
        more_poolings: Those whose vectors are joined behind that of `pooling`.
        head: What comes after pooling, (batch, poolings x d_model) -> (batch, width); None where nothing does.
        skips_prompt: Whether the tokens of a prompt are left out of pooling.
        prompts: What the model was trained to see before a text, by name.
        default_prompt_name: The one that it sees unless another is asked for; empty for none.
        dimensions: To how many of its first numbers the vector is cut at last; 0 for all.
        similarity: How vectors are compared; empty where the checkpoint does not say.
        tasks: How queries and documents are treated, by "query" and "document"; none where the checkpoint is not one of
            sentence-transformers.
        multi_vector: What makes the vectors of MaxSim; None where nothing does.
        sparse: What makes weights over the vocabulary; None where nothing does.
        static_weights: What makes those of a task in place of the encoder, as `tasks` say.
        max_tokens: The longest text of no task, in tokens, prompt and special tokens included; 0 for the longest
            sequence.
        template: What stands around every text; None for nothing but the tokenizer's special tokens.
        remark: What may surprise, for people.
    """

    pooling: manifest_pb2.Pooling = manifest_pb2.POOLING_UNSPECIFIED
    l2_normalize: bool = False
    kind: Kind = "dense"
    encoder: Path = Path()
    max_seq_length: int | None = None
    tokenizer: Any = None
    table: Rows | None = None
    inline: tuple[str, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()
    more_poolings: tuple[manifest_pb2.Pooling, ...] = ()
    head: nn.Module | None = None
    skips_prompt: bool = False
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt_name: str = ""
    dimensions: int = 0
    similarity: str = ""
    tasks: Mapping[str, manifest_pb2.TaskSettings] = dataclasses.field(default_factory=dict)
    multi_vector: MultiVectorHead | None = None
    sparse: SparseHead | None = None
    static_weights: tuple[StaticWeights, ...] = ()
    max_tokens: int = 0
    template: manifest_pb2.TextTemplate | None = None
    remark: str = ""


def pooled(pooling: str | None, *, l2_normalize: bool) -> Recipe:
    """What a caller says of a model: how its rows become one vector, or nothing.

    Args:
        pooling: One of `POOLINGS`, or sentence-transformers' name for it; None where rows are all that is known.
        l2_normalize: Whether the vector is scaled to length 1.

    Raises:
        ConfigError: There is no such pooling, or vectors are to be scaled that nothing pools.
    """
    if pooling is not None:
        return Recipe(read_pooling(pooling), l2_normalize)
    if l2_normalize:
        raise ConfigError("l2_normalize is of pooled vectors; give the pooling too")
    return Recipe()
