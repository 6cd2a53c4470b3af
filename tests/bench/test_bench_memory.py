"""Tests of the memory of exports, of servers that share weights, and of a server that encodes long texts.

The models have the size of BERT-base. The tests need Linux.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import export_memory
import pytest
from harness.machine import peak_bytes
from harness.workload import TokenIds, random_workload
from real_server import RealServer, real_server

from encserve_client import EncoderClient

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(3600)]

EXPORT = Path(sys.executable).parent / "encserve-export"
VOCABULARY = 30_522
BERT_BASE: dict[str, object] = {"vocab_size": VOCABULARY, "d_model": 768, "n_heads": 12, "d_ff": 3072, "n_layers": 12}
BERT_BASE |= {"activation": "gelu", "position": "learned"}
SERVERS = 4
LONGEST_TOKENS = 8192
MIB = 2**20


def export_random_weights(folder: Path, **fields: object) -> tuple[int, int]:
    """Export a model with random weights.

    Return the bytes of its weights and the peak memory of the export in bytes.
    """
    file = folder / "config.json"
    file.write_text(json.dumps(BERT_BASE | fields))
    command: list[str | Path] = [EXPORT, "init", "--config", file, "--model-repository", folder / "models"]
    peak = 0
    with subprocess.Popen([*command, "--name", "m"]) as process:
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            time.sleep(0.1)
    assert process.returncode == 0
    return (folder / "models/m/1/model.onnx.data").stat().st_size, peak


def encode_at_once(server: RealServer, sequences: Sequence[TokenIds], callers: int) -> None:
    with (
        EncoderClient(server.target, timeout_seconds=math.inf) as client,
        ThreadPoolExecutor(callers) as threads,
    ):
        list(threads.map(lambda ids: client.token_vectors([ids]), sequences))


def memory_mib(models: Path, cache_dir: str) -> float:
    """Start SERVERS servers of one model, and return their memory together, in MiB.

    The result is the sum of the proportional set sizes. So a memory page that several servers share counts once.
    """
    sequences = random_workload(list(range(1, 257, 17)), vocab_size=VOCABULARY, seed=0).sequences
    with ExitStack() as stack:
        servers = []
        for _ in range(SERVERS):
            server = stack.enter_context(real_server(models, "--cache-dir", cache_dir, start_seconds=900))
            servers.append(server)
            encode_at_once(server, sequences, callers=8)
        pages = [Path(f"/proc/{server.process.pid}/smaps_rollup").read_text() for server in servers]
    kib = [int(line.split()[1]) for page in pages for line in page.splitlines() if line.startswith("Pss:")]
    return sum(kib) / 1024


def test_servers_of_one_model_share_its_weights(tmp_path: Path) -> None:
    weights, _ = export_random_weights(tmp_path)
    bound_mib = 1.5 * weights / MIB + 200 * SERVERS
    assert memory_mib(tmp_path / "models", "off") > bound_mib, (
        "the bound is too high: servers that do not share weights stay below it too"
    )
    assert memory_mib(tmp_path / "models", str(tmp_path / "cache")) <= bound_mib


def test_long_texts_take_at_most_2_5_gb_beyond_the_weights(tmp_path: Path) -> None:
    fields = {"max_sequence_tokens": LONGEST_TOKENS, "n_heads": 16}
    weights, exported = export_random_weights(tmp_path, **fields)
    sequences = random_workload([LONGEST_TOKENS] * 4, vocab_size=VOCABULARY, seed=0).sequences
    with real_server(tmp_path / "models", start_seconds=900) as server:
        encode_at_once(server, sequences[:1], callers=1)
        one = peak_bytes(server.process.pid)
        encode_at_once(server, sequences, callers=4)
        four = peak_bytes(server.process.pid)
    beyond = {name: (peak - weights) / 1e9 for name, peak in (("export", exported), ("one", one), ("four", four))}
    assert max(beyond.values()) <= 2.5, beyond


def test_exports_take_at_most_3_times_the_weights_and_500_mb() -> None:
    export_memory.main([])
