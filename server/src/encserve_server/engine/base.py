"""The interface between the scheduler and the engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encserve_server.types.arrays import Mask, ModelInput, Numbers, Rows
from encserve_server.types.inspections import InspectKind, InspectTensor


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a batch. The caller of `Engine.run` may change the arrays.

    Attributes:
        output: (batch, seq, d_model) float32. The rows of padding have no meaning.
        lengths: The number of tokens of each sequence.
        collate_seconds: The time for padding the sequences into one array.
        compute_seconds: The time for running the model.
    """

    output: Numbers
    lengths: list[int]
    collate_seconds: float
    compute_seconds: float

    @property
    def rows(self) -> list[Rows]:
        """The (seq, d_model) rows of each sequence without padding, as views of the output."""
        return [rows[:length] for rows, length in zip(self.output, self.lengths, strict=True)]

    def token_mask(self, places: Sequence[int]) -> Mask:
        """Return a (batch, seq) mask: true for each token of the sequences with the indices `places`."""
        lengths = np.zeros((len(self.lengths), 1), np.int64)
        lengths[places, 0] = [self.lengths[i] for i in places]
        tokens: Mask = np.arange(self.output.shape[1]) < lengths
        return tokens

    @property
    def padded_tokens(self) -> int:
        """The number of tokens, including padding."""
        batch, seq, _ = self.output.shape
        return int(batch * seq)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The runtime and the device in use.

    Attributes:
        provider: The execution provider of ONNX Runtime, such as "CUDAExecutionProvider", or "OpenVINO".
        device: "cpu" or "cuda".
        precision: The data type of the computation, such as "float32".
        runtime: The runtime and its version, such as "onnxruntime 1.31.1".
    """

    provider: str
    device: str
    precision: str
    runtime: str


# The default limit of parallel batches on the CPU. Each batch needs memory for activations.
_MAX_DEFAULT_RUNS = 8


def cpu_parallel_runs(requested: int | None, threads: int) -> int:
    """Return the number of parallel batches on the CPU: the requested number or a default, at most one per thread."""
    return min(requested or _MAX_DEFAULT_RUNS, threads)


class Engine(Protocol):
    """Runs one model. At most `max_parallel_runs` threads call `run` at the same time."""

    @property
    def info(self) -> EngineInfo:
        """The runtime and the device in use."""

    @property
    def max_parallel_runs(self) -> int:
        """The number of batches that can run at the same time, at least 1."""

    @property
    def has_wide_session(self) -> bool:
        """Whether a batch that runs alone can use all threads and is then faster."""

    def run(
        self,
        sequences: Sequence[ModelInput],
        *,
        attended: Sequence[int] = (),
        second_starts: Sequence[int] = (),
        alone: bool = True,
    ) -> BatchResult:
        """Run one batch, and block until its end.

        Args:
            sequences: One or more validated (seq,) int64 arrays of ids or (seq, d_model) float32 arrays of vectors, as
                the model needs.
            attended: The attention limit of each sequence: all tokens attend only to the first `attended[i]` tokens; 0
                for no limit. Empty if no sequence has a limit.
            second_starts: The index of each sequence's first token with token type 1; 0 for no such token. Empty if all
                tokens have type 0. A graph without an input for token types ignores this argument.
            alone: Whether the batch may use all threads, because no other batch starts before its end.

        Raises:
            Exception: The runtime failed. The scheduler then tries smaller batches.
        """

    def close(self) -> None:
        """Free the engine's memory. Nothing calls `run` afterwards."""


class Head(Protocol):
    """The head of a model, which runs on rows or on pooled vectors. Several threads may call `run` at the same time."""

    def run(self, *inputs: Numbers) -> Numbers:
        """Compute the output from the inputs of `HeadGraph`, in order.

        Raises:
            Exception: The runtime failed.
        """


class Inspector(Protocol):
    """Returns attention weights and hidden states of one model. Only one thread at a time may call `run`."""

    def run(
        self, sequence: ModelInput, wanted: Sequence[tuple[InspectKind, tuple[int, ...]]], *, attended: int = 0
    ) -> tuple[list[InspectTensor], float]:
        """Run one sequence, and block until its end.

        Args:
            sequence: The sequence, as for `Engine.run`.
            wanted: The kinds of tensors to return, each with layer indices. No indices means all layers.
            attended: All tokens attend only to this number of tokens at the start; 0 for no limit.

        Returns:
            A tensor for each kind in `wanted`, and the run time of the model in seconds.

        Raises:
            Exception: The runtime failed.
        """

    def close(self) -> None:
        """Free the inspector's memory. Nothing calls `run` afterwards."""
