"""Reads the metrics page of a server, for the server's own figures of a measurement."""

import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SECONDS = 60.0
CPU, TOKENS, SEQUENCES = "process_cpu_seconds_total", "encserve_tokens_total", "encserve_batch_sequences_sum"


class Meter:
    """The server's own figures between the first and the last reading of its metrics page."""

    def __init__(self, port: int) -> None:
        """Set the port of the metrics page on this machine."""
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._readings: list[tuple[float, dict[str, float]]] = []

    def read(self) -> None:
        """Read the page.

        Raises:
            OSError: The page is not readable.
        """
        now = time.perf_counter()
        with urllib.request.urlopen(self._url, timeout=TIMEOUT_SECONDS) as page:  # noqa: S310 - our own address
            families = text_string_to_metric_families(page.read().decode())
        totals = dict.fromkeys((CPU, TOKENS, SEQUENCES), 0.0)
        for sample in (sample for family in families for sample in family.samples):
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
