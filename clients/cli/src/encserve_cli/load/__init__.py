"""The load generator behind `encserve bench`, for scripts too.

    from encserve_client import EncoderClient
    from encserve_cli.load import closed_loop, make_calls, real_text_lengths, sample_lengths

    if __name__ == "__main__":
        with EncoderClient(target) as client:
            info = client.model()
        calls = make_calls(sample_lengths(real_text_lengths(), 4096, seed=0), info)
        print(closed_loop(target, calls, concurrency=16, seconds=10).tokens_per_second)

Its names may change with any version.
"""

from encserve_cli.load.calls import Call, Expected, Request, make_calls, make_text_calls
from encserve_cli.load.lengths import parse_lengths, read_lengths, real_text_lengths, sample_lengths
from encserve_cli.load.loops import closed_loop, open_loop
from encserve_cli.load.samples import LoadResult
from encserve_cli.load.senders import Connection
from encserve_cli.load.server_view import ServerView

__all__ = [
    "Call",
    "Connection",
    "Expected",
    "LoadResult",
    "Request",
    "ServerView",
    "closed_loop",
    "make_calls",
    "make_text_calls",
    "open_loop",
    "parse_lengths",
    "read_lengths",
    "real_text_lengths",
    "sample_lengths",
]
