"""How the rows of a text become what the model was trained to give: the result of reading a directory."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from encserve_proto.bundle.v1 import manifest_pb2

TASKS = ("query", "document")
POOLINGS = {
    "mean": manifest_pb2.POOLING_MEAN,
    "cls": manifest_pb2.POOLING_CLS,
    "max": manifest_pb2.POOLING_MAX,
    "lasttoken": manifest_pb2.POOLING_LAST_TOKEN,
    "weightedmean": manifest_pb2.POOLING_WEIGHTED_MEAN,
    "mean_sqrt_len_tokens": manifest_pb2.POOLING_MEAN_SQRT_LENGTH,
}


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
    more_poolings: tuple[manifest_pb2.Pooling, ...] = ()
    head: nn.Sequential | None = None
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
