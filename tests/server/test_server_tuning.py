"""Tests of the batch budget, which is the maximum number of tokens in a batch.

They check how the server measures and chooses the budget, and how it stores the measurements.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundle import write_bundle

from encserve_server.engine.base import BatchResult, EngineInfo
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.loading import load_model
from encserve_server.repository.tuning import BUDGETS_TOKENS, USUAL_LENGTHS, Tuned, good_enough, tune
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.settings import Settings
from encserve_server.types.arrays import ModelInput
from encserve_server.types.bundles import Bundle

MACHINE = {"cpu": "a CPU", "intra_op_threads": 2, "runtime": "fake 1"}


class Device:
    """A fake engine. A function returns the seconds of each run, and the clock advances only during runs.

    Attributes:
        batches: The lengths of the sequences of every batch.
    """

    info = EngineInfo(provider="FakeExecutionProvider", device="cpu", precision="float32", runtime="fake 1")
    max_parallel_runs = 1
    has_wide_session = False

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        """Set the function that returns the seconds of a run.

        Its arguments are the number of padded tokens and the number of the run (1, 2, …).
        """
        self._seconds = seconds
        self.batches: list[list[int]] = []
        self.clock = 0.0

    def run(
        self,
        sequences: Sequence[ModelInput],
        *,
        attended: Sequence[int] = (),
        second_starts: Sequence[int] = (),
        alone: bool = True,
    ) -> BatchResult:
        lengths = [len(it) for it in sequences]
        self.batches.append(lengths)
        padded = max(lengths) * len(lengths)
        seconds = self._seconds(padded, len(self.batches))
        self.clock += seconds
        output = np.zeros((len(lengths), max(lengths), 1), np.float32)
        return BatchResult(output, list(lengths), 0.0, seconds)

    def close(self) -> None:
        """Do nothing, because a fake engine has nothing to free."""

    def now(self) -> float:
        return self.clock


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return replace(read_bundle(write_bundle(tmp_path / "models")), max_sequence_tokens=256)


def tune_cpu(device: Device, bundle: Bundle, folder: Path, machine: dict[str, Any] = MACHINE) -> Tuned:
    """Measure on a device. The measurements are stored in the file `t.json` of the folder."""

    def policy(budget: int) -> BatchPolicy:
        return BatchPolicy(budget, 256, 0.25)

    return tune(device, bundle, policy, path=folder / "t.json", machine=machine, now=device.now)


def cached(limit: int) -> Callable[[int, int], float]:
    """Return a function that returns the seconds of a run.

    A run takes a fixed time, and a time per token. In runs of more than `limit` tokens, the time per token is longer.
    So the function imitates a CPU whose cache is too small for longer runs.
    """
    return lambda padded, _: 3e-3 + padded * (1e-5 if padded <= limit else 4e-5)


@pytest.mark.parametrize(
    ("limit", "server", "job"), [(300, 256, 256), (520, 512, 512), (800, 768, 768), (5000, 768, 1024)]
)
def test_the_budget_is_the_fastest_one(bundle: Bundle, tmp_path: Path, limit: int, server: int, job: int) -> None:
    """If several budgets are nearly equally fast, a server takes the smallest, and a job takes the largest."""
    device = Device(cached(limit))
    tuned = tune_cpu(device, bundle, tmp_path)
    assert (tuned.max_batch_tokens, tuned.job_batch_tokens) == (server, job)
    assert not tuned.remembered
    assert set(tuned.tokens_per_second) == set(BUDGETS_TOKENS["cpu"])


def tune_gpu(
    bundle: Bundle, path: Path, seconds: Callable[[int, int], float], most_sequences: int = 4096
) -> tuple[Tuned, Device]:
    """Measure on a fake GPU, and return the result and the GPU."""
    device = Device(seconds)
    device.info = replace(device.info, device="cuda")
    tuned = tune(
        device,
        bundle,
        lambda tokens: BatchPolicy(tokens, most_sequences, 0.5),
        path=path,
        machine=MACHINE,
        now=device.now,
    )
    return tuned, device


@pytest.mark.parametrize(("limit", "budget"), [(4096, 4096), (9000, 8192)])
def test_a_gpu_is_measured_on_full_batches(bundle: Bundle, tmp_path: Path, limit: int, budget: int) -> None:
    """A GPU is measured with more texts than a CPU: 64 texts would not fill a GPU's smallest budget."""
    tuned, _ = tune_gpu(
        bundle, tmp_path / "t.json", lambda padded, _: 2e-3 + padded * (1e-7 if padded <= limit else 4e-7)
    )
    assert tuned.max_batch_tokens == budget


def small(padded: int, most: int) -> float:
    """Return the seconds of a run. With more than `most` padded tokens, raise an out-of-memory error."""
    if padded > most:
        raise RuntimeError(f"out of memory for {padded} tokens")
    return 1e-3 + padded * 1e-7


def test_a_budget_beyond_the_memory_is_skipped(
    bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the measurement of a budget runs out of memory, the model still loads with a smaller budget.

    The measurements are not stored, because more memory may be free at the next start.
    """
    tuned, _ = tune_gpu(bundle, tmp_path / "t.json", lambda padded, _: small(padded, 5000))
    assert tuned.max_batch_tokens == 4096
    assert not list(tmp_path.glob("*.json"))
    assert "the engine cannot run a batch budget" in caplog.messages


@pytest.mark.parametrize("good_runs", [0, 2])
def test_without_measurements_there_is_no_budget(bundle: Bundle, tmp_path: Path, good_runs: int) -> None:
    path = tmp_path / "t.json"
    tuned, _ = tune_gpu(bundle, path, lambda padded, ran: small(padded, 40_000 if ran <= good_runs else 0))
    assert tuned.max_batch_tokens is None
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("most_sequences", [1, 32, 256])
def test_the_measurement_takes_a_few_seconds_for_any_batch_size(
    bundle: Bundle, tmp_path: Path, most_sequences: int
) -> None:
    _, device = tune_gpu(bundle, tmp_path / "t.json", lambda padded, _: 3e-3 + padded * 1e-6, most_sequences)
    assert device.clock < 8


def test_nearly_equal_budgets_are_equally_good() -> None:
    assert good_enough({256: 90.0, 384: 98.5, 512: 100.0, 768: 97.0, 1024: 99.0}) == [384, 512, 1024]
    assert good_enough({}) == []


@given(st.dictionaries(st.integers(1, 4096), st.floats(1, 1e6), min_size=1))
def test_the_choice_is_always_nearly_the_fastest(rates: dict[int, float]) -> None:
    good = good_enough(rates)
    assert good
    assert all(rates[budget] >= 0.98 * max(rates.values()) for budget in good)


def test_the_measured_batches_keep_their_bounds(bundle: Bundle, tmp_path: Path) -> None:
    device = Device(cached(512))
    tune_cpu(device, bundle, tmp_path)
    for lengths in device.batches:
        padded = max(lengths) * len(lengths)
        assert padded <= max(BUDGETS_TOKENS["cpu"])
        assert padded - sum(lengths) <= 0.25 * padded
    assert sum(sum(lengths) for lengths in device.batches) >= 3 * len(BUDGETS_TOKENS["cpu"]) * sum(USUAL_LENGTHS)


def test_no_measured_sequence_is_longer_than_the_models_limit(tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path / "models"))
    device = Device(cached(512))
    tune_cpu(device, bundle, tmp_path)
    assert max(map(max, device.batches)) == bundle.max_sequence_tokens


def test_a_slow_model_is_measured_on_fewer_texts(bundle: Bundle, tmp_path: Path) -> None:
    device = Device(lambda padded, _: padded * 1e-2)
    tune_cpu(device, bundle, tmp_path)
    assert device.clock < 80
    assert len({length for lengths in device.batches for length in lengths}) < len(set(USUAL_LENGTHS)) / 2


def test_unstable_measurements_give_no_budget_and_no_file(bundle: Bundle, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    device = Device(lambda padded, _: padded * 1e-4 * random.uniform(1, 4))
    tuned = tune_cpu(device, bundle, tmp_path)
    assert tuned.max_batch_tokens is None
    assert not list(tmp_path.glob("*.json"))


def test_a_few_disturbed_runs_change_nothing(bundle: Bundle, tmp_path: Path) -> None:
    device = Device(lambda padded, n: cached(520)(padded, n) * (5 if n % 7 == 0 else 1))
    tuned = tune_cpu(device, bundle, tmp_path)
    assert tuned.max_batch_tokens == 512


def test_measurements_are_stored_for_one_model_and_machine(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    def again(of: Bundle = bundle, machine: dict[str, Any] = MACHINE, **changes: str) -> bool:
        device = Device(cached(520))
        device.info = replace(device.info, **changes)
        tuned = tune_cpu(device, of, tmp_path, machine)
        assert (tuned.max_batch_tokens, tuned.job_batch_tokens) == (512, 512)
        assert set(tuned.tokens_per_second) == set(BUDGETS_TOKENS["cpu"])
        assert tuned.remembered == (not device.batches)
        return tuned.remembered

    assert not again()
    assert path.stat().st_mode & 0o777 == 0o644, "servers of other users must be able to read the file"
    assert again()
    assert not again(machine=MACHINE | {"intra_op_threads": 4})
    assert not again()
    assert not again(of=replace(bundle, fingerprint="0" * 32))
    assert not again()
    assert not again(precision="bfloat16")
    assert not again(provider="OpenVINO", precision="bfloat16")


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"max_batch_tokens": 512}', "\x00"])
def test_a_damaged_file_is_measured_again(bundle: Bundle, tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    device = Device(cached(520))
    assert not tune_cpu(device, bundle, tmp_path).remembered
    again = tune_cpu(device, bundle, tmp_path)
    assert again.remembered
    assert again.max_batch_tokens == 512


@pytest.mark.parametrize(
    "changes", [{"512": it} for it in (0, -5, "512", None, math.inf, math.nan, [1])] + [{"1000000": 1e9}, {"x": 1}]
)
def test_impossible_measurements_are_not_used(bundle: Bundle, tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "t.json"
    device = Device(cached(520))
    tune_cpu(device, bundle, tmp_path)
    content = json.loads(path.read_text())
    content["tokens_per_second"] |= changes
    path.write_text(json.dumps(content))
    assert not tune_cpu(device, bundle, tmp_path).remembered


def test_a_budget_is_measured_even_if_it_cannot_be_stored(bundle: Bundle, tmp_path: Path) -> None:
    assert tune_cpu(Device(cached(520)), bundle, tmp_path / "missing").max_batch_tokens == 512


def test_a_budget_in_the_settings_is_not_measured(tmp_path: Path) -> None:
    directory = write_bundle(tmp_path)
    for settings, budget in (({"max_batch_tokens": 77}, 77), ({"tune_batches": False}, 512)):
        loaded = load_model(directory, Settings(model_repository=tmp_path, **settings), None)  # type: ignore[arg-type]
        assert loaded.max_batch_tokens == budget
        loaded.engine.close()
    assert [path.name for path in directory.parent.iterdir()] == ["1"]
