"""Tests that the client sends the caller's OpenTelemetry trace context with every call."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_encoder import Caller, FakeEncoder
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from encserve_client._grpc.metadata import with_trace

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"


@pytest.fixture
def span() -> Iterator[None]:
    """Set a span with a known trace id as the current span during the test."""
    context = SpanContext(TRACE_ID, SPAN_ID, False, TraceFlags(1), TraceState([("congo", "t61")]))
    token = attach(trace.set_span_in_context(NonRecordingSpan(context)))
    yield
    detach(token)


@pytest.mark.usefixtures("span")
async def test_every_call_carries_the_current_span(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect(metadata={"x-tenant": "a"})
    await caller(client.token_vectors, [[1, 2]])
    await caller.all_of(client, [[1, 2]])
    assert len(service.metadata) == 2
    for sent in service.metadata:
        assert (sent["traceparent"], sent["tracestate"], sent["x-tenant"]) == (TRACEPARENT, "congo=t61", "a")


async def test_without_a_span_no_metadata_is_added(caller: Caller, service: FakeEncoder) -> None:
    await caller(caller.connect().token_vectors, [[1, 2]])
    assert "traceparent" not in service.metadata[0]


@pytest.mark.usefixtures("span")
def test_the_callers_own_trace_metadata_stays() -> None:
    assert dict(with_trace((("traceparent", "mine"),))) == {"traceparent": "mine", "tracestate": "congo=t61"}


@pytest.mark.usefixtures("span")
def test_baggage_is_sent_too() -> None:
    token = attach(baggage.set_baggage("tenant", "a b"))
    try:
        assert dict(with_trace(()))["baggage"] == "tenant=a+b"
    finally:
        detach(token)


@pytest.mark.system
def test_the_client_does_not_import_opentelemetry() -> None:
    code = """
import sys
from encserve_client import EncoderClient
from encserve_client._grpc.metadata import with_trace
assert with_trace((("a", "b"),)) == (("a", "b"),)
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
