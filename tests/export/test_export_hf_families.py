"""Families of encoders as transformers makes them: the same rows and the same attention, in every precision."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from encserve_export import graph
from encserve_export.encoder import Encoder
from encserve_export.layouts import hf_bert
from encserve_export.precision import Precision
from encserve_export.verify import check_inspection, check_parity, relative_error

transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 302,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mpnet": SMALL,
    "nomic_bert": SMALL,
    "modernbert": SMALL
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    | {"local_attention": 16, "global_attn_every_n_layers": 3},
    "gte": SMALL | {"type_vocab_size": 0},
}


def make(family: str, folder: Path) -> tuple[Any, Encoder]:
    """Transformers' own model, with random weights, and ours of its files."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    layout = hf_bert.read_layout(json.loads((folder / "config.json").read_text()))
    return theirs, layout.load(hf_bert.plain_names(load_file(folder / "model.safetensors")))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_attention_are_transformers_own(family: str, tmp_path: Path) -> None:
    theirs, encoder = make(family, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    graphs = graph.write_graphs(encoder, tmp_path / "ours")
    check_parity(encoder, graphs.files[0])
    check_inspection(encoder, graphs)
    lengths = (300, 1, 40)
    ids = np.random.default_rng(0).integers(3, 200, (3, 300))
    mask = (np.arange(300) < np.array(lengths)[:, None]).astype(np.int64)
    session = onnxruntime.InferenceSession(graphs.files[0], providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    for row, length in enumerate(lengths):
        alone = torch.from_numpy(ids[row : row + 1, :length])
        with torch.inference_mode():
            want = theirs(alone, torch.ones_like(alone), output_attentions=True, output_hidden_states=True)
            got = encoder.inspect(alone, torch.ones_like(alone))
        assert relative_error(rows[row, :length], want.last_hidden_state[0].numpy()) <= 5e-5
        for ours, weights in zip(got.attention_weights, want.attentions, strict=True):
            torch.testing.assert_close(ours, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precisions_pass_their_gates(family: str, precision: Precision, tmp_path: Path) -> None:
    _, encoder = make(family, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    graphs = graph.write_graphs(encoder, tmp_path / "ours", precision)
    check_parity(encoder, graphs.files[0], precision)
    check_inspection(encoder, graphs)
