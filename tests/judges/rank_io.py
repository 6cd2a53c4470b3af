"""Runs the clients of a rank judge. Each client ranks the same documents with our server.

A rank judge is a program `*_ranks.py`. It runs as `PROGRAM ADDRESS MODEL REQUESTS`. REQUESTS is a JSON file with
`query` and `documents`. The program prints a JSON object. For each client, the object has the ranks as pairs
[index, score], or the client's error.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

address, model, _requests_file = sys.argv[1:]
_requests = json.loads(Path(_requests_file).read_text(encoding="utf-8"))
query: str = _requests["query"]
documents: list[str] = _requests["documents"]
Ranks = list[tuple[int, float]]


def ranks_of(results: Iterable[Any]) -> Ranks:
    """Return the ranks of results that have the attributes index and relevance_score."""
    return [(it.index, it.relevance_score) for it in results]


def rank_with(clients: Mapping[str, Callable[[], Ranks]]) -> None:
    """Call each client, and print the client's ranks or error."""
    found: dict[str, Any] = {}
    for name, call in clients.items():
        try:
            found[name] = call()
        except Exception:  # the other clients still run; the test of this client reports the error
            found[name] = traceback.format_exc()
    sys.stdout.write(f"\n{json.dumps(found)}")
