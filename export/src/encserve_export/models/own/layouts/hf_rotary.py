"""The layouts that Hugging Face uses for encoders with rotary positions: NomicBERT, GTE and ModernBERT."""

from collections.abc import Mapping
from typing import Any

from encserve_export.ground.errors import CheckpointFileError, UnsupportedModelError
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.layouts.base import Layout
from encserve_export.models.own.layouts.settings import names_of, read_activation, read_pad_token_id, read_size

# The names that each model's authors gave, under which transformers saves it too.
_NOMIC_BERT = {
    "embeddings.tokens": ("embeddings.word_embeddings",),
    "embeddings.norm": ("emb_ln",),
    "attention.qkv": ("encoder.layers.{}.attn.Wqkv",),
    "attention.output": ("encoder.layers.{}.attn.out_proj",),
    "attention_norm": ("encoder.layers.{}.norm1",),
    "feed_forward.inner": ("encoder.layers.{}.mlp.fc12", "encoder.layers.{}.mlp.fc11"),
    "feed_forward.outer": ("encoder.layers.{}.mlp.fc2",),
    "feed_forward_norm": ("encoder.layers.{}.norm2",),
}
_GTE = {
    "embeddings.tokens": ("embeddings.word_embeddings",),
    "embeddings.norm": ("embeddings.LayerNorm",),
    "attention.qkv": ("encoder.layer.{}.attention.qkv_proj",),
    "attention.output": ("encoder.layer.{}.attention.o_proj",),
    "attention_norm": ("encoder.layer.{}.attn_ln",),
    "feed_forward.inner": ("encoder.layer.{}.mlp.up_gate_proj",),
    "feed_forward.outer": ("encoder.layer.{}.mlp.down_proj",),
    "feed_forward_norm": ("encoder.layer.{}.mlp_ln",),
}
_MODERNBERT = {
    "embeddings.tokens": ("embeddings.tok_embeddings",),
    "embeddings.norm": ("embeddings.norm",),
    "attention.qkv": ("layers.{}.attn.Wqkv",),
    "attention.output": ("layers.{}.attn.Wo",),
    "attention_norm": ("layers.{}.attn_norm",),
    "feed_forward.inner": ("layers.{}.mlp.Wi",),
    "feed_forward.outer": ("layers.{}.mlp.Wo",),
    "feed_forward_norm": ("layers.{}.mlp_norm",),
    "final_norm": ("final_norm",),
}
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "nomic_bert": _NOMIC_BERT,
    "gte": _GTE,
    "modernbert": _MODERNBERT,
}
MODEL_TYPES = tuple(_NAMES)


def read_layout(settings: Mapping[str, Any]) -> Layout:
    """Reads config.json of one of `MODEL_TYPES`; raises what `hf_bert.read_layout` does."""
    model_type = settings["model_type"]
    try:
        config = _modernbert_config(settings) if model_type == "modernbert" else _rotary_config(settings)
    except CheckpointFileError as error:  # as in config.json of the authors' own code; transformers has defaults
        raise UnsupportedModelError(str(error)) from error
    weights = names_of(config, _NAMES[model_type])
    return Layout(
        config=config,
        description=str((settings.get("architectures") or [model_type])[0]),
        names=weights,
        ignored=("pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.", "score.", "qa_outputs."),
        swapped=frozenset(name for name in weights if model_type == "gte" and name.endswith("inner.weight")),
    )


def _rotary_config(settings: Mapping[str, Any]) -> EncoderConfig:
    is_gte = settings["model_type"] == "gte"
    d_model, n_heads = read_size(settings, "hidden_size"), read_size(settings, "num_attention_heads")
    head_dim = settings.get("head_dim")
    if head_dim is not None and head_dim * n_heads != d_model:
        raise UnsupportedModelError(f"head_dim must be hidden_size / num_attention_heads; was {head_dim!r}")
    return EncoderConfig(
        vocab_size=read_size(settings, "vocab_size"),
        d_model=d_model,
        n_heads=n_heads,
        d_ff=read_size(settings, "intermediate_size"),
        n_layers=read_size(settings, "num_hidden_layers"),
        max_sequence_tokens=read_size(settings, "max_position_embeddings"),
        activation=read_activation(settings, "hidden_act"),
        gated=True,
        inner_bias=False,
        outer_bias=is_gte,
        attention_bias=is_gte,
        position="rotary",
        rotary_base=_rotary_base(
            settings.get("rope_scaling") or settings.get("rope_parameters") or {},
            settings.get("rope_theta", 160_000.0 if is_gte else 1000.0),
        ),
        embedding_norm=True,
        n_token_types=settings.get("type_vocab_size", 1 if is_gte else 2),
        layer_norm_eps=settings.get("layer_norm_eps", 1e-12),
        pad_token_id=read_pad_token_id(settings, 1 if is_gte else 0),
    )


def _modernbert_config(settings: Mapping[str, Any]) -> EncoderConfig:
    n_layers = read_size(settings, "num_hidden_layers")
    every = settings.get("global_attn_every_n_layers", 3)
    types = settings.get("layer_types")
    if types is not None:
        every = next((i for i, kind in enumerate(types) if i and kind == "full_attention"), n_layers)
        usual = ["sliding_attention" if i % every else "full_attention" for i in range(n_layers)]
        if types != usual:
            raise UnsupportedModelError(f"layer_types must have full_attention every so many layers; was {types}")
    window = settings.get("local_attention", 128) // 2
    if not window:
        raise UnsupportedModelError(f"local_attention must be at least 2; was {settings['local_attention']}")
    rope = settings.get("rope_parameters") or {}
    if settings.get("rope_scaling") or not set(rope) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            "rope_parameters must be of full_attention and sliding_attention, without rope_scaling; was "
            f"{settings.get('rope_scaling') or rope}"
        )
    full, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    return EncoderConfig(
        vocab_size=read_size(settings, "vocab_size"),
        d_model=read_size(settings, "hidden_size"),
        n_heads=read_size(settings, "num_attention_heads"),
        d_ff=read_size(settings, "intermediate_size"),
        n_layers=n_layers,
        max_sequence_tokens=read_size(settings, "max_position_embeddings"),
        activation=read_activation(settings, "hidden_activation"),
        gated=True,
        inner_bias=settings.get("mlp_bias", False),
        outer_bias=settings.get("mlp_bias", False),
        attention_bias=settings.get("attention_bias", False),
        norm="pre",
        norm_bias=settings.get("norm_bias", False),
        first_attention_norm=False,
        final_norm=True,
        position="rotary",
        rotary_base=_rotary_base(full, settings.get("global_rope_theta", 160_000.0)),
        local_rotary_base=_rotary_base(local, settings.get("local_rope_theta", 10_000.0)),
        window=window,
        global_every=every,
        embedding_norm=True,
        layer_norm_eps=settings.get("norm_eps", 1e-5),
        pad_token_id=read_pad_token_id(settings, 50283),
    )


def _rotary_base(rope: Mapping[str, Any], default: float) -> float:
    """What one kind of rotary positions has as its base; refuses what bends them for longer texts."""
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedModelError(f'rope_type must be "default"; was {dict(rope)}')
    return float(rope.get("rope_theta", default))
