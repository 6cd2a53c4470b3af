"""Reads a checkpoint's weights. Nothing in them is ever executed: safetensors, or a pickle of tensors alone."""

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from encserve_export.errors import CheckpointFileError, UnsafeWeightsError

# In order of preference; each may also come as several files with an index.
_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclasses.dataclass(frozen=True)
class Weights:
    """A checkpoint's weights.

    Attributes:
        tensors: All tensors, by the checkpoint's own names.
        sha256: SHA-256 of the weights file, in hex; of several, over their bytes in the order of their names.
    """

    tensors: Mapping[str, Tensor]
    sha256: str


def read_json(path: Path) -> Any:
    """Parses a JSON file of the checkpoint.

    Raises:
        CheckpointFileError: The file is missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointFileError(f"{path} cannot be read as JSON: {error}") from error


def read_weights(directory: Path) -> Weights:
    """Reads the weights of a checkpoint directory.

    Raises:
        CheckpointFileError: There are none, or they are unreadable.
        UnsafeWeightsError: A pickle holds more than tensors.
    """
    files = _weights_files(directory)
    tensors: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            raise CheckpointFileError(f"{path} is missing; the index names it")
        tensors.update(_load_safetensors(path) if path.suffix == ".safetensors" else _load_pickle(path))
    return Weights(tensors, _sha256(files))


def _weights_files(directory: Path) -> list[Path]:
    for name in _FILES:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return [directory / part for part in _indexed_names(index)]
    raise CheckpointFileError(
        f"{directory} holds no weights; looked for {' and '.join(_FILES)}, alone or with an index"
    )


def _indexed_names(index: Path) -> list[str]:
    try:
        names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    except (TypeError, KeyError, AttributeError):
        raise CheckpointFileError(f"{index} has no weight_map from weights to files") from None
    for name in names:
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise CheckpointFileError(f"{index} must name files beside it, .safetensors or .bin; was {name!r}")
    return names


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointFileError(f"{path} is no readable safetensors file: {error}") from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch wraps the cause in advice on how to switch the check off, which is the last thing to pass on.
        raise UnsafeWeightsError(
            f"{path} is no plain pickle of tensors, and anything else could execute code and is never loaded: "
            f"{_first_line(error.__context__ or error)}"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointFileError(f"{path} is unreadable: {_first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointFileError(f"{path} must hold tensors by name and nothing else")
    return {str(name): tensor for name, tensor in content.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
