"""A new EncoderConfig checks each of its fields. The error names the field and the value."""

from typing import Any

import pytest

from encserve_export import EncoderConfig, ExportError
from encserve_export.core.errors import ConfigError


def test_defaults_are_the_encoder_of_the_paper_with_eight_layers() -> None:
    config = EncoderConfig(vocab_size=100)
    assert (config.d_model, config.n_heads, config.d_k, config.d_ff, config.n_layers) == (512, 8, 64, 2048, 8)
    assert (config.activation, config.norm, config.position) == ("relu", "post", "sinusoidal")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_heads": 7}, "n_heads must divide d_model; was 7 for 512"),
        ({"vocab_size": 0}, "vocab_size must be at least 1; was 0"),
        ({"d_ff": -4}, "d_ff must be at least 0; was -4"),
        ({"n_layers": 2.0}, "n_layers must be an integer; was 2.0"),
        ({"n_layers": True}, "n_layers must be an integer; was True"),
        ({"pad_token_id": 100}, "pad_token_id must be less than vocab_size, 100; was 100"),
        ({"activation": "swish"}, "activation must be one of relu, gelu, gelu_tanh, silu; was 'swish'"),
        ({"norm": "sandwich"}, "norm must be one of post, pre, none; was 'sandwich'"),
        ({"position": ["learned"]}, "position must be one of sinusoidal, learned, none; was ['learned']"),
        ({"residual": 0}, "residual must be true or false; was 0"),
        ({"attention_bias": None}, "attention_bias must be true or false; was None"),
        ({"final_norm": 1}, "final_norm must be true or false; was 1"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must be a positive number; was 0"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps must be a positive number; was nan"),
        ({"layer_norm_eps": "1e-5"}, "layer_norm_eps must be a positive number; was '1e-5'"),
        ({"d_model": 9, "n_heads": 3}, "d_model must be even for sinusoidal positions; was 9"),
        ({"position": "none", "position_offset": 2}, "position_offset must be 0 without a table of positions; was 2"),
    ],
)
def test_the_error_names_a_field_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EncoderConfig.from_mapping({"vocab_size": 100} | fields)
    assert str(caught.value) == message
    assert isinstance(caught.value, ExportError)


def test_the_error_names_unknown_fields() -> None:
    with pytest.raises(ConfigError, match=r"unknown configuration fields: dropout, layers; known are vocab_size, "):
        EncoderConfig.from_mapping({"vocab_size": 100, "layers": 2, "dropout": 0.1})


def test_the_vocabulary_has_no_default() -> None:
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        EncoderConfig.from_mapping({"d_model": 64})
