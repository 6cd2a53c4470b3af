"""Runs an ONNX graph in ONNX Runtime. Errors contain the shape of the batch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from encserve_export.core.arrays import Input, Mask, Rows, half_and_half
from encserve_export.core.errors import OnnxFileError, OnnxRunError, VocabularyError
from encserve_export.core.runtime import onnxruntime, open_session
from encserve_proto.bundle.v1 import manifest_pb2


class OnnxEncoder:
    """Runs one graph of a bundle in ONNX Runtime on the CPU.

    Attributes:
        d_model: The width of the hidden states; 0 before the first call.
    """

    def __init__(self, path: Path, graph: manifest_pb2.Graph, *, half_types: bool = False) -> None:
        """Loads the graph.

        Args:
            path: The ONNX file, or the folder of the bundle.
            graph: The names of the inputs and of the output.
            half_types: Whether half of the tokens have token type 1; see `half_and_half`. Otherwise, all have type 0.

        Raises:
            OnnxFileError: ONNX Runtime cannot load the file.
        """
        self.d_model = 0
        self._graph = graph
        self._half_types = half_types
        path = path / graph.file if path.is_dir() else path
        try:
            self._session = open_session(path)
        except Exception as error:  # ONNX Runtime's exceptions have no public base class
            raise _file_error(error, path, "ONNX Runtime cannot load the file") from error
        # Without this option, ONNX Runtime would keep the memory of the largest batch.
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def __call__(self, inputs: Input, mask: Mask) -> Rows:
        """Runs one batch.

        Args:
            inputs: Token ids, int64 (batch, seq), or vectors, float32 (batch, seq, width).
            mask: int64 (batch, seq), 1 for a token and 0 for padding.

        Returns:
            The last hidden states, float32 (batch, seq, d_model).

        Raises:
            OnnxRunError: The graph fails, its output has the wrong shape, or a token's hidden state is not finite.
        """
        (rows,) = self.outputs([self._graph.output_name], inputs, mask)
        name, shape = self._graph.output_name, f"for inputs of shape {inputs.shape}"
        if rows.ndim != 3 or rows.shape[:2] != mask.shape:
            raise OnnxRunError(
                f"the output {name} has shape {rows.shape} {shape}; it must be ({mask.shape[0]}, {mask.shape[1]}, "
                "d_model)"
            )
        width, other = rows.shape[2], self.d_model or rows.shape[2]
        if width != other or not width:
            raise OnnxRunError(
                f"the output {name} has rows of {width} dimensions {shape}, but rows of {other} for other inputs. The "
                "width must be the same for all inputs"
            )
        if not np.isfinite(rows[mask == 1]).all():
            raise OnnxRunError(f"the output {name} has numbers that are not finite {shape}")
        self.d_model = width
        return rows

    def outputs(self, names: Sequence[str], inputs: Input, mask: Mask) -> list[Rows]:
        """Runs one batch and returns the named outputs without checks.

        Raises:
            OnnxRunError: The graph fails.
        """
        feeds = {self._graph.input_ids_name or self._graph.embeddings_name: inputs}
        feeds[self._graph.attention_mask_name] = mask
        if self._graph.token_type_ids_name:
            types = half_and_half(mask) if self._half_types else np.zeros_like(mask)
            feeds[self._graph.token_type_ids_name] = types
        try:
            outputs: list[Rows] = self._session.run(list(names), feeds, self._options)
        except Exception as error:  # ONNX Runtime's exceptions have no public base class
            raise OnnxRunError(f"the model fails for inputs of shape {inputs.shape}: {_message(error)}") from error
        return outputs


def check_file(path: Path) -> None:
    """Checks the structure of a file, and the types and shapes in its graph, with onnx.checker.

    Raises:
        OnnxFileError: The file is not valid, or onnx does not know its operators, opset or IR version.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)  # files above 2 GiB must be checked by path
    except Exception as error:  # ValidationError, InferenceError, or any error from onnx's C++ code
        raise _file_error(error, path, "the file is not valid ONNX") from error


def check_range(
    encoder: OnnxEncoder, *, vocab_size: int, width: int, max_sequence_tokens: int, pad_token_id: int
) -> None:
    """Checks that the graph runs with one token, with the largest id, and with the longest sequence.

    Args:
        encoder: The graph.
        vocab_size: The number of token ids; 0 for a model that takes vectors.
        width: The size of a vector; 0 for a model that takes token ids.
        max_sequence_tokens: The longest sequence, in tokens.
        pad_token_id: The padding id.

    Raises:
        OnnxRunError: The graph fails for one token or for the longest sequence. If a shorter sequence works, the
            message contains the largest length that works.
        VocabularyError: The graph runs with id 0, but fails with the largest id.
    """

    def run(token: int, length: int = 1) -> None:
        mask = np.ones((1, length), np.int64)  # (1, seq)
        vectors = np.random.default_rng(0).standard_normal((1, length, width), np.float32)  # (1, seq, width)
        encoder(vectors if width else np.full_like(mask, token), mask)

    run(0)
    largest = max(vocab_size - 1, 0)
    try:
        run(largest)
    except OnnxRunError as error:
        raise VocabularyError(
            f"vocab_size {vocab_size} is too large: the model runs with id 0 but not with id {largest} ({error})"
        ) from error
    # The sequence must not consist of padding ids, because some models give no positions to padding ids.
    token = largest if largest != pad_token_id else 0
    try:
        run(token, max_sequence_tokens)
    except OnnxRunError as error:
        works, fails = 1, max_sequence_tokens
        while fails - works > 1:
            middle = (works + fails) // 2
            try:
                run(token, middle)
                works = middle
            except OnnxRunError:
                fails = middle
        if works == 1:
            raise
        raise OnnxRunError(
            f"{error}. The longest sequence that works has {works} tokens: give --max-sequence-tokens {works} or less"
        ) from error


def _file_error(error: Exception, path: Path, problem: str) -> OnnxFileError:
    return OnnxFileError(
        f"{problem}: {_message(error).replace(f'{path.parent}/', '')}. The installed versions are onnx "
        f"{onnx.__version__} and ONNX Runtime {onnxruntime.__version__}. If an operator or a version is unknown, "
        "export the model with standard operators and an older opset. Or install newer packages here and for the "
        "server. Custom operators are not supported"
    )


def _message(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
