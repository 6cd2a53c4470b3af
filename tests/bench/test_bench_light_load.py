"""The light generator against real gRPC servers: statuses, replies of every size, flow control, and both loops."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from comparison.load import METHOD
from curves.http2 import Answer, LightConnection
from curves.light_load import light_closed_loop, light_open_loop
from hypothesis import given
from hypothesis import strategies as st
from real_server import real_server
from tiny_bundle import write_bundle

from encserve_cli.load import Call, make_calls
from encserve_cli.load.schedule import poisson_times
from encserve_client import EncoderClient, ProtocolError

Handler = Callable[[bytes, Any], bytes]


@contextlib.contextmanager
def server(handler: Handler, threads: int = 4) -> Iterator[str]:
    """A server of gRPC's own that answers every call so."""
    service, _, method = METHOD.strip("/").partition("/")
    pool = ThreadPoolExecutor(threads)
    it = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(handler)}
    it.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = it.add_insecure_port("127.0.0.1:0")
    it.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        it.stop(0).wait()
        pool.shutdown()


def collect(connection: LightConnection, count: int) -> dict[int, Answer]:
    """The answers of so many calls, by their names."""
    found: dict[int, Answer] = {}
    until = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} calls were answered"
        found |= {answer.stream: answer for answer in connection.answers(1.0)}
    return found


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with server(lambda request, _: request) as target:
        yield target


@pytest.fixture(scope="module")
def growing() -> Iterator[str]:
    """Answers a number with as many bytes."""
    with server(lambda request, _: b"x" * int(request)) as target:
        yield target


def test_every_status_is_read_as_it_was_sent() -> None:
    def refuse(request: bytes, context: Any) -> bytes:
        code = next(it for it in grpc.StatusCode if it.value[0] == int(request))
        context.set_trailing_metadata((("encserve-error-reason", "grpc-status 0"), ("x-bin", b"\x00grpc-status\x010")))
        context.abort(code, "grpc-status: voilà " * 20)
        raise AssertionError

    codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    with server(refuse) as target, contextlib.closing(LightConnection(target, METHOD)) as connection:
        for _ in range(3):  # the later ones could refer to headers of the first
            sent = {connection.send(str(code.value[0]).encode()): code for code in codes}
            answers = collect(connection, len(codes))
            assert {stream: answer.code for stream, answer in answers.items()} == sent
            assert all(answer.message == b"" for answer in answers.values())


@given(messages=st.lists(st.binary(max_size=3000), min_size=1, max_size=20))
def test_each_call_gets_its_own_reply(echo: str, messages: list[bytes]) -> None:
    with contextlib.closing(LightConnection(echo, METHOD)) as connection:
        sent = {connection.send(message): message for message in messages}
        answers = collect(connection, len(sent))
    assert {stream: answer.message for stream, answer in answers.items()} == sent
    assert {answer.code for answer in answers.values()} == {grpc.StatusCode.OK}


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 70_000, 3_000_000])
def test_replies_of_many_frames(growing: str, size: int) -> None:
    with contextlib.closing(LightConnection(growing, METHOD)) as connection:
        for _ in range(3):
            stream = connection.send(str(size).encode())
            answer = collect(connection, 1)[stream]
            assert (answer.code, len(answer.message), set(answer.message) <= {ord("x")}) == (
                grpc.StatusCode.OK,
                size,
                True,
            )


def test_more_than_a_connection_may_send_at_once(echo: str) -> None:
    """Of 64 KiB at first; a server ends the connection of whoever sends more than it has allowed."""
    with contextlib.closing(LightConnection(echo, METHOD)) as connection:
        sent = {connection.send(bytes([number % 256]) * 8000): number for number in range(500)}
        answers = collect(connection, len(sent))
    assert all(answers[stream].message == bytes([number % 256]) * 8000 for stream, number in sent.items())


def test_a_server_that_goes_away_is_an_error() -> None:
    with server(lambda request, _: request) as target:
        connection = LightConnection(target, METHOD)
        connection.send(b"1")
        collect(connection, 1)
    with contextlib.closing(connection), pytest.raises(OSError):  # noqa: PT011 - which of them is up to the kernel
        collect(connection, 1)


def test_a_message_that_does_not_fit(echo: str) -> None:
    with (
        contextlib.closing(LightConnection(echo, METHOD)) as connection,
        pytest.raises(ValueError, match="at most 16379 bytes; was 16380"),
    ):
        connection.send(bytes(16_380))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Call]]]:
    """encserve with a model of a few nodes, and calls to it."""
    models = write_bundle(tmp_path_factory.mktemp("models")).parents[1]
    with real_server(models) as it:
        with EncoderClient(it.target) as client:
            info = client.model()
        yield it.target, make_calls([3, 1, 20, 7], info)


def test_encserve_answers_a_closed_loop(real: tuple[str, list[Call]]) -> None:
    """What is counted of it, and when, is known on a clock that can be trusted: test_bench_light_counts.py."""
    target, calls = real
    result = light_closed_loop(target, calls, callers=4, seconds=1.0, warmup_seconds=0.1)
    assert result.answered == len(result.latencies) > 0
    assert min(result.latencies) > 0
    assert (result.refused, result.errors.total()) == ([], 0)
    assert result.cpu_seconds > 0


def test_encserve_answers_an_open_loop(real: tuple[str, list[Call]]) -> None:
    target, calls = real
    result = light_open_loop(target, calls, rate_per_second=100, seconds=1.0, seed=1, warmup_seconds=0.1)
    due = (poisson_times(100, 1.1, seed=1) >= 0.1).sum()
    assert len(result.latencies) == len(result.lateness) == due
    assert min(result.latencies) > 0
    assert min(result.lateness) >= 0
    assert (result.refused, result.errors.total()) == ([], 0)


def test_frames_that_it_does_not_know_are_an_error_and_no_wrong_reply() -> None:
    """gRPC's servers do not pad. One that did would have its padding taken for the reply."""
    padded = b"\0\0\x0a" + b"\0\x08" + b"\0\0\0\1" + b"\x04" + b"\0\0\0\0\0" + b"\0" * 4
    split = b"\0\0\0" + b"\1\1" + b"\0\0\0\1"
    for frames in (padded, split):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            target = f"127.0.0.1:{listener.getsockname()[1]}"
            with contextlib.closing(LightConnection(target, METHOD)) as connection, listener.accept()[0] as peer:
                connection.send(b"1")
                peer.sendall(frames)
                with pytest.raises(ConnectionError, match="pads or splits"):
                    collect(connection, 1)


def test_a_wrong_answer_is_no_good_call(real: tuple[str, list[Call]]) -> None:
    target, calls = real
    with grpc.insecure_channel(target) as channel:
        send: Any = channel.unary_unary(METHOD)
        reply: bytes = send(calls[0].data)
    with server(lambda *_: reply[: len(reply) // 2]) as wrong, pytest.raises(ProtocolError):
        light_closed_loop(wrong, calls[:1], callers=1, seconds=60, warmup_seconds=0)  # ends with the first answer
