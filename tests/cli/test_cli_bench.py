"""Tests of `encserve bench` and its load generator.

The server is either a real server with a tiny model or a fake server.
"""

import asyncio
import json
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from click.testing import CliRunner, Result
from fake_encoder import FakeEncoder, Refused
from real_server import RealServer, real_server
from tiny_bundle import LONGEST, write_bundle

from encserve_cli.commands import cli
from encserve_cli.load import Call, LoadResult, Request, closed_loop, make_calls, open_loop
from encserve_cli.load.crew import _listen
from encserve_client import EncoderClient, ServerUnavailableError
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_proto.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server

DOCS = Path(__file__).parent.parent.parent / "docs/bench.md"
# Duration of one load in seconds. It is long enough for some calls, even on a busy machine. The load starts when all
# load generators have connected.
SECONDS = 1.0
ONE = Request()
SHORT: dict[str, Any] = {"seconds": SECONDS, "warmup_seconds": 0.1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A real server. Its queue takes at most two sequences of the model's maximum length."""
    models = tmp_path_factory.mktemp("models")
    write_bundle(models)
    with real_server(models, "--max-queue-tokens", str(2 * LONGEST)) as server:
        yield server


def calls(target: str, lengths: list[int], request: Request = ONE) -> list[Call]:
    with EncoderClient(target) as client:
        return make_calls(lengths, client.model(), request)


def metrics(server: RealServer) -> str:
    return f"http://127.0.0.1:{server.metrics_port}/metrics"


def bench(server: RealServer, *arguments: str) -> Result:
    command = ["--target", server.target, "bench", "--seconds", str(SECONDS), "--warmup-seconds", "0.1", *arguments]
    return CliRunner().invoke(cli, command, env={"COLUMNS": "80"})


def computed(server: RealServer) -> tuple[float, float]:
    """Return the numbers of sequences and tokens that the server has computed since its start.

    No call may be running.
    """
    return server.metric("encserve_batch_sequences_sum"), server.metric("encserve_tokens_total")


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
def test_closed_loop(server: RealServer, stream: bool) -> None:
    """Two processes generate the load. The result is the sum of both, and agrees with the server's metrics."""
    work = calls(server.target, [3, 5], Request(sequences_per_call=2))
    before = computed(server)
    result = closed_loop(
        server.target, work, concurrency=3, stream=stream, processes=2, metrics_url=metrics(server), **SHORT
    )
    assert (result.mode, result.concurrency, result.processes, result.stream) == ("closed", 3, 2, stream)
    assert (result.errors, result.interrupted, result.server_missing) == ({}, False, "")
    assert result.calls > 0
    assert (result.sequences, result.tokens) == (2 * result.calls, 8 * result.calls)
    assert len(result.latency_seconds) == result.calls
    assert (result.latency_seconds > 0).all()
    assert result.seconds == pytest.approx(SECONDS)
    sequences, tokens = (after - earlier for after, earlier in zip(computed(server), before, strict=True))
    assert tokens == 4 * sequences >= result.tokens
    assert result.server is not None
    # A batch may end while the server writes its metrics page. The figures on one page may then differ slightly.
    assert 0 < result.server.sequences <= sequences
    assert 0 < result.server.tokens <= tokens
    assert result.server.compute_seconds


@pytest.mark.system
def test_open_loop(server: RealServer) -> None:
    """At a rate that the server can sustain, each call gets a reply and has a latency."""
    work = calls(server.target, [3] * 10, Request(pooling="mean", dtype="float16"))
    result = open_loop(server.target, work, rate_per_second=40, seed=1, **SHORT)
    assert (result.mode, result.rate_per_second, result.errors) == ("open", 40, {})
    assert len(result.latency_seconds) == len(result.lateness_seconds) + result.held_calls > 0
    assert (result.server, result.server_missing) == (None, "no metrics page was named")


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_counted(server: RealServer, stream: bool) -> None:
    """The load exceeds the server's queue. The result counts the refused calls by their reason.

    `calls` and `latency_seconds` of the result do not include refused calls.
    """
    work = calls(server.target, [LONGEST] * 2, Request(sequences_per_call=2))
    result = closed_loop(server.target, work, concurrency=16, stream=stream, metrics_url=metrics(server), **SHORT)
    assert list(result.errors) == ["RESOURCE_EXHAUSTED QUEUE_FULL"]
    assert "128 tokens" in result.error_examples["RESOURCE_EXHAUSTED QUEUE_FULL"]
    assert len(result.latency_seconds) == result.calls > 0
    assert result.server is not None
    assert result.server.refused["QUEUE_FULL"] > 0


async def test_too_many_calls_out(service: FakeEncoder) -> None:
    """With `max_outstanding=1`, no second call is sent while the first call waits for its reply.

    The calls that were due in this time count as NOT_SENT.
    """
    answering = asyncio.Event()

    async def hang(request: pb.EncodeRequest) -> None:
        await answering.wait()

    service.before = hang
    work = await asyncio.to_thread(calls, service.target, [3])
    loop = asyncio.get_running_loop()

    def answer_at_the_end(share: float) -> None:
        if share >= 1:
            loop.call_soon_threadsafe(answering.set)

    load: dict[str, Any] = {"rate_per_second": 200, "max_outstanding": 1, "seconds": 0.3, "warmup_seconds": 0}
    result = await asyncio.to_thread(open_loop, service.target, work, **load, on_progress=answer_at_the_end)
    assert result.errors.keys() == {"NOT_SENT"}
    assert result.held_calls == result.errors["NOT_SENT"] > 0
    assert len(service.requests) == 1


@pytest.mark.system
async def test_a_wrong_answer_is_noticed(service: FakeEncoder, tmp_path: Path) -> None:
    """The server replies with one token too many. The command names the wrong length and exits with status 1."""

    async def shorter(request: pb.EncodeRequest) -> pb.EncodeResponse:
        request.inputs[0].token_ids.ids.append(3)
        return service.answer(request)

    service.before = shorter
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[3]")
    # With --rate, a reply after the end of the load still counts. Even on a slow machine, the result then has calls.
    arguments = ["--rate", "20", "--lengths", str(lengths), "--seconds", str(SECONDS), "--warmup-seconds", "0"]
    printed = await asyncio.to_thread(CliRunner().invoke, cli, ["--target", service.target, "bench", *arguments])
    assert printed.exit_code == 1
    assert "x WRONG_ANSWER: the sequences have (4,) tokens; wanted (3,)" in " ".join(printed.stdout.split())


@pytest.mark.system
async def test_several_servers_take_turns(service: FakeEncoder) -> None:
    other = FakeEncoder()
    await other.start()
    target = f"ipv4:{service.target},{other.target}"
    work = await asyncio.to_thread(calls, target, [3])
    result = await asyncio.to_thread(closed_loop, target, work, concurrency=2, **SHORT)
    await other.server.stop(None)
    assert result.errors == {}
    assert service.requests
    assert other.requests


@pytest.mark.system
async def test_a_server_that_fails(service: FakeEncoder) -> None:
    """After an error the load generator waits 10 ms before the next call.

    A failing server therefore does not get thousands of requests.
    """

    async def fail(request: pb.EncodeRequest) -> None:
        raise Refused(grpc.StatusCode.INTERNAL, "broken")

    service.before = fail
    work = await asyncio.to_thread(calls, service.target, [3])
    result = await asyncio.to_thread(closed_loop, service.target, work, concurrency=2, **SHORT)
    assert (list(result.errors), result.calls) == (["INTERNAL"], 0)
    assert result.latency_percentile_seconds(99) is None
    assert len(service.requests) <= 2 * (SECONDS + 0.1) / 0.01 + 2


@pytest.mark.system
def test_ctrl_c_keeps_what_was_measured(server: RealServer) -> None:
    def press(share: float) -> None:
        if share > 0.02:
            raise KeyboardInterrupt

    result = closed_loop(
        server.target, calls(server.target, [3]), concurrency=2, seconds=60, warmup_seconds=0, on_progress=press
    )
    assert result.interrupted
    assert 0 < result.seconds < 30
    assert result.calls > 0


def test_no_server() -> None:
    call = Call(b"", 1, 1, (1,), expected=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="calls must hold at least one call"):
        closed_loop("127.0.0.1:1", [], concurrency=1, **SHORT)
    with pytest.raises(ValueError, match="concurrency must be > 0; was 0"):
        closed_loop("127.0.0.1:1", [call], concurrency=0, **SHORT)
    with pytest.raises(ServerUnavailableError, match="127.0.0.1:1: no server answered within"):
        closed_loop("127.0.0.1:1", [call], concurrency=1, timeout_seconds=0.5, **SHORT)


def fields(value: Any, name: str = "") -> Iterator[str]:
    """Yield the path of each field of a JSON object, such as `runs[].calls`.

    The keys of `refused` are reasons, not fields.
    """
    if isinstance(value, dict) and not name.endswith(".refused"):
        for key, part in value.items():
            yield from fields(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and (name.endswith(".errors") or isinstance(next(iter(value), None), dict)):
        for part in value:
            yield from fields(part, f"{name}[]")
    else:
        yield name


@pytest.mark.system
def test_json(server: RealServer, tmp_path: Path) -> None:
    """The printed JSON has exactly the fields that docs/bench.md lists.

    --output-json also writes the printed JSON to a file.
    """
    lengths, out = tmp_path / "lengths.json", tmp_path / "out.json"
    lengths.write_text(json.dumps([LONGEST, LONGEST + 6]))
    load = ["--concurrency", "1", "--concurrency", "16", "--lengths", str(lengths), "--sequences-per-call", "2"]
    result = bench(server, *load, "--metrics-url", metrics(server), "--json", "--output-json", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    body = json.loads(result.stdout)
    assert json.loads(out.read_text()) == body
    documented = set(re.findall(r"^\| `([^`]+)`", DOCS.read_text(), flags=re.MULTILINE))
    assert set(fields(body)) == documented
    assert [run["concurrency"] for run in body["runs"]] == body["settings"]["concurrency"] == [1, 16]
    assert body["workload"]["cut_sequences"] * 2 == body["workload"]["sequences"]
    assert body["runs"][0]["latency_seconds"]["samples"] == body["runs"][0]["calls"] > 0
    assert "NaN" not in result.stdout


@pytest.mark.system
def test_tables(server: RealServer) -> None:
    """The tables are at most 80 columns wide.

    Notes below a table name truncated sequences, late calls and missing metrics.
    """
    load = ["--rate", "30", "--rate", "50", "--stream", "--pooling", "mean"]
    result = bench(server, *load, "--metrics-url", metrics(server))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if re.match(r" +(30|50) ", line)] == ["30", "50", "30", "50"]
    text = " ".join(result.stdout.split())
    assert f"EncodeStream, 1 sequence a call, pooling mean, float32, {SECONDS:g} s each" in text
    assert "sequences were cut to the model's longest, 64 tokens" in text
    assert "calls/s 30: the generator sent calls late by" in text
    elsewhere = bench(server, "--concurrency", "1", "--metrics-url", "http://127.0.0.1:1/metrics")
    assert "the server's own view is missing: http://127.0.0.1:1/metrics: " in " ".join(elsewhere.stdout.split())


@pytest.mark.system
async def test_texts(service: FakeEncoder, tmp_path: Path) -> None:
    """If the load sends texts, the token counts of the result come from the server's replies."""
    texts = tmp_path / "texts.txt"
    texts.write_text("one text\n\nand another one\n")
    command = ["bench", "--texts", str(texts), "--concurrency", "2", "--seconds", str(SECONDS), "--warmup-seconds", "0"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, ["--target", service.target, *command, "--json"])
    body = json.loads(result.stdout)
    [run] = body["runs"]
    assert (body["workload"]["kind"], body["workload"]["sequences"], run["errors"]) == ("texts", 2, [])
    assert 4 <= run["tokens"] / run["sequences"] <= 5
    assert service.requests[0].options.truncation == pb.TRUNCATION_END


@pytest.mark.system
async def test_vectors(service: FakeEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model takes vectors as input, the command sends vectors instead of token ids."""
    info = service.info()
    info.input_kind = pb.INPUT_KIND_EMBEDDINGS
    monkeypatch.setattr(service, "info", lambda: info)
    command = ["bench", "--concurrency", "2", "--seconds", str(SECONDS), "--warmup-seconds", "0.1", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, ["--target", service.target, *command])
    body = json.loads(result.stdout)
    assert (result.exit_code, body["workload"]["kind"], body["runs"][0]["errors"]) == (0, "embeddings", [])
    assert service.requests[0].inputs[0].HasField("embeddings")


@pytest.mark.system
async def test_encryption_and_a_key(service: FakeEncoder, tmp_path: Path) -> None:
    """The load generators are separate processes. They also use the CA file and the key from the command line."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = grpc.aio.server()
    add_EncoderServiceServicer_to_server(service, server)
    issued = authority.issue_cert("localhost")
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    command = ["--target", f"localhost:{port}", "--ca", str(tmp_path / "ca.pem"), "--api-key", "secret", "bench"]
    load = ["--concurrency", "1", "--seconds", str(SECONDS), "--warmup-seconds", "0.1", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, [*command, *load])
    await server.stop(None)
    assert (result.exit_code, json.loads(result.stdout)["runs"][0]["errors"]) == (0, [])
    assert service.metadata
    assert all(it["authorization"] == "Bearer secret" for it in service.metadata)
    assert "secret" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rate", "1", "--concurrency", "1"], "give either --concurrency or --rate"),
        (["--seconds", "601"], "601"),
        (["--sequences-per-call", "2049"], "sequences_per_call must be from 1 to 2048, the server's limit; was 2049"),
        (["--pooling", "model", "--texts", __file__], "has no tokenizer"),
    ],
)
def test_what_cannot_be_asked_for(server: RealServer, arguments: list[str], text: str) -> None:
    result = bench(server, *arguments)
    assert result.exit_code != 0
    assert text in result.stderr


def test_a_result_may_be_made_by_hand() -> None:
    """A script can build a `LoadResult` from a few fields. The result then computes rates and percentiles."""
    import numpy as np

    result = LoadResult(
        mode="closed",
        concurrency=1,
        rate_per_second=None,
        processes=1,
        stream=False,
        seconds=2.0,
        calls=4,
        sequences=8,
        tokens=80,
        latency_seconds=np.array([0.1, 0.2, 0.3, 0.4]),
        errors={},
    )
    assert (result.sequences_per_second, result.tokens_per_second) == (4.0, 40.0)
    assert result.latency_percentile_seconds(50) == pytest.approx(0.25)


@pytest.mark.system
@pytest.mark.parametrize("says_something", [True, False])
def test_a_parent_that_goes_when_all_is_done_is_no_news(says_something: bool) -> None:
    """A load generator process listens to its parent process. In this test, its event loop is already closed.

    `_listen` returns without an error if the parent then sends a message or disconnects.
    """
    loop = asyncio.new_event_loop()
    loop.close()
    near, far = multiprocessing.Pipe()
    if says_something:
        near.send(1.0)
    near.close()
    _listen(far, loop, asyncio.Queue())
