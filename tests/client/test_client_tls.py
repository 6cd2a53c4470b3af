"""The client names the cause of a failed connection, and reads changed files again."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import certificates
import grpc
import pytest
from certificates import Certificates, Mount, Pair
from fake_encoder import FakeEncoder

from encserve_client import (
    AsyncEncoderClient,
    EncoderClient,
    InvalidInputError,
    RetryPolicy,
    ServerUnavailableError,
    Tls,
)
from encserve_client._grpc import channel as channels
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._logic.failures import Failure
from encserve_proto.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make_certificates(tmp_path_factory.mktemp("tls"))


def credentials(pair: Pair, client_ca: Path | None) -> grpc.ServerCredentials:
    """The files of a server."""
    ca = None if client_ca is None else client_ca.read_bytes()
    return grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())], ca, client_ca is not None)


Start = Callable[..., Any]


@pytest.fixture
async def start(service: FakeEncoder) -> AsyncIterator[Start]:
    """Start servers with these certificates; return their targets."""
    servers = []

    async def start(pair: Pair | None, client_ca: Path | None = None) -> str:
        server = grpc.aio.server()
        add_EncoderServiceServicer_to_server(service, server)
        servers.append(server)
        if pair is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials(pair, client_ca))
        await server.start()
        return f"localhost:{port}"

    yield start
    for server in servers:
        await server.stop(None)


async def said(target: str, **settings: Any) -> str:
    """The error text of both clients, which must be equal."""

    def ask() -> str:
        with EncoderClient(target, retry=ONCE, **settings) as client, pytest.raises(ServerUnavailableError) as error:
            client.models()
        return str(error.value)

    async with AsyncEncoderClient(target, retry=ONCE, **settings) as client:
        with pytest.raises(ServerUnavailableError) as error:
            await client.models()
    words, _, rest = str(error.value).partition(". gRPC says: ")
    assert rest
    assert (await asyncio.to_thread(ask)).partition(". gRPC says: ")[0] == words
    assert words.startswith(f"{target}: ")
    return words.removeprefix(f"{target}: ")


async def test_plaintext_against_tls(start: Start, made: Certificates) -> None:
    speaks = "the server speaks TLS, this client plaintext: give tls=True or Tls(ca=…), with the command --tls or --ca"
    assert await said(await start(made.server)) == speaks
    assert await said(await start(made.server, made.ca)) == speaks


async def test_tls_against_plaintext(start: Start, made: Certificates) -> None:
    told = await said(await start(None), tls=Tls(ca=made.ca))
    assert told == "the server speaks plaintext, this client TLS: leave tls out, or give the port that has TLS"


async def test_client_certificates(start: Start, made: Certificates) -> None:
    target = await start(made.server, made.ca)
    told = await said(target, tls=Tls(ca=made.ca))
    assert told.startswith("the server wants a client certificate: give tls=Tls(cert=…, key=…)")
    for wrong in (made.expired, made.stranger):
        told = await said(target, tls=Tls(ca=made.ca, cert=wrong.cert, key=wrong.key))
        assert told.startswith(f"the server does not take the client certificate of {wrong.cert}: it has expired, or")


async def test_server_certificates(start: Start, made: Certificates) -> None:
    told = await said(await start(made.expired), tls=Tls(ca=made.ca))
    assert told == "the server's certificate has expired"
    later = made.authority.issue("later", begins_in_days=1)
    told = await said(await start(later), tls=Tls(ca=made.ca))
    assert told == "the server's certificate is not valid yet, by the clock of this machine"
    told = await said(await start(made.other_name), tls=Tls(ca=made.ca))
    assert told == (
        "the server's certificate is not for 'localhost', but for 'other.example': connect to one of these names, or "
        "give it as Tls(server_name=…)"
    )
    target = await start(made.stranger)
    told = await said(target, tls=Tls(ca=made.ca))
    assert told.startswith(f"the server's certificate is of an authority that is not in {made.ca} (")
    told = await said(target, tls=True)
    assert told.startswith("the server's certificate is of an authority that is not in the list of authorities of this")


async def test_a_name_that_is_given(start: Start, made: Certificates) -> None:
    target = await start(made.other_name)
    async with AsyncEncoderClient(target, tls=Tls(ca=made.ca, server_name="other.example")) as client:
        assert len(await client.models()) == 1
    told = await said(target, tls=Tls(ca=made.ca, server_name="third.example"))
    assert told.startswith("the server's certificate is not for 'third.example', but for 'other.example'")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("dns:///localhost:{port}", "failed to connect to all addresses; last error: Socket closed"),
        ("localhost:1", "connections to all backends failing; last error: ipv4:127.0.0.1:{port}: Socket closed"),
        ("ipv4:127.0.0.1:{port},127.0.0.1:1", "failed to connect to all addresses; last error: Socket closed"),
        ("unix:///run/x", "failed to connect to all addresses; last error: Socket closed"),
        (  # gRPC's text for a name with two addresses, one of them without a server
            "localhost:{port}",
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:{port}: Failed to connect to "
            "remote host: Connection refused",
        ),
        (
            "ipv4:127.0.0.1:1,127.0.0.1:{port}",
            "failed to connect to all addresses; last error: ipv4:127.0.0.1:1: Connection refused",
        ),
    ],
)
async def test_where_it_asks(start: Start, made: Certificates, target: str, message: str) -> None:
    port = (await start(made.server)).rpartition(":")[2]
    failure = Failure(grpc.StatusCode.UNAVAILABLE, message.format(port=port))
    diagnosis = Diagnosis(target.format(port=port), None)
    assert diagnosis.may_help(failure) is not target.startswith("unix")
    explained = await asyncio.to_thread(diagnosis.explain, failure)
    assert ("the server speaks TLS" in explained.message) is not target.startswith("unix")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_servers_that_say_why(made: Certificates, version: ssl.TLSVersion) -> None:
    """Proxies send a TLS alert. gRPC's own server just closes the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server.cert, made.server.key)
    context.load_verify_locations(made.ca)
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, version
    cases = [
        (Tls(ca=made.ca), "the server wants a client certificate: "),
        (Tls(ca=made.ca, cert=made.stranger.cert, key=made.stranger.key), "alert unknown ca"),
        (Tls(ca=made.ca, cert=made.expired.cert, key=made.expired.key), "alert certificate expired"),
        (None, "the server speaks TLS"),
    ]
    failure = Failure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses: Socket closed")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            for _ in cases:
                with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as it:
                    it.recv(1)

        server = threading.Thread(target=refuse)
        server.start()
        target = f"localhost:{listener.getsockname()[1]}"
        for tls, words in cases:
            assert words in Diagnosis(target, tls).explain(failure).message
        server.join(timeout=10)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("failed to connect to all addresses; last error: ipv4:127.0.0.1:1: Connection refused", ""),
        ("Socket closed", ""),  # a connection that was established before
        ("failed to connect to all addresses: Socket closed", "DRAINING"),
    ],
)
def test_other_failures_cost_no_handshake(message: str, reason: str) -> None:
    assert not Diagnosis("127.0.0.1:1", None).may_help(Failure(grpc.StatusCode.UNAVAILABLE, message, reason))


@pytest.mark.parametrize("is_async", [True, False])
async def test_files_that_change(
    start: Start, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """A new call uses the new certificate. The client ignores a half-finished change."""
    monkeypatch.setattr(channels, "_LOOK_SECONDS", 0.0)
    mount = Mount(tmp_path / "mount")
    mount.put(made.stranger, made.ca)
    target = await start(made.server, made.ca)
    tls = Tls(ca=mount.ca, cert=mount.pair.cert, key=mount.pair.key)
    if is_async:
        async with AsyncEncoderClient(target, tls=tls, retry=ONCE) as client:
            with pytest.raises(ServerUnavailableError, match="does not take the client certificate"):
                await client.models()
            mount.put(made.client, made.ca)
            assert len(await client.models()) == 1
            mount.put(Pair(made.server.cert, made.client.key), made.ca)
            assert len(await client.models()) == 1
            assert len(client._links) == 1  # the old connection is closed
        return

    def ask() -> None:
        with EncoderClient(target, tls=tls, retry=ONCE) as client:
            with pytest.raises(ServerUnavailableError, match="does not take the client certificate"):
                client.models()
            mount.put(made.client, made.ca)
            assert len(client.models()) == 1
            mount.put(Pair(made.server.cert, made.client.key), made.ca)
            assert len(client.models()) == 1
            assert len(client._closers) == 1

    await asyncio.to_thread(ask)


async def test_a_stream_goes_on_while_files_change(
    start: Start, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running calls keep their connection, which closes after the last call."""
    monkeypatch.setattr(channels, "_LOOK_SECONDS", 0.0)
    mount = Mount(tmp_path / "mount")
    mount.put(made.client, made.ca)
    target = await start(made.server, made.ca)
    tls = Tls(ca=mount.ca, cert=mount.pair.cert, key=mount.pair.key)
    async with AsyncEncoderClient(target, tls=tls, retry=ONCE) as client:
        got = 0
        async for _ in client.embed_stream(["a"] * 20, max_in_flight=2):
            if got == 5:
                mount.put(made.authority.issue("client-2"), made.ca)
                assert len(await client.models()) == 1
                assert len(client._links) == 2
            got += 1
        assert got == 20
        assert len(client._links) == 1


def test_files_that_are_no_certificates(made: Certificates, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_bytes(made.ca.read_bytes()[:200])
    for wrong, words in (
        (Tls(ca=bad), f"^tls.ca {bad} holds no complete PEM certificate"),
        (
            Tls(cert=bad, key=made.client.key),
            f"^tls.cert {bad} and tls.key .* must be a PEM certificate and its private",
        ),
        (Tls(cert=made.client.cert, key=made.server.key), "^tls.cert .* must be a PEM certificate and its private key"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            EncoderClient(tls=wrong)


def test_a_server_that_hangs_is_not_waited_for(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port accepts connections and sends nothing."""
    monkeypatch.setattr("encserve_client._grpc.diagnosis._SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        failure = Failure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses: Socket closed")
        began = time.monotonic()
        assert Diagnosis(target, Tls(ca=made.ca)).explain(failure) == failure
        assert Diagnosis(target, None).explain(failure) == failure
        assert time.monotonic() - began < 2
