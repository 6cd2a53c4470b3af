"""Tests of the lines that `encserve serve` prints: addresses, and a command that a person can run unchanged."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_heads
from fake_server import FakeServer, StartServer
from tiny_heads import Serve, multi_vector, sparse

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server import greeting as greeting_module
from encserve_server.greeting import greeting

HTTP = {"http_port": 0}
NO_POOLING = {"pooling": manifest_pb2.POOLING_UNSPECIFIED}
KINDS: dict[str, tuple[dict[str, bytes], dict[str, Any], str]] = {
    "pooled": ({}, {}, "/v1/embeddings"),
    "tokens": ({}, NO_POOLING, "/embed_all"),
    "sparse": ({"sparse.onnx": tiny_heads.sparse_file("max")}, {"sparse": sparse(), **NO_POOLING}, "/embed_sparse"),
    "multi-vector": (
        {"multi_vector.onnx": tiny_heads.multi_vector_file()},
        {"multi_vector": multi_vector(), **NO_POOLING},
        "/pooling",
    ),
    "cross-encoder": (
        {"scores.onnx": tiny_heads.scores_file()},
        {"scores": tiny_heads.scores(), **NO_POOLING},
        "/rerank",
    ),
    "classifier": (
        {"scores.onnx": tiny_heads.scores_file(3)},
        {"scores": tiny_heads.scores(labels=["bad", "fair", "good"]), **NO_POOLING},
        "/classify",
    ),
}


def lines_of(server: FakeServer, **settings: Any) -> list[str]:
    app = server.app
    return greeting(
        dataclasses.replace(app.settings, **settings),
        app.catalog.all(),
        grpc_port=app.grpc_port,
        http_port=app.http_port,
        metrics_port=app.metrics_port,
    )


def command_of(lines: list[str]) -> list[str]:
    return shlex.split(lines[lines.index("Try it:") + 1])


@pytest.mark.parametrize("kind", KINDS)
async def test_the_curl_line_works_for_each_kind_of_model(serve: Serve, kind: str) -> None:
    files, parts, route = KINDS[kind]
    lines = lines_of(await serve(files, HTTP, **parts))
    program, url, flag, body = command_of(lines)
    assert (program, flag) == ("curl", "-d")
    assert url.endswith(route)
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.post(url, content=body)
    assert reply.status_code == 200, reply.text
    assert lines[0] == "Serving tiny"


async def test_the_curl_line_has_ids_for_a_model_without_a_tokenizer(start_server: StartServer) -> None:
    lines = lines_of(await start_server(with_tokenizer=False, **HTTP))
    _, url, _, body = command_of(lines)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.post(url, content=body)).status_code == 200


async def test_without_http_the_command_is_encserve(start_server: StartServer) -> None:
    server = await start_server()
    lines = lines_of(server)
    assert command_of(lines) == ["encserve", "embed", "one text", "--target", f"127.0.0.1:{server.app.grpc_port}"]
    assert not any(line.strip().startswith("HTTP") for line in lines)


async def test_keys_and_certificates_are_in_the_command(start_server: StartServer) -> None:
    """The command reads the key from an environment variable. The key itself is not printed."""
    server = await start_server(**HTTP)
    files = {"tls_cert_file": Path("server.pem"), "tls_key_file": Path("server.key")}
    lines = lines_of(server, api_key="a-secret-key-of-16", host="0.0.0.0", **files)  # noqa: S104
    command = command_of(lines)
    assert command[1].startswith("https://127.0.0.1:")
    assert command[2:6] == ["--cacert", "server.pem", "-H", "authorization: Bearer $ENCSERVE_API_KEY"]
    assert "a-secret-key-of-16" not in "\n".join(lines)


async def test_a_faster_setting_is_named_on_a_cpu_with_bfloat16(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve({}, HTTP)
    for features, is_named in (("avx2 avx512_bf16", True), ("avx2 amx_bf16", True), ("avx2", False)):
        monkeypatch.setattr(greeting_module, "cpu_features", lambda features=features: features)
        assert any("--engine openvino --precision bfloat16" in line for line in lines_of(server)) == is_named
