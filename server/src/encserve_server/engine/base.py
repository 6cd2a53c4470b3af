"""The interface between the scheduler and whatever runs the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encserve_server.types.arrays import Mask, ModelInput, Numbers, Rows
from encserve_server.types.inspections import InspectKind, InspectTensor


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch gave; it belongs to whoever had it run.

    Attributes:
        output: (batch, seq, d_model) float32; what it holds behind the end of a sequence means nothing.
        lengths: The tokens of each sequence.
        collate_seconds: How long laying out the batch took.
        compute_seconds: How long the model ran.
    """

    output: Numbers
    lengths: list[int]
    collate_seconds: float
    compute_seconds: float

    @property
    def rows(self) -> list[Rows]:
        """For each sequence its (seq, d_model) rows without padding, views of the output."""
        return [its[:length] for its, length in zip(self.output, self.lengths, strict=True)]

    def tokens_of(self, places: Sequence[int]) -> Mask:
        """(batch, seq), whether there is a token of one of the sequences at these places, which ascend."""
        lengths = np.zeros((len(self.lengths), 1), np.int64)
        lengths[places, 0] = [self.lengths[i] for i in places]
        tokens: Mask = np.arange(self.output.shape[1]) < lengths
        return tokens

    @property
    def padded_tokens(self) -> int:
        """The tokens that were laid out, padding included."""
        batch, seq, _ = self.output.shape
        return int(batch * seq)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the model really runs on.

    Attributes:
        provider: ONNX Runtime's execution provider in use, e.g. "CUDAExecutionProvider", or "OpenVINO".
        device: "cpu" or "cuda".
        precision: The type it really computes in, e.g. "float32".
        runtime: What runs it, with its version, e.g. "onnxruntime 1.31.1".
    """

    provider: str
    device: str
    precision: str
    runtime: str


# On the CPU, where nobody says otherwise. Each batch needs memory for its activations.
_MOST_PARALLEL_RUNS = 8


def cpu_parallel_runs(asked: int | None, threads: int) -> int:
    """How many batches run at once on the CPU: as many as asked for, or a few; no more than there are threads."""
    return min(asked or _MOST_PARALLEL_RUNS, threads)


class Engine(Protocol):
    """Runs one model. At most `max_parallel_runs` threads are in `run` at a time."""

    @property
    def info(self) -> EngineInfo:
        """What the model really runs on."""

    @property
    def max_parallel_runs(self) -> int:
        """How many batches it can run at once, at least 1."""

    @property
    def widens(self) -> bool:
        """Whether a batch that runs alone is done sooner because it has the whole device."""

    def run(self, sequences: Sequence[ModelInput], *, attended: Sequence[int] = (), alone: bool = True) -> BatchResult:
        """Runs one batch; blocks until it is done.

        Args:
            sequences: One or more (seq,) int64 arrays of ids, or (seq, d_model) float32 arrays of vectors, whichever
                the model takes; each checked.
            attended: For each how many of its first tokens all of its tokens see, 0 for all; or nothing.
            alone: Whether no other batch will begin before this one is done, so that it may have the whole device.

        Raises:
            Exception: Whatever the runtime raises; the scheduler then tries smaller batches.
        """

    def close(self) -> None:
        """Frees what the engine holds; `run` is never called again."""


class Head(Protocol):
    """What a model makes of its rows, or of pooled ones. Any number of threads may use it at a time."""

    def run(self, *inputs: Numbers) -> Numbers:
        """Its inputs, in order, to its output, all float32: see `HeadGraph`.

        Raises:
            Exception: Whatever the runtime raises.
        """


class Inspector(Protocol):
    """Looks into one model. Used from one thread at a time."""

    def run(
        self, sequence: ModelInput, wanted: Sequence[tuple[InspectKind, tuple[int, ...]]], *, attended: int = 0
    ) -> tuple[list[InspectTensor], float]:
        """Runs one sequence; blocks until it is done.

        Args:
            sequence: As for `Engine.run`.
            wanted: Kinds that the model has, each with its layers.
            attended: How many of its first tokens all of its tokens see; 0 for all.

        Returns:
            A tensor for each of `wanted`, and how long the model ran, in seconds.

        Raises:
            Exception: Whatever the runtime raises.
        """

    def close(self) -> None:
        """Frees what it holds; `run` is never called again."""
