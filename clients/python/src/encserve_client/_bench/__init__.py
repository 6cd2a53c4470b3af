"""The load generator behind `encserve bench`, for scripts too.

    from encserve_client import EncoderClient
    from encserve_client._bench import closed_loop, make_calls, real_text_lengths, sample_lengths

    if __name__ == "__main__":
        with EncoderClient(target) as client:
            info = client.model()
        calls = make_calls(sample_lengths(real_text_lengths(), 4096, seed=0), info)
        print(closed_loop(target, calls, concurrency=16, seconds=10).tokens_per_second)

Its names may change with any version.
"""

from encserve_client._bench._calls import Call, Expected, make_calls, make_text_calls
from encserve_client._bench._lengths import parse_lengths, read_lengths, real_text_lengths, sample_lengths
from encserve_client._bench._load import closed_loop, open_loop
from encserve_client._bench._samples import LoadResult
from encserve_client._bench._server_view import ServerView
from encserve_client._bench._wire import Connection

__all__ = [
    "Call",
    "Connection",
    "Expected",
    "LoadResult",
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
