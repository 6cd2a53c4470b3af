"""The exporter compares its graphs with PyTorch in float64. Each of these comparisons is called a gate.

A gate must refuse a faulty graph. A gate must accept the rounding errors of float32.
"""

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from encserve_export import Encoder, EncoderConfig, Source, Target, export_encoder, report
from encserve_export.bundle.heads import write_head
from encserve_export.check.agreement import (
    Parity,
    case_lengths,
    check_inspection,
    check_rows,
    compare,
    least_cosine,
    random_sequences,
    reference_rows,
    relative_error,
)
from encserve_export.core.errors import ParityError
from encserve_export.core.float64 import in_float64
from encserve_export.core.precision import BOUNDS, Bounds, Precision
from encserve_export.models.graphs import Graphs, write_graphs
from encserve_export.models.own.encoder import Inspection
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.reference import encoder_reference
from encserve_export.models.reference import Reference
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_export.routes import reference as routes_reference

SOURCE = Source("init", "random weights, seed 0")
# One attention layer of full size with large weights, so that each token attends to few tokens. If two tokens have
# nearly equal scores, rounding decides which token gets the attention. So PyTorch itself is inexact in float32.
SHARP = EncoderConfig(
    vocab_size=1000, d_model=512, n_heads=8, d_ff=0, n_layers=1, max_sequence_tokens=64,
    attention_bias=False, norm="none", residual=False,
)  # fmt: skip
Fault = Callable[[Encoder], Encoder]


def config(**fields: Any) -> Fault:
    """Return a fault that changes these fields of the configuration. The weights stay the same."""

    def change(encoder: Encoder) -> Encoder:
        other = Encoder(dataclasses.replace(encoder.config, **fields))
        other.load_state_dict(encoder.state_dict())
        return other.eval().requires_grad_(False)

    return change


def weights(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault that changes the weight `name`. The configuration stays the same."""

    def faulty(encoder: Encoder) -> Encoder:
        other = Encoder(encoder.config)
        state = encoder.state_dict()
        other.load_state_dict(state | {name: change(state[name])})
        return other.eval().requires_grad_(False)

    return faulty


def swap_heads(output: Tensor) -> Tensor:
    """Exchange the two heads of a (d_model, d_model) matrix. One half of the columns belongs to each head."""
    first, second = output.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def scale_queries(qkv: Tensor) -> Tensor:
    """Multiply the queries of a (3·d_model, d_model) matrix by √d_k. This undoes the division of scores by √d_k."""
    q, k, v = qkv.chunk(3)
    return torch.cat((q * (q.shape[1] // 2) ** 0.5, k, v))


FAULTS: dict[str, Fault] = {
    "a weight of a layer scaled by 1.001": weights("blocks.1.feed_forward.outer.weight", lambda it: it * 1.001),
    "embeddings not scaled by √d_model": config(scale_embedding=False),
    "scores not divided by √d_k": weights("blocks.0.attention.qkv.weight", scale_queries),
    "ε of 1e-5 read as 1e-3": config(layer_norm_eps=1e-3),
    "heads swapped in W_O": weights("blocks.0.attention.output.weight", swap_heads),
    "relu for gelu": config(activation="relu"),
    "tanh's gelu for gelu": config(activation="gelu_tanh"),
}


@pytest.fixture
def encoder(tiny: EncoderConfig) -> Encoder:
    return random_encoder(dataclasses.replace(tiny, activation="gelu", scale_embedding=True), 0)


def write(encoder: Encoder, folder: Path, precision: Precision = "float32") -> Graphs:
    longest = encoder.config.max_sequence_tokens
    folder.mkdir(exist_ok=True)
    return write_graphs(
        encoder_reference(encoder), folder, "tracing with inspection", precision=precision, max_sequence_tokens=longest
    )


def rows_gate(encoder: Encoder, graphs: Graphs) -> Parity:
    reference, config = encoder_reference(encoder), encoder.config
    sequences = random_sequences(config.max_sequence_tokens, vocab_size=config.vocab_size)
    want = reference_rows(reference, sequences, reference.module)
    return check_rows(OnnxEncoder(graphs.files[0], graphs.graph), sequences, 0, want=want)


def inspection_gate(encoder: Encoder, graphs: Graphs) -> None:
    assert graphs.inspect_graph is not None
    folder, longest = graphs.files[0].parent, encoder.config.max_sequence_tokens
    check_inspection(folder, graphs.graph, graphs.inspect_graph, encoder_reference(encoder), longest=longest)


@pytest.mark.parametrize("fault", FAULTS)
def test_both_gates_refuse_faults(encoder: Encoder, tmp_path: Path, fault: str) -> None:
    graphs = write(FAULTS[fault](encoder), tmp_path)
    figures = r"error .*\d; at most \S+ is allowed"
    with pytest.raises(ParityError, match=figures):
        rows_gate(encoder, graphs)
    with pytest.raises(ParityError, match=figures):
        inspection_gate(encoder, graphs)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_for_a_model_with_a_large_float32_error(tmp_path: Path, fault: str) -> None:
    """Add each fault to a model for which PyTorch itself is inexact in float32, and expect an error.

    The tolerance for this model is four times PyTorch's own float32 error. Each fault causes a larger error.
    """
    fields = {"n_layers": 2, "d_ff": 64, "norm": "post", "residual": True, "activation": "gelu", "d_model": 128}
    settings = dataclasses.asdict(SHARP) | fields | {"scale_embedding": True, "n_heads": 2}
    right, random = random_encoder(EncoderConfig.from_mapping(settings), 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        right.embeddings.tokens.weight.normal_(generator=random)
    graphs = write(FAULTS[fault](right), tmp_path)
    with pytest.raises(ParityError, match="differs from PyTorch"):
        rows_gate(right, graphs)


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3])
def test_errors_above_3_times_the_bound_are_refused(encoder: Encoder, tmp_path: Path, scale: float) -> None:
    wrong = weights("blocks.0.attention.output.weight", lambda it: it * (1 + scale))(encoder)
    ids = torch.arange(50)[None].remainder(50)[:, :24]
    with in_float64(encoder), in_float64(wrong):
        moved = relative_error(wrong(ids, torch.ones_like(ids)).numpy(), encoder(ids, torch.ones_like(ids)).numpy())
    graphs = write(wrong, tmp_path)
    allowed = BOUNDS["float32"].error or 0
    if moved > 3 * allowed:
        with pytest.raises(ParityError):
            rows_gate(encoder, graphs)
    elif moved < allowed / 3:
        rows_gate(encoder, graphs)


@pytest.mark.parametrize("seed", range(3))
def test_the_rounding_error_of_float32_is_accepted(tmp_path: Path, seed: int) -> None:
    encoder, random = random_encoder(SHARP, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(generator=random)
    graphs = write(encoder, tmp_path)
    parity = rows_gate(encoder, graphs)
    inspection_gate(encoder, graphs)
    assert parity.float32_error is not None
    assert parity.float32_error > 1.25e-5, "four times this error is more than 5e-5"
    assert parity.bounds.error == 4 * parity.float32_error
    assert parity.max_relative_error <= parity.bounds.error


def test_attention_of_another_block_is_refused(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    graphs = write(encoder, tmp_path)
    assert graphs.inspect_graph is not None
    graphs.inspect_graph.attention_weights_names[:] = graphs.inspect_graph.attention_weights_names[::-1]
    with pytest.raises(ParityError, match=r"in attention_weights.1, for 7 tokens: the error is \S+; at most 1.0e-05"):
        inspection_gate(encoder, graphs)


def test_wrong_inspections_in_lower_precisions_are_refused(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(dataclasses.replace(tiny, d_model=32), 0)
    with pytest.raises(ParityError, match=r"for inspections differs from PyTorch in \S+, for .*: a row has the cosine"):
        inspection_gate(random_encoder(encoder.config, 1), write(encoder, tmp_path, "int8"))
    with torch.no_grad():  # the first block now attends to few tokens
        attention: Any = encoder.blocks[0].attention
        attention.qkv.weight[: 2 * attention.d_model].mul_(8)
    graphs = write(encoder, tmp_path / "sharp", "float16")
    assert graphs.inspect_graph is not None
    graphs.inspect_graph.attention_weights_names[:] = graphs.inspect_graph.attention_weights_names[::-1]
    with pytest.raises(ParityError, match=r"attention_weights.1, for .*: the error is \S+; at most 1.0e-02 is allowed"):
        inspection_gate(encoder, graphs)


class Maskless(Encoder):
    """A model that ignores its mask, so tokens also attend to padding."""

    def inspect(self, inputs: Tensor, attention_mask: Tensor, *, return_attention: bool = True) -> Inspection:
        return super().inspect(inputs, torch.ones_like(attention_mask), return_attention=return_attention)


def test_a_model_that_attends_to_padding_is_refused(tiny: EncoderConfig, models: Path) -> None:
    encoder = Maskless(tiny)
    encoder.load_state_dict(random_encoder(tiny, 0).state_dict())
    message = r"gives other rows for padded sequences .*: a row has the relative error \S+; at most 1\.0e-05 is allowed"
    with pytest.raises(ParityError, match=message):
        export_encoder(encoder.eval(), SOURCE, Target(model_repository=models, name="maskless"))
    assert not models.exists()


def test_an_export_with_a_faulty_graph_is_refused(
    encoder: Encoder, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write the graph of another model. The exporter must notice the difference, and must leave no files."""
    wrong = encoder_reference(FAULTS["heads swapped in W_O"](encoder))
    monkeypatch.setattr(
        routes_reference, "write_graphs", lambda _, *given, **options: write_graphs(wrong, *given, **options)
    )
    with pytest.raises(ParityError, match="differs from PyTorch"):
        export_encoder(encoder, SOURCE, Target(model_repository=models, name="wrong"))
    assert not models.exists()


def test_the_report_warns_of_a_large_float32_error(encoder: Encoder, models: Path) -> None:
    exported = export_encoder(encoder, Source("init", "random"), Target(model_repository=models, name="plain"))

    def reported() -> str:
        shown = io.StringIO()
        report.show(exported, Console(file=shown))
        return shown.getvalue()

    said = reported()
    figures = r"max error \S+, tolerance 5\.0e-05, compared with PyTorch in float64; PyTorch's own float32 error \S+e-0"
    assert re.search(figures, said)
    assert re.search(r"padding +max error \S+, tolerance 1\.0e-05\n", said)
    exported.manifest.parity.float32_error = 1.1e-4
    assert "own float32 error 1.1e-04. float32 is off by more than 1e-04 for this model" in reported()


def test_in_float64_restores_types_and_bits() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3).half())
    module.register_buffer("table", torch.arange(3.0).to(torch.bfloat16))
    module[1].weight = module[0].weight
    module.register_buffer("places", torch.arange(3))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with in_float64(module):
        assert {it.dtype for it in module.parameters()} == {torch.float64}
        assert [it.dtype for it in module.buffers()] == [torch.float64, torch.int64]
    after = module.state_dict()
    assert {name: it.dtype for name, it in after.items()} == {name: it.dtype for name, it in before.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert module[1].weight is module[0].weight


class Mixed(nn.Module):
    """A model that computes one part in float32, even if the weights are float64.

    So the gate cannot run the model in float64: the model fails or returns NaN.
    """

    def __init__(self, encoder: Encoder, *, far_off: bool = False) -> None:
        super().__init__()
        self.encoder, self.far_off = encoder, far_off

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows: Tensor = self.encoder(ids, mask)
        if self.far_off:  # float32 cannot represent the lowest number of float64
            return torch.where(rows == rows.amax(), rows, (rows + torch.finfo(rows.dtype).min).float() * 0 + rows)
        return rows @ torch.eye(rows.shape[2])


@pytest.mark.parametrize("far_off", [False, True])
def test_a_model_that_does_not_run_in_float64_is_compared_with_float32(encoder: Encoder, far_off: bool) -> None:
    reference = Reference(module=Mixed(encoder, far_off=far_off), description="Mixed", vocab_size=50)
    sequences = random_sequences(24, vocab_size=50)
    want = reference_rows(reference, sequences, reference.module)
    parity = check_rows(reference, sequences, 0, want=want)
    assert parity.float32_error is None
    assert parity.max_relative_error < 1e-6
    assert parity.bounds == BOUNDS["float32"]


def test_float32_rounding_in_a_head_is_accepted(tmp_path: Path) -> None:
    """Export a head whose float32 result has few correct digits. The gate must accept the result.

    In this head, large numbers of opposite sign cancel out.
    """
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(256, 8, bias=False))
    with torch.no_grad():
        weight: Any = head[0].weight
        weight.mul_(1e4)
        weight[:, 1:].copy_(weight[:, :-1].clone())
    head.requires_grad_(False)
    assert write_head(head, 256, tmp_path).width == 8
    assert np.isfinite(weight.numpy()).all()


@given(st.integers(1, 5000))
def test_batches_cover_one_token_the_longest_and_mixed_lengths(longest: int) -> None:
    cases = case_lengths(longest)
    assert {(1,), (longest,), (longest, max(1, longest // 2), 1)} <= set(cases)
    assert all(1 <= length <= longest for lengths in cases for length in lengths)
    assert len(set(cases)) == len(cases)


def test_the_error_is_the_largest_error_of_a_row() -> None:
    want = np.array([[3, 4], [0, 100]], np.float32)
    got = np.array([[3, 4.5], [0, 100]], np.float32)
    found = compare(got, want, Bounds(error=0.05))
    assert found.error == pytest.approx(0.1)
    assert found.excess == "a row has the relative error 1.0e-01; at most 5.0e-02 is allowed"
    assert not compare(got, want, Bounds(error=0.11, cosine=0.9)).excess
    assert compare(got, want, Bounds(cosine=0.9999)).excess.startswith("a row has the cosine similarity 0.99")


@pytest.mark.parametrize(
    ("got", "want", "error", "cosine"),
    [
        ([3, 4], [6, 8], 0.5, 1),
        ([1, 0], [0, 1], 2**0.5, 0),
        ([0, 0], [0, 0], 0, 1),
        ([0, 0], [0, 1], 1, 0),
        ([0, 1e-9], [0, 0], np.inf, 0),
        ([np.nan, 1], [1, 1], np.inf, -1),
        ([np.inf, 1], [1, 1], np.inf, -1),
    ],
)
def test_comparisons_with_zeros_nan_and_infinity(
    got: list[float], want: list[float], error: float, cosine: float
) -> None:
    rows = np.array([got, [1, 1]], np.float32), np.array([want, [1, 1]], np.float32)
    assert relative_error(*rows) == pytest.approx(error)
    assert least_cosine(*rows) == pytest.approx(cosine)


class DifferentInOnnx(nn.Module):
    """A head whose graph differs from PyTorch by a factor of 1.001."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, pooled: Tensor) -> Tensor:
        vectors: Tensor = self.linear(pooled) * (1.001 if torch.onnx.is_in_onnx_export() else 1)
        return vectors


def test_a_head_whose_graph_differs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"differ from PyTorch: a row has the relative error 1\.0e-03"):
        write_head(DifferentInOnnx().requires_grad_(False), 8, tmp_path)
