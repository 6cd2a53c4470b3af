"""A fake engine and a fake inspector. Both compute simple formulas, and tests can make runs fail or wait."""

import math
import threading
from collections.abc import Sequence

import numpy as np
from waiting import PATIENCE_SECONDS

from encserve_server.engine.base import BatchResult, EngineInfo
from encserve_server.types.arrays import ModelInput, Numbers, Rows
from encserve_server.types.inspections import InspectKind, InspectTensor

# The longest time that a held batch waits. The function `until` gives up earlier. Otherwise, a held batch could fail
# and leave the queue while a test still waits.
HELD_SECONDS = 2 * PATIENCE_SECONDS


def fake_rows(ids: ModelInput, d_model: int) -> Rows:
    """Return the hidden states of one sequence from `FakeEngine`, in the shape (seq, d_model).

    Each number depends on the token id, the position and the sequence length. If the input has vectors, the first
    number of a vector is used as the token id.
    """
    marks = np.asarray(ids if ids.ndim == 1 else ids[:, 0], np.float64)  # (seq,)
    place = np.arange(len(ids))
    rows = np.empty((len(ids), d_model), np.float32)
    rows[:] = marks[:, None] * 1000.0 + place[:, None] + len(ids) / 1000.0
    return rows


class FakeEngine:
    """An engine that returns `fake_rows` immediately, unless `hold` was called.

    Attributes:
        batches: The sequence lengths of each started batch, in order.
        poison: If a batch contains this token id, the batch fails.
        nan_id: If a sequence contains this token id, the hidden states contain a NaN.
        broken: If true, every batch fails.
        alone: The argument `alone` of each started batch. See `Engine.run`.
    """

    def __init__(
        self,
        d_model: int = 4,
        *,
        poison: int | None = None,
        nan_id: int | None = None,
        max_parallel_runs: int = 1,
        has_wide_session: bool = True,
    ) -> None:
        """Create an engine. The hidden state of a token has `d_model` numbers.

        The engine only reports `max_parallel_runs` and `has_wide_session` to the server, and does not use them.
        """
        self.max_parallel_runs = max_parallel_runs
        self.has_wide_session = has_wide_session
        self.alone: list[bool] = []
        self.d_model = d_model
        self.poison = poison
        self.nan_id = nan_id
        self.broken = False
        self.closed = False
        self.batches: list[list[int]] = []
        self.started = threading.Semaphore(0)  # released once for each batch that starts
        self._gate = threading.Condition()
        self._held = False
        self._passes = 0  # how many waiting batches may finish

    @property
    def info(self) -> EngineInfo:
        """A description of the engine, with invented names of provider and runtime."""
        return EngineInfo(provider="FakeExecutionProvider", device="cpu", precision="float32", runtime="fake")

    def hold(self) -> None:
        """Make batches wait in `run` until the test calls `let_go`."""
        with self._gate:
            self._held = True

    def let_go(self) -> None:
        """Let waiting and later batches finish."""
        with self._gate:
            self._held = False
            self._gate.notify_all()

    def let_one_go(self) -> None:
        """Let one waiting batch finish. The next batch waits again."""
        with self._gate:
            self._passes += 1
            self._gate.notify_all()

    def run(
        self,
        sequences: Sequence[ModelInput],
        *,
        attended: Sequence[int] = (),
        second_starts: Sequence[int] = (),
        alone: bool = True,
    ) -> BatchResult:
        """Record the batch, and return `fake_rows` for each sequence."""
        self.batches.append([len(ids) for ids in sequences])
        self.alone.append(alone)
        self.started.release()
        with self._gate:
            if not self._gate.wait_for(lambda: not self._held or self._passes, timeout=HELD_SECONDS):
                raise TimeoutError(f"the test did not call let_go within {HELD_SECONDS:g} s")
            self._passes = max(self._passes - 1, 0)
        if self.broken:
            raise RuntimeError("the device is lost")
        if self.poison is not None and any(self.poison in ids for ids in sequences):
            raise RuntimeError(f"cannot compute id {self.poison}")
        lengths = [len(ids) for ids in sequences]
        output = np.full((len(lengths), max(lengths), self.d_model), np.nan, np.float32)  # (batch, seq, d_model)
        for ids, rows in zip(sequences, output, strict=True):
            rows[: len(ids)] = fake_rows(ids, self.d_model)
            if self.nan_id is not None and self.nan_id in ids:
                rows[0, 0] = np.nan
        return BatchResult(output, lengths, collate_seconds=0.0001, compute_seconds=0.001)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True


def fake_numbers(kind: InspectKind, layer: int, shape: tuple[int, ...]) -> Numbers:
    """Return the array that `FakeInspector` returns for a layer.

    The numbers rise in equal steps from 100 × kind + layer to 100 × kind + layer + 1.
    """
    first = 100 * kind.value + layer
    return np.linspace(first, first + 1, math.prod(shape), dtype=np.float32).reshape(shape)


class FakeInspector:
    """An inspector that returns `fake_numbers` immediately, unless `hold` was called.

    Attributes:
        n_heads: The number of heads in the attention weights.
        lengths: The sequence length of each started run, in order.
        broken: If true, every run fails.
    """

    def __init__(self, d_model: int = 4, n_heads: int = 2, n_positions: int = 32) -> None:
        """Set the sizes of the arrays that `run` returns."""
        self._d_model = d_model
        self.n_heads = n_heads
        self._n_positions = n_positions
        self.lengths: list[int] = []
        self.broken = False
        self.closed = False
        self.started = threading.Semaphore(0)  # released once for each run that starts
        self._go = threading.Event()
        self._go.set()

    def hold(self) -> None:
        """Make runs wait until the test calls `let_go`."""
        self._go.clear()

    def let_go(self) -> None:
        """Let waiting and later runs finish."""
        self._go.set()

    def run(
        self, sequence: ModelInput, wanted: Sequence[tuple[InspectKind, tuple[int, ...]]], *, attended: int = 0
    ) -> tuple[list[InspectTensor], float]:
        """Record the sequence, and return `fake_numbers` for each requested kind and layer."""
        self.lengths.append(len(sequence))
        self.started.release()
        if not self._go.wait(timeout=HELD_SECONDS):
            raise TimeoutError(f"the test did not call let_go within {HELD_SECONDS:g} s")
        if self.broken:
            raise RuntimeError("the device is lost")
        seq = len(sequence)
        shapes = {
            InspectKind.ATTENTION_WEIGHTS: (self.n_heads, seq, seq),
            InspectKind.HIDDEN_STATES: (seq, self._d_model),
            InspectKind.POSITIONS: (self._n_positions, self._d_model),
        }
        tensors = []
        for kind, layers in wanted:
            parts = [fake_numbers(kind, layer, shapes[kind]) for layer in layers or (0,)]
            tensors.append(InspectTensor(kind, layers, tuple(parts)))
        return tensors, 0.001

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True
