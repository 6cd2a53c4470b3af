"""The transformer encoder of Vaswani et al. 2017, "Attention Is All You Need", and its later variants, in PyTorch.

Token ids go in, or one vector per token; one row of `d_model` numbers per token comes out. The module is written for
inference: it has no dropout. All arithmetic is in the type of the weights, float32 in a bundle.

Sequences of different lengths come as one batch, padded on the right. Attention alone looks beyond a token, so all else
runs on the real tokens only, as rows of one matrix, and padding costs nothing there (as in ModernBERT, Warner et al.
2024). In attention a mask keeps padding out of every real token's result.

In the shapes, `batch` is sequences, `seq` the tokens of the longest one, `tokens` the real tokens of all of them,
`heads` is `n_heads`, and `d_k` is `d_model / n_heads`.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from encserve_export.models.own.config import EncoderConfig

# Tables are computed even where a module is made without memory for its weights: see `encoder_of`.
_TABLES = torch.device("cpu")


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """The fixed position table of Vaswani et al. 2017, section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) and PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model)).

    Args:
        n_positions: Rows of the table.
        d_model: Its columns, an even number.

    Returns:
        float32 (n_positions, d_model), computed in float64: in float32 the angle of a late position is off by 1e-5.
    """
    position = torch.arange(n_positions, dtype=torch.float64, device=_TABLES).unsqueeze(1)  # (n_positions, 1)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=_TABLES) / d_model  # (d_model / 2)
    angle = position / torch.pow(10000.0, exponent)  # (n_positions, d_model / 2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()  # (n_positions, d_model)


class Padding:
    """Where the real tokens of a batch are; made once per batch and shared by all blocks.

    Attributes:
        bias: (batch, 1, 1, seq), what is added to attention scores so that no token attends to padding: 0 for a token
            (1 in the mask), the lowest finite number for padding (0) and for a token that is not to be seen (2). After
            softmax that gives exactly 0, as -∞ would, but where a sequence is all padding it does not turn into NaN.
        places: (tokens), where in its sequence each token stands.
    """

    def __init__(self, attention_mask: Tensor, dtype: torch.dtype) -> None:
        is_token, is_hidden = attention_mask != 0, attention_mask != 1  # (batch, seq) both
        lowest = torch.finfo(dtype).min
        self.bias = torch.zeros((), dtype=dtype).masked_fill(is_hidden[:, None, None, :], lowest)  # (batch, 1, 1, seq)
        # Which positions are tokens, and which token stands at each position. Padding is given the token before it.
        flat = is_token.reshape(-1).long()  # (batch·seq)
        self._tokens = flat.nonzero().squeeze(1)  # (tokens)
        self._is_token = is_token
        self.places = self._tokens % attention_mask.shape[1]  # (tokens)
        self._at = (flat.cumsum(0) - 1).clamp(min=0)  # (batch·seq)

    def remove(self, x: Tensor) -> Tensor:
        """Takes the rows of real tokens: (batch·seq, n) -> (tokens, n)."""
        return x.index_select(0, self._tokens)  # (tokens, n)

    def restore(self, rows: Tensor) -> Tensor:
        """Puts each token back at its position: (tokens, n) -> (batch·seq, n); padding repeats the token before it."""
        return rows.index_select(0, self._at)  # (batch·seq, n)

    def transpose_heads(self, heads: Tensor) -> Tensor:
        """Puts the heads of each token side by side: (batch, heads, seq, d_k) -> (tokens, heads·d_k)."""
        n_heads, d_k = heads.shape[1], heads.shape[3]
        return self.remove(heads.transpose(1, 2).reshape(-1, n_heads * d_k))  # (tokens, heads·d_k)

    def reshape_heads(self, heads: Tensor) -> Tensor:
        """Reshapes each sequence's own (heads, length, d_k) to (length, heads·d_k), in the order of the memory.

        Row i of a sequence holds the parts i·heads to i·heads + heads - 1 of its heads·length parts of d_k numbers.
        Part p is of head p // length, at position p % length. Padding has no parts.

        Args:
            heads: (batch, heads, seq, d_k).

        Returns:
            (tokens, heads·d_k).
        """
        n_heads, seq, d_k = heads.shape[1], heads.shape[2], heads.shape[3]
        sequences = self._tokens // seq  # (tokens)
        lengths = self._is_token.long().sum(dim=1).index_select(0, sequences)[:, None]  # (tokens, 1)
        parts = self.places[:, None] * n_heads + torch.arange(n_heads)  # (tokens, heads)
        rows = (sequences[:, None] * n_heads + parts // lengths) * seq + parts % lengths  # (tokens, heads)
        return heads.reshape(-1, d_k).index_select(0, rows.reshape(-1)).reshape(-1, n_heads * d_k)


class Embeddings(nn.Module):
    """Tokens, positions and token types, summed: x = E[id]·(√d_model) + P[position] (+ T[0]).

    Where the input is embeddings they stand for E[id]. A LayerNorm follows if the configuration asks for one.
    """

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
        self.types = nn.Parameter(torch.empty(config.n_token_types, config.d_model)) if config.n_token_types else None
        self.norm = _norm(config) if config.embedding_norm else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeds tokens.

        Args:
            inputs: Token ids, int64 (batch, seq), or embeddings, (batch, seq, d_model).

        Returns:
            (batch, seq, d_model).
        """
        x: Tensor = self.tokens(inputs) if self.config.input == "token_ids" else inputs  # (batch, seq, d_model)
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.d_model)  # (batch, seq, d_model)
        if self.config.position in ("sinusoidal", "learned"):
            x = x + self._positions(inputs)  # (batch, seq, d_model)
        if self.types is not None:
            x = x + self.types[0]  # (batch, seq, d_model)
        y: Tensor = self.norm(x)  # (batch, seq, d_model)
        return y

    def _positions(self, inputs: Tensor) -> Tensor:
        """The rows of the position table: (seq, d_model), or (batch, seq, d_model) where they depend on the ids."""
        first = self.config.position_offset
        if not self.config.pad_takes_no_position:
            return self.positions[first : first + inputs.shape[1]]  # (seq, d_model)
        # Hugging Face, create_position_ids_from_input_ids: a pad id takes the row before the first and is not counted.
        counted = (inputs != self.config.pad_token_id).long()  # (batch, seq)
        index = counted.cumsum(dim=1) * counted + (first - 1)  # (batch, seq)
        return functional.embedding(index, self.positions)  # (batch, seq, d_model)


class SelfAttention(nn.Module):
    """Multi-head self-attention, Vaswani et al. 2017, section 3.2.

    head_h = softmax(Q_h·K_hᵀ / √d_k)·V_h. The heads are merged as the configuration says and go through one linear
    layer. The projections to Q, K and V are one layer; its output holds the three after one another.
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
        """Lets every token attend to every other token of its sequence.

        Args:
            x: (tokens, d_model).
            padding: The positions of the tokens.
            return_attention: Whether to return the attention weights. PyTorch then holds all of them. Otherwise it
                computes them in small parts, and long sequences fit into memory.

        Returns:
            (tokens, d_model), and the attention weights: (batch, heads, seq, seq), of which each row sums to 1.
        """
        bias = padding.bias  # (batch, 1, 1, seq)
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
    """The position-wise network, Vaswani et al. 2017, section 3.3: W₂·f(W₁·x + b₁) + b₂, for every token alone.

    f is max(0, x), or the GELU of Hendrycks & Gimpel 2016: x·Φ(x), or x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), or the
    SiLU x·σ(x).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.activation = _activation(config)
        self.outer = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each row: (tokens, d_model) -> (tokens, d_model)."""
        y: Tensor = self.outer(self.activation(self.inner(x)))  # (tokens, d_model)
        return y


def _activation(config: EncoderConfig) -> nn.Module:
    if config.activation == "relu":
        return nn.ReLU()
    if config.activation == "silu":
        return nn.SiLU()
    return nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")


class EncoderBlock(nn.Module):
    """One layer: attention, then feed-forward, each with a residual connection and a LayerNorm.

    Post-norm (Vaswani et al. 2017): x ← LayerNorm(x + f(x)). Pre-norm (Xiong et al. 2020): x ← x + f(LayerNorm(x)).
    The configuration may leave out the norms, the residual connections, and the feed-forward part.
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
        """Runs one layer: (tokens, d_model) -> (tokens, d_model), and the attention weights of `SelfAttention`."""
        y, weights = self.attention(self._before(self.attention_norm, x), padding, return_attention)
        x = self._after(self.attention_norm, x, y)  # (tokens, d_model)
        if self.feed_forward is not None:
            y = self.feed_forward(self._before(self.feed_forward_norm, x))  # (tokens, d_model)
            x = self._after(self.feed_forward_norm, x, y)  # (tokens, d_model)
        return x, weights

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """What f is given of x: (tokens, d_model) both."""
        y: Tensor = norm(x) if self.pre_norm else x  # (tokens, d_model)
        return y

    def _after(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What becomes of x and y, which is what f gave: (tokens, d_model) all."""
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
    """What happens inside an encoder.

    Attributes:
        hidden_states: (batch, seq, d_model) each: what enters the first block, then what leaves each block; after the
            last one the norm that follows it has been applied, so that it is the encoder's own result.
        attention_weights: (batch, heads, seq, seq) for each block; empty where they were not kept.
    """

    hidden_states: list[Tensor]
    attention_weights: list[Tensor]


class Encoder(nn.Module):
    """Embeddings, `n_layers` blocks, and a last LayerNorm if the configuration asks for one."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_layers))
        self.final_norm = _norm(config) if config.final_norm else nn.Identity()

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        """Encodes a batch.

        Args:
            inputs: Token ids, int64 (batch, seq), padded on the right with any valid id; or, where the configuration
                says so, embeddings, (batch, seq, d_model), padded with anything finite.
            attention_mask: int64 (batch, seq), 1 for a token, 0 for padding, 2 for a token that none attends to; at
                least one token.

        Returns:
            last_hidden_state: (batch, seq, d_model). A token's row depends on its own sequence alone. The rows at
            padded positions are finite and mean nothing.
        """
        return self.inspect(inputs, attention_mask, return_attention=False).hidden_states[-1]

    def inspect(self, inputs: Tensor, attention_mask: Tensor, *, return_attention: bool = True) -> Inspection:
        """Encodes a batch and keeps what happens on the way; takes what `forward` does."""
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
    """An encoder of weights that are there already: they are neither copied, nor initialised before.

    Args:
        config: Its sizes and choices.
        weights: Gives the weight of a name and a shape, in float32.
    """
    with torch.device("meta"):  # sizes that the weights do not have may be larger than any memory
        encoder = Encoder(config)
    given = {name: weights(name, tuple(weight.shape)) for name, weight in encoder.state_dict().items()}
    encoder.load_state_dict(given, assign=True)
    return encoder.eval().requires_grad_(False)
