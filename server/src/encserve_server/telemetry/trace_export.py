"""Sends ended spans to the OTLP receiver, and counts sent, failed and dropped spans."""

import logging
import math
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from encserve_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_MAX_QUEUE_SPANS = 2048  # the default of the SDK; a span takes about 1 KiB
# The minimum time between two warnings about dropped spans.
_WARNING_SECONDS = 60.0


class CountingExporter(OTLPSpanExporter):
    """Sends spans, and counts sent and failed spans. The SDK's thread calls `export`.

    Attributes:
        taken: The number of spans that have left the queue.
    """

    def __init__(self, endpoint: str, metrics: Metrics) -> None:
        """Set the receiver: http://HOST:PORT, or https:// for TLS."""
        super().__init__(endpoint, insecure=endpoint.startswith("http://"))
        self.taken = 0
        self._exported = metrics.trace_spans.labels("exported")
        self._failed = metrics.trace_spans.labels("failed")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Block for at most OTEL_EXPORTER_OTLP_TIMEOUT."""
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = super().export(spans)
        finally:
            counter = self._exported if result is SpanExportResult.SUCCESS else self._failed
            counter.inc(len(spans))
        return result


class BoundedProcessor(BatchSpanProcessor):
    """The SDK's queue of spans, and a count of dropped spans.

    The SDK itself counts dropped spans only in OpenTelemetry's own metrics. Spans may end in any thread.
    """

    def __init__(self, exporter: CountingExporter, metrics: Metrics) -> None:
        """Create a queue of at most OTEL_BSP_MAX_QUEUE_SIZE spans."""
        self._max_spans = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUE_SPANS))
        super().__init__(exporter, self._max_spans)
        self._exporter = exporter
        self._ending = threading.Lock()
        self._queued = 0
        self._warned_at = -math.inf
        self._dropped = metrics.trace_spans.labels("dropped")

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or drop it if the queue is full."""
        with self._ending:
            fits = self._queued - self._exporter.taken < self._max_spans
            self._queued += fits
        if fits:
            super().on_end(span)
            return
        self._dropped.inc()
        now = time.monotonic()
        if now - self._warned_at >= _WARNING_SECONDS:
            self._warned_at = now
            logger.warning(
                "spans are dropped because the receiver is too slow; encserve_trace_spans_total counts them",
                extra={"max_spans": self._max_spans},
            )
