"""The modules of sentence-transformers that come after pooling, as modules of PyTorch."""

import inspect
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from encserve_export.ground.errors import CheckpointFileError, UnsupportedModelError
from encserve_export.kinds.recipe import ModuleFacts
from encserve_export.source.weights import holds_weights, read_object, read_weights

M = TypeVar("M", bound=nn.Module)

# What an activation may be: a class of torch.nn that needs no arguments.
_ACTIVATIONS = ("torch.nn.modules.activation.", "torch.nn.modules.linear.Identity")
_TANH = "torch.nn.modules.activation.Tanh"


def read_facts(kind: str, folder: Path) -> ModuleFacts:
    """What the files of a module say of it.

    Raises:
        CheckpointFileError: One of them is unreadable.
    """
    path = folder / "config.json"
    settings = read_object(path) if path.is_file() else {}
    return ModuleFacts(kind, settings, read_weights(folder).tensors if holds_weights(folder) else {})


class Normalize(nn.Module):
    """Scales vectors to length 1; one of zeros stays."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, width) to the same."""
        return nn.functional.normalize(vectors, p=2, dim=-1)


class Dense(nn.Module):
    """A linear layer and an activation, with a way around both where the model has one."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.residual = residual

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, in_features) to (batch, out_features)."""
        made: Tensor = self.activation(self.linear(vectors))
        return made if self.residual is None else made + self.residual(vectors)


def read_dense(folder: Path) -> Dense:
    """Reads a Dense module.

    Raises:
        UnsupportedModelError: Its input is not the sentence's vector, or its activation is code of its own.
        CheckpointFileError: A file is missing, or its sizes are not those of its weights.
    """
    path = folder / "config.json"
    settings = read_object(path)
    for end in ("module_input_name", "module_output_name"):
        if settings.get(end) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(f"{path}: {end} must be sentence_embedding; was {settings[end]!r}")
    sizes = [_size(path, settings, name) for name in ("in_features", "out_features")]
    residual: nn.Module | None = None
    if settings.get("use_residual"):
        residual = nn.Identity() if sizes[0] == sizes[1] else nn.Linear(sizes[0], sizes[1], bias=False)
    linear = nn.Linear(sizes[0], sizes[1], bias=bool(settings.get("bias", True)))
    return _filled(Dense(linear, _activation(path, settings.get("activation_function", _TANH)), residual), folder)


def read_layer_norm(folder: Path) -> nn.LayerNorm:
    """Reads a LayerNorm module.

    Raises:
        CheckpointFileError: A file is missing, or its size is not that of its weights.
    """
    path = folder / "config.json"
    return _filled(nn.LayerNorm(_size(path, read_object(path), "dimension")), folder, prefix="norm.")


def _size(path: Path, settings: dict[str, Any], name: str) -> int:
    size = settings.get(name)
    if type(size) is not int or size < 1:
        raise CheckpointFileError(f"{path} must give {name} as a number from 1; was {size!r}")
    return size


def _activation(path: Path, name: Any) -> nn.Module:
    plain = str(name)
    found = getattr(nn, plain.rpartition(".")[2], None) if plain.startswith(_ACTIVATIONS) else None
    try:
        if not (inspect.isclass(found) and issubclass(found, nn.Module)):
            raise TypeError
        made: nn.Module = found()
    except TypeError:
        raise UnsupportedModelError(
            f"{path}: activation_function must be one of torch.nn that needs no arguments; was {plain}"
        ) from None
    return made


def _filled(module: M, folder: Path, prefix: str = "") -> M:
    """The module with the weights in its folder."""
    found = {name.removeprefix(prefix): tensor.float() for name, tensor in read_weights(folder).tensors.items()}
    try:
        module.load_state_dict(found)
    except RuntimeError as error:
        raise CheckpointFileError(f"{folder}: its weights are not those of its config.json: {error}") from None
    return module
