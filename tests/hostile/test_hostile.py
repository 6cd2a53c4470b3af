"""These tests attack a real server, mostly without a key. Each attack has a control: ordinary calls of the same kind.

During an attack, the server must answer health checks and ordinary calls, and must not exceed its memory limit.
The quick tests belong to the test tier `system`, and the other tests to the test tier `weekly`. The tests measure
latencies, so no other test may run at the same time.
"""

import hashlib
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from hostile_attacks import (
    ENCODE,
    ENCODE_STREAM,
    MODEL_INFER,
    MODEL_STREAM_INFER,
    ask_grpc,
    ask_http,
    attack,
    flood,
    hold,
    stream_grpc,
)
from hostile_calls import (
    HTTP,
    LONGEST_FIELD,
    MEAN,
    MULTI_VECTOR,
    PATHS,
    SPARSE,
    encode,
    encode_text,
    head,
    in_stream,
    infer,
    infer_text,
    non_readers,
    post,
    serialized,
    slow_senders,
    wide_fields,
)
from hostile_measure import (
    BUDGET_MIB,
    LARGE_REPLIES,
    SHORT_STALL,
    Driver,
    hostile_server,
    measure,
    wait_for_metric,
)
from hostile_models import (
    PANIC_TEXT,
    SLOW_ID,
    VOCAB_SIZE,
    WIDE_TOKENS,
    write_multi_vector,
    write_narrow,
    write_panicking,
    write_slow,
    write_sparse,
    write_wide,
    write_words,
)
from hostile_watch import ANSWER_SECONDS, KEY, Phase, watching
from otlp_receiver import otlp_receiver
from real_server import COMMAND, RealServer, real_server

from encserve_proto.v1 import encoder_pb2 as pb

IN_FLIGHT, QUEUED = "encserve_in_flight_requests", "encserve_queue_sequences"
# A driver is a function of hostile_attacks with its arguments. It sends the calls of some callers.
MakeDriver = Callable[[RealServer], Driver]


@dataclass(frozen=True)
class Row:
    """An attack and its control.

    Attributes:
        write_model: Writes the model into a repository.
        control: Returns a function of hostile_attacks that makes ordinary calls, and the function's arguments.
        attack: Returns a function of hostile_attacks that attacks the server, and the function's arguments.
        flags: The command line flags of the server.
        seconds: The duration of the attack.
        warm_up: Like `control`, but for the warm-up calls before the control. If None, `control` also makes the warm-up
            calls.
    """

    write_model: Callable[[Path], None]
    control: MakeDriver
    attack: MakeDriver
    flags: tuple[str, ...] = ()
    seconds: float = 5.0
    warm_up: MakeDriver | None = None


def embed(inputs: Callable[[], list[Any]], callers: int) -> MakeDriver:
    """Return a function that makes a driver with callers of POST /embed."""
    return lambda server: (ask_http, server.http_port, post("/embed", {"inputs": inputs(), "pooling": "mean"}), callers)


def call(requests: Callable[[], list[bytes]], callers: int = 1) -> MakeDriver:
    """Return a function that makes a driver with callers of Encode.

    Each caller sends all requests in order, again and again.
    """
    return lambda server: (ask_grpc, server.target, ENCODE, requests(), callers)


def tokenize(texts: Callable[[], list[str]], callers: int) -> MakeDriver:
    """Return a function that makes a driver with callers of POST /tokenize."""
    return lambda server: (ask_http, server.http_port, post("/tokenize", {"inputs": texts()}), callers)


def flooding(first: bytes, block: bytes, connections: int) -> MakeDriver:
    """Return a function that makes a driver. Its connections send `first` once, then `block` again and again."""
    return lambda server: (flood, server.http_port, first, block, connections)


def largest_body(element: bytes) -> MakeDriver:
    """Return a function that makes a driver with 8 callers. Each caller posts a list that repeats a JSON element."""
    body = b'{"pooling": "mean", "priority": 1, "inputs": [%s]}'

    def driver(server: RealServer) -> Driver:
        data = body % b",".join([element] * 2048)
        return ask_http, server.http_port, head("/embed", f"content-length: {len(data)}") + data, 8

    return driver


def sparse_outputs(count: int) -> bytes:
    return encode([[1]], [pb.OutputSpec(kind=SPARSE, max_active_dims=i + 1) for i in range(count)])


def mean_outputs(count: int) -> bytes:
    return encode([[1]] * 256, [pb.OutputSpec(kind=MEAN, dimensions=i + 1) for i in range(count)])


def pooled_document(n_tokens: int, factors: int) -> bytes:
    """Return a request for a document's vectors. The request has `factors` outputs with different pool factors.

    If `factors` is 0, the request has one output without pooling.
    """
    outputs = [pb.OutputSpec(kind=MULTI_VECTOR, dimensions=1, pool_factor=2 + i / 1000) for i in range(factors)]
    ids = [i * i % VOCAB_SIZE for i in range(n_tokens)]
    return encode([ids], outputs or [pb.OutputSpec(kind=MULTI_VECTOR, dimensions=1)])


def readers(protocol: str, count: int) -> MakeDriver:
    """Return a function that makes a driver. Its callers read replies of 62.5 MiB, or larger replies over HTTP."""
    if protocol == "http":
        return lambda server: (ask_http, server.http_port, post(HTTP, wide_fields(WIDE_TOKENS)), count)
    return call(lambda: [encode([[1] * WIDE_TOKENS])], count)


def not_reading(protocol: str, callers: int, calls: int) -> Row:
    return Row(
        write_wide,
        readers(protocol, 2),
        lambda server: (hold, non_readers(server, protocol, callers, calls)),
        flags=LARGE_REPLIES,
        seconds=7,
        warm_up=readers(protocol, 8),
    )


LARGE_CONTROL = embed(lambda: ["a dog on a cat " * 270] * 256, 8)
QUICK = {
    "pipelined requests": Row(
        write_narrow,
        lambda server: (ask_http, server.http_port, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n", 1),
        flooding(b"", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 2000, 1),
    ),
    "chunks of one byte, also after the reply 413": Row(
        write_narrow,
        embed(lambda: [[1]] * 64, 2),
        flooding(head("/embed", "transfer-encoding: chunked"), b"1\r\n \r\n" * 10_000, 2),
    ),
    "thousands of sparse outputs": Row(
        write_sparse,
        call(lambda: [sparse_outputs(1)]),
        call(lambda: [sparse_outputs(3_000), sparse_outputs(20_000)]),
        flags=SHORT_STALL,
    ),
    "many inputs with many outputs": Row(
        write_wide, call(lambda: [mean_outputs(1)]), call(lambda: [mean_outputs(9_984)])
    ),
}
SLOW = {
    "a million inputs": Row(
        write_narrow,
        embed(lambda: [[1]] * 256, 4),
        lambda server: (ask_http, server.http_port, post("/embed", {"inputs": [[1]] * 1_048_000}), 2),
    ),
    "thousands of long texts": Row(
        write_words,
        embed(lambda: ["a dog"] * 64, 4),
        embed(lambda: [("a dog on a cat " * 267)[:4000]] * 2048, 4),
        seconds=15,
    ),
    "millions of tokens to tokenize": Row(
        write_words,
        tokenize(lambda: ["a dog on a cat"] * 64, 2),
        tokenize(lambda: ["a " * 100_000] * 20, 2),
        seconds=15,
    ),
    "largest body, escapes": Row(write_words, LARGE_CONTROL, largest_body(b'"%s"' % (rb"\u00e9" * 650))),
    "largest body, wide characters": Row(
        write_words, LARGE_CONTROL, largest_body(b'"%s"' % ("a" * 4_000 + "\U0001f30d").encode())
    ),
    "largest body, ids": Row(write_words, LARGE_CONTROL, largest_body(b"[%s]" % (b"63," * 1362 + b"63"))),
    "3,000 sparse outputs, 16 in a call": Row(
        write_sparse,
        call(lambda: [sparse_outputs(1)], 188),
        call(lambda: [sparse_outputs(16)], 188),
        flags=SHORT_STALL,
    ),
    "vectors pooled in 1,000 ways, or of 8,000 tokens": Row(
        write_multi_vector,
        call(lambda: [pooled_document(8_000, 0)]),
        call(lambda: [pooled_document(8_000, 1), pooled_document(8_000, 1_000)]),
        flags=SHORT_STALL,
    ),
    "vectors pooled up to the limits": Row(
        write_multi_vector,
        call(lambda: [pooled_document(2_048, 1)], 2),
        call(lambda: [pooled_document(2_048, 16)], 2),
        flags=SHORT_STALL,
    ),
    "60 calls that are not read": not_reading("unary", 60, 1),
    "a stream that is not read": not_reading("stream", 1, 30),
    "25 HTTP replies that are not read": not_reading("http", 25, 1),
}
ROWS = [
    *(pytest.param(row, id=name, marks=pytest.mark.system) for name, row in QUICK.items()),
    *(pytest.param(row, id=name) for name, row in SLOW.items()),
]


@pytest.mark.parametrize("row", ROWS)
def test_attack(tmp_path: Path, row: Row) -> None:
    row.write_model(tmp_path)
    with hostile_server(tmp_path, *row.flags) as server:
        warm_up = row.warm_up(server) if row.warm_up else None
        measure(server, row.control(server), row.attack(server), warm_up=warm_up, attack_seconds=row.seconds).check()


@pytest.mark.parametrize("path", [ENCODE_STREAM, MODEL_STREAM_INFER], ids=["encode-stream", "model-stream-infer"])
def test_long_request_ids_with_tracing(tmp_path: Path, path: str) -> None:
    """The attack sends 400 messages in a stream, each with a request id of almost 4 MiB.

    The control sends about the same number of bytes in another field.
    """
    long = "a" * LONGEST_FIELD
    if path == ENCODE_STREAM:
        control, attacking = in_stream("a", serialized(encode_text(long))), in_stream(long, encode([[1]]))
    else:
        control, attacking = infer(LONGEST_FIELD // 8), infer(1, long)
    write_narrow(tmp_path)
    with otlp_receiver() as receiver, hostile_server(tmp_path, "--trace-endpoint", receiver.endpoint) as server:
        measure(
            server,
            (stream_grpc, server.target, path, control, 400),
            (stream_grpc, server.target, path, attacking, 400),
            attack_seconds=8,
        ).check()


@pytest.mark.parametrize("protocol", PATHS)
def test_hundreds_of_held_calls(tmp_path: Path, protocol: str) -> None:
    """200 callers send slowly, and 200 callers do not read their replies.

    The latency of health checks may rise during this attack, so the test does not check this latency.
    """
    write_wide(tmp_path)
    with hostile_server(tmp_path, *LARGE_REPLIES) as server:
        measure(
            server,
            readers(protocol, 2)(server),
            (hold, slow_senders(server, protocol, 200), non_readers(server, protocol, 200)),
            warm_up=readers(protocol, 8)(server),
            attack_seconds=8,
            is_latency_bound=False,
        ).check(is_latency_bound=False)
        wait_for_metric(server, IN_FLIGHT, 0)


@pytest.mark.system
def test_calls_that_wait_behind_a_stalled_batch_get_an_error(tmp_path: Path) -> None:
    """Calls that wait behind a stalled batch get an error long before the batch ends.

    The control is a batch that ends in time.
    """
    write_slow(tmp_path)
    with (
        hostile_server(tmp_path, "--parallel-batches", "1", "--stall-seconds", "1") as server,
        ThreadPoolExecutor(1) as threads,
        grpc.insecure_channel(server.target) as channel,
    ):
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ENCODE)

        def statuses_behind(slow_tokens: int) -> tuple[str, int]:
            """Return the gRPC status and the HTTP status of two calls that wait behind a slow batch."""
            batch = method.future(encode([[SLOW_ID] * slow_tokens]))
            while not server.metric(IN_FLIGHT) or server.metric(QUEUED):  # wait until the slow batch runs
                time.sleep(0.02)
            by_http = threads.submit(http_status, f"{server.url}/embed", {"inputs": [[1]], "pooling": "mean"})
            by_grpc = method.future(encode([[1]]), timeout=ANSWER_SECONDS)
            statuses = by_grpc.code().name, by_http.result()
            batch.cancel()
            return statuses

        assert statuses_behind(3) == ("OK", 200)
        assert statuses_behind(600) == ("UNAVAILABLE", 503)


@pytest.mark.system
def test_a_suspended_process_is_not_a_stalled_batch(tmp_path: Path) -> None:
    """During a batch, SIGSTOP suspends the server for longer than --stall-seconds. Still, all calls get a reply."""
    write_slow(tmp_path)
    with (
        hostile_server(tmp_path, "--parallel-batches", "1", "--stall-seconds", "4") as server,
        ThreadPoolExecutor(1) as threads,
        grpc.insecure_channel(server.target) as channel,
    ):
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ENCODE)
        batch = method.future(encode([[SLOW_ID] * 20]))
        while not server.metric(IN_FLIGHT) or server.metric(QUEUED):  # wait until the slow batch runs
            time.sleep(0.02)
        behind = threads.submit(http_status, f"{server.url}/embed", {"inputs": [[1]], "pooling": "mean"})
        while not server.metric(QUEUED):
            time.sleep(0.02)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        new = method.future(encode([[1]]), timeout=ANSWER_SECONDS)
        server.process.send_signal(signal.SIGCONT)
        assert (batch.code().name, behind.result(), new.code().name) == ("OK", 200, "OK")


def http_status(url: str, fields: object) -> int:
    """Send a POST request and return the status of the reply, or 0 if there is no reply."""
    request = urllib.request.Request(url, orjson.dumps(fields), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.system
def test_a_text_that_makes_the_tokenizer_panic_is_refused(tmp_path: Path) -> None:
    """All methods and routes refuse the text. Before and after the refusal, they accept an ordinary text."""
    write_panicking(tmp_path)
    program = tmp_path.with_name(f"{tmp_path.name}-server")
    # A panic in Rust prints lines that are not JSON. The script removes such lines from the server's log.
    program.write_text(f"""#!/bin/bash\nexec {COMMAND} "$@" 2> >(grep --line-buffered '^{{' >&2)\n""")
    program.chmod(0o755)
    with (
        real_server(tmp_path, "--http-port", "0", program=program) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        assert set(statuses_of(server, channel, "a").values()) == {"OK", "2xx"}
        assert set(statuses_of(server, channel, PANIC_TEXT).values()) == {"INVALID_ARGUMENT", "4xx"}
        assert set(statuses_of(server, channel, "a").values()) == {"OK", "2xx"}


TOKENIZE = "/encserve.v1.EncoderService/Tokenize"


def statuses_of(server: RealServer, channel: grpc.Channel, text: str) -> dict[str, str]:
    """Send a text to several methods and routes, and return the status of each call by path."""
    request = encode_text(text)
    statuses = {}
    unary = {
        ENCODE: serialized(request),
        TOKENIZE: serialized(pb.TokenizeRequest(texts=[text])),
        MODEL_INFER: infer_text(text),
    }
    for path, data in unary.items():
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        statuses[path] = method.future(data, timeout=ANSWER_SECONDS).code().name
    message = in_stream("a", serialized(request))
    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(ENCODE_STREAM)
    statuses[ENCODE_STREAM] = first_status(stream(iter([message]), timeout=ANSWER_SECONDS))
    for path, fields in {"/embed": {"inputs": [text], "pooling": "mean"}, "/tokenize": {"inputs": [text]}}.items():
        statuses[path] = f"{http_status(f'{server.url}{path}', fields) // 100}xx"
    return statuses


def first_status(stream: Any) -> str:
    """Return the status in the first reply of a stream. If the stream has no reply, return the stream's status."""
    try:
        reply = pb.EncodeStreamResponse.FromString(next(stream))
    except grpc.RpcError:
        return str(stream.code().name)
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return names[reply.error.code]


def test_a_bulk_caller_does_not_block_another(tmp_path: Path) -> None:
    """A bulk caller sends more tokens than fit into the queue. The calls of another bulk caller still succeed."""
    write_slow(tmp_path, STEPS_PER_RUN)
    file = tmp_path.with_name(f"{tmp_path.name}-callers.toml")
    file.write_text(
        "\n".join(
            f'[[caller]]\nname = "{name}"\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
            f'weight = {weight}\npriority = "bulk"\n'
            for name, key, weight in (("flood", "encserve-flooding", 0.01), ("ordinary", KEY, 1.0))
        )
    )

    def flood_bulk(server: RealServer, inputs: int, callers: int) -> Driver:
        body = orjson.dumps({"inputs": [[1]] * inputs, "pooling": "mean"})
        request = head("/embed", f"api-key: encserve-flooding\r\ncontent-length: {len(body)}") + body
        return ask_http, server.http_port, request, callers

    flags = ("--callers", str(file), "--max-queue-tokens", "2048", "--parallel-batches", "1")
    with hostile_server(tmp_path, *flags) as server:
        outcome = measure(server, flood_bulk(server, 1, 2), flood_bulk(server, 64, 64))
        outcome.check()
        assert set(outcome.report) <= {"200", "429", "connections ended"}, outcome.report
        assert outcome.report["429"] > 0


# The duration of a batch is about 30 ms, for any number of waiting inputs.
STEPS_PER_RUN, FEW, MANY = 120, 256, 65_536


def test_health_with_a_full_queue(tmp_path: Path) -> None:
    """With 65,536 waiting inputs, health checks are at most 10 ms slower than with 256 waiting inputs.

    The two loads alternate, and each load runs three times. Only the lowest latency of each load counts, because other
    work on the machine may slow a run.
    """
    write_slow(tmp_path, STEPS_PER_RUN)
    flags = ("--parallel-batches", "1", "--intra-op-threads", "1", "--max-queue-tokens", "100000")
    request = encode([[1]] * 256, [pb.OutputSpec(kind=MEAN)])
    phases: dict[int, list[Phase]] = {FEW: [], MANY: []}
    with hostile_server(tmp_path, *flags) as server, watching(server, BUDGET_MIB) as watch:
        for count in [*phases] * 3:
            wait_for_metric(server, QUEUED, 0)
            # Each call has 256 inputs. One call runs, so one more call is needed.
            with attack(ask_grpc, server.target, ENCODE, [request], count // 256 + 1):
                wait_for_metric(server, QUEUED, count, 512)
                with watch.phase(f"{count} waiting") as phase:
                    time.sleep(3)
                wait_for_metric(server, QUEUED, count, 512)
            phases[count].append(phase)
    few, many = ([phase.health for phase in phases[count]] for count in (FEW, MANY))
    assert not any(health.answers for health in few + many), (few, many)
    assert min(health.p99_ms for health in many) <= min(health.p99_ms for health in few) + 10, (few, many)


@pytest.mark.parametrize("protocol", [pytest.param("grpc", marks=pytest.mark.system), "http"])
def test_the_largest_requests_without_a_key(tmp_path: Path, protocol: str) -> None:
    """The server refuses large requests without a key before it parses them. The control sends small requests."""
    write_words(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text(KEY)

    def without_a_key(server: RealServer, words: int) -> Driver:
        text = "a " * words
        if protocol == "http":
            return ask_http, server.http_port, post("/embed", {"inputs": text}), 4
        return ask_grpc, server.target, ENCODE, [serialized(encode_text(text))], 4

    with hostile_server(tmp_path, "--api-key-file", str(keys)) as server:
        outcome = measure(server, without_a_key(server, 1), without_a_key(server, 2**21 - 2**12))
        outcome.check()
        assert outcome.report
        assert set(outcome.report) <= {"UNAUTHENTICATED UNAUTHENTICATED", "401", "connections ended"}
