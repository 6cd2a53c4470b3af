"""No output of the server or the client contains a part of a key.

The tests put keys into headers, URLs, flags and files, in valid and invalid forms.
"""

import base64
import contextlib
import json
import logging
import os
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_server import SERVICE, make_input
from open_inference import infer_request, text_tensor
from otlp_receiver import OtlpReceiver, otlp_receiver
from real_server import COMMAND, RealServer, real_server
from tiny_bundle import write_bundle
from tiny_heads import words

from encserve_client import AccessDeniedError, EncoderClient, EncserveError, RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.callers.keys import digest_of, make_key

ENCODE = pb.EncodeRequest(inputs=[make_input("w3 w4")]).SerializeToString()
STREAM = pb.EncodeStreamRequest(request_id="1", request=pb.EncodeRequest.FromString(ENCODE)).SerializeToString()
INFER = "inference.GRPCInferenceService"
# The tests fail if an output contains this many consecutive characters of a key.
PART = 10


def headers_of(key: str) -> Iterator[tuple[str, str]]:
    """Yield headers that contain the key, in valid and invalid forms."""
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    for scheme in ("Bearer ", "bearer ", "Basic ", "Token ", "ApiKey ", ""):
        yield "authorization", scheme + key
    yield "authorization", f"Basic {basic}"
    for name in (
        "api-key",
        "x-api-key",
        "x-goog-api-key",
        "proxy-authorization",
        "cookie",
        "x-auth-token",
        "user-agent",
    ):
        yield name, key
    yield "x-gateway-inference-fairness-id", key
    yield "api-key", f"{key}, {key}"


def parts_of(key: str) -> list[str]:
    """Return all parts of PART characters of the key, of its digest, and of its form in HTTP's Basic scheme."""
    random = key.removeprefix("encserve-")
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    digests = [digest_of(key).hex(), base64.b64encode(digest_of(key)).decode()]
    return [it[i : i + PART] for it in (random, *digests, basic[20:]) for i in range(len(it) - PART)]


class Outputs:
    """The outputs of server and client. The keys of `texts` are the sources of outputs, for example "the log"."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}

    def add(self, source: str, *values: object) -> None:
        self.texts.setdefault(source, []).extend(map(str, values))

    def with_any(self, parts: list[str]) -> list[str]:
        return [
            f"{source}: {text[:2000]}"
            for source, texts in self.texts.items()
            for text in texts
            if any(part in text for part in parts)
        ]


def call_grpc(server: RealServer, outputs: Outputs, key: str) -> None:
    infer = infer_request(text=text_tensor("w3 w4")).SerializeToString()
    unary = [(f"{SERVICE}/{it}", data) for it in ("Encode", "Tokenize", "Inspect") for data in (ENCODE, b"\xff")]
    unary += [(f"{SERVICE}/Nothing", b""), (f"{SERVICE}/GetModel", b""), (f"{INFER}/ModelInfer", infer)]
    unary += [("grpc.health.v1.Health/Check", b"\xff")]
    streams = [(f"{SERVICE}/EncodeStream", STREAM), (f"{INFER}/ModelStreamInfer", infer)]
    with grpc.insecure_channel(server.target) as channel:
        for header in (*headers_of(key), ("api-key-bin", key.encode())):
            for method, data in unary:
                rpc: Any = channel.unary_unary(f"/{method}")
                try:
                    rpc(data, metadata=(header,), timeout=20)
                except grpc.RpcError as error:
                    outputs.add("gRPC's error", repr(error), error.trailing_metadata())
            for method, data in streams:
                stream: Any = channel.stream_stream(f"/{method}")
                try:
                    list(stream(iter([data, b"\xff"]), metadata=(header,), timeout=20))
                except grpc.RpcError as error:
                    outputs.add("gRPC's error", repr(error), error.trailing_metadata())


def call_http(server: RealServer, outputs: Outputs, key: str) -> None:
    body = {"input": "w3 w4", "model": "tiny"}
    paths = ("/v1/embeddings", "/embed", "/v2/embed", "/v2/models/tiny/infer", "/v1/models", "/nowhere", "/health")
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for name, value in headers_of(key):
            for path in paths:
                for send in ({"json": body}, {"content": b"{no JSON"}, {"content": b""}):
                    answer = client.post(path, headers={name: value}, params={"api_key": key, "key": key}, **send)
                    outputs.add(f"HTTP's answer to {path}", answer.status_code, answer.headers, answer.text)
    with httpx.Client(base_url=f"http://user:{key}@127.0.0.1:{server.metrics_port}", trust_env=False) as client:
        for name, value in headers_of(key):
            for path in ("/metrics", "/healthz", "/nowhere"):
                answer = client.get(path, headers={name: value}, params={"api_key": key})
                outputs.add(f"the metrics page, {path}", answer.headers, answer.text)


def send_invalid_heads(server: RealServer, key: str) -> None:
    """Send invalid requests with a key to every port: not HTTP, too large, or with an incomplete body."""
    heads = [
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\napi-key: {key}\x00\r\n\r\n",
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization Bearer {key}\r\n\r\n",
        f"POST /v1/embeddings?key={key} HTTP/9.9\r\nauthorization: Bearer {key}\r\n\r\n",
        f"{key} / HTTP/1.1\r\n\r\n",
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{'a: b' * 3000}\r\n\r\n",
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {key}\r\n\r\n",
        f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 100\r\n\r\n" + "{",
        f"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{key}",
    ]
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        for head in heads:
            with socket.create_connection(("127.0.0.1", port or 0)) as connection:
                connection.settimeout(0.2)
                connection.sendall(head.encode())
                with contextlib.suppress(OSError):
                    connection.recv(65536)  # the reply is not checked, because it may quote the request


def call_ours(server: RealServer, outputs: Outputs, key: str, *, is_right: bool) -> None:
    """Call the server with `EncoderClient` and with `encserve`. Collect the outputs of the client and the command."""
    with EncoderClient(server.target, api_key=key, retry=RetryPolicy(max_attempts=1)) as client:
        outputs.add("our client", repr(client), vars(client).keys())
        if is_right:
            client.embed(["w3 w4"])
        else:
            with pytest.raises(AccessDeniedError) as refused:
                client.embed(["w3 w4"])
            outputs.add("our client", repr(refused.value), refused.value, vars(refused.value))
        with pytest.raises(EncserveError) as wrong:
            client.embed([[999_999]])
        outputs.add("our client", repr(wrong.value), vars(wrong.value))
    flag, variable = ("--api-key", key), {"ENCSERVE_API_KEY": key}
    for given, environment, command in (
        (flag, {}, ("models",)),
        (flag, {}, ("embed", "--ids", "no")),
        ((), variable, ("embed", "w3 w4")),
        ((), variable, ("bench", "--json", "--seconds", "1")),
    ):
        done = subprocess.run(
            [COMMAND.parent / "encserve", "--target", server.target, *given, *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | environment,
        )
        outputs.add(f"the command {command}", done.returncode, done.stdout, done.stderr)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "models", tokenizer=words())
    return tmp_path / "models"


@contextlib.contextmanager
def server_with_all_logs(
    repository: Path, receiver: OtlpReceiver, keys: str, *flags: str
) -> Iterator[tuple[RealServer, Path]]:
    """Run a server with all logs and traces enabled.

    `keys` is empty, or a shell line that exports the server's key as an environment variable.

    Yields:
        The server, and the file with its standard output.
    """
    program, output = repository.parent / "encserve-server", repository.parent / "output"
    program.write_text(f'#!/bin/sh\n{keys}\nexec "{COMMAND}" "$@" > "{output}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    log_flags = ("--http-port", "0", "--log-level", "debug", "--access-log", "--trace-endpoint", receiver.endpoint)
    with real_server(repository, *log_flags, *flags, program=program) as server:
        yield server, output


@pytest.mark.parametrize("has_file", [True, False])
def test_no_output_reveals_a_key(repository: Path, has_file: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Call a server in many ways with the right key and a wrong key. No output contains a part of a key.

    The server reads its key from the file of `--callers` or from an environment variable. The test later replaces
    the file twice: by an invalid file that contains a key, and by a valid file.
    """
    caplog.set_level(logging.DEBUG)
    right, wrong = make_key(), make_key()
    outputs, file = Outputs(), repository.parent / "callers.toml"
    entry = f'[[caller]]\nname = "search"\nkey_sha256 = ["{digest_of(right).hex()}"]\n'
    file.write_text(entry)
    flags = ("--callers", str(file)) if has_file else ()
    variable = "" if has_file else f"export ENCSERVE_API_KEY={right}"
    with otlp_receiver() as receiver, server_with_all_logs(repository, receiver, variable, *flags) as (server, output):
        for key in (right, wrong):
            call_grpc(server, outputs, key)
            call_http(server, outputs, key)
            send_invalid_heads(server, key)
            call_ours(server, outputs, key, is_right=key == right)
        if has_file:
            for text, outcome in ((f'{entry}{wrong} = "b"', "refused"), (entry.replace("search", "b"), "loaded")):
                file.write_text(text)
                ends_at = time.monotonic() + 20
                while not server.metric("encserve_callers_reads_total", outcome=outcome):
                    assert time.monotonic() < ends_at
        with httpx.Client(trust_env=False) as client:
            outputs.add("the metrics", client.get(f"http://127.0.0.1:{server.metrics_port}/metrics").text)
        outputs.add("the command line", Path(f"/proc/{server.process.pid}/cmdline").read_text())
        server.terminate()
        assert server.wait() == 0
        outputs.add("the log", *map(json.dumps, server.log))
        outputs.add("the access log", output.read_text())
        assert output.read_text().count("\n") > 300
        spans = receiver.wait_for(lambda spans: len(spans) > 300)
        outputs.add("traces", *(f"{it.name} {it.attributes} {it.resource} {it.trace_state}" for it in spans))
    outputs.add(
        "the client's log", *(it.getMessage() for it in caplog.records if it.name.startswith(("encserve", "grpc")))
    )
    assert not outputs.with_any([part for key in (right, wrong) for part in parts_of(key)])
