"""Defines the sizes and settings of this project's own encoder."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from encserve_export.core.errors import ConfigError

Input = Literal["token_ids", "embeddings"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Norm = Literal["post", "pre", "none"]
Position = Literal["sinusoidal", "learned", "none"]
MergeHeads = Literal["transpose", "reshape"]

_POSITIVE = ("d_model", "n_heads", "n_layers", "max_sequence_tokens")
# The largest allowed values. The memory of the position table and of attention grows with the longest sequence.
_MOST = {"n_layers": 1024, "max_sequence_tokens": 2**20}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "input": get_args(Input),
    "activation": get_args(Activation),
    "norm": get_args(Norm),
    "position": get_args(Position),
    "merge_heads": get_args(MergeHeads),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The sizes and settings of an `Encoder`. The constructor checks all fields.

    If a new checkpoint layout needs a setting, add a field. The field's default must not change the outputs of earlier
    layouts.

    Attributes:
        vocab_size: Number of token ids; 0 if the input is embeddings.
        d_model: Width of a token's hidden state.
        n_heads: Number of attention heads per block. It must divide `d_model`.
        d_ff: Inner width of the feed-forward layers; 0 for blocks without feed-forward layers.
        n_layers: Number of blocks.
        max_sequence_tokens: Length of the longest sequence, in tokens.
        input: "token_ids" or "embeddings". "embeddings" means one vector per token. The encoder uses this vector
            unchanged in place of the token embedding.
        activation: The function between the two feed-forward layers. "gelu" is the exact x·Φ(x) of Hendrycks & Gimpel
            2016. "gelu_tanh" is the approximation x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))). "silu" is x·σ(x).
        attention_bias: Whether the four projections of attention add a bias.
        merge_heads: How the heads' results, (heads, seq, d_k), become one matrix, (seq, d_model). "transpose"
            concatenates the heads of each token, as in Vaswani et al. 2017. "reshape" reshapes without a transpose, so
            a row of the matrix mixes tokens.
        residual: Whether the input x is added to the output f(x). Here f is attention, or the feed-forward layers.
        norm: "post" is LayerNorm(x + f(x)), as in Vaswani et al. 2017; "pre" is x + f(LayerNorm(x)); "none" has no
            LayerNorm.
        final_norm: Whether a LayerNorm follows the last block; usual with "pre".
        position: The position table: "sinusoidal", "learned" for a table that is part of the weights, or "none".
        scale_embedding: Whether token embeddings are multiplied by √d_model, as in Vaswani et al. 2017.
        layer_norm_eps: The number added to the variance in every LayerNorm.
        pad_token_id: The id that pads a batch. It does not affect the hidden states of real tokens.
        position_offset: The row of the position table that the first token uses; `pad_token_id + 1` in RoBERTa.
    """

    vocab_size: int
    d_model: int = 512
    n_heads: int = 8
    d_ff: int = 2048
    n_layers: int = 8
    max_sequence_tokens: int = 512
    input: Input = "token_ids"
    activation: Activation = "relu"
    attention_bias: bool = True
    merge_heads: MergeHeads = "transpose"
    residual: bool = True
    norm: Norm = "post"
    final_norm: bool = False
    position: Position = "sinusoidal"
    scale_embedding: bool = False
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 0
    position_offset: int = 0

    def __post_init__(self) -> None:
        """Check each field, and then check that the fields fit together."""
        self._check_fields()
        self._check_together()

    @property
    def d_k(self) -> int:
        """The width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def n_positions(self) -> int:
        """The number of rows of the position table."""
        return self.max_sequence_tokens + self.position_offset

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Self:
        """Build a configuration from JSON-like data.

        Args:
            fields: Values by field name. A missing field gets its default.

        Raises:
            ConfigError: A name is unknown, `vocab_size` is missing, or a value is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(fields.keys() - set(known))
        if unknown:
            raise ConfigError(f"unknown configuration fields: {', '.join(unknown)}; known are {', '.join(known)}")
        if "vocab_size" not in fields and fields.get("input") != "embeddings":
            raise ConfigError("vocab_size is missing from the configuration")
        return cls(**{"vocab_size": 0, **fields})

    def _check_fields(self) -> None:
        for field in dataclasses.fields(self):
            name, kind, value = field.name, field.type, getattr(self, field.name)
            if kind is bool and not isinstance(value, bool):
                raise ConfigError(f"{name} must be true or false; was {value!r}")
            if kind is int and type(value) is not int:
                raise ConfigError(f"{name} must be an integer; was {value!r}")
            if kind is int and value < (least := int(name in _POSITIVE)):
                raise ConfigError(f"{name} must be at least {least}; was {value}")
            if kind is float and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
            ):
                raise ConfigError(f"{name} must be a positive number; was {value!r}")
            if value not in CHOICES.get(name, (value,)):
                raise ConfigError(f"{name} must be one of {', '.join(CHOICES[name])}; was {value!r}")
            if value > _MOST.get(name, value):
                raise ConfigError(f"{name} must be at most {_MOST[name]}; was {value}")

    def _check_together(self) -> None:
        if self.d_model % self.n_heads:
            raise ConfigError(f"n_heads must divide d_model; was {self.n_heads} for {self.d_model}")
        if self.input == "embeddings":
            for name in ("vocab_size", "pad_token_id"):
                if getattr(self, name):
                    raise ConfigError(f"{name} must be 0 if the input is embeddings; was {getattr(self, name)}")
            if self.scale_embedding:
                raise ConfigError(
                    "scale_embedding must be false if the input is embeddings, because the encoder uses them unchanged"
                )
        elif self.vocab_size < 1:
            raise ConfigError(f"vocab_size must be at least 1; was {self.vocab_size}")
        elif self.pad_token_id >= self.vocab_size:
            raise ConfigError(f"pad_token_id must be less than vocab_size, {self.vocab_size}; was {self.pad_token_id}")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"d_model must be even for sinusoidal positions; was {self.d_model}")
        if self.position == "none" and self.position_offset:
            raise ConfigError(f"position_offset must be 0 without a table of positions; was {self.position_offset}")
