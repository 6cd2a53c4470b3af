"""Asserts how much memory long texts take: an export with its gate, and a server that is asked by some callers at once.

    python bench/long_texts.py [--tokens 8192] [--layers 12] [--width 768] [--heads 12] [--callers 4] [--gigabytes 2.5]

A model of these sizes gets random weights, is exported by `encserve-export init`, and served by encserve-server with
its defaults, which one caller asks for the rows of a longest text, and then several at a time. What counts is the peak
of resident memory (Linux's VmHWM, of child processes too) beyond the model's weights. The exit status is 1 where one
of the two is more than --gigabytes. The sizes above take some 15 minutes on 2 CPUs.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.machine import peak_bytes
from harness.workload import Sequence64, random_workload
from real_server import real_server

from encserve_client import EncoderClient

EXPORT = Path(sys.executable).parent / "encserve-export"
NAME = "long"
VOCABULARY = 30_522
START_SECONDS = 900.0  # a server runs the longest sequence before it serves
LOOK_SECONDS = 0.1  # between two looks at a process that ends by itself
GB = 1e9


def export(models: Path, config: dict[str, int]) -> int:
    """Exports a model with random weights and returns the peak of memory, in bytes."""
    file = models / "config.json"
    file.write_text(json.dumps(config))
    peak = 0
    with subprocess.Popen([EXPORT, "init", "--config", file, "--model-repository", models, "--name", NAME]) as process:
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak


def serve(models: Path, texts: Sequence[Sequence64]) -> tuple[int, int]:
    """Serves the model; the peak of memory, in bytes, after one text, and after all of them at once."""
    with (
        real_server(models, start_seconds=START_SECONDS) as server,
        EncoderClient(server.target, timeout_seconds=math.inf) as client,
    ):
        client.encode(texts[:1])
        one = peak_bytes(server.process.pid)
        with ThreadPoolExecutor(len(texts)) as callers:
            list(callers.map(lambda text: client.encode([text]), texts))
        return one, peak_bytes(server.process.pid)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports, serves, and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="the longest sequence")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--callers", type=int, default=4, help="one text each, all at once")
    parser.add_argument("--gigabytes", type=float, default=2.5, help="allowed beyond the weights; 10⁹ bytes each")
    options = parser.parse_args(arguments)
    config = {
        "vocab_size": VOCABULARY,
        "d_model": options.width,
        "n_heads": options.heads,
        "d_ff": 4 * options.width,
        "n_layers": options.layers,
        "max_sequence_tokens": options.tokens,
    }
    texts = random_workload([options.tokens] * options.callers, vocab_size=VOCABULARY, seed=0).sequences
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        exported = export(models, config)
        weights = (models / NAME / "1/model.onnx.data").stat().st_size
        one, several = serve(models, texts)
    print(f"{options.tokens:,} tokens, {options.layers} layers of {options.width}, {options.heads} heads")
    peaks = {"export": exported, "server, 1 caller": one, f"server, {options.callers} callers": several}
    beyond = {what: (peak - weights) / GB for what, peak in peaks.items()}
    for what, gigabytes in beyond.items():
        print(f"{what}: {gigabytes:.2f} GB beyond weights of {weights / GB:.2f}")
    worst = max(beyond.values())
    if worst > options.gigabytes:
        raise SystemExit(f"not met: {worst:.2f} GB beyond the weights; {options.gigabytes:g} are allowed")


if __name__ == "__main__":
    main()
