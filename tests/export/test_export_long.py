"""For long sequences, attention runs in blocks of queries.

Hidden states must stay the same, and memory must not grow with the square of the sequence length.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import ARCHITECTURES, save

from encserve_export import EncoderConfig, Exported, Source, Target, export_encoder, export_hf
from encserve_export.check.agreement import relative_error
from encserve_export.core.precision import Precision
from encserve_export.models.own.init import random_encoder
from encserve_export.onnx_graph import query_blocks
from encserve_export.onnx_graph.run import OnnxEncoder

NAMED = {architecture.name: architecture for architecture in ARCHITECTURES}
LONG = {"vocab_size": 50, "d_model": 32, "n_heads": 2, "d_ff": 64, "n_layers": 2, "max_sequence_tokens": 1300}
WIDE = {"vocab_size": 50, "d_model": 64, "n_heads": 16, "d_ff": 64, "n_layers": 1, "max_sequence_tokens": 8192}
# A program that runs the graph for one token and then for more tokens. After both runs, the program prints the peak
# memory of each run, in bytes.
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
    # Not ru_maxrss, which includes the parent's memory.
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


@pytest.fixture(
    scope="module", params=["float32", *(pytest.param(it, marks=pytest.mark.system) for it in ("float16", "int8"))]
)
def long_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export an encoder for 1,300 tokens, with attention in blocks of 64 queries.

    The last block has fewer queries, because 1,300 is not a multiple of 64.
    """
    target = Target(model_repository=tmp_path_factory.mktemp("models"), name="m")
    encoder, precision = random_encoder(EncoderConfig.from_mapping(LONG), 0), request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_blocks, "_SCORES", 1)
        return export_encoder(encoder, Source("init", "random"), target, precision=precision)


def test_blocks_of_queries_give_the_same_rows(long_bundle: Exported) -> None:
    precision: Precision = long_bundle.manifest.graph.precision  # type: ignore[assignment]
    model = onnx.load(long_bundle.path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("If") == 2
    assert not any(node.op_type == "Softmax" for node in model.graph.node)
    ids = np.random.default_rng(0).integers(0, 50, (3, 200))
    mask = (np.arange(200) < np.array([[200], [1], [130]])).astype(np.int64)
    got = OnnxEncoder(long_bundle.path, long_bundle.manifest.graph)(ids, mask)
    want = random_encoder(EncoderConfig.from_mapping(LONG), 0)(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    bound = {"float32": 5e-5, "float16": 2e-2, "int8": 0.15}[precision]
    assert relative_error(got[mask == 1], want[mask == 1]) <= bound


def test_the_gate_compares_the_longest_sequence(long_bundle: Exported) -> None:
    assert [1300, 650, 1] in [list(case.lengths) for case in long_bundle.manifest.parity.cases]


def test_a_model_of_short_sequences_has_no_loop(bundles: dict[str, Exported]) -> None:
    model = onnx.load(bundles["split-qkv"].path / "model.onnx")
    assert "If" not in {node.op_type for node in model.graph.node}


@pytest.mark.system
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "GTE"])
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_models_of_transformers_run_in_blocks(name: str, precision: Precision, tmp_path: Path) -> None:
    """Export models of other architectures, and expect that each layer has one branch for long sequences.

    In this branch, attention runs in blocks of queries. The exporter compares the graph with the PyTorch model. For
    long sequences, the PyTorch model uses PyTorch's fast attention, which stores no matrix of attention weights.
    """
    settings = NAMED[name].settings | {"max_position_embeddings": 1300}
    directory = save(type(NAMED[name])(name, NAMED[name].model_type, settings), tmp_path)
    target = Target(model_repository=tmp_path / "models", name="m")
    exported = export_hf(directory, target, max_sequence_tokens=1200, ids_only=True, precision=precision)
    operators = [node.op_type for node in onnx.load(exported.path / "model.onnx").graph.node]
    assert operators.count("If") == exported.manifest.encoder.n_layers
    assert exported.manifest.HasField("inspect_graph")


@pytest.mark.weekly
def test_memory_grows_with_the_length_and_not_with_its_square(models: Path) -> None:
    """Run 8,192 tokens, and expect a small growth of memory in ONNX Runtime and in PyTorch.

    The attention scores of 8,192 tokens and 16 heads would take 4.3 GB. The scores of one block take 67 MB.
    """
    encoder = random_encoder(EncoderConfig.from_mapping(WIDE), 0)
    exported = export_encoder(encoder, Source("init", "random"), Target(model_repository=models, name="m"))
    assert _growth(MEMORY, str(exported.path / "model.onnx")) < 0.3e9
    assert _growth(REFERENCE_MEMORY, repr(WIDE)) < 0.2e9


def _growth(program: str, argument: Any) -> int:
    """Run a program, and return the growth of its peak memory from one token to 8,192 tokens, in bytes."""
    command = [sys.executable, "-c", program, argument, "8192"]
    peaks = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()
    return int(peaks[1]) - int(peaks[0])
