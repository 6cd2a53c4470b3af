"""TLS of all three ports: who gets in, who does not, and what becomes of changed files."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import certificates
import grpc
import httpx
import pytest
from certificates import Certificates, Mount, Pair, served
from fake_server import SERVICE, FakeServer, StartServer
from http_calls import raw
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import StartupError
from encserve_server.http import server as http_server
from encserve_server.settings import Settings
from encserve_server.system.certificates import CertificateError, TlsFiles, load_identity
from encserve_server.telemetry import page

PORTS = ("grpc_port", "http_port", "metrics_port")
EMBED = {"model": "tiny", "input": "hello"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make_certificates(tmp_path_factory.mktemp("tls"))


def flags(pair: Pair, client_ca: Path | None = None) -> dict[str, Any]:
    """Settings of a server with TLS."""
    return {"tls_cert_file": pair.cert, "tls_key_file": pair.key, "tls_client_ca_file": client_ca, "http_port": 0}


def context_of(ca: Path, shown: Pair | None = None) -> ssl.SSLContext:
    """What a careful caller uses."""
    context = ssl.create_default_context(cafile=ca)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


def shake(port: int, context: ssl.SSLContext, name: str = "localhost") -> str | None:
    """Connects, asks for nothing, and says which TLS it is; raises what Python's ssl raises."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as encrypted,
    ):
        encrypted.settimeout(0.05)
        with contextlib.suppress(TimeoutError):  # of TLS 1.3 the caller's certificate is refused after the handshake
            if encrypted.recv(1) == b"":
                raise ConnectionError("the server has ended the connection")
        return encrypted.version()


async def grpc_call(server: FakeServer, credentials: grpc.ChannelCredentials | None) -> None:
    """One call; raises gRPC's error."""
    target = f"localhost:{server.app.grpc_port}"
    channel = (
        grpc.aio.insecure_channel(target)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials, [("grpc.default_authority", "localhost")])
    )
    async with channel:
        request = pb.EncodeRequest(inputs=[pb.Input(text="hello")])
        rpc: Any = channel.unary_unary(f"/{SERVICE}/Encode")
        await rpc(request.SerializeToString(), timeout=20)


def grpc_credentials(ca: Path, shown: Pair | None = None) -> grpc.ChannelCredentials:
    key, chain = (None, None) if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
    return grpc.ssl_channel_credentials(ca.read_bytes(), key, chain)


async def http_call(server: FakeServer, context: ssl.SSLContext, path: str = "/v1/embeddings") -> int:
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        return (await client.post(f"https://localhost:{server.app.http_port}{path}", json=EMBED)).status_code


async def page_call(server: FakeServer, context: ssl.SSLContext, path: str) -> httpx.Response:
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        return await client.get(f"https://localhost:{server.app.metrics_port}{path}")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_all_ports_speak_tls_only(start_server: StartServer, made: Certificates, version: ssl.TLSVersion) -> None:
    server = await start_server(**flags(made.server))
    context = context_of(made.ca)
    context.minimum_version = context.maximum_version = version
    name = version.name.replace("_", ".")
    for port in PORTS:
        context.set_alpn_protocols(["h2"] if port == "grpc_port" else ["http/1.1"])
        assert await asyncio.to_thread(shake, getattr(server.app, port), context) == name
    assert await http_call(server, context) == 200
    assert (await page_call(server, context, "/metrics")).status_code == 200
    assert (await page_call(server, context, "/healthz")).text == "SERVING\n"
    await grpc_call(server, grpc_credentials(made.ca))
    assert server.sample("encserve_tls_reloads_total", outcome="loaded") == 1
    expires = server.sample("encserve_tls_certificate_expiry_timestamp_seconds", file="tls_cert_file")
    assert 29 < (expires - time.time()) / 86400 < 31


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
async def test_old_tls_is_refused(start_server: StartServer, made: Certificates) -> None:
    server = await start_server(**flags(made.server))
    context = context_of(made.ca)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    for port in PORTS:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(shake, getattr(server.app, port), context)


async def test_plaintext_is_refused(start_server: StartServer, made: Certificates) -> None:
    server = await start_server(**flags(made.server))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await grpc_call(server, None)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for port in ("http_port", "metrics_port"):
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get(f"http://127.0.0.1:{getattr(server.app, port)}/healthz")
    await until(lambda: not server.app._http.handshakes)  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_mutual_tls(start_server: StartServer, made: Certificates, version: ssl.TLSVersion) -> None:
    """gRPC, HTTP and /metrics need a certificate of the authority, /healthz none."""
    server = await start_server(**flags(made.server, made.ca))
    right = context_of(made.ca, made.client)
    right.minimum_version = right.maximum_version = version
    assert await http_call(server, right) == 200
    assert (await page_call(server, right, "/metrics")).status_code == 200
    await grpc_call(server, grpc_credentials(made.ca, made.client))

    for shown in (None, made.stranger, made.expired):
        wrong = context_of(made.ca, shown)
        wrong.minimum_version = wrong.maximum_version = version
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(shake, server.app.http_port or 0, wrong)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(shake, server.app.grpc_port, wrong)
        with pytest.raises(grpc.aio.AioRpcError):
            await grpc_call(server, grpc_credentials(made.ca, shown))
    nobody = context_of(made.ca)
    assert (await page_call(server, nobody, "/healthz")).status_code == 200
    refused = await page_call(server, nobody, "/metrics")
    assert refused.status_code == 403
    assert "client certificate" in refused.text
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        await page_call(server, context_of(made.ca, made.stranger), "/metrics")


@pytest.mark.parametrize("wrong", ["expired", "other_name", "stranger"])
async def test_callers_refuse_a_wrong_server(tmp_path: Path, made: Certificates, wrong: str) -> None:
    """What a wrong certificate of the server looks like; one that has expired stops the start."""
    pair: Pair = getattr(made, wrong)
    files = TlsFiles(pair.cert, pair.key)
    if wrong == "expired":
        with pytest.raises(CertificateError, match=r"^tls_cert_file .*expired.pem: the certificate of .* expired at "):
            load_identity(files, time.time())
        return
    load_identity(files, time.time())


def _files(made: Certificates, directory: Path, **bad: bytes) -> TlsFiles:
    contents = {"cert": made.server.cert, "key": made.server.key, "client_ca": made.ca}
    for name, path in contents.items():
        (directory / name).write_bytes(bad.get(name, path.read_bytes()))
    return TlsFiles(directory / "cert", directory / "key", directory / "client_ca")


@pytest.mark.parametrize(
    ("file", "cut", "said"),
    [
        ("cert", 0, r"^tls_cert_file \S+ holds no complete PEM certificate"),
        ("cert", 0.5, r"^tls_cert_file \S+ holds no complete PEM certificate"),
        ("key", 0, r"^tls_key_file \S+ holds no complete PEM private key"),
        ("key", 0.5, r"^tls_key_file \S+ holds no complete PEM private key"),
        ("client_ca", 0.5, r"^tls_client_ca_file \S+ holds no complete PEM certificate"),
    ],
)
def test_half_a_file(made: Certificates, tmp_path: Path, file: str, cut: float, said: str) -> None:
    whole = {"cert": made.server.cert, "key": made.server.key, "client_ca": made.ca}[file].read_bytes()
    with pytest.raises(CertificateError, match=said):
        load_identity(_files(made, tmp_path, **{file: whole[: int(len(whole) * cut)]}), time.time())


def test_files_that_cannot_be_used(made: Certificates, tmp_path: Path) -> None:
    now = time.time()
    with pytest.raises(CertificateError, match=r"^tls_cert_file /nowhere/cert cannot be read: No such file"):
        load_identity(TlsFiles(Path("/nowhere/cert"), made.server.key), now)
    with pytest.raises(CertificateError, match="does not belong to the first certificate of tls_cert_file"):
        load_identity(TlsFiles(made.server.cert, made.client.key), now)
    later = made.authority.issue("later", begins_in_days=1)
    with pytest.raises(CertificateError, match="is not valid before 20"):
        load_identity(TlsFiles(later.cert, later.key), now)
    with pytest.raises(CertificateError, match=r"^tls_client_ca_file .* expired at "):
        load_identity(TlsFiles(made.server.cert, made.server.key, made.expired.cert), now)
    with pytest.raises(CertificateError, match="must be at most"):
        load_identity(_files(made, tmp_path, cert=b"x" * 5_000_000), now)


def test_a_key_with_a_password(made: Certificates, tmp_path: Path) -> None:
    """Nobody is asked for it on a terminal, and nothing of a key is in an error."""
    from cryptography.hazmat.primitives import serialization as it

    key = it.load_pem_private_key(made.server.key.read_bytes(), None)
    locked = key.private_bytes(it.Encoding.PEM, it.PrivateFormat.PKCS8, it.BestAvailableEncryption(b"secret"))
    with pytest.raises(CertificateError, match="has a password; give a key without one"):
        load_identity(_files(made, tmp_path, key=locked), time.time())


@pytest.mark.parametrize("key", ["rsa:2048", "ec -pkeyopt ec_paramgen_curve:P-384", "ed25519"])
async def test_keys_that_can_be_used(start_server: StartServer, tmp_path: Path, key: str) -> None:
    """Every port shows the certificate."""
    pair = certificates.self_signed(tmp_path, "it", key)
    server = await start_server(**flags(pair))
    context = context_of(pair.cert)
    for port in PORTS:
        context.set_alpn_protocols(["h2"] if port == "grpc_port" else ["http/1.1"])
        assert await asyncio.to_thread(served, getattr(server.app, port), context) == pair.der()


@pytest.mark.parametrize(
    "key",
    [
        "ec -pkeyopt ec_paramgen_curve:secp256k1",
        "ec -pkeyopt ec_paramgen_curve:P-224",
        "ec -pkeyopt ec_paramgen_curve:P-256 -pkeyopt ec_param_enc:explicit",
        "ed448",
        "rsa-pss -pkeyopt rsa_keygen_bits:2048",
    ],
)
def test_keys_that_grpc_cannot_use(tmp_path: Path, key: str) -> None:
    """OpenSSL could: HTTP and gRPC would show different certificates."""
    pair = certificates.self_signed(tmp_path, "it", key)
    with pytest.raises(CertificateError, match=r"^tls_cert_file .* the key must be RSA, Ed25519, or"):
        load_identity(TlsFiles(pair.cert, pair.key), time.time())


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"tls_cert_file": "a"}, "tls_cert_file and tls_key_file go together; were a and None"),
        ({"tls_key_file": "a"}, "tls_cert_file and tls_key_file go together; were None and a"),
        ({"tls_client_ca_file": "a"}, "tls_client_ca_file needs tls_cert_file and tls_key_file"),
    ],
)
def test_settings_that_go_together(tmp_path: Path, chosen: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        Settings(model_repository=tmp_path, **chosen)


async def test_the_start_says_what_is_wrong(start_server: StartServer, made: Certificates) -> None:
    with pytest.raises(StartupError, match=r"^tls_cert_file .* expired at "):
        await start_server(**flags(made.expired))


async def test_the_start_says_what_is_not_installed(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(
        StartupError, match=r"package cryptography\S* is not installed; install encserve-server\[tls\]$"
    ):
        await start_server(**flags(made.server))


async def test_plaintext_to_other_machines_is_said_loudly(
    start_server: StartServer, made: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [it.getMessage() for it in caplog.records if "NOT ENCRYPTED" in it.getMessage()]

    await start_server(host="0.0.0.0", **flags(made.server))  # noqa: S104
    await start_server()
    assert not said()
    await start_server(host="0.0.0.0")  # noqa: S104
    (line,) = said()
    assert "--host 0.0.0.0" in line
    assert "--tls-cert-file" in line


@pytest.mark.parametrize("mutual", [False, True])
async def test_who_may_call_is_said_loudly(
    start_server: StartServer, made: Certificates, caplog: pytest.LogCaptureFixture, mutual: bool
) -> None:
    """Without keys and without client certificates everybody may call, encrypted or not."""
    await start_server(host="0.0.0.0", **flags(made.server, made.ca if mutual else None))  # noqa: S104
    assert ("EVERYBODY WHO REACHES THIS ADDRESS MAY CALL" in caplog.text) != mutual


async def test_changed_files(
    start_server: StartServer, made: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every port shows the new certificate; open connections stay; what is wrong is refused once, and then not."""
    caplog.set_level(logging.INFO)
    mount = Mount(tmp_path / "mount")
    mount.put(made.server, made.ca)
    server = await start_server(**flags(mount.pair, mount.ca))
    watch = server.app._certificates
    assert watch is not None
    context = context_of(made.ca, made.client)

    async def shown() -> list[bytes]:
        ports = [getattr(server.app, port) for port in PORTS]
        for_grpc = context_of(made.ca, made.client)
        for_grpc.set_alpn_protocols(["h2"])
        return [await asyncio.to_thread(served, port, for_grpc if port == ports[0] else context) for port in ports]

    before = await shown()
    assert len(set(before)) == 1
    second = made.authority.issue("second")
    async with (
        httpx.AsyncClient(verify=context, trust_env=False) as kept,
        grpc.aio.secure_channel(f"localhost:{server.app.grpc_port}", grpc_credentials(made.ca, made.client)) as channel,
    ):
        url = f"https://localhost:{server.app.http_port}/health"
        call: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
        await kept.get(url)
        await call(b"")
        mount.put(second, made.ca)
        await asyncio.to_thread(watch.look)
        after = await shown()
        assert len(set(after)) == 1
        assert after != before
        assert (await kept.get(url)).status_code == 200
        await call(b"")

    no_grpc = certificates.self_signed(tmp_path, "secp256k1", "ec -pkeyopt ec_paramgen_curve:secp256k1")
    for wrong in (made.expired, Pair(made.server.cert, second.key), no_grpc):
        refused = server.sample("encserve_tls_reloads_total", outcome="refused")
        mount.put(wrong, made.ca)
        for _ in range(3):
            await asyncio.to_thread(watch.look)
        assert server.sample("encserve_tls_reloads_total", outcome="refused") == refused + 1
        assert server.sample("encserve_tls_files_refused") == 1
        assert await shown() == after
        mount.put(second, made.ca)  # as they are in use: the alert ends
        await asyncio.to_thread(watch.look)
        assert server.sample("encserve_tls_files_refused") == 0
    lines = [it.getMessage() for it in caplog.records if "TLS files are refused" in it.getMessage()]
    assert len(lines) == 3
    assert "expired at" in lines[0]
    assert "does not belong" in lines[1]
    assert "the key must be" in lines[2]

    mount.put(made.expired, made.ca)
    await asyncio.to_thread(watch.look)
    mount.put(made.server, made.ca)
    await asyncio.to_thread(watch.look)
    assert server.sample("encserve_tls_files_refused") == 0
    assert await shown() == before
    assert server.sample("encserve_tls_reloads_total", outcome="loaded") == 3


async def test_another_authority_of_callers(start_server: StartServer, made: Certificates, tmp_path: Path) -> None:
    """A caller whose authority is gone is refused, also if its TLS could go on with an old session."""
    mount = Mount(tmp_path / "mount")
    mount.put(made.server, made.ca)
    server = await start_server(**flags(mount.pair, mount.ca))
    watch = server.app._certificates
    assert watch is not None
    mine, stranger = context_of(made.ca, made.client), context_of(made.ca, made.stranger)
    assert await http_call(server, mine) == 200
    mount.put(made.server, made.stranger_ca)
    await asyncio.to_thread(watch.look)
    assert await http_call(server, stranger) == 200
    await grpc_call(server, grpc_credentials(made.ca, made.stranger))
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        await http_call(server, mine)
    with pytest.raises(grpc.aio.AioRpcError):
        await grpc_call(server, grpc_credentials(made.ca, made.client))


@pytest.mark.parametrize("days", [(-9, -1), (1, 1_000_000)])
async def test_an_authority_out_of_its_time_beside_another(
    start_server: StartServer, made: Certificates, tmp_path: Path, days: tuple[float, float]
) -> None:
    """Authorities are changed by a file with both: that of today lets callers in. It ends in the year 3000."""
    other = made.authority.issue("other-ca", begins_in_days=days[0], days=days[1])
    both = tmp_path / "both.pem"
    both.write_bytes(made.ca.read_bytes() + other.cert.read_bytes())
    server = await start_server(**flags(made.server, both))
    assert await http_call(server, context_of(made.ca, made.client)) == 200
    await grpc_call(server, grpc_credentials(made.ca, made.client))
    with pytest.raises(grpc.aio.AioRpcError):
        await grpc_call(server, grpc_credentials(made.ca, made.stranger))
    with pytest.raises(CertificateError, match=r"^tls_client_ca_file .* (expired at|is not valid before) "):
        load_identity(TlsFiles(made.server.cert, made.server.key, other.cert), time.time())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_old_sessions_are_not_resumed(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
) -> None:
    """A session spares a caller its certificate, which may have expired since: of mutual TLS it is for a minute."""
    monkeypatch.setattr("encserve_server.system.certificates._POLL_SECONDS", 0.01)
    monkeypatch.setattr("encserve_server.system.certificates._SESSION_SECONDS", 0.0)
    server = await start_server(**flags(made.server, made.ca))
    context = context_of(made.ca, made.client)
    context.minimum_version = context.maximum_version = version

    def connect(port: int, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        encrypted = context.wrap_socket(plain, server_hostname="localhost", session=session)
        encrypted.settimeout(0.05)
        with contextlib.suppress(TimeoutError):  # a session of TLS 1.3 comes with the first data
            encrypted.recv(1)
        return encrypted

    def is_resumed(port: int, session: ssl.SSLSession | None) -> bool:
        with connect(port, session) as encrypted:
            return bool(encrypted.session_reused)

    for name in PORTS:
        context.set_alpn_protocols(["h2"] if name == "grpc_port" else ["http/1.1"])
        port = getattr(server.app, name)
        with await asyncio.to_thread(connect, port) as first:  # OpenSSL keeps the sessions of open connections
            async with asyncio.timeout(20):
                while await asyncio.to_thread(is_resumed, port, first.session):
                    pass
    assert server.sample("encserve_tls_reloads_total", outcome="loaded") == 1


async def test_files_are_looked_at_by_themselves(
    start_server: StartServer, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encserve_server.system.certificates._POLL_SECONDS", 0.01)
    mount = Mount(tmp_path / "mount")
    mount.put(made.server, made.ca)
    server = await start_server(**flags(mount.pair, mount.ca))
    (tmp_path / "mount" / "..data").unlink()  # what a look finds then is refused, and the next one goes on
    await until(lambda: server.sample("encserve_tls_reloads_total", outcome="refused") == 1)
    mount.put(made.authority.issue("third"), made.ca)
    await until(lambda: server.sample("encserve_tls_reloads_total", outcome="loaded") == 2)


async def test_handshakes_that_do_not_end(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that say nothing count as connections, and end after a while; others get an answer all the time."""
    monkeypatch.setattr(http_server, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(page, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(http_server, "_SPARE_HANDSHAKES", 1)
    server = await start_server(max_connections=3, **flags(made.server))
    http = server.app._http
    assert http is not None
    context = context_of(made.ca)
    async with contextlib.AsyncExitStack() as silent:
        readers = [(await silent.enter_async_context(raw(server)))[0] for _ in range(2)]
        await until(lambda: len(http.handshakes) == 2)
        assert await http_call(server, context) == 200
        readers.append((await silent.enter_async_context(raw(server)))[0])
        assert await http_call(server, context, "/v1/embeddings") == 503  # three are too many, and are told so
        readers += [(await silent.enter_async_context(raw(server)))[0] for _ in range(3)]
        for reader in readers:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        assert not http.handshakes
    assert await http_call(server, context) == 200

    with socket.create_connection(("127.0.0.1", server.app.metrics_port)) as quiet:
        assert (await page_call(server, context, "/healthz")).status_code == 200
        quiet.settimeout(5)
        assert await asyncio.to_thread(quiet.recv, 1) == b""


@pytest.mark.parametrize("encrypted", [False, True])
async def test_the_metrics_page_has_so_many_threads(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """Of connections that say nothing the oldest end for new ones, and probes and Prometheus get their answers."""
    monkeypatch.setattr(page, "_MAX_CONNECTIONS", 8)
    server = await start_server(**flags(made.server) if encrypted else {})
    scheme, verify = ("https", context_of(made.ca)) if encrypted else ("http", ssl.create_default_context())
    async with contextlib.AsyncExitStack() as silent:
        connections = [
            await silent.enter_async_context(_connected(server.app.metrics_port, b"" if encrypted else b"GET /"))
            for _ in range(30)
        ]
        for path in ("/healthz", "/metrics"):
            async with httpx.AsyncClient(verify=verify, trust_env=False) as client:
                reply = await client.get(f"{scheme}://localhost:{server.app.metrics_port}{path}")
            assert reply.status_code == 200
        assert sum("process_request" in it.name for it in threading.enumerate()) <= 8
        for reader in connections[:20]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_slow_caller_of_the_metrics_page(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that arrives a byte at a time does not keep a thread for longer than a connection may take."""
    monkeypatch.setattr(page, "_CONNECTION_SECONDS", 0.3)
    server = await start_server(**flags(made.server))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.app.metrics_port, ssl=context_of(made.ca), server_hostname="localhost"
    )
    ends = time.monotonic() + 10
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof() and time.monotonic() < ends:
            writer.write(b"G")
            await writer.drain()
            await asyncio.sleep(0.02)
    assert time.monotonic() < ends
    writer.transport.abort()


@contextlib.asynccontextmanager
async def _connected(port: int, said: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection of somebody who says little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    yield reader
    writer.transport.abort()


async def test_much_over_tls(start_server: StartServer, made: Certificates) -> None:
    """A long request and a long answer, in pieces, and several on one connection; one sent in two records too."""
    server = await start_server(**flags(made.server))
    async with httpx.AsyncClient(verify=context_of(made.ca), trust_env=False, timeout=30) as client:
        url = f"https://localhost:{server.app.http_port}/v1/embeddings"
        for n in (1, 2000, 1):
            reply = await client.post(url, json={"model": "tiny", "input": ["hello brave new world " * 4] * n})
            assert reply.status_code == 200
            assert len(reply.json()["data"]) == n
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.app.http_port, ssl=context_of(made.ca), server_hostname="localhost"
    )
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /heal")
    assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
    writer.write(b"th HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 1
    writer.close()


def test_the_key_is_in_no_repr(made: Certificates) -> None:
    identity = load_identity(TlsFiles(made.server.cert, made.server.key), time.time())
    assert "PRIVATE" not in repr(identity)
    assert os.linesep.encode() in identity.key


async def test_a_client_certificate_says_who_calls(
    start_server: StartServer, made: Certificates, tmp_path: Path
) -> None:
    """By a DNS name of it, over gRPC and HTTP; a certificate that no caller has is refused."""
    file = tmp_path / "callers.toml"
    file.write_text('[[caller]]\nname = "reports"\ncertificate_names = ["client.example"]\n')
    server = await start_server(**flags(made.server, made.ca), callers=file)
    assert await http_call(server, context_of(made.ca, made.client)) == 200
    await grpc_call(server, grpc_credentials(made.ca, made.client))
    assert server.sample("encserve_caller_calls_total", caller="reports", outcome="OK") == 2
    assert await http_call(server, context_of(made.ca, made.other_name)) == 401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await grpc_call(server, grpc_credentials(made.ca, made.other_name))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
