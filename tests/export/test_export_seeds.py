"""These tests export checkpoints of full size with random initial weights.

For each layout, the random weights have the same distribution as in the layout's original code.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from state_dicts import LAYOUTS, VARIANTS, state_dict
from torch import nn

from encserve_export import Encoder, EncoderConfig, Target, export_checkpoint

PLAIN = {"scale_embedding": False, "norm": "post", "activation": "relu", "position": "sinusoidal"}
# For each layout of weights, the settings of the original code.
SETTINGS: dict[str, dict[str, Any]] = {
    "per-head-linears": {"n_layers": 8},
    "raw-matrices": {"d_model": 16, "n_heads": 2, "d_ff": 64, "n_layers": 2, "scale_embedding": True},
    "fused-qkv": {"n_layers": 5},
    "attention-only": {},
    "split-qkv": {"n_layers": 6, "activation": "gelu", "final_norm": True, "scale_embedding": True},
    "torch-native": {"n_layers": 6, "norm": "pre", "activation": "gelu", "final_norm": True},
}
FULL = {"d_model": 512, "n_heads": 8, "d_ff": 2048, "vocab_size": 1000, "max_sequence_tokens": 64}
# The standard deviation of the initial weights. These two layouts use plain matrices. The other layouts use PyTorch
# modules with PyTorch's initial weights.
DEVIATIONS = {"attention-only": 1.0, "raw-matrices": 0.1}


def draw(layout: str, encoder: Encoder) -> None:
    """Fill an encoder with random weights, from the same distribution as in the layout's original code."""
    torch.manual_seed(0)
    deviation = DEVIATIONS.get(layout)
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear) and deviation is not None:
                module.weight.normal_(std=deviation)
        if layout == "raw-matrices":
            encoder.embeddings.tokens.weight.normal_(std=0.1)


@pytest.mark.weekly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(900)
def test_initial_weights_of_each_layout(layout: str, models: Path, tmp_path: Path) -> None:
    fields = PLAIN | FULL | SETTINGS[layout] | VARIANTS.get(layout, {})
    encoder = Encoder(EncoderConfig.from_mapping(fields)).eval().requires_grad_(False)
    draw(layout, encoder)
    table = {"embedding.weight": encoder.embeddings.tokens.weight.clone()}
    save_file(state_dict(layout, encoder) | table, tmp_path / "checkpoint.safetensors")
    target = Target(model_repository=models, name=layout)
    exported = export_checkpoint(tmp_path / "checkpoint.safetensors", target, fields=fields)
    assert (exported.manifest.source.description, exported.manifest.encoder.d_model) == (layout, fields["d_model"])
