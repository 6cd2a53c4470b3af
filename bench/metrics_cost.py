"""What metrics cost: their calls for a request and for a batch, a tick of the event loop's watch, and the page.

    python bench/metrics_cost.py

Nothing is served: the calls are those that the server makes, in the same order, on the same objects. The page is that
of three models with every label set, and with numbers in all of them; it is rendered as the server's own page is. Times
are those of the CPU, so that a busy machine does not count; for the page, whose bound is in real time, that too.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import click
import grpc
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from encserve_server.metrics import Metrics, ModelMetrics
from encserve_server.service import METHODS, SERVICE_NAME
from encserve_server.status import REASONS, code_label
from encserve_server.types import BatchSeconds, ClosedBy

_MODELS = 3
_SEQUENCES = (1, 16, 64)  # of a batch
_CALLS = 2000
_PAGES = 200


def a_page() -> tuple[CollectorRegistry, Metrics, list[ModelMetrics]]:
    """A server's registry with three models."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics = Metrics(registry)
    metrics.zero(
        [(kind, SERVICE_NAME, name) for name, kind in METHODS.items()], map(code_label, grpc.StatusCode), REASONS
    )
    models = []
    for i in range(_MODELS):
        model = metrics.for_model(f"all-MiniLM-L6-v2-{i}", "1")
        model.describe(
            fingerprint=f"{i:032x}", precision="float32", provider="CPUExecutionProvider", device="cpu",
            requested_device="auto", runtime="onnxruntime 1.31.1",
        )  # fmt: skip
        models.append(model)
    return registry, metrics, models


def request_calls(metrics: Metrics, model: ModelMetrics) -> Callable[[], None]:
    """What one Encode request of one text adds: `RpcGuard`, tokenizing, the queue, the reply."""
    method = ("unary", SERVICE_NAME, "Encode")
    started = metrics.started.labels(*method)
    handled = metrics.handled.labels(*method, "OK")
    handling_seconds = metrics.handling_seconds.labels(*method)

    def calls() -> None:
        started.inc()
        metrics.in_flight.set(1)
        model.tokenize_seconds.observe(0.0004)
        model.queue_changed(1, 1, 20)
        model.encode_seconds.observe(0.0002)
        model.response_bytes.observe(30_000)
        metrics.in_flight.set(0)
        handled.inc()
        handling_seconds.observe(0.02)

    return calls


def batch_calls(model: ModelMetrics, sequences: int) -> Callable[[], None]:
    """What one batch adds, of so many sequences of 20 tokens."""
    seconds = BatchSeconds(0.0001, 0.02, 0.0001)

    def calls() -> None:
        model.queue_changed(0, 0, 0)
        for _ in range(sequences):
            model.waited(0.015)
        model.batch_ran(
            sequences=sequences,
            tokens=20 * sequences,
            padded_tokens=22 * sequences,
            seconds=seconds,
            closed_by=ClosedBy.DRAINED,
        )
        model.was_busy(0.02)

    return calls


def microseconds(calls: Callable[[], object], clock: Callable[[], float], repeats: int) -> tuple[float, float]:
    """The median and the 99th percentile of one."""
    times = []
    for _ in range(repeats):
        began = clock()
        calls()
        times.append((clock() - began) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


@click.command()
def main() -> None:
    """Prints a table."""
    registry, metrics, models = a_page()
    measured = [("a request", request_calls(metrics, models[0]))]
    measured += [(f"a batch of {count}", batch_calls(models[0], count)) for count in _SEQUENCES]
    measured += [("a tick of the event loop's watch", lambda: metrics.event_loop_lag_seconds.observe(0.0003))]
    click.echo(f"{'':34} {'median':>9} {'p99':>9}")
    for name, calls in measured:
        median, p99 = microseconds(calls, time.thread_time, _CALLS)
        click.echo(f"{name:34} {median:6.1f} µs {p99:6.1f} µs")
    for model, closed_by in itertools.product(models, ClosedBy):  # numbers of many digits take longer
        for i in range(200):
            model.batch_ran(
                sequences=1 + i, tokens=20 * i, padded_tokens=22 * i,
                seconds=BatchSeconds(i / 7e5, i / 7e3, i / 7e4), closed_by=closed_by,
            )  # fmt: skip
            model.waited(i / 900)
    size = generate_latest(registry)
    for unit, clock in (("CPU", time.thread_time), ("real", time.perf_counter)):
        median, p99 = microseconds(lambda: generate_latest(registry), clock, _PAGES)
        click.echo(f"{f'the page, {_MODELS} models, {unit} time':34} {median / 1e3:6.1f} ms {p99 / 1e3:6.1f} ms")
    click.echo(f"{len(size.splitlines())} lines, {len(size)} bytes")


if __name__ == "__main__":
    main()
