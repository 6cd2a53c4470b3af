"""The transformer encoder of Vaswani et al. 2017, "Attention Is All You Need", and its later variants, in PyTorch.

The module is for inference, so it has no dropout. The module computes in the dtype of its weights, which is float32 in
a bundle.

A batch is padded on the right. Only the embeddings and attention are computed for the padded batch. All other layers
compute on a matrix with one row per real token, so padding costs no time in these layers. ModernBERT (Warner et al.
2024) does the same.

The names of dimensions in shapes:

- `batch`: the number of sequences
- `seq`: the length of the longest sequence
- `tokens`: the number of real tokens in the batch
- `heads`: `n_heads`
- `d_k`: `d_model / n_heads`
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from encserve_export.models.own.config import Activation, EncoderConfig

# `encoder_of` builds modules on the meta device, which stores no numbers. Sinusoids are not loaded with the weights, so
# they are always computed on the CPU.
_CPU = torch.device("cpu")
_ACTIVATIONS: Mapping[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": functools.partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
}


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """Compute the fixed position table of Vaswani et al. 2017, section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model)).

    Args:
        n_positions: The number of rows.
        d_model: The number of columns, an even number.

    Returns:
        float32 (n_positions, d_model). The table is computed in float64, because in float32 the angle of a late
        position would be wrong by 1e-5.
    """
    position = torch.arange(n_positions, dtype=torch.float64, device=_CPU).unsqueeze(1)  # (n_positions, 1)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=_CPU) / d_model  # (d_model / 2)
    angle = position / torch.pow(10000.0, exponent)  # (n_positions, d_model / 2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()  # (n_positions, d_model)


class Padding:
    """The positions of the real tokens in a batch. All blocks share one `Padding` for a batch.

    Attributes:
        attention_bias: (batch, 1, 1, seq), added to the attention scores. The bias is 0 for a mask of 1, and the lowest
            finite number for a mask of 0 or 2. Softmax turns the lowest number into 0. With -∞, a sequence that has
            only padding would get NaN.
    """

    def __init__(self, attention_mask: Tensor, dtype: torch.dtype) -> None:
        self._is_token, is_masked = attention_mask != 0, attention_mask != 1  # (batch, seq) both
        bias = torch.zeros((), dtype=dtype).masked_fill(is_masked[:, None, None, :], torch.finfo(dtype).min)
        self.attention_bias = bias  # (batch, 1, 1, seq)
        flat = self._is_token.reshape(-1).long()  # (batch·seq)
        self._from_batch = flat.nonzero().squeeze(1)  # (tokens)
        self._positions = self._from_batch % attention_mask.shape[1]  # (tokens)
        self._to_batch = (flat.cumsum(0) - 1).clamp(min=0)  # (batch·seq)

    def remove(self, x: Tensor) -> Tensor:
        """Select the rows of real tokens: (batch·seq, n) -> (tokens, n)."""
        return x.index_select(0, self._from_batch)  # (tokens, n)

    def restore(self, rows: Tensor) -> Tensor:
        """Undo `remove`: (tokens, n) -> (batch·seq, n). A padded position gets the row of the preceding token."""
        return rows.index_select(0, self._to_batch)  # (batch·seq, n)

    def transpose_heads(self, heads: Tensor) -> Tensor:
        """Concatenate the heads of each token: (batch, heads, seq, d_k) -> (tokens, heads·d_k)."""
        n_heads, d_k = heads.shape[1], heads.shape[3]
        return self.remove(heads.transpose(1, 2).reshape(-1, n_heads * d_k))  # (tokens, heads·d_k)

    def reshape_heads(self, heads: Tensor) -> Tensor:
        """Reshape each sequence's (heads, length, d_k) to (length, heads·d_k), without a transpose and without padding.

        A sequence has heads·length vectors of d_k numbers. Vector p belongs to head p // length and to position p %
        length. Row i of the result joins `heads` consecutive vectors, starting at vector i·heads.

        Args:
            heads: (batch, heads, seq, d_k).

        Returns:
            (tokens, heads·d_k).
        """
        n_heads, seq, d_k = heads.shape[1], heads.shape[2], heads.shape[3]
        sequences = self._from_batch // seq  # (tokens)
        lengths = self._is_token.long().sum(dim=1).index_select(0, sequences)[:, None]  # (tokens, 1)
        vectors = self._positions[:, None] * n_heads + torch.arange(n_heads)  # (tokens, heads)
        rows = (sequences[:, None] * n_heads + vectors // lengths) * seq + vectors % lengths  # (tokens, heads)
        return heads.reshape(-1, d_k).index_select(0, rows.reshape(-1)).reshape(-1, n_heads * d_k)


class Embeddings(nn.Module):
    """The sum of token and position embeddings: x = E[id]·√d_model + P[position]. The factor √d_model is optional."""

    positions: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        if config.input == "token_ids":
            self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.positions = nn.Parameter(torch.empty(config.n_positions, config.d_model))
        elif config.position == "sinusoidal":
            self.register_buffer("positions", sinusoids(config.n_positions, config.d_model), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed a batch.

        Args:
            inputs: Token ids, int64 (batch, seq), or embeddings, (batch, seq, d_model), which replace E[id].

        Returns:
            (batch, seq, d_model).
        """
        x: Tensor = self.tokens(inputs) if self.config.input == "token_ids" else inputs  # (batch, seq, d_model)
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.d_model)  # (batch, seq, d_model)
        if self.config.position in ("sinusoidal", "learned"):
            first = self.config.position_offset
            x = x + self.positions[first : first + inputs.shape[1]]  # (batch, seq, d_model)
        return x


class SelfAttention(nn.Module):
    """Multi-head self-attention, Vaswani et al. 2017, section 3.2.

    head_h = softmax(Q_h·K_hᵀ / √d_k)·V_h. One linear layer computes Q, K and V. The output of this layer contains Q,
    then K, then V. The setting `merge_heads` selects how the heads are merged. A last linear layer follows.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.d_k = config.d_k
        self.d_model = config.d_model
        self.merge_heads = config.merge_heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.attention_bias)
        self.output = nn.Linear(config.d_model, config.d_model, bias=config.attention_bias)

    def forward(self, x: Tensor, padding: Padding, return_attention: bool) -> tuple[Tensor, Tensor | None]:
        """Compute attention within each sequence.

        Args:
            x: (tokens, d_model).
            padding: The positions of the tokens.
            return_attention: Whether to return the attention weights. They need memory for the whole tensor (batch,
                heads, seq, seq).

        Returns:
            The output, (tokens, d_model), and the attention weights, (batch, heads, seq, seq), or None. The sum of each
            row of attention weights is 1.
        """
        bias = padding.attention_bias  # (batch, 1, 1, seq)
        by_head = (bias.shape[0], bias.shape[3], self.n_heads, self.d_k)
        qkv = self.qkv(x)  # (tokens, 3·d_model)
        q, k, v = torch.split(padding.restore(qkv), self.d_model, dim=-1)  # (batch·seq, d_model) each
        q, k, v = (part.reshape(by_head).transpose(1, 2) for part in (q, k, v))  # (batch, heads, seq, d_k) each
        weights = None
        if return_attention:
            scores = q @ k.transpose(2, 3) / math.sqrt(self.d_k)  # (batch, heads, seq, seq)
            weights = torch.softmax(scores + bias, dim=-1)  # (batch, heads, seq, seq)
            heads = weights @ v  # (batch, heads, seq, d_k)
        else:
            heads = functional.scaled_dot_product_attention(q, k, v, bias)  # (batch, heads, seq, d_k)
        merge = padding.transpose_heads if self.merge_heads == "transpose" else padding.reshape_heads
        y: Tensor = self.output(merge(heads))  # (tokens, d_model)
        return y, weights


class FeedForward(nn.Module):
    """The position-wise network, Vaswani et al. 2017, section 3.3: W₂·f(W₁·x + b₁) + b₂ for each token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.activation = _ACTIVATIONS[config.activation]()
        self.outer = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row: (tokens, d_model) -> (tokens, d_model)."""
        y: Tensor = self.outer(self.activation(self.inner(x)))  # (tokens, d_model)
        return y


class EncoderBlock(nn.Module):
    """One layer: attention, then feed-forward, each with a residual connection and a LayerNorm.

    Post-norm (Vaswani et al. 2017): x ← LayerNorm(x + f(x)). Pre-norm (Xiong et al. 2020): x ← x + f(LayerNorm(x)).
    A configuration may leave out the norms, the residual connections, or the feed-forward layers.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.residual = config.residual
        self.attention = SelfAttention(config)
        self.attention_norm = _block_norm(config)
        self.feed_forward = FeedForward(config) if config.d_ff else None
        self.feed_forward_norm = _block_norm(config) if config.d_ff else nn.Identity()

    def forward(self, x: Tensor, padding: Padding, return_attention: bool) -> tuple[Tensor, Tensor | None]:
        """Run one layer: (tokens, d_model) -> (tokens, d_model). Also return the attention weights, or None."""
        y = self.attention_norm(x) if self.pre_norm else x  # (tokens, d_model)
        y, weights = self.attention(y, padding, return_attention)  # (tokens, d_model), (batch, heads, seq, seq)
        x = self._add(x, y, self.attention_norm)  # (tokens, d_model)
        if self.feed_forward is not None:
            y = self.feed_forward_norm(x) if self.pre_norm else x  # (tokens, d_model)
            x = self._add(x, self.feed_forward(y), self.feed_forward_norm)  # (tokens, d_model)
        return x, weights

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        if self.residual:
            y = x + y  # (tokens, d_model)
        z: Tensor = y if self.pre_norm else norm(y)  # (tokens, d_model)
        return z


def _block_norm(config: EncoderConfig) -> nn.Module:
    return nn.Identity() if config.norm == "none" else _norm(config)


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, config.layer_norm_eps)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The hidden states and attention weights of one batch.

    Attributes:
        hidden_states: The input of the first block, then the output of each block, (batch, seq, d_model) each. The
            last entry is the encoder's result, after the final norm.
        attention_weights: (batch, heads, seq, seq) for each block; empty without `return_attention`.
    """

    hidden_states: list[Tensor]
    attention_weights: list[Tensor]


class Encoder(nn.Module):
    """Embeddings, `n_layers` blocks, and a LayerNorm if the configuration has `final_norm`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_layers))
        self.final_norm = _norm(config) if config.final_norm else nn.Identity()

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode a batch.

        Args:
            inputs: Token ids, int64 (batch, seq), or embeddings, (batch, seq, d_model). The padding on the right may be
                any valid id or any finite numbers.
            attention_mask: int64 (batch, seq): 1 for a token, 0 for padding. A token with a mask of 2 gets a hidden
                state, but no other token attends to this token. The batch has at least one token.

        Returns:
            The last hidden state, (batch, seq, d_model). A token's hidden state depends only on the token's own
            sequence. Hidden states at padded positions are finite and have no meaning.
        """
        return self.inspect(inputs, attention_mask, return_attention=False).hidden_states[-1]

    def inspect(self, inputs: Tensor, attention_mask: Tensor, *, return_attention: bool = True) -> Inspection:
        """Encode a batch as `forward` does, and return the hidden states and attention weights of all blocks."""
        x: Tensor = self.embeddings(inputs)  # (batch, seq, d_model)
        padding = Padding(attention_mask, x.dtype)
        rows = padding.remove(x.reshape(-1, self.config.d_model))  # (tokens, d_model)
        states, attention_weights = [rows], []
        for block in self.blocks:
            rows, weights = block(rows, padding, return_attention)  # (tokens, d_model), (batch, heads, seq, seq)
            states.append(rows)
            if return_attention:
                attention_weights.append(weights)
        states[-1] = self.final_norm(rows)  # (tokens, d_model)
        return Inspection([padding.restore(rows).reshape(x.shape) for rows in states], attention_weights)


def encoder_of(config: EncoderConfig, weights: Callable[[str, tuple[int, ...]], Tensor]) -> Encoder:
    """Build an encoder from existing weights, without initialising or copying weights.

    Args:
        config: The sizes and settings.
        weights: A function that returns the float32 weight with the given name and shape.
    """
    with torch.device("meta"):  # takes no memory, even if a wrong configuration asks for a huge encoder
        encoder = Encoder(config)
    loaded = {name: weights(name, tuple(weight.shape)) for name, weight in encoder.state_dict().items()}
    encoder.load_state_dict(loaded, assign=True)
    return encoder.eval().requires_grad_(False)
