"""Compares a bundle with rows that the caller's own module made."""

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.torch import load_file

from encserve_export.check.agreement import least_cosine, relative_error
from encserve_export.ground.arrays import Input, Mask, Rows
from encserve_export.ground.errors import ExpectedFileError, ExpectedRowsError
from encserve_export.ground.precision import LOW_PRECISION_ERRORS, Bounds, bounds_of
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_proto.bundle.v1 import manifest_pb2

INPUTS = {"input_ids": ("int64", "(batch, seq)"), "inputs_embeds": ("float32", "(batch, seq, d_model)")}
MASK = {"attention_mask": ("int64", "(batch, seq)")}
ROWS = {"rows": ("float32", "(batch, seq, d_model)")}
_ARRAYS = INPUTS | MASK | ROWS


@dataclasses.dataclass(frozen=True)
class Expected:
    """Rows that a module of the caller's made of some sequences.

    Attributes:
        path: Their file.
        name: What the input is called, "input_ids" or "inputs_embeds".
        inputs: int64 (batch, seq), or float32 (batch, seq, d_model).
        mask: int64 (batch, seq), 1 for a token and 0 for padding behind the tokens.
        rows: float32 (batch, seq, d_model); those of padding mean nothing.
    """

    path: Path
    name: str
    inputs: Input
    mask: Mask
    rows: Rows


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How a bundle's rows agree with those that were expected.

    Attributes:
        rows: How many were compared.
        max_relative_error: The largest ‖got - want‖/‖want‖ of a row.
        min_cosine: The least cosine similarity of a row.
        bounds: What was allowed.
    """

    rows: int
    max_relative_error: float
    min_cosine: float
    bounds: Bounds


def read_expected(path: Path) -> Expected:
    """Reads a file of expected rows.

    Args:
        path: A .npz or .safetensors file with `input_ids` or `inputs_embeds`, `attention_mask` and `rows`.

    Raises:
        ExpectedFileError: It is unreadable, or an array is missing, or has another type, shape or numbers.
    """
    found = _load(path)
    inputs = [name for name in INPUTS if name in found]
    missing = [name for name in (*MASK, *ROWS) if name not in found]
    if len(inputs) != 1 or missing:
        raise ExpectedFileError(
            f"{path} must hold {' or '.join(INPUTS)}, and {', '.join((*MASK, *ROWS))}; it holds "
            f"{', '.join(found) or 'none of them'}"
        )
    arrays = {name: _array(path, name, value) for name, value in found.items()}
    mask, rows = arrays["attention_mask"], arrays["rows"]
    for name, array in arrays.items():
        if array.shape[:2] != mask.shape or 0 in array.shape:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ExpectedFileError(
                f"{path}: {name} must be {_ARRAYS[name][1]}, not empty, as the others; was {shapes}"
            )
    # A server pads behind the tokens, and a place in the sequence counts from the first token.
    if not np.array_equal(mask, np.arange(mask.shape[1]) < mask.sum(axis=1, keepdims=True)) or not mask[:, 0].all():
        raise ExpectedFileError(
            f"{path}: attention_mask must be 1 for the tokens of each sequence, at least one, and 0 for the padding "
            "behind them. Pad on the right"
        )
    for name, array in arrays.items():
        if name != "attention_mask" and not np.isfinite(array[mask == 1]).all():
            raise ExpectedFileError(f"{path}: {name} must be finite at the tokens of attention_mask")
    return Expected(path, inputs[0], arrays[inputs[0]], mask, rows)


def check_expected(
    expected: Expected, folder: Path, graph: manifest_pb2.Graph, shape: manifest_pb2.EncoderShape, bounds: Bounds
) -> Agreement:
    """Runs a bundle's graph in ONNX Runtime on the expected rows' input.

    Args:
        expected: The rows.
        folder: Where the graph's files lie.
        graph: Its interface and precision.
        shape: The model's sizes.
        bounds: What was allowed against PyTorch; where there was none to compare with, the precision's own count.

    Raises:
        ExpectedFileError: The input or the rows do not fit the model; the text names the numbers.
        ExpectedRowsError: A row is out of the bounds of the precision.
    """
    _check_fits(expected, graph, shape)
    rows = OnnxEncoder(folder, graph)(expected.inputs, expected.mask)  # (batch, seq, d_model)
    got, want = rows[expected.mask == 1], expected.rows[expected.mask == 1]  # (tokens, d_model) both
    if bounds.error is None and bounds.cosine is None:
        bounds = bounds_of(graph.precision)
    agreement = Agreement(len(got), relative_error(got, want), least_cosine(got, want), bounds)
    _refuse(expected, agreement, got, want)
    return agreement


def _load(path: Path) -> dict[str, Any]:
    """The arrays of a file that are of use here, of whatever type they are."""
    try:
        if path.suffix == ".safetensors":
            return {name: value for name, value in load_file(path).items() if name in _ARRAYS}
        # np.load leaves a broken file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if name in _ARRAYS}
    # A .npy file gives an array, which has no files.
    except (safetensors.SafetensorError, OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ExpectedFileError(f"{path} is no readable .npz or .safetensors file: {error}") from error
    except (AttributeError, TypeError):
        raise ExpectedFileError(f"{path} holds one array without a name; write a .npz with numpy.savez") from None


def _array(path: Path, name: str, value: Any) -> Any:
    dtype, shape = _ARRAYS[name]
    found = str(value.dtype).removeprefix("torch.")
    if found != dtype or value.ndim != shape.count(",") + 1:
        more = ". Make the rows in float32" if name == "rows" and "float" in found and found != dtype else ""
        raise ExpectedFileError(f"{path}: {name} must be {dtype} {shape}; was {found} {tuple(value.shape)}{more}")
    return np.asarray(value)


def _check_fits(expected: Expected, graph: manifest_pb2.Graph, shape: manifest_pb2.EncoderShape) -> None:
    path, inputs = expected.path, expected.inputs
    wanted = "inputs_embeds" if graph.embeddings_name else "input_ids"
    if expected.name != wanted:
        raise ExpectedFileError(f"{path} holds {expected.name}; this model takes {wanted}")
    if inputs.shape[1] > shape.max_sequence_tokens:
        raise ExpectedFileError(
            f"{path}: sequences must have at most {shape.max_sequence_tokens} tokens, the model's max_sequence_tokens; "
            f"was {inputs.shape[1]}"
        )
    if expected.rows.shape[2] != shape.d_model:
        raise ExpectedFileError(
            f"{path}: rows must have the model's d_model {shape.d_model}; was {expected.rows.shape}"
        )
    if expected.name == "input_ids" and not (inputs.min() >= 0 and inputs.max() < shape.vocab_size):
        raise ExpectedFileError(
            f"{path}: input_ids must be from 0 to {shape.vocab_size - 1}, padding included; was {inputs.min()} to "
            f"{inputs.max()}"
        )


def _refuse(expected: Expected, agreement: Agreement, got: Rows, want: Rows) -> None:
    """Raises ExpectedRowsError if a row is out of the bounds; the text names the worst."""
    error, cosine, bounds = agreement.max_relative_error, agreement.min_cosine, agreement.bounds
    if bounds.error is not None and not error <= bounds.error:
        figures, tolerance = (
            f"relative error {error:.1e}, cosine similarity {cosine:.4f}",
            f"tolerance {bounds.error:.1e}",
        )
    elif bounds.cosine is not None and not cosine >= bounds.cosine:
        figures, tolerance = f"cosine similarity {cosine:.4f}", f"at least {bounds.cosine} is required"
    else:
        return
    errors = [relative_error(got[i], want[i]) for i in range(len(got))]
    sequence, token = np.argwhere(expected.mask == 1)[int(np.argmax(errors))]
    low, high = LOW_PRECISION_ERRORS
    advice = (
        "Half precision or TF32 in what made the rows leaves errors of this size: make them in float32, with "
        "torch.backends.cuda.matmul.allow_tf32 = False"
        if bounds.error is not None and low <= error <= high
        else "The model is described otherwise than the module that made the rows computes it"
    )
    raise ExpectedRowsError(
        f"the bundle does not give the rows of {expected.path}: {figures}, {tolerance}; the worst is "
        f"rows[{sequence}, {token}]. {advice}"
    )
