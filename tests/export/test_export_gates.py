"""What float32 cannot know is not refused, and what moves a row further is: both judged by PyTorch in float64."""

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from encserve_export import Encoder, EncoderConfig, Source, Target, export_encoder, report
from encserve_export.bundle.heads import write_head
from encserve_export.check.agreement import (
    Parity,
    check_inspection,
    check_parity,
    check_rows,
    reference_rows,
    relative_error,
)
from encserve_export.ground.arrays import Ids, Mask, Rows
from encserve_export.ground.errors import ParityError
from encserve_export.ground.float64 import in_float64
from encserve_export.ground.precision import BOUNDS
from encserve_export.models.own import trace
from encserve_export.models.own.init import random_encoder
from encserve_export.models.pretrained import TransformersModel

# The layout of attention alone, in full size and with the weights of its own code: attention looks at few tokens, and
# rounding decides between two that score nearly the same.
SHARP = EncoderConfig(
    vocab_size=1000, d_model=512, n_heads=8, d_ff=0, n_layers=1, max_sequence_tokens=64,
    attention_bias=False, norm="none", residual=False,
)  # fmt: skip
Fault = Callable[[Encoder], Encoder]


def config(**fields: Any) -> Fault:
    """The same weights in another formula."""

    def change(encoder: Encoder) -> Encoder:
        other = Encoder(dataclasses.replace(encoder.config, **fields))
        other.load_state_dict(encoder.state_dict())
        return other.eval().requires_grad_(False)

    return change


def weights(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Other weights in the same formula."""

    def faulty(encoder: Encoder) -> Encoder:
        other = Encoder(encoder.config)
        state = encoder.state_dict()
        other.load_state_dict(state | {name: change(state[name])})
        return other.eval().requires_grad_(False)

    return faulty


def swap_heads(output: Tensor) -> Tensor:
    """(d_model, d_model), of which each head has as many columns as the others."""
    first, second = output.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def scale_queries(qkv: Tensor) -> Tensor:
    """As if scores were not divided by √d_k: (3·d_model, d_model)."""
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


def sharp(seed: int) -> Encoder:
    encoder, random = random_encoder(SHARP, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(generator=random)
    return encoder


@pytest.fixture
def encoder(tiny: EncoderConfig) -> Encoder:
    return random_encoder(dataclasses.replace(tiny, activation="gelu", scale_embedding=True), 0)


def own(encoder: Encoder, graphs: trace.Graphs) -> Parity:
    return check_parity(encoder, graphs.files[0])


def inspections(encoder: Encoder, graphs: trace.Graphs) -> None:
    check_inspection(encoder, graphs)


def others(encoder: Encoder, graphs: trace.Graphs) -> Parity:
    """As a graph and a model of somebody else's are compared."""
    session = onnxruntime.InferenceSession(graphs.files[0], providers=["CPUExecutionProvider"])

    def run(ids: Ids, mask: Mask) -> Rows:
        rows: Rows = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return rows

    model = TransformersModel(encoder, "Encoder", None, 50, 0, ())
    wanted = reference_rows(model, vocab_size=50, max_sequence_tokens=24, module=model.module)
    return check_rows(run, vocab_size=50, max_sequence_tokens=24, pad_token_id=0, wanted=wanted)


@pytest.mark.parametrize("gate", [own, inspections, others])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(encoder: Encoder, tmp_path: Path, fault: str, gate: Callable[..., Any]) -> None:
    graphs = trace.write_graphs(FAULTS[fault](encoder), tmp_path)
    with pytest.raises(ParityError, match=r"error \S+.*, tolerance \S+, PyTorch's own float32 \S+"):
        gate(encoder, graphs)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_where_float32_is_far_off(tmp_path: Path, fault: str) -> None:
    """Four times what PyTorch's float32 is off by hides none of them."""
    fields = {"n_layers": 2, "d_ff": 64, "norm": "post", "residual": True, "activation": "gelu", "d_model": 128}
    settings = dataclasses.asdict(SHARP) | fields | {"scale_embedding": True, "n_heads": 2}
    right, random = random_encoder(EncoderConfig.from_mapping(settings), 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        right.embeddings.tokens.weight.normal_(generator=random)
    graphs = trace.write_graphs(FAULTS[fault](right), tmp_path)
    with pytest.raises(ParityError, match="differs from PyTorch"):
        check_parity(right, graphs.files[0])


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3])
def test_what_moves_a_row_by_more_than_3_times_the_bound_is_refused(
    encoder: Encoder, tmp_path: Path, scale: float
) -> None:
    wrong = weights("blocks.0.attention.output.weight", lambda it: it * (1 + scale))(encoder)
    ids = torch.arange(50)[None].remainder(50)[:, :24]
    with in_float64(encoder), in_float64(wrong):
        moved = relative_error(wrong(ids, torch.ones_like(ids)).numpy(), encoder(ids, torch.ones_like(ids)).numpy())
    graphs = trace.write_graphs(wrong, tmp_path)
    allowed = BOUNDS["float32"].error or 0
    if moved > 3 * allowed:
        with pytest.raises(ParityError):
            check_parity(encoder, graphs.files[0])
    elif moved < allowed / 3:
        check_parity(encoder, graphs.files[0])


@pytest.mark.parametrize("seed", range(3))
def test_rounding_that_float32_itself_has_is_not_refused(tmp_path: Path, seed: int) -> None:
    encoder = sharp(seed)
    graphs = trace.write_graphs(encoder, tmp_path)
    parity = check_parity(encoder, graphs.files[0])
    check_inspection(encoder, graphs)
    assert parity.float32_error is not None
    assert parity.float32_error > 1.25e-5, "four times it is more than 5e-5"
    assert parity.bounds.error == 4 * parity.float32_error
    assert parity.max_relative_error <= parity.bounds.error


def test_the_report_says_where_float32_itself_is_far_off(encoder: Encoder, models: Path) -> None:
    exported = export_encoder(encoder, Source("init", "random"), Target(model_repository=models, name="plain"))

    def reported() -> str:
        shown = io.StringIO()
        report.show(exported, Console(file=shown))
        return shown.getvalue()

    said = reported()
    figures = r"max error \S+, tolerance 5\.0e-05, from PyTorch in float64; PyTorch's own float32 \S+e-07\n"
    assert re.search(figures, said)
    assert re.search(r"padding +max error \S+, tolerance 1\.0e-05\n", said)
    exported.manifest.parity.float32_error = 1.1e-4
    assert "own float32 1.1e-04. float32 is off by more than 1e-04 for this model" in reported()


def test_what_a_module_computes_in_comes_back_bit_by_bit() -> None:
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
    """Its code computes a part in float32, whatever its weights are in."""

    def __init__(self, encoder: Encoder, *, far_off: bool = False) -> None:
        super().__init__()
        self.encoder, self.far_off = encoder, far_off

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows: Tensor = self.encoder(ids, mask)
        if self.far_off:  # a number that float32 does not have
            return torch.where(rows == rows.amax(), rows, (rows + torch.finfo(rows.dtype).min).float() * 0 + rows)
        return rows @ torch.eye(rows.shape[2])


@pytest.mark.parametrize("far_off", [False, True])
def test_a_model_that_does_not_run_in_float64_is_compared_with_float32(encoder: Encoder, far_off: bool) -> None:
    model = TransformersModel(Mixed(encoder, far_off=far_off), "Mixed", None, 50, 0, ())
    wanted = reference_rows(model, vocab_size=50, max_sequence_tokens=24, module=model.module)
    parity = check_rows(model, vocab_size=50, max_sequence_tokens=24, pad_token_id=0, wanted=wanted)
    assert parity.float32_error is None
    assert parity.max_relative_error < 1e-6
    assert parity.bounds == BOUNDS["float32"]


def test_a_head_is_judged_as_float32_allows(tmp_path: Path) -> None:
    """Numbers that cancel out: float32 keeps few digits of what is left."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(256, 8, bias=False))
    with torch.no_grad():
        weight: Any = head[0].weight
        weight.mul_(1e4)
        weight[:, 1:].copy_(weight[:, :-1].clone())
    head.requires_grad_(False)
    assert write_head(head, 256, tmp_path).width == 8
    assert np.isfinite(weight.numpy()).all()
