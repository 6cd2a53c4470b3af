"""Families of encoders as transformers makes them: the same rows and the same attention, in every precision."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from encserve_export import Target, export_hf
from encserve_export.bundle.write import Exported
from encserve_export.check.agreement import check_inspection, check_parity, relative_error
from encserve_export.ground.errors import UnsupportedModelError
from encserve_export.ground.precision import Precision
from encserve_export.models.own import trace
from encserve_export.models.own.encoder import Encoder
from encserve_export.models.own.layouts import hf_bert
from encserve_export.onnx_graph import query_blocks

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 302,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "nomic_bert": SMALL,
    "modernbert": SMALL
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    | {"local_attention": 16, "global_attn_every_n_layers": 3},
    "gte": SMALL | {"type_vocab_size": 0},
}


def save(family: str, folder: Path, **settings: Any) -> Any:
    """Transformers' own model, with random weights, and its files in a folder."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family] | settings)
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    return theirs


def make(family: str, folder: Path, **settings: Any) -> tuple[Any, Encoder]:
    """The same, and our encoder of its files."""
    theirs = save(family, folder, **settings)
    layout = hf_bert.read_layout(json.loads((folder / "config.json").read_text()))
    return theirs, layout.load(hf_bert.plain_names(load_file(folder / "model.safetensors")))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_attention_are_transformers_own(family: str, tmp_path: Path) -> None:
    theirs, encoder = make(family, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    graphs = trace.write_graphs(encoder, tmp_path / "ours")
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
        for states, wanted in zip(got.hidden_states, want.hidden_states, strict=True):
            assert relative_error(states[0].numpy(), wanted[0].numpy()) <= 5e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.system
def test_other_precisions_pass_their_gates(family: str, precision: Precision, tmp_path: Path) -> None:
    _, encoder = make(family, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    graphs = trace.write_graphs(encoder, tmp_path / "ours", precision)
    check_parity(encoder, graphs.files[0], precision)
    check_inspection(encoder, graphs)


@pytest.mark.parametrize("family", ["modernbert", "gte"])
def test_queries_in_blocks_see_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of thousands of tokens: blocks of 64 queries, with rotary positions and with windows."""
    monkeypatch.setattr(query_blocks, "_SCORES", 1)
    theirs, encoder = make(family, tmp_path / "theirs", max_position_embeddings=1300)
    (tmp_path / "ours").mkdir()
    path = trace.write_graphs(encoder, tmp_path / "ours").files[0]
    assert "If" in {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(3, 200, (2, 200))
    mask = (np.arange(200) < np.array([[200], [130]])).astype(np.int64)
    (rows,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    for row, length in enumerate((200, 130)):
        with torch.inference_mode():
            want = theirs(torch.from_numpy(ids[row : row + 1, :length])).last_hidden_state
        assert relative_error(rows[row, :length], want[0].numpy()) <= 5e-5


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gte", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 'rope_type must be "default"; was'),
        ("gte", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type must be "default"; was'),
        ("gte", {"position_embedding_type": "absolute"}, 'position_embedding_type must be "rope"; was'),
        ("nomic_bert", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 'rope_type must be "default"; was'),
        ("nomic_bert", {"hidden_size": None, "n_embd": 64}, "config.json lacks hidden_size"),
        ("nomic_bert", {"head_dim": 8}, "head_dim must be hidden_size / num_attention_heads; was 8"),
        ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "without rope_scaling; was"),
        ("modernbert", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must have"),
        ("modernbert", {"local_attention": 1}, "local_attention must be at least 2; was 1"),
    ],
)
def test_what_is_not_our_encoders(family: str, settings: dict[str, Any], reason: str) -> None:
    """Another route is tried: these have other rows."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family]).to_dict() | settings
    with pytest.raises(UnsupportedModelError, match=reason):
        hf_bert.read_layout({name: value for name, value in config.items() if value is not None})


def test_other_positions_are_transformers_own(tmp_path: Path) -> None:
    directory, target = tmp_path / "theirs", Target(model_repository=tmp_path / "models", name="m")
    save("gte", directory, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModelError, match='rope_type must be "default"'):
        export_hf(directory, target, max_sequence_tokens=20, ids_only=True, via="own")
    assert export_hf(directory, target, max_sequence_tokens=20, ids_only=True).manifest.source.route == "transformers"


def test_names_of_transformers_own_are_read_by_transformers(tmp_path: Path) -> None:
    """It writes weights by their authors' names, and reads them by its own as well."""
    directory, target = tmp_path / "theirs", Target(model_repository=tmp_path / "models", name="m")
    theirs = save("nomic_bert", directory)
    save_file(dict(theirs.state_dict()), directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="the weights do not fit NomicBertModel; missing"):
        export_hf(directory, target, max_sequence_tokens=20, ids_only=True, via="own")
    assert export_hf(directory, target, max_sequence_tokens=20, ids_only=True).manifest.source.route == "transformers"


@pytest.mark.system
def test_ours_takes_what_it_is_better_at(tmp_path: Path) -> None:
    """Long texts; others it runs no faster."""
    save("gte", tmp_path / "theirs", max_position_embeddings=1025)

    def export(longest: int) -> Exported:
        target = Target(model_repository=tmp_path / "models", name="m", version=str(longest))
        return export_hf(tmp_path / "theirs", target, max_sequence_tokens=longest, ids_only=True)

    short, long = export(20), export(1025)
    assert (short.manifest.source.route, long.manifest.source.route) == ("transformers", "own")
    assert (
        "our own encoder is no faster for it up to 1024 tokens; with --via own it can be inspected"
        in short.notes["route"]
    )
