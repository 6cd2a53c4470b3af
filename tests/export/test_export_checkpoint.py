"""The exporter recognises the state dicts of hand-written encoders, and loads the weights without changes.

If weights or settings are missing, the error names them.
"""

import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import golden_checkpoint, golden_embeddings, golden_fields
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from state_dicts import LAYOUTS, VARIANTS, saved, state_dict
from torch import Tensor, nn

from encserve_export import Encoder, EncoderConfig, ExportError, Source, Target, export_encoder
from encserve_export.check.agreement import least_cosine
from encserve_export.cli import main
from encserve_export.core.errors import (
    ConfigError,
    EmbeddingTableError,
    UnknownLayoutError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.core.precision import Precision
from encserve_export.core.runtime import open_session
from encserve_export.models.own import layouts
from encserve_export.models.own.encoder import sinusoids
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.layouts import known_layouts
from encserve_export.models.own.state_dict import CheckpointEncoder, Table, find_encoder, rename_tensors
from encserve_export.source.weights import read_checkpoint, read_table

CHOICES: dict[str, Any] = {"activation": "relu", "norm": "post", "scale_embedding": False, "position": "sinusoidal"}
LINEAR = {"n_heads": 2, **CHOICES}
# For each layout of weights, the settings that the exporter cannot find in the weights.
NEEDED = dict.fromkeys(LAYOUTS, LINEAR) | {
    "per-head-linears": CHOICES,
    "attention-only": {"residual": False, "scale_embedding": False, "position": "sinusoidal"},
}
WITHOUT_POSITION = {name: value for name, value in LINEAR.items() if name != "position"}
NAN = float("nan")


def find(state: dict[str, Tensor], fields: dict[str, Any] = LINEAR, **options: Any) -> CheckpointEncoder:
    return find_encoder(state, fields, **options)


def find_golden(name: str, **changed: Any) -> CheckpointEncoder:
    path = golden_embeddings(name)
    table = Table(*read_table(path)) if path else None
    fields = {field: value for field, value in (golden_fields(name) | changed).items() if value is not None}
    return find_encoder(load_file(golden_checkpoint(name)), fields, embeddings=table)


def test_fused_qkv_merges_heads_like_its_original_code() -> None:
    found = find_golden("fused-qkv-as-written", merge_heads=None)
    assert found.encoder.config.merge_heads == "reshape"
    assert any('"merge_heads": "transpose"' in remark for remark in found.remarks)
    assert find_golden("split-qkv").encoder.config.merge_heads == "transpose"


@pytest.mark.parametrize(
    "precision", ["float32", *(pytest.param(it, marks=pytest.mark.system) for it in ("float16", "int8"))]
)
def test_reshaped_heads_reach_the_bundle(models: Path, precision: Precision) -> None:
    """Compare the bundle with the encoder, for short and for long sequences.

    In batches with a sequence of more than 1,024 tokens, attention runs in blocks of queries.
    """
    sizes = {"vocab_size": 11, "d_model": 32, "n_heads": 4, "d_ff": 64, "n_layers": 2, "max_sequence_tokens": 1100}
    encoder = random_encoder(EncoderConfig.from_mapping({**sizes, **VARIANTS["fused-qkv"]}), 0)
    exported = export_encoder(
        encoder, Source("init", "random"), Target(model_repository=models, name="m"), precision=precision
    )
    session = open_session(exported.path / "model.onnx")
    for longest in (40, 1100):
        lengths = [longest, 7, 1, longest // 2]
        ids = torch.randint(11, (4, longest), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        (rows,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        for got, sequence, length in zip(rows, ids, lengths, strict=True):
            want = encoder(sequence[None, :length], torch.ones(1, length, dtype=torch.int64))[0].numpy()
            assert least_cosine(got[:length], want) > (1 - 1e-6 if precision == "float32" else 0.99)


@given(
    layout=st.sampled_from(LAYOUTS),
    n_heads=st.integers(1, 4),
    d_k=st.integers(1, 3),
    d_ff=st.integers(1, 9),
    n_layers=st.integers(1, 12),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    root=st.sampled_from(["", "encoder.", "model.transformer_encoder."]),
)
def test_encoders_of_any_size_are_loaded_exactly(
    layout: str, n_heads: int, d_k: int, d_ff: int, n_layers: int, flags: tuple[bool, bool, bool], root: str
) -> None:
    fields: dict[str, Any] = {"n_heads": n_heads, "d_model": 2 * d_k * n_heads, "d_ff": d_ff, "n_layers": n_layers}
    fields |= dict(zip(("attention_bias", "final_norm", "residual"), flags, strict=True))
    encoder = distinct_weights(**fields | VARIANTS.get(layout, {}))
    state = {root + name: tensor for name, tensor in state_dict(layout, encoder).items()}
    choices = {name: getattr(encoder.config, name) for name in (*CHOICES, "residual", "n_heads", "max_sequence_tokens")}
    found = find(state, choices, embeddings=Table("weight", encoder.embeddings.tokens.weight))
    assert found.layout == layout
    assert found.encoder.config == encoder.config
    got, want = found.encoder.state_dict(), encoder.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def distinct_weights(**fields: Any) -> Encoder:
    """Return a small encoder. All weights are random, including biases and norms."""
    sizes = {"vocab_size": 11, "max_sequence_tokens": 24}
    encoder = Encoder(EncoderConfig.from_mapping(sizes | fields)).eval().requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random))
    return encoder


NEW_LAYOUT = """
from encserve_export.models.own.layouts.stack import OUTPUT, QKV, StackLayout, linear
LAYOUT = StackLayout(
    name="new", summary="", block="h.{layer}.", parts={QKV: linear("q", "k", "v"), OUTPUT: linear("o")}
)
"""


def test_a_layout_is_added_by_adding_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(known_layouts()) == sorted(LAYOUTS)
    (tmp_path / "new_layout.py").write_text(NEW_LAYOUT)
    monkeypatch.setattr(layouts, "__path__", [*layouts.__path__, str(tmp_path)])
    known_layouts.cache_clear()
    try:
        state = {f"h.{layer}.{name}.weight": torch.randn(8, 8) for layer in (0, 1) for name in "qkvo"}
        fields = {"n_heads": 2, "residual": True, "scale_embedding": False, "position": "none"}
        found = find(state | {"W_embed": torch.randn(11, 8)}, fields)
        assert (found.layout, found.encoder.config.n_layers) == ("new", 2)
    finally:
        sys.modules.pop(f"{layouts.__name__}.new_layout", None)
        known_layouts.cache_clear()


@given(data=st.data())
def test_broken_checkpoints_raise_only_export_errors(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    state = saved(layout) | ({"pe": torch.zeros(30, 8)} if data.draw(st.booleans()) else {})
    for name in data.draw(st.lists(st.sampled_from(sorted(state)), max_size=3, unique=True)):
        shape = data.draw(st.lists(st.sampled_from([0, 1, 3, 4, 8, 12, 24]), max_size=3))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]))
        other = data.draw(st.sampled_from([None, f"module.{name}", f"x{name}", "layers.99999999999.W_Q", name]))
        del state[name]
        if other is not None:
            state[other] = torch.zeros(shape, dtype=dtype)
    values: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, False, -1, 0, 1, 2, 3.5, "none", "learned", "post", "relu", [], {}]
    )
    names = st.sampled_from([field.name for field in dataclasses.fields(EncoderConfig)])
    fields = LINEAR | {"residual": False} | data.draw(st.dictionaries(names, values, max_size=2))
    table = Table("weight", torch.zeros(11, 8)) if "embedding.weight" not in state else None
    longest = data.draw(st.sampled_from([None, 0, -1, 40]))
    with contextlib.suppress(ExportError):
        find(state, fields, embeddings=table, max_sequence_tokens=longest)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_state_dict_of_pytorchs_encoder_is_loaded(norm_first: bool) -> None:
    """Our encoder returns the same hidden states as PyTorch's encoder.

    Both have a large eps, so that a wrong eps changes the hidden states. The comparisons with golden checkpoints would
    not notice a wrong eps such as 1e-6.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first, batch_first=True, layer_norm_eps=1e-3)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8, 1e-3), enable_nested_tensor=False).eval()
    table = Table("weight", torch.randn(11, 8))
    fields = LINEAR | {"norm": "pre" if norm_first else "post", "layer_norm_eps": 1e-3}
    encoder = find(theirs.state_dict(), fields, embeddings=table).encoder
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        want = theirs(encoder.embeddings(ids))
    torch.testing.assert_close(encoder(ids, torch.ones_like(ids)), want)


def test_tensors_in_nested_dicts_and_lists_are_read(tmp_path: Path) -> None:
    """Read a file with nested parameters, and expect flat names such as layers.0.W_Q.

    Code without nn.Module saves its parameters as {"W_embed": ..., "layers": [{"W_Q": ...}, ...]}.
    """
    state = saved("raw-matrices")
    layers: list[dict[str, Tensor]] = [{}, {}]
    for name in [name for name in state if name.startswith("layers.")]:
        _, layer, matrix = name.split(".")
        layers[int(layer)][matrix] = state[name]
    torch.save({"W_embed": state["embedding.weight"], "layers": layers}, tmp_path / "params.pt")
    read = dict(read_checkpoint(tmp_path / "params.pt").tensors)
    assert torch.equal(read.pop("W_embed"), state.pop("embedding.weight"))
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_rename_changes_weight_names() -> None:
    state = saved("torch-native") | {"pos.weight": torch.randn(30, 8)}
    theirs = {re.sub(r"^layers", "model.blocks", name): tensor for name, tensor in state.items()}
    renamed = rename_tensors(theirs, {"model.blocks": "layers", "pos.weight": "pos_embedding.weight"})
    encoder = find(renamed, WITHOUT_POSITION).encoder
    assert torch.equal(encoder.embeddings.positions, state["pos.weight"])
    one = torch.ones(1)
    assert rename_tensors({"xpos.weight": one, "pos.weight": one}, {"pos.weight": "p"}).keys() == {"xpos.weight", "p"}
    with pytest.raises(
        WeightNamesError, match=r"--rename block=layers: no name contains block; the names are .*layers\.N\."
    ):
        rename_tensors(state, {"block": "layers"})
    with pytest.raises(WeightNamesError, match=r"two weights the name layers\.0\.norm1\.weight; "):
        rename_tensors(state, {"norm2": "norm1"})


def test_the_command_renames_weights(tmp_path: Path, models: Path) -> None:
    state = saved("torch-native") | {"pos.weight": torch.randn(30, 8)}
    save_file(state, tmp_path / "native.safetensors")
    (tmp_path / "fields.json").write_text(
        '{"n_heads": 2, "activation": "relu", "norm": "post", "scale_embedding": false}'
    )
    arguments = ["checkpoint", str(tmp_path / "native.safetensors"), "--config", str(tmp_path / "fields.json")]
    arguments += ["--model-repository", str(models), "--name", "m"]
    refused = CliRunner().invoke(main, arguments)
    assert "surplus: pos.weight" in refused.stderr
    assert "Then rename it with --rename OLD=NEW. Names for token embeddings: " in refused.stderr
    assert CliRunner().invoke(main, [*arguments, "--rename", "pos.weight"]).exit_code == 2
    exported = CliRunner().invoke(main, [*arguments, "--rename", "pos.weight=pos_embedding.weight"])
    assert exported.exit_code == 0, exported.output
    assert "pos_embedding.weight is not the sinusoid" in " ".join(exported.stderr.split())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_lists_the_fields_that_the_weights_do_not_show(layout: str) -> None:
    needed = NEEDED[layout]
    find(saved(layout), needed)
    for name in needed:
        with pytest.raises(ConfigError, match=rf"do not show {name} \([^;]*\): give"):
            find(saved(layout), {other: value for other, value in needed.items() if other != name})
    with pytest.raises(ConfigError) as caught:
        find(saved(layout), {})
    assert all(f"{name} (" in str(caught.value) for name in needed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_lists_all_missing_and_surplus_weights(layout: str) -> None:
    state = saved(layout)
    gone = sorted(name for name in state if "W_O" in name or "1.norm2" in name or "linear2" in name)
    for name in gone:
        del state[name]
    with pytest.raises(WeightNamesError) as caught:
        find(state | {"classifier.weight": torch.ones(2, 8), "classifier.bias": torch.ones(2)}, {})
    assert f"the weights do not fit the layout {layout}; " in str(caught.value)
    assert f"missing: {', '.join(gone)}; " in str(caught.value)
    assert "surplus: classifier.bias, classifier.weight. Save the encoder with all of its weights" in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [NAN, float("-inf")])
def test_nan_and_infinity_are_refused(layout: str, value: float) -> None:
    state = saved(layout)
    name = sorted(name for name in state if "W_O" in name or "linear1.weight" in name or "W1" in name)[-1]
    state[name].view(-1)[3:5] = value
    with pytest.raises(WeightValueError, match=f"{name} must be finite; 2 of its [0-9]+ numbers are NaN or infinite"):
        find(state, NEEDED[layout])


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    [
        ("split-qkv", "layers.1.attention.W_K.weight", r"must have the shape \(8, 8\); was \(7, 8\)"),
        ("raw-matrices", "layers.0.W2", r"must have the shape \(12, 8\); was \(11, 8\)"),
        ("raw-matrices", "layers.1.gamma1", r"must have the shape \(8,\); was \(7,\)"),
        ("per-head-linears", "layers.0.W_Q.1.weight", r"must have the shape \(4, 8\); was \(3, 8\)"),
        ("attention-only", "W_V.1", r"must have the shape \(8, 4\); was \(7, 4\)"),
        ("fused-qkv", "layers.0.attention.qkv_layer.weight", r"must have the shape \(24, 8\); was \(23, 8\)"),
        ("torch-native", "layers.1.linear1.bias", r"must have the shape \(12,\); was \(11,\)"),
    ],
)
def test_wrong_shapes_are_refused(layout: str, name: str, message: str) -> None:
    state = saved(layout)
    state[name] = state[name][:-1]
    with pytest.raises(WeightShapeError, match=f"{name} {message}"):
        find(state, NEEDED[layout])


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("split-qkv", {"norm": "none"}, 'norm must be post or pre for these weights, is "none" in --config'),
        ("split-qkv", {"position": "learned"}, 'position must be sinusoidal or none for these weights, is "learned"'),
        ("split-qkv", {"activation": "tanh"}, "activation must be relu or gelu or gelu_tanh or silu for these weights"),
        (
            "split-qkv",
            {"d_model": 16, "n_layers": 3},
            "d_model is 8 .* 16 in --config; n_layers is 2 in the weights, 3",
        ),
        ("split-qkv", {"final_norm": True}, "final_norm is false in the weights, true in --config"),
        ("per-head-linears", {"n_heads": 4}, "n_heads is 2 in the weights, 4 in --config"),
        ("attention-only", {"norm": "post"}, 'norm is "none" in the weights, "post" in --config'),
        ("attention-only", {"d_ff": 2048}, "d_ff is 0 in the weights, 2048"),
        ("raw-matrices", {"attention_bias": True}, "attention_bias is false in the weights, true"),
        ("split-qkv", {"n_heads": 3}, "n_heads must divide d_model; was 3 for 8"),
        ("split-qkv", {"n_heads": "2"}, "n_heads must be an integer; was '2'"),
        ("split-qkv", {"max_sequence_tokens": "9"}, "max_sequence_tokens must be an integer; was '9'"),
        ("fused-qkv", {"merge_heads": "mix"}, "merge_heads must be one of transpose, reshape; was 'mix'"),
        ("split-qkv", {"dropout": 0.1}, "unknown configuration fields: dropout; known are vocab_size"),
    ],
)
def test_wrong_configurations_are_refused(layout: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(saved(layout), NEEDED[layout] | fields)


W_O, W_K, W_Q = (
    f"layers.{layer}.attention.{name}" for layer, name in ((0, "W_O.weight"), (1, "W_K.bias"), (0, "W_Q.weight"))
)
TABLE = "embedding.weight"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({W_K: None}, WeightNamesError, r"missing: layers\.1\.attention\.W_K\.bias\."),
        ({TABLE: None}, EmbeddingTableError, "holds no embedding table. Give its file with --embeddings"),
        (
            {"decoder.embedding.weight": torch.ones(11, 8)},
            EmbeddingTableError,
            r"tables: decoder\.embedding\.weight, emb",
        ),
        (
            {TABLE: torch.ones(11, 9)},
            WeightShapeError,
            r"embedding\.weight must have the shape \(rows, 8\), .* \(11, 9\)",
        ),
        ({TABLE: torch.ones(0, 8)}, WeightShapeError, r"must have the shape \(rows, 8\), .*; was \(0, 8\)"),
        ({TABLE: torch.full((11, 8), NAN)}, WeightValueError, r"embedding\.weight must be finite; 88 of its 88"),
        ({W_Q: torch.ones(24)}, WeightShapeError, r"W_Q\.weight must be a matrix; its shape was \(24,\)"),
        ({W_Q: torch.ones(0, 8)}, WeightShapeError, r"W_Q\.weight must be a matrix; its shape was \(0, 8\)"),
        ({W_O: torch.ones(8, 8).to_sparse()}, WeightValueError, r"W_O\.weight must be a dense tensor in memory"),
        ({W_O: torch.ones(8, 8, device="meta")}, WeightValueError, r"W_O\.weight must be a dense tensor in memory"),
        ({W_O: torch.eye(8, dtype=torch.float64) * 1e300}, WeightValueError, "must be finite; 8 of its 64"),
        ({W_O: torch.ones(8, 8, dtype=torch.int8)}, WeightValueError, "must hold floating-point numbers; was int8"),
        ({"pe": torch.zeros(30, 6)}, WeightShapeError, r"pe must have the shape \(rows, 8\), .*; was \(30, 6\)"),
        ({"pe": torch.zeros(2, 30, 8)}, WeightShapeError, r"pe must have the shape .*; was \(2, 30, 8\)"),
        ({"pe": torch.full((30, 8), NAN)}, WeightValueError, "pe must be finite; 240 of its 240"),
        ({"pe": torch.zeros(30, 8, dtype=torch.int64)}, WeightValueError, "pe must hold floating-point numbers"),
    ],
)
def test_wrong_tensors_are_refused(changes: dict[str, Tensor | None], error: type[ExportError], message: str) -> None:
    state = {name: tensor for name, tensor in (saved() | changes).items() if tensor is not None}
    with pytest.raises(error, match=message):
        find(state, WITHOUT_POSITION if "pe" in changes else LINEAR)


def test_a_missing_layer_is_refused() -> None:
    with pytest.raises(WeightNamesError, match=r"missing: layers\.1\..*surplus: layers\.7\."):
        find(rename_tensors(saved(), {"layers.1": "layers.7"}))


def test_a_wrong_number_of_heads_is_refused() -> None:
    state = {name: tensor for name, tensor in saved("per-head-linears").items() if ".1.weight" not in name}
    state |= {f"layers.{i}.W_{kind}.{h}.weight": torch.ones(4, 8) for i in (0, 1) for kind in "QKV" for h in (1, 2)}
    state |= {f"layers.{i}.W_{kind}.2.bias": torch.ones(4) for i in (0, 1) for kind in "QKV"}
    with pytest.raises(ConfigError, match="n_heads must divide d_model; was 3 for 8"):
        find(state, CHOICES)


def test_an_unknown_layout_lists_names_layouts_and_commands() -> None:
    state = {f"blocks.{index}.attn.{name}": torch.ones(4, 4) for index in range(12) for name in ("q", "k")}
    with pytest.raises(UnknownLayoutError) as caught:
        find(state)
    text = str(caught.value)
    assert text.startswith("no known layout has these names: blocks.N.attn.k, blocks.N.attn.q. ")
    assert all(f" ({layout})" in text for layout in LAYOUTS)
    assert "layers.N.self_attn.in_proj_weight (torch-native)" in text
    for advice in ("--rename OLD=NEW", "encserve-export module FILE.py:FACTORY", "export_module", "encserve-export hf"):
        assert advice in text


def test_only_the_given_layout_is_tried() -> None:
    assert find(saved(), layout="split-qkv").layout == "split-qkv"
    with pytest.raises(
        UnknownLayoutError, match=r"recognises these names: layers\.N\.attention\.qkv_layer\.weight \(fused-qkv\)\."
    ):
        find(saved(), layout="fused-qkv")
    with pytest.raises(UnknownLayoutError, match="layout must be one of attention-only, .*; was 'bert'"):
        find(saved(), layout="bert")


def test_a_checkpoint_with_encoder_and_decoder_is_refused() -> None:
    state = {f"{part}.{name}": tensor for part in ("encoder", "decoder") for name, tensor in saved().items()}
    with pytest.raises(
        UnsupportedModelError,
        match=r"2 stacks of encoder blocks \(split-qkv at decoder\.layers\..*Save the encoder alone",
    ):
        find(state)


def test_an_error_names_possible_tables() -> None:
    state = saved()
    state |= {"encoder.vocab": state.pop(TABLE), "places": torch.randn(1, 30, 8)}
    with pytest.raises(
        WeightNamesError, match=r"Is one of these a table: encoder\.vocab \(11, 8\), places \(1, 30, 8\)\? Then"
    ):
        find(state)
    with pytest.raises(WeightNamesError) as caught:
        find(saved() | {"lookup": torch.ones(11, 9)})
    assert "is a table" not in str(caught.value)


def test_a_second_embedding_table_is_refused() -> None:
    with pytest.raises(EmbeddingTableError, match=r"holds an embedding table, embedding\.weight; remove --embeddings"):
        find(saved(), embeddings=Table("weight", torch.ones(11, 8)))


@pytest.mark.parametrize("name", ["W_embed", "embed.weight", "model.token_embedding.weight", "src_emb.weight"])
def test_usual_names_of_embedding_tables_are_recognised(name: str) -> None:
    state = saved()
    state[name] = state.pop(TABLE)
    assert torch.equal(find(state).encoder.embeddings.tokens.weight, state[name])


@pytest.mark.parametrize("name", ["pos_encoding.pe", "PE", "encoder.positional.pe"])
@pytest.mark.parametrize("batch_axis", [None, 0, 1])
def test_a_buffer_of_sinusoids_is_recognised(name: str, batch_axis: int | None) -> None:
    # Other code computes the table in float32. In float32, the angles of late positions are inexact.
    position, column = torch.arange(3000)[:, None], torch.arange(8)[None]
    angle = position / torch.pow(10000, (2 * (column // 2)) / 8)
    table = torch.where(column % 2 == 0, angle.sin(), angle.cos())
    found = find(saved() | {name: table if batch_axis is None else table.unsqueeze(batch_axis)}, WITHOUT_POSITION)
    assert (found.encoder.config.position, found.encoder.config.max_sequence_tokens) == ("sinusoidal", 512)
    assert torch.equal(found.encoder.embeddings.positions, sinusoids(512, 8))
    assert any(f"{name} is the sinusoid (largest difference" in remark for remark in found.remarks)


def test_a_sinusoidal_table_may_be_extended() -> None:
    state = saved() | {"pe": sinusoids(20, 8)}
    assert find(state, WITHOUT_POSITION).encoder.config.max_sequence_tokens == 20
    longer = find(state, WITHOUT_POSITION, max_sequence_tokens=600).encoder
    assert torch.equal(longer.embeddings.positions, sinusoids(600, 8))


@pytest.mark.parametrize("name", ["pe", "pos_embed", "model.position_embeddings.weight", "pos_emb.weight"])
def test_a_table_that_is_not_sinusoidal_is_used_unchanged(name: str) -> None:
    halves = torch.cat((sinusoids(30, 8)[:, 0::2], sinusoids(30, 8)[:, 1::2]), dim=1)
    found = find(saved() | {name: halves}, WITHOUT_POSITION)
    assert (found.encoder.config.position, found.encoder.config.max_sequence_tokens) == ("learned", 30)
    assert torch.equal(found.encoder.embeddings.positions, halves)
    assert any(f"{name} is not the sinusoid" in remark for remark in found.remarks)
    shorter = find(saved() | {name: halves}, WITHOUT_POSITION, max_sequence_tokens=7).encoder
    assert torch.equal(shorter.embeddings.positions, halves[:7])


def test_position_learned_uses_the_rows_of_a_sinusoidal_table() -> None:
    table = sinusoids(30, 8).half()
    encoder = find(saved() | {"pe": table}, LINEAR | {"position": "learned"}).encoder
    assert torch.equal(encoder.embeddings.positions, table.float())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"position": "sinusoidal"},
            r"but pe is not the sinusoid \(largest difference 1\.0e\+00, tolerance 1\.0e-03\)",
        ),
        ({"position": "none"}, 'position is "learned" in the weights, "none" in --config'),
        ({"max_sequence_tokens": 31}, "must be at most 30, the rows of pe; was 31"),
        ({"position_offset": 2, "max_sequence_tokens": 29}, "must be at most 28, the rows of pe"),
        ({"position_offset": 30}, "max_sequence_tokens must be at least 1; was 0"),
    ],
)
def test_a_configuration_that_contradicts_the_position_table(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(saved() | {"pe": torch.zeros(30, 8)}, WITHOUT_POSITION | fields)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_weights_of_other_precisions_become_float32(dtype: torch.dtype) -> None:
    encoder = find(saved() | {W_O: torch.eye(8).to(dtype)}).encoder
    assert torch.equal(encoder.state_dict()["blocks.0.attention.output.weight"], torch.eye(8))


def test_given_fields_reach_the_encoder() -> None:
    fields = LINEAR | {"layer_norm_eps": 1e-6, "activation": "gelu_tanh", "residual": False, "scale_embedding": True}
    config = find(saved(), fields | {"max_sequence_tokens": 40}, max_sequence_tokens=30).encoder.config
    assert dataclasses.asdict(config).items() >= fields.items()
    assert config.max_sequence_tokens == 30, "the argument overrides the field"
