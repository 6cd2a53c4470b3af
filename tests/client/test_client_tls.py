"""Tests of the client with TLS.

The client names the cause of a failed TLS connection. It reads certificate files again after they have changed.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import certificates
import grpc
import pytest
from certificates import Certificates, Mount, Pair
from fake_encoder import Caller, FakeEncoder

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
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_proto.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server

ONCE = RetryPolicy(max_attempts=1)
UNREACHED = Failure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make_certificates(tmp_path_factory.mktemp("tls"))


def credentials(pair: Pair, client_ca: Path | None) -> grpc.ServerCredentials:
    ca = None if client_ca is None else client_ca.read_bytes()
    return grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())], ca, client_ca is not None)


Start = Callable[..., Any]


@pytest.fixture
async def start(service: FakeEncoder) -> AsyncIterator[Start]:
    """Yield a function that starts a server with a certificate and returns the address of the server.

    With None as certificate, the server uses plaintext.
    """
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


async def failure_text(target: str, **settings: Any) -> str:
    """Let both clients fail to connect, and return the cause that the error names.

    Both clients must name the same cause.
    """
    texts = []
    for kind in ("sync", "async"):
        caller = Caller(kind)
        client = caller.connect(target=target, retry=ONCE, **settings)
        with pytest.raises(ServerUnavailableError) as error:
            await caller(client.models)
        await caller.close(client)
        text = str(error.value)
        assert text.startswith(f"{target}: ")
        texts.append(text.removeprefix(f"{target}: "))
    assert texts[0] == texts[1]
    return texts[0]


async def test_plaintext_against_tls(start: Start, made: Certificates) -> None:
    speaks = (
        "the server uses TLS, but this client uses plaintext: turn on TLS (tls=True or --tls), and give the "
        "authority's file (ca= or --ca) if the authority is not public"
    )
    assert await failure_text(await start(made.server)) == speaks
    assert await failure_text(await start(made.server, made.ca)) == speaks


async def test_tls_against_plaintext(start: Start, made: Certificates) -> None:
    text = await failure_text(await start(None), tls=Tls(ca=made.ca))
    assert text == (
        "the server uses plaintext, but this client uses TLS: leave out tls= (--tls, --ca, --cert), or give the port "
        "with TLS"
    )


async def test_client_certificates(start: Start, made: Certificates) -> None:
    target = await start(made.server, made.ca)
    text = await failure_text(target, tls=Tls(ca=made.ca))
    assert text.startswith(
        "the server requires a client certificate: give one (cert= and key=, or --cert and --tls-key)"
    )
    for wrong in (made.expired, made.stranger):
        text = await failure_text(target, tls=Tls(ca=made.ca, cert=wrong.cert, key=wrong.key))
        assert text.startswith(
            f"the server refuses the client certificate {wrong.cert}: the certificate has expired, or"
        )


async def test_server_certificates(start: Start, made: Certificates) -> None:
    text = await failure_text(await start(made.expired), tls=Tls(ca=made.ca))
    assert text == "the server's certificate has expired: renew it on the server"
    later = made.authority.issue("later", begins_in_days=1)
    text = await failure_text(await start(later), tls=Tls(ca=made.ca))
    assert text == "the server's certificate is not valid yet: check the clock of this machine and the certificate"
    text = await failure_text(await start(made.other_name), tls=Tls(ca=made.ca))
    assert text == (
        "the server's certificate is not for 'localhost', but for 'other.example': connect to one of these names, or "
        "give one (server_name= or --server-name)"
    )
    target = await start(made.stranger)
    text = await failure_text(target, tls=Tls(ca=made.ca))
    assert text.startswith(f"the authority of the server's certificate is not in {made.ca} (")
    assert text.endswith("): give the authority's file (ca= or --ca)")
    text = await failure_text(target, tls=True)
    assert text.startswith("the authority of the server's certificate is not in the list of authorities of this")


async def test_server_name_replaces_the_host_name(start: Start, made: Certificates) -> None:
    target = await start(made.other_name)
    async with AsyncEncoderClient(target, tls=Tls(ca=made.ca, server_name="other.example")) as client:
        assert len(await client.models()) == 1
    text = await failure_text(target, tls=Tls(ca=made.ca, server_name="third.example"))
    assert text.startswith("the server's certificate is not for 'third.example', but for 'other.example'")


@pytest.mark.parametrize(
    ("target", "is_named"),
    [
        ("dns:///localhost:{port}", True),
        ("dns:localhost:{port}", True),
        ("ipv4:127.0.0.1:{port},127.0.0.1:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:{port}", True),
        ("dns://127.0.0.1/localhost:{port}", False),  # a local DNS server may resolve the name to another address
    ],
)
async def test_the_diagnosis_tries_every_address(start: Start, made: Certificates, target: str, is_named: bool) -> None:
    port = (await start(made.server)).rpartition(":")[2]
    diagnosis = Diagnosis(target.format(port=port), None)
    explained = await asyncio.to_thread(diagnosis.explain, UNREACHED)
    assert ("the server uses TLS" in explained.message) is is_named


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_alerts_are_named(made: Certificates, version: ssl.TLSVersion) -> None:
    """A server refuses connections with a TLS alert, and the error text of the client explains the alert.

    Proxies send such alerts. A gRPC server only closes the connection.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server.cert, made.server.key)
    context.load_verify_locations(made.ca)
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, version
    cases = [
        (Tls(ca=made.ca), "the server requires a client certificate: "),
        (Tls(ca=made.ca, cert=made.stranger.cert, key=made.stranger.key), "alert unknown ca"),
        (Tls(ca=made.ca, cert=made.expired.cert, key=made.expired.key), "alert certificate expired"),
        (None, "the server uses TLS"),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as it:
                        it.recv(1)

        server = threading.Thread(target=refuse)
        server.start()
        target = f"localhost:{listener.getsockname()[1]}"
        for tls, words in cases:
            assert words in Diagnosis(target, tls).explain(UNREACHED).message
        listener.shutdown(socket.SHUT_RDWR)
        server.join(timeout=10)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_changed_files_are_read_again(
    start: Start, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The certificate files change while the client is open. The next call uses the new certificate.

    If the new key does not match the new certificate, the client keeps the old certificate and key.
    """
    monkeypatch.setattr(channels, "_CHECK_SECONDS", 0.0)
    mount = Mount(tmp_path / "mount")
    mount.put(made.stranger, made.ca)
    caller = Caller(kind)
    tls = Tls(ca=mount.ca, cert=mount.pair.cert, key=mount.pair.key)
    client = caller.connect(target=await start(made.server, made.ca), tls=tls, retry=ONCE)
    raw = client.raw_method("GetModel")
    with pytest.raises(ServerUnavailableError, match="refuses the client certificate"):
        await caller(client.models)
    for pair in (made.client, Pair(made.server.cert, made.client.key)):
        mount.put(pair, made.ca)
        assert pb.GetModelResponse.FromString(await caller(raw, b"", timeout=30)).model.name == "tiny"
        assert len(await caller(client.models)) == 1
    assert (
        len(client._connections if kind == "async" else client._closers) == 1
    )  # the client has closed the old connection
    await caller.close(client)


async def test_a_stream_continues_while_files_change(
    start: Start, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate files change during a stream. The next messages of the stream use a new connection.

    The client closes the old connection when no message uses the connection.
    """
    monkeypatch.setattr(channels, "_CHECK_SECONDS", 0.0)
    mount = Mount(tmp_path / "mount")
    mount.put(made.client, made.ca)
    target = await start(made.server, made.ca)
    tls = Tls(ca=mount.ca, cert=mount.pair.cert, key=mount.pair.key)
    async with AsyncEncoderClient(target, tls=tls, retry=ONCE) as client:
        got = 0
        async for _ in client.stream(["a"] * 20, max_in_flight=2):
            if got == 5:
                mount.put(made.authority.issue("client-2"), made.ca)
                assert len(await client.models()) == 1
            got += 1
        assert got == 20
        assert len(client._connections) == 1


def test_invalid_certificate_files_are_refused(made: Certificates, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_bytes(made.ca.read_bytes()[:200])
    for tls, text in (
        (Tls(ca=bad), f"^tls.ca must be a PEM file of whole certificates; was {bad}$"),
        (
            Tls(cert=bad, key=made.client.key),
            f"^tls.cert must be a PEM certificate, with its private key .* in tls.key; were {bad} and",
        ),
        (Tls(cert=made.client.cert, key=made.server.key), "^tls.cert must be a PEM certificate, with its private key"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            EncoderClient(tls=tls)


def test_the_diagnosis_of_a_silent_server_ends(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts connections and sends nothing. The diagnosis ends after its timeout."""
    monkeypatch.setattr("encserve_client._grpc.diagnosis._SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        for tls in (Tls(ca=made.ca), None):
            text = Diagnosis(target, tls).explain(UNREACHED).message
            assert text.startswith(
                "a process accepts connections here, but sends nothing for 0.1 s: the process hangs, or"
            )


async def test_a_server_with_tls_but_without_http2(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port speaks HTTPS with HTTP/1.1, like the HTTP port of encserve-server."""
    monkeypatch.setattr("encserve_client._grpc.diagnosis._SECONDS", 0.2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server.cert, made.server.key)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await reader.read()

    server = await asyncio.start_server(wait, "127.0.0.1", 0, ssl=context)
    target = f"localhost:{server.sockets[0].getsockname()[1]}"
    text = await failure_text(target, tls=Tls(ca=made.ca))
    assert text.startswith("a server with TLS answers here, but not in HTTP/2: set the target")
    server.close()
