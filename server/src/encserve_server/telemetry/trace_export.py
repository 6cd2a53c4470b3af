"""The way of ended spans to their receiver, with every one of them counted."""

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

_MAX_QUEUE_SPANS = 2048  # as the SDK has it; a span takes about 1 KiB
# How often it is said that spans are dropped.
_COMPLAINT_SECONDS = 60.0


class CountingExporter(OTLPSpanExporter):
    """Counts what is sent and what could not be; used by the SDK's thread.

    Attributes:
        taken: Spans that have left the queue.
    """

    def __init__(self, endpoint: str, metrics: Metrics) -> None:
        """Takes where to send them: http://HOST:PORT, or https:// for TLS."""
        super().__init__(endpoint, insecure=endpoint.startswith("http://"))
        self.taken = 0
        self._exported = metrics.trace_spans.labels("exported")
        self._failed = metrics.trace_spans.labels("failed")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans; blocks, for as long as OTEL_EXPORTER_OTLP_TIMEOUT at most."""
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = super().export(spans)
        finally:
            counter = self._exported if result is SpanExportResult.SUCCESS else self._failed
            counter.inc(len(spans))
        return result


class BoundedProcessor(BatchSpanProcessor):
    """The SDK's queue, with what does not fit into it counted: the SDK tells that to OpenTelemetry's own metrics alone.

    Spans may end in any thread.
    """

    def __init__(self, exporter: CountingExporter, metrics: Metrics) -> None:
        """At most OTEL_BSP_MAX_QUEUE_SIZE spans wait for the exporter."""
        self._max_spans = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUE_SPANS))
        super().__init__(exporter, self._max_spans)
        self._exporter = exporter
        self._ending = threading.Lock()
        self._queued = 0
        self._complained_at = -math.inf
        self._dropped = metrics.trace_spans.labels("dropped")

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span, or drops it."""
        with self._ending:
            fits = self._queued - self._exporter.taken < self._max_spans
            self._queued += fits
        if fits:
            super().on_end(span)
            return
        self._dropped.inc()
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            logger.warning(
                "spans are dropped: their receiver does not keep up; encserve_trace_spans_total counts them",
                extra={"max_spans": self._max_spans},
            )
