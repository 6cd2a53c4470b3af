"""Outputs are bit-identical with and without the shared cache of prepacked weights.

Prepacked weights have the memory layout that ONNX Runtime's kernels need.
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from checkpoints import export_minilm

from encserve_export.core.precision import Precision
from encserve_server.engine.onnx import OnnxEngine, OnnxInspector
from encserve_server.engine.prepacked import PrepackedWeights
from encserve_server.repository.bundle import read_bundle

LENGTHS = ([1], [7], [3, 40, 40, 9] * 4, [100], [64, 1])


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_sessions_with_and_without_the_cache_give_the_same_bits(precision: Precision, tmp_path: Path) -> None:
    export = export_minilm(tmp_path, precision=precision)
    bundle = read_bundle(export.path)
    shared = PrepackedWeights(tmp_path / "cache", bundle.fingerprint, export.path)
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, bundle.vocab_size, length) for length in lengths] for lengths in LENGTHS]
    found: list[list[bytes]] = []
    for weights in (None, shared):
        engine = OnnxEngine(bundle.graph, device="cpu", intra_op_threads=2, parallel_runs=2, weights=weights)
        with contextlib.closing(engine):
            rows = [row for batch in batches for alone in (True, False) for row in engine.run(batch, alone=alone).rows]
        found.append([row.tobytes() for row in rows])
    assert found[0] == found[1]
    inspect = bundle.inspect_graph
    assert inspect is not None
    kinds = [(kind, tuple(range(len(names)))) for kind, names in inspect.names.items()]
    found = []
    for weights in (None, shared):
        with contextlib.closing(OnnxInspector(inspect, device="cpu", weights=weights)) as inspector:
            tensors, _ = inspector.run(batches[1][0], kinds)
            found.append([part.tobytes() for tensor in tensors for part in tensor.parts])
    assert found[0] == found[1]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2
