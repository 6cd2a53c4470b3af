"""Encoders with random weights, to measure sizes and for tests."""

import math

import torch
from torch import Tensor, nn

from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder


def random_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return an encoder with random weights; the same seed gives the same weights.

    Matrices are Xavier-uniform (Glorot & Bengio 2010), biases are 0 and LayerNorms the identity. Embeddings are normal.
    They enter the first block with variance 1, as sinusoids do nearly, so tokens and positions have similar weight.
    """
    encoder = Encoder(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, nn.Linear):
                _xavier(module.weight, config.d_model, random)
                if module.bias is not None:
                    module.bias.zero_()
        embeddings = encoder.embeddings
        if config.input == "token_ids":
            embeddings.tokens.weight.normal_(
                std=1 / math.sqrt(config.d_model) if config.scale_embedding else 1, generator=random
            )
        if config.position == "learned":
            embeddings.positions.normal_(generator=random)
    return encoder.eval().requires_grad_(False)


def _xavier(weight: Tensor, d_model: int, random: torch.Generator) -> None:
    """Fill one matrix; the stacked matrices of Q, K and V are filled separately."""
    is_qkv = weight.shape == (3 * d_model, d_model)
    for matrix in weight.chunk(3) if is_qkv else (weight,):
        nn.init.xavier_uniform_(matrix, generator=random)
