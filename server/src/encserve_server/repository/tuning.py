"""Measures the best number of tokens in a batch when a model is loaded, and stores the result next to the bundle.

A budget is the maximum number of tokens in a batch, padding included. Larger batches need fewer runs, but their
activations may not fit the device's cache. The best budget depends on the model and the machine. A wrong constant costs
up to a quarter of the throughput. So each budget runs 64 texts of usual lengths, in the batches that the scheduler
would make. A GPU gets more texts: enough to fill a few of the largest batches.

Other work on the machine makes runs slower, and a wrong result would stay stored. So every batch runs several times. If
the times do not agree, no result is stored.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encserve_server.engine.base import Engine
from encserve_server.scheduling.batching import BatchPolicy, plan_batch
from encserve_server.system.files import store_whole
from encserve_server.types.bundles import Bundle

logger = logging.getLogger(__name__)

BUDGETS_TOKENS: Mapping[str, tuple[int, ...]] = {
    "cpu": (256, 384, 512, 768, 1024),
    "cuda": (4096, 8192, 16384, 32768),
}
# The lengths of 64 English texts in tokens, with the distribution of a large sample: median 27, mean 43, longest 256.
USUAL_LENGTHS = (
    18, 30, 24, 14, 40, 22, 64, 11, 104, 53, 15, 9, 37, 29, 20, 45, 16, 92, 31, 20, 19, 165,
    10, 8, 26, 22, 19, 43, 21, 30, 25, 39, 6, 13, 21, 23, 56, 47, 204, 27, 23, 75, 15, 32,
    120, 60, 35, 17, 16, 13, 42, 33, 256, 12, 50, 17, 69, 25, 36, 141, 82, 28, 18, 27,
)  # fmt: skip
# A budget is good if it reaches this fraction of the best throughput. A server uses the smallest good budget, so that
# the next caller waits less. A job uses the largest, because every batch has a fixed cost and no caller waits.
_GOOD_ENOUGH = 0.98
# The budgets are tried in turn for this time. For each batch, the shortest time counts, because other work only adds
# time.
_MAX_SECONDS = 2.0
_LEAST_ROUNDS = 3
# The times agree if the sum of the second shortest times exceeds the sum of the shortest times by at most this
# fraction.
_MAX_SPREAD = 0.1
# Running all texts once with one budget should take at most this time. On a slow machine, fewer texts are used.
_TRY_SECONDS = 0.3
_LEAST_TEXTS = 8
# On a GPU, the texts fill this number of batches of the largest budget. If there is no time, fewer texts are used.
_FILLED = 2.5
_MOST_TEXTS = 4096
_FORMAT = 3  # version 1 had too few texts for a GPU; version 2 had only one budget


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a measurement.

    Attributes:
        max_batch_tokens: The budget for a server; None if the machine was too busy to measure.
        job_batch_tokens: The budget for a job.
        tokens_per_second: The throughput with each budget.
        remembered: Whether the result was stored by an earlier start.
    """

    max_batch_tokens: int | None
    job_batch_tokens: int | None
    tokens_per_second: Mapping[int, float]
    remembered: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """The throughput with each budget, and the spread of the times.

    Attributes:
        tokens_per_second: The throughput by budget, from the shortest time of each batch. Budgets that the engine
            cannot run are missing.
        spread: The fraction by which the second shortest times are longer than the shortest times.
    """

    tokens_per_second: Mapping[int, float]
    spread: float


def tune(
    engine: Engine,
    bundle: Bundle,
    policy_for: Callable[[int], BatchPolicy],
    *,
    path: Path,
    machine: Mapping[str, Any],
    now: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Return the stored budgets for this model and machine, or measure and store them.

    Args:
        engine: A loaded and warm model.
        bundle: The model's bundle.
        policy_for: Returns the batching policy for a budget.
        path: The file for the result. If the file cannot be read or written, the next start measures again.
        machine: The properties of the machine that influence the result, as JSON values.
        now: A clock, in seconds.
    """
    budgets = BUDGETS_TOKENS[engine.info.device]
    some = policy_for(budgets[0])
    key = {
        "format": _FORMAT,
        "fingerprint": bundle.fingerprint,
        "provider": engine.info.provider,
        "precision": engine.info.precision,
        "max_batch_sequences": some.max_batch_sequences,
        "max_padding_fraction": some.max_padding_fraction,
        "budgets": list(budgets),
        **machine,
    }
    remembered = _read(path, key)
    if remembered is not None:
        return _tuned(remembered, remembered=True)
    measured = measure(engine, bundle, [policy_for(budget) for budget in budgets], now)
    rates = measured.tokens_per_second
    if len(rates) < len(budgets):  # the next start may have more free memory, so it measures again
        return _tuned(rates)
    if measured.spread > _MAX_SPREAD:
        return Tuned(None, None, rates, remembered=False)
    _write(path, key | {"tokens_per_second": rates})
    return _tuned(rates)


def _tuned(rates: Mapping[int, float], *, remembered: bool = False) -> Tuned:
    good = good_enough(rates)
    return Tuned(min(good, default=None), max(good, default=None), rates, remembered)


def good_enough(tokens_per_second: Mapping[int, float]) -> list[int]:
    """Return the budgets whose throughput is at least `_GOOD_ENOUGH` of the best throughput."""
    enough = _GOOD_ENOUGH * max(tokens_per_second.values(), default=0)
    return [budget for budget, rate in tokens_per_second.items() if rate >= enough]


def measure(
    engine: Engine, bundle: Bundle, policies: Sequence[BatchPolicy], now: Callable[[], float] = time.perf_counter
) -> Measured:
    """Run usual texts with each policy in turn."""
    alone = engine.max_parallel_runs == 1  # otherwise batches run in parallel if many texts wait
    lengths = [min(length, bundle.max_sequence_tokens) for length in USUAL_LENGTHS]
    if engine.info.device == "cuda":
        most = max(policy.max_batch_tokens for policy in policies)
        lengths = (lengths * math.ceil(_FILLED * most / sum(lengths)))[:_MOST_TEXTS]
    try:
        lengths = _affordable(lengths, engine, bundle, policies[0], alone=alone)
    except Exception as error:  # any exception of the runtime
        logger.warning("the batch budget cannot be measured", extra={"error": repr(error)})
        return Measured({}, math.inf)
    batches = {policy.max_batch_tokens: _batches(lengths, policy) for policy in policies}
    seconds: dict[int, list[list[float]]] = {budget: [[] for _ in planned] for budget, planned in batches.items()}
    began, rounds = now(), 0
    while batches and (rounds < _LEAST_ROUNDS or now() - began < _MAX_SECONDS):
        for budget in list(batches):
            try:
                for times, batch in zip(seconds[budget], batches[budget], strict=True):
                    times.append(engine.run([bundle.sample(it) for it in batch], alone=alone).compute_seconds)
            except Exception as error:  # the runtime's exception; most often, too little memory is free
                logger.warning(
                    "the engine cannot run a batch budget", extra={"max_batch_tokens": budget, "error": repr(error)}
                )
                batches = {smaller: planned for smaller, planned in batches.items() if smaller < budget}
                break
        rounds += 1
    shortest, second = (
        {budget: sum(sorted(times)[place] for times in seconds[budget]) for budget in batches} for place in (0, 1)
    )
    return Measured(
        {budget: sum(lengths) / total for budget, total in shortest.items()},
        sum(second.values()) / sum(shortest.values()) - 1 if batches else math.inf,
    )


def _affordable(lengths: list[int], engine: Engine, bundle: Bundle, least: BatchPolicy, *, alone: bool) -> list[int]:
    """Return as many lengths as one try has time for. A run of one batch with the smallest budget shows the speed."""
    usual = min(43, bundle.max_sequence_tokens)
    count = max(min(least.max_batch_tokens // usual, least.max_batch_sequences), 1)
    batch = [bundle.sample(usual)] * count
    seconds = min(engine.run(batch, alone=alone).compute_seconds for _ in range(2))
    tokens = _TRY_SECONDS * usual * count / seconds
    affordable = round(len(lengths) * tokens / sum(lengths))
    return lengths[: max(min(affordable, len(lengths)), _LEAST_TEXTS)]


def _batches(lengths: Sequence[int], policy: BatchPolicy) -> list[list[int]]:
    """Group lengths into the batches that the scheduler would make."""
    waiting, taken = Counter(lengths), Counter[int]()
    batches = []
    for anchor in lengths:  # the oldest first
        if taken[anchor]:
            taken[anchor] -= 1
            continue
        plan = plan_batch(anchor, sorted(waiting), waiting, policy)
        taken += Counter(plan.counts)
        waiting -= Counter(plan.counts)  # removes the texts of this batch, and lengths without texts
        taken[anchor] -= 1
        batches.append([length for length, count in plan.counts.items() for _ in range(count)])
    return batches


def _read(path: Path, key: Mapping[str, Any]) -> dict[int, float] | None:
    """Return the stored tokens per second by budget for this key; None without a stored result."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in key.items()):
        return None
    rates = found.get("tokens_per_second")
    if not isinstance(rates, dict) or set(rates) != {str(budget) for budget in key["budgets"]}:
        return None
    if not all(isinstance(rate, (int, float)) and 0 < rate < math.inf for rate in rates.values()):
        return None
    return {int(budget): float(rate) for budget, rate in rates.items()}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file completely or not at all. The repository may be read-only."""

    def write(file: Path) -> None:
        file.write_text(json.dumps(content), encoding="utf-8")
        file.chmod(0o644)  # the next server may run as another user

    try:
        store_whole(path, write)
    except OSError as error:
        logger.info("the batch budget cannot be stored", extra={"reason": error.strerror})
