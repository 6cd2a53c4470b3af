"""Our encoder computes the same hidden states as the formulas.

Other tests compare our encoder with golden checkpoints, which have hidden states from other encoders.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from encserve_export import Encoder, EncoderConfig
from encserve_export.models.own.encoder import EncoderBlock, FeedForward, sinusoids
from encserve_export.models.own.init import random_encoder


def randomize_norms(encoder: Encoder) -> Encoder:
    """Give random values to norms and biases. So the hidden states change if the encoder skips a norm or a bias."""
    random = torch.Generator().manual_seed(1)
    for name, parameter in encoder.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=random))
    return encoder


def pad(sequences: list[Tensor], filler: int) -> tuple[Tensor, Tensor]:
    """Pad sequences. Return the ids and the mask, both int64 (batch, seq)."""
    ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=filler)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return ids, mask


def test_gelu_tanh_is_the_approximation(tiny: EncoderConfig) -> None:
    exact, approximate = (
        FeedForward(EncoderConfig.from_mapping(dataclasses.asdict(tiny) | {"activation": activation})).activation
        for activation in ("gelu", "gelu_tanh")
    )
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(exact(x), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    torch.testing.assert_close(
        approximate(x), x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    )


def test_sinusoids_follow_the_formula() -> None:
    """Compare the position table with the formula.

    If the code computed the table in float32, late positions would be wrong by 1e-5. The comparisons with golden
    checkpoints do not notice such an error.
    """
    table = sinusoids(500, 8)
    for position in (0, 1, 17, 499):
        for column in range(8):
            angle = position / 10000 ** (2 * (column // 2) / 8)
            want = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert table[position, column].item() == pytest.approx(want, abs=1e-7)


def test_embeddings_are_summed_as_configured(tiny: EncoderConfig) -> None:
    config = dataclasses.replace(tiny, position="learned", position_offset=3, scale_embedding=True)
    embeddings = random_encoder(config, 0).embeddings
    ids = torch.tensor([[5, 9]])
    want = embeddings.tokens.weight[ids[0]] * 4 + embeddings.positions[3:5]
    torch.testing.assert_close(embeddings(ids)[0], want)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["post", "pre", "none"])
def test_a_block_without_some_parts_follows_the_formula(tiny: EncoderConfig, norm: str, residual: bool) -> None:
    """Compare a block with the formula.

    The block has no biases and no feed-forward layer. In some cases, the block also has no norms or no residual
    connections.
    """
    fields = {"norm": norm, "residual": residual, "attention_bias": False, "d_ff": 0, "n_layers": 1}
    encoder = randomize_norms(random_encoder(EncoderConfig.from_mapping(dataclasses.asdict(tiny) | fields), 0))
    assert not any("feed_forward" in name for name in encoder.state_dict())
    assert not any("attention.qkv.bias" in name or "output.bias" in name for name in encoder.state_dict())
    block = encoder.blocks[0]
    assert isinstance(block, EncoderBlock)
    ids = torch.tensor([[5, 9, 2]])
    x = encoder.embeddings(ids)[0]
    y = block.attention_norm(x) if norm == "pre" else x
    q, k, v = (part.reshape(3, 2, 8).transpose(0, 1) for part in (y @ block.attention.qkv.weight.T).chunk(3, dim=-1))
    heads = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(8), dim=-1) @ v
    y = heads.transpose(0, 1).reshape(3, 16) @ block.attention.output.weight.T
    y = x + y if residual else y
    want = block.attention_norm(y) if norm == "post" else y
    torch.testing.assert_close(encoder(ids, torch.ones_like(ids))[0], want)


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    filler=st.integers(0, 49),
    norm=st.sampled_from(["post", "pre"]),
    seed=st.integers(0, 3),
)
def test_padding_and_batches_do_not_change_rows(lengths: list[int], filler: int, norm: str, seed: int) -> None:
    fields = {"vocab_size": 50, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 2, "max_sequence_tokens": 24}
    encoder = random_encoder(EncoderConfig.from_mapping(fields | {"norm": norm}), seed)
    random = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 50, (length,), generator=random) for length in lengths]
    batch = encoder(*pad(sequences, filler))
    assert torch.isfinite(batch).all()
    for row, sequence in zip(batch, sequences, strict=True):
        alone = encoder(sequence[None], torch.ones_like(sequence)[None])[0]
        error = (row[: len(sequence)] - alone).norm(dim=-1) / alone.norm(dim=-1)
        assert error.max() <= 1e-5


def test_a_sequence_of_padding_alone_stays_finite(tiny: EncoderConfig) -> None:
    encoder = random_encoder(tiny, 0)
    rows = encoder(torch.zeros(3, 4, dtype=torch.int64), torch.tensor([[0] * 4, [1] * 4, [0] * 4]))
    assert torch.isfinite(rows).all()


def test_random_weights_follow_the_seed(tiny: EncoderConfig) -> None:
    first, again, other = (random_encoder(tiny, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embeddings.tokens.weight"], other["embeddings.tokens.weight"])
    assert not torch.equal(first["blocks.0.attention.qkv.weight"], other["blocks.0.attention.qkv.weight"])
