"""Bare checkpoints: each layout is recognised and loaded exactly; what the weights do not tell is asked for by name."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BARE_GOLDENS, golden_cases, golden_checkpoint, golden_embeddings, golden_fields
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from safetensors.torch import load_file
from state_dicts import LAYOUTS, VARIANTS, state_dict
from torch import Tensor, nn

from encserve_export import Encoder, EncoderConfig, ExportError, Source, Target, export_encoder
from encserve_export.check.agreement import least_cosine
from encserve_export.ground.errors import (
    CheckpointError,
    ConfigError,
    EmbeddingTableError,
    UnknownLayoutError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.ground.precision import Precision
from encserve_export.models.own import layouts
from encserve_export.models.own.encoder import sinusoids
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.layouts import known_layouts
from encserve_export.models.own.state_dict import Found, Table, find_encoder
from encserve_export.source.weights import read_table

CHOICES: dict[str, Any] = {"activation": "relu", "norm": "post", "scale_embedding": False, "position": "sinusoidal"}
# What each layout's weights tell; "split-qkv" stands for those with Linear layers of full width.
ASKED = {"n_heads": 2, **CHOICES}


def random_weights(**fields: Any) -> Encoder:
    """A small encoder of which no two numbers are the same, biases and norms included."""
    sizes = {"vocab_size": 11, "d_model": 8, "n_heads": 2, "d_ff": 12, "n_layers": 2, "max_sequence_tokens": 24}
    encoder = random_encoder(EncoderConfig.from_mapping(sizes | fields), 0)
    random = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random))
    return encoder


def saved(layout: str = "split-qkv", **fields: Any) -> dict[str, Tensor]:
    """A whole state dict, the embedding table included."""
    encoder = random_weights(**VARIANTS.get(layout, {}) | fields)
    return state_dict(layout, encoder) | {"embedding.weight": encoder.embeddings.tokens.weight}


def same_weights(found: Found, encoder: Encoder) -> bool:
    got, want = found.encoder.state_dict(), encoder.state_dict()
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("name", BARE_GOLDENS)
def test_rows_are_those_of_the_original_implementation(name: str) -> None:
    path = golden_embeddings(name)
    table = Table(*read_table(path)) if path else None
    found = find_encoder(load_file(golden_checkpoint(name)), golden_fields(name), embeddings=table)
    assert name.startswith(found.layout)
    for sequence, want in zip(*golden_cases(name), strict=True):
        ids = torch.from_numpy(sequence)[None]
        torch.testing.assert_close(found.encoder(ids, torch.ones_like(ids))[0], torch.from_numpy(want))


def test_fused_qkv_merges_heads_as_its_own_code_does() -> None:
    name = "fused-qkv-as-written"
    fields = {key: value for key, value in golden_fields(name).items() if key != "merge_heads"}
    path = golden_embeddings(name)
    assert path is not None
    found = find_encoder(load_file(golden_checkpoint(name)), fields, embeddings=Table(*read_table(path)))
    assert found.encoder.config.merge_heads == "reshape"
    assert any('"merge_heads": "transpose"' in remark for remark in found.remarks)
    sequences, rows = golden_cases(name)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = nn.utils.rnn.pad_sequence([torch.from_numpy(sequence) for sequence in sequences], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    for got, want in zip(found.encoder(ids, mask), rows, strict=True):
        torch.testing.assert_close(got[: len(want)], torch.from_numpy(want))


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@pytest.mark.parametrize("longest", [40, 1100])
def test_heads_that_are_reshaped_reach_the_bundle(models: Path, precision: Precision, longest: int) -> None:
    """Of a sequence alone and in company, with and without blocks of queries."""
    sizes = {"vocab_size": 11, "d_model": 32, "n_heads": 4, "d_ff": 64, "n_layers": 2, "max_sequence_tokens": longest}
    encoder = random_encoder(EncoderConfig.from_mapping({**sizes, **VARIANTS["fused-qkv"]}), 0)
    target = Target(model_repository=models, name="reshaped")
    exported = export_encoder(encoder, Source("init", "reshaped"), target, precision=precision)
    assert exported.manifest.parity.max_padding_error < (1e-4 if precision == "float32" else 0.1)
    lengths = [longest, 7, 1, longest // 2]
    ids = torch.randint(11, (4, longest), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    (rows,) = InferenceSession(exported.path / "model.onnx").run(None, feeds)
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
def test_any_size_survives_the_way_through_a_layout(
    layout: str, n_heads: int, d_k: int, d_ff: int, n_layers: int, flags: tuple[bool, bool, bool], root: str
) -> None:
    fields: dict[str, Any] = {"n_heads": n_heads, "d_model": 2 * d_k * n_heads, "d_ff": d_ff, "n_layers": n_layers}
    fields |= dict(zip(("attention_bias", "final_norm", "residual"), flags, strict=True))
    encoder = random_weights(**fields | VARIANTS.get(layout, {}))
    table = Table("weight", encoder.embeddings.tokens.weight)
    state = {root + name: tensor for name, tensor in state_dict(layout, encoder).items()}
    choices = {name: getattr(encoder.config, name) for name in (*CHOICES, "residual", "n_heads", "max_sequence_tokens")}
    found = find_encoder(state, choices, embeddings=table)
    assert found.layout == layout
    assert found.encoder.config == encoder.config
    assert same_weights(found, encoder)


def test_every_layout_has_a_module_that_is_found() -> None:
    assert sorted(known_layouts()) == sorted(LAYOUTS)
    assert all(layout.summary for layout in known_layouts().values())


NEW_LAYOUT = """
from encserve_export.models.own.layouts.stack import OUTPUT, QKV, StackLayout, linear
LAYOUT = StackLayout(
    name="new", summary="", block="h.{layer}.", parts={QKV: linear("q", "k", "v"), OUTPUT: linear("o")}
)
"""


def test_a_layout_is_added_by_adding_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new_layout.py").write_text(NEW_LAYOUT)
    monkeypatch.setattr(layouts, "__path__", [*layouts.__path__, str(tmp_path)])
    known_layouts.cache_clear()
    try:
        state = {f"h.{layer}.{name}.weight": torch.randn(8, 8) for layer in (0, 1) for name in "qkvo"}
        fields = {"n_heads": 2, "residual": True, "scale_embedding": False, "position": "none"}
        found = find_encoder(state | {"W_embed": torch.randn(11, 8)}, fields)
        assert (found.layout, found.encoder.config.n_layers) == ("new", 2)
    finally:
        sys.modules.pop(f"{layouts.__name__}.new_layout", None)
        known_layouts.cache_clear()


@given(data=st.data())
def test_whatever_is_wrong_with_a_checkpoint_is_an_error_of_ours(data: st.DataObject) -> None:
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
    fields = ASKED | {"residual": False} | data.draw(st.dictionaries(names, values, max_size=2))
    table = Table("weight", torch.zeros(11, 8)) if "embedding.weight" not in state else None
    longest = data.draw(st.sampled_from([None, 0, -1, 40]))
    with contextlib.suppress(ExportError):
        find_encoder(state, fields, embeddings=table, max_sequence_tokens=longest)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_state_dict_of_pytorchs_own_encoder(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False).eval()
    table = Table("weight", torch.randn(11, 8))
    fields = ASKED | {"norm": "pre" if norm_first else "post"}
    encoder = find_encoder(theirs.state_dict(), fields, embeddings=table).encoder
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        want = theirs(encoder.embeddings(ids))
    torch.testing.assert_close(encoder(ids, torch.ones_like(ids)), want)


def test_everything_the_weights_do_not_tell_is_asked_for_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        find_encoder(saved("fused-qkv"), {})
    assert str(caught.value) == (
        "the weights, in the layout fused-qkv, do not tell scale_embedding (true, false); norm (post, pre); "
        "activation (relu, gelu, gelu_tanh, silu); n_heads (a divisor of 8); position (sinusoidal, none): "
        "give each in the JSON file that --config names"
    )


@pytest.mark.parametrize(
    ("layout", "asked"),
    [
        ("per-head-linears", {"activation", "norm", "scale_embedding", "position"}),
        ("raw-matrices", {"n_heads", "activation", "norm", "scale_embedding", "position"}),
        ("fused-qkv", {"n_heads", "activation", "norm", "scale_embedding", "position"}),
        ("attention-only", {"residual", "scale_embedding", "position"}),
        ("split-qkv", {"n_heads", "activation", "norm", "scale_embedding", "position"}),
        ("torch-native", {"n_heads", "activation", "norm", "scale_embedding", "position"}),
    ],
)
def test_no_more_is_asked_for_than_is_needed(layout: str, asked: set[str]) -> None:
    fields = {name: value for name, value in (ASKED | {"residual": False}).items() if name in asked}
    find_encoder(saved(layout), fields)
    for name in asked:
        with pytest.raises(ConfigError, match=rf"do not tell {name} \([^;]*\): give"):
            find_encoder(saved(layout), {other: value for other, value in fields.items() if other != name})


def test_all_contradictions_are_told_with_both_values() -> None:
    given_fields = ASKED | {"d_model": 16, "n_layers": 3, "final_norm": True, "vocab_size": 11, "n_token_types": 2}
    with pytest.raises(ConfigError) as caught:
        find_encoder(saved(), given_fields)
    assert str(caught.value) == (
        "the checkpoint and the configuration contradict each other: d_model is 8 there, 16 here; n_layers is 2 there, "
        "3 here; final_norm is false there, true here; n_token_types is 0 there, 2 here"
    )


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("split-qkv", {"norm": "none"}, 'norm is post or pre there, "none" here'),
        ("split-qkv", {"position": "learned"}, 'position is sinusoidal or none there, "learned" here'),
        ("split-qkv", {"activation": "tanh"}, 'activation is relu or gelu or gelu_tanh or silu there, "tanh" here'),
        ("per-head-linears", {"n_heads": 4}, "n_heads is 2 there, 4 here"),
        ("attention-only", {"norm": "post"}, 'norm is "none" there, "post" here'),
        ("attention-only", {"d_ff": 2048}, "d_ff is 0 there, 2048 here"),
        ("raw-matrices", {"attention_bias": True}, "attention_bias is false there, true here"),
        ("split-qkv", {"n_heads": 3}, "n_heads must divide d_model; was 3 for 8"),
        ("split-qkv", {"n_heads": "2"}, "n_heads must be an integer; was '2'"),
        ("split-qkv", {"max_sequence_tokens": "9"}, "max_sequence_tokens must be an integer; was '9'"),
        ("split-qkv", {"dropout": 0.1}, "unknown configuration fields: dropout; known are vocab_size"),
    ],
)
def test_a_configuration_that_cannot_be(layout: str, fields: dict[str, Any], message: str) -> None:
    needed = {"residual": False, "scale_embedding": False, "position": "none"} if layout == "attention-only" else ASKED
    if layout == "per-head-linears":
        needed = CHOICES
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        find_encoder(saved(layout), needed | fields)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_and_surplus_weights_are_all_named(layout: str) -> None:
    state = saved(layout)
    gone = sorted(name for name in state if "W_O" in name or "1.norm2" in name or "linear2" in name)
    for name in gone:
        del state[name]
    state |= {"classifier.weight": torch.ones(2, 8), "classifier.bias": torch.ones(2)}
    with pytest.raises(WeightNamesError) as caught:
        find_encoder(state, {})
    assert f"the weights do not fit the layout {layout}; " in str(caught.value)
    assert f"missing: {', '.join(gone)}; " in str(caught.value)
    assert "surplus: classifier.bias, classifier.weight. Save the encoder with all of its weights" in str(caught.value)


def test_a_missing_bias_is_not_taken_for_none() -> None:
    state = saved()
    del state["layers.1.attention.W_K.bias"]
    with pytest.raises(WeightNamesError, match=r"missing: layers\.1\.attention\.W_K\.bias\."):
        find_encoder(state, ASKED)


def test_a_gap_in_the_layers() -> None:
    state = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in saved().items()}
    with pytest.raises(WeightNamesError, match=r"missing: layers\.1\..*surplus: layers\.7\."):
        find_encoder(state, ASKED)


def test_an_unknown_layout_lists_the_names_and_the_layouts() -> None:
    state = {f"blocks.{index}.attn.{name}": torch.ones(4, 4) for index in range(12) for name in ("q", "k")}
    with pytest.raises(UnknownLayoutError) as caught:
        find_encoder(state, ASKED)
    text = str(caught.value)
    assert text.startswith("no layout is recognised in these names: blocks.N.attn.k, blocks.N.attn.q. ")
    assert all(f"{layout} by " in text for layout in LAYOUTS)
    assert "torch-native by layers.N.self_attn.in_proj_weight" in text
    assert "encserve-export hf" in text


def test_a_layout_that_was_asked_for() -> None:
    assert find_encoder(saved(), ASKED, layout="split-qkv").layout == "split-qkv"
    with pytest.raises(UnknownLayoutError, match=r"Looked for fused-qkv by layers\.N\.attention\.qkv_layer\.weight\."):
        find_encoder(saved(), ASKED, layout="fused-qkv")
    with pytest.raises(UnknownLayoutError, match="layout must be one of attention-only, .*; was 'bert'"):
        find_encoder(saved(), ASKED, layout="bert")


def test_an_encoder_beside_a_decoder_is_refused() -> None:
    state = {f"{part}.{name}": tensor for part in ("encoder", "decoder") for name, tensor in saved().items()}
    with pytest.raises(UnsupportedModelError, match=r"2 stacks \(split-qkv at decoder\.layers\..*save it alone"):
        find_encoder(state, ASKED)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_named(layout: str, value: float) -> None:
    state = saved(layout)
    name = sorted(name for name in state if "W_O" in name or "linear1.weight" in name or "W1" in name)[-1]
    state[name].view(-1)[3:5] = value
    fields = ASKED | {"residual": False}
    if layout == "attention-only":
        fields = {name: fields[name] for name in ("residual", "scale_embedding", "position")}
    with pytest.raises(WeightValueError, match=f"{name} must be finite; 2 of its [0-9]+ numbers are NaN or infinite"):
        find_encoder(state, fields)


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
def test_shapes_that_disagree_are_told_with_both(layout: str, name: str, message: str) -> None:
    state = saved(layout)
    state[name] = state[name][:-1]
    fields = {"residual": False, "scale_embedding": False, "position": "none"} if layout == "attention-only" else ASKED
    with pytest.raises(WeightShapeError, match=f"{name} {message}"):
        find_encoder(state, fields)


@pytest.mark.parametrize("values", [torch.ones(24), torch.ones(24, 8, 1), torch.ones(0, 8)])
def test_a_projection_that_is_no_matrix(values: Tensor) -> None:
    with pytest.raises(WeightShapeError, match=r"W_Q\.weight must be a matrix; its shape was \("):
        find_encoder(saved() | {"layers.0.attention.W_Q.weight": values}, ASKED)


def test_heads_that_do_not_fill_d_model() -> None:
    state = {name: tensor for name, tensor in saved("per-head-linears").items() if ".1.weight" not in name}
    state |= {f"layers.{i}.W_{kind}.{h}.weight": torch.ones(4, 8) for i in (0, 1) for kind in "QKV" for h in (1, 2)}
    state |= {f"layers.{i}.W_{kind}.2.bias": torch.ones(4) for i in (0, 1) for kind in "QKV"}
    with pytest.raises(ConfigError, match="n_heads must divide d_model; was 3 for 8"):
        find_encoder(state, CHOICES)


def test_an_embedding_table_is_needed() -> None:
    state = saved()
    del state["embedding.weight"]
    with pytest.raises(
        EmbeddingTableError, match="holds no embedding table; give the file that does with --embeddings"
    ):
        find_encoder(state, ASKED)


def test_tables_under_other_names_are_proposed() -> None:
    state = saved()
    state |= {"encoder.vocab": state.pop("embedding.weight"), "places": torch.randn(1, 30, 8)}
    with pytest.raises(WeightNamesError) as caught:
        find_encoder(state, ASKED)
    assert "surplus: encoder.vocab, places" in str(caught.value)
    assert (
        "If one of encoder.vocab (11, 8), places (1, 30, 8) is a table, save it under another name: of token "
        "embeddings W_embed or embedding.weight (" in str(caught.value)
    )
    state = {"embedding.weight": state.pop("encoder.vocab"), "pos_embedding": state.pop("places"), **state}
    assert find_encoder(state, without_position()).encoder.config.position == "learned"


@pytest.mark.parametrize("name", ["lookup", "linear.bias"])
def test_what_is_no_table_is_not_proposed(name: str) -> None:
    with pytest.raises(WeightNamesError) as caught:
        find_encoder(saved() | {name: torch.ones(11, 9)}, ASKED)
    assert "is a table" not in str(caught.value)


def test_one_embedding_table_is_enough() -> None:
    table = Table("weight", torch.ones(11, 8))
    with pytest.raises(EmbeddingTableError, match=r"table of its own, embedding\.weight; leave out --embeddings"):
        find_encoder(saved(), ASKED, embeddings=table)
    with pytest.raises(EmbeddingTableError, match=r"several embedding tables: decoder\.embedding\.weight, embedding"):
        find_encoder(saved() | {"decoder.embedding.weight": table.values}, ASKED)


@pytest.mark.parametrize("shape", [(11, 9), (8, 11), (8,), (0, 8)])
def test_an_embedding_table_of_another_width(shape: tuple[int, ...]) -> None:
    state = saved()
    del state["embedding.weight"]
    with pytest.raises(WeightShapeError) as caught:
        find_encoder(state, ASKED, embeddings=Table("table", torch.ones(shape)))
    assert str(caught.value) == (
        f"--embeddings table must have the shape (rows, 8), as wide as the checkpoint's d_model; was {shape}"
    )


@pytest.mark.parametrize("name", ["W_embed", "embed.weight", "model.token_embedding.weight", "src_emb.weight"])
def test_embedding_tables_by_their_usual_names(name: str) -> None:
    state = saved()
    state[name] = state.pop("embedding.weight")
    assert torch.equal(find_encoder(state, ASKED).encoder.embeddings.tokens.weight, state[name])


def without_position() -> dict[str, Any]:
    return {name: value for name, value in ASKED.items() if name != "position"}


@pytest.mark.parametrize("name", ["pos_encoding.pe", "PE", "encoder.positional.pe"])
@pytest.mark.parametrize("batch_axis", [None, 0, 1])
def test_a_buffer_of_sinusoids_is_recognised(name: str, batch_axis: int | None) -> None:
    # As reference code makes it: in float32, where late angles are off.
    position, column = torch.arange(3000)[:, None], torch.arange(8)[None]
    angle = position / torch.pow(10000, (2 * (column // 2)) / 8)
    table = torch.where(column % 2 == 0, angle.sin(), angle.cos())
    table = table if batch_axis is None else table.unsqueeze(batch_axis)
    found = find_encoder(saved() | {name: table}, without_position())
    assert (found.encoder.config.position, found.encoder.config.max_sequence_tokens) == ("sinusoidal", 512)
    assert torch.equal(found.encoder.embeddings.positions, sinusoids(512, 8))
    assert any(name in remark and "is the sinusoid (largest difference" in remark for remark in found.remarks)


def test_sinusoids_reach_beyond_their_buffer() -> None:
    state = saved() | {"pe": sinusoids(20, 8)}
    assert find_encoder(state, without_position()).encoder.config.max_sequence_tokens == 20
    longer = find_encoder(state, without_position(), max_sequence_tokens=600).encoder
    assert torch.equal(longer.embeddings.positions, sinusoids(600, 8))


def test_a_buffer_of_something_else_is_used_as_it_is() -> None:
    halves = torch.cat((sinusoids(30, 8)[:, 0::2], sinusoids(30, 8)[:, 1::2]), dim=1)
    found = find_encoder(saved() | {"pe": halves[None]}, without_position())
    assert (found.encoder.config.position, found.encoder.config.max_sequence_tokens) == ("learned", 30)
    assert torch.equal(found.encoder.embeddings.positions, halves)
    assert any("pe is no sinusoid" in remark and "used as they are" in remark for remark in found.remarks)
    shorter = find_encoder(saved() | {"pe": halves}, without_position(), max_sequence_tokens=7).encoder
    assert torch.equal(shorter.embeddings.positions, halves[:7])


@pytest.mark.parametrize("name", ["pos_embed", "model.position_embeddings.weight", "pos_emb.weight"])
def test_a_learned_table_of_positions(name: str) -> None:
    table = torch.randn(30, 8)
    encoder = find_encoder(saved() | {name: table}, without_position()).encoder
    assert encoder.config.position == "learned"
    assert torch.equal(encoder.embeddings.positions, table)


def test_a_buffer_of_sinusoids_may_be_kept() -> None:
    table = sinusoids(30, 8).half()
    encoder = find_encoder(saved() | {"pe": table}, ASKED | {"position": "learned"}).encoder
    assert torch.equal(encoder.embeddings.positions, table.float())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "sinusoidal"}, r"but pe is no sinusoid \(largest difference 1\.0e\+00, tolerance 1\.0e-03\)"),
        ({"position": "none"}, 'position is "learned" there, "none" here'),
        ({"max_sequence_tokens": 31}, "must be at most 30, as far as the rows of pe reach; was 31"),
        ({"position_offset": 2, "max_sequence_tokens": 29}, "must be at most 28, as far as the rows of pe reach"),
        ({"position_offset": 30}, "max_sequence_tokens must be at least 1; was 0"),
    ],
)
def test_a_buffer_that_the_configuration_contradicts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_encoder(saved() | {"pe": torch.zeros(30, 8)}, without_position() | fields)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (torch.zeros(30, 6), WeightShapeError, r"pe must have the shape \(rows, 8\), .*; was \(30, 6\)"),
        (torch.zeros(2, 30, 8), WeightShapeError, r"pe must have the shape .*; was \(2, 30, 8\)"),
        (torch.full((30, 8), float("nan")), WeightValueError, "pe must be finite; 240 of its 240"),
        (torch.zeros(30, 8, dtype=torch.int64), WeightValueError, "pe must hold floating-point numbers; was int64"),
    ],
)
def test_a_buffer_that_is_no_table(table: Tensor, error: type[CheckpointError], message: str) -> None:
    with pytest.raises(error, match=message):
        find_encoder(saved() | {"pe": table}, without_position())


def test_tensors_without_all_of_their_numbers() -> None:
    name = "layers.0.attention.W_O.weight"
    for tensor in (torch.ones(8, 8).to_sparse(), torch.ones(8, 8, device="meta")):
        with pytest.raises(WeightValueError, match=r"W_O\.weight must hold all of its numbers"):
            find_encoder(saved() | {name: tensor}, ASKED)


def test_other_precisions_become_float32() -> None:
    name = "layers.0.attention.W_O.weight"
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        tensor = torch.eye(8).to(dtype)
        output = find_encoder(saved() | {name: tensor}, ASKED).encoder.state_dict()["blocks.0.attention.output.weight"]
        assert torch.equal(output, torch.eye(8))
    with pytest.raises(WeightValueError, match="must be finite; 8 of its 64"):
        find_encoder(saved() | {name: torch.eye(8, dtype=torch.float64) * 1e300}, ASKED)


def test_choices_of_the_formula_reach_the_encoder() -> None:
    fields = ASKED | {"layer_norm_eps": 1e-6, "activation": "gelu_tanh", "residual": False, "scale_embedding": True}
    config = find_encoder(saved(), fields | {"max_sequence_tokens": 40}, max_sequence_tokens=30).encoder.config
    assert dataclasses.asdict(config).items() >= fields.items()
    assert config.max_sequence_tokens == 30, "the argument goes before the field"
