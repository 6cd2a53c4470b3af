"""A fast test from export to call.

The test exports a checkpoint, starts a server, and calls the server over gRPC and HTTP.
"""

import json
import urllib.request
from pathlib import Path

import pytest
from agreement import worst_relative_error
from checkpoints import export_golden, golden_cases
from real_server import real_server

from encserve_client import EncoderClient

pytestmark = pytest.mark.fast


def test_export_serve_call(tmp_path: Path) -> None:
    export_golden("split-qkv", tmp_path)
    ids, want = golden_cases("split-qkv")
    with real_server(tmp_path, "--http-port", "0") as server:
        with EncoderClient(server.target) as client:
            assert max(map(worst_relative_error, client.token_vectors(ids), want)) < 5e-5
            vector = client.embed([ids[0]], pooling="mean")[0]
        body = {"inputs": [ids[0].tolist()], "pooling": "mean", "normalize": False}
        request = urllib.request.Request(
            f"{server.url}/embed", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)[0] == pytest.approx(vector.tolist())
        server.terminate()
        assert server.wait() == 0
