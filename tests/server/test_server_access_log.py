"""Tests of the access log, of log lines about refused calls, of logged settings, and of secret keys."""

import asyncio
import io
import json
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from callers_file import entry
from fake_server import SERVICE, Failed, FakeServer, StartServer, make_input, refusal
from http_calls import connect
from otlp_receiver import otlp_receiver
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.callers.keys import digest_of
from encserve_server.telemetry import call_log, lines
from encserve_server.telemetry.call_log import CallRecord, RefusalLog, line_of
from encserve_server.telemetry.lines import LineWriter

KEY, WRONG = "encserve-the-right-key", "encserve-the-wrong-key"
BEARER: Any = (("authorization", f"Bearer {KEY}"),)
RECORD = CallRecord(0.5, "search", "127.0.0.1:1", "Encode", "tiny@2", 2, 6, "OK", "", 1 / 3, 0.25, 0.125, "")


@pytest.fixture
def callers(tmp_path: Path) -> Path:
    file = tmp_path / "callers.toml"
    file.write_text(entry("search", KEY))
    return file


async def lines_of(server: FakeServer, capsys: pytest.CaptureFixture[str], count: int) -> list[dict[str, Any]]:
    """Wait until the access log has at least `count` lines, and return all its lines as parsed JSON."""
    written = ""

    def read() -> bool:
        nonlocal written
        written += capsys.readouterr().out
        return written.count("\n") >= count

    await until(read)
    return [json.loads(line) for line in written.splitlines()]


async def test_each_call_is_one_line(
    start_server: StartServer, callers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await start_server(callers=callers, http_port=0, access_log=True)
    await server.encode("hello", "brave new world", metadata=BEARER)
    await refusal(server.encode("hello"))
    request = pb.EncodeRequest(model="none", inputs=[make_input("hello")])
    await refusal(server.call("Encode", request, metadata=BEARER))
    await server.inspect(pb.InspectRequest(input=make_input("hello")), metadata=BEARER)
    async with connect(server) as client:
        body = {"input": ["hello"], "model": "tiny"}
        await client.post("/v1/embeddings", json=body, headers={"api-key": KEY})
        await client.post("/v1/embeddings", json=body)
        await client.get("/health")
    encoded, refused, missing, inspected, over_http, refused_http = await lines_of(server, capsys, 6)
    assert list(encoded) == [
        "time", "caller", "peer", "method", "model", "inputs", "tokens", "status", "reason", "seconds",
        "queue_seconds", "compute_seconds", "trace_id",
    ]  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", encoded["time"])
    assert re.fullmatch(r"127\.0\.0\.1:\d+", encoded["peer"])
    assert (encoded["caller"], encoded["method"], encoded["model"]) == ("search", f"{SERVICE}/Encode", "tiny@2")
    assert (encoded["inputs"], encoded["tokens"], encoded["status"], encoded["reason"]) == (2, 8, "OK", "")
    assert encoded["seconds"] >= encoded["queue_seconds"] > 0
    assert encoded["compute_seconds"] == 0.001  # the fake engine always reports this time
    assert (refused["caller"], refused["status"], refused["reason"]) == ("", "UNAUTHENTICATED", "UNAUTHENTICATED")
    assert (missing["caller"], missing["model"], missing["status"]) == ("search", "", "NOT_FOUND")
    assert (inspected["method"], inspected["inputs"], inspected["tokens"]) == (f"{SERVICE}/Inspect", 1, 3)
    assert (over_http["caller"], over_http["method"], over_http["status"]) == ("search", "POST /v1/embeddings", 200)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", over_http["peer"])
    assert (refused_http["status"], refused_http["reason"], refused_http["tokens"]) == (401, "UNAUTHENTICATED", 0)


async def test_each_request_of_a_stream_is_a_line(
    start_server: StartServer, callers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await start_server(callers=callers, access_log=True)
    rpc: Any = server.channel.stream_stream(f"/{SERVICE}/EncodeStream")
    stream = rpc(metadata=BEARER)
    for i, text in enumerate(["hello", ""]):
        request = pb.EncodeRequest(inputs=[make_input(text)] * (1 - i))
        await stream.write(pb.EncodeStreamRequest(request_id=f"{i}", request=request).SerializeToString())
        await stream.read()
    await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    lines = await lines_of(server, capsys, 3)
    found = [(it["caller"], it["method"].removeprefix(SERVICE), it["tokens"], it["reason"]) for it in lines]
    assert found == [
        ("search", "/EncodeStream request", 3, ""),
        ("search", "/EncodeStream request", 0, "INVALID_FIELD"),
        ("search", "/EncodeStream", 0, ""),
    ]


def test_a_log_line_is_valid_json_for_every_model_name() -> None:
    line = line_of(RECORD._replace(model='a"\n\u2028@1', ended_at=0.002))
    assert "\n" not in line
    assert json.loads(line)["model"] == 'a"\n\u2028@1'
    assert json.loads(line)["time"] == "1970-01-01T00:00:00.002Z"
    assert json.loads(line)["seconds"] == 0.333333


class Unread(io.StringIO):
    """A file like a pipe without a reader: each write waits for the event `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def write(self, text: str) -> int:
        self.release.wait()
        return super().write(text)


def test_lines_without_a_reader_are_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    file = Unread()
    log = LineWriter("access", file, str, max_waiting=3)
    lost: list[int] = []
    log.on_lost = lost.append
    for i in range(100):
        log.put(f"{i}")
    assert sum(lost) >= 90  # the writing thread may have taken a few lines
    file.release.set()
    log.close()
    assert file.getvalue().count("\n") == 100 - sum(lost)
    assert {it.getMessage() for it in caplog.records} == {"lines of the access log were lost: the reader is too slow"}
    assert sum(vars(it)["count"] for it in caplog.records) == sum(lost)


def test_a_file_that_cannot_be_written_is_reported_at_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the access log's file cannot be written, the main log reports the number of lost lines.

    The first report comes at once, later reports at most once a minute, and the last report at the end.
    """
    monkeypatch.setattr(lines, "_FLUSH_SECONDS", 0.001)
    file = io.StringIO()
    file.close()
    log = LineWriter("access", file, line_of, max_waiting=100)
    lost: list[int] = []
    log.on_lost = lost.append
    for i in range(10):
        log.put(RECORD)
        while sum(lost) <= i:
            time.sleep(0.001)
    log.close()
    assert [vars(it)["count"] for it in caplog.records] == [1, 9]
    assert all(
        "lines of the access log were lost: I/O operation on closed file" in it.getMessage() for it in caplog.records
    )


# Refused calls


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, int]]:
    found = [vars(it) for it in caplog.records if it.getMessage() == "calls were refused, or failed"]
    return [(it["caller"], it["reason"], it["count"]) for it in found]


async def test_each_caller_and_reason_gets_one_line_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_log, "_LINE_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    log = RefusalLog()
    for _ in range(100):
        log.add("search", "QUEUE_FULL", "Encode", "the queue is full", is_callers_mistake=False)
    log.add("search", "RATE_LIMITED", "Encode", "over", is_callers_mistake=True)
    log.add("jobs", "QUEUE_FULL", "Encode", "the queue is full", is_callers_mistake=False)
    first = [("search", "QUEUE_FULL", 1), ("search", "RATE_LIMITED", 1), ("jobs", "QUEUE_FULL", 1)]
    assert refusals(caplog) == first
    await until(lambda: len(refusals(caplog)) > 3)
    log.add("search", "QUEUE_FULL", "Encode", "the queue is full", is_callers_mistake=False)
    assert refusals(caplog) == [*first, ("search", "QUEUE_FULL", 99)]
    log.close()
    assert refusals(caplog)[4:] == [("search", "QUEUE_FULL", 1)]
    assert vars(caplog.records[0])["error"] == "the queue is full"


async def test_only_failed_calls_are_logged(
    start_server: StartServer, callers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = await start_server(callers=callers)
    await server.encode("hello", metadata=BEARER)
    for _ in range(3):
        await refusal(server.encode(metadata=BEARER))
    assert refusals(caplog) == [("search", "INVALID_FIELD", 1)]
    assert caplog.records[-1].levelname == "INFO"
    await server.app.stop()
    assert refusals(caplog) == [("search", "INVALID_FIELD", 1), ("search", "INVALID_FIELD", 2)]


# Logged settings and secret keys


async def test_the_settings_are_logged_at_the_start(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await start_server(api_key=KEY, max_queue_tokens=1234)
    (line,) = [it for it in caplog.records if it.getMessage() == "settings in force"]
    settings = vars(line)["settings"]
    assert (settings["max_queue_tokens"], settings["grace_seconds"], settings["api_key"]) == (1234, 25.0, "(secret)")
    json.dumps(settings)


async def test_no_key_is_in_a_log_a_metric_a_trace_or_an_error(
    start_server: StartServer, callers: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test sends right and wrong keys in each header, over each protocol. Some calls succeed, and some fail."""
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    with otlp_receiver() as receiver:
        server = await start_server(
            callers=callers, http_port=0, access_log=True, trace_endpoint=receiver.endpoint, log_level="debug"
        )
        headers = [(name, value + key) for name, value in HEADERS for key in (KEY, WRONG)]
        for header in headers:
            for method, data in (("Encode", b"\xff"), ("Encode", ENCODE), ("GetModel", b""), ("Tokenize", b"")):
                try:
                    await server.call(method, data, metadata=(header,))
                except Failed as error:
                    seen.append(f"{error.text} {error.details}")
            async with connect(server) as client:
                for path in ("/v1/embeddings", "/embed", "/nowhere", "/v2/models/tiny/infer"):
                    answer = await client.post(path, json={"input": "hello", "model": "tiny"}, headers=[header])
                    seen += [answer.text, repr(answer.headers)]
        server.app.catalog.resolve = _fail  # type: ignore[method-assign, assignment]
        assert (await refusal(server.call("Encode", ENCODE, metadata=BEARER))).reason == "INTERNAL"
        count = len(headers) * 7 + 1
        await server.app.stop()  # a stop sends all spans and writes all log lines
        spans = await asyncio.to_thread(receiver.wait_for, lambda spans: len(spans) >= count)
        seen += [f"{it.name} {it.attributes} {it.resource}" for it in spans]
        seen += [json.dumps(it) for it in await lines_of(server, capsys, count)]
    formatter = logging.Formatter()
    seen += [formatter.format(it) + repr(vars(it)) for it in caplog.records]
    seen += [f"{sample}" for family in server.app.registry.collect() for sample in family.samples]
    assert "unexpected error" in caplog.text
    secrets = [key.removeprefix("encserve-") for key in (KEY, WRONG)]
    secrets += [digest_of(key).hex() for key in (KEY, WRONG)]
    for secret in secrets:
        assert not [text for text in seen if secret in text]


HEADERS = [("authorization", "Bearer "), ("api-key", ""), ("x-api-key", "")]
ENCODE = pb.EncodeRequest(inputs=[make_input("hello")]).SerializeToString()


def _fail(*_: object) -> None:
    raise RuntimeError("unexpected")
