"""The server ends calls that make no progress. The test takes about a minute, but little CPU time."""

import time
from pathlib import Path

from hostile_attacks import attack, hold
from hostile_calls import PATHS, non_readers, slow_senders
from hostile_measure import hostile_server, wait_for_metric
from hostile_models import write_wide

CALLERS, N_TOKENS = 12, 64
# The server allows a call 30 s, and 1 s more for each MiB of the reply. The replies have less than 8 MiB. After these
# 38 s, the server has 7 s to notice that the time is over.
ENDED_SECONDS = 30 + 8 + 7


def test_callers_without_progress_are_ended(tmp_path: Path) -> None:
    """The server ends calls of callers that send slowly or do not read, on every protocol.

    After 10 s, all connections are still open. After ENDED_SECONDS, most connections are closed. A comment in the test
    explains the exceptions.
    """
    write_wide(tmp_path)
    with hostile_server(tmp_path) as server:
        connections = Path(f"/proc/{server.process.pid}/fd")
        before = len(list(connections.iterdir()))
        holders = [slow_senders(server, protocol, CALLERS) for protocol in PATHS]
        holders += [non_readers(server, protocol, CALLERS, n_tokens=N_TOKENS) for protocol in PATHS]
        with attack(hold, *holders) as held:
            time.sleep(10)
            assert len(list(connections.iterdir())) >= before + CALLERS * len(holders)
            time.sleep(ENDED_SECONDS - 10)
            left = len(list(connections.iterdir())) - before
            in_flight = server.metric("encserve_in_flight_requests")
            report = held.stop()
        # Three groups may still have open connections:
        # - slow senders over gRPC: the call has ended, but the connection may stay open
        # - slow senders in a stream: the call goes on, because gRPC treats an incomplete message as an idle stream
        # - slow senders over HTTP: the call goes on, because each received 64 KiB gives 1 s more
        # HTTP callers that do not read cannot notice a closed connection, so `ended` has no HTTP group.
        assert left <= 3 * CALLERS + CALLERS // 2, (left, report)
        ended = {name: outcomes for name, outcomes in report.items() if "http" not in name}
        assert ended.pop("slow senders, stream") == {"held": CALLERS}
        assert not [name for name, outcomes in ended.items() if "held" in outcomes], report
        assert in_flight == 2 * CALLERS  # the slow senders in a stream and over HTTP
        wait_for_metric(server, "encserve_in_flight_requests", 0)
