"""Tokens with an attention mask of 0 have the same hidden states as in transformers.

These tokens are called unattended: other tokens do not attend to them, but the model returns their hidden states. For
example, the expansion tokens of a ColBERT query are unattended. The tests run sequences alone and in a batch of mixed
lengths.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import worst_relative_error
from architectures import ARCHITECTURES, VOCAB_SIZE, Architecture, build, save
from exporting import export_once

from encserve_export import Target, export_hf
from encserve_server.engine.base import Engine
from encserve_server.engine.opening import open_engine
from encserve_server.repository.bundle import read_bundle

# The window of local attention is 64 tokens, so each token of these short sequences has an attended token in its
# window. Without an attended token in the window, the hidden state in transformers would depend on the padding.
WINDOW = {"local_attention": 64}
SOME = [
    dataclasses.replace(it, settings=it.settings | WINDOW) if "local_attention" in it.settings else it
    for it in ARCHITECTURES
    if it.name in ("BERT", "RoBERTa", "DistilBERT", "ModernBERT")
]
# (length, number of attended tokens) of each sequence. 0 means that all tokens are attended.
LENGTHS = ((5, 0), (32, 4), (32, 31), (40, 0), (32, 32), (9, 1))


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("architecture", SOME, ids=lambda it: it.folder)
def test_rows_of_unattended_tokens(architecture: Architecture, name: str, tmp_path: Path) -> None:
    target = Target(model_repository=tmp_path, name="some")
    made = export_once(export_hf, save(architecture, tmp_path), target=target, max_sequence_tokens=60, ids_only=True)
    graph = read_bundle(made.path).graph
    engine: Engine = open_engine(graph, engine=name, precision="model", device="cpu", intra_op_threads=1)
    model, random = build(architecture), np.random.default_rng(0)
    sequences = [random.integers(3, VOCAB_SIZE, length) for length, _ in LENGTHS]
    attended = [seen for _, seen in LENGTHS]
    together = engine.run(sequences, attended=attended).rows
    for ids, seen, got in zip(sequences, attended, together, strict=True):
        mask = torch.arange(len(ids))[None] < (seen or len(ids))  # (1, seq)
        with torch.inference_mode():
            want = model(input_ids=torch.from_numpy(ids)[None], attention_mask=mask.long()).last_hidden_state[0].numpy()
        (alone,) = engine.run([ids], attended=[seen]).rows
        assert max(worst_relative_error(got, want), worst_relative_error(alone, want)) <= 5e-5
