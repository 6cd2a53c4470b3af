"""Reads a checkpoint's files: JSON, safetensors, and pickles of plain tensors. Code in a file is never run."""

import dataclasses
import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from encserve_export.core.errors import CheckpointFileError, UnsafeWeightsError

# The names of weights files, in the order of preference. Each file may be split into several files with an index.
_FILES = ("model.safetensors", "pytorch_model.bin")
# The keys under which training scripts save a state dict.
_CONTAINERS = ("state_dict", "model", "model_state_dict")
_IN_A_CLONE = "(in a git clone: git lfs pull)"
AGAIN = f"download or save it again {_IN_A_CLONE}"
_STATE_DICT = "only the state dict: torch.save(model.state_dict(), FILE)"
# Older versions of transformers saved index tensors as weights. The names of such tensors end with one of these texts.
INDICES = ("position_ids", "token_type_ids", "inv_freq")
# The prefixes that torch's DataParallel and torch.compile add to all names. Several prefixes may follow each other.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint.

    Attributes:
        tensors: All tensors, by their names in the checkpoint.
        sha256: The SHA-256 of the concatenated weights files, in hex. The files are sorted by name. A separate file of
            embeddings comes last.
    """

    tensors: Mapping[str, Tensor]
    sha256: str


def read_json(path: Path) -> Any:
    """Parse a JSON file of the checkpoint.

    Raises:
        CheckpointFileError: The file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointFileError(f"{path} cannot be read as JSON: {error}; {AGAIN}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file of the checkpoint that holds an object.

    Raises:
        CheckpointFileError: The file is missing, is not JSON, or does not hold an object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointFileError(f"{path} must hold a JSON object; was {type(content).__name__}; {AGAIN}")
    return content


def read_weights(directory: Path) -> Weights:
    """Read the weights of a checkpoint directory.

    Raises:
        CheckpointFileError: The directory has no weights, or the weights are unreadable.
        UnsafeWeightsError: A pickle contains objects that could run code.
    """
    files = _weights_files(directory)
    tensors: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            raise CheckpointFileError(f"{path} is missing, but the index names it; {AGAIN}")
        content = _load(path)
        if not _are_tensors(content):
            raise CheckpointFileError(f"{path} must hold tensors by name and nothing else; save {_STATE_DICT}")
        tensors |= content
    return Weights(tensors, sha256(files))


def holds_weights(directory: Path) -> bool:
    """Return whether a checkpoint directory has a weights file or an index. The file may be unreadable."""
    return any((directory / f"{name}{index}").is_file() for name in _FILES for index in ("", ".index.json"))


def read_checkpoint(path: Path, embeddings: Path | None = None) -> Weights:
    """Read the state dict in a file. The state dict is the whole content, or the value of a key such as "model".

    Tensors in nested dicts and lists get names with dots, such as layers.0.W_Q. The prefixes of torch's wrappers
    ("module.", "_orig_mod.") are removed from the names.

    Args:
        path: The file: safetensors, or a pickle of tensors.
        embeddings: A separate file with the embedding table. The SHA-256 covers this file too, but the returned tensors
            do not include the table.

    Raises:
        CheckpointFileError: The file is unreadable, or does not hold exactly one state dict.
        UnsafeWeightsError: The file is a pickle of objects that could run code.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in _only_state_dict(path, _load(path)).items():
        plain = _WRAPPERS.sub("", name)
        if plain in tensors:
            raise CheckpointFileError(f"{path} holds {plain} twice, once with a wrapper's prefix; keep one")
        tensors[plain] = tensor
    return Weights(tensors, sha256([path] if embeddings is None else [path, embeddings]))


def read_table(path: Path) -> tuple[str, Tensor]:
    """Read a file that holds one tensor. Return the tensor's name and the tensor.

    A tensor without a name gets the name of the file, without the suffix.

    Raises:
        CheckpointFileError: The file is unreadable, or does not hold exactly one tensor.
        UnsafeWeightsError: The file is a pickle of objects that could run code.
    """
    content = _load(path)
    if isinstance(content, Tensor):
        return path.stem, content
    tensors = content if content == {} else _only_state_dict(path, content)
    if len(tensors) != 1:
        names = ", ".join(sorted(tensors)) or "empty"
        raise CheckpointFileError(f"{path} must hold the embedding table and nothing else; was {names}")
    return next(iter(tensors.items()))


def _weights_files(directory: Path) -> list[Path]:
    for name in _FILES:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return [directory / part for part in _indexed_files(index)]
    raise CheckpointFileError(
        f"{directory} holds no weights; looked for {' and '.join(_FILES)}, with or without an index. Download the "
        "weights, or save the model with save_pretrained"
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted({str(name) for name in read_object(index)["weight_map"].values()})
    except (KeyError, AttributeError):
        raise CheckpointFileError(f"{index} has no weight_map from weights to files; {AGAIN}") from None
    for name in names:
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise CheckpointFileError(f"{index} must name .safetensors or .bin files in the same folder; was {name!r}")
    return names


def _load(path: Path) -> Any:
    """Return the content of a safetensors file or a pickle. PyTorch's unpickler refuses objects that could run code."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointFileError(f"{path} is not a readable safetensors file: {error}; {AGAIN}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # PyTorch's own message is not repeated, because it explains how to turn this check off.
        raise UnsafeWeightsError(
            f"{path} is not a pickle of plain tensors. Other objects could run code, so they are never loaded. "
            f"Save {_STATE_DICT}. Or download the file again {_IN_A_CLONE}"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointFileError(
            f"{path} is unreadable: {error}. Download the file again {_IN_A_CLONE}, or save {_STATE_DICT}"
        ) from error


def _are_tensors(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())


def _only_state_dict(path: Path, content: Any) -> dict[str, Tensor]:
    state_dicts = _find_state_dicts(content, "")
    if len(state_dicts) == 1:
        (tensors,) = state_dicts.values()
        return tensors
    if state_dicts:
        raise CheckpointFileError(
            f"{path} holds several state dicts: {', '.join(state_dicts)}; save only the state dict of the encoder"
        )
    names = ", ".join(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
    raise CheckpointFileError(
        f"{path} must hold tensors by name, at the top level or under one of {', '.join(_CONTAINERS)}; "
        f"was {names or 'empty'}"
    )


def _find_state_dicts(content: Any, key: str) -> dict[str, dict[str, Tensor]]:
    """Return all state dicts in a file's content, by their paths, such as "model.state_dict".

    The state dicts are under the keys of `_CONTAINERS`. If there are no such keys, the content may be a state dict
    itself. It must then hold only tensors.
    """
    if not isinstance(content, dict):
        return {}
    found: dict[str, dict[str, Tensor]] = {}
    for name in _CONTAINERS:
        found |= _find_state_dicts(content.get(name), f"{key}.{name}" if key else name)
    leaves = {} if found else dict(_leaves(content, ""))
    return {key: leaves} if leaves and _are_tensors(leaves) else found


def _leaves(content: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts and lists. Each value's name is its keys joined with dots: layers.0.W_Q."""
    if not isinstance(content, dict | list):
        yield name, content
        return
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def sha256(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the concatenated bytes of files, in hex."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
