"""The spec of a model says how texts become vectors. It comes from the model's directory or from the user's options."""

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

Kind = Literal["dense", "multi_vector", "sparse", "static", "scores"]
TASKS = ("query", "document")
# A limit of this many tokens or more means no limit. For a tokenizer without a limit, transformers writes a number of
# 31 digits.
NO_BOUND = 1_000_000
# The poolings, by the names that clients use for them.
POOLINGS = {
    "mean": manifest_pb2.POOLING_MEAN,
    "cls": manifest_pb2.POOLING_CLS,
    "max": manifest_pb2.POOLING_MAX,
    "last_token": manifest_pb2.POOLING_LAST_TOKEN,
    "weighted_mean": manifest_pb2.POOLING_WEIGHTED_MEAN,
    "mean_sqrt_length": manifest_pb2.POOLING_MEAN_SQRT_LENGTH,
}
# sentence-transformers has other names for some of these poolings.
POOLING_ALIASES = {
    "lasttoken": "last_token",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
}


def read_pooling(name: str) -> manifest_pb2.Pooling:
    """Return the pooling for a name in `POOLINGS` or `POOLING_ALIASES`.

    Raises:
        ConfigError: No pooling has that name.
    """
    pooling = POOLINGS.get(POOLING_ALIASES.get(name, name))
    if pooling is None:
        raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}; was {name!r}")
    return pooling


@dataclasses.dataclass(frozen=True)
class ModuleFacts:
    """The settings and tensors of a module that are part of the space_id.

    The space_id identifies the model's vector space, see docs/reference/space-id.md.

    Attributes:
        kind: The kind of the module, such as "Dense", "Normalize", "LayerNorm" or "SpladePooling".
        settings: The settings that differ from their defaults.
        tensors: The tensors of the module's own files, by their names in the files. This mapping is empty if the
            encoder's files contain the tensors.
    """

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Steps(nn.Module):
    """A chain of sentence-transformers' modules. Each module reads and writes the feature named `feature`."""

    def __init__(self, modules: Iterable[nn.Module], feature: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.feature = feature
        self.eval().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (n, width) to (n, output width of the last module)."""
        features = {self.feature: inputs}
        for step in self.steps:
            features = step(features)
        return features[self.feature]


@dataclasses.dataclass(frozen=True)
class MultiVectorHead:
    """Turns hidden states into vectors for MaxSim.

    Attributes:
        module: Maps (tokens, d_model) to (tokens, width).
        similarity: "maxsim" or "meanmaxsim".
        skips_first_token: Whether the first token gets no vector.
    """

    module: nn.Module
    similarity: str
    skips_first_token: bool = False


@dataclasses.dataclass(frozen=True)
class SparseHead:
    """Turns hidden states into sparse weights over the vocabulary.

    Attributes:
        module: Maps (batch, seq, d_model) and a 0/1 mask (batch, seq) to pooled weights (batch, width). With
            SPARSE_POOLING_OWN_ID, the module maps (tokens, d_model) to (tokens, 1), one weight for each token's own id.
        pooling: How the weights of the tokens are pooled.
        skipped_token_ids: The ids of tokens that get no weight; empty unless `pooling` is SPARSE_POOLING_OWN_ID.
        max_active_dims: How many of the largest weights are kept; 0 for all.
    """

    module: nn.Module
    pooling: manifest_pb2.SparsePooling
    skipped_token_ids: tuple[int, ...] = ()
    max_active_dims: int = 0


@dataclasses.dataclass(frozen=True)
class ScoreHead:
    """Turns a pooled hidden state into the logits of labels.

    Attributes:
        module: Maps (batch, d_model) to (batch, labels).
        pooling: The pooling of the hidden states.
        not_last_token_id: The id that POOLING_LAST_TOKEN skips at the end of a sequence, such as the padding id. None
            if no id is skipped.
        labels: The names of the labels.
        activation: The function that turns logits into scores.
        pair_truncation: How a pair of texts that is too long is truncated.
        token_types: Whether the hidden states depend on token types: 0 for the first text of a pair, 1 for the second.
    """

    module: nn.Module
    pooling: manifest_pb2.Pooling
    not_last_token_id: int | None
    labels: tuple[str, ...]
    activation: manifest_pb2.Activation
    pair_truncation: manifest_pb2.PairTruncation
    token_types: bool


class StaticWeights(nn.Module):
    """A fixed weight for each token of the vocabulary, used instead of the encoder.

    Attributes:
        weight: float32 (width,).
        tokenizer: A parsed tokenizer.json. It adds no special tokens to a text.
        files: The names of two files in a bundle: one for the tokenizer, one for the weights. `files` also contains the
            largest number of tokens in a text.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, tokenizer: Mapping[str, Any], files: manifest_pb2.StaticSparse) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float())
        self.tokenizer = tokenizer
        self.files = files

    def write(self, folder: Path) -> list[Path]:
        """Write the tokenizer and the weights to files. Return the paths of both files."""
        tokenizer, weights = folder / self.files.tokenizer_file, folder / self.files.weights_file
        tokenizer.write_text(json.dumps(self.tokenizer, ensure_ascii=False), encoding="utf-8")
        np.save(weights, self.weight.numpy())
        return [tokenizer, weights]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """How a text becomes hidden states, and how hidden states become the vectors that the model was trained for.

    Attributes:
        pooling: How hidden states become one vector; unspecified if the checkpoint does not state a pooling.
        l2_normalize: Whether the vector is scaled to length 1, after the head.
        kind: The kind of the model.
        encoder: The folder of the encoder and its tokenizer, for a model in a directory.
        loaded: The model as sentence-transformers loads it; None if sentence-transformers does not load the directory.
        tokenizer: The loaded tokenizer: a PreTrainedTokenizer, or a tokenizers.Tokenizer for a static embedding. None
            if the model has no tokenizer.
        max_seq_length: The longest text in tokens, special tokens included; None if no file states a limit.
        max_tokens: The longest text in tokens, if the caller gives no task. The limit includes the prompt and special
            tokens. 0 means the longest sequence of the model.
        template: The fixed texts before and after every text; None if the model has no chat template.
        prompts: The prompts that the model was trained with, by name.
        default_prompt_name: The name of the prompt for callers that name no prompt; empty for no prompt.
        tasks: The settings for queries and for documents, under the keys "query" and "document". Empty if the directory
            has no modules.json.
        more_poolings: Further poolings. Their vectors are appended to the vector of `pooling`.
        skips_prompt: Whether pooling leaves out the tokens of a prompt.
        head: The modules after pooling, (batch, poolings x d_model) -> (batch, width); None if there are no such
            modules.
        dimensions: How many of the first dimensions of a vector are kept; 0 for all.
        similarity: How vectors are compared; empty if the checkpoint does not state a similarity.
        multi_vector: The head for MaxSim, or None.
        sparse: The head for weights over the vocabulary, or None.
        scores: The head for the logits of labels, or None.
        static_weights: The fixed weights that replace the encoder for some tasks; `tasks` has the names of their files.
        table: The table of a static embedding, float32 (vocab_size, d_model), or None.
        modules: The modules after the encoder that are part of the space_id. The list leaves out Pooling modules, and
            Normalize modules that `l2_normalize` replaces.
        used_parts: The parts of the encoder's checkpoint that a head uses, such as "linear". A part is the first
            component of a weight's name.
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
    scores: ScoreHead | None = None
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
        pooling: One of `POOLINGS`, or sentence-transformers' name; None if the model returns only hidden states.
        l2_normalize: Whether the vector is scaled to length 1.

    Raises:
        ConfigError: No pooling has that name, or `l2_normalize` is set without a pooling.
    """
    return ModelSpec(manifest_pb2.POOLING_UNSPECIFIED if pooling is None else read_pooling(pooling), l2_normalize)
