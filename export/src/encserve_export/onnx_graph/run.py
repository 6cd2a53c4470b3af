"""Runs an ONNX file of somebody else's in ONNX Runtime, and says in our words what fails and where."""

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from encserve_export.ground.arrays import Input, Mask, Rows
from encserve_export.ground.errors import (
    ExportError,
    OnnxFileError,
    OnnxOperatorError,
    OnnxRunError,
    VocabularyError,
)
from encserve_export.ground.runtime import onnxruntime
from encserve_export.onnx_graph.foreign import Interface, node_name, vector_width
from encserve_export.onnx_graph.nodes import all_nodes

# How ONNX Runtime and onnx.checker tell of a node.
_RUNNING = re.compile(
    r"Non-zero status code returned while running (?P<op>\S+) node\. Name:'(?P<name>[^']*)' Status Message: (?P<why>.*)"
)
_NODES = (
    _RUNNING,
    re.compile(r"Node \((?P<name>[^)]*)\) Op \((?P<op>\w+)\) (?P<why>.*)"),
    re.compile(r"\(op_type:(?P<op>\w+), node name: (?P<name>[^)]*)\): (?P<why>.*)"),
    re.compile(r"(?s)(?P<why>.*?)\s*==> Context: Bad node spec for node\. Name: (?P<name>.*?) ?OpType: (?P<op>\w+)"),
)
_UNKNOWN = re.compile(r"Fatal error: (?P<domain>[^:\s]*):(?P<op>\w+)\(-?\d+\) is not a registered function/op")
_VERSIONS = (
    (re.compile(r"Opset (\d+) is under development.*?till opset (\d+)", re.DOTALL), "opset"),
    (re.compile(r"IR version: (\d+), max supported IR version: (\d+)"), "IR version"),
    (re.compile(r"ir_version (\d+) is higher than the checker's \((\d+)\)"), "IR version"),
)
# Where in its own source ONNX Runtime noticed, and the condition that it looked at.
_SOURCE_PLACE = re.compile(r"/onnxruntime_src/.* was false\. |/onnxruntime_src/\S+ .*?\) ")


def check_file(model: onnx.ModelProto, path: Path) -> None:
    """Has onnx.checker look at everything: the structure, and types and shapes all through the graph.

    Args:
        model: The model.
        path: Its file in the bundle; by path it may be over 2 GiB.

    Raises:
        OnnxOperatorError: It is too new, or has an operator that is not known.
        OnnxFileError: It is no valid ONNX.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # ValidationError, InferenceError and bare ones of its C++ part
        raise _translated(model, str(error), OnnxFileError, "the file is no valid ONNX") from error


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
        self._path = path
        self._interface = interface
        self._width = vector_width(model, interface)
        try:
            self._session = _open(path, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise _translated(model, str(error), OnnxFileError, "ONNX Runtime cannot load the file") from error

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
            rows = self._run(self._session, ids, mask)
        except Exception as error:  # as above
            raise OnnxRunError(
                f"the model fails for ids of shape {ids.shape}: {self._cause(error, ids, mask)}"
            ) from error
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

    def _run(self, session: onnxruntime.InferenceSession, ids: Input, mask: Mask) -> Rows:
        feeds = {self._interface.input_ids: ids, self._interface.attention_mask: mask}
        if self._interface.token_type_ids:
            feeds[self._interface.token_type_ids] = np.zeros_like(mask)
        rows: Rows = session.run([self._interface.output], feeds)[0]
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
                self._check(self._run(self._session, ids, mask), ids, mask)
                works = middle
            except Exception:  # as above
                failing = middle
        return works

    def _cause(self, error: Exception, ids: Input, mask: Mask) -> str:
        """What failed, by the file's own node where possible: ONNX Runtime's optimizer joins and renames nodes."""
        message = str(error)
        with contextlib.suppress(Exception):
            plain = _open(self._path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
            try:
                self._run(plain, ids, mask)
            except Exception as plainer:  # as above
                message = str(plainer) if _RUNNING.search(str(plainer)) else message
        return _node_and_reason(message)


def _open(path: Path, level: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4  # what goes wrong is said by us, once
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _translated(model: onnx.ModelProto, message: str, otherwise: type[ExportError], what: str) -> ExportError:
    """An error with the names of nodes and operators in it, from what a library said of the whole file."""
    for pattern, of in _VERSIONS:
        if found := pattern.search(message):
            return OnnxOperatorError(
                f"the file has {of} {found[1]}; what is installed here (onnx {onnx.__version__}, ONNX Runtime "
                f"{onnxruntime.__version__}) knows them up to {found[2]}. Export the model again with an older one, or "
                "install newer packages, here and for the server"
            )
    if found := _UNKNOWN.search(message):
        nodes = [node for node in all_nodes(model) if (node.domain, node.op_type) == (found["domain"], found["op"])]
        where = node_name(nodes[0]) if nodes else f"{found['op']} of {found['domain']}"
        return OnnxOperatorError(
            f"{where}: ONNX Runtime has no operator {found['op']} in domain {found['domain']}. A bundle is data, never "
            "code, so operators of one's own cannot come along: export the model with standard operators"
        )
    return otherwise(f"{what}: {_node_and_reason(message)}")


def _node_and_reason(message: str) -> str:
    """What a library says, with the node first where it names one; otherwise its first line."""
    for pattern in _NODES:
        if found := pattern.search(message):
            name = f"node {found['name']}" if found["name"] else "a node without a name"
            return f"{name} ({found['op']}): {_first_line(found['why'])}"
    # It begins with a code of ONNX Runtime's, and the path of a folder that will be gone.
    return _first_line(re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed:)?", "", message))


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or ["no reason given"]
    return _SOURCE_PLACE.sub("", lines[0]).strip().rstrip(".")
