"""Runs a receiver for OTLP, the protocol of OpenTelemetry.

The receiver stores every span together with the attributes of the sender.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

SERVER_KIND = trace_pb2.Span.SPAN_KIND_SERVER
ERROR = trace_pb2.Status.STATUS_CODE_ERROR


class ReceivedSpan:
    """A received span.

    Attributes:
        name: The name.
        kind: The kind, as a number of the protobuf enum.
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        parent_id: 16 hexadecimal digits. Empty if the span has no parent.
        start_ns: The start, in nanoseconds since 1970.
        end_ns: The end, in nanoseconds since 1970.
        attributes: The attributes, by name.
        links: (trace id, span id) of each link.
        status: The status code, as a number of the protobuf enum.
        resource: The attributes of the sender, by name.
        schema_url: The URL of the schema that defines the attribute names.
    """

    def __init__(self, span: Any, resource: dict[str, Any], schema_url: str) -> None:
        self.name: str = span.name
        self.kind = span.kind
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.trace_state: str = span.trace_state
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.attributes = _values(span.attributes)
        self.links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.status = span.status.code
        self.resource = resource
        self.schema_url = schema_url

    def __repr__(self) -> str:
        return f"<{self.name} {self.span_id} in {self.parent_id or self.trace_id}>"


class OtlpReceiver:
    """A running OTLP receiver on a free loopback port.

    Attributes:
        endpoint: The URL of the receiver.
        headers: The gRPC metadata of every call so far.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(_Servicer(self), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans received so far."""
        with self._changed:
            return list(self._spans)

    def wait_for(self, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Wait until `enough` returns True for the received spans, and return the spans. After a minute, fail."""
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self._spans), timeout=60), self._spans
            return list(self._spans)

    def receive(self, request: Any, headers: dict[str, str]) -> None:
        """Store the spans of a request."""
        received = [
            ReceivedSpan(span, _values(of_resource.resource.attributes), of_scope.schema_url)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._changed:
            self._spans += received
            self.headers.append(headers)
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop without waiting for open calls."""
        self._server.stop(None).wait()


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """Receive spans."""
        self._receiver.receive(request, {it.key: it.value for it in context.invocation_metadata()})
        return trace_service_pb2.ExportTraceServiceResponse()


def _values(attributes: Any) -> dict[str, Any]:
    return {it.key: getattr(it.value, it.value.WhichOneof("value")) for it in attributes}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Run a receiver, and stop it after the block."""
    receiver = OtlpReceiver()
    try:
        yield receiver
    finally:
        receiver.stop()
