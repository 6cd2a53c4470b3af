"""A server, a control and an attack: what the one and the other do to it, and whether that is within bounds."""

import functools
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile_attacks import Report, attack
from hostile_watch import MIB, SLACK_BYTES, Phase, Watch, logger, parse_seconds, watching
from real_server import COMMAND, RealServer, real_server

# The default where there is enough memory; given, so that every machine tests the same.
BUDGET_MIB = 1024
WARM_UP_SECONDS, CONTROL_SECONDS, SETTLE_SECONDS, ATTACK_SECONDS = 2.0, 3.0, 1.0, 5.0
# A batch of more than this is one that an attack made so long: the default of a minute takes a minute to see.
SHORT_STALL = ("--stall-seconds", "3")
# For replies of 64 MiB: the queue must not be what refuses the calls, and what the engine keeps for a batch not what is
# measured, which is as much again for each batch that runs beside another.
LARGE_REPLIES = ("--max-queue-tokens", "1000000", "--parallel-batches", "1")
Driver = tuple[Any, ...]


@functools.cache
def known_flags(*flags: str) -> list[str]:
    """The pairs of a flag and its value whose flag the server knows."""
    known = subprocess.run([COMMAND, "--help"], check=True, capture_output=True, text=True).stdout
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [part for flag, value in pairs if f"{flag} " in known for part in (flag, value)]


@contextmanager
def hostile_server(repository: Path, *flags: str) -> Iterator[RealServer]:
    """A server with every protocol and a budget, killed afterwards: no caller is left that has a reply to come."""
    budget = known_flags("--max-in-flight-mib", str(BUDGET_MIB))
    with real_server(repository, "--http-port", "0", *budget, *flags) as server:
        try:
            yield server
        finally:
            server.process.kill()


@dataclass(frozen=True)
class Outcome:
    """What a control and an attack did to one server.

    Attributes:
        control: The phase of the control.
        attacked: The phase of the attack.
        after_bytes: The server's memory a while after the attack.
        report: What the attackers saw.
    """

    control: Phase
    attacked: Phase
    after_bytes: int
    report: Report

    @property
    def allowed_ms(self) -> float:
        """How late health may be: as in the control, and as parsing three maximal messages makes it."""
        return self.control.health.p99_ms + 3 * parse_seconds() * 1000

    def check(self, *, is_latency_bound: bool = True) -> None:
        """Fails unless the server went on as it should."""
        allowed_ms = self.allowed_ms
        level_bytes, health = self.attacked.level_bytes, self.attacked.health
        wrong = {
            "health is not SERVING": health.answers != {},
            "memory beyond the budget": self.attacked.peak_bytes > level_bytes + BUDGET_MIB * MIB + SLACK_BYTES,
            "memory not given back": not 0 < self.after_bytes <= level_bytes + SLACK_BYTES,
            f"health p99 over {allowed_ms:.0f} ms": is_latency_bound and health.p99_ms > allowed_ms,
            "ordinary calls are not answered": set(health.ordinary) != {"OK"},
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
    """Runs the control and then the attack, each for a while; both again if health was late and that counts.

    The second time tells what the server does from what the rest of the machine does. What the calls of the warm-up
    leave in memory, which are those of the control unless said otherwise, is part of the level before the attack.
    """
    with attack(*(warm_up or control)):
        time.sleep(WARM_UP_SECONDS)
    outcome = _measure_once(server, control, attacking, attack_seconds)
    if is_latency_bound and outcome.attacked.health.p99_ms > outcome.allowed_ms:
        outcome = _measure_once(server, control, attacking, attack_seconds)
    return outcome


def _measure_once(server: RealServer, control: Driver, attacking: Driver, attack_seconds: float) -> Outcome:
    with watching(server, BUDGET_MIB) as watch:
        first, _ = _drive(watch, "control", control, CONTROL_SECONDS)
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
    """Returns once a metric of the server has about this value; fails if it has not after so many seconds."""
    ends = time.monotonic() + seconds
    while abs((now := server.metric(name)) - value) > tolerance:
        assert time.monotonic() < ends, f"{name} is {now}, not {value}"
        time.sleep(0.1)
