"""Long sequences: the same rows, and memory that grows with the length and not with its square."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from encserve_export import EncoderConfig
from encserve_export.check.agreement import check_inspection, check_parity, relative_error
from encserve_export.ground.precision import Precision
from encserve_export.ground.runtime import open_session
from encserve_export.models.own import trace
from encserve_export.models.own.init import random_encoder
from encserve_export.onnx_graph import query_blocks

LONG = EncoderConfig(vocab_size=50, d_model=16, n_heads=2, d_ff=32, n_layers=2, max_sequence_tokens=1300)
# In bytes, of a program that runs the graph for one sequence: what it needs beyond what it needed for one token.
MEMORY = r"""
import re, sys
from pathlib import Path
import numpy as np
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
def peak(tokens):
    ids = np.ones((1, tokens), np.int64)
    session.run(None, {"input_ids": ids, "attention_mask": ids})
    # Of this program alone: ru_maxrss would be of who started it too.
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
print(peak(1), peak(int(sys.argv[2])))
"""
REFERENCE_MEMORY = r"""
import re, sys
from pathlib import Path
import torch
from encserve_export import EncoderConfig
from encserve_export.models.own.init import random_encoder
torch.set_num_threads(1)
encoder = random_encoder(EncoderConfig.from_mapping(eval(sys.argv[1])), 0)
def peak(tokens):
    ids = torch.ones((1, tokens), dtype=torch.int64)
    with torch.inference_mode():
        encoder(ids, ids)
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
print(peak(1), peak(int(sys.argv[2])))
"""
WIDE = {"vocab_size": 50, "d_model": 64, "n_heads": 16, "d_ff": 64, "n_layers": 1, "max_sequence_tokens": 8192}


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_queries_in_blocks_give_the_same_rows(
    tmp_path: Path, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of 64 queries, of which the last is short.
    monkeypatch.setattr(query_blocks, "_SCORES", 1)
    encoder = random_encoder(LONG, 0)
    graphs = trace.write_graphs(encoder, tmp_path, precision)
    model = onnx.load(graphs.files[0])
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("If") == 2
    assert not any(node.op_type == "Softmax" for node in model.graph.node)
    check_inspection(encoder, graphs)
    session = open_session(graphs.files[0])
    random = np.random.default_rng(0)
    ids = random.integers(0, 50, (3, 200))
    mask = (np.arange(200) < np.array([[200], [1], [130]])).astype(np.int64)
    (got,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    want = encoder(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    bound = {"float32": 5e-5, "float16": 2e-2, "int8": 0.15}[precision]
    assert relative_error(got[mask == 1], want[mask == 1]) <= bound


def test_a_model_of_short_sequences_has_no_loop(tiny: EncoderConfig, tmp_path: Path) -> None:
    model = onnx.load(trace.write_graphs(random_encoder(tiny, 0), tmp_path).files[0])
    assert "If" not in {node.op_type for node in model.graph.node}


def test_the_gate_reaches_the_longest_sequence(tmp_path: Path) -> None:
    encoder = random_encoder(LONG, 0)
    parity = check_parity(encoder, trace.write_graphs(encoder, tmp_path).files[0])
    assert (1300, 1299, 650) in [case.lengths for case in parity.cases]


@pytest.mark.system
def test_memory_grows_with_the_length_and_not_with_its_square(tmp_path: Path) -> None:
    """The scores of 8,192 tokens and 16 heads are 4.3 GB; what runs is a few blocks of 67 MB."""
    encoder = random_encoder(EncoderConfig.from_mapping(WIDE), 0)
    path = trace.write_graphs(encoder, tmp_path).files[0]
    assert _growth(MEMORY, str(path)) < 0.3e9
    assert _growth(REFERENCE_MEMORY, repr(WIDE)) < 0.2e9


def _growth(program: str, argument: str) -> int:
    """How much more memory, in bytes, a program needs for 8,192 tokens than for one."""
    command = [sys.executable, "-c", program, argument, "8192"]
    peaks = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()
    return int(peaks[1]) - int(peaks[0])
