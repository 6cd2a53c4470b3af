"""Tests of TLS on all three ports: accepted and refused callers, wrong files, and files that change."""

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
from types import SimpleNamespace
from typing import Any

import certificates
import grpc
import httpx
import pytest
import pytest_asyncio
from certificates import Certificates, Mount, Pair, served
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from fake_server import SERVICE, FakeServer, StartServer, refusal, start_fake_server
from http_calls import raw
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import StartupError
from encserve_server.system import certificates as certificate_files
from encserve_server.system.certificates import TlsFiles, load_identity
from encserve_server.system.clock import MonotonicClock
from encserve_server.system.files import FileError
from encserve_server.telemetry import page
from encserve_server.transport.http import server as http_server

PORTS = ("grpc_port", "http_port", "metrics_port")
EMBED = {"model": "tiny", "input": "hello"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make_certificates(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_tls(made: Certificates, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    server = await start_fake_server(tmp_path_factory.mktemp("server"), **flags(made.server))
    yield server
    await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mutual(made: Certificates, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    server = await start_fake_server(tmp_path_factory.mktemp("server"), **flags(made.server, made.ca))
    yield server
    await server.stop()


def flags(pair: Pair, client_ca: Path | None = None) -> dict[str, Any]:
    """Return the settings of a server with TLS."""
    return {"tls_cert_file": pair.cert, "tls_key_file": pair.key, "tls_client_ca_file": client_ca, "http_port": 0}


def context_of(ca: Path, shown: Pair | None = None) -> ssl.SSLContext:
    """Return the TLS context of a caller that checks the server. `shown` is the caller's certificate."""
    context = ssl.create_default_context(cafile=ca)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


def shake(port: int, context: ssl.SSLContext, name: str = "localhost") -> str | None:
    """Connect, send nothing, and return the TLS version.

    A refused connection raises an error of Python's ssl, or ConnectionError.
    """
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as encrypted,
    ):
        encrypted.settimeout(0.05)
        with contextlib.suppress(TimeoutError):  # with TLS 1.3, a refusal arrives after the handshake
            if encrypted.recv(1) == b"":
                raise ConnectionError("the server has ended the connection")
        return encrypted.version()


async def grpc_call(server: FakeServer, credentials: grpc.ChannelCredentials | None) -> None:
    """Call Encode once. A failure raises gRPC's error."""
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
async def test_all_ports_use_tls(shared_tls: FakeServer, made: Certificates, version: ssl.TLSVersion) -> None:
    context = context_of(made.ca)
    context.minimum_version = context.maximum_version = version
    name = version.name.replace("_", ".")
    for port in PORTS:
        context.set_alpn_protocols(["h2"] if port == "grpc_port" else ["http/1.1"])
        assert await asyncio.to_thread(shake, getattr(shared_tls.app, port), context) == name
    assert await http_call(shared_tls, context) == 200
    assert (await page_call(shared_tls, context, "/metrics")).status_code == 200
    assert (await page_call(shared_tls, context, "/healthz")).text == "SERVING\n"
    await grpc_call(shared_tls, grpc_credentials(made.ca))
    assert shared_tls.sample("encserve_tls_reloads_total", outcome="loaded") == 1
    expires = shared_tls.sample("encserve_tls_certificate_expiry_timestamp_seconds", file="tls_cert_file")
    assert 29 < (expires - time.time()) / 86400 < 31


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
async def test_old_tls_and_plaintext_are_refused(shared_tls: FakeServer, made: Certificates) -> None:
    context = context_of(made.ca)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    for port in PORTS:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(shake, getattr(shared_tls.app, port), context)
    assert (await refusal(grpc_call(shared_tls, None))).code is grpc.StatusCode.UNAVAILABLE
    for port in ("http_port", "metrics_port"):
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get(f"http://127.0.0.1:{getattr(shared_tls.app, port)}/healthz")
    await until(lambda: not shared_tls.app._http.handshakes)  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_mutual_tls(shared_mutual: FakeServer, made: Certificates, version: ssl.TLSVersion) -> None:
    """gRPC, HTTP and /metrics require a client certificate from the authority. /healthz requires no certificate."""
    server = shared_mutual
    right = context_of(made.ca, made.client)
    right.minimum_version = right.maximum_version = version
    assert await http_call(server, right) == 200
    assert (await page_call(server, right, "/metrics")).status_code == 200
    await grpc_call(server, grpc_credentials(made.ca, made.client))
    for shown in (None, made.stranger, made.expired):
        wrong = context_of(made.ca, shown)
        wrong.minimum_version = wrong.maximum_version = version
        for port in (server.app.http_port or 0, server.app.grpc_port):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(shake, port, wrong)
        assert (await refusal(grpc_call(server, grpc_credentials(made.ca, shown)))).code is grpc.StatusCode.UNAVAILABLE
    without = context_of(made.ca)
    assert (await page_call(server, without, "/healthz")).status_code == 200
    refused = await page_call(server, without, "/metrics")
    assert (refused.status_code, "client certificate" in refused.text) == (403, True)
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        await page_call(server, context_of(made.ca, made.stranger), "/metrics")


def _files(made: Certificates, directory: Path, **bad: bytes) -> TlsFiles:
    directory.mkdir(exist_ok=True)
    contents = {"cert": made.server.cert, "key": made.server.key, "client_ca": made.ca}
    for name, path in contents.items():
        (directory / name).write_bytes(bad.get(name, path.read_bytes()))
    return TlsFiles(directory / "cert", directory / "key", directory / "client_ca")


@pytest.mark.parametrize(("file", "part"), [("cert", 0), ("cert", 0.5), ("key", 0), ("key", 0.5), ("client_ca", 0.5)])
def test_a_part_of_a_file_is_refused(made: Certificates, tmp_path: Path, file: str, part: float) -> None:
    whole = {"cert": made.server.cert, "key": made.server.key, "client_ca": made.ca}[file].read_bytes()
    with pytest.raises(FileError, match=rf"^tls_{file}_file \S+ holds no complete PEM"):
        load_identity(_files(made, tmp_path, **{file: whole[: int(len(whole) * part)]}), time.time())


def test_wrong_files_are_refused_by_name(made: Certificates, tmp_path: Path) -> None:
    """A certificate for another name or authority is accepted, because only callers can detect this fault."""
    now = time.time()
    for pair in (made.other_name, made.stranger):
        load_identity(TlsFiles(pair.cert, pair.key), now)
    later = made.authority.issue("later", begins_in_days=1)
    private = load_pem_private_key(made.server.key.read_bytes(), None)
    locked = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    for files, problem in (
        (TlsFiles(Path("/nowhere/cert"), made.server.key), "^tls_cert_file /nowhere/cert cannot be read"),
        (TlsFiles(made.server.cert, made.client.key), "does not belong to the first certificate of tls_cert_file"),
        (TlsFiles(made.expired.cert, made.expired.key), "^tls_cert_file .* expired at "),
        (TlsFiles(later.cert, later.key), "is not valid before 20"),
        (TlsFiles(made.server.cert, made.server.key, made.expired.cert), "^tls_client_ca_file .* expired at "),
        (_files(made, tmp_path / "large", cert=b"x" * 5_000_000), "must be at most"),
        (_files(made, tmp_path / "locked", key=locked), "has a password; give a key without one"),
    ):
        with pytest.raises(FileError, match=problem):
            load_identity(files, now)


@pytest.mark.parametrize("key", ["rsa:2048", "ec -pkeyopt ec_paramgen_curve:P-384", "ed25519"])
async def test_every_port_shows_the_certificate(start_server: StartServer, tmp_path: Path, key: str) -> None:
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
    """OpenSSL supports these keys. Without an error, only the HTTP port would present the certificate."""
    pair = certificates.self_signed(tmp_path, "it", key)
    with pytest.raises(FileError, match=r"^tls_cert_file .* the key must be RSA, Ed25519, or"):
        load_identity(TlsFiles(pair.cert, pair.key), time.time())


async def test_a_wrong_file_or_a_missing_package_stops_the_start(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match=r"^tls_cert_file .* expired at "):
        await start_server(**flags(made.expired))
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(StartupError, match=r'^--tls-cert-file needs cryptography: pip install "encserve\[tls\]"$'):
        await start_server(**flags(made.server))


OPEN = "NO AUTHENTICATION"


@pytest.mark.parametrize(
    ("host", "files", "keys", "warnings"),
    [
        ("0.0.0.0", "none", None, {"NOT ENCRYPTED", OPEN}),  # noqa: S104
        ("0.0.0.0", "none", "encserve-the-right-key", {"NOT ENCRYPTED"}),  # noqa: S104
        ("0.0.0.0", "server", None, {OPEN}),  # noqa: S104
        ("0.0.0.0", "mutual", None, set()),  # noqa: S104
        ("127.0.0.1", "none", None, set()),
    ],
)
async def test_an_open_or_unencrypted_server_warns(
    start_server: StartServer,
    made: Certificates,
    caplog: pytest.LogCaptureFixture,
    host: str,
    files: str,
    keys: str | None,
    warnings: set[str],
) -> None:
    tls = {"none": {}, "server": flags(made.server), "mutual": flags(made.server, made.ca)}[files]
    await start_server(host=host, api_key=keys, **tls)
    assert {it for it in ("NOT ENCRYPTED", OPEN) if it in caplog.text} == warnings


async def test_changed_files(
    start_server: StartServer, made: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a change of the files, every port presents the new certificate, and open connections stay open.

    If a new file is wrong, the server keeps the old certificate and logs the refusal once.
    """
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
        await watch.look(MonotonicClock())
        after = await shown()
        assert len(set(after)) == 1
        assert after != before
        assert (await kept.get(url)).status_code == 200
        await call(b"")

    mount.put(made.expired, made.ca)
    for _ in range(3):
        await watch.look(MonotonicClock())
    assert server.sample("encserve_tls_reloads_total", outcome="refused") == 1
    assert server.sample("encserve_tls_files_refused") == 1
    assert await shown() == after
    assert len([it for it in caplog.records if "TLS files are refused" in it.getMessage()]) == 1

    mount.put(made.server, made.ca)
    await watch.look(MonotonicClock())
    assert server.sample("encserve_tls_files_refused") == 0
    assert await shown() == before
    assert server.sample("encserve_tls_reloads_total", outcome="loaded") == 3


async def test_another_authority_of_callers(start_server: StartServer, made: Certificates, tmp_path: Path) -> None:
    """After a change of the authority, callers with certificates of the old authority are refused."""
    mount = Mount(tmp_path / "mount")
    mount.put(made.server, made.ca)
    server = await start_server(**flags(mount.pair, mount.ca))
    watch = server.app._certificates
    assert watch is not None
    mine, stranger = context_of(made.ca, made.client), context_of(made.ca, made.stranger)
    assert await http_call(server, mine) == 200
    mount.put(made.server, made.stranger_ca)
    await watch.look(MonotonicClock())
    assert await http_call(server, stranger) == 200
    await grpc_call(server, grpc_credentials(made.ca, made.stranger))
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        await http_call(server, mine)
    assert (
        await refusal(grpc_call(server, grpc_credentials(made.ca, made.client)))
    ).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("days", [(-9, -1), (1, 1_000_000)])
async def test_an_expired_authority_in_a_file_with_a_valid_one(
    start_server: StartServer, made: Certificates, tmp_path: Path, days: tuple[float, float]
) -> None:
    """The file has an authority, and a certificate that is expired or not yet valid.

    Callers of the authority are accepted, and callers of another authority are refused.
    """
    other = made.authority.issue("other-ca", begins_in_days=days[0], days=days[1])
    both = tmp_path / "both.pem"
    both.write_bytes(made.ca.read_bytes() + other.cert.read_bytes())
    server = await start_server(**flags(made.server, both))
    assert await http_call(server, context_of(made.ca, made.client)) == 200
    await grpc_call(server, grpc_credentials(made.ca, made.client))
    assert (
        await refusal(grpc_call(server, grpc_credentials(made.ca, made.stranger)))
    ).code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(FileError, match=r"^tls_client_ca_file .* (expired at|is not valid before) "):
        load_identity(TlsFiles(made.server.cert, made.server.key, other.cert), time.time())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_old_sessions_are_not_resumed(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
) -> None:
    """A resumed session would skip the check of the caller's certificate, which may have expired in the meantime."""
    monkeypatch.setattr("encserve_server.system.certificates.POLL_SECONDS", 0.01)
    monkeypatch.setattr("encserve_server.system.certificates._SESSION_SECONDS", 0.0)
    server = await start_server(**flags(made.server, made.ca))
    context = context_of(made.ca, made.client)
    context.minimum_version = context.maximum_version = version

    def connect(port: int, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        encrypted = context.wrap_socket(plain, server_hostname="localhost", session=session)
        encrypted.settimeout(0.05)
        with contextlib.suppress(TimeoutError):  # with TLS 1.3, the session arrives after the handshake
            encrypted.recv(1)
        return encrypted

    def is_resumed(port: int, session: ssl.SSLSession | None) -> bool:
        with connect(port, session) as encrypted:
            return bool(encrypted.session_reused)

    for name in PORTS:
        context.set_alpn_protocols(["h2"] if name == "grpc_port" else ["http/1.1"])
        port = getattr(server.app, name)
        with await asyncio.to_thread(connect, port) as first:  # stays open, so that OpenSSL keeps its session
            async with asyncio.timeout(20):
                while await asyncio.to_thread(is_resumed, port, first.session):
                    pass
    assert server.sample("encserve_tls_reloads_total", outcome="loaded") == 1


async def test_the_server_polls_the_files(
    start_server: StartServer, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encserve_server.system.certificates.POLL_SECONDS", 0.01)
    mount = Mount(tmp_path / "mount")
    mount.put(made.server, made.ca)
    server = await start_server(**flags(mount.pair, mount.ca))
    (tmp_path / "mount" / "..data").unlink()  # the next check of the files fails
    await until(lambda: server.sample("encserve_tls_reloads_total", outcome="refused") == 1)
    mount.put(made.authority.issue("third"), made.ca)
    await until(lambda: server.sample("encserve_tls_reloads_total", outcome="loaded") == 2)


async def test_a_fifo_in_place_of_a_file_is_refused(
    start_server: StartServer, made: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No process writes to the FIFO, so a read would not end. The server keeps the certificate.

    After a regular file replaces the FIFO, the server loads this file.
    """
    files = _files(made, tmp_path / "files")
    server = await start_server(tls_cert_file=files.cert, tls_key_file=files.key, http_port=0)
    watch = server.app._certificates
    assert watch is not None
    files.cert.unlink()
    os.mkfifo(files.cert)
    for _ in range(2):
        await watch.look(MonotonicClock())
    problem = f"tls_cert_file {files.cert} cannot be read: must be a regular file; is a FIFO"
    assert len([it for it in caplog.records if problem in it.getMessage()]) == 1
    assert await http_call(server, context_of(made.ca)) == 200
    with pytest.raises(StartupError, match=r"must be a regular file; is a FIFO$"):
        await start_server(tls_cert_file=files.cert, tls_key_file=files.key)
    files.cert.unlink()
    files.cert.write_bytes(made.server.cert.read_bytes())
    await watch.look(MonotonicClock())
    assert server.sample("encserve_tls_files_refused") == 0


async def test_a_certificate_is_used_as_soon_as_it_is_valid(made: Certificates, tmp_path: Path) -> None:
    """A new certificate is not valid yet. Later, it becomes valid without a change of the files."""
    files = _files(made, tmp_path / "files")
    seen: list[str] = []
    observer: Any = SimpleNamespace(
        certificates_loaded=lambda *_: seen.append("loaded"), certificates_refused=lambda: seen.append("refused")
    )
    now = time.time()
    watch = certificate_files.Certificates(files, observer, lambda: now)
    later = made.authority.issue("soon", begins_in_days=1)
    files.cert.write_bytes(later.cert.read_bytes())
    files.key.write_bytes(later.key.read_bytes())
    for _ in range(2):
        await watch.look(MonotonicClock())
    assert (seen, watch.current.cert) == (["loaded", "refused"], made.server.cert.read_bytes())
    now += 2 * 86400
    for _ in range(2):
        await watch.look(MonotonicClock())
    assert (seen, watch.current.cert) == (["loaded", "refused", "loaded"], later.cert.read_bytes())


@pytest.mark.system  # takes more than a second
async def test_incomplete_handshakes_are_closed(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a handshake has not finished within 0.5 s, the server closes the connection. Other callers are served.

    At the limit of connections, a new connection replaces the oldest connection that has not finished its handshake.
    """
    monkeypatch.setattr(http_server, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(page, "_HANDSHAKE_SECONDS", 0.5)
    server = await start_server(max_connections=3, **flags(made.server))
    http = server.app._http
    assert http is not None
    context = context_of(made.ca)
    async with contextlib.AsyncExitStack() as silent:
        readers = [(await silent.enter_async_context(raw(server)))[0] for _ in range(2)]
        await until(lambda: len(http.handshakes) == 2)
        assert await http_call(server, context) == 200
        readers.append((await silent.enter_async_context(raw(server)))[0])
        assert await http_call(server, context) == 200  # the fourth connection replaces the oldest silent one
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
async def test_the_threads_of_the_metrics_page_are_bounded(
    start_server: StartServer, made: Certificates, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """The page serves at most eight connections at a time. A further connection closes the oldest connection.

    So health checks and Prometheus still get replies.
    """
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
    """The caller sends one byte at a time. The server closes the connection at the time limit."""
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
async def _connected(port: int, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Open a connection that sends only these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    yield reader
    writer.transport.abort()


async def test_large_messages_over_tls(shared_tls: FakeServer, made: Certificates) -> None:
    """Small and large requests on one connection, and a request in two TLS records, get complete replies."""
    server = shared_tls
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


def test_the_repr_hides_the_key(made: Certificates) -> None:
    assert "PRIVATE" not in repr(load_identity(TlsFiles(made.server.cert, made.server.key), time.time()))


async def test_a_client_certificate_names_the_caller(
    start_server: StartServer, made: Certificates, tmp_path: Path
) -> None:
    file = tmp_path / "callers.toml"
    file.write_text('[[caller]]\nname = "reports"\ncertificate_names = ["client.example"]\n')
    server = await start_server(**flags(made.server, made.ca), callers=file)
    assert await http_call(server, context_of(made.ca, made.client)) == 200
    await grpc_call(server, grpc_credentials(made.ca, made.client))
    assert server.sample("encserve_caller_calls_total", caller="reports", outcome="OK") == 2
    assert await http_call(server, context_of(made.ca, made.other_name)) == 401
    failed = await refusal(grpc_call(server, grpc_credentials(made.ca, made.other_name)))
    assert failed.code is grpc.StatusCode.UNAUTHENTICATED
