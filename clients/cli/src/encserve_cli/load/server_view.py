"""The server's own view of a run: the difference between two readings of its metrics page."""

import http.client
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_SECONDS = 5.0
_STAGES = ("tokenize", "queue", "compute", "encode")
Key = tuple[str, frozenset[tuple[str, str]]]
Reading = dict[Key, float]
_CPU: Key = ("process_cpu_seconds_total", frozenset())
_RESIDENT: Key = ("process_resident_memory_bytes", frozenset())


class MetricsMissing(Exception):
    """There are no metrics to be had; the text says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What the server's metrics say of the time between two readings. A mean of nothing is None.

    Attributes:
        seconds: Between the readings.
        sequences: That its batches held, of this model and whoever asked.
        tokens: Of these, padding excluded.
        batches: That ran.
        batch_sequences: Mean sequences of a batch.
        batch_tokens: Mean tokens of a batch, padding excluded.
        padding_fraction: The share of padding among all tokens of batches.
        tokenize_seconds: Mean of a request's texts.
        queue_seconds: Mean wait of a sequence.
        compute_seconds: Mean run of a batch.
        encode_seconds: Mean time to write a reply.
        refused: Requests that were answered with an error, by reason; of all models.
        cpu_seconds: CPU time of the server process; None where it does not say.
        resident_bytes: Its memory at the end; None where it does not say.
    """

    seconds: float
    sequences: int
    tokens: int
    batches: int
    batch_sequences: float | None
    batch_tokens: float | None
    padding_fraction: float | None
    tokenize_seconds: float | None
    queue_seconds: float | None
    compute_seconds: float | None
    encode_seconds: float | None
    refused: dict[str, int]
    cpu_seconds: float | None
    resident_bytes: int | None


def fetch_page(url: str) -> str:
    """The page. Raises MetricsMissing where none can be had."""
    if not url.startswith(("http://", "https://")):
        raise MetricsMissing(f"a metrics page is at http:// or https://; was {url}")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as page:  # noqa: S310 - checked above
            text: str = page.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MetricsMissing(f"{url}: {getattr(error, 'reason', error)}") from error
    return text


def read_page(text: str) -> Reading:
    """Every sample by name and labels. Raises MetricsMissing where the text is no metrics page."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise MetricsMissing(f"no metrics page: {error}") from error
    return {(it.name, frozenset(it.labels.items())): it.value for it in samples}


def difference(before: Reading, after: Reading, fingerprint: str, seconds: float) -> ServerView:
    """What happened between two readings.

    Args:
        before: The first.
        after: The second.
        fingerprint: Of the model whose view is wanted.
        seconds: Between them.

    Raises:
        MetricsMissing: The page is of a server that does not serve this model.
    """
    models = [dict(labels) for name, labels in after if name == "encserve_model_info"]
    found = [it for it in models if it["fingerprint"] == fingerprint]
    if not found:
        raise MetricsMissing("the metrics page is of another server: it does not know this model")
    model = {name: found[0][name] for name in ("model", "version")}

    def grown(name: str, **labels: str) -> float:
        wanted = (name, frozenset(labels.items()))
        return after.get(wanted, 0.0) - before.get(wanted, 0.0)

    def mean(name: str, **labels: str) -> float | None:
        count = grown(f"{name}_count", **labels)
        return grown(f"{name}_sum", **labels) / count if count > 0 else None

    stages = {stage: mean("encserve_stage_seconds", **model, stage=stage) for stage in _STAGES}
    tokens = grown("encserve_tokens_total", **model)
    padding = grown("encserve_padding_tokens_total", **model)
    refused = {
        dict(labels)["reason"]: int(value - before.get((name, labels), 0.0))
        for (name, labels), value in after.items()
        if name == "encserve_refused_total"
    }
    return ServerView(
        seconds=seconds,
        sequences=int(grown("encserve_batch_sequences_sum", **model)),
        tokens=int(tokens),
        batches=int(grown("encserve_batch_sequences_count", **model)),
        batch_sequences=mean("encserve_batch_sequences", **model),
        batch_tokens=mean("encserve_batch_tokens", **model),
        padding_fraction=padding / (padding + tokens) if padding + tokens > 0 else None,
        tokenize_seconds=stages["tokenize"],
        queue_seconds=stages["queue"],
        compute_seconds=stages["compute"],
        encode_seconds=stages["encode"],
        refused={reason: count for reason, count in sorted(refused.items()) if count},
        cpu_seconds=after[_CPU] - before.get(_CPU, 0.0) if _CPU in after else None,
        resident_bytes=int(after[_RESIDENT]) if _RESIDENT in after else None,
    )
