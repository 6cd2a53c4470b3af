"""The comparison sees what is wrong, and a refused export leaves nothing behind."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encserve_export import Encoder, EncoderConfig, Source, Target, export_encoder, graph
from encserve_export.errors import ParityError
from encserve_export.init import random_encoder
from encserve_export.verify import case_lengths, relative_error

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
    write_graph = graph.write_graph

    def write_wrong_graph(encoder: Encoder, folder: Path) -> list[Path]:
        state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        state["blocks.1.feed_forward.outer.bias"][0] += 1e-3
        wrong = Encoder(encoder.config)
        wrong.load_state_dict(state)
        return write_graph(wrong.eval(), folder)

    encoder = random_encoder(tiny, 0)
    monkeypatch.setattr(graph, "write_graph", write_wrong_graph)
    with pytest.raises(ParityError, match=r"differs from PyTorch: relative error \S+ of a row, tolerance 5\.0e-05"):
        export_encoder(encoder, SOURCE, Target(models=models, name="wrong"))
    assert not models.exists()


class Maskless(Encoder):
    """Attends to padding too."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, torch.ones_like(attention_mask))


def test_a_model_that_sees_its_padding_is_refused(tiny: EncoderConfig, models: Path) -> None:
    encoder = Maskless(tiny)
    encoder.load_state_dict(random_encoder(tiny, 0).state_dict())
    with pytest.raises(ParityError, match=r"changes when padded: relative error \S+ of a row, tolerance 1\.0e-05"):
        export_encoder(encoder.eval(), SOURCE, Target(models=models, name="maskless"))
    assert not models.exists()
