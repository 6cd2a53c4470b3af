"""Two servers are stopped, killed and started again under load. No call fails.

The client calls both servers through Envoy, or alternates between both servers (round robin).
"""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from callers import Callers
from ports import free_port
from real_envoy import real_envoy
from real_server import RealServer, real_server

from encserve_client import EncoderClient

TEXTS = [f"{word} {'new ' * (n % 7)}world {'brave ' * n}".strip() for n in range(24) for word in ("hello", "world")]
# The longest time from the end of a server until a client notices the end.
NOTICE_SECONDS = 3.0


class Replica:
    """A server that always starts on the same port."""

    def __init__(self, models: Path, stack: contextlib.ExitStack) -> None:
        self._models = models
        self._stack = stack
        self._port = free_port()
        self.server = self.start()

    def start(self) -> RealServer:
        """Start the server and wait until it is ready."""
        flags = ("--grpc-port", str(self._port), "--intra-op-threads", "1")
        self.server = self._stack.enter_context(real_server(self._models, *flags))
        return self.server

    @property
    def answered(self) -> float:
        """The number of Encode calls that the server has answered since its last start."""
        return self.server.metric("grpc_server_handled_total", grpc_method="Encode", grpc_code="OK")

    def terminate(self) -> float:
        """Send SIGTERM, and wait until the process has ended. Return the time of the end."""
        self.server.terminate()
        assert self.server.wait() == 0
        return time.monotonic()

    def kill(self) -> float:
        """Send SIGKILL, and wait until the process has ended. Return the time of the end."""
        self.server.process.kill()
        self.server.wait()
        return time.monotonic()


class Replicas:
    """Two replicas, their addresses, and the expected hidden states of TEXTS."""

    def __init__(self, models: Path, stack: contextlib.ExitStack) -> None:
        self.one, self.other = Replica(models, stack), Replica(models, stack)
        self.targets = [replica.server.target for replica in (self.one, self.other)]
        with EncoderClient(self.targets[0]) as client:
            self.want = client.token_vectors(TEXTS)


@pytest.fixture
def replicas(small_models: Path) -> Iterator[Replicas]:
    with contextlib.ExitStack() as stack:
        yield Replicas(small_models, stack)


@pytest.fixture(params=["envoy", "round robin"])
def target(request: pytest.FixtureRequest, replicas: Replicas, tmp_path: Path) -> Iterator[str | Sequence[str]]:
    """The target for a client: Envoy's address, or the addresses of both replicas."""
    if request.param == "round robin":
        yield replicas.targets
    else:
        with real_envoy(tmp_path, replicas.targets) as envoy:
            yield envoy.target


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_no_call_fails_while_replicas_stop_and_restart(replicas: Replicas, target: Any, kind: str) -> None:
    """Stop, kill and start the replicas while 32 callers and two streams call them. No call fails.

    Every reply is right. The client has its default settings.
    """
    one, other = replicas.one, replicas.other
    with Callers(kind, target, TEXTS, replicas.want) as callers:
        callers.wait_until(lambda: one.answered > 100 and other.answered > 100, "both replicas answer")

        stopping = time.monotonic()
        stopped = one.terminate()
        before = other.answered
        callers.wait_until(lambda: other.answered > before + 200, "the second replica answers alone")
        one.start()
        callers.wait_until(lambda: one.answered > 100, "the stopped replica gets calls again")

        killing = time.monotonic()
        killed = other.kill()
        before = one.answered
        callers.wait_until(lambda: one.answered > before + 200, "the first replica answers alone")
        other.start()
        callers.wait_until(lambda: other.answered > 100, "the killed replica gets calls again")
        streamed, calm = callers.n_streamed, time.monotonic()

        # The worst moment to kill a replica is just after the other replica has become ready.
        one.kill()
        one.start()
        other.kill()
        other.start()
        callers.wait_until(lambda: one.answered > 100 and other.answered > 100, "both replicas answer again")
    assert callers.failed == []
    assert callers.n_streamed > streamed > 0
    # Among the calls that ended before `calm`, only calls during the stop or the kill of a replica may have retries.
    for call in callers.calls:
        if call.attempts > 1 and call.ended < calm:
            was_stopping = call.began < stopped + NOTICE_SECONDS and call.ended > stopping
            was_dying = call.began < killed + NOTICE_SECONDS and call.ended > killing
            assert was_stopping or was_dying, call


def test_no_call_fails_while_a_replica_hangs(replicas: Replicas, target: Any) -> None:
    """Suspend a replica: connections stay open but carry no data, as if the network was lost. No call fails."""
    one, other = replicas.one, replicas.other
    with Callers("async", target, TEXTS, replicas.want, n_callers=8) as callers:
        callers.wait_until(lambda: one.answered > 100 and other.answered > 100, "both replicas answer")
        one.server.process.send_signal(signal.SIGSTOP)
        hanging = time.monotonic() + 1  # by this time, each caller has called the suspended replica
        # Each caller and each stream gets a reply from the other replica after the time `hanging`.
        callers.wait_until(lambda: callers.all_answered_since(hanging), "the other replica answers all callers")
        one.server.process.send_signal(signal.SIGCONT)
        before = one.answered
        callers.wait_until(lambda: one.answered > before + 100, "the suspended replica gets calls again")
    assert callers.failed == []
    assert any(call.began < hanging < call.ended for call in callers.calls), "no call went to the suspended replica"
