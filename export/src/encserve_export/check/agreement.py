"""Compares ONNX Runtime with PyTorch, row by row, and padded batches with single sequences.

A sequence is token ids, int64 (seq,), or embeddings, float32 (seq, d_model); `input` stands for either.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from encserve_export.ground import names
from encserve_export.ground.arrays import Input, Mask, Rows, Run
from encserve_export.ground.errors import ParityError
from encserve_export.ground.precision import BOUNDS, Bounds, Precision
from encserve_export.ground.runtime import onnxruntime
from encserve_export.models.own import trace
from encserve_export.models.own.encoder import Encoder

# The longest sequence that is inspected: attention weights grow with its square.
_LONGEST_INSPECTED = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch that was compared.

    Attributes:
        lengths: The lengths of its sequences, in tokens.
        max_relative_error: The largest ‖got - want‖/‖want‖ over its rows, ONNX Runtime against PyTorch; 0 where there
            is no PyTorch to compare with.
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
    """

    cases: tuple[Case, ...]
    bounds: Bounds

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


def case_lengths(longest: int) -> list[tuple[int, ...]]:
    """Batches to compare: one token, the longest sequence, and mixtures with much and little padding."""
    half, quarter = max(1, longest // 2), max(1, longest // 4)
    cases = [(1,), (2,), (7,), (half,), (longest,), (1, 1, 1), (3, 9, 5, 8), (16, 16, 16, 16)]
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
    run = _onnx_run(path, trace.input_name(encoder))
    config = encoder.config

    def reference(inputs: Input, mask: Mask) -> Rows:
        # One after another: what PyTorch holds of a batch of long sequences is more than all the rest.
        rows = np.empty((*mask.shape, config.d_model), np.float32)  # (batch, seq, d_model)
        with torch.inference_mode():
            for i in range(len(mask)):
                rows[i] = encoder(torch.from_numpy(inputs[i : i + 1]), torch.from_numpy(mask[i : i + 1])).numpy()[0]
        return rows

    bounds = BOUNDS[precision]
    cases = []
    for sequences in _batches(config.max_sequence_tokens, functools.partial(_random_sequence, encoder)):
        case = _compare(run, sequences, config.pad_token_id, reference)
        _refuse(case, bounds)
        cases.append(case)
    return Parity(tuple(cases), bounds)


def check_inspection(encoder: Encoder, graphs: trace.Graphs) -> None:
    """Runs the graph for inspections and the encoder on the same sequences.

    Raises:
        ParityError: Attention weights, hidden states or positions are not the encoder's, or not finite.
    """
    path, bounds = graphs.files[1], BOUNDS[graphs.precision]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = [*graphs.hidden_state_names, *graphs.attention_weights_names]
    longest = encoder.config.max_sequence_tokens
    random = np.random.default_rng(0)
    for length in sorted({1, min(7, longest), min(_LONGEST_INSPECTED, longest)}):
        inputs = _random_sequence(encoder, length, random)[None]  # (1, seq) or (1, seq, d_model)
        mask = np.ones((1, length), np.int64)  # (1, seq)
        got = session.run(outputs, {graphs.input_name: inputs, names.ATTENTION_MASK: mask})
        with torch.inference_mode():
            want = encoder.inspect(torch.from_numpy(inputs), torch.from_numpy(mask))
        for name, state, expected in zip(outputs, got, want.hidden_states, strict=False):
            _refuse_inspection(_out_of(bounds, state, expected.numpy()), name, length)
        weights = zip(graphs.attention_weights_names, got[len(graphs.hidden_state_names) :], strict=True)
        for (name, weight), expected in zip(weights, want.attention_weights, strict=True):
            differences = np.abs(weight - expected.numpy())  # (1, heads, seq, seq)
            # Half of a row's sum is the share of its attention that goes elsewhere.
            difference = float(differences.max() if bounds.cosine is None else differences.sum(axis=-1).mean() / 2)
            if not difference <= bounds.attention_error:
                wrong = f"error {difference:.1e}, tolerance {bounds.attention_error:.1e}"
                _refuse_inspection(wrong, name, length)
    if graphs.positions_name:
        feeds = {graphs.input_name: inputs, names.ATTENTION_MASK: mask}
        (positions,) = session.run([graphs.positions_name], feeds)  # (max_sequence_tokens, d_model)
        table = encoder.embeddings.positions.numpy()[encoder.config.position_offset :]
        if _out_of(bounds, positions, table):
            raise ParityError("the ONNX model gives other positions than PyTorch has")


def check_rows(
    run: Run,
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    pad_token_id: int,
    reference: Run | None = None,
    precision: Precision = "float32",
    advice: str = "",
    width: int = 0,
) -> Parity:
    """Runs a model that is not our own encoder on the same kinds of batches.

    Args:
        run: ids, mask -> rows: int64 (batch, seq) both, float32 (batch, seq, d_model).
        vocab_size: One more than the largest id.
        max_sequence_tokens: The longest sequence.
        pad_token_id: What fills a short sequence.
        reference: PyTorch, or whatever else the rows must be those of; None where only padding can be judged.
        precision: What the model computes in, where it is compared with a reference.
        advice: What the error is to say beside the figures where padding changes a row.
        width: The numbers of a vector, of a model that takes one for each token in place of its id: then `ids` are
            float32 (batch, seq, width), and there is no vocabulary.

    Raises:
        ParityError: The rows are not the reference's, or padding changes them.
    """
    bounds = dataclasses.replace(BOUNDS["float32"], error=None) if reference is None else BOUNDS[precision]

    def draw(length: int, random: np.random.Generator) -> Input:
        if width:
            return random.standard_normal((length, width), np.float32)  # (seq, width)
        return random.integers(0, vocab_size, length)  # (seq)

    cases = []
    for sequences in _batches(max_sequence_tokens, draw):
        case = _compare(run, sequences, pad_token_id, reference)
        _refuse(case, bounds, advice)
        cases.append(case)
    return Parity(tuple(cases), bounds)


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
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    # It would keep the memory of the longest batch while PyTorch needs its own.
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def run(inputs: Input, mask: Mask) -> Rows:
        rows: Rows = session.run([names.OUTPUT], {input_name: inputs, names.ATTENTION_MASK: mask}, options)[0]
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
    errors, padding_errors, cosines, padding_cosines = [], [], [], []
    for row, sequence in enumerate(sequences):
        n = len(sequence)
        errors.append(0.0 if reference is None else relative_error(got[row, :n], want[row, :n]))
        alone = run(sequence[None], np.ones((1, n), np.int64))  # (1, n, d_model)
        padding_errors.append(relative_error(got[row, :n], alone[0]))
        cosines.append(1.0 if reference is None else least_cosine(got[row, :n], want[row, :n]))
        padding_cosines.append(least_cosine(got[row, :n], alone[0]))
    lengths = tuple(len(sequence) for sequence in sequences)
    return Case(lengths, max(errors), max(padding_errors), min(cosines), min(padding_cosines))


def _pad(sequences: Sequence[Input], pad: int) -> tuple[Input, Mask]:
    """Sequences one under another, (batch, seq) or (batch, seq, d_model), padded on the right, and their mask."""
    shape = (len(sequences), max(len(sequence) for sequence in sequences))
    first = sequences[0]
    inputs, mask = np.full(shape + first.shape[1:], pad, first.dtype), np.zeros(shape, np.int64)
    for row, sequence in enumerate(sequences):
        inputs[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return inputs, mask


def _out_of(bounds: Bounds, got: Rows, want: Rows) -> str:
    """How far rows are out of the bounds against PyTorch; empty where they are not."""
    if bounds.error is not None and not (error := relative_error(got, want)) <= bounds.error:
        return f"error {error:.1e}, tolerance {bounds.error:.1e}"
    if bounds.cosine is not None and not (cosine := least_cosine(got, want)) >= bounds.cosine:
        return f"cosine similarity {cosine:.4f} of a row, at least {bounds.cosine} is required"
    return ""


def _refuse_inspection(wrong: str, name: str, length: int) -> None:
    if wrong:
        raise ParityError(
            f"the ONNX model for inspections differs from PyTorch in {name}: {wrong}, for {length} tokens"
        )


def _refuse(case: Case, bounds: Bounds, advice: str = "") -> None:
    """Raises ParityError if a batch is out of the bounds."""
    in_batch = f"in a batch of lengths {', '.join(map(str, case.lengths))}"
    for error, tolerance, what, more in (
        (case.max_relative_error, bounds.error, "differs from PyTorch", ""),
        (case.max_padding_error, bounds.padding_error, "changes when padded", advice and f"; {advice}"),
    ):
        if tolerance is not None and not error <= tolerance:
            figures = f"relative error {error:.1e} of a row, tolerance {tolerance:.1e}"
            raise ParityError(f"the model {what}: {figures}, {in_batch}{more}")
    for cosine, least, what in (
        (case.min_cosine, bounds.cosine, "differs from PyTorch"),
        (case.min_padding_cosine, bounds.padding_cosine, "changes when padded"),
    ):
        if least is not None and not cosine >= least:
            figures = f"cosine similarity {cosine:.4f} of a row, at least {least} is required"
            raise ParityError(f"the model {what}: {figures}, {in_batch}; float32 is exact")
