"""Tests of `encserve bench`. The server is either a real server with a tiny model or a fake server.

The fake server runs in the test's event loop. So the command runs in a separate process.
"""

import asyncio
import json
import re
import signal
import sys
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
from tiny_heads import words
from waiting import until

from encserve_cli.commands import cli
from encserve_cli.load import generator
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_proto.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server

DOCS = Path(__file__).parent.parent.parent / "docs/how-to/load-test.md"
SECONDS = 1.0  # the duration of a load, which is long enough for some calls on a busy machine
SHORT = ("--seconds", str(SECONDS), "--warmup-seconds", "0.1")

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A real server. Its queue takes at most two sequences of the model's maximum length."""
    models = tmp_path_factory.mktemp("models")
    write_bundle(models, tokenizer=words())
    with real_server(models, "--max-queue-tokens", str(2 * LONGEST)) as server:
        yield server


def bench(server: RealServer, *arguments: object, status: int = 0) -> Result:
    """Run the command in this process, and check the exit status."""
    result = CliRunner().invoke(cli, ["--target", server.target, "bench", *SHORT, *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


async def start(*arguments: object) -> asyncio.subprocess.Process:
    """Start the command `encserve` in a process."""
    pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "encserve_cli", *map(str, arguments), **pipes)


async def run(service: FakeEncoder, *arguments: object, status: int = 0) -> Any:
    """Run `encserve bench` against a fake server. Check the exit status, and return the JSON."""
    process = await start("--target", service.target, "bench", *SHORT, "--json", *arguments)
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (status, b"")
    return json.loads(output)


def lengths_file(folder: Path, *lengths: int) -> Path:
    (folder / "lengths.json").write_text(json.dumps(lengths))
    return folder / "lengths.json"


def fields(value: Any, name: str = "") -> Iterator[str]:
    """Yield the path of each field of a JSON object, such as `runs[].calls`."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from fields(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for part in value:
            yield from fields(part, f"{name}[]")
    else:
        yield name


def test_json(server: RealServer, tmp_path: Path) -> None:
    """docs/how-to/load-test.md lists exactly the fields of the JSON output.

    16 callers send more than the server's queue can hold. The output counts refused calls by reason. The latencies do
    not include refused calls.
    """
    before = server.metric("encserve_tokens_total")
    load = ("--concurrency", 1, "--concurrency", 16, "--lengths", lengths_file(tmp_path, LONGEST, LONGEST + 6))
    result = bench(server, *load, "--sequences-per-call", 2, "--json")
    assert result.stderr == ""
    assert "NaN" not in result.stdout
    body = json.loads(result.stdout)
    documented = set(re.findall(r"^\| `([^`]+)`", DOCS.read_text(), flags=re.MULTILINE))
    assert set(fields(body)) == documented
    workload = {name: body["workload"][name] for name in ("kind", "mean_tokens", "longest_tokens", "cut_sequences")}
    assert workload == {"kind": "token_ids", "mean_tokens": LONGEST, "longest_tokens": LONGEST, "cut_sequences": 2048}
    one, many = body["runs"]
    for run, callers in ((one, 1), (many, 16)):
        assert (run["concurrency"], run["rate_per_second"], run["interrupted"]) == (callers, None, False)
        assert run["seconds"] == pytest.approx(SECONDS)
        assert run["latency_seconds"]["samples"] == run["calls"] > 0
        assert (run["sequences"], run["tokens"]) == (2 * run["calls"], 2 * LONGEST * run["calls"])
        assert run["tokens_per_second"] == pytest.approx(run["tokens"] / run["seconds"])
    assert one["errors"] == []
    [error] = many["errors"]
    assert (error["status"], error["count"] > 0) == ("RESOURCE_EXHAUSTED QUEUE_FULL", True)
    assert "128 tokens" in error["example"]
    # The server's count includes calls of the warm-up, and calls that ended after the measured time.
    assert one["tokens"] + many["tokens"] <= server.metric("encserve_tokens_total") - before


def test_table(server: RealServer) -> None:
    """The table has a row for each load. A note below the table says by how many ms the generator sent calls late."""
    result = bench(server, "--concurrency", 1, "--rate", 30, "--rate", 50, "--pooling", "mean", "--dtype", "float16")
    assert result.stderr == ""
    text = result.stdout
    header, *rows = (line for line in text.splitlines() if re.search(r" +\d+$| errors$", line))
    assert header.split() == ["calls/s", "seq/s", "tokens/s", "p50", "p90", "p99", "p99.9", "errors"]
    assert [re.split(r"  +", row)[0] for row in rows] == ["1 caller", "30 calls/s", "50 calls/s"]
    assert {len(line) for line in (header, *rows)} == {78}
    assert "random ids, lengths of real English texts: " in text
    assert f"sequences were cut to {LONGEST} tokens\n1 sequence a call, mean pooling, float16\n" in text
    assert re.search(r"^50 calls/s: the load generator sent calls late, by [\d.]+ ms \(p99\)", text, re.MULTILINE)


def test_texts(server: RealServer, tmp_path: Path) -> None:
    """The server cuts long texts to the model's limit. The tokens of the report are the tokens after the cut."""
    texts = tmp_path / "texts.txt"
    texts.write_text("w3 w4\n\n" + "w5 " * 100 + "\n")
    body = json.loads(bench(server, "--texts", texts, "--rate", 20, "--sequences-per-call", 2, "--json").stdout)
    workload, [run] = body["workload"], body["runs"]
    assert (workload["kind"], workload["longest_tokens"], workload["cut_sequences"]) == ("texts", LONGEST, 1)
    assert (run["errors"], run["tokens"]) == ([], (4 + LONGEST) * run["calls"])
    assert run["lateness_seconds"]["max"] >= run["lateness_seconds"]["p99"] > 0


async def test_only_a_line_feed_ends_a_text(service: FakeEncoder, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.write_bytes("\ufeffone\x0ctwo\x85three\u2028four\r\n".encode())
    await run(service, "--texts", texts, "--concurrency", 1)
    assert {it.text for request in service.requests for it in request.inputs} == {"one\x0ctwo\x85three\u2028four"}


def test_calls_that_are_not_sent_in_time_are_errors(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "GRACE_SECONDS", -60)  # the deadline for sending has passed before the first call
    body = json.loads(bench(server, "--rate", 100, "--json", status=1).stdout)
    [run] = body["runs"]
    [error] = run["errors"]
    assert (error["status"], error["count"] > 0, run["calls"]) == ("NOT_SENT", True, 0)
    assert (run["latency_seconds"]["samples"], run["lateness_seconds"]["max"]) == (0, None)


async def test_vectors(service: FakeEncoder) -> None:
    """If the model takes vectors as input, the command sends vectors instead of token ids."""
    service.model_info = pb.ModelInfo(input_kind=pb.INPUT_KIND_EMBEDDINGS)
    body = await run(service, "--concurrency", 2)
    assert (body["workload"]["kind"], body["runs"][0]["errors"]) == ("embeddings", [])
    assert service.requests[0].inputs[0].HasField("embeddings")


async def test_a_server_that_fails(service: FakeEncoder) -> None:
    """After an error a caller waits 10 ms, so a failing server does not get thousands of requests.

    If no call succeeds, the exit status is 1.
    """

    async def fail(request: pb.EncodeRequest) -> None:
        raise Refused(grpc.StatusCode.INTERNAL, "broken")

    service.before = fail
    [found] = (await run(service, "--concurrency", 2, status=1))["runs"]
    assert ([error["status"] for error in found["errors"]], found["calls"]) == (["INTERNAL"], 0)
    assert found["latency_seconds"]["p99"] is None
    assert len(service.requests) <= 2 * (SECONDS + 0.1) / 0.01 + 2


async def test_encryption_a_key_and_metadata(service: FakeEncoder, tmp_path: Path) -> None:
    """All calls use the connection options that precede the command's name."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = grpc.aio.server()
    add_EncoderServiceServicer_to_server(service, server)
    issued = authority.issue_cert("localhost")
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    options = ("--ca", tmp_path / "ca.pem", "--api-key", "secret", "--metadata", "x-team=search")
    process = await start("--target", f"localhost:{port}", *options, "bench", *SHORT, "--json")
    output, errors = await process.communicate()
    await server.stop(None)
    assert (process.returncode, errors, json.loads(output)["runs"][0]["errors"]) == (0, b"", [])
    assert service.metadata
    assert all((it["authorization"], it["x-team"]) == ("Bearer secret", "search") for it in service.metadata)
    assert b"secret" not in output


async def test_ctrl_c_ends_the_load_at_once(service: FakeEncoder) -> None:
    """Three calls get replies, and all other calls hang. The report has the three calls and no errors."""

    async def hang(request: pb.EncodeRequest) -> None:
        if len(service.requests) > 3:
            await asyncio.Event().wait()

    service.before = hang
    options = ("--concurrency", 2, "--concurrency", 8, "--seconds", 200, "--warmup-seconds", 0, "--json")
    process = await start("--target", service.target, "--timeout", 400, "bench", *options)
    await until(lambda: len(service.requests) == 5)
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    [found] = json.loads(output)["runs"]
    assert (found["interrupted"], found["calls"], found["errors"]) == (True, 3, [])
    assert 0 < found["seconds"] < 200
    await until(lambda: service.n_cancelled == 2)


async def test_ctrl_c_in_the_warm_up(service: FakeEncoder) -> None:
    process = await start("--target", service.target, "bench", "--concurrency", 2, "--warmup-seconds", 60)
    await until(lambda: service.requests)
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (1, b"")
    assert output.decode().endswith("\n2 callers: stopped after 0.0 s\n")


async def test_ctrl_c_before_the_load() -> None:
    """The server accepts the connection and does not reply. Ctrl-C ends the command without a traceback."""
    accepted = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    process = await start("--target", f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "bench")
    await accepted.wait()
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    server.close()
    assert (process.returncode, output, errors) == (130, b"", b"stopped\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seconds", "601"], "601"),
        (["--sequences-per-call", "2049"], "--sequences-per-call must be from 1 to 2048, the server's limit; was 2049"),
        (["--lengths", __file__, "--texts", __file__], "--lengths and --texts do not go together"),
        (["--lengths", __file__], f"{__file__}: "),
        (["--model", "other"], "other"),
    ],
)
def test_wrong_options(server: RealServer, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(cli, ["--target", server.target, "bench", *arguments])
    assert result.exit_code != 0
    assert text in result.stderr


def test_blank_texts_or_a_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    texts = tmp_path / "texts.txt"
    with real_server(tmp_path) as server:
        for content, message in ((" \n", "at least one line that is not blank"), ("a\n", "no tokenizer")):
            texts.write_text(content)
            assert message in bench(server, "--texts", texts, status=1).stderr
