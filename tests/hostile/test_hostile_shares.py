"""Caller a attacks the server, and caller b must still get its share of the server.

Caller a has the weight 0.01, and caller b has the default weight. Both callers have a key in the callers file. Caller b
calls over gRPC and HTTP, on open and on new connections. During the control, caller a does nothing. No other test may
run at the same time, because the tests measure latencies.
"""

import array
import fcntl
import ssl
import termios
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificates
from hostile_attacks import (
    ENCODE_STREAM,
    Holder,
    ask_http,
    attack,
    flood,
    hold,
    inspect,
    keep_streams,
    open_watches,
    rest,
    silent,
)
from hostile_calls import HTTP, encode_text, head, in_stream, post, serialized
from hostile_measure import BUDGET_MIB, Driver, Outcome, hostile_server, measure_once
from hostile_models import PANIC_TEXT, write_inspected, write_panicking, write_words
from hostile_watch import ANSWER_SECONDS, KEY, MIB
from real_server import COMMAND, RealServer

from encserve_proto.v1 import encoder_pb2 as pb

KEY_OF_A = "encserve-caller-a"
CONTROL_SECONDS = 5.0
SLACK_MIB = 150
# The limit of b's latency is never below this number, because the attack itself uses CPU time on this machine.
LEAST_ALLOWED_MS = 60.0
CONNECTIONS = 1_000
LIMIT_OF_CONNECTIONS = ("--max-connections", f"{CONNECTIONS}")
# The size of the log's pipe. A pipe of the usual 64 KiB would not be full after a second.
LOG_BYTES = 4096
# The server's default of --max-inspect-tokens.
INSPECTED_TOKENS = 256
FULL_SECONDS, STOPPED_SECONDS = 20, 20


@dataclass(frozen=True)
class Row:
    """An attack of caller a.

    Attributes:
        attack: Returns a function of hostile_attacks that attacks the server, and the function's arguments.
        flags: The command line flags of the server.
        seconds: The duration of the attack.
        memory_mib: The memory in MiB that the server may take during the attack, beyond the memory at the start.
        tokens_per_second: The rate limit of caller a in the callers file.
        write_model: Writes the model into a repository.
        open_files: The limit of open files of the server.
        has_tls: Whether the server speaks TLS.
        inspects: Whether caller b also sends inspections.
        options: More arguments of `real_server`.
    """

    attack: Callable[[RealServer], Driver]
    flags: tuple[str, ...] = ()
    seconds: float = 6.0
    memory_mib: int = SLACK_MIB
    tokens_per_second: float = 1e9
    write_model: Callable[[Path], None] = write_words
    open_files: int | None = None
    has_tls: bool = False
    inspects: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def keeping_connections(hello: bytes = b"", seconds: float = 1.0) -> Callable[[RealServer], Driver]:
    """Return an attack with many connections that send only `hello`. All connections open within `seconds`."""
    return lambda server: (silent, [server.grpc_port, server.http_port], CONNECTIONS, hello, seconds)


def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def unfinished_bodies(count: int, size: int) -> Callable[[RealServer], Driver]:
    """Return an attack with HTTP bodies whose last 64 KiB arrive very slowly."""
    return lambda server: (
        hold,
        Holder("bodies", count, server.http_port or 0, HTTP, (b" " * size,), is_grpc=False, is_slow=True, key=KEY_OF_A),
    )


def bad_calls() -> Callable[[RealServer], Driver]:
    """Return an attack with failing calls and calls with unknown fields. The server logs both kinds."""
    unknown = {f"{i:060}": 1 for i in range(64)}
    request = post("/embed", {"inputs": ["a"], "pooling": "none of these", **unknown}, f"api-key: {KEY_OF_A}")
    return lambda server: (ask_http, server.http_port, request, 4)


def chunk_extensions(server: RealServer) -> Driver:
    first = head("/embed", "transfer-encoding: chunked", f"api-key: {KEY_OF_A}") + b"5;x="
    return flood, server.http_port, first, b"b" * 65_536, 16


def small_chunks(server: RealServer) -> Driver:
    first = head("/embed", "transfer-encoding: chunked", f"api-key: {KEY_OF_A}")
    return flood, server.http_port, first, b"1\r\n \r\n" * 10_000, 16


def limited_streams(server: RealServer) -> Driver:
    request = in_stream("a", serialized(encode_text("a dog on a cat")))
    return keep_streams, server.target, ENCODE_STREAM, request, 113, KEY_OF_A, 0.1


def inspections(callers: int, *, reads: bool) -> Callable[[RealServer], Driver]:
    """Return an attack with more inspections than the server runs at the same time. Each reply has 4 MiB."""
    request = pb.InspectRequest(tensors=[pb.InspectSpec(kind=pb.INSPECT_KIND_HIDDEN_STATES)])
    request.input.token_ids.ids.extend([1] * INSPECTED_TOKENS)
    return lambda server: (inspect, server.target, serialized(request), callers, KEY_OF_A, reads)


ROWS = {
    "silent connections": Row(keeping_connections(), LIMIT_OF_CONNECTIONS),
    "silent connections, few open files": Row(keeping_connections(seconds=4), LIMIT_OF_CONNECTIONS, open_files=1024),
    "silent connections to a server with TLS": Row(keeping_connections(), LIMIT_OF_CONNECTIONS, has_tls=True),
    "half a TLS handshake": Row(keeping_connections(client_hello(), 8), LIMIT_OF_CONNECTIONS, seconds=12, has_tls=True),
    "bad calls, and an unread log": Row(bad_calls(), options={"log_bytes": LOG_BYTES}),
    "26 bodies of 32 MiB": Row(
        unfinished_bodies(26, 32 * MIB), ("--max-http-request-mib", "32"), memory_mib=BUDGET_MIB + SLACK_MIB
    ),
    "560 bodies of 254 KB": Row(unfinished_bodies(560, 254_000), memory_mib=BUDGET_MIB + SLACK_MIB),
    # gRPC stores some thousand new streams until the event loop accepts them. So this attack may use more memory.
    "45,000 health watches": Row(
        lambda server: (open_watches, server.grpc_port, 5, 9_000, 20), seconds=20, memory_mib=300
    ),
    "streams of a caller over its rate": Row(limited_streams, tokens_per_second=1),
    "endless chunk extensions": Row(chunk_extensions),
    "chunks of one byte": Row(small_chunks),
    "inspections": Row(inspections(16, reads=True), write_model=write_inspected, inspects=True),
    "inspections that are not read": Row(inspections(16, reads=False), write_model=write_inspected, inspects=True),
}


def callers_file(folder: Path, tokens_per_second: float) -> Path:
    """Write a callers file with the callers a and b."""
    callers = folder.with_name(f"{folder.name}-callers.toml")
    callers.write_text(f"""
[[caller]]
name = "a"
key_sha256 = ["{sha256(KEY_OF_A.encode()).hexdigest()}"]
weight = 0.01
tokens_per_second = {tokens_per_second}

[[caller]]
name = "b"
key_sha256 = ["{sha256(KEY.encode()).hexdigest()}"]
""")
    return callers


def faults(outcome: Outcome, row: Row) -> list[str]:
    """Return the names of the broken limits: on health checks, on calls of b, or on memory."""
    health, level_bytes = outcome.attacked.health, outcome.attacked.level_bytes
    wrong = {
        "health is not SERVING": health.answers != {},
        "calls of b fail": set(health.ordinary) != {"OK"},
        "memory beyond the bound": outcome.attacked.peak_bytes > level_bytes + row.memory_mib * MIB,
        "memory not freed": not 0 < outcome.after_bytes <= level_bytes + SLACK_MIB * MIB,
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]


def is_slow(outcome: Outcome) -> bool:
    allowed_ms = max(3 * outcome.control.health.ordinary_p99_ms, LEAST_ALLOWED_MS)
    return outcome.attacked.health.ordinary_p99_ms > allowed_ms


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_attack_on_another_caller(tmp_path: Path, row: Row) -> None:
    """All calls of b succeed, and b's latency stays low.

    The 99th percentile of b's latency is at most 3 times as high as in the control, or at most `LEAST_ALLOWED_MS`.
    If b is too slow, repeat the control and the attack once, because the machine may be busy.
    """
    row.write_model(tmp_path)
    flags, ca = (*row.flags, "--callers", f"{callers_file(tmp_path, row.tokens_per_second)}"), None
    if row.has_tls:
        made = make_certificates(tmp_path.parent)
        ca = made.ca
        flags += ("--tls-cert-file", f"{made.server.cert}", "--tls-key-file", f"{made.server.key}")
    program = COMMAND
    if row.open_files is not None:
        program = tmp_path.with_name(f"{tmp_path.name}-server")
        program.write_text(f"""#!/bin/bash\nulimit -n {row.open_files}\nexec {COMMAND} "$@"\n""")
        program.chmod(0o755)
    with hostile_server(tmp_path, *flags, program=program, **row.options) as server:
        for _ in range(2):
            outcome = measure_once(
                server,
                (rest,),
                row.attack(server),
                row.seconds,
                control_seconds=CONTROL_SECONDS,
                on_all_paths=True,
                ca=ca,
                inspects=row.inspects,
            )
            found = faults(outcome, row)
            if found or not is_slow(outcome):
                break
        found += ["b is slow"] * is_slow(outcome)
        assert not found, "\n".join([*found, str(outcome)])
        if "log_bytes" in row.options:
            check_stop_with_full_log(server)


@pytest.mark.system
def test_panics_while_the_log_is_not_read(tmp_path: Path) -> None:
    """A panic of the tokenizer writes directly to standard error. A full pipe must not block the server."""
    write_panicking(tmp_path)
    with (
        hostile_server(tmp_path, log_bytes=LOG_BYTES) as server,
        attack(ask_http, server.http_port, post("/embed", {"inputs": [PANIC_TEXT], "pooling": "mean"}), 1) as panics,
    ):
        ends = time.monotonic() + FULL_SECONDS
        while unread_bytes(server) < LOG_BYTES // 2 and time.monotonic() < ends:
            time.sleep(0.1)
        time.sleep(2)
        assert panics.stop()["422"] > 0
        with http_post(f"{server.url}/embed", b'{"inputs": ["a"], "pooling": "mean"}') as reply:
            assert reply.status == 200
        check_stop_with_full_log(server)


def check_stop_with_full_log(server: RealServer) -> None:
    """Check that the server stops although the log's pipe is full."""
    assert unread_bytes(server) > LOG_BYTES // 2
    server.terminate()
    assert server.process.wait(STOPPED_SECONDS) == 0


def http_post(url: str, body: bytes) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, body), timeout=ANSWER_SECONDS)


def unread_bytes(server: RealServer) -> int:
    """Return the number of bytes in the pipe of the server's log."""
    assert server.process.stderr is not None
    size = array.array("i", [0])
    fcntl.ioctl(server.process.stderr.fileno(), termios.FIONREAD, size)
    return size[0]
