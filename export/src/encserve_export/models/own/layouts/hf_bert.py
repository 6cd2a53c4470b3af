"""The layouts that Hugging Face uses for BERT, RoBERTa, XLM-RoBERTa and DistilBERT.

Read from config.json and the names in the weights file; nothing of the `transformers` package is imported.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from encserve_export.ground.errors import UnsupportedModelError, WeightNamesError
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.layouts import hf_rotary
from encserve_export.models.own.layouts.base import Layout
from encserve_export.models.own.layouts.settings import names_of, read_activation, read_pad_token_id, read_size

_BERT = ("bert",)
_ROBERTA = ("roberta", "xlm-roberta", "camembert")
_DISTILBERT = ("distilbert",)
MODEL_TYPES = (*_BERT, *_ROBERTA, *_DISTILBERT, *hf_rotary.MODEL_TYPES)

_EMBEDDINGS = {"embeddings.tokens": ("embeddings.word_embeddings",), "embeddings.norm": ("embeddings.LayerNorm",)}
_BERT_NAMES = {
    **_EMBEDDINGS,
    "attention.qkv": tuple(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")),
    "attention.output": ("encoder.layer.{}.attention.output.dense",),
    "attention_norm": ("encoder.layer.{}.attention.output.LayerNorm",),
    "feed_forward.inner": ("encoder.layer.{}.intermediate.dense",),
    "feed_forward.outer": ("encoder.layer.{}.output.dense",),
    "feed_forward_norm": ("encoder.layer.{}.output.LayerNorm",),
}
_DISTILBERT_NAMES = {
    **_EMBEDDINGS,
    "attention.qkv": tuple(f"transformer.layer.{{}}.attention.{name}" for name in ("q_lin", "k_lin", "v_lin")),
    "attention.output": ("transformer.layer.{}.attention.out_lin",),
    "attention_norm": ("transformer.layer.{}.sa_layer_norm",),
    "feed_forward.inner": ("transformer.layer.{}.ffn.lin1",),
    "feed_forward.outer": ("transformer.layer.{}.ffn.lin2",),
    "feed_forward_norm": ("transformer.layer.{}.output_layer_norm",),
}
# The pooler and the heads of the tasks, and index buffers that older versions saved.
_IGNORED = (
    "pooler.",
    "cls.",
    "lm_head.",
    "classifier.",
    "pre_classifier.",
    "qa_outputs.",
    "linear.",  # the projection of a ColBERT
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
)


def read_layout(settings: Mapping[str, Any]) -> Layout:
    """Reads config.json.

    Args:
        settings: config.json, parsed.

    Raises:
        UnsupportedModelError: The model computes something the Encoder does not.
        CheckpointFileError: A setting is missing.
        ConfigError: A size is out of range.
    """
    model_type = settings.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(f"model_type must be one of {', '.join(MODEL_TYPES)}; was {model_type!r}")
    _refuse_variants(settings)
    if model_type in hf_rotary.MODEL_TYPES:
        return hf_rotary.read_layout(settings)
    is_distilbert = model_type in _DISTILBERT
    config = _distilbert_config(settings) if is_distilbert else _bert_config(settings)
    weights = names_of(config, _DISTILBERT_NAMES if is_distilbert else _BERT_NAMES)
    return Layout(
        config=config,
        description=str((settings.get("architectures") or [model_type])[0]),
        names={**weights, "embeddings.positions": ("embeddings.position_embeddings.weight",)},
        ignored=_IGNORED,
    )


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors to what the bare model calls them.

    A model saved with a task's head has its own name before every weight ("bert.embeddings…"), and weights converted
    from TensorFlow call LayerNorm's weight and bias "gamma" and "beta".

    Raises:
        WeightNamesError: Two names become one.
    """
    plain: dict[str, str] = {}
    for name in tensors:
        if (other := plain.setdefault(_plain_name(name), name)) != name:
            raise WeightNamesError(f"{other} and {name} are two names of one weight; save one of them")
    return {new: tensors[name] for new, name in plain.items()}


def _plain_name(name: str) -> str:
    name = re.sub(r"^(bert|roberta|distilbert|nomic_bert|gte|new|model)\.", "", name)
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


def _refuse_variants(settings: Mapping[str, Any]) -> None:
    usual = "rope" if settings["model_type"] == "gte" else "absolute"
    position_type = settings.get("position_embedding_type", usual)
    if position_type != usual:
        raise UnsupportedModelError(f'position_embedding_type must be "{usual}"; was {position_type!r}')
    for name in ("is_decoder", "add_cross_attention"):
        if settings.get(name, False):
            raise UnsupportedModelError(f"{name} must be false, this exports encoders; was {settings[name]!r}")


def _bert_config(settings: Mapping[str, Any]) -> EncoderConfig:
    is_roberta = settings["model_type"] in _ROBERTA
    pad_token_id = read_pad_token_id(settings, 1 if is_roberta else 0)
    position_offset = pad_token_id + 1 if is_roberta else 0
    return EncoderConfig(
        vocab_size=read_size(settings, "vocab_size"),
        d_model=read_size(settings, "hidden_size"),
        n_heads=read_size(settings, "num_attention_heads"),
        d_ff=read_size(settings, "intermediate_size"),
        n_layers=read_size(settings, "num_hidden_layers"),
        max_sequence_tokens=read_size(settings, "max_position_embeddings") - position_offset,
        activation=read_activation(settings, "hidden_act"),
        position="learned",
        embedding_norm=True,
        n_token_types=settings.get("type_vocab_size", 2),
        layer_norm_eps=settings.get("layer_norm_eps", 1e-12),
        pad_token_id=pad_token_id,
        position_offset=position_offset,
        pad_takes_no_position=is_roberta,
    )


def _distilbert_config(settings: Mapping[str, Any]) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=read_size(settings, "vocab_size"),
        d_model=read_size(settings, "dim"),
        n_heads=read_size(settings, "n_heads"),
        d_ff=read_size(settings, "hidden_dim"),
        n_layers=read_size(settings, "n_layers"),
        max_sequence_tokens=read_size(settings, "max_position_embeddings"),
        activation=read_activation(settings, "activation"),
        # Sinusoidal DistilBERTs save their table like a learned one.
        position="learned",
        embedding_norm=True,
        # The value is fixed in the reference code.
        layer_norm_eps=1e-12,
        pad_token_id=read_pad_token_id(settings, 0),
    )
