"""Compares the hidden states from ONNX Runtime with the hidden states from PyTorch.

Padded batches are also compared with the same sequences, each run alone.

A row is the hidden state of one token, a vector of d_model numbers. The error of a row is ‖got - want‖/‖want‖. The
error of an array is the largest error of its rows.

A float32 bundle is compared with the same PyTorch module in float64. The module also runs in float32, and its error
against float64 is measured. This float32 error shows how much rounding changes the rows of this model on this CPU.
Bundles in other precisions are compared with PyTorch in float32.

A sequence is token ids, int64 (seq,), or vectors, float32 (seq, width).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from torch import nn

from encserve_export.core.arrays import Input, Mask, Rows, Run
from encserve_export.core.errors import ParityError, UnsupportedModelError
from encserve_export.core.float64 import in_float64
from encserve_export.core.precision import BOUNDS, Bounds, bounds_of, tolerance_for
from encserve_export.models.reference import Reference
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_proto.bundle.v1 import manifest_pb2

# One batch has 8 sequences of 64 tokens, so that PyTorch's float32 error is measured on many rows. The tolerance is 4
# times this error. On a few rows, rounding errors may cancel out, and the tolerance would be too small.
# The comparison of a graph for inspections uses sequences of up to 64 tokens, because the memory of attention weights
# grows with the square of the length.
_MEASURED, _MEASURED_TOKENS = 8, 64
# Identifies a sequence in a batch: its length, and the number of earlier sequences in the batch with this length.
_Key = tuple[int, int]
Sequences = Mapping[_Key, Input]
# The longest sequence in `check_padding`. 32 tokens are enough to see whether padding changes rows.
_PADDED_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The differences between two arrays of rows, `got` and `want`.

    Attributes:
        error: The largest ‖got - want‖/‖want‖ of a row; infinite if `got` contains NaN or infinity.
        cosine: The least cosine similarity of a row; -1 if `got` contains NaN or infinity.
        excess: A text for error messages, with the measured number and the limit. Empty if no number is beyond its
            limit.
    """

    error: float
    cosine: float
    excess: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch that was compared.

    Attributes:
        lengths: The lengths of its sequences, in tokens.
        max_relative_error: The largest ‖got - want‖/‖want‖ of a row. `want` is PyTorch's row. `got` is ONNX Runtime's
            row, from this batch or from the sequence alone. The value is 0 without a PyTorch model.
        max_padding_error: The largest ‖got - want‖/‖want‖ of a row in ONNX Runtime. `got` is the row in this batch, and
            `want` is the row of the same sequence alone.
        min_cosine: The least cosine similarity to PyTorch's row; 1 without a PyTorch model.
        min_padding_cosine: The least cosine similarity between a row in this batch and the row of the sequence alone.
    """

    lengths: tuple[int, ...]
    max_relative_error: float
    max_padding_error: float
    min_cosine: float
    min_padding_cosine: float


@dataclasses.dataclass(frozen=True)
class Parity:
    """The results of all comparisons. Every compared batch is within the bounds.

    Attributes:
        cases: The compared batches.
        bounds: The allowed differences. Without a PyTorch model, the bounds limit only the differences that padding
            causes.
        float32_error: The largest ‖float32 - float64‖/‖float64‖ of PyTorch's own rows; None if PyTorch did not compute
            the rows in float64.
    """

    cases: tuple[Case, ...]
    bounds: Bounds
    float32_error: float | None = None

    @property
    def max_relative_error(self) -> float:
        """The largest error of a row compared with PyTorch's row."""
        return max(case.max_relative_error for case in self.cases)

    @property
    def max_padding_error(self) -> float:
        """The largest error of a row in a batch compared with the row of the same sequence alone."""
        return max(case.max_padding_error for case in self.cases)

    @property
    def min_cosine(self) -> float:
        """The least cosine similarity to PyTorch's row."""
        return min(case.min_cosine for case in self.cases)

    @property
    def min_padding_cosine(self) -> float:
        """The least cosine similarity between a row in a batch and the row of the same sequence alone."""
        return min(case.min_padding_cosine for case in self.cases)


@dataclasses.dataclass(frozen=True)
class ReferenceRows:
    """The expected rows. To save memory, PyTorch computes the rows before ONNX Runtime starts.

    Attributes:
        sequences: The sequences of all batches.
        rows: The rows of each sequence alone, float32 (seq, d_model).
        float32_error: The largest ‖float32 - float64‖/‖float64‖ of PyTorch's own rows; None if PyTorch did not compute
            the rows in float64.
    """

    sequences: Sequences
    rows: Mapping[_Key, Rows]
    float32_error: float | None


def compare(got: Rows, want: Rows, tolerance: Bounds, float32_error: float | None = None) -> Comparison:
    """Compare rows of the same shape, (…, d_model).

    Args:
        got: The rows to check.
        want: The expected rows.
        tolerance: The limits. Only the fields `error` and `cosine` are used; None means no limit.
        float32_error: PyTorch's own error in float32, which `Comparison.excess` mentions; None if unknown.
    """
    error, cosine = relative_error(got, want), least_cosine(got, want)
    excess = ""
    if tolerance.error is not None and not error <= tolerance.error:
        excess = f"a row has the relative error {error:.1e}; at most {tolerance.error:.1e} is allowed"
        excess += f" (PyTorch's own float32 error is {float32_error:.1e})" if float32_error else ""
    elif tolerance.cosine is not None and not cosine >= tolerance.cosine:
        excess = f"a row has the cosine similarity {cosine:.4f}; at least {tolerance.cosine} is required. "
        excess += "Export in float32 instead"
    return Comparison(error, cosine, excess)


def relative_error(got: Rows, want: Rows) -> float:
    """Return the largest ‖got - want‖/‖want‖ of rows, (…, d_model); infinite if `got` contains NaN or infinity."""
    difference = np.linalg.norm(got.astype(np.float64) - want, axis=-1)  # (…)
    norm = np.linalg.norm(want.astype(np.float64), axis=-1)  # (…)
    # If the expected row has only zeros, the error is 0 for a row of zeros, and infinite for any other row.
    error = np.divide(difference, norm, out=np.where(difference == 0, 0.0, np.inf), where=norm > 0)  # (…)
    return float(np.where(np.isnan(error), np.inf, error).max())


def least_cosine(got: Rows, want: Rows) -> float:
    """Return the least cosine similarity of rows, (…, d_model); -1 if `got` contains NaN or infinity."""
    if not np.isfinite(got).all():
        return -1.0
    got, want = got.astype(np.float64), want.astype(np.float64)  # (…, d_model)
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)  # (…)
    # Two rows of zeros have similarity 1. A row of zeros and any other row have similarity 0.
    both_zero = np.asarray(~got.any(axis=-1) & ~want.any(axis=-1), np.float64)  # (…)
    cosine = np.divide((got * want).sum(axis=-1), norms, out=both_zero, where=norms > 0)  # (…)
    return float(cosine.min())


def case_lengths(longest: int) -> list[tuple[int, ...]]:
    """Return the sequence lengths of each batch to compare.

    The batches have sequences of one token, of the greatest length, and of mixed lengths that need padding.
    """
    half, quarter = max(1, longest // 2), max(1, longest // 4)
    cases = [(1,), (2,), (7,), (half,), (longest,), (1, 1, 1), (3, 9, 5, 8), (_MEASURED_TOKENS,) * _MEASURED]
    cases += [(1, quarter, half), (longest, half, 1)]
    fitting = [tuple(min(max(length, 1), longest) for length in lengths) for lengths in cases]
    return list(dict.fromkeys(fitting))


def random_sequences(longest: int, *, vocab_size: int = 0, width: int = 0) -> Sequences:
    """Return random sequences for the batches of `case_lengths`, from a fixed seed.

    Args:
        longest: The longest sequence, in tokens.
        vocab_size: The number of token ids; 0 for a model that takes vectors.
        width: The size of a vector; 0 for a model that takes token ids.
    """
    random = np.random.default_rng(0)
    keys = dict.fromkeys(key for lengths in case_lengths(longest) for key in _keys(lengths))
    return {key: _draw(random, key[0], vocab_size, width) for key in keys}


def reference_rows(run: Run, sequences: Sequences, module: nn.Module | None = None) -> ReferenceRows:
    """Compute the rows that `check_rows` expects.

    Args:
        run: Maps inputs, (batch, seq) or (batch, seq, width), and a mask to rows, (batch, seq, d_model).
        sequences: See `random_sequences`.
        module: The module that `run` calls. The rows are computed with this module in float64. If `module` is None or
            fails in float64, the rows are the results of `run`.
    """

    def compute(sequence: Input) -> list[Rows]:
        return [_alone(run, sequence)]

    float32 = [compute(sequence) for sequence in sequences.values()]
    exact = None if module is None else _run_in_float64(module, compute, sequences.values())
    rows = {key: outputs[0] for key, outputs in zip(sequences, exact or float32, strict=True)}
    float32_error = None
    if exact is not None:
        float32_error = max(relative_error(*pair) for pair in zip(chain(*float32), chain(*exact), strict=True))
    return ReferenceRows(sequences, rows, float32_error)


def check_rows(
    run: Run,
    sequences: Sequences,
    pad_token_id: int,
    *,
    want: ReferenceRows | None,
    precision: str = "float32",
    advice: str = "",
) -> Parity:
    """Run every batch, and every sequence alone. Raise an error for the first batch that exceeds the bounds.

    Args:
        run: Maps inputs and a mask to rows, float32 (batch, seq, d_model).
        sequences: See `random_sequences`.
        pad_token_id: The id that pads the shorter sequences of a batch.
        want: The expected rows of the same sequences; None to check only the effect of padding.
        precision: The precision of the bundle, which sets the bounds.
        advice: The end of the error message if padding changes the rows.

    Raises:
        ParityError: The rows differ from the expected rows, or padding changes the rows.
    """
    float32_error = None if want is None else want.float32_error
    bounds = dataclasses.replace(BOUNDS["float32"], error=None) if want is None else bounds_of(precision)
    bounds = bounds.with_rounding(float32_error or 0)
    of_padding = Bounds(error=bounds.padding_error, cosine=bounds.padding_cosine)
    alone = {key: _alone(run, sequence) for key, sequence in sequences.items()}  # (seq, d_model) each
    cases = []
    for lengths in case_lengths(max(length for length, _ in sequences)):
        keys = _keys(lengths)
        single = np.concatenate([alone[key] for key in keys])  # (tokens, d_model)
        padded = single
        if len(keys) > 1:
            rows = run(*_pad([sequences[key] for key in keys], pad_token_id))  # (batch, seq, d_model)
            padded = np.concatenate([row[:length] for row, (length, _) in zip(rows, keys, strict=True)])
        padding = compare(padded, single, of_padding, float32_error)
        _refuse(padding, "gives other rows for padded sequences", lengths, advice)
        comparisons = [padding]
        if want is not None:
            expected = np.concatenate([want.rows[key] for key in keys])  # (tokens, d_model)
            comparisons = [compare(got, expected, bounds, float32_error) for got in (padded, single)]
            for comparison in comparisons:
                _refuse(comparison, "differs from PyTorch", lengths)
        cases.append(
            Case(
                lengths,
                max_relative_error=0 if want is None else max(it.error for it in comparisons),
                max_padding_error=padding.error,
                min_cosine=1 if want is None else min(it.cosine for it in comparisons),
                min_padding_cosine=padding.cosine,
            )
        )
    return Parity(tuple(cases), bounds, float32_error)


def check_padding(reference: Reference, longest: int, advice: str) -> None:
    """Check in PyTorch that padding does not change the rows.

    If padding changes rows in PyTorch, every ONNX graph of the model would fail in `check_rows`.

    Args:
        reference: The model.
        longest: The longest sequence to serve, in tokens.
        advice: The end of the error message.

    Raises:
        ParityError: Padding changes the rows.
    """
    longest = min(_PADDED_TOKENS, longest)
    sequences = random_sequences(longest, vocab_size=reference.vocab_size, width=reference.width)

    def check(want: ReferenceRows | None) -> None:
        check_rows(reference, sequences, reference.pad_token_id, want=want)

    try:
        try:
            check(None)
        except ParityError:
            # Rounding may explain the difference. Only a run in float64 measures rounding, but such a run needs twice
            # the memory. So this run is only for models that fail the check above.
            check(reference_rows(reference, sequences, reference.module))
    except ParityError as error:
        raise ParityError(
            f"{reference.description} gives different rows in a padded batch, even in PyTorch: {error}. {advice}"
        ) from error


def check_inspection(
    folder: Path,
    graph: manifest_pb2.Graph,
    inspect_graph: manifest_pb2.InspectGraph,
    reference: Reference,
    *,
    longest: int,
) -> None:
    """Compare the graph for inspections with PyTorch. This graph returns attention weights and hidden states.

    Args:
        folder: The folder of the bundle.
        graph: The description of the graph that the server runs for vectors. Both graphs have the same inputs.
        inspect_graph: The file and the outputs of the graph for inspections.
        reference: The model. `reference.inspection` must not be None.
        longest: The longest sequence, in tokens.

    Raises:
        ParityError: Attention weights, hidden states or positions differ from PyTorch's, or contain NaN or infinity.
    """
    assert reference.inspection is not None  # noqa: S101
    bounds, random = bounds_of(graph.precision), np.random.default_rng(0)
    lengths = [min(length, longest) for length in (1, 7, _MEASURED_TOKENS, _MEASURED_TOKENS)]
    sequences = [_draw(random, length, reference.vocab_size, reference.width) for length in lengths]
    states, weights = inspect_graph.hidden_state_names, inspect_graph.attention_weights_names

    def compute(sequence: Input) -> list[Rows]:
        return reference.inspect(*_pad([sequence], 0))

    want = [compute(sequence) for sequence in sequences]
    exact = None if bounds.cosine else _run_in_float64(reference.inspection.module, compute, sequences)
    states_error = weights_error = 0.0
    for float32, float64 in zip(want, exact or want, strict=True):
        pairs = list(zip(float32, float64, strict=True))
        states_error = max([states_error, *(relative_error(*pair) for pair in pairs[: len(states)])])
        weights_error = max([weights_error, *(_largest_difference(*pair) for pair in pairs[len(states) :])])
    of_states = bounds.with_rounding(states_error)
    of_weights = tolerance_for(bounds.attention_error, weights_error)
    encoder = OnnxEncoder(folder / inspect_graph.file, graph, half_types=reference.has_token_types)
    for sequence, expected in zip(sequences, exact or want, strict=True):
        outputs = encoder.outputs([*states, *weights], *_pad([sequence], 0))
        for name, got, rows in zip([*states, *weights], outputs, expected, strict=True):
            if name in weights:
                excess = _attention_excess(got, rows, bounds, of_weights)
            else:
                excess = compare(got, rows, of_states, states_error).excess
            if excess:
                raise ParityError(
                    f"the ONNX model for inspections differs from PyTorch in {name}, for {len(sequence)} tokens: "
                    f"{excess}"
                )
    if inspect_graph.positions_name:
        (positions,) = encoder.outputs([inspect_graph.positions_name], *_pad(sequences[:1], 0))  # (seq, d_model)
        first = reference.inspection.first_position
        table: Rows = reference.inspection.positions.numpy()[first:][: len(positions)]
        if excess := compare(positions, table, bounds).excess:
            raise ParityError(f"the ONNX model for inspections gives other positions than PyTorch: {excess}")


def _run_in_float64(
    module: nn.Module, compute: Callable[[Input], list[Rows]], sequences: Iterable[Input]
) -> list[list[Rows]] | None:
    """Return each sequence's outputs in float64, rounded to float32; None if the module does not run in float64."""
    exact: list[list[Rows]] = []
    # Some modules use float32 constants, and raise an error in float64. Other modules mask tokens with a number that
    # becomes -∞, and then their outputs contain NaN or infinity.
    with contextlib.suppress(UnsupportedModelError, RuntimeError), in_float64(module):
        exact = [[output.astype(np.float32) for output in compute(sequence)] for sequence in sequences]
    return exact if exact and all(np.isfinite(output).all() for output in chain(*exact)) else None


def _attention_excess(got: Rows, want: Rows, bounds: Bounds, tolerance: float) -> str:
    """Return the error of attention weights, (1, heads, seq, seq), as text. Return "" if the error is small enough."""
    if bounds.cosine is None:
        error = _largest_difference(got, want)
    else:
        # The attention weights of a token sum to 1. So half the sum of their absolute differences is the share of
        # attention that moved to other tokens.
        error = float(np.abs(got - want).sum(axis=-1).mean() / 2)
    return "" if error <= tolerance else f"the error is {error:.1e}; at most {tolerance:.1e} is allowed"


def _largest_difference(got: Rows, want: Rows) -> float:
    difference = float(np.abs(got - want).max())
    return np.inf if np.isnan(difference) else difference


def _draw(random: np.random.Generator, length: int, vocab_size: int, width: int) -> Input:
    if width:
        return random.standard_normal((length, width), np.float32)  # (seq, width)
    return random.integers(0, vocab_size, length)  # (seq)


def _keys(lengths: Sequence[int]) -> list[_Key]:
    return [(length, list(lengths[:row]).count(length)) for row, length in enumerate(lengths)]


def _alone(run: Run, sequence: Input) -> Rows:
    rows: Rows = run(*_pad([sequence], 0))[0]
    return rows  # (seq, d_model)


def _pad(sequences: Sequence[Input], pad: int) -> tuple[Input, Mask]:
    """Pad sequences on the right. Return the batch, (batch, seq) or (batch, seq, width), and its mask."""
    shape = (len(sequences), max(len(sequence) for sequence in sequences))
    first = sequences[0]
    inputs, mask = np.full(shape + first.shape[1:], pad, first.dtype), np.zeros(shape, np.int64)
    for row, sequence in enumerate(sequences):
        inputs[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return inputs, mask


def _refuse(comparison: Comparison, problem: str, lengths: Sequence[int], advice: str = "") -> None:
    if comparison.excess:
        advice = f"; {advice}" if advice else ""
        raise ParityError(
            f"the model {problem} in a batch of lengths {', '.join(map(str, lengths))}: {comparison.excess}{advice}"
        )
