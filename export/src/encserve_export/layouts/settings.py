"""What config.json of Hugging Face says, in the terms of the Encoder."""

from collections.abc import Mapping
from typing import Any

from encserve_export.config import Activation
from encserve_export.errors import CheckpointFileError, UnsupportedModelError

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


def read_setting(settings: Mapping[str, Any], name: str) -> Any:
    """A setting that has to be there; raises CheckpointFileError where it is not."""
    if name not in settings:
        raise CheckpointFileError(f"config.json lacks {name}")
    return settings[name]


def read_pad_token_id(settings: Mapping[str, Any], default: int) -> int:
    """The id that fills a padded batch."""
    value = settings.get("pad_token_id")
    return default if value is None else int(value)


def read_activation(settings: Mapping[str, Any], name: str) -> Activation:
    """The activation that a setting names; raises UnsupportedModelError where the Encoder has none such."""
    value = read_setting(settings, name)
    if value not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{name} must be one of {', '.join(_ACTIVATIONS)}; was {value!r}")
    return _ACTIVATIONS[value]
