"""Reads a checkpoint's files: JSON, safetensors, and pickles of plain tensors. No code in them is run."""

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

# In the order of preference. Each may also be several files with an index.
_FILES = ("model.safetensors", "pytorch_model.bin")
# The keys under which training scripts save a state dict, and how deep they nest them.
_CONTAINERS = ("state_dict", "model", "model_state_dict")
_MAX_NESTING = 3
AGAIN = "download or save it again (in a git clone: git lfs pull)"
_SAVE_TENSORS = "save the state dict alone: torch.save(model.state_dict(), FILE)"
# Ends of the names of indices that older versions of transformers saved as weights.
INDICES = ("position_ids", "token_type_ids", "inv_freq")
# torch's wrappers for several devices and for compiling put these before every name, perhaps more than once.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint.

    Attributes:
        tensors: All tensors, by their names in the checkpoint.
        sha256: SHA-256 of the weights file, in hex. For several files, of their bytes in the order of their names, with
            a separate file of embeddings last.
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
        CheckpointFileError: The directory has no weights, or they are unreadable.
        UnsafeWeightsError: A pickle holds other objects than tensors.
    """
    files = _weights_files(directory)
    tensors: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            raise CheckpointFileError(f"{path} is missing, but the index names it; {AGAIN}")
        if path.suffix == ".safetensors":
            tensors |= _load_safetensors(path)
            continue
        content = _load_pickle(path)
        if not _is_state_dict(content):
            raise CheckpointFileError(f"{path} must hold tensors by name and nothing else; {_SAVE_TENSORS}")
        tensors |= content
    return Weights(tensors, sha256(files))


def holds_weights(directory: Path) -> bool:
    """Return whether a checkpoint directory has a weights file or an index, readable or not."""
    return any((directory / f"{name}{index}").is_file() for name in _FILES for index in ("", ".index.json"))


def read_checkpoint(path: Path, embeddings: Path | None = None) -> Weights:
    """Read the state dict in one file: alone, or under a key as training scripts save it.

    Tensors in nested dicts and lists get names with dots, such as layers.0.W_Q. The prefixes of torch's wrappers
    ("module.", "_orig_mod.") are removed from the names.

    Args:
        path: The file: safetensors, or a pickle of tensors.
        embeddings: Another file, which the hash covers too.

    Raises:
        CheckpointFileError: The file is unreadable, or does not hold one state dict.
        UnsafeWeightsError: It is a pickle of other objects than plain data.
    """
    content: Any = _load_safetensors(path) if path.suffix == ".safetensors" else _load_pickle(path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _only_state_dict(path, content).items():
        plain = _WRAPPERS.sub("", name)
        if plain in tensors:
            raise CheckpointFileError(f"{path} holds {plain} twice, once with a wrapper's prefix; keep one")
        tensors[plain] = tensor
    return Weights(tensors, sha256([path] if embeddings is None else [path, embeddings]))


def read_table(path: Path) -> tuple[str, Tensor]:
    """Read a file that holds one tensor. Return its name, or the file's, and the tensor.

    Raises:
        CheckpointFileError: The file is unreadable, or does not hold one tensor.
        UnsafeWeightsError: It is a pickle of other objects than plain data.
    """
    content: Any = _load_safetensors(path) if path.suffix == ".safetensors" else _load_pickle(path)
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
        f"{directory} holds no weights; looked for {' and '.join(_FILES)}, alone or with an index: download them, or "
        "save the model with save_pretrained"
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted({str(name) for name in read_object(index)["weight_map"].values()})
    except (KeyError, AttributeError):
        raise CheckpointFileError(f"{index} has no weight_map from weights to files; {AGAIN}") from None
    for name in names:
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise CheckpointFileError(f"{index} must name files beside it, .safetensors or .bin; was {name!r}")
    return names


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointFileError(f"{path} is not a readable safetensors file: {error}; {AGAIN}") from error


def _load_pickle(path: Path) -> Any:
    """Load plain data and tensors. PyTorch's unpickler refuses everything that could run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # PyTorch's own message explains how to switch the check off.
        raise UnsafeWeightsError(
            f"{path} is not a pickle of plain tensors. Other objects could run code, so they are never loaded: "
            f"{_SAVE_TENSORS}, or {AGAIN}"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointFileError(f"{path} is unreadable: {error}; {_SAVE_TENSORS}, or {AGAIN}") from error


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())


def _only_state_dict(path: Path, content: Any) -> dict[str, Tensor]:
    found = _find_state_dicts(content, "", _MAX_NESTING)
    if not found and isinstance(content, dict):
        leaves = dict(_leaves(content, "", _MAX_NESTING))
        found = {"": leaves} if leaves and _is_state_dict(leaves) else {}
    if len(found) == 1:
        (tensors,) = found.values()
        return {str(name): tensor for name, tensor in tensors.items()}
    if found:
        raise CheckpointFileError(f"{path} holds several state dicts: {', '.join(found)}; save the encoder's alone")
    held = ", ".join(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
    raise CheckpointFileError(
        f"{path} must hold tensors by name, alone or under {', '.join(_CONTAINERS)}; was {held or 'empty'}"
    )


def _find_state_dicts(content: Any, key: str, depth: int) -> dict[str, dict[Any, Tensor]]:
    """The state dicts under the usual keys, by their dotted keys."""
    if not isinstance(content, dict) or not content or depth < 0:
        return {}
    if _is_state_dict(content):
        return {key: content}
    found: dict[str, dict[Any, Tensor]] = {}
    for name in _CONTAINERS:
        found |= _find_state_dicts(content.get(name), f"{key}.{name}" if key else name, depth - 1)
    return found


def _leaves(content: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Join the keys of nested dicts and lists by dots, as in layers.0.W_Q."""
    if isinstance(content, dict | list) and depth >= 0:
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _leaves(value, f"{name}.{key}" if name else str(key), depth - 1)
    else:
        yield name, content


def sha256(files: Iterable[Path]) -> str:
    """Hash the bytes of files one after the other, in hex."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
