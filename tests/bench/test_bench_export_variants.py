"""Every other way of writing an encoder that the bench compares computes the same."""

from pathlib import Path

import numpy as np
import pytest
import torch
from export_variants import VARIANTS, dynamo, dynamo23, largest_difference, make_feed, open_session, write_variant

from encserve_export.config import EncoderConfig
from encserve_export.encoder import Encoder

CONFIG = EncoderConfig(
    vocab_size=50, d_model=16, n_heads=2, d_ff=32, n_layers=2, activation="gelu", attention_bias=True
)
# The others need onnxscript, which only the bench does.
TRACED = [name for name, (write, _) in VARIANTS.items() if write not in (dynamo, dynamo23)]


@pytest.mark.parametrize("name", TRACED)
def test_a_variant_computes_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = Encoder(CONFIG).eval().requires_grad_(False)
    for parameter in encoder.parameters():
        parameter.normal_(std=0.3)
    feeds = [make_feed(lengths, 50, np.random.default_rng(0)) for lengths in ([7], [5, 3, 9])]
    for variant in ("exported", name):
        write_variant(variant, encoder, tmp_path / f"{variant}.onnx")
    sessions = [open_session(tmp_path / f"{variant}.onnx", threads=1) for variant in ("exported", name)]
    assert largest_difference(sessions[1], sessions[0], feeds) < 1e-5
