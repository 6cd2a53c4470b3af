"""The comparison finds wrong rows, and a refused export leaves nothing behind."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encserve_export import Encoder, EncoderConfig, Source, Target, export_encoder
from encserve_export.check.agreement import case_lengths, check_inspection, relative_error
from encserve_export.ground.errors import ParityError
from encserve_export.ground.precision import Precision
from encserve_export.models.own import trace
from encserve_export.models.own.encoder import Inspection
from encserve_export.models.own.init import random_encoder

SOURCE = Source("init", "random weights, seed 0")


@given(st.integers(1, 5000))
def test_cases_hold_one_token_the_longest_and_mixtures(longest: int) -> None:
    cases = case_lengths(longest)
    assert (1,) in cases
    assert (longest,) in cases
    assert (longest, 1) in cases
    assert all(1 <= length <= longest for lengths in cases for length in lengths)
    assert len(set(cases)) == len(cases)


def test_relative_error_is_per_row() -> None:
    want = np.array([[3, 4], [0, 100]], np.float32)
    got = np.array([[3, 4.5], [0, 100]], np.float32)
    assert relative_error(got, want) == pytest.approx(0.1)


@pytest.mark.parametrize(("got", "error"), [(0.0, 0.0), (1e-9, np.inf), (np.nan, np.inf), (np.inf, np.inf)])
def test_rows_of_zeros_and_numbers_that_are_not_finite(got: float, error: float) -> None:
    assert relative_error(np.array([[got]], np.float32), np.array([[0]], np.float32)) == error


def test_nan_is_infinitely_wrong() -> None:
    assert relative_error(np.array([[np.nan, 1]], np.float32), np.array([[1, 1]], np.float32)) == np.inf


def test_a_graph_of_other_weights_is_refused(
    tiny: EncoderConfig, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_graphs = trace.write_graphs

    def write_wrong_graph(encoder: Encoder, folder: Path, precision: Precision) -> trace.Graphs:
        return write_graphs(changed(encoder), folder, precision)

    encoder = random_encoder(tiny, 0)
    monkeypatch.setattr(trace, "write_graphs", write_wrong_graph)
    with pytest.raises(ParityError, match=r"differs from PyTorch: relative error \S+ of a row, tolerance 5\.0e-05"):
        export_encoder(encoder, SOURCE, Target(model_repository=models, name="wrong"))
    assert not models.exists()


def test_inspections_of_other_weights_are_refused(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    graphs = trace.write_graphs(changed(encoder), tmp_path)
    with pytest.raises(ParityError, match=r"for inspections differs from PyTorch in last_hidden_state: error \S+, tol"):
        check_inspection(encoder, graphs)


def test_attention_that_is_another_is_refused(tiny: EncoderConfig, tmp_path: Path) -> None:
    encoder = random_encoder(tiny, 0)
    graphs = trace.write_graphs(encoder, tmp_path)
    exchanged = dataclasses.replace(graphs, attention_weights_names=graphs.attention_weights_names[::-1])
    with pytest.raises(
        ParityError,
        match=r"in attention_weights.1: error \S+, tolerance 1.0e-05, PyTorch's own float32 \S+, for 7 tokens",
    ):
        check_inspection(encoder, exchanged)


def changed(encoder: Encoder) -> Encoder:
    """The encoder with one number of the last block changed."""
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    state["blocks.1.feed_forward.outer.bias"][0] += 1e-3
    wrong = Encoder(encoder.config)
    wrong.load_state_dict(state)
    return wrong.eval().requires_grad_(False)


class Maskless(Encoder):
    """Attends to padding too."""

    def inspect(self, inputs: torch.Tensor, attention_mask: torch.Tensor, *, keep_weights: bool = True) -> Inspection:
        return super().inspect(inputs, torch.ones_like(attention_mask), keep_weights=keep_weights)


def test_a_model_that_sees_its_padding_is_refused(tiny: EncoderConfig, models: Path) -> None:
    encoder = Maskless(tiny)
    encoder.load_state_dict(random_encoder(tiny, 0).state_dict())
    with pytest.raises(ParityError, match=r"changes when padded: relative error \S+ of a row, tolerance 1\.0e-05"):
        export_encoder(encoder.eval(), SOURCE, Target(model_repository=models, name="maskless"))
    assert not models.exists()
