"""What one anonymous caller can do to everybody else: each attack against a real server, beside a control.

All stand in one file, which runs one after the other: two at a time would be measured in each other's latencies. The
control is the same server, before the attack, with calls of the same kind as they are meant.
"""

import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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


def test_pipelined_requests(tmp_path: Path) -> None:
    """The control is one caller that waits for each answer."""
    request = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    write_narrow(tmp_path)
    with hostile_server(tmp_path) as server:
        measure(
            server,
            (ask_http, server.http_port, request, 1),
            (flood, server.http_port, b"", request * 2000, 1),
        ).check()


def test_bodies_in_chunks_of_a_byte(tmp_path: Path) -> None:
    """Sent on after the answer too, which is 413. The control is two callers with ordinary requests."""
    body = head("/embed", "transfer-encoding: chunked")
    write_narrow(tmp_path)
    with hostile_server(tmp_path) as server:
        measure(
            server,
            (ask_http, server.http_port, post("/embed", {"inputs": [[1]] * 64, "pooling": "mean"}), 2),
            (flood, server.http_port, body, b"1\r\n \r\n" * 10_000, 2),
        ).check()


def test_a_million_inputs_over_http(tmp_path: Path) -> None:
    """The control is as many callers with as many inputs as a request may have."""
    write_narrow(tmp_path)
    with hostile_server(tmp_path) as server:
        measure(
            server,
            (ask_http, server.http_port, post("/embed", {"inputs": [[1]] * 256, "pooling": "mean"}), 4),
            (ask_http, server.http_port, post("/embed", {"inputs": [[1]] * 1_048_000}), 4),
        ).check()


def test_thousands_of_long_texts(tmp_path: Path) -> None:
    """2,048 texts of 8,000 characters. The control is as many callers with a few short texts."""
    text = ("a dog on a cat " * 534)[:8000]
    write_words(tmp_path)
    with hostile_server(tmp_path) as server:
        measure(
            server,
            (ask_http, server.http_port, post("/embed", {"inputs": ["a dog"] * 64, "pooling": "mean"}), 4),
            (ask_http, server.http_port, post("/embed", {"inputs": [text] * 2048, "pooling": "mean"}), 4),
            attack_seconds=15,
        ).check()


def test_bodies_of_the_largest_size(tmp_path: Path) -> None:
    """Of escapes, ids, and texts of wide characters. The control is as many callers with bodies of 1 MiB."""
    texts = [
        b'"%s"' % (rb"\u00e9" * 2700),
        b'"%s"' % ("a" * 16_000 + "\U0001f30d").encode(),
        b"[%s]" % (b"63," * 511 + b"63"),
    ]
    bodies = [b'{"pooling": "mean", "priority": 1, "inputs": [' + b",".join([it] * 2048) + b"]}" for it in texts]
    requests = [head("/embed", f"content-length: {len(body)}") + body for body in bodies]
    write_words(tmp_path)
    with hostile_server(tmp_path) as server:
        control = post("/embed", {"inputs": ["a dog on a cat " * 270] * 256, "pooling": "mean"})
        for request in requests:
            measure(server, (ask_http, server.http_port, control, 8), (ask_http, server.http_port, request, 8)).check()


def sparse_outputs(count: int) -> list[pb.OutputSpec]:
    return [pb.OutputSpec(kind=SPARSE, max_active_dims=i + 1) for i in range(count)]


def test_thousands_of_sparse_outputs(tmp_path: Path) -> None:
    """25 KB and 161 KB. The control is the same call with one output."""
    write_sparse(tmp_path)
    with hostile_server(tmp_path, *SHORT_STALL) as server:
        measure(
            server,
            (ask_grpc, server.target, ENCODE, [encode([[1]], sparse_outputs(1))], 1),
            (ask_grpc, server.target, ENCODE, [encode([[1]], sparse_outputs(n)) for n in (3_000, 20_000)], 1),
        ).check()


def test_as_many_sparse_outputs_in_many_calls(tmp_path: Path) -> None:
    """3,000 outputs at a time, 16 in a call. The control is as many calls with one output."""
    write_sparse(tmp_path)
    with hostile_server(tmp_path, *SHORT_STALL) as server:
        measure(
            server,
            (ask_grpc, server.target, ENCODE, [encode([[1]], sparse_outputs(1))], 188),
            (ask_grpc, server.target, ENCODE, [encode([[1]], sparse_outputs(16))], 188),
        ).check()


def pooled_document(n_tokens: int, factors: int) -> bytes:
    """A document whose vectors, cut to one number, are pooled in so many ways; 0 leaves them as they are."""
    outputs = [pb.OutputSpec(kind=MULTI_VECTOR, dimensions=1, pool_factor=2 + i / 1000) for i in range(factors)]
    ids = [i * i % VOCAB_SIZE for i in range(n_tokens)]
    return encode([ids], outputs or [pb.OutputSpec(kind=MULTI_VECTOR, dimensions=1)])


def test_vectors_pooled_in_many_ways_or_of_a_long_document(tmp_path: Path) -> None:
    """1,000 ways in 23 KB, or 8,000 tokens. The control is the same document with all vectors."""
    write_multi_vector(tmp_path)
    with hostile_server(tmp_path, *SHORT_STALL) as server:
        measure(
            server,
            (ask_grpc, server.target, ENCODE, [pooled_document(8_000, 0)], 1),
            (ask_grpc, server.target, ENCODE, [pooled_document(8_000, n) for n in (1, 1_000)], 1),
        ).check()


def test_vectors_pooled_as_far_as_may_be(tmp_path: Path) -> None:
    """A document of 2,048 tokens in 16 ways. The control is the same document in one way."""
    write_multi_vector(tmp_path)
    with hostile_server(tmp_path, *SHORT_STALL) as server:
        measure(
            server,
            (ask_grpc, server.target, ENCODE, [pooled_document(2_048, 1)], 2),
            (ask_grpc, server.target, ENCODE, [pooled_document(2_048, 16)], 2),
        ).check()


def test_many_inputs_with_many_outputs(tmp_path: Path) -> None:
    """256 inputs x 9,984 outputs. The control is as many inputs with one output."""
    outputs = [pb.OutputSpec(kind=MEAN, dimensions=i + 1) for i in range(9_984)]
    write_wide(tmp_path)
    with hostile_server(tmp_path) as server:
        measure(
            server,
            (ask_grpc, server.target, ENCODE, [encode([[1]] * 256, outputs[:1])], 1),
            (ask_grpc, server.target, ENCODE, [encode([[1]] * 256, outputs)], 1),
        ).check()


@pytest.mark.parametrize(("protocol", "callers", "calls"), [("unary", 60, 1), ("stream", 1, 30), ("http", 25, 1)])
def test_callers_that_do_not_read(tmp_path: Path, protocol: str, callers: int, calls: int) -> None:
    """60 calls, or a stream with 30, or 25 over HTTP. The control is callers that read the same replies."""
    write_wide(tmp_path)
    with hostile_server(tmp_path, *LARGE_REPLIES) as server:
        measure(
            server,
            readers(server, protocol, 2),
            (hold, non_readers(server, protocol, callers, calls)),
            attack_seconds=7,
            warm_up=readers(server, protocol, 8),
        ).check()


def readers(server: RealServer, protocol: str, count: int) -> Driver:
    """So many callers that read replies of 62.5 MiB, or over HTTP of more."""
    if protocol == "http":
        return (ask_http, server.http_port, post(HTTP, wide_fields(WIDE_TOKENS)), count)
    return (ask_grpc, server.target, ENCODE, [encode([[1] * WIDE_TOKENS])], count)


@pytest.mark.parametrize("path", [ENCODE_STREAM, MODEL_STREAM_INFER], ids=["encode-stream", "model-stream-infer"])
def test_long_request_ids_with_tracing(tmp_path: Path, path: str) -> None:
    """400 of 4 MB in a stream. The control is as many bytes in another field that is too long."""
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
def test_hundreds_of_callers_that_hold_what_they_have(tmp_path: Path, protocol: str) -> None:
    """200 that send slowly and 200 that read nothing. The control is callers that read; latency is not bounded here."""
    write_wide(tmp_path)
    with hostile_server(tmp_path, *LARGE_REPLIES) as server:
        measure(
            server,
            readers(server, protocol, 2),
            (hold, slow_senders(server, protocol, 200), non_readers(server, protocol, 200)),
            warm_up=readers(server, protocol, 8),
            attack_seconds=8,
            is_latency_bound=False,
        ).check(is_latency_bound=False)
        wait_for_metric(server, IN_FLIGHT, 0)


def test_callers_behind_a_stalled_batch(tmp_path: Path) -> None:
    """They get an error. The control is callers behind a batch that ends in time."""
    write_slow(tmp_path)
    with (
        hostile_server(tmp_path, "--parallel-batches", "1", "--stall-seconds", "1") as server,
        ThreadPoolExecutor(1) as threads,
        grpc.insecure_channel(server.target) as channel,
    ):
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ENCODE)

        def behind(slow_tokens: int) -> tuple[str, int]:
            """How a caller by gRPC and one by HTTP are answered, long before the longer batch ends."""
            batch = call.future(encode([[SLOW_ID] * slow_tokens]))
            wait_until_it_runs(server)
            by_http = threads.submit(http_status, f"{server.url}/embed", {"inputs": [[1]], "pooling": "mean"})
            by_grpc = call.future(encode([[1]]), timeout=ANSWER_SECONDS)
            answers = by_grpc.code().name, by_http.result()
            batch.cancel()
            return answers

        assert behind(3) == ("OK", 200)
        assert behind(600) == ("UNAVAILABLE", 503)


def wait_until_it_runs(server: RealServer) -> None:
    """Returns once a call has been taken, and nothing waits any more."""
    while not server.metric(IN_FLIGHT) or server.metric(QUEUED):
        time.sleep(0.02)


def http_status(url: str, fields: object) -> int:
    """The status of a POST; 0 for no answer."""
    request = urllib.request.Request(url, orjson.dumps(fields), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_a_text_at_which_the_tokenizer_panics(tmp_path: Path) -> None:
    """All callers get an error of that text. The control is another text, before and afterwards."""
    write_panicking(tmp_path)
    program = tmp_path.with_name(f"{tmp_path.name}-server")
    # The lines that Rust prints about a panic are no log lines.
    program.write_text(f"""#!/bin/bash\nexec {COMMAND} "$@" 2> >(grep --line-buffered '^{{' >&2)\n""")
    program.chmod(0o755)
    with (
        real_server(tmp_path, "--http-port", "0", program=program) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        assert answers_for(server, channel, "a") == dict.fromkeys(ANSWERS, "OK")
        assert answers_for(server, channel, PANIC_TEXT) == ANSWERS
        assert answers_for(server, channel, "a") == dict.fromkeys(ANSWERS, "OK")


TOKENIZE = "/encserve.v1.EncoderService/Tokenize"
ANSWERS = {
    ENCODE: "INVALID_ARGUMENT",
    ENCODE_STREAM: "INVALID_ARGUMENT",
    TOKENIZE: "INVALID_ARGUMENT",
    MODEL_INFER: "INVALID_ARGUMENT",
    "/embed": "client error",
    "/tokenize": "client error",
}


def answers_for(server: RealServer, channel: grpc.Channel, text: str) -> dict[str, str]:
    """How a text is answered by each method."""
    request = encode_text(text)
    unary = {
        ENCODE: serialized(request),
        TOKENIZE: serialized(pb.TokenizeRequest(texts=[text])),
        MODEL_INFER: infer_text(text),
    }
    calls: dict[str, Any] = {}
    for path, data in unary.items():
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        calls[path] = call.future(data, timeout=ANSWER_SECONDS)
    message = serialized(pb.EncodeStreamRequest(request_id="a", request=request))
    stream_call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(ENCODE_STREAM)
    stream = stream_call(iter([message]), timeout=ANSWER_SECONDS)
    with ThreadPoolExecutor(2) as threads:
        fields = {"inputs": [text], "pooling": "mean"}
        posts = {
            "/embed": threads.submit(http_status, f"{server.url}/embed", fields),
            "/tokenize": threads.submit(http_status, f"{server.url}/tokenize", {"inputs": [text]}),
        }
    kinds = {0: "none", 2: "OK", 4: "client error", 5: "server error"}
    return {
        **{path: call.code().name for path, call in calls.items()},
        ENCODE_STREAM: stream_answer(stream),
        **{path: kinds[status.result() // 100] for path, status in posts.items()},
    }


def stream_answer(stream: Any) -> str:
    """The code of a stream's first answer, or of the stream if it has no answer."""
    try:
        answer = pb.EncodeStreamResponse.FromString(next(stream))
    except grpc.RpcError:
        return str(stream.code().name)
    codes = {code.value[0]: code.name for code in grpc.StatusCode}
    return codes[answer.error.code]


# A batch takes about 30 ms, which both phases wait for: they have the same load.
STEPS_PER_RUN, WAITING = 120, 65_536


def test_health_with_a_full_queue(tmp_path: Path) -> None:
    """65,536 one-token inputs wait. The control is the same load with 256 waiting; both three times, in turns.

    The least of three is what the server does, and not the rest of the machine.
    """
    write_slow(tmp_path, STEPS_PER_RUN)
    flags = ("--parallel-batches", "1", "--intra-op-threads", "1", "--max-queue-tokens", "100000")
    request = encode([[1]] * 256, [pb.OutputSpec(kind=MEAN)])
    phases: dict[int, list[Phase]] = {256: [], WAITING: []}
    with hostile_server(tmp_path, *flags) as server, watching(server, BUDGET_MIB) as watch:
        for count in [*phases] * 3:
            wait_for_metric(server, QUEUED, 0)
            with attack(ask_grpc, server.target, ENCODE, [request], count // 256 + 1):  # one of them is in the batch
                wait_for_metric(server, QUEUED, count, 512)
                with watch.phase(f"{count} waiting") as phase:
                    time.sleep(3)
                wait_for_metric(server, QUEUED, count, 512)
            phases[count].append(phase)
    few, many = ([phase.health for phase in phases[count]] for count in (256, WAITING))
    assert not any(health.answers for health in few + many), (few, many)
    assert min(it.p99_ms for it in many) <= min(it.p99_ms for it in few) + 10, (few, many)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_largest_requests_without_a_key(tmp_path: Path, protocol: str) -> None:
    """They are refused unread. The control is as many callers with small ones, and without a key too."""
    write_words(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with hostile_server(tmp_path, "--api-key-file", str(keys)) as server:
        outcome = measure(server, without_a_key(server, protocol, 1), without_a_key(server, protocol, 2**21 - 2**12))
        outcome.check()
        assert outcome.report
        assert set(outcome.report) <= {"UNAUTHENTICATED UNAUTHENTICATED", "401", "connections ended"}


def without_a_key(server: RealServer, protocol: str, words: int) -> Driver:
    """Four callers whose texts have so many words."""
    text = "a " * words
    if protocol == "http":
        return ask_http, server.http_port, post("/embed", {"inputs": text}), 4
    return ask_grpc, server.target, ENCODE, [serialized(encode_text(text))], 4
