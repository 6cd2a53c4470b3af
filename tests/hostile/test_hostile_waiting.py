"""The server takes back what callers without progress hold: a test of a minute that takes no CPU."""

import time
from pathlib import Path

from hostile_attacks import attack, hold
from hostile_calls import PATHS, non_readers, slow_senders
from hostile_measure import hostile_server, wait_for_metric
from hostile_models import write_wide

CALLERS, N_TOKENS = 12, 64
# 30 s, a second for each MiB of a reply, and a few more for the server to notice.
ENDED_SECONDS = 30 + 8 + 7


def test_callers_without_progress_are_ended(tmp_path: Path) -> None:
    """On every protocol at once. The control is that they were held for a while."""
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
        # Those by HTTP that read nothing cannot see their end, but the server's side of their connections is closed.
        # gRPC does not tell a stream whose message does not become whole from an idle one: those stay, in their places.
        # Senders that gRPC has answered keep their connections.
        assert left <= 3 * CALLERS + CALLERS // 2, (left, report)
        ended = {name: outcomes for name, outcomes in report.items() if "http" not in name}
        assert ended.pop("slow senders, stream") == {"held": CALLERS}
        assert not [name for name, outcomes in ended.items() if "held" in outcomes], report
        # Senders by HTTP have 1 s more for each of the 63 times 64 KiB that have come, so they are still there too.
        assert in_flight == 2 * CALLERS
        wait_for_metric(server, "encserve_in_flight_requests", 0)
