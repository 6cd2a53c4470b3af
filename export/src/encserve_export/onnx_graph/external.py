"""Reads the weights that an ONNX file keeps in other files, from beside it and nowhere else.

An ONNX file names such files itself, with any path, so that one from a stranger could pull in what lies elsewhere on
the disk. Everything is checked and read here, once; what is written into a bundle has no path of another machine in it.
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

# A larger file is split: ONNX Runtime maps weights in a file of their own, and would parse and copy them in the graph.
MAX_FILE_BYTES = 2**26
# Smaller tensors stay in the graph: ONNX Runtime reads shapes and axes from them while it loads.
LEAST_DATA_BYTES = 1024
# ONNX Runtime maps the weights into memory, which it does page by page.
_ALIGNMENT_BYTES = 4096

# Equal weights may lie in one place; a file in which more tensors do would take any amount of memory.
_MOST_SHARED = 4

_TYPES = {it: helper.tensor_dtype_to_np_dtype(it) for it in helper.get_all_tensor_dtypes()}
# The bits of a number where several lie in one byte; NumPy gives each a byte.
_PACKED_BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4}


def take_in(model: onnx.ModelProto, folder: Path) -> list[Path]:
    """Reads all external tensors into the model, which has none afterwards.

    Args:
        model: As `onnx_model.read_model` gave it.
        folder: The folder of its file; no external file may lie outside it.

    Returns:
        The files that were read, in the order of their names.

    Raises:
        ExternalDataError: A file is elsewhere, missing or too short, or an entry makes no sense. Nothing is read from
            a file before its path has been checked.
    """
    places = [
        (tensor, _place(tensor, folder))
        for tensor in all_tensors(model)
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    files = sorted({path for _, (path, _, _) in places})
    taken, stored = sum(length for _, (_, _, length) in places), sum(path.stat().st_size for path in files)
    if taken > _MOST_SHARED * stored:
        raise ExternalDataError(
            f"the tensors take {taken:,} bytes, though the files that they lie in have {stored:,}: many share one "
            "range; export the model again"
        )
    for tensor, (path, offset, length) in places:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                tensor.raw_data = file.read(length)
        except OSError as error:
            raise ExternalDataError(f"{path} cannot be read: {error.strerror}") from error
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]
    return files


def write_model(model: onnx.ModelProto, path: Path, external: list[Path], folder: Path) -> list[Path]:
    """Writes a model into a bundle's folder: as one file, or with its weights in a second one where it is larger.

    Args:
        model: After `take_in`. It has no large weights afterwards.
        path: Its file. A small one without others is copied as it is, byte for byte.
        external: What `take_in` gave.
        folder: The bundle's folder.

    Returns:
        The files written, the graph first.
    """
    # An upper bound that is cheap to have: serializing would fail where the model is too large.
    size = path.stat().st_size + sum(it.stat().st_size for it in external)
    if external or size > MAX_FILE_BYTES:
        return save_model(model, folder, apart=size > MAX_FILE_BYTES)
    target = folder / names.FILE
    shutil.copyfile(path, target)
    return [target]


def save_model(model: onnx.ModelProto, folder: Path, *, apart: bool) -> list[Path]:
    """Writes a model with its weights in it, in place of what was there; perhaps the weights in a file of their own.

    Those in a file of their own the model has no more afterwards.

    Returns:
        The files written, the graph first.
    """
    target, data_path = folder / names.FILE, folder / names.DATA_FILE
    if apart:
        with data_path.open("wb") as data:
            move_weights(model, data)
    onnx.save_model(model, target, format="protobuf")
    return [target, data_path] if apart else [target]


def move_weights(model: onnx.ModelProto, data: BinaryIO) -> None:
    """Moves the weights of 1,024 bytes and more from a model to the end of a file beside the model's file."""
    for tensor in all_tensors(model):
        if len(tensor.raw_data) >= LEAST_DATA_BYTES:
            place(tensor, tensor.raw_data, data)


def place(tensor: TensorProto, content: bytes | memoryview, data: BinaryIO) -> None:
    """Writes a tensor's bytes at the end of a file beside the graph's, and has the tensor point there."""
    data.write(bytes(-data.tell() % _ALIGNMENT_BYTES))
    offset = data.tell()
    data.write(content)
    tensor.raw_data = b""  # which the library asks for
    external_data_helper.set_external_data(tensor, Path(data.name).name, offset, len(content))
    tensor.ClearField("raw_data")


def _name(tensor: TensorProto) -> str:
    return f"tensor {tensor.name!r}" if tensor.name else "a tensor without a name"


def _path(tensor: TensorProto, location: str, folder: Path) -> Path:
    """The file of an external tensor, once it is known to lie in the folder.

    onnx's own loader refuses every link, also links in the hub's cache.
    """
    what = f"{_name(tensor)} keeps its data in {location!r}"
    windows = PureWindowsPath(location)  # which takes both kinds of slashes
    if not location or "\0" in location or windows.drive or windows.root or ".." in windows.parts:
        raise ExternalDataError(
            f"{what}; it must lie in the folder of the ONNX file: a name, no absolute path and no '..'"
        )
    path = folder / location
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ExternalDataError(f"{what}, which cannot be opened ({error}); put it beside the ONNX file") from error
    if not (real.is_relative_to(folder.resolve()) or real.parent == _blobs(folder)):
        raise ExternalDataError(
            f"{what}, a link to {real}, outside the folder of the ONNX file; copy the files themselves into one folder "
            "(cp -L)"
        )
    if not real.is_file():
        raise ExternalDataError(f"{what}, and {path} is no plain file")
    return path


def _blobs(folder: Path) -> Path | None:
    """Where the files of a model lie that huggingface_hub has downloaded, and that a snapshot has links to."""
    for parent in folder.resolve().parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent / "blobs"
    return None


def _place(tensor: TensorProto, folder: Path) -> tuple[Path, int, int]:
    """The file of an external tensor, its offset and its length; the length must fit the shape and the type."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _path(tensor, entries.get("location", ""), folder)
    kind, shape = type_name(tensor.data_type), tuple(tensor.dims)
    dtype = _TYPES.get(tensor.data_type)
    if dtype is None or dtype.hasobject or any(size < 0 for size in shape):
        raise ExternalDataError(f"{_name(tensor)} of {kind} and shape {shape} cannot lie in {path.name}")
    due = math.ceil(math.prod(shape) * _PACKED_BITS.get(tensor.data_type, 8 * dtype.itemsize) / 8)
    try:
        offset, length = (int(entries.get(key, default)) for key, default in (("offset", 0), ("length", due)))
    except ValueError as error:
        raise ExternalDataError(f"{_name(tensor)}: where its data lie in {path.name} is no number: {error}") from error
    if length != due:
        raise ExternalDataError(
            f"{_name(tensor)} has length {length} in {path.name}; its shape {shape} of {kind} takes {due} bytes"
        )
    size = path.stat().st_size
    if not 0 <= offset <= size - due:
        raise ExternalDataError(
            f"{_name(tensor)} lies at bytes {offset} to {offset + due} of {path}, which has {size}; it was cut "
            "off, or belongs to another model"
        )
    return path, offset, due
