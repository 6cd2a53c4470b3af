"""Traces an Encoder into an ONNX file.

Plain ONNX operators only, so that any runtime may read the file; ONNX Runtime fuses what it can when it loads it.
"""

import itertools
import warnings
from pathlib import Path

import onnx
import torch

from encserve_export.encoder import Encoder

# The first with Gelu as an operator of its own, and the newest that the tracing exporter writes.
OPSET = 20
FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
INPUT_IDS, ATTENTION_MASK, OUTPUT = "input_ids", "attention_mask", "last_hidden_state"

# A protobuf message ends at 2 GiB; a little is left for the graph itself.
MAX_FILE_BYTES = 2**31 - 2**24


def write_graph(encoder: Encoder, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Writes the encoder as ONNX: input_ids, attention_mask int64 (batch, seq) -> float32 (batch, seq, d_model).

    Args:
        encoder: The encoder, in float32.
        folder: Where to put the file; it must be empty.
        max_file_bytes: With more bytes of weights than this, they go into a file of their own beside the graph.

    Returns:
        The files written, the graph first.
    """
    path = folder / FILE
    _trace(encoder, path)
    # Above 2 GiB the exporter writes a file for each weight; read back, they are put into one.
    model = onnx.load(path)
    for written in folder.iterdir():
        written.unlink()
    weights = itertools.chain(encoder.parameters(), encoder.buffers())
    if sum(weight.nbytes for weight in weights) <= max_file_bytes:
        onnx.save_model(model, path)
        return [path]
    onnx.save_model(model, path, save_as_external_data=True, location=DATA_FILE, size_threshold=1024)
    return [path, folder / DATA_FILE]


def _trace(encoder: Encoder, path: Path) -> None:
    # Two sequences of different length: no size in the example is 1, which would be taken for a constant.
    ids = torch.tensor([[0, 0, 0], [0, 0, 0]])  # (batch, seq)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])  # (batch, seq)
    axes = {0: "batch", 1: "seq"}
    with warnings.catch_warnings():
        # The tracing exporter announces that it will go one day. The graph of its successor is no faster and takes six
        # times as long to write; torch is pinned, so the day is ours to choose.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.onnx|encserve_export\.graph")
        torch.onnx.export(
            encoder,
            (ids, mask),
            str(path),  # above 2 GiB the exporter does not take a Path for one
            input_names=[INPUT_IDS, ATTENTION_MASK],
            output_names=[OUTPUT],
            dynamic_axes={INPUT_IDS: axes, ATTENTION_MASK: axes, OUTPUT: axes},
            opset_version=OPSET,
            dynamo=False,
        )
