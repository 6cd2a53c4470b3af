"""Tests deploy/envoy/envoy-tls.yaml in a real Envoy.

Callers use TLS, and send tokens to Envoy. Envoy sends a key to the server.
"""

import contextlib
import hashlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import certificates
import grpc
import httpx
import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from fake_server import FakeServer, start_fake_server
from ports import free_port
from real_envoy import envoy_process

from encserve_client import AccessDeniedError, AsyncEncoderClient, Tls

CONFIG = Path(__file__).parent.parent.parent / "deploy/envoy/envoy-tls.yaml"
PROXY_KEY = "encserve-proxy-key"
CALLERS = f"""
[[caller]]
name = "proxy"
key_sha256 = ["{hashlib.sha256(PROXY_KEY.encode()).hexdigest()}"]
proxy = true
"""


class Provider:
    """An identity provider that signs JSON Web Tokens."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def keys(self) -> str:
        """Return the JSON Web Key Set. Envoy verifies tokens with these keys."""
        key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        return json.dumps({"keys": [{**key, "alg": "RS256", "use": "sig"}]})

    def token(self, name: str, *, audience: str = "encserve", seconds: float = 60) -> str:
        claims = {"iss": "https://issuer.example", "aud": audience, "sub": name, "exp": time.time() + seconds}
        return jwt.encode(claims, self._key, "RS256")


class Deployment:
    """A server behind Envoy, and an HTTP client that calls Envoy. The server's fake engine runs no model."""

    def __init__(self, server: FakeServer, provider: Provider, ca: Path, grpc_port: int, http_port: int) -> None:
        self.server = server
        self.provider = provider
        self.ca = ca
        self.target = f"localhost:{grpc_port}"
        self.http = httpx.AsyncClient(
            base_url=f"https://localhost:{http_port}", verify=ssl.create_default_context(cafile=ca), trust_env=False
        )

    async def post(self, token: str | None, **headers: str) -> httpx.Response:
        given = headers if token is None else {"authorization": f"Bearer {token}", **headers}
        body = {"model": "tiny", "input": "hello"}
        return await self.http.post("/v1/embeddings", json=body, headers=given)


def running_envoy(
    folder: Path, server: FakeServer, grpc_port: int, http_port: int
) -> contextlib.AbstractContextManager[Any]:
    text = CONFIG.read_text().replace("/etc/encserve/", f"{folder}/")
    config = yaml.safe_load(text)
    config["admin"]["address"]["socket_address"]["port_value"] = free_port()
    for listener, port in zip(config["static_resources"]["listeners"], (grpc_port, http_port), strict=True):
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    ports = server.app.grpc_port, server.app.http_port or 0
    for cluster, port in zip(config["static_resources"]["clusters"], ports, strict=True):
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    return envoy_process(folder, config)


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    made, provider = certificates.make_certificates(tmp_path), Provider()
    (tmp_path / "tls.crt").write_bytes(made.server.cert.read_bytes())
    (tmp_path / "tls.key").write_bytes(made.server.key.read_bytes())
    (tmp_path / "server-key").write_text(PROXY_KEY)
    (tmp_path / "jwks.json").write_text(provider.keys())
    (tmp_path / "callers.toml").write_text(CALLERS)
    (folder := tmp_path / "server").mkdir()
    server = await start_fake_server(folder, http_port=0, callers=tmp_path / "callers.toml", trust_fairness_id=True)
    grpc_port, http_port = free_port(), free_port()
    try:
        with running_envoy(tmp_path, server, grpc_port, http_port) as process:
            found = Deployment(server, provider, made.ca, grpc_port, http_port)
            ends = time.monotonic() + 60
            while True:
                assert process.poll() is None, (tmp_path / "envoy.log").read_text()
                assert time.monotonic() < ends, "Envoy was not ready within 60 s"
                with contextlib.suppress(httpx.TransportError):
                    if (await found.http.get("/health")).status_code == 200:
                        break
            yield found
            await found.http.aclose()
    finally:
        server.engine.let_go()
        await server.channel.close()
        await server.app.stop()


async def test_the_caller_name_comes_only_from_the_token(deployment: Deployment) -> None:
    """The server takes the caller's name from the token, over gRPC and HTTP.

    Envoy removes headers with a name or a key from the caller's request.
    """
    provider, server = deployment.provider, deployment.server
    named = {"x-gateway-inference-fairness-id": "x"}
    assert (await deployment.post(provider.token("reports"), **named)).status_code == 200
    tls, token = Tls(ca=deployment.ca), provider.token("search")
    async with AsyncEncoderClient(deployment.target, tls=tls, api_key=token) as client:
        await client.embed(["hello"])
    assert server.sample("encserve_caller_calls_total", caller="reports", outcome="OK") == 1
    assert server.sample("encserve_caller_calls_total", caller="search", outcome="OK") >= 1
    assert "x" not in {labels["caller"] for labels in callers_of(server)}
    assert (await deployment.post(None, **{"x-api-key": PROXY_KEY})).status_code == 401


def callers_of(server: FakeServer) -> list[dict[str, str]]:
    return [
        sample.labels
        for family in server.app.registry.collect()
        for sample in family.samples
        if sample.name == "encserve_caller_calls_total"
    ]


async def test_envoy_refuses_invalid_tokens(deployment: Deployment) -> None:
    provider = deployment.provider
    wrong = [
        Provider().token("search"),
        provider.token("search", audience="other"),
        provider.token("search", seconds=-3600),
        "no-token",
    ]
    for token in wrong:
        assert (await deployment.post(token)).status_code in (401, 403)  # 403 is for a wrong audience
        async with AsyncEncoderClient(deployment.target, tls=Tls(ca=deployment.ca), api_key=token) as client:
            with pytest.raises(AccessDeniedError):
                await client.embed(["hello"])
    assert not [it for it in callers_of(deployment.server) if it["outcome"] == "OK"]
    credentials = grpc.ssl_channel_credentials(deployment.ca.read_bytes())
    async with grpc.aio.secure_channel(deployment.target, credentials) as channel:
        rpc: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await rpc(b"", timeout=10) == b"\x08\x01"
