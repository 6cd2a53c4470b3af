"""Watches a server under attack: the latency of health checks, the replies to an ordinary caller, and the memory.

This file is also a program that sends the health checks and the ordinary caller's requests. The program runs in a
separate process, so that the attack does not delay the checks.
"""

import contextlib
import http.client
import json
import logging
import os
import signal
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2
from real_server import RealServer

from encserve_proto.v1 import encoder_pb2

logger = logging.getLogger("hostile")

MIB = 2**20
CHECK_SECONDS, ORDINARY_SECONDS, MEMORY_SECONDS = 0.01, 0.1, 0.2
# A path is a kind of call, such as "http, new connection". On each path except "check" and "encode", at most 20 calls
# start each second.
PATH_SECONDS = 0.05
ANSWER_SECONDS = 10.0
SLACK_BYTES = 100 * MIB
# If the server exceeds the test's memory limit by this much, the watch kills the server to protect the machine.
_KILLED_BEYOND_BYTES = 1024 * MIB
# The key of the ordinary caller. Servers without keys ignore the key.
KEY = "encserve-ordinary"
_CHECK, _ENCODE = "/grpc.health.v1.Health/Check", "/encserve.v1.EncoderService/Encode"
_INSPECT = "/encserve.v1.EncoderService/Inspect"
_ENCODE_STREAM = "/encserve.v1.EncoderService/EncodeStream"
_HTTP_REQUEST = b'{"inputs": ["a"], "pooling": "mean"}'
_OK = 200
_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()


def parse_seconds() -> float:
    """Return the time to parse a costly protobuf message of 4 MiB, in seconds, as the median of five runs."""
    data = b"\x1a\x00" * (2 * MIB)  # about 2 million empty inputs, each of two bytes
    return statistics.median(_parse_once(data) for _ in range(5))


def _parse_once(data: bytes) -> float:
    began = time.perf_counter()
    encoder_pb2.EncodeRequest.FromString(data)
    return time.perf_counter() - began


class Sample(NamedTuple):
    """One call: the start in seconds of the monotonic clock, the duration in seconds, and the reply."""

    began: float
    seconds: float
    answer: str


class Health(NamedTuple):
    """Latencies and replies of one phase.

    Attributes:
        p50_ms: The median latency of health checks.
        p99_ms: The 99th percentile of the latency of health checks.
        max_ms: The maximum latency of health checks.
        answers: The number of health replies other than SERVING, by path and reply.
        ordinary: The number of each reply to the ordinary caller. The key is OK, or the path and the other reply.
        ordinary_max_ms: The duration of the ordinary caller's longest call.
        ordinary_p99_ms: The 99th percentile of the ordinary caller's latency on all paths together.
        path_p99_ms: The 99th percentile of the latency by path, for health checks and the ordinary caller.
    """

    p50_ms: float
    p99_ms: float
    max_ms: float
    answers: dict[str, int]
    ordinary: dict[str, int]
    ordinary_max_ms: float
    ordinary_p99_ms: float
    path_p99_ms: dict[str, float]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[Sample]]) -> "Health":
        """Compute the percentiles and counts of calls by path."""
        latencies = {path: sorted(_as_sent_in_time(calls, _pause_seconds(path))) for path, calls in samples.items()}
        checks = latencies["check"]
        assert len(checks) >= 100, "too few health checks"
        ordinary = sorted(it for path, seconds in latencies.items() if not _is_check(path) for it in seconds)
        return cls(
            p50_ms=round(checks[len(checks) // 2] * 1000, 1),
            p99_ms=_p99_ms(checks),
            max_ms=round(checks[-1] * 1000, 1),
            answers=dict(
                Counter(
                    f"{path}: {call.answer}"
                    for path, calls in samples.items()
                    for call in calls
                    if _is_check(path) and call.answer != "SERVING"
                )
            ),
            ordinary=dict(
                Counter(
                    call.answer if call.answer == "OK" else f"{path}: {call.answer}"
                    for path, calls in samples.items()
                    for call in calls
                    if not _is_check(path)
                )
            ),
            ordinary_max_ms=round(max(ordinary, default=0) * 1000, 1),
            ordinary_p99_ms=_p99_ms(ordinary),
            path_p99_ms={path: _p99_ms(seconds) for path, seconds in latencies.items()},
        )


def _is_check(path: str) -> bool:
    return path.startswith("check")


def _pause_seconds(path: str) -> float:
    return {"check": CHECK_SECONDS, "encode": ORDINARY_SECONDS}.get(path, PATH_SECONDS)


def _p99_ms(latencies: Sequence[float]) -> float:
    return round(latencies[len(latencies) * 99 // 100] * 1000, 1) if latencies else 0.0


def _as_sent_in_time(calls: Sequence[Sample], pause_seconds: float) -> Iterator[float]:
    """Yield the latencies in seconds, as if each call started on time.

    A slow call blocks the next calls. For each planned start during the slow call, the remaining time is a latency too.
    """
    for call in calls:
        left = call.seconds
        while left > 0:
            yield left
            left -= pause_seconds


class Phase:
    """A named part of a test.

    Attributes:
        level_bytes: The server's memory at the start.
        peak_bytes: The largest memory so far.
        health: Latencies and replies. Set at the end of the watch.
    """

    def __init__(self, name: str, level_bytes: int) -> None:
        self.name = name
        self.level_bytes = level_bytes
        self.peak_bytes = level_bytes
        self.began = time.monotonic()
        self.ended = 0.0
        self.health: Health

    def __str__(self) -> str:
        level, peak = self.level_bytes // MIB, self.peak_bytes // MIB
        return f"{self.name}: memory {level} to {peak} MiB, {self.health}"


class Watch:
    """Watches a server from construction until `end`."""

    def __init__(
        self, server: RealServer, budget_bytes: int, *, on_all_paths: bool, ca: Path | None, inspects: bool
    ) -> None:
        self._pid = server.process.pid
        self._kill = server.process.kill
        self._bound_bytes = self.resident_bytes() + budget_bytes + SLACK_BYTES + _KILLED_BEYOND_BYTES
        self._phases: list[Phase] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        args = [server.target, f"{server.http_port if on_all_paths else 0}", f"{ca or ''}", "inspect" * inspects]
        self._prober = subprocess.Popen(
            [sys.executable, __file__, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._sampler.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Begin a phase. The phase ends at the end of the block."""
        phase = Phase(name, self.resident_bytes())
        self._phases.append(phase)
        try:
            yield phase
        finally:
            phase.ended = time.monotonic()

    def end(self) -> None:
        """Stop the calls and the memory measurements, and compute `health` for all phases."""
        self._over.set()
        self._sampler.join()
        try:
            output, _ = self._prober.communicate("", timeout=2 * ANSWER_SECONDS)
        finally:
            self._prober.kill()
        samples = {path: [Sample(*call) for call in calls] for path, calls in json.loads(output).items()}
        for phase in self._phases:
            phase.health = Health.of({path: _within(phase, calls) for path, calls in samples.items()})
            logger.info("%s", phase)

    def resident_bytes(self) -> int:
        """Return the server's resident memory in bytes. If the server has ended, return 0."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0

    def wait_for_level(self, level_bytes: int, seconds: float = ANSWER_SECONDS) -> int:
        """Wait until the memory is at most `level_bytes`, but no longer than `seconds`. Return the memory in bytes."""
        ends = time.monotonic() + seconds
        while (now := self.resident_bytes()) > level_bytes and time.monotonic() < ends:
            time.sleep(MEMORY_SECONDS)
        return now

    def _sample(self) -> None:
        while not self._over.wait(MEMORY_SECONDS):
            now = self.resident_bytes()
            for phase in self._phases[-1:]:
                phase.peak_bytes = max(phase.peak_bytes, now)
            if now > self._bound_bytes:
                self._kill()


def _within(phase: Phase, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if phase.began <= sample.began <= phase.ended]


@contextlib.contextmanager
def watching(
    server: RealServer,
    budget_mib: int,
    *,
    on_all_paths: bool = False,
    ca: Path | None = None,
    inspects: bool = False,
) -> Iterator[Watch]:
    """Watch a server until the end of the block. After the block, `health` is set in each phase.

    Args:
        server: The server.
        budget_mib: The memory budget for requests and replies.
        on_all_paths: Whether to call over gRPC and HTTP, on open and on new connections. If false, all calls use gRPC
            on open connections.
        ca: The certificate authority of a server with TLS.
        inspects: Whether the ordinary caller also sends inspections.
    """
    watch = Watch(server, budget_mib * MIB, on_all_paths=on_all_paths, ca=ca, inspects=inspects)
    try:
        yield watch
    finally:
        watch.end()


class _Prober:
    """Sends calls at a fixed rate until stdin ends."""

    def __init__(self, target: str, http_port: str, ca: str, inspects: str) -> None:
        self._target = target
        self._http_port = int(http_port)
        self._credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes()) if ca else None
        self._tls = ssl.create_default_context(cafile=ca) if ca else None
        self._over = threading.Event()
        by_path: dict[str, Callable[[], str]] = {
            "check": partial(_check, self._channel()),
            "encode": partial(_encode, self._channel()),
        }
        if self._http_port:
            by_path |= {
                "check, new connection": partial(self._on_new_channel, _check),
                "check over HTTP, new connection": self._check_http,
                "encode, new connection": partial(self._on_new_channel, _encode),
                "stream": partial(_stream, self._channel()),
                "http": partial(_ask_http, self._http_connection()),
                "http, new connection": lambda: _ask_http(self._http_connection(), is_last=True),
            }
        if inspects:
            by_path["inspect"] = partial(_inspect, self._channel())
        self._samples: dict[str, list[Sample]] = {path: [] for path in by_path}
        self._threads = [threading.Thread(target=self._call, args=(path, ask)) for path, ask in by_path.items()]

    def run(self) -> None:
        """Send calls until stdin ends, then write the samples to stdout as JSON."""
        for thread in self._threads:
            thread.start()
        sys.stdin.read()
        self._over.set()
        for thread in self._threads:
            thread.join()
        json.dump(self._samples, sys.stdout)

    def _call(self, path: str, ask: Callable[[], str]) -> None:
        """Send calls one after another.

        The time between the starts of two calls is a multiple of the path's pause.
        """
        pause_seconds = _pause_seconds(path)
        while not self._over.is_set():
            began = time.monotonic()
            answer = ask()
            ended = time.monotonic()
            self._samples[path].append(Sample(began, ended - began, answer))
            self._over.wait(pause_seconds - (ended - began) % pause_seconds)

    def _channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # channels do not share connections
        if self._credentials is not None:
            return grpc.secure_channel(self._target, self._credentials, options=options)
        return grpc.insecure_channel(self._target, options=options)

    def _on_new_channel(self, ask: Callable[[grpc.Channel], str]) -> str:
        with self._channel() as channel:
            return ask(channel)

    def _http_connection(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection("127.0.0.1", self._http_port, timeout=ANSWER_SECONDS, context=self._tls)
        return http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=ANSWER_SECONDS)

    def _check_http(self) -> str:
        answer = _ask_http(self._http_connection(), "GET", "/health", None, is_last=True)
        return "SERVING" if answer == "OK" else answer


def _check(channel: grpc.Channel) -> str:
    call: Any = channel.unary_unary(_CHECK)
    answer = call.future(b"", timeout=ANSWER_SECONDS)
    if answer.code() is not grpc.StatusCode.OK:
        return _failure(answer)
    return "SERVING" if answer.result() == _SERVING else "NOT_SERVING"


def _encode(channel: grpc.Channel) -> str:
    request = encoder_pb2.EncodeRequest()
    request.inputs.add().token_ids.ids.append(1)
    request.options.outputs.add(kind=encoder_pb2.OUTPUT_KIND_MEAN)
    call: Any = channel.unary_unary(_ENCODE)
    answer = call.future(request.SerializeToString(), timeout=ANSWER_SECONDS, metadata=(("api-key", KEY),))
    return "OK" if answer.code() is grpc.StatusCode.OK else _failure(answer)


def _stream(channel: grpc.Channel) -> str:
    """Open a stream for one request with a text."""
    request = encoder_pb2.EncodeStreamRequest(request_id="a")
    request.request.inputs.add().text = "a"
    call: Any = channel.stream_stream(_ENCODE_STREAM)
    stream = call(iter([request.SerializeToString()]), timeout=ANSWER_SECONDS, metadata=(("api-key", KEY),))
    try:
        replies = [encoder_pb2.EncodeStreamResponse.FromString(data) for data in stream]
    except grpc.RpcError:
        return _failure(stream)
    return "OK" if [reply.HasField("response") for reply in replies] == [True] else f"{replies}"


def _inspect(channel: grpc.Channel) -> str:
    """Inspect one token, and return OK if the reply has a header and numbers."""
    states = encoder_pb2.InspectSpec(kind=encoder_pb2.INSPECT_KIND_HIDDEN_STATES)
    request = encoder_pb2.InspectRequest(tensors=[states])
    request.input.token_ids.ids.append(1)
    call: Any = channel.unary_stream(_INSPECT)
    stream = call(request.SerializeToString(), timeout=ANSWER_SECONDS, metadata=(("api-key", KEY),))
    try:
        messages = len(list(stream))
    except grpc.RpcError:
        return _failure(stream)
    return "OK" if messages > 1 else f"{messages} messages"


def _failure(answer: Any) -> str:
    reasons = [str(value) for key, value in answer.trailing_metadata() or () if key == "encserve-error-reason"]
    return " ".join([answer.code().name, *reasons])


def _ask_http(
    connection: http.client.HTTPConnection,
    method: str = "POST",
    path: str = "/embed",
    body: bytes | None = _HTTP_REQUEST,
    *,
    is_last: bool = False,
) -> str:
    try:
        connection.request(method, path, body, {"api-key": KEY, "content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__
    if is_last:
        connection.close()
    return "OK" if reply.status == _OK else f"{reply.status} {reply.headers.get('encserve-error-reason', '')}".strip()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C, because the test ends this process
    _Prober(*sys.argv[1:]).run()
    os._exit(0)
