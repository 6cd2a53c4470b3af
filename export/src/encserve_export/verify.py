"""Compares ONNX Runtime with PyTorch, row by row, and padded batches with single sequences.

A sequence is token ids, int64 (seq,), or embeddings, float32 (seq, d_model); `input` stands for either.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from encserve_export import graph
from encserve_export.encoder import Encoder
from encserve_export.errors import ParityError
from encserve_export.runtime import onnxruntime

TOLERANCE = 5e-5
PADDING_TOLERANCE = 1e-5
ATTENTION_TOLERANCE = 1e-5

# The longest sequence that is inspected: attention weights grow with its square.
_LONGEST_INSPECTED = 64

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Input = Ids | Rows
Run = Callable[[Any, Mask], Rows]  # of whichever input the model takes


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch that was compared.

    Attributes:
        lengths: The lengths of its sequences, in tokens.
        max_relative_error: The largest ‖got - want‖/‖want‖ over its rows, ONNX Runtime against PyTorch; 0 where there
            is no PyTorch to compare with.
        max_padding_error: The same, each sequence in this batch against the sequence alone, both in ONNX Runtime.
    """

    lengths: tuple[int, ...]
    max_relative_error: float
    max_padding_error: float


@dataclasses.dataclass(frozen=True)
class Parity:
    """All batches that were compared; every error is within its tolerance.

    Attributes:
        cases: The batches.
        tolerance: The largest error against PyTorch that was allowed; 0 where there is no PyTorch to compare with.
    """

    cases: tuple[Case, ...]
    tolerance: float = TOLERANCE

    @property
    def max_relative_error(self) -> float:
        """The largest error against PyTorch."""
        return max(case.max_relative_error for case in self.cases)

    @property
    def max_padding_error(self) -> float:
        """The largest error between a sequence padded in a batch and the same sequence alone."""
        return max(case.max_padding_error for case in self.cases)


def case_lengths(longest: int) -> list[tuple[int, ...]]:
    """Batches to compare: one token, the longest sequence, and mixtures with much and little padding."""
    half, quarter = max(1, longest // 2), max(1, longest // 4)
    cases = [(1,), (2,), (7,), (half,), (longest,), (1, 1, 1), (3, 9, 5, 8), (16, 16, 16, 16)]
    cases += [(1, quarter, half), (longest, 1), (longest, longest - 1, half)]
    fitting = [tuple(min(max(length, 1), longest) for length in lengths) for lengths in cases]
    return list(dict.fromkeys(fitting))


def check_parity(encoder: Encoder, path: Path) -> Parity:
    """Runs the ONNX file and the encoder on the same batches.

    Args:
        encoder: What the file was traced from.
        path: The ONNX file.

    Raises:
        ParityError: An error is above its tolerance, or a result is not finite.
    """
    run = _onnx_run(path, graph.input_name(encoder))
    config = encoder.config

    def reference(inputs: Input, mask: Mask) -> Rows:
        with torch.inference_mode():
            rows: Rows = encoder(torch.from_numpy(inputs), torch.from_numpy(mask)).numpy()
        return rows

    cases = []
    for sequences in _batches(config.max_sequence_tokens, functools.partial(_random_sequence, encoder)):
        case = _compare(run, sequences, config.pad_token_id, reference)
        _refuse_above(case.max_relative_error, TOLERANCE, case, "differs from PyTorch")
        _refuse_above(case.max_padding_error, PADDING_TOLERANCE, case, "changes when padded")
        cases.append(case)
    return Parity(tuple(cases))


def check_inspection(encoder: Encoder, graphs: graph.Graphs) -> None:
    """Runs the graph for inspections and the encoder on the same sequences.

    Raises:
        ParityError: Attention weights, hidden states or positions are not the encoder's, or not finite.
    """
    path = graphs.files[1]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [*graphs.hidden_state_names, *graphs.attention_weights_names]
    longest = encoder.config.max_sequence_tokens
    random = np.random.default_rng(0)
    for length in sorted({1, min(7, longest), min(_LONGEST_INSPECTED, longest)}):
        inputs = _random_sequence(encoder, length, random)[None]  # (1, seq) or (1, seq, d_model)
        mask = np.ones((1, length), np.int64)  # (1, seq)
        got = session.run(names, {graphs.input_name: inputs, graph.ATTENTION_MASK: mask})
        with torch.inference_mode():
            want = encoder.inspect(torch.from_numpy(inputs), torch.from_numpy(mask))
        for name, state, expected in zip(names, got, want.hidden_states, strict=False):
            error = relative_error(state, expected.numpy())
            _refuse_inspection(error, TOLERANCE, name, length)
        weights = zip(graphs.attention_weights_names, got[len(graphs.hidden_state_names) :], strict=True)
        for (name, weight), expected in zip(weights, want.attention_weights, strict=True):
            difference = float(np.abs(weight - expected.numpy()).max())  # (1, heads, seq, seq)
            _refuse_inspection(difference, ATTENTION_TOLERANCE, name, length)
    if graphs.positions_name:
        feeds = {graphs.input_name: inputs, graph.ATTENTION_MASK: mask}
        (positions,) = session.run([graphs.positions_name], feeds)  # (max_sequence_tokens, d_model)
        table = encoder.embeddings.positions.numpy()[encoder.config.position_offset :]
        if not np.array_equal(positions, table):
            raise ParityError("the ONNX model gives other positions than PyTorch has")


def check_padding(
    run: Run, *, vocab_size: int, max_sequence_tokens: int, pad_token_id: int, advice: str = ""
) -> Parity:
    """Runs a model that has no PyTorch beside it on the same kinds of batches.

    Args:
        run: ids, mask -> rows: int64 (batch, seq) both, float32 (batch, seq, d_model).
        vocab_size: One more than the largest id.
        max_sequence_tokens: The longest sequence.
        pad_token_id: What fills a short sequence.
        advice: What the error is to say beside the figures.

    Raises:
        ParityError: Padding changes a result.
    """
    cases = []
    for sequences in _batches(max_sequence_tokens, lambda length, random: random.integers(0, vocab_size, length)):
        case = _compare(run, sequences, pad_token_id)
        _refuse_above(case.max_padding_error, PADDING_TOLERANCE, case, "changes when padded", advice)
        cases.append(case)
    return Parity(tuple(cases), tolerance=0)


def relative_error(got: Rows, want: Rows) -> float:
    """The largest ‖got - want‖/‖want‖ over rows of the same shape (…, d_model); infinite where got is not finite."""
    difference = np.linalg.norm(got.astype(np.float64) - want, axis=-1)  # (…)
    norm = np.linalg.norm(want.astype(np.float64), axis=-1)  # (…)
    # A row of zeros has no relative error: any difference from it is refused, none is not.
    error = np.divide(difference, norm, out=np.where(difference == 0, 0.0, np.inf), where=norm > 0)  # (…)
    return float(np.where(np.isnan(error), np.inf, error).max())


def _random_sequence(encoder: Encoder, length: int, random: np.random.Generator) -> Input:
    if encoder.config.input == "embeddings":
        return random.standard_normal((length, encoder.config.d_model), np.float32)  # (seq, d_model)
    return random.integers(0, encoder.config.vocab_size, length)  # (seq)


def _onnx_run(path: Path, input_name: str) -> Run:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(inputs: Input, mask: Mask) -> Rows:
        rows: Rows = session.run([graph.OUTPUT], {input_name: inputs, graph.ATTENTION_MASK: mask})[0]
        return rows

    return run


def _batches(longest: int, draw: Callable[[int, np.random.Generator], Input]) -> Iterator[list[Input]]:
    """The batches to compare, each a list of sequences, random but always the same."""
    random = np.random.default_rng(0)
    for lengths in case_lengths(longest):
        yield [draw(length, random) for length in lengths]


def _compare(run: Run, sequences: Sequence[Input], pad_token_id: int, reference: Run | None = None) -> Case:
    inputs, mask = _pad(sequences, pad_token_id)
    got = run(inputs, mask)  # (batch, seq, d_model)
    want = got if reference is None else reference(inputs, mask)  # (batch, seq, d_model)
    errors, padding_errors = [], []
    for row, sequence in enumerate(sequences):
        n = len(sequence)
        errors.append(0.0 if reference is None else relative_error(got[row, :n], want[row, :n]))
        alone = run(sequence[None], np.ones((1, n), np.int64))  # (1, n, d_model)
        padding_errors.append(relative_error(got[row, :n], alone[0]))
    return Case(tuple(len(sequence) for sequence in sequences), max(errors), max(padding_errors))


def _pad(sequences: Sequence[Input], pad: int) -> tuple[Input, Mask]:
    """Sequences one under another, (batch, seq) or (batch, seq, d_model), padded on the right, and their mask."""
    shape = (len(sequences), max(len(sequence) for sequence in sequences))
    first = sequences[0]
    inputs, mask = np.full(shape + first.shape[1:], pad, first.dtype), np.zeros(shape, np.int64)
    for row, sequence in enumerate(sequences):
        inputs[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return inputs, mask


def _refuse_inspection(error: float, tolerance: float, name: str, length: int) -> None:
    if not error <= tolerance:
        raise ParityError(
            f"the ONNX model for inspections differs from PyTorch in {name}: error {error:.1e}, tolerance "
            f"{tolerance:.1e}, for {length} tokens"
        )


def _refuse_above(error: float, tolerance: float, case: Case, what: str, advice: str = "") -> None:
    if not error <= tolerance:
        lengths = ", ".join(map(str, case.lengths))
        raise ParityError(
            f"the ONNX model {what}: relative error {error:.1e} of a row, tolerance {tolerance:.1e}, "
            f"in a batch of lengths {lengths}{advice and f'; {advice}'}"
        )
