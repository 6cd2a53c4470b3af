"""Makes the page of the metrics that the server registers."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector

from encserve_server.telemetry.metrics import SECONDS_BUCKETS, Metrics

HEAD = f"""\
# Metrics

Every metric of `encserve-server`, written from the code by `make docs`. The server publishes the metrics on
`http://HOST:METRICS_PORT/metrics`, in the formats of Prometheus and OpenMetrics. Every label set exists with the value
0 before the first request. `model` and `version` name served models. With `--trust-fairness-id`, a header of the
calls sets the value of `caller`. The header can add at most 128 values. All other label values come from the server.

Histograms of requests and stages have buckets that end at {", ".join(f"{it:g}" for it in SECONDS_BUCKETS)} s.
Dashboards and objectives: [Monitor](../how-to/monitor.md). Alerts: [Alerts](alerts.md).

"""
TABLE = """
## {}

| metric | type | unit | labels | meaning |
|---|---|---|---|---|
"""
# The values are the headings of the page. The key of a heading is the first metric below the heading. The page lists
# the metrics in the order of their registration.
TOPICS = {
    "grpc_server_started": "RPCs",
    "encserve_queue_requests": "The queue",
    "encserve_batches": "Batches",
    "encserve_inspections": "Inspections",
    "encserve_ready": "Models and versions",
    "encserve_event_loop_lag_seconds": "The process",
}
UNITS = {"seconds", "bytes", "tokens", "sequences", "requests"}  # a metric's name ends with its unit


def page() -> str:
    """Return the page.

    Raises:
        ValueError: A metric in TOPICS does not exist.
    """
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    labels = {it._name: it._labelnames for it in vars(metrics).values() if hasattr(it, "_labelnames")}
    for collector in (ProcessCollector, PlatformCollector, GCCollector):  # the collectors that `App` registers
        collector(registry=registry)
    families = list(registry.collect())
    if unknown := TOPICS.keys() - {it.name for it in families}:
        raise ValueError(f"TOPICS names metrics that do not exist: {', '.join(sorted(unknown))}")
    text = HEAD
    for family in families:
        if family.name in TOPICS:
            text += TABLE.format(TOPICS[family.name])
        text += _row(family, labels.get(family.name, dict.fromkeys(key for it in family.samples for key in it.labels)))
    return text


def _row(family: Metric, labels: Iterable[str]) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    unit = family.name.rpartition("_")[2]
    cells = (
        f"`{name}`",
        family.type,
        unit if unit in UNITS else "–",
        ", ".join(f"`{it}`" for it in labels) or "–",
        family.documentation,
    )
    return f"| {' | '.join(cells)} |\n"
