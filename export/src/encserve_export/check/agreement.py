"""Compares ONNX Runtime with PyTorch, row by row, and padded batches with single sequences.

Bundles in float32 are compared with the same module in float64, and PyTorch's own float32 is the measure of what
rounding does to this model on this CPU. Bundles in other precisions are compared with PyTorch's float32.

A sequence is token ids, int64 (seq,), or embeddings, float32 (seq, d_model); `input` stands for either.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from encserve_export.ground import names
from encserve_export.ground.arrays import Input, Mask, Rows, Run
from encserve_export.ground.errors import ParityError, UnsupportedModelError
from encserve_export.ground.float64 import in_float64
from encserve_export.ground.precision import BOUNDS, Bounds, Precision, allowed, bounds_of
from encserve_export.ground.runtime import onnxruntime, open_session
from encserve_export.models.own import trace
from encserve_export.models.own.encoder import Encoder

# What PyTorch's own float32 is measured with besides: in a few rows alone, rounding may happen to cancel out, and 4
# times its error there is less than what ONNX Runtime is off by. It is also the longest sequence that is inspected:
# attention weights grow with its square.
_MEASURED, _MEASURED_TOKENS = 8, 64
# A sequence of a batch: its length, and how many before it in the batch have the same.
_Key = tuple[int, int]
# Enough to see that padding changes rows.
_PADDED_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch that was compared.

    Attributes:
        lengths: The lengths of its sequences, in tokens.
        max_relative_error: The largest ‖got - want‖/‖want‖ over its rows, each sequence in this batch and alone, ONNX
            Runtime against PyTorch; 0 where there is no PyTorch to compare with.
        max_padding_error: The same, each sequence in this batch against the sequence alone, both in ONNX Runtime.
        min_cosine: The least cosine similarity of its rows, ONNX Runtime's and PyTorch's; 1 where there is no PyTorch.
        min_padding_cosine: The same, each sequence in this batch and the sequence alone.
    """

    lengths: tuple[int, ...]
    max_relative_error: float
    max_padding_error: float
    min_cosine: float
    min_padding_cosine: float


@dataclasses.dataclass(frozen=True)
class Parity:
    """All batches that were compared; every one is within the bounds.

    Attributes:
        cases: The batches.
        bounds: What was allowed; nothing is said of PyTorch where there is none to compare with.
        float32_error: The largest ‖float32 - float64‖/‖float64‖ of PyTorch's own rows, each sequence alone; None where
            float64 was not the judge.
    """

    cases: tuple[Case, ...]
    bounds: Bounds
    float32_error: float | None = None

    @property
    def max_relative_error(self) -> float:
        """The largest error against PyTorch."""
        return max(case.max_relative_error for case in self.cases)

    @property
    def max_padding_error(self) -> float:
        """The largest error between a sequence padded in a batch and the same sequence alone."""
        return max(case.max_padding_error for case in self.cases)

    @property
    def min_cosine(self) -> float:
        """The least cosine similarity of a row and PyTorch's."""
        return min(case.min_cosine for case in self.cases)

    @property
    def min_padding_cosine(self) -> float:
        """The least cosine similarity of a row in a padded batch and the same sequence's alone."""
        return min(case.min_padding_cosine for case in self.cases)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What rows must be, computed before ONNX Runtime runs, so that the two need no memory at the same time.

    Attributes:
        sequences: The sequences that the batches are made of.
        rows: The rows of each alone, float32 (seq, d_model). All of them take less than those of the largest batch.
        float32_error: The largest ‖float32 - float64‖/‖float64‖ of PyTorch's own rows; None where `rows` are float32's.
    """

    sequences: Mapping[_Key, Input]
    rows: Mapping[_Key, Rows]
    float32_error: float | None


class Reference(Protocol):
    """A model in PyTorch whose rows another must give.

    Attributes:
        description: What it is called in errors.
        vocab_size: One more than the largest id; 0 where it takes vectors.
    """

    @property
    def description(self) -> str:
        """See the class."""

    @property
    def vocab_size(self) -> int:
        """See the class."""

    @property
    def module(self) -> nn.Module:
        """What computes the rows."""

    def __call__(self, inputs: Any, mask: Mask, /) -> Rows:
        """Runs one batch, in the type that the module's numbers have; see `Run`."""


def case_lengths(longest: int) -> list[tuple[int, ...]]:
    """Batches to compare: one token, the longest sequence, and mixtures with much and little padding."""
    half, quarter = max(1, longest // 2), max(1, longest // 4)
    cases = [(1,), (2,), (7,), (half,), (longest,), (1, 1, 1), (3, 9, 5, 8), (_MEASURED_TOKENS,) * _MEASURED]
    cases += [(1, quarter, half), (longest, 1), (longest, longest - 1, half)]
    fitting = [tuple(min(max(length, 1), longest) for length in lengths) for lengths in cases]
    return list(dict.fromkeys(fitting))


def check_parity(encoder: Encoder, path: Path, precision: Precision = "float32") -> Parity:
    """Runs the ONNX file and the encoder on the same batches.

    Args:
        encoder: What the file was traced from.
        path: The ONNX file.
        precision: What the file computes in; the encoder computes in float32.

    Raises:
        ParityError: A result is out of the bounds of its precision, or not finite.
    """
    config = encoder.config
    sequences = _sequences(config.max_sequence_tokens, lambda length, random: _random_sequence(encoder, length, random))

    def reference(inputs: Input, mask: Mask) -> Rows:
        with torch.inference_mode():
            rows: Rows = encoder(_tensor(encoder, inputs), torch.from_numpy(mask)).numpy()  # (batch, seq, d_model)
        return rows

    wanted = _reference(sequences, reference, encoder if precision == "float32" else None)
    return _check(_onnx_run(path, trace.input_name(encoder)), sequences, config.pad_token_id, wanted, BOUNDS[precision])


def check_inspection(encoder: Encoder, graphs: trace.Graphs) -> None:
    """Runs the graph for inspections and the encoder on the same sequences.

    Raises:
        ParityError: Attention weights, hidden states or positions are not the encoder's, or not finite.
    """
    path, bounds = graphs.files[1], BOUNDS[graphs.precision]
    longest, random = encoder.config.max_sequence_tokens, np.random.default_rng(0)
    lengths = [min(length, longest) for length in (1, 7, *(_MEASURED_TOKENS,) * _MEASURED)]
    sequences = [_random_sequence(encoder, length, random)[None] for length in lengths]  # (1, seq), (1, seq, d_model)
    want = [_inspect(encoder, its) for its in sequences]
    rows_error = weights_error = 0.0
    if bounds.cosine is None:
        with in_float64(encoder):
            for i, its in enumerate(sequences):
                exact = _inspect(encoder, its)
                rows_error = max([rows_error, *map(relative_error, want[i].states, exact.states)])
                weights_error = max([weights_error, *map(_largest_difference, want[i].weights, exact.weights)])
                want[i] = exact
    bounds = dataclasses.replace(
        bounds.widened(rows_error), attention_error=allowed(bounds.attention_error, weights_error)
    )
    session = open_session(path)
    outputs = [*graphs.hidden_state_names, *graphs.attention_weights_names]
    for inputs, expected in zip(sequences, want, strict=True):
        feeds = {graphs.input_name: inputs, names.ATTENTION_MASK: np.ones(inputs.shape[:2], np.int64)}
        got = session.run(outputs, feeds)
        for name, state, due in zip(outputs, got, expected.states, strict=False):
            _refuse_inspection(_out_of(bounds, state, due, rows_error), name, inputs.shape[1])
        weights = zip(graphs.attention_weights_names, got[len(graphs.hidden_state_names) :], strict=True)
        for (name, weight), due in zip(weights, expected.weights, strict=True):
            if bounds.cosine is None:
                difference = _largest_difference(weight, due)
            else:  # half of a row's sum is the share of its attention that goes elsewhere
                difference = float(np.abs(weight - due).sum(axis=-1).mean() / 2)
            if not difference <= bounds.attention_error:
                wrong = f"error {difference:.1e}, {_tolerance(bounds.attention_error, weights_error)}"
                _refuse_inspection(wrong, name, inputs.shape[1])
    if graphs.positions_name:
        (positions,) = session.run([graphs.positions_name], feeds)  # (max_sequence_tokens, d_model)
        table = encoder.embeddings.positions.numpy()[encoder.config.position_offset :]
        if _out_of(BOUNDS[graphs.precision], positions, table):
            raise ParityError("the ONNX model gives other positions than PyTorch has")


def reference_rows(
    run: Run, *, vocab_size: int, max_sequence_tokens: int, module: nn.Module | None = None, width: int = 0
) -> Wanted:
    """Computes what `check_rows` compares with.

    Args:
        run: ids, mask -> rows, as for `check_rows`: PyTorch, or whatever else the rows must be those of.
        vocab_size: One more than the largest id.
        max_sequence_tokens: The longest sequence.
        module: What `run` computes with in PyTorch, to be put into float64 and back; None for the rows of `run` as they
            are. If it does not run in float64, they are taken as well.
        width: The numbers of a vector, as for `check_rows`.
    """
    return _reference(_random_inputs(vocab_size, width, max_sequence_tokens), run, module)


def check_rows(
    run: Run,
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    pad_token_id: int,
    wanted: Wanted | None = None,
    precision: str = "float32",
    advice: str = "",
    width: int = 0,
) -> Parity:
    """Runs a model that is not our own encoder on the same kinds of batches.

    Args:
        run: ids, mask -> rows: int64 (batch, seq) both, float32 (batch, seq, d_model).
        vocab_size: One more than the largest id.
        max_sequence_tokens: The longest sequence.
        pad_token_id: What fills a short sequence.
        wanted: What the rows must be, for the same vocab_size and max_sequence_tokens; None where only padding can
            be judged.
        precision: What the model computes in, where it is compared with a reference.
        advice: What the error is to say beside the figures where padding changes a row.
        width: The numbers of a vector, of a model that takes one for each token in place of its id: then `ids` are
            float32 (batch, seq, width), and there is no vocabulary.

    Raises:
        ParityError: The rows are not the reference's, or padding changes them.
    """
    bounds = dataclasses.replace(BOUNDS["float32"], error=None) if wanted is None else bounds_of(precision)
    sequences = _random_inputs(vocab_size, width, max_sequence_tokens) if wanted is None else wanted.sequences
    return _check(run, sequences, pad_token_id, wanted, bounds, advice)


def check_padding(
    model: Reference,
    *,
    longest: int | None,
    pad_token_id: int,
    advice: str,
    width: int = 0,
) -> None:
    """Refuses a model that gives other rows in a padded batch in PyTorch already: no graph of it would do better.

    Args:
        model: The model.
        longest: The longest sequence, in tokens; None where nothing bounds it.
        pad_token_id: As for `check_rows`.
        advice: The end of the error: what to do.
        width: As for `check_rows`.

    Raises:
        ParityError: It is such a model.
    """
    longest = min(_PADDED_TOKENS, longest or _PADDED_TOKENS)
    vocab_size = model.vocab_size
    wanted = reference_rows(model, vocab_size=vocab_size, max_sequence_tokens=longest, module=model.module, width=width)
    try:
        check_rows(
            model,
            vocab_size=vocab_size,
            max_sequence_tokens=longest,
            pad_token_id=pad_token_id,
            wanted=wanted,
            width=width,
        )
    except ParityError as error:
        raise ParityError(
            f"{model.description} gives other rows in a padded batch, in PyTorch already: {error}. {advice}"
        ) from error


def relative_error(got: Rows, want: Rows) -> float:
    """The largest ‖got - want‖/‖want‖ over rows of the same shape (…, d_model); infinite where got is not finite."""
    difference = np.linalg.norm(got.astype(np.float64) - want, axis=-1)  # (…)
    norm = np.linalg.norm(want.astype(np.float64), axis=-1)  # (…)
    # A row of zeros has no relative error: any difference from it is refused, none is not.
    error = np.divide(difference, norm, out=np.where(difference == 0, 0.0, np.inf), where=norm > 0)  # (…)
    return float(np.where(np.isnan(error), np.inf, error).max())


def least_cosine(got: Rows, want: Rows) -> float:
    """The least cosine similarity of rows of the same shape (…, d_model); -1 where got is not finite."""
    if not np.isfinite(got).all():
        return -1.0
    got, want = got.astype(np.float64), want.astype(np.float64)  # (…, d_model)
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)  # (…)
    # Two rows of zeros are the same; to any other row a row of zeros has no likeness.
    both_zero = np.asarray(~got.any(axis=-1) & ~want.any(axis=-1), np.float64)  # (…)
    cosine = np.divide((got * want).sum(axis=-1), norms, out=both_zero, where=norms > 0)  # (…)
    return float(cosine.min())


def _random_sequence(encoder: Encoder, length: int, random: np.random.Generator) -> Input:
    if encoder.config.input == "embeddings":
        return random.standard_normal((length, encoder.config.d_model), np.float32)  # (seq, d_model)
    return random.integers(0, encoder.config.vocab_size, length)  # (seq)


def _onnx_run(path: Path, input_name: str) -> Run:
    session = open_session(path)
    # It would keep the memory of the longest batch while PyTorch needs its own.
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def run(inputs: Input, mask: Mask) -> Rows:
        rows: Rows = session.run([names.OUTPUT], {input_name: inputs, names.ATTENTION_MASK: mask}, options)[0]
        return rows

    return run


def _tensor(encoder: Encoder, inputs: Input) -> Tensor:
    """Token ids as they are, embeddings in the type that the encoder computes in."""
    tensor = torch.from_numpy(inputs)
    return tensor.to(next(encoder.parameters()).dtype) if tensor.is_floating_point() else tensor


@dataclasses.dataclass(frozen=True)
class _Inspected:
    """One sequence's hidden states, (1, seq, d_model) each, and attention weights, (1, heads, seq, seq) each."""

    states: list[Rows]
    weights: list[Rows]


def _inspect(encoder: Encoder, inputs: Input) -> _Inspected:
    """What the encoder says of a sequence, rounded to float32, in whatever type it computes."""
    with torch.inference_mode():
        inspection = encoder.inspect(_tensor(encoder, inputs), torch.ones(inputs.shape[:2], dtype=torch.int64))
    states, weights = inspection.hidden_states, inspection.attention_weights
    return _Inspected([it.float().numpy() for it in states], [it.float().numpy() for it in weights])


def _largest_difference(got: Rows, want: Rows) -> float:
    """Infinite where got is not finite."""
    difference = float(np.abs(got - want).max())
    return np.inf if np.isnan(difference) else difference


def _sequences(longest: int, draw: Callable[[int, np.random.Generator], Input]) -> dict[_Key, Input]:
    """The sequences that the batches of `case_lengths` are made of, random but always the same.

    Those of one length stand in several batches: long ones take most of the time.
    """
    random = np.random.default_rng(0)
    found: dict[_Key, Input] = {}
    for lengths in case_lengths(longest):
        for key in _keys(lengths):
            if key not in found:
                found[key] = draw(key[0], random)
    return found


def _random_inputs(vocab_size: int, width: int, longest: int) -> dict[_Key, Input]:
    def draw(length: int, random: np.random.Generator) -> Input:
        if width:
            return random.standard_normal((length, width), np.float32)  # (seq, width)
        return random.integers(0, vocab_size, length)  # (seq)

    return _sequences(longest, draw)


def _keys(lengths: Sequence[int]) -> list[_Key]:
    return [(length, list(lengths[:row]).count(length)) for row, length in enumerate(lengths)]


def _reference(sequences: Mapping[_Key, Input], reference: Run, module: nn.Module | None) -> Wanted:
    rows = {key: _alone(reference, sequence) for key, sequence in sequences.items()}
    if module is None:
        return Wanted(sequences, rows, None)
    exact: dict[_Key, Rows] = {}
    errors = []
    # Some code mixes in float32 of its own, and then does not run in float64, or hides tokens with what is -∞ there.
    with contextlib.suppress(UnsupportedModelError, RuntimeError), in_float64(module):
        for key, sequence in sequences.items():
            its = _alone(reference, sequence)  # (seq, d_model), float64
            errors.append(relative_error(rows[key], its))
            exact[key] = its.astype(np.float32)
    if len(exact) < len(rows) or not all(np.isfinite(its).all() for its in exact.values()):
        return Wanted(sequences, rows, None)
    return Wanted(sequences, exact, max(errors))


def _alone(run: Run, sequence: Input) -> Rows:
    """(seq, d_model)."""
    rows: Rows = run(sequence[None], np.ones((1, len(sequence)), np.int64))[0]
    return rows


def _check(
    run: Run,
    sequences: Mapping[_Key, Input],
    pad_token_id: int,
    wanted: Wanted | None,
    bounds: Bounds,
    advice: str = "",
) -> Parity:
    """Runs every batch and every sequence alone, and refuses the first batch that is out of bounds."""
    want, float32_error = (None, None) if wanted is None else (wanted.rows, wanted.float32_error)
    bounds = bounds.widened(float32_error or 0)
    alone = {key: _alone(run, sequence) for key, sequence in sequences.items()}  # (seq, d_model) each
    cases = []
    for lengths in case_lengths(max(length for length, _ in sequences)):
        keys = _keys(lengths)
        padded = [alone[key] for key in keys]  # (seq, d_model) each
        if len(keys) > 1:
            inputs, mask = _pad([sequences[key] for key in keys], pad_token_id)
            padded = [rows[: key[0]] for rows, key in zip(run(inputs, mask), keys, strict=True)]
        singles = [alone[key] for key in keys]
        due = singles if want is None else [want[key] for key in keys]
        pairs = [*zip(padded, due, strict=True), *zip(singles, due, strict=True)]
        paddings = list(zip(padded, singles, strict=True))
        case = Case(
            lengths,
            max_relative_error=0 if want is None else max(relative_error(*pair) for pair in pairs),
            max_padding_error=max(relative_error(*pair) for pair in paddings),
            min_cosine=1 if want is None else min(least_cosine(*pair) for pair in pairs),
            min_padding_cosine=min(least_cosine(*pair) for pair in paddings),
        )
        _refuse(case, bounds, float32_error, advice)
        cases.append(case)
    return Parity(tuple(cases), bounds, float32_error)


def _pad(sequences: Sequence[Input], pad: int) -> tuple[Input, Mask]:
    """Sequences one under another, (batch, seq) or (batch, seq, d_model), padded on the right, and their mask."""
    shape = (len(sequences), max(len(sequence) for sequence in sequences))
    first = sequences[0]
    inputs, mask = np.full(shape + first.shape[1:], pad, first.dtype), np.zeros(shape, np.int64)
    for row, sequence in enumerate(sequences):
        inputs[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return inputs, mask


def _out_of(bounds: Bounds, got: Rows, want: Rows, float32_error: float = 0) -> str:
    """How far rows are out of the bounds against PyTorch; empty where they are not."""
    if bounds.error is not None and not (error := relative_error(got, want)) <= bounds.error:
        return f"error {error:.1e}, {_tolerance(bounds.error, float32_error)}"
    if bounds.cosine is not None and not (cosine := least_cosine(got, want)) >= bounds.cosine:
        return f"cosine similarity {cosine:.4f} of a row, at least {bounds.cosine} is required"
    return ""


def _tolerance(tolerance: float, float32_error: float | None) -> str:
    said = f"tolerance {tolerance:.1e}"
    return f"{said}, PyTorch's own float32 {float32_error:.1e}" if float32_error else said


def _refuse_inspection(wrong: str, name: str, length: int) -> None:
    if wrong:
        raise ParityError(
            f"the ONNX model for inspections differs from PyTorch in {name}: {wrong}, for {length} tokens"
        )


def _refuse(case: Case, bounds: Bounds, float32_error: float | None, advice: str) -> None:
    """Raises ParityError if a batch is out of the bounds."""
    in_batch = f"in a batch of lengths {', '.join(map(str, case.lengths))}"
    for error, tolerance, what, more in (
        (case.max_padding_error, bounds.padding_error, "changes when padded", advice and f"; {advice}"),
        (case.max_relative_error, bounds.error, "differs from PyTorch", ""),
    ):
        if tolerance is not None and not error <= tolerance:
            figures = f"relative error {error:.1e} of a row, {_tolerance(tolerance, float32_error)}"
            raise ParityError(f"the model {what}: {figures}, {in_batch}{more}")
    for cosine, least, what in (
        (case.min_padding_cosine, bounds.padding_cosine, "changes when padded"),
        (case.min_cosine, bounds.cosine, "differs from PyTorch"),
    ):
        if least is not None and not cosine >= least:
            figures = f"cosine similarity {cosine:.4f} of a row, at least {least} is required"
            raise ParityError(f"the model {what}: {figures}, {in_batch}; float32 is exact")
