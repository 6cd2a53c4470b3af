"""A trace goes from a real client through a real server to a receiver of OpenTelemetry spans."""

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from otlp_receiver import OtlpReceiver, otlp_receiver
from real_server import real_server
from tiny_bundle import write_bundle

from encserve_client import EncoderClient

CALLER = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, TraceFlags(1))
ENCODE = "encserve.v1.EncoderService/Encode"


def test_a_trace_spans_client_and_server_and_survives_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client calls the server within a trace. After SIGTERM, the server sends all spans of the call and ends."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    write_bundle(tmp_path)
    with otlp_receiver() as receiver, real_server(tmp_path, "--trace-endpoint", receiver.endpoint) as server:
        with EncoderClient(server.target) as client, use_span(NonRecordingSpan(CALLER)):
            client.token_vectors([[1, 2, 3], [4, 5]])
        assert receiver.spans == []
        server.terminate()
        assert server.wait() == 0
        check(receiver)


def check(receiver: OtlpReceiver) -> None:
    by_name = {span.name: span for span in receiver.spans}
    request, batch = by_name[ENCODE], by_name["batch"]
    assert request.trace_id == trace.format_trace_id(CALLER.trace_id)
    assert request.parent_id == trace.format_span_id(CALLER.span_id)
    assert (request.attributes["encserve.sequences"], request.attributes["encserve.tokens"]) == (2, 5)
    assert by_name["compute"].links == [(batch.trace_id, batch.span_id)]
    assert (request.trace_id, request.span_id) in batch.links
    assert request.start_ns <= by_name["queue"].start_ns <= by_name["compute"].start_ns
    assert by_name["compute"].end_ns <= by_name["encode"].end_ns <= request.end_ns


def test_the_server_works_without_a_trace_receiver(tmp_path: Path) -> None:
    """Start a server whose trace endpoint is a port without a listener. The server answers calls.

    The server logs that spans could not be sent, and ends after SIGTERM.
    """
    write_bundle(tmp_path)
    with real_server(tmp_path, "--trace-endpoint", "http://127.0.0.1:9", "--grace-seconds", "1") as server:
        with EncoderClient(server.target) as client:
            for _ in range(20):
                assert client.token_vectors([[1, 2, 3]])[0].shape == (3, 8)
        server.terminate()
        assert server.wait() == 0
    assert [line for line in server.log if line["message"] == "some spans could not be sent"]
