"""Checks and runs an ONNX file of somebody else's in ONNX Runtime, and says for which batch it fails."""

from pathlib import Path

import numpy as np
import onnx

from encserve_export.ground.arrays import Input, Mask, Rows
from encserve_export.ground.errors import (
    OnnxFileError,
    OnnxModelError,
    OnnxOperatorError,
    OnnxRunError,
    VocabularyError,
)
from encserve_export.ground.runtime import onnxruntime, open_session
from encserve_export.onnx_graph.foreign import Interface, vector_width

# How ONNX Runtime and onnx.checker say that they do not know an operator, an opset or an IR version.
_UNKNOWN = (
    "No Op registered",
    "is not a registered function/op",
    "No opset import",
    " opset ",
    "IR version:",
    "ir_version",
)


def check_file(path: Path) -> None:
    """Has onnx.checker look at everything: the structure, and types and shapes all through the graph.

    Args:
        path: The file in the bundle; by path it may be over 2 GiB.

    Raises:
        OnnxOperatorError: It is too new, or has an operator that is not known.
        OnnxFileError: It is no valid ONNX.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # ValidationError, InferenceError and bare ones of its C++ part
        raise _refusal(error, path, "the file is no valid ONNX") from error


class Runner:
    """One ONNX file in ONNX Runtime on the CPU.

    Attributes:
        d_model: The width of its rows; 0 before the first run.
    """

    def __init__(self, model: onnx.ModelProto, path: Path, interface: Interface) -> None:
        """Loads the file.

        Args:
            model: The model.
            path: Its file in the bundle.
            interface: Its inputs and output.

        Raises:
            OnnxOperatorError: This ONNX Runtime does not know an operator, the opset or the IR version.
            OnnxFileError: It cannot load the file for another reason.
        """
        self.d_model = 0
        self._interface = interface
        self._width = vector_width(model, interface)
        try:
            self._session = open_session(path)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise _refusal(error, path, "ONNX Runtime cannot load the file") from error

    def __call__(self, ids: Input, mask: Mask) -> Rows:
        """Runs one batch.

        Args:
            ids: int64 (batch, seq), or vectors, float32 (batch, seq, width).
            mask: int64 (batch, seq), 1 for a token and 0 for padding.

        Returns:
            float32 (batch, seq, d_model).

        Raises:
            OnnxRunError: It fails, the rows have another shape, or one of a token is not finite.
        """
        try:
            rows = self._run(ids, mask)
        except Exception as error:  # as above
            raise OnnxRunError(f"the model fails for ids of shape {ids.shape}: {_message(error)}") from error
        self._check(rows, ids, mask)
        self.d_model = rows.shape[2]
        return rows

    def _check(self, rows: Rows, ids: Input, mask: Mask) -> None:
        output = self._interface.output
        if rows.ndim != 3 or rows.shape[:2] != mask.shape:
            raise OnnxRunError(
                f"the output {output} has shape {rows.shape} for ids of shape {ids.shape}; it must be "
                f"({mask.shape[0]}, {mask.shape[1]}, d_model)"
            )
        width, elsewhere = rows.shape[2], self.d_model or rows.shape[2]
        if width != elsewhere or not width:
            raise OnnxRunError(
                f"the output {output} has rows of {width} numbers for ids of shape {ids.shape}, and of {elsewhere} "
                "elsewhere; they must always have the same width"
            )
        if not np.isfinite(rows[mask == 1]).all():
            raise OnnxRunError(f"the output {output} has numbers that are not finite for ids of shape {ids.shape}")

    def check_ends(self, vocab_size: int, max_sequence_tokens: int, pad_token_id: int) -> None:
        """Runs one token, the largest id, and the longest sequence; of a model that takes vectors, any.

        Raises:
            OnnxRunError: One token fails, or the longest sequence does; then the text says which still works.
            VocabularyError: The largest id fails where another works.
        """
        self._run_one(0)
        largest = vocab_size - 1
        try:
            self._run_one(largest)
        except OnnxRunError as error:
            raise VocabularyError(
                f"vocab_size {vocab_size} is too large: the model runs with id 0 and not with id {largest} ({error})"
            ) from error
        # Not the padding id: there are models that count no place for it.
        token = largest if largest != pad_token_id else 0
        try:
            self._run_one(token, max_sequence_tokens)
        except OnnxRunError as error:
            longest = self._longest(token, max_sequence_tokens)
            if longest == 1:
                raise
            raise OnnxRunError(
                f"{error}. The longest sequence that works has {longest} tokens: give --max-sequence-tokens {longest} "
                "or less"
            ) from error

    def _run(self, ids: Input, mask: Mask) -> Rows:
        feeds = {self._interface.input_ids: ids, self._interface.attention_mask: mask}
        if self._interface.token_type_ids:
            feeds[self._interface.token_type_ids] = np.zeros_like(mask)
        rows: Rows = self._session.run([self._interface.output], feeds)[0]
        return rows

    def _run_one(self, token: int, length: int = 1) -> None:
        self(*self._sequence(token, length))

    def _sequence(self, token: int, length: int) -> tuple[Input, Mask]:
        """One token again and again, (1, seq), or vectors, (1, seq, width), and their mask, (1, seq)."""
        mask = np.ones((1, length), np.int64)  # (1, seq)
        if self._width:
            return np.random.default_rng(0).standard_normal((1, length, self._width), np.float32), mask
        return np.full_like(mask, token), mask

    def _longest(self, token: int, failing: int) -> int:
        """The longest sequence that works, by bisection; one token does, `failing` does not."""
        works = 1
        while failing - works > 1:
            middle = (works + failing) // 2
            ids, mask = self._sequence(token, middle)
            try:
                self._check(self._run(ids, mask), ids, mask)
                works = middle
            except Exception:  # as above
                failing = middle
        return works


def _refusal(error: Exception, path: Path, what: str) -> OnnxModelError:
    """An error of what a library says of a whole file, whose node it names where there is one."""
    said = f"{what}: {_message(error).replace(f'{path.parent}/', '')}"
    if not any(it in str(error) for it in _UNKNOWN):
        return OnnxFileError(said)
    return OnnxOperatorError(
        f"{said}. Installed here are onnx {onnx.__version__} and ONNX Runtime {onnxruntime.__version__}: export the "
        "model again with standard operators and an older opset, or install newer packages, here and for the server. "
        "Operators of one's own cannot come along: a bundle is data, never code"
    )


def _message(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
