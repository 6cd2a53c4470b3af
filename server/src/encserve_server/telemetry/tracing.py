"""OpenTelemetry spans of requests and of batches, sent by OTLP over gRPC; the one module that imports OpenTelemetry.

    caller's span
    └── encserve.v1.EncoderService/Encode     SERVER, one for each RPC
        ├── tokenize                          where there is text
        ├── queue                             until its first batch was taken
        ├── compute ─ ─ link ─ ─▶ batch       one for each batch that held sequences of it
        └── encode                            the reply
    batch                                     a trace of its own: it belongs to many requests
        └─ ─ links ─ ─▶ the requests

A request on a stream has a span "request" under the stream's, which then has those parts.

The caller decides whether a request is sampled; where it says nothing, chance does. While a sampled request is handled,
only what is told is noted down. Its spans are made in a later turn of the event loop, when its answer is on its way,
and a thread of the SDK sends them. What that thread cannot keep up with is dropped and counted.

Names and attributes are those of OpenTelemetry's semantic conventions 1.44.0, where RPCs are a release candidate, and
our own under `encserve.`.
"""

import logging
import os
import uuid
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from encserve_server import __version__
from encserve_server.errors import StartupError
from encserve_server.system.clock import Clock
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.trace_export import BoundedProcessor, CountingExporter
from encserve_server.telemetry.tracer import OtlpTracer

_MAX_QUEUE_SPANS = 2048  # as the SDK has it; a span takes about 1 KiB
# What these say about a caller's headers could be said as often as a caller likes, and each retry need not be told.
_NOISY_LOGGERS = (
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)


def open_otlp(endpoint: str, sample_ratio: float, clock: Clock, metrics: Metrics) -> "OtlpTracer":
    """Traces to an OTLP receiver, which need not be there: what cannot be sent is lost, and nothing else happens.

    Args:
        endpoint: http://HOST:PORT, or https:// for TLS.
        sample_ratio: How many of the requests whose callers say nothing about it are traced, from 0 to 1.
        clock: What the times are of that are told.
        metrics: Where spans are counted.

    Raises:
        StartupError: One of OpenTelemetry's own environment variables is wrong.
    """
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        otlp = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        exporter = CountingExporter(otlp, metrics)
        queue_spans = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUE_SPANS))
        processor = BoundedProcessor(exporter, queue_spans, metrics)
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        return OtlpTracer(processor, exporter, sampler, _resource(), clock)
    except Exception as error:  # a number that is none, a certificate that cannot be read, …
        raise StartupError(f"tracing: OpenTelemetry does not take its settings (OTEL_…): {error}") from error


class _KnownResource(Resource):
    """A resource that knows its hash: the SDK's writes itself as JSON for it, and the exporter asks at each span."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(dict(resource.attributes), resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def _resource() -> Resource:
    """Who sends the spans: what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, and ours where they say nothing."""
    said = Resource.create()
    name = said.attributes["service.name"]
    ours: dict[str, Callable[[], str]] = {
        "service.name": lambda: "encserve",
        "service.version": lambda: __version__,
        "service.instance.id": lambda: str(uuid.uuid4()),
    }
    known = dict(said.attributes)
    if str(name).startswith("unknown_service"):
        del known["service.name"]
    return _KnownResource(said.merge(Resource({key: make() for key, make in ours.items() if key not in known})))
