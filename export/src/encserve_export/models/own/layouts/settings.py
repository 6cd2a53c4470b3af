"""What config.json of Hugging Face says, in the terms of the Encoder."""

from collections.abc import Mapping
from typing import Any

from encserve_export.ground.errors import CheckpointFileError, ConfigError, UnsupportedModelError
from encserve_export.models.own.config import Activation

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


def _read(settings: Mapping[str, Any], name: str) -> Any:
    if name not in settings:
        raise CheckpointFileError(f"config.json lacks {name}")
    return settings[name]


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ConfigError(f"{name} must be an integer; was {value!r}")
    return value
