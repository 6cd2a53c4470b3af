"""Tests of the client's load balancing. Each server is a real server with a fake engine."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dns_server import DnsServer
from fake_encoder import Caller
from fake_server import FakeServer, start_fake_server
from ports import free_port

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidInputError, RetryPolicy, Tls
from encserve_client._grpc.channel import SERVICE_NAME, channel_options
from encserve_client._grpc.target import is_balanced

IDS = [1, 2, 3]
Start = Callable[..., Awaitable[FakeServer]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Yield a function that starts a server. All started servers are stopped after the test."""
    servers: list[FakeServer] = []

    async def start_one(**settings: Any) -> FakeServer:
        servers.append(await start_fake_server(Path(tempfile.mkdtemp(dir=tmp_path)), **settings))
        return servers[-1]

    yield start_one
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)
    await asyncio.gather(*map(stop, servers))
    await asyncio.gather(*(server.channel.close() for server in servers))


async def stop(server: FakeServer) -> None:
    """Stop a server in the same way as the signal SIGTERM. Do nothing if the server is already stopped."""
    if not getattr(server, "stopped", False):
        server.stopped = True  # type: ignore[attr-defined]
        await server.app.stop()


def address(server: FakeServer) -> str:
    return f"{server.app.settings.host}:{server.app.grpc_port}"


def answered(server: FakeServer) -> int:
    labels = {"grpc_type": "unary", "grpc_service": SERVICE_NAME, "grpc_method": "Encode", "grpc_code": "OK"}
    return int(server.sample("grpc_server_handled_total", **labels))


def set_health(server: FakeServer, *, serving: bool) -> None:
    """Set the health status that a server reports. From then on, the server does not update the status itself."""
    health = server.app._health
    assert health._watching is not None
    health._watching.cancel()
    server.app._health_service.set_status({SERVICE_NAME: serving})


async def call_until(client: AsyncEncoderClient, condition: Callable[[], bool]) -> None:
    """Call `encode` again and again until a condition is true, for at most 60 s.

    A failed call fails the test.
    """
    async with asyncio.timeout(60):
        while not condition():
            await client.token_vectors([IDS])


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_calls_alternate_between_servers(start: Start, kind: str) -> None:
    servers = [await start(), await start()]
    caller = Caller(kind)
    client = caller.connect(target=[address(server) for server in servers])

    def counts() -> list[int]:
        return [answered(server) for server in servers]

    # Call until each server has answered once. During the first calls, only one connection may be ready.
    async with asyncio.timeout(60):
        while not all(counts()):
            await caller(client.token_vectors, [IDS])
    before = counts()
    for _ in range(200):
        await caller(client.token_vectors, [IDS])
    await caller.close(client)
    grown = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    assert sum(grown) == 200
    assert min(grown) >= 90, grown


async def test_a_server_that_is_not_serving_gets_no_calls(start: Start) -> None:
    one, other = await start(), await start()
    async with AsyncEncoderClient([address(one), address(other)]) as client:
        await call_until(client, lambda: answered(one) > 0 and answered(other) > 0)
        set_health(one, serving=False)
        await only_this_server_is_called(client, other, one)
        set_health(one, serving=True)
        seen = answered(one)
        await call_until(client, lambda: answered(one) > seen)


async def only_this_server_is_called(client: AsyncEncoderClient, chosen: FakeServer, other: FakeServer) -> None:
    """Call until 100 successive calls all go to the chosen server."""
    async with asyncio.timeout(60):
        while True:
            before = answered(chosen), answered(other)
            for _ in range(100):
                await client.token_vectors([IDS])
            if (answered(chosen), answered(other)) == (before[0] + 100, before[1]):
                return


async def test_a_single_server_gets_calls_despite_its_health(start: Start) -> None:
    server = await start()
    async with AsyncEncoderClient(address(server), retry=RetryPolicy(max_attempts=1)) as client:
        set_health(server, serving=False)
        assert (await client.token_vectors([IDS]))[0].shape == (3, 4)


async def test_a_restart_fails_no_call(start: Start) -> None:
    port = free_port()
    one, other = await start(grpc_port=port), await start()
    async with AsyncEncoderClient([address(one), address(other)]) as client:
        await call_until(client, lambda: answered(one) > 0 and answered(other) > 0)
        stopping = asyncio.ensure_future(stop(one))
        await call_until(client, stopping.done)
        again = await start(grpc_port=port)
        await stop(other)  # no call runs until `other` has stopped, so the client must connect to `again` itself
        await call_until(client, lambda: answered(again) > 20)


async def test_a_dns_name_is_resolved_to_all_addresses(start: Start) -> None:
    """A DNS name has the addresses of two servers. The servers are replaced one after the other.

    The client finds each new server through the changed DNS name, and no call fails.
    """
    port = free_port()
    one, other = [await start(host=host, grpc_port=port) for host in ("127.0.0.1", "127.0.0.2")]
    with DnsServer("127.0.0.1", "127.0.0.2") as dns:
        async with AsyncEncoderClient(f"dns://127.0.0.1:{dns.port}/encserve.test:{port}") as client:
            await call_until(client, lambda: answered(one) > 0 and answered(other) > 0)
            new = await start(host="127.0.0.3", grpc_port=port)
            dns.addresses = ("127.0.0.2", "127.0.0.3")
            stopping = asyncio.ensure_future(stop(one))
            await call_until(client, lambda: answered(new) > 0)
            await stopping
            newest = await start(host="127.0.0.4", grpc_port=port)
            dns.addresses = ("127.0.0.3", "127.0.0.4")
            stopping = asyncio.ensure_future(stop(other))
            await call_until(client, lambda: answered(newest) > 0)
            await stopping


async def test_an_added_server_gets_calls_after_a_renewal(start: Start) -> None:
    """A server is added to a DNS name, and the old server keeps running.

    The old server closes the connection when it reaches its maximum age. The client then resolves the name again, and
    the added server gets calls.
    """
    port = free_port()
    one = await start(host="127.0.0.1", grpc_port=port, max_connection_age_seconds=1.0)
    with DnsServer("127.0.0.1") as dns:
        target = f"dns://127.0.0.1:{dns.port}/encserve.test:{port}"
        async with AsyncEncoderClient(target, retry=RetryPolicy(max_attempts=1)) as client:
            await call_until(client, lambda: answered(one) > 0)
            added = await start(host="127.0.0.2", grpc_port=port)
            dns.addresses = ("127.0.0.1", "127.0.0.2")
            await call_until(client, lambda: answered(added) > 20)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_call_during_a_renewal_is_not_lost(start: Start, kind: str) -> None:
    """The server closes the connection during a call, and says in a GOAWAY frame that it did not process the call.

    gRPC sends the call again on a new connection, so the call succeeds.
    """
    port = free_port()
    servers: list[FakeServer] = []

    async def renew_at_first_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept an HTTP/2 connection and wait for a call. Then start a real server on the port and send GOAWAY."""
        settings, headers, goaway = 4, 1, 7
        writer.write(frame(settings, b""))
        await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        frame_type = None
        while frame_type != headers:
            header = await reader.readexactly(9)
            frame_type = header[3]
            await reader.readexactly(int.from_bytes(header[:3]))
        listener.close()
        servers.append(await start(grpc_port=port))
        last_stream, error_code = bytes(4), bytes(4)
        writer.write(frame(goaway, last_stream + error_code + b"max_age"))
        await reader.read()
        writer.close()

    caller = Caller(kind)
    async with await asyncio.start_server(renew_at_first_call, "127.0.0.1", port) as listener:
        client = caller.connect(target=f"127.0.0.1:{port}", retry=RetryPolicy(max_attempts=1))
        await caller(client.token_vectors, [IDS])
        await caller.close(client)
    assert [answered(server) for server in servers] == [1]


def frame(kind: int, payload: bytes) -> bytes:
    """Make an HTTP/2 frame of stream 0. This number means the connection itself (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload


async def test_a_stream_continues_on_another_server(start: Start) -> None:
    """The messages of a stream go to both servers. When one server stops, the other server gets all further messages.

    Each input gets a result, in input order.
    """
    servers = [await start(), await start()]
    sent: list[tuple[int, int]] = []

    def inputs() -> Iterator[list[int]]:
        """Yield inputs until each server has answered a message. Then yield 200 more inputs."""
        left = 200
        while left:
            left -= all(map(answered, servers))
            sent.append((1 + len(sent) % 7, 4))
            yield [1 + len(sent) % 9] * sent[-1][0]

    async with AsyncEncoderClient([address(server) for server in servers]) as client:
        shapes = []
        stopping = None
        async for _, rows in client.stream(inputs(), kind="tokens", max_in_flight=8):
            assert isinstance(rows, np.ndarray)
            shapes.append(rows.shape)
            if len(shapes) == 100:
                stopping = asyncio.ensure_future(stop(servers[0]))
        assert stopping is not None
        await stopping
    assert shapes == sent
    assert answered(servers[1]) > answered(servers[0])


@pytest.mark.parametrize(
    ("target", "balanced"),
    [
        ("localhost:50051", False),
        ("unix:///run/e.sock", False),
        ("ipv4:10.0.0.7:50051", False),
        ("dns:///encoder:50051", True),
        ("dns:encoder:50051", True),
        ("ipv4:10.0.0.7:50051,10.0.0.8:50051", True),
    ],
)
def test_targets_with_several_servers_are_balanced(target: str, balanced: bool) -> None:
    assert is_balanced(target) is balanced
    assert ("grpc.service_config" in dict(channel_options(target, 1, None, None))) is balanced


def test_the_service_config_of_the_caller_has_priority() -> None:
    options = channel_options("dns:///encoder:50051", 1, None, {"grpc.service_config": "{}"})
    assert dict(options)["grpc.service_config"] == "{}"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ([], "target must be a str such as 'localhost:50051', or a list of addresses; was empty"),
        (["10.0.0.7:1", 5], r"target\[1\] must be a str such as '10.0.0.7:50051'; was int"),
        (["10.0.0.7:1", "encoder:1"], r"target\[1\] must be an IP address with or without.*; was 'encoder:1'.*dns:///NAME:PORT"),
        (["10.0.0.7:99999"], r"target\[0\] must be an IP address with or without.*; was '10.0.0.7:99999'"),
        (["fd00::7:1"], r"target\[0\] must be an IP address with or without.*; was 'fd00::7:1'"),
        (["[10.0.0.7]:1"], r"target\[0\] must be an IP address with or without.*; was '\[10.0.0.7\]:1'"),
        (["10.0.0.7:1", "[fd00::7]:1"], "target must have IPv4 addresses or IPv6 addresses; had both"),
        ({"10.0.0.7:1"}, "target must be a str such as 'localhost:50051', or a list of addresses; was set"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
def test_a_wrong_list_of_addresses_is_refused(client: Any, target: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        client(target)


def test_several_addresses_need_a_server_name_for_tls() -> None:
    with pytest.raises(InvalidInputError, match="tls.server_name must be set to the name that all certificates have"):
        EncoderClient(["10.0.0.7:1", "10.0.0.8:1"], tls=True)
    with EncoderClient(["[fd00::7]:1", "[fd00::8]:1"], tls=Tls(server_name="encoder")) as client:
        assert repr(client) == "<EncoderClient ipv6:[fd00::7]:1,[fd00::8]:1 [open]>"
