"""Tests of how the client connects: targets, keys, proxies, and the errors of connections without TLS."""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from connect_proxy import ConnectProxy
from fake_encoder import Caller, FakeEncoder
from fake_server import start_fake_server
from ports import free_port

from encserve_client import (
    AsyncEncoderClient,
    EncoderClient,
    InvalidInputError,
    PlaintextKeyWarning,
    RetryPolicy,
    ServerUnavailableError,
    Tls,
)
from encserve_client._grpc.channel import channel_options
from encserve_client._grpc.diagnosis import Diagnosis
from encserve_client._logic.failures import Failure

ONCE = RetryPolicy(max_attempts=1)
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "NO_PROXY")
UNREACHED = Failure(grpc.StatusCode.UNAVAILABLE, "failed to connect")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "ENCSERVE_TARGET", "ENCSERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


async def error_of(caller: Caller, target: str, **settings: Any) -> str:
    """Return the error of a call to a server that cannot be reached."""
    client = caller.connect(target=target, **{"retry": ONCE, **settings})
    with pytest.raises(ServerUnavailableError) as error:
        await caller(client.models)
    return str(error.value)


# Tests of targets.


@pytest.mark.parametrize(
    ("target", "complete"),
    [
        ("localhost", "localhost:50051"),
        (" encoder:7 \n", "encoder:7"),
        ("10.0.0.7", "10.0.0.7:50051"),
        ("[fd00::7]", "[fd00::7]:50051"),
        ("[fd00::7]:7", "[fd00::7]:7"),
        ("dns:///encoder", "dns:///encoder:50051"),
        ("dns://10.0.0.2/encoder:7", "dns://10.0.0.2/encoder:7"),
        ("dns:encoder", "dns:encoder:50051"),
        ("unix:///run/e.sock", "unix:///run/e.sock"),
        (["10.0.0.7", "10.0.0.8:7"], "ipv4:10.0.0.7:50051,10.0.0.8:7"),
        (["[fd00::7]"], "ipv6:[fd00::7]:50051"),
    ],
)
def test_a_target_without_a_port_gets_the_default_port(target: Any, complete: str) -> None:
    with EncoderClient(target) as client:
        assert repr(client) == f"<EncoderClient {complete} [open]>"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("http://localhost:8080", r"^target must be host:port, without http://; was 'http://localhost:8080'"),
        ("https://encoder", r"without https://; .* \(50051 by default\), and turn on TLS \(tls=True or --tls\)$"),
        ("grpc://encoder:1", "without grpc://"),
        ("encoder:", "^target must be host:port, such as 'localhost:50051' or .*; was 'encoder:'$"),
        ("encoder:https", "target must be host:port"),
        ("encoder:65536", "target must be host:port"),
        ("encoder:0", "target must be host:port"),
        ("fd00::7", "target must be host:port"),
        ("[10.0.0.7]:1", "target must be host:port"),
        ("encoder:1/path", "target must be host:port"),
        ("two words:1", "target must be host:port"),
        ("dns:///encoder:https", "target must be host:port"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_refused(target: str, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        EncoderClient(target)


def test_the_target_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument overrides the variable. An empty variable is ignored."""
    monkeypatch.setenv("ENCSERVE_TARGET", "encoder\n")
    with EncoderClient() as client, EncoderClient("other:1") as other:
        assert (repr(client), repr(other)) == ("<EncoderClient encoder:50051 [open]>", "<EncoderClient other:1 [open]>")
    monkeypatch.setenv("ENCSERVE_TARGET", "http://encoder")
    with pytest.raises(InvalidInputError, match="^ENCSERVE_TARGET must be host:port, without http://"):
        EncoderClient()
    monkeypatch.setenv("ENCSERVE_TARGET", "")
    with EncoderClient() as client:
        assert repr(client) == "<EncoderClient localhost:50051 [open]>"


# Tests of keys.


@pytest.mark.parametrize("key", ["secret", " secret\n", "\ufeffsecret\r\n"])
async def test_a_key_is_sent_without_line_breaks_and_byte_order_mark(
    caller: Caller, service: FakeEncoder, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The key comes from the argument or from the environment. The argument has priority; "" means no key."""
    await caller(caller.connect(api_key=key).token_vectors, [[1]])
    monkeypatch.setenv("ENCSERVE_API_KEY", key)
    await caller(caller.connect().token_vectors, [[1]])
    assert [sent["authorization"] for sent in service.metadata] == ["Bearer secret"] * 2
    service.metadata.clear()
    await caller(caller.connect(api_key="other").token_vectors, [[1]])
    await caller(caller.connect(metadata={"authorization": "Basic x"}).token_vectors, [[1]])
    await caller(caller.connect(api_key="").token_vectors, [[1]])
    assert [sent.get("authorization") for sent in service.metadata] == ["Bearer other", "Basic x", None]


def test_a_key_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the argument or the variable, and does not contain the key."""
    text = "must be only the key, in printable ASCII without spaces; character 7 of 10 is not"
    for key in ("secret\nkey", "secret key", "secretükey"):
        with pytest.raises(InvalidInputError, match=f"^api_key {text}") as error:
            EncoderClient(api_key=key)
        assert "secret" not in str(error.value)
        monkeypatch.setenv("ENCSERVE_API_KEY", key)
        with pytest.raises(InvalidInputError, match=f"^ENCSERVE_API_KEY {text}"):
            EncoderClient()
    with pytest.raises(InvalidInputError, match="api_key must be left out if metadata has 'authorization'"):
        EncoderClient(api_key="secret", metadata={"authorization": "Basic x"})


@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
@pytest.mark.parametrize("target", ["10.0.0.7", "encoder:1", "dns:///encoder", ["127.0.0.1:1", "10.0.0.7:1"]])
def test_a_key_in_plaintext_to_another_machine_warns(client: Any, target: Any) -> None:
    with pytest.warns(
        PlaintextKeyWarning, match="the key goes to .* without encryption.* turn on TLS .tls=True or --tls"
    ) as warned:
        client(target, api_key="secret")
    assert [warning.filename for warning in warned] == [__file__]
    assert "secret" not in str(warned[0].message)


@pytest.mark.parametrize("target", ["localhost", "127.0.0.1", "[::1]:1", "dns:///localhost:1", "unix:///run/e.sock"])
def test_a_key_on_this_machine_gives_no_warning(target: str) -> None:
    EncoderClient(target, api_key="secret").close()
    EncoderClient("10.0.0.7", tls=True, api_key="secret").close()
    EncoderClient("10.0.0.7", credentials=grpc.ssl_channel_credentials(), api_key="secret").close()


# Tests of proxies.


@pytest.mark.parametrize("target", ["localhost", "127.0.0.1"])
async def test_loopback_needs_no_proxy(
    caller: Caller, service: FakeEncoder, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    client = caller.connect(target=f"{target}:{service.target.rpartition(':')[2]}")
    assert len(await caller(client.models)) == 1


async def test_calls_go_through_a_proxy(caller: Caller, service: FakeEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ConnectProxy(int(service.target.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        client = caller.connect(target="encoder.invalid")
        assert len(await caller(client.models)) == 1
        assert set(proxy.asked) == {"encoder.invalid:50051"}
        await caller.close(client)


async def test_an_error_behind_a_proxy_names_both_addresses(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the server's address, the proxy's address, and the cause from gRPC's error."""
    begin, end = "encoder.invalid:7: through the proxy", "or put the server into NO_PROXY for a direct connection"
    async with ConnectProxy(None) as refusing:
        for address, cause in (("127.0.0.1:1", "Connection refused"), (refusing.address, "403")):
            monkeypatch.setenv("https_proxy", f"http://user:secret@{address}")
            text = await error_of(caller, "encoder.invalid:7")
            assert text.startswith(f"{begin} {address} (https_proxy): ")
            assert cause in text
            assert end in text
            assert "secret" not in text
        arguments = {"grpc.http_proxy": f"http://{refusing.address}"}
        text = await error_of(caller, "encoder.invalid:7", channel_arguments=arguments)
        assert text.startswith(f"{begin} {refusing.address} (grpc.http_proxy): ")


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY", "no_grpc_proxy"])
@pytest.mark.parametrize(
    ("exempt", "target", "has_proxy"),
    [
        ("", "encoder:1", True),
        ("encoder", "encoder:1", False),
        ("other, Encoder", "encoder:1", False),
        ("coder", "encoder:1", True),
        ("example.org", "dns:///encoder.example.org:1", False),
        (".example.org", "encoder.example.org:1", False),
        ("*.example.org", "encoder.example.org:1", False),
        ("example.org", "encoder.org:1", True),
        ("*", "encoder:1", False),
        ("10.0.0.0/8", "10.0.0.7:1", False),
        ("10.0.0.0/8", "11.0.0.7:1", True),
        ("10.0.0.0/8", "encoder:1", True),
        ("fd00::7", "[fd00::7]:1", False),
        ("", "localhost:1", False),
        ("", "[::1]:1", False),
        ("", "unix:///run/e.sock", False),
        ("", "ipv4:10.0.0.7:1,10.0.0.8:1", False),  # gRPC would send the whole list to the proxy as one name
    ],
)
def test_targets_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variable: str, exempt: str, target: str, has_proxy: bool
) -> None:
    monkeypatch.setenv(variable, exempt)
    options = dict(channel_options(target, 1, None, None))
    assert options.get("grpc.enable_http_proxy", 1) == has_proxy
    forced = dict(channel_options(target, 1, None, {"grpc.enable_http_proxy": 1}))
    assert forced["grpc.enable_http_proxy"] == 1


# Tests of failed connections.


async def test_several_addresses_without_a_server(caller: Caller) -> None:
    ports = [free_port(), free_port()]
    text = await error_of(caller, f"ipv4:127.0.0.1:{ports[0]},127.0.0.2:{ports[1]}")
    for host, port in zip(("127.0.0.1", "127.0.0.2"), ports, strict=True):
        assert f"{host}:{port}: no encserve server here: connection refused" in text


async def test_a_missing_socket_file(caller: Caller, tmp_path: Path) -> None:
    text = await error_of(caller, f"unix:{tmp_path}/e.sock")
    assert text.startswith(f"unix:{tmp_path}/e.sock: no encserve server here: no such file or directory. Start one")


def test_a_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    text = Diagnosis("encoder.invalid:7", None).explain(UNREACHED).message
    assert text.startswith("the name 'encoder.invalid' cannot be resolved (Name or service not known): set the target")


@contextlib.asynccontextmanager
async def raw_server(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[int]:
    """Yield the port of a server that handles each connection with a function."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_the_http_port_of_a_server(caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)
    server = await start_fake_server(tmp_path, http_port=0)
    text = await error_of(caller, f"127.0.0.1:{server.app.http_port}")
    assert ": an HTTP server answers here, not a gRPC server: set the target (target=, --target or ENCSERVE" in text
    assert "to the server's gRPC port, 50051 by default" in text
    await server.channel.close()
    await server.app.stop()


async def test_a_server_of_another_protocol(caller: Caller) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await writer.drain()

    async with raw_server(greet) as port:
        text = await error_of(caller, f"127.0.0.1:{port}")
    assert text.startswith(f"127.0.0.1:{port}: a server that does not speak gRPC answers here: set the target")


async def test_a_server_that_answers_is_not_the_cause(service: FakeEncoder) -> None:
    """A proxy reports UNAVAILABLE, but a test connection to the server works. So the client adds no cause."""
    for failure in (UNREACHED, Failure(grpc.StatusCode.UNAVAILABLE, "no healthy upstream")):
        assert await asyncio.to_thread(Diagnosis(service.target, None).explain, failure) == failure


@pytest.mark.parametrize(
    "failure",
    [
        Failure(grpc.StatusCode.UNAVAILABLE, "the server stops", "DRAINING"),
        Failure(grpc.StatusCode.INTERNAL, "failed to connect"),
    ],
)
def test_a_servers_own_failure_starts_no_diagnosis(failure: Failure) -> None:
    assert not Diagnosis("127.0.0.1:1", None).may_help(failure)
    assert Diagnosis("127.0.0.1:1", None).explain(failure) is failure


def test_a_machine_that_goes_down_is_detected() -> None:
    """The client sends keepalive pings, also to a single server. So gRPC drops a dead connection within 30 s."""
    for target in ("localhost:50051", "dns:///encoder:50051"):
        options = dict(channel_options(target, 1, None, None))
        total = int(options["grpc.keepalive_time_ms"]) + int(options["grpc.keepalive_timeout_ms"])
        assert 10_000 < total < 30_000


@pytest.mark.system
async def test_grpc_writes_nothing_on_stderr(service: FakeEncoder) -> None:
    """The client's error has the cause of a failure. gRPC writes a log only if GRPC_VERBOSITY is set."""
    code = (
        "import sys, encserve_client as e\n"
        "try: e.EncoderClient(sys.argv[1], tls=True, retry=e.RetryPolicy(max_attempts=1)).models()\n"
        "except e.ServerUnavailableError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    logged = []
    for more in ({}, {"GRPC_VERBOSITY": "INFO"}):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", code, service.target],
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "the server uses plaintext, but this client uses TLS" in done.stdout
        logged.append(done.stderr)
    assert logged[0] == ""
    assert logged[1] != ""


# Tests of pickling.


@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
def test_a_client_cannot_be_pickled(client: Any) -> None:
    """Ray and multiprocessing pickle the objects that a function uses. The error says what to do instead."""
    text = f"^{client.__name__} has open connections and cannot be pickled or copied: make a new client in the function"
    for settings in ({}, {"tls": Tls()}):
        with pytest.raises(TypeError, match=text):
            pickle.dumps({"client": client(**settings)})
