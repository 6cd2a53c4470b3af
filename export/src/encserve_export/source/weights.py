"""Reads a checkpoint's weights. Nothing in them is ever executed: safetensors, or a pickle of tensors alone."""

import dataclasses
import hashlib
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from encserve_export.ground.errors import CheckpointFileError, ConfigError, UnsafeWeightsError

# In order of preference; each may also come as several files with an index.
_FILES = ("model.safetensors", "pytorch_model.bin")
# Where training scripts put the weights among other things, and how deep they nest that.
_CONTAINERS = ("state_dict", "model", "model_state_dict")
_MAX_NESTING = 3
AGAIN = "download or save it again (in a clone by git: git lfs pull)"
# No model has as many; each takes time and memory before the weights are looked at.
MOST_LAYERS = 1024
# The sizes in a config.json that make one table, the columns by any of their names.
_WIDTHS = ("hidden_size", "d_model", "dim", "n_embd", "embedding_size")
_TABLES = (
    ("vocab_size", _WIDTHS),
    ("max_position_embeddings", _WIDTHS),
    ("intermediate_size", _WIDTHS),
    ("in_features", ("out_features",)),
)
_MOST_NUMBERS_OF_A_BYTE, _FREE_NUMBERS = 4, 2**24
# Parsed, JSON takes up to 30 times its size. The largest tokenizers have some 40 MB, other files seldom 1.
_MOST_JSON_BYTES, _MOST_TOKENIZER_BYTES = 2**24, 2**27
# Names of one tensor, as of layers that share their weights, take no memory until they are used.
_MOST_SHARED = 64
_LFS_POINTER = b"version https://git-lfs"
_SAVE_PLAINLY = "Save the state dict alone: torch.save(model.state_dict(), FILE)"
# Indices that older versions saved among the weights.
INDICES = ("position_ids", "token_type_ids", "inv_freq")
# What torch's wrappers for several devices and for compiling put before every name, perhaps more than once.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")


@dataclasses.dataclass(frozen=True)
class Weights:
    """A checkpoint's weights.

    Attributes:
        tensors: All tensors, by the checkpoint's own names.
        sha256: SHA-256 of the weights file, in hex; of several, over their bytes in the order of their names, and over
            those of embeddings in a file of their own last.
    """

    tensors: Mapping[str, Tensor]
    sha256: str


def read_json(path: Path) -> Any:
    """Parses a JSON file of the checkpoint.

    Raises:
        CheckpointFileError: The file is missing, no JSON, or so large that parsing it would take gigabytes.
    """
    try:
        _refuse_large(path)
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path} cannot be read as JSON: {error}; {AGAIN}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file of the checkpoint that holds an object.

    Raises:
        CheckpointFileError: The file is missing or no JSON, or holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointFileError(f"{path} must hold an object; {AGAIN}")
    return content


def check_harmless(directory: Path) -> None:
    """Refuses a directory that no model has, before a library reads it that takes any memory or time for it.

    Raises:
        CheckpointFileError: A JSON file is too large, a config.json is broken, or an archive is compressed.
        ConfigError: A config.json has more layers than any model, or describes tables that the weights beside it do
            not hold.
    """
    files = [path for pattern in ("*", "*/*") for path in sorted(directory.glob(pattern)) if path.is_file()]
    for path in files:
        if path.name == "config.json":
            settings = read_json(path)
            _refuse_deep(path, settings)
            _refuse_wide(path, settings if isinstance(settings, dict) else {})
        elif path.suffix == ".json":
            _refuse_large(path)
        elif path.suffix in (".bin", ".pt"):
            _refuse_compressed(path)


def _refuse_deep(path: Path, settings: Any) -> None:
    for name, value in settings.items() if isinstance(settings, dict) else ():
        if "layer" in name and type(value) is int and value > MOST_LAYERS:
            raise ConfigError(f"{name} in {path} must be at most {MOST_LAYERS}; was {value}. {AGAIN.capitalize()}")
        _refuse_deep(path, value)


def _refuse_wide(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuses a table that the weights beside a config.json are too small for, with room for quantised ones."""
    size = sum(file.stat().st_size for end in ("*.safetensors", "*.bin") for file in path.parent.glob(end))
    if not size:
        return
    for rows, columns in _TABLES:
        column = next((name for name in columns if name in settings), "")
        sizes: list[Any] = [settings.get(rows), settings.get(column)]
        if not all(type(it) is int and it > 0 for it in sizes):
            continue
        if (numbers := math.prod(sizes)) > _MOST_NUMBERS_OF_A_BYTE * size + _FREE_NUMBERS:
            raise ConfigError(
                f"{path}: {rows} {sizes[0]} and {column} {sizes[1]} make a table of {numbers:,} numbers, and the "
                f"weights beside it have {size:,} bytes. config.json and the weights must be of one model: download or "
                "save them again, together"
            )


def _refuse_large(path: Path) -> None:
    most = _MOST_TOKENIZER_BYTES if path.name == "tokenizer.json" else _MOST_JSON_BYTES
    if (size := path.stat().st_size) > most:
        raise CheckpointFileError(f"{path} has {size:,} bytes; at most {most:,} are read of such a file. {AGAIN}")


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
            raise CheckpointFileError(f"{path} is missing; the index names it. {AGAIN.capitalize()}")
        tensors.update(_load_safetensors(path) if path.suffix == ".safetensors" else _load_pickle(path))
    return Weights(tensors, sha256(files))


def holds_weights(directory: Path) -> bool:
    """Whether a checkpoint directory has weights, or an index of them, be they readable or not."""
    return any((directory / f"{name}{index}").is_file() for name in _FILES for index in ("", ".index.json"))


def read_checkpoint(path: Path, embeddings: Path | None = None) -> Weights:
    """Reads a state dict from one file: bare, or among other things as training scripts save it.

    The names are without what wrappers put before all of them ("module.", "_orig_mod.").

    Args:
        path: The file, safetensors or a pickle of tensors.
        embeddings: A file whose bytes the hash is to cover too.

    Raises:
        CheckpointFileError: It is unreadable, or holds no state dict.
        UnsafeWeightsError: It is a pickle that holds more than plain data.
    """
    if path.suffix == ".safetensors":
        found: Mapping[Any, Tensor] = _load_safetensors(path)
    else:
        found = _state_dict(path, _unpickle(path))
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = _WRAPPERS.sub("", name)
        if plain in tensors:
            raise CheckpointFileError(f"{path} holds {plain} twice, once behind a wrapper's prefix; keep one of them")
        tensors[plain] = tensor
    return Weights(tensors, sha256([path] if embeddings is None else [path, embeddings]))


def read_table(path: Path) -> tuple[str, Tensor]:
    """Reads a file that holds one tensor, bare or under a name.

    Returns:
        The tensor's name and the tensor.

    Raises:
        CheckpointFileError: It is unreadable, or holds none or several tensors.
        UnsafeWeightsError: It is a pickle that holds more than plain data.
    """
    if path.suffix == ".safetensors":
        content: Any = _load_safetensors(path)
    else:
        content = _unpickle(path)
        content = {path.stem: content} if isinstance(content, Tensor) else _state_dict(path, content)
    if len(content) != 1:
        raise CheckpointFileError(
            f"{path} must hold the embedding table and nothing else; was {', '.join(sorted(content)) or 'empty'}"
        )
    ((name, table),) = content.items()
    return name, table


def _weights_files(directory: Path) -> list[Path]:
    for name in _FILES:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return [directory / part for part in _indexed_names(index)]
    raise CheckpointFileError(
        f"{directory} holds no weights; looked for {' and '.join(_FILES)}, alone or with an index: download them, or "
        "save the model with save_pretrained"
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
        raise CheckpointFileError(f"{path} is no readable safetensors file: {error}; {AGAIN}") from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    content = _unpickle(path)
    if not _is_state_dict(content):
        raise CheckpointFileError(f"{path} must hold tensors by name and nothing else")
    return {str(name): tensor for name, tensor in content.items()}


def _unpickle(path: Path) -> Any:
    _refuse_compressed(path)
    try:
        with warnings.catch_warnings():
            # torch announces a TorchScript archive, then refuses it.
            warnings.filterwarnings("ignore", message=".*TorchScript archive", category=UserWarning)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointFileError(f"{path} is a pointer of git LFS, not the weights; {AGAIN}") from error
        # torch wraps the cause in advice on how to switch the check off, which is the last thing to pass on.
        raise UnsafeWeightsError(
            f"{path} is no plain pickle of tensors, and anything else could execute code and is never loaded: "
            f"{_cause(error.__context__ or error)}. {_SAVE_PLAINLY}"
        ) from error
    except (RuntimeError, EOFError, OSError, MemoryError, RecursionError) as error:
        if "TorchScript" in str(error):
            raise UnsafeWeightsError(f"{path} is a TorchScript archive, which holds code. {_SAVE_PLAINLY}") from error
        raise CheckpointFileError(f"{path} is unreadable: {_cause(error)}; {AGAIN}") from error
    _refuse_unstored(path, content)
    return content


def _refuse_compressed(path: Path) -> None:
    """Refuses an archive that is far larger unpacked: torch.save compresses nothing, and writes nothing twice."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError):
        return  # an older format, or a broken file, which torch.load reports
    size = path.stat().st_size
    if unpacked > 2 * size:
        raise CheckpointFileError(
            f"{path} is an archive of {size:,} bytes, {unpacked:,} unpacked; PyTorch compresses none. {_SAVE_PLAINLY}"
        )


def _refuse_unstored(path: Path, content: Any) -> None:
    """Refuses tensors that would take far more memory, once they are used, than the numbers that are stored."""
    stored: dict[int, int] = {}
    used = 0
    for tensor in _tensors(content, _MAX_NESTING):
        if tensor.layout != torch.strided or tensor.is_meta:
            continue  # refused where it is used
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        used += tensor.nbytes
        if tensor.nbytes > storage.nbytes():
            raise CheckpointFileError(
                f"{path} holds a tensor of shape {tuple(tensor.shape)}, {tensor.nbytes:,} bytes, of which it stores "
                f"{storage.nbytes():,}, the rest repeats them. {_SAVE_PLAINLY}, after tensor.contiguous()"
            )
    if used > _MOST_SHARED * sum(stored.values()):
        raise CheckpointFileError(
            f"{path} holds tensors of {used:,} bytes, and stores {sum(stored.values()):,}: too many share their "
            f"numbers. {_SAVE_PLAINLY}"
        )


def _tensors(content: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in what a pickle held, down to a depth."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict) and depth >= 0:
        for value in content.values():
            yield from _tensors(value, depth - 1)


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())


def _state_dict(path: Path, content: Any) -> dict[str, Tensor]:
    """The state dict in what a pickle held."""
    found = _find_state_dicts(content, "", _MAX_NESTING)
    if len(found) == 1:
        ((_, tensors),) = found.items()
        return {str(name): tensor for name, tensor in tensors.items()}
    if found:
        raise CheckpointFileError(f"{path} holds several state dicts: {', '.join(found)}; save the encoder's alone")
    held = ", ".join(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
    raise CheckpointFileError(
        f"{path} must hold tensors by name, bare or under {', '.join(_CONTAINERS)}; was {held or 'empty'}"
    )


def _find_state_dicts(content: Any, where: str, depth: int) -> dict[str, dict[Any, Tensor]]:
    """The state dicts under the usual keys, by their path; nesting is bounded, since a pickle may contain itself."""
    if not isinstance(content, dict) or not content or depth < 0:
        return {}
    if _is_state_dict(content):
        return {where: content}
    found: dict[str, dict[Any, Tensor]] = {}
    for key in _CONTAINERS:
        found |= _find_state_dicts(content.get(key), f"{where}.{key}" if where else key, depth - 1)
    return found


def _cause(error: BaseException) -> str:
    """The first sentence of an error; in torch's, advice follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0].rstrip(".")


def sha256(files: Iterable[Path]) -> str:
    """The SHA-256 over the bytes of files one after the other, in hex."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
