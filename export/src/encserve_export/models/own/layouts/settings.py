"""What config.json of Hugging Face says, and how its checkpoints name weights, in the terms of the Encoder."""

from collections.abc import Mapping
from typing import Any

from encserve_export.ground.errors import CheckpointFileError, ConfigError, UnsupportedModelError
from encserve_export.models.own.config import Activation, EncoderConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def read_size(settings: Mapping[str, Any], name: str) -> int:
    """A whole number that has to be there; raises CheckpointFileError or ConfigError where it is not."""
    return _whole(name, _read(settings, name))


def read_pad_token_id(settings: Mapping[str, Any], default: int) -> int:
    """The id that fills a padded batch; raises ConfigError where that is no whole number."""
    value = settings.get("pad_token_id")
    return default if value is None else _whole("pad_token_id", value)


def read_activation(settings: Mapping[str, Any], name: str) -> Activation:
    """The activation that a setting names; raises UnsupportedModelError where the Encoder has none such."""
    value = _read(settings, name)
    if value not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{name} must be one of {', '.join(_ACTIVATIONS)}; was {value!r}")
    return _ACTIVATIONS[value]


def names_of(config: EncoderConfig, templates: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """For each weight of the Encoder, the checkpoint's names for it.

    Args:
        config: The encoder's sizes and choices.
        templates: For each layer of the Encoder, the checkpoint's names; "{}" stands for the number of the block.
    """
    names: dict[str, tuple[str, ...]] = {}
    for target, sources in templates.items():
        if "{}" not in sources[0]:
            names[target] = sources
            continue
        first = 1 if target == "attention_norm" and not config.first_attention_norm else 0
        for index in range(first, config.n_layers):
            names[f"blocks.{index}.{target}"] = tuple(source.format(index) for source in sources)
    weights = {
        f"{target}.{kind}": tuple(f"{source}.{kind}" for source in sources)
        for target, sources in names.items()
        for kind in (("weight", "bias") if _has_bias(config, target) else ("weight",))
    }
    if config.n_token_types:
        weights["embeddings.types"] = ("embeddings.token_type_embeddings.weight",)
    return weights


def _has_bias(config: EncoderConfig, target: str) -> bool:
    for ending, has_bias in (
        ("tokens", False),
        ("norm", config.norm_bias),
        ("inner", config.inner_bias),
        ("outer", config.outer_bias),
    ):
        if target.endswith(ending):
            return has_bias
    return config.attention_bias


def _read(settings: Mapping[str, Any], name: str) -> Any:
    if name not in settings:
        raise CheckpointFileError(f"config.json lacks {name}")
    return settings[name]


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ConfigError(f"{name} must be an integer; was {value!r}")
    return value
