"""Runs a control and an attack against a server, and checks memory, latency and replies.

The control consists of ordinary calls. The tests compare the server's memory and latency during the control and during
the attack.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile_attacks import Report, attack
from hostile_watch import MIB, SLACK_BYTES, Phase, Watch, logger, parse_seconds, watching
from real_server import RealServer, real_server

# The memory budget for requests and replies. On a machine with enough memory, this is also the server's default. The
# tests set the budget explicitly, because the default depends on the machine.
BUDGET_MIB = 1024
WARM_UP_SECONDS, CONTROL_SECONDS, SETTLE_SECONDS, ATTACK_SECONDS = 2.0, 3.0, 1.0, 5.0
# If a batch runs longer than 3 s, health checks return NOT_SERVING and the test fails. The server's default is 60 s.
SHORT_STALL = ("--stall-seconds", "3")
# Settings for replies of 64 MiB. The queue has room for all calls. Only one batch runs at a time, because parallel
# batches would need more memory.
LARGE_REPLIES = ("--max-queue-tokens", "1000000", "--parallel-batches", "1")
Driver = tuple[Any, ...]


@contextmanager
def hostile_server(repository: Path, *flags: str, **options: Any) -> Iterator[RealServer]:
    """Run a server with all protocols and a memory budget. Kill the server at the end of the block.

    `options` are options of `real_server`.
    """
    budget = ("--max-in-flight-mib", str(BUDGET_MIB))
    with real_server(repository, "--http-port", "0", *budget, *flags, **options) as server:
        try:
            yield server
        finally:
            server.process.kill()


@dataclass(frozen=True)
class Outcome:
    """The effects of a control and of an attack on one server.

    Attributes:
        control: Memory and latencies during the control.
        attacked: Memory and latencies during the attack.
        after_bytes: The server's memory after the attack. The measurement first gives the server time to free memory.
        report: The report that the attack returned.
    """

    control: Phase
    attacked: Phase
    after_bytes: int
    report: Report

    @property
    def allowed_ms(self) -> float:
        """The limit for the 99th percentile of health-check latency during the attack.

        The limit is the 99th percentile during the control, plus the time to parse three messages of the largest size.
        """
        return self.control.health.p99_ms + 3 * parse_seconds() * 1000

    def check(self, *, is_latency_bound: bool = True) -> None:
        """Fail if the attack affected health checks, memory or ordinary calls.

        If `is_latency_bound` is false, the latency of health checks may rise.
        """
        allowed_ms = self.allowed_ms
        level_bytes, health = self.attacked.level_bytes, self.attacked.health
        wrong = {
            "health is not SERVING": health.answers != {},
            "memory beyond the budget": self.attacked.peak_bytes > level_bytes + BUDGET_MIB * MIB + SLACK_BYTES,
            "memory not freed": not 0 < self.after_bytes <= level_bytes + SLACK_BYTES,
            f"health p99 over {allowed_ms:.0f} ms": is_latency_bound and health.p99_ms > allowed_ms,
            "ordinary calls fail": set(health.ordinary) != {"OK"},
        }
        found = [name for name, is_wrong in wrong.items() if is_wrong]
        assert not found, "\n".join([*found, str(self)])

    def __str__(self) -> str:
        return f"{self.control}\n{self.attacked}\nmemory after: {self.after_bytes // MIB} MiB\nreport: {self.report}"


def measure(
    server: RealServer,
    control: Driver,
    attacking: Driver,
    *,
    warm_up: Driver | None = None,
    attack_seconds: float = ATTACK_SECONDS,
    is_latency_bound: bool = True,
) -> Outcome:
    """Run the warm-up, the control and the attack. Return the effects of the control and of the attack.

    By default, the control is also the warm-up. The server keeps some memory after the warm-up, so memory is measured
    only after the warm-up. If health checks are too slow during the attack, repeat the control and the attack once,
    because the machine may be busy.
    """
    with attack(*(warm_up or control)):
        time.sleep(WARM_UP_SECONDS)
    outcome = measure_once(server, control, attacking, attack_seconds)
    if is_latency_bound and outcome.attacked.health.p99_ms > outcome.allowed_ms:
        outcome = measure_once(server, control, attacking, attack_seconds)
    return outcome


def measure_once(
    server: RealServer,
    control: Driver,
    attacking: Driver,
    attack_seconds: float,
    *,
    control_seconds: float = CONTROL_SECONDS,
    on_all_paths: bool = False,
    ca: Path | None = None,
    inspects: bool = False,
) -> Outcome:
    """Run the control and the attack. `on_all_paths`, `ca` and `inspects` are arguments of `watching`."""
    with watching(server, BUDGET_MIB, on_all_paths=on_all_paths, ca=ca, inspects=inspects) as watch:
        first, _ = _drive(watch, "control", control, control_seconds)
        time.sleep(SETTLE_SECONDS)
        second, report = _drive(watch, "attack", attacking, attack_seconds)
        after_bytes = watch.wait_for_level(second.level_bytes + SLACK_BYTES // 2)
    logger.info("memory after: %d MiB, report: %s", after_bytes // MIB, report)
    return Outcome(first, second, after_bytes, report)


def _drive(watch: Watch, name: str, driver: Driver, seconds: float) -> tuple[Phase, Report]:
    with attack(*driver) as driven:
        with watch.phase(name) as phase:
            time.sleep(seconds)
        return phase, driven.stop()


def wait_for_metric(server: RealServer, name: str, value: float, tolerance: float = 0, seconds: float = 20) -> None:
    """Wait until the difference between a metric and a value is at most `tolerance`. After `seconds`, fail the test."""
    ends = time.monotonic() + seconds
    while abs((now := server.metric(name)) - value) > tolerance:
        assert time.monotonic() < ends, f"{name} is {now}, not {value}"
        time.sleep(0.1)
