"""The server ends calls that make no progress. The test takes a minute, and needs no CPU."""

import time
from pathlib import Path

from hostile_attacks import attack, hold
from hostile_calls import PATHS, non_readers, slow_senders
from hostile_measure import hostile_server, wait_for_metric
from hostile_models import write_wide

CALLERS, N_TOKENS = 12, 64
# The time until a call ends: 30 s, 1 s for each MiB of a reply of 8 MiB, and 7 s for the server to notice.
ENDED_SECONDS = 30 + 8 + 7


def test_callers_without_progress_are_ended(tmp_path: Path) -> None:
    """The callers send slowly or do not read, over every protocol. For the first 10 s, all their calls stay open."""
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
        # Three groups may keep their connections. Slow senders over gRPC keep theirs after their calls end. Slow
        # senders of a stream keep theirs, because gRPC takes an incomplete message for an idle stream. Slow senders
        # over HTTP get 1 s more for each 64 KiB received. HTTP callers that do not read cannot see that the server
        # closed their connection.
        assert left <= 3 * CALLERS + CALLERS // 2, (left, report)
        ended = {name: outcomes for name, outcomes in report.items() if "http" not in name}
        assert ended.pop("slow senders, stream") == {"held": CALLERS}
        assert not [name for name, outcomes in ended.items() if "held" in outcomes], report
        assert in_flight == 2 * CALLERS  # slow senders of a stream and over HTTP
        wait_for_metric(server, "encserve_in_flight_requests", 0)
