"""Reads a server's metrics page: CPU time, tokens, sequences and histograms during a measurement."""

import time
import urllib.request
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_SECONDS = 60.0
CPU, TOKENS, SEQUENCES = "process_cpu_seconds_total", "encserve_tokens_total", "encserve_batch_sequences_sum"


def _samples(port: int) -> Iterator[Sample]:
    """Yield the samples of the metrics page on this port of this machine.

    Raises:
        OSError: The page is not readable.
    """
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as page:
        families = text_string_to_metric_families(page.read().decode())
    return (sample for family in families for sample in family.samples)


def histogram(port: int, name: str, **labels: str) -> dict[float, float]:
    """Return the buckets of a histogram: upper bound → number of values up to the bound."""
    buckets: dict[float, float] = {}
    for sample in _samples(port):
        if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return buckets


def percentile_between(before: Mapping[float, float], after: Mapping[float, float], percent: float) -> float:
    """Return a percentile of the values that a histogram got between two readings. Interpolate within a bucket."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    wanted, low, below = percent / 100 * max(counts.values()), 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


class Meter:
    """The increase of the server's figures between the first and the last reading of the metrics page."""

    def __init__(self, port: int) -> None:
        """Set the port of the metrics page on this machine."""
        self.port = port
        self._readings: list[tuple[float, dict[str, float]]] = []

    def read(self) -> None:
        """Read the page.

        Raises:
            OSError: The page is not readable.
        """
        now = time.perf_counter()
        totals = dict.fromkeys((CPU, TOKENS, SEQUENCES), 0.0)
        for sample in _samples(self.port):
            if sample.name in totals:
                totals[sample.name] += sample.value
        self._readings.append((now, totals))

    @property
    def seconds(self) -> float:
        """The time between the readings."""
        return self._readings[-1][0] - self._readings[0][0]

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of the server process."""
        return self._difference(CPU)

    @property
    def tokens(self) -> int:
        """The number of tokens that all models processed, without padding."""
        return round(self._difference(TOKENS))

    @property
    def sequences(self) -> int:
        """The number of sequences that all models processed."""
        return round(self._difference(SEQUENCES))

    def _difference(self, name: str) -> float:
        return self._readings[-1][1][name] - self._readings[0][1][name]
