"""Reads and writes the weights that an ONNX model stores in other files.

An ONNX file may name any path for its weights. A downloaded model could name a private file, and the exporter would
copy this file into a bundle. So the exporter reads only files in the model's folder. An exported model names only files
of the bundle.
"""

import math
import shutil
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import onnx
from onnx import TensorProto, external_data_helper, helper

from encserve_export.core import names
from encserve_export.core.errors import ExternalDataError
from encserve_export.onnx_graph.nodes import all_tensors, type_name

# A larger model is written as a graph and a separate file of weights. ONNX Runtime maps the separate file into memory.
# Weights inside the graph's file would be parsed and copied.
MAX_FILE_BYTES = 2**26
# Smaller tensors stay in the graph, because ONNX Runtime reads shapes and axes from them while it loads the graph.
LEAST_DATA_BYTES = 1024
# ONNX Runtime maps the weights into memory by pages, so each tensor starts at a page.
_ALIGNMENT_BYTES = 4096

_TYPES = {it: helper.tensor_dtype_to_np_dtype(it) for it in helper.get_all_tensor_dtypes()}
# Bits per number, for types that pack several numbers into one byte. NumPy takes a whole byte for each such number.
_PACKED_BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4}


def take_in(model: onnx.ModelProto, folder: Path) -> list[Path]:
    """Reads all external tensors into the model. An external tensor is stored in another file.

    Args:
        model: The result of `interface.read_model`. The model is changed in place.
        folder: The folder of the model's file. External files must lie in this folder.

    Returns:
        The external files, sorted by name.

    Raises:
        ExternalDataError: A file is outside the folder, missing or too short, or the tensor's entry is invalid. Every
            path is checked before any file is read.
    """
    places = [
        (tensor, _place(tensor, folder))
        for tensor in all_tensors(model)
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    for tensor, (path, offset, length) in places:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                tensor.raw_data = file.read(length)
        except OSError as error:
            raise ExternalDataError(f"{path} cannot be read: {error.strerror}") from error
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]
    return sorted({path for _, (path, _, _) in places})


def write_model(model: onnx.ModelProto, path: Path, external: list[Path], folder: Path) -> list[Path]:
    """Writes a model into a bundle's folder. The weights of a large model go to a second file.

    Args:
        model: The model after `take_in`. Weights that go to the second file are removed from this object.
        path: The model's original file. A small model without external files is copied byte for byte.
        external: The model's external files, as `take_in` returns them.
        folder: The bundle's folder.

    Returns:
        The new files, the graph first.
    """
    # The file sizes are an upper bound of the model's size. protobuf cannot serialize a model above 2 GiB, so the exact
    # size is not available.
    size = path.stat().st_size + sum(it.stat().st_size for it in external)
    if external or size > MAX_FILE_BYTES:
        return save_model(model, folder, apart=size > MAX_FILE_BYTES)
    target = folder / names.FILE
    shutil.copyfile(path, target)
    return [target]


def save_model(model: onnx.ModelProto, folder: Path, *, apart: bool) -> list[Path]:
    """Writes a model into a bundle's folder, and overwrites a model that is already there.

    Args:
        model: The model with its weights. Weights that go to the second file are removed from this object.
        folder: The bundle's folder.
        apart: Whether weights of 1,024 bytes or more go to a second file.

    Returns:
        The new files, the graph first.
    """
    target, data_path = folder / names.FILE, folder / names.DATA_FILE
    if apart:
        with data_path.open("wb") as data:
            move_weights(model, data)
    onnx.save_model(model, target, format="protobuf")
    return [target, data_path] if apart else [target]


def move_weights(model: onnx.ModelProto, data: BinaryIO) -> None:
    """Moves all tensors of 1,024 bytes or more from a model to the end of an open file.

    The file must be in the folder of the model's file.
    """
    for tensor in all_tensors(model):
        if len(tensor.raw_data) >= LEAST_DATA_BYTES:
            place(tensor, tensor.raw_data, data)


def place(tensor: TensorProto, content: bytes | memoryview, data: BinaryIO) -> None:
    """Appends a tensor's bytes to the file of weights, and stores their offset and length in the tensor."""
    data.write(bytes(-data.tell() % _ALIGNMENT_BYTES))
    offset = data.tell()
    data.write(content)
    tensor.raw_data = b""  # set_external_data raises an error if raw_data is not set
    external_data_helper.set_external_data(tensor, Path(data.name).name, offset, len(content))
    tensor.ClearField("raw_data")


def _name(tensor: TensorProto) -> str:
    return f"tensor {tensor.name!r}" if tensor.name else "a tensor without a name"


def _path(tensor: TensorProto, location: str, folder: Path) -> Path:
    """Returns the path of the file that stores an external tensor, after checking the path.

    onnx's own loader refuses every symbolic link. But huggingface_hub stores a model as links in its cache, so this
    function allows links to files of that cache.
    """
    source = f"{_name(tensor)} has its data in {location!r}"
    windows = PureWindowsPath(location)  # splits at slashes and backslashes
    if not location or "\0" in location or windows.drive or windows.root or ".." in windows.parts:
        raise ExternalDataError(
            f"{source}; the file must be in the folder of the ONNX file: no absolute path and no '..'"
        )
    path = folder / location
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ExternalDataError(
            f"{source}, which cannot be opened ({error}); put the file next to the ONNX file"
        ) from error
    if not (real.is_relative_to(folder.resolve()) or real.parent == _blobs(folder)):
        raise ExternalDataError(
            f"{source}, a link to {real}, outside the folder of the ONNX file. Copy the files, not the links, into one "
            "folder (cp -L)"
        )
    if not real.is_file():
        raise ExternalDataError(f"{source}, and {path} is not a regular file")
    return path


def _blobs(folder: Path) -> Path | None:
    """Returns the folder "blobs", which has the files that a huggingface_hub snapshot links to.

    Returns None if `folder` is not in such a snapshot.
    """
    for parent in folder.resolve().parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent / "blobs"
    return None


def _place(tensor: TensorProto, folder: Path) -> tuple[Path, int, int]:
    """Returns the file of an external tensor, and the offset and the length of the tensor in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _path(tensor, entries.get("location", ""), folder)
    kind, shape = type_name(tensor.data_type), tuple(tensor.dims)
    dtype = _TYPES.get(tensor.data_type)
    if dtype is None or dtype.hasobject or any(size < 0 for size in shape):
        raise ExternalDataError(f"{_name(tensor)} of {kind} and shape {shape} cannot be stored in {path.name}")
    expected = math.ceil(math.prod(shape) * _PACKED_BITS.get(tensor.data_type, 8 * dtype.itemsize) / 8)
    try:
        offset, length = (int(entries.get(key, default)) for key, default in (("offset", 0), ("length", expected)))
    except ValueError as error:
        raise ExternalDataError(
            f"{_name(tensor)}: the offset or length in {path.name} is not a number: {error}"
        ) from error
    if length != expected:
        raise ExternalDataError(
            f"{_name(tensor)} has length {length} in {path.name}; its shape {shape} of {kind} takes {expected} bytes"
        )
    size = path.stat().st_size
    if not 0 <= offset <= size - expected:
        raise ExternalDataError(
            f"{_name(tensor)} lies at bytes {offset} to {offset + expected} of {path}, which has {size} bytes. The "
            "file is incomplete, or belongs to another model"
        )
    return path, offset, expected
