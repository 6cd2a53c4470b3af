"""Tests of tracing: a call continues its caller's trace, and an OTLP receiver gets consistent spans."""

import asyncio
import itertools
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fake_clock import FakeClock
from fake_engine import FakeEngine
from fake_server import D_MODEL, SERVICE, FakeServer, StartServer, make_input, refusal
from http_calls import connect
from hypothesis import given
from hypothesis import strategies as st
from open_inference import infer_request, text_tensor
from otlp_receiver import ERROR, SERVER_KIND, OtlpReceiver, ReceivedSpan, otlp_receiver
from prometheus_client import CollectorRegistry
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import _open_tracer
from encserve_server.errors import StartupError
from encserve_server.protocols.open_inference.rpcs import SERVICE_NAME
from encserve_server.settings import Settings
from encserve_server.system.clock import MonotonicClock
from encserve_server.telemetry import logs, spans, tracing
from encserve_server.telemetry.metrics import Metrics
from encserve_server.types.sequences import Batch, ClosedBy

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "congo=t61rcWkgMzE"))
UNSAMPLED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),)
ENCODE = f"{SERVICE}/Encode"

Traced = tuple[FakeServer, OtlpReceiver]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Start an OTLP receiver, and let OpenTelemetry's SDK send spans to this receiver every 10 ms."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with otlp_receiver() as it:
        yield it


@pytest.fixture
async def traced(receiver: OtlpReceiver, start_server: StartServer) -> Traced:
    return await start_server(trace_endpoint=receiver.endpoint), receiver


async def received(receiver: OtlpReceiver, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
    return await asyncio.to_thread(receiver.wait_for, enough)


def named(received: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in received if span.name == name]


def has(*names: str) -> Callable[[list[ReceivedSpan]], bool]:
    """Return a condition that is true if there is a span for each name. A repeated name needs several spans."""
    return lambda got: all(len(named(got, name)) >= names.count(name) for name in names)


CALL = {"encserve.model": "tiny", "encserve.model_version": "2", "encserve.sequences": 1}
STAGES = ("tokenize", "queue", "compute", "encode")


async def test_a_call_continues_the_trace_of_its_caller(traced: Traced) -> None:
    server, receiver = traced
    began = time.time_ns()
    await server.encode("hello brave new world", metadata=SAMPLED)
    ended = time.time_ns()
    got = await received(receiver, has(ENCODE, "batch"))
    (span,) = named(got, ENCODE)
    assert (span.trace_id, span.parent_id, span.kind) == (TRACE_ID, PARENT_ID, SERVER_KIND)
    assert span.trace_state == "congo=t61rcWkgMzE"
    assert span.attributes == {
        **CALL,
        "rpc.system.name": "grpc",
        "rpc.method": ENCODE,
        "rpc.response.status_code": "OK",
        "encserve.tokens": 6,
    }
    assert span.status != ERROR
    assert span.schema_url == "https://opentelemetry.io/schemas/1.44.0"
    assert span.resource["service.name"] == "encserve"
    assert {"service.version", "service.instance.id"} <= set(span.resource)
    stages = [named(got, name)[0] for name in STAGES]
    assert {(stage.trace_id, stage.parent_id) for stage in stages} == {(TRACE_ID, span.span_id)}
    times = [span.start_ns, *(t for stage in stages for t in (stage.start_ns, stage.end_ns)), span.end_ns]
    assert times == sorted(times)
    # The times of spans come from a monotonic clock, which may differ from the wall clock by a few seconds.
    assert began - 5e9 < span.start_ns
    assert span.end_ns < ended + 5e9
    assert len(got) == 6


async def test_http_requests_are_traced(receiver: OtlpReceiver, start_server: StartServer) -> None:
    server = await start_server(trace_endpoint=receiver.endpoint, http_port=0)
    async with connect(server) as client:
        await client.post("/embed", json={"inputs": "hello"}, headers=dict(SAMPLED))
        await client.post("/v1/embeddings", json={"input": []}, headers=dict(SAMPLED))
    got = await received(receiver, has("POST /embed", "POST /v1/embeddings", "batch"))
    (span,) = named(got, "POST /embed")
    assert (span.trace_id, span.parent_id, span.kind) == (TRACE_ID, PARENT_ID, SERVER_KIND)
    assert span.attributes == {
        **CALL,
        "http.request.method": "POST",
        "http.route": "/embed",
        "http.response.status_code": 200,
        "encserve.tokens": 3,
    }
    assert {it.name for it in got if it.parent_id == span.span_id} == set(STAGES)
    (failed,) = named(got, "POST /v1/embeddings")
    assert failed.attributes["http.response.status_code"] == 400
    assert failed.attributes["encserve.reason"] == "INVALID_FIELD"


async def test_open_inference_calls_are_traced(traced: Traced) -> None:
    server, receiver = traced
    data = infer_request(text=text_tensor("hello", "world")).SerializeToString()
    await server.call("ModelInfer", data, SERVICE_NAME, metadata=SAMPLED)
    got = await received(receiver, has(f"{SERVICE_NAME}/ModelInfer", "batch"))
    (span,) = named(got, f"{SERVICE_NAME}/ModelInfer")
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert span.attributes.items() >= {"encserve.model": "tiny", "encserve.sequences": 2, "encserve.tokens": 6}.items()
    assert set(STAGES) <= {it.name for it in got if it.parent_id == span.span_id}


async def test_spans_of_requests_and_batches_link_to_each_other(traced: Traced) -> None:
    server, receiver = traced
    first = await server.start_held(server.encode([1], metadata=SAMPLED))
    others = [asyncio.create_task(server.encode([1, 2, 3], metadata=SAMPLED)) for _ in range(2)]
    unsampled = asyncio.create_task(server.encode([1, 2], metadata=UNSAMPLED))
    await until(lambda: server.queued("sequences") == 3)
    server.engine.let_go()
    await asyncio.gather(first, *others, unsampled)
    got = await received(receiver, has(*[ENCODE] * 3, "batch", "batch"))
    batches = {(it.trace_id, it.span_id): it for it in named(got, "batch")}
    requests = {it.span_id: it for it in named(got, ENCODE)}
    assert len(requests) == 3
    for compute in named(got, "compute"):
        (link,) = compute.links
        batch = batches[link]
        assert (TRACE_ID, compute.parent_id) in batch.links
        assert abs(batch.start_ns - compute.start_ns) < 50e6
        assert abs(batch.end_ns - compute.end_ns) < 50e6
    two = next(it for it in batches.values() if len(it.links) == 2)
    assert two.parent_id == ""
    assert two.trace_id != TRACE_ID
    seconds = [two.attributes.pop(f"encserve.batch.{part}_seconds") for part in ("collate", "compute", "split")]
    assert seconds[1] == 0.001
    assert two.attributes == {
        "encserve.model": "tiny",
        "encserve.model_version": "2",
        "encserve.batch.sequences": 3,
        "encserve.batch.tokens": 8,
        "encserve.batch.padded_tokens": 9,
        "encserve.batch.closed_by": "drained",
        "encserve.batch.lane": 0,
        "encserve.batch.alone": True,
        "encserve.batch.traced_requests": 2,
    }


async def test_a_batch_links_to_no_more_requests_than_the_sdk_allows(
    receiver: OtlpReceiver, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    server = await start_server(trace_endpoint=receiver.endpoint)
    async with server.queue_of(3):
        calls = [asyncio.create_task(server.encode([1, 2, 3], metadata=SAMPLED)) for _ in range(3)]
        await until(lambda: server.queued("sequences") == 4)
    await asyncio.gather(*calls)
    got = await received(receiver, has(*[ENCODE] * 3))
    counts = [(it.attributes["encserve.batch.traced_requests"], len(it.links)) for it in named(got, "batch")]
    assert (4, 2) in counts


async def test_a_request_of_several_batches_has_a_compute_span_for_each(
    receiver: OtlpReceiver, start_server: StartServer
) -> None:
    """A call with many batches has a limited number of compute spans. The last span links to all further batches."""
    server = await start_server(trace_endpoint=receiver.endpoint, max_batch_sequences=1)
    most = tracing.MAX_COMPUTE_SPANS
    await server.encode(*[[1]] * (most + 4), metadata=SAMPLED)
    got = await received(receiver, has(ENCODE, *["batch"] * (most + 4)))
    computed = sorted(named(got, "compute"), key=lambda span: span.start_ns)
    assert [len(span.links) for span in computed] == [1] * (most - 1) + [5]
    batches = {(it.trace_id, it.span_id) for it in named(got, "batch")}
    assert set(itertools.chain.from_iterable(span.links for span in computed)) == batches
    (queue,) = named(got, "queue")
    assert queue.end_ns <= computed[0].start_ns


async def test_the_trace_of_a_request_in_parts_is_bounded(receiver: OtlpReceiver, start_server: StartServer) -> None:
    server = await start_server(trace_endpoint=receiver.endpoint, http_port=0, max_queue_tokens=512)
    async with connect(server) as client:
        await client.post("/embed", json={"inputs": ["hello"] * 600}, headers=dict(SAMPLED))
    got = await received(receiver, has("POST /embed"))
    (span,) = named(got, "POST /embed")
    assert (span.attributes["encserve.sequences"], span.attributes["encserve.tokens"]) == (600, 1800)
    children = [it.name for it in got if it.parent_id == span.span_id]
    assert 1 < children.count("compute") <= tracing.MAX_COMPUTE_SPANS
    assert [children.count(name) for name in ("tokenize", "queue", "encode")] == [1, 1, 1]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_the_ratio_is_for_calls_without_a_trace(
    receiver: OtlpReceiver, start_server: StartServer, ratio: float
) -> None:
    server = await start_server(trace_endpoint=receiver.endpoint, trace_sample_ratio=ratio)
    for _ in range(5):
        await server.encode([1])
    await server.encode([1], metadata=SAMPLED)
    got = await received(receiver, lambda got: any(it.trace_id == TRACE_ID for it in named(got, ENCODE)))
    assert len({it.trace_id for it in named(got, ENCODE)}) == 1 + 5 * ratio


@pytest.mark.parametrize(
    ("request_", "code", "reason", "is_error"),
    [
        (pb.EncodeRequest(), "INVALID_ARGUMENT", "INVALID_FIELD", False),
        (pb.EncodeRequest(inputs=[make_input([7])]), "INTERNAL", "INFERENCE_FAILED", True),
        (pb.EncodeRequest(model="none", inputs=[make_input([1])]), "NOT_FOUND", "MODEL_NOT_FOUND", False),
    ],
)
async def test_a_failed_call_has_its_reason(
    receiver: OtlpReceiver, start_server: StartServer, request_: Any, code: str, reason: str, is_error: bool
) -> None:
    """For a mistake of the caller, the span has no error status, as OpenTelemetry's semantic conventions demand."""
    server = await start_server(FakeEngine(D_MODEL, poison=7), trace_endpoint=receiver.endpoint)
    await refusal(server.call("Encode", request_, metadata=SAMPLED))
    got = await received(receiver, has(ENCODE))
    (span,) = named(got, ENCODE)
    assert (span.attributes["rpc.response.status_code"], span.attributes["encserve.reason"]) == (code, reason)
    assert (span.status == ERROR, span.attributes.get("error.type")) == (is_error, code if is_error else None)


async def test_the_span_of_an_unread_call_names_the_model(receiver: OtlpReceiver, start_server: StartServer) -> None:
    server = await start_server(FakeEngine(D_MODEL), trace_endpoint=receiver.endpoint, max_queue_tokens=40)
    async with server.queue_of(31):
        for tokens, parent in ((10, UNSAMPLED), (1, SAMPLED)):  # the refusal of the first call closes the queue
            await refusal(server.encode([3] * tokens, metadata=parent))
    got = await received(receiver, lambda got: any(it.trace_id == TRACE_ID for it in named(got, ENCODE)))
    (span,) = [it for it in named(got, ENCODE) if it.trace_id == TRACE_ID]
    assert span.attributes["encserve.reason"] == "QUEUE_FULL"
    assert (span.attributes["encserve.model"], span.attributes["encserve.model_version"]) == ("tiny", "2")
    assert span.attributes["encserve.sequences"] == 1
    assert "encserve.tokens" not in span.attributes


async def test_a_call_that_expires_in_the_queue_has_a_queue_span_only(traced: Traced) -> None:
    server, receiver = traced
    first = await server.start_held(server.encode([1], metadata=UNSAMPLED))
    await refusal(server.encode([1, 2], metadata=SAMPLED, timeout=0.2))
    await until(lambda: server.queued("sequences") == 0)  # the caller may reach the deadline before the server
    server.engine.let_go()
    await first
    got = await received(receiver, has(ENCODE))
    assert sorted(span.name for span in got) == [ENCODE, "queue"]
    (span,) = named(got, ENCODE)
    # The caller may cancel before the server's own clock reaches the deadline.
    assert span.attributes["rpc.response.status_code"] in {"DEADLINE_EXCEEDED", "CANCELLED"}
    assert named(got, "queue")[0].end_ns - named(got, "queue")[0].start_ns > 100e6


async def stream_requests(server: FakeServer, *request_ids: str) -> None:
    """Send a request for each of `request_ids` over one stream, and read all replies.

    The first request has a bad input.
    """
    rpc: Any = server.channel.stream_stream(f"/{SERVICE}/EncodeStream")
    call = rpc(metadata=SAMPLED)
    for i, request_id in enumerate(request_ids):
        request = pb.EncodeRequest(inputs=[make_input([i or -1])])
        await call.write(pb.EncodeStreamRequest(request_id=request_id, request=request).SerializeToString())
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_each_request_of_a_stream_has_a_span_in_the_streams(traced: Traced) -> None:
    server, receiver = traced
    await stream_requests(server, "r0", "r1", "r2")
    got = await received(receiver, has(f"{SERVICE}/EncodeStream", *["batch"]))
    (stream,) = named(got, f"{SERVICE}/EncodeStream")
    assert (stream.trace_id, stream.parent_id) == (TRACE_ID, PARENT_ID)
    assert stream.attributes["encserve.requests"] == 3
    requests = {it.attributes["encserve.request_id"]: it for it in named(got, "request")}
    assert set(requests) == {"r0", "r1", "r2"}
    assert {it.parent_id for it in requests.values()} == {stream.span_id}
    assert [requests[f"r{i}"].attributes["rpc.response.status_code"] for i in range(3)] == [
        "INVALID_ARGUMENT", "OK", "OK",
    ]  # fmt: skip
    for request in requests.values():
        assert stream.start_ns <= request.start_ns <= request.end_ns <= stream.end_ns
    for name in ("queue", "compute", "encode"):
        assert {it.parent_id for it in named(got, name)} == {requests[f"r{i}"].span_id for i in (1, 2)}


async def test_a_huge_request_id_is_cut_in_the_span(traced: Traced) -> None:
    server, receiver = traced
    await stream_requests(server, "x" * 100_000)
    got = await received(receiver, has(f"{SERVICE}/EncodeStream", "request"))
    (request,) = named(got, "request")
    assert request.attributes["encserve.request_id"] == "x" * tracing.MAX_REQUEST_ID_CHARS


async def test_the_trace_of_a_long_stream_is_bounded(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_STREAM_REQUESTS", 2)
    server, receiver = traced
    await stream_requests(server, *"abcde")
    got = await received(receiver, has(f"{SERVICE}/EncodeStream"))
    assert len(named(got, "request")) == 2
    (stream,) = named(got, f"{SERVICE}/EncodeStream")
    assert stream.attributes["encserve.requests"] == 5
    assert not [it for it in got if it.parent_id == stream.span_id and it.name != "request"]


async def test_an_inspection_has_spans_of_its_stages(traced: Traced) -> None:
    server, receiver = traced
    await server.inspect(pb.InspectRequest(input=make_input("hello")), metadata=SAMPLED)
    got = await received(receiver, has(f"{SERVICE}/Inspect"))
    (parent,) = named(got, f"{SERVICE}/Inspect")
    parts = [named(got, name)[0] for name in ("tokenize", "queue", "compute", "send")]
    assert {part.parent_id for part in parts} == {parent.span_id}
    starts = [parent.start_ns, *(part.start_ns for part in parts)]
    assert starts == sorted(starts)
    assert max(part.end_ns for part in parts) <= parent.end_ns


@pytest.mark.parametrize("log_format", ["json", "text"])
async def test_log_lines_carry_the_trace(traced: Traced, log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Log lines about a request have the trace id of the request, even if the trace is not sampled.

    Other lines have no trace id.
    """
    server, _ = traced
    server.inspector.broken = True
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        written = logs.configure("info", log_format)
        logging.getLogger("encserve_server.test").info("before")
        for metadata in (SAMPLED, UNSAMPLED):
            await refusal(server.inspect(pb.InspectRequest(input=make_input("hello")), metadata=metadata))
        written.close()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert "trace_id" not in next(line for line in lines if "before" in line)
    errors = [line for line in lines if "unexpected error" in line]
    assert len(errors) == 2
    for line in errors:
        if log_format == "json":
            fields = json.loads(line)
            assert fields["trace_id"] == TRACE_ID
            assert len(fields["span_id"]) == 16
            assert len(fields["error_id"]) == 16
        else:
            assert f"trace_id={TRACE_ID} span_id=" in line


async def test_environment_variables_of_the_sdk_apply(
    receiver: OtlpReceiver, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "vectors")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    server = await start_server(trace_endpoint=receiver.endpoint)
    await server.encode([1], metadata=SAMPLED)
    got = await received(receiver, has(ENCODE))
    wanted = {"service.name": "vectors", "deployment.environment.name": "test", "service.version": "mine"}
    assert wanted.items() <= got[0].resource.items()
    assert receiver.headers[0]["x-api-key"] == "secret"


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the URL of an endpoint that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_silent_receiver_does_not_stop_the_server(
    start_server: StartServer, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the receiver never replies, calls still succeed and the server can stop.

    The server drops and counts the spans that it cannot send.
    """
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
    server = await start_server(trace_endpoint=silent)
    for _ in range(20):
        await server.encode([1], metadata=SAMPLED)
    assert server.sample("encserve_trace_spans_total", outcome="dropped") > 20
    assert server.sample("encserve_trace_spans_total", outcome="exported") == 0
    async with asyncio.timeout(60):
        assert await server.app.stop()
    made = 20 * 5
    counted = [server.sample("encserve_trace_spans_total", outcome=it) for it in ("dropped", "failed")]
    assert sum(counted) == made


@pytest.mark.parametrize("delay_ms", [10, 3_600_000])
async def test_all_spans_are_sent_and_counted_at_the_end(
    receiver: OtlpReceiver, start_server: StartServer, monkeypatch: pytest.MonkeyPatch, delay_ms: int
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", f"{delay_ms}")
    server = await start_server(trace_endpoint=receiver.endpoint)
    await server.encode([1], metadata=SAMPLED)
    if delay_ms > 10:
        assert receiver.spans == []
    await server.app.stop()
    assert sorted(it.name for it in receiver.spans) == sorted(["queue", "compute", "encode", ENCODE, "batch"])
    assert server.sample("encserve_trace_spans_total", outcome="exported") == 5


@pytest.mark.system
def test_without_tracing_opentelemetry_is_not_imported(tmp_path: Path) -> None:
    code = """
import asyncio, pathlib, sys
from fake_server import start_fake_server

async def main():
    server = await start_fake_server(pathlib.Path(sys.argv[1]))
    await server.encode("hello", metadata=(("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),))
    await server.channel.close()
    await server.app.stop()

asyncio.run(main())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    path = f"sys.path.append({str(Path(__file__).parent.parent / 'support')!r})"
    command = [sys.executable, "-c", f"import sys; {path}\n{code}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.system
def test_tracing_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; from encserve_server.__main__ import main; main()"
    flags = ["--model-repository", str(tmp_path), "--trace-endpoint", "http://127.0.0.1:4317", "--grpc-port", "0"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = [line for line in map(json.loads, done.stderr.splitlines()) if line["level"] == "ERROR"]
    assert '--trace-endpoint needs opentelemetry: pip install "encserve[tracing]"' in line["message"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_SPAN_LINK_COUNT_LIMIT"])
def test_a_wrong_variable_of_the_sdk_stops_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "many")
    settings = Settings(model_repository=Path(), trace_endpoint="http://127.0.0.1:4317")
    with pytest.raises(StartupError, match="many"):
        _open_tracer(settings, MonotonicClock(), Metrics(CollectorRegistry()))


METADATA_TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=600)


@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate", "other"]), METADATA_TEXT), max_size=4))
async def test_invalid_trace_headers_do_not_fail_a_request(metadata: list[tuple[str, str]]) -> None:
    tracer = tracing.OtlpTracer(None, None, 0.0, FakeClock())  # type: ignore[arg-type]
    assert tracer.begin(ENCODE, metadata, {}) is None
    ids = spans.current_ids()
    assert ids is not None
    assert len(ids.trace_id) == 32


async def test_spans_do_not_follow_jumps_of_the_wall_clock(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of spans are right, even if the wall clock goes back.

    Each reading of the wall clock is an hour earlier than the previous reading. The monotonic clock of this test starts
    at about one year.
    """
    wall = itertools.count(1_795_000_000_000_000_000, -3600 * 10**9)
    monkeypatch.setattr(tracing, "time", SimpleNamespace(time_ns=lambda: next(wall)))
    clock = FakeClock(3.1e7)
    tracer = tracing.open_otlp(receiver.endpoint, 1.0, clock, Metrics(CollectorRegistry()))
    stream = tracer.begin(f"{SERVICE}/EncodeStream", SAMPLED, {})
    assert stream is not None
    clock.advance(0.25)
    request = stream.request("r0")
    assert request is not None
    began_at = clock.now()
    clock.advance(1.5)
    request.stage("queue", began_at, clock.now())
    batch = Batch([], ClosedBy.QUEUE_EMPTY, alone=True, began_at=began_at, ended_at=clock.now())
    tracer.for_model("tiny", "1").ran([request], batch)
    request.end({"rpc.response.status_code": "OK"}, "", failed=False)
    clock.advance(0.25)
    stream.end({"rpc.response.status_code": "OK"}, "", failed=False)
    await tracer.close()
    times = {it.name: (it.start_ns, it.end_ns) for it in receiver.spans}
    start_ns, end_ns = times.pop(f"{SERVICE}/EncodeStream")
    assert (start_ns, end_ns - start_ns) == (1_795_000_000_000_000_000, 2_000_000_000)
    began_ns, ended_ns = times.pop("batch")
    assert ended_ns - began_ns == 1_500_000_000
    part = (start_ns + 250_000_000, start_ns + 1_750_000_000)
    assert times == {"request": part, "queue": part, "compute": part}
