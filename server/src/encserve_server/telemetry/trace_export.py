"""The way of ended spans to their receiver, with every one of them counted."""

import logging
import math
import time
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from encserve_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# How often it is said that spans are dropped.
_COMPLAINT_SECONDS = 60.0


class CountingExporter(SpanExporter):
    """Counts what is sent and what could not be; used by the SDK's thread.

    Attributes:
        taken: Spans that have left the queue.
    """

    def __init__(self, inner: SpanExporter, metrics: Metrics) -> None:
        """Takes what sends them."""
        self.taken = 0
        self._inner = inner
        self._ended = False
        self._exported = metrics.trace_spans.labels("exported")
        self._failed = metrics.trace_spans.labels("failed")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans; blocks, for as long as OTEL_EXPORTER_OTLP_TIMEOUT at most."""
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            counter = self._exported if result is SpanExportResult.SUCCESS else self._failed
            counter.inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Ends what is being sent. May be called again."""
        if not self._ended:
            self._ended = True
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._inner.force_flush(timeout_millis)


class BoundedProcessor(BatchSpanProcessor):
    """The SDK's queue, with what does not fit into it counted; spans end on the event loop alone."""

    def __init__(self, exporter: CountingExporter, max_spans: int, metrics: Metrics) -> None:
        """Takes where they are sent, and how many may wait for it."""
        super().__init__(exporter, max_queue_size=max_spans)
        self._exporter = exporter
        self._max_spans = max_spans
        self._made = 0
        self._complained_at = -math.inf
        self._dropped = metrics.trace_spans.labels("dropped")

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span, or drops it."""
        if self._made - self._exporter.taken >= self._max_spans:
            self._dropped.inc()
            self._complain()
            return
        self._made += 1
        super().on_end(span)

    def shutdown(self) -> None:
        """Sends what is queued and ends the SDK's thread; blocks."""
        super().shutdown()  # type: ignore[no-untyped-call]

    def _complain(self) -> None:
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            logger.warning(
                "spans are dropped: their receiver does not keep up; encserve_trace_spans_total counts them",
                extra={"max_spans": self._max_spans},
            )
