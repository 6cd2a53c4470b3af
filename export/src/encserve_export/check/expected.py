"""Compares a bundle's hidden states with hidden states that the user's own module computed.

A row is the hidden state of one token, a vector of d_model numbers.
"""

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file

from encserve_export.check.agreement import compare, relative_error
from encserve_export.core.arrays import Input, Mask, Rows
from encserve_export.core.errors import ExpectedFileError, ExpectedRowsError
from encserve_export.core.precision import LOW_PRECISION_ERRORS, Bounds, bounds_of
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_proto.bundle.v1 import manifest_pb2

# The dtype and the dimensions of each array in a file of expected rows.
_ARRAYS = {
    "input_ids": ("int64", ("batch", "seq")),
    "inputs_embeds": ("float32", ("batch", "seq", "d_model")),
    "attention_mask": ("int64", ("batch", "seq")),
    "rows": ("float32", ("batch", "seq", "d_model")),
}


@dataclasses.dataclass(frozen=True)
class Expected:
    """Rows that the user's own module computed, and the inputs of that module.

    Attributes:
        path: The file with the rows and the inputs.
        name: The name of the input, "input_ids" or "inputs_embeds".
        inputs: int64 (batch, seq), or float32 (batch, seq, d_model).
        mask: int64 (batch, seq), 1 for a token and 0 for the padding after the tokens.
        rows: float32 (batch, seq, d_model). Rows at padding are not compared.
    """

    path: Path
    name: str
    inputs: Input
    mask: Mask
    rows: Rows


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The differences between a bundle's rows and the expected rows.

    Attributes:
        rows: The number of compared rows.
        max_relative_error: The largest ‖got - want‖/‖want‖ of a row.
        min_cosine: The least cosine similarity of a row.
        bounds: The allowed differences.
    """

    rows: int
    max_relative_error: float
    min_cosine: float
    bounds: Bounds


def read_expected(path: Path) -> Expected:
    """Read a file of expected rows.

    Args:
        path: A .npz or .safetensors file with `input_ids` or `inputs_embeds`, `attention_mask` and `rows`.

    Raises:
        ExpectedFileError: The file is unreadable, or an array is missing or has a wrong dtype, shape or value.
    """
    arrays = _load(path)
    inputs = [name for name in ("input_ids", "inputs_embeds") if name in arrays]
    if len(inputs) != 1 or not {"attention_mask", "rows"} <= arrays.keys():
        raise ExpectedFileError(
            f"{path} must hold attention_mask, rows, and either input_ids or inputs_embeds; it holds "
            f"{', '.join(arrays) or 'no array with such a name'}"
        )
    batch = arrays["attention_mask"].shape[:2]
    for name, array in arrays.items():
        dtype, axes = _ARRAYS[name]
        if array.dtype != dtype or array.ndim != len(axes) or array.shape[:2] != batch or 0 in array.shape:
            raise ExpectedFileError(
                f"{path}: {name} must be {dtype} ({', '.join(axes)}), with the batch and seq of attention_mask, "
                f"{batch}; was {array.dtype} {array.shape}"
            )
    mask, rows = arrays["attention_mask"], arrays["rows"]
    # The server pads on the right and counts positions from the first token, so the file must do the same.
    if not np.array_equal(mask, np.arange(mask.shape[1]) < mask.sum(axis=1, keepdims=True)) or not mask[:, 0].all():
        raise ExpectedFileError(
            f"{path}: each row of attention_mask must start with 1 for its tokens (at least one token), then have only "
            "0 for padding. Pad on the right"
        )
    return Expected(path, inputs[0], arrays[inputs[0]], mask, rows)


def check_expected(
    expected: Expected, folder: Path, graph: manifest_pb2.Graph, shape: manifest_pb2.EncoderShape, bounds: Bounds
) -> Agreement:
    """Run a bundle's graph in ONNX Runtime and compare its rows with the expected rows.

    Args:
        expected: The expected rows and their input.
        folder: The folder of the graph's files.
        graph: The graph's interface and precision.
        shape: The model's sizes.
        bounds: The allowed differences from PyTorch. If `error` and `cosine` are both None, the bounds of the graph's
            precision apply.

    Raises:
        ExpectedFileError: The input or the rows do not fit the model.
        ExpectedRowsError: A row differs by more than the precision allows.
    """
    _check_fits(expected, graph, shape)
    rows = OnnxEncoder(folder, graph)(expected.inputs, expected.mask)  # (batch, seq, d_model)
    got, want = rows[expected.mask == 1], expected.rows[expected.mask == 1]  # (tokens, d_model) both
    if bounds.error is None and bounds.cosine is None:
        bounds = bounds_of(graph.precision)
    comparison = compare(got, want, bounds)
    if not comparison.excess:
        return Agreement(len(got), comparison.error, comparison.cosine, bounds)
    errors = [relative_error(*pair) for pair in zip(got, want, strict=True)]
    sequence, token = np.argwhere(expected.mask == 1)[int(np.argmax(errors))]
    low, high = LOW_PRECISION_ERRORS
    advice = "The description of the model (norm, activation, positions, merge_heads, ...) differs from your module"
    if bounds.error is not None and low <= comparison.error <= high:
        advice = (
            "Half precision or TF32 causes errors of this size: compute the rows in float32, with "
            "torch.backends.cuda.matmul.allow_tf32 = False"
        )
    raise ExpectedRowsError(
        f"the bundle does not give the rows of {expected.path}: {comparison.excess}. The largest error is in "
        f"rows[{sequence}, {token}]. {advice}"
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            arrays = load_file(path)
        else:
            # np.load does not close a broken file, so the first `with` item closes the file.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
    # For a .npy file np.load returns an array. An array is not a context manager, so `with` raises a TypeError.
    except (
        safetensors.SafetensorError,
        OSError,
        ValueError,
        TypeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ExpectedFileError(
            f"{path} is not a readable .safetensors file or .npz file of numpy.savez: {error}"
        ) from error
    return {name: array for name, array in arrays.items() if name in _ARRAYS}


def _check_fits(expected: Expected, graph: manifest_pb2.Graph, shape: manifest_pb2.EncoderShape) -> None:
    path, inputs = expected.path, expected.inputs
    name = "inputs_embeds" if graph.embeddings_name else "input_ids"
    if expected.name != name:
        raise ExpectedFileError(f"{path} holds {expected.name}; this model takes {name}")
    if inputs.shape[1] > shape.max_sequence_tokens:
        raise ExpectedFileError(
            f"{path}: sequences must have at most {shape.max_sequence_tokens} tokens, the model's max_sequence_tokens; "
            f"was {inputs.shape[1]}"
        )
    if expected.rows.shape[2] != shape.d_model:
        raise ExpectedFileError(
            f"{path}: rows must have the model's d_model {shape.d_model}; was {expected.rows.shape}"
        )
    if name == "input_ids" and not (inputs.min() >= 0 and inputs.max() < shape.vocab_size):
        raise ExpectedFileError(
            f"{path}: input_ids must be from 0 to {shape.vocab_size - 1}, padding included; was {inputs.min()} to "
            f"{inputs.max()}"
        )
