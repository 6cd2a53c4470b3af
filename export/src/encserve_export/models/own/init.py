"""Builds encoders with random weights, for tests and for measuring models of a chosen size."""

import math

import torch
from torch import Tensor, nn

from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder


def random_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return an encoder with random weights. Equal seeds produce equal weights.

    Weight matrices are Xavier-uniform (Glorot & Bengio 2010). Biases are 0, and every LayerNorm is the identity.

    Token embeddings and learned positions are normally distributed. Each of the two has variance 1 at the input of the
    first block. Sinusoidal positions have a mean square of 0.5. So neither tokens nor positions dominate the sum.
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
    """Fill one matrix. If the matrix stacks the weights of Q, K and V, fill each of the three separately."""
    is_qkv = weight.shape == (3 * d_model, d_model)
    for matrix in weight.chunk(3) if is_qkv else (weight,):
        nn.init.xavier_uniform_(matrix, generator=random)
