"""Compares `encserve embed` of a file with what the same server gives 64 callers.

    python bench/files.py MODEL_REPOSITORY --model NAME [--lines 20000] [--rounds 3] [--seconds 8]

The texts of the file have the lengths of real ones. In each round the command embeds all of it into a .npy file, and
64 callers with a text each ask for vectors of the same texts for some seconds. What counts is tokens/s, the command's
start included, and the most memory that the command held.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import numpy as np
from harness.load import POOLED, served
from harness.machine import OtherWork, peak_bytes
from harness.rounds import Measurement, Patience, Side, measure, ratios, spread
from harness.workload import choose_lengths, open_tokenizer, read_newest, text_workload

COMMAND = Path(sys.executable).parent / "encserve"
FILE = "encserve embed FILE"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="how long the 64 callers ask")
    options = parser.parse_args(arguments)
    bundle = read_newest(options.model_repository, options.model)
    if bundle.tokenizer_file is None:
        parser.error(f"{bundle.name} has no tokenizer, so it takes no text")
    lengths = choose_lengths(options.lines, seed=0, longest=bundle.max_sequence_tokens)
    workload = text_workload(lengths, open_tokenizer(bundle.tokenizer_file), seed=0)
    flags = ["--model", f"{bundle.name}@{bundle.version}", "--device", "cpu", "--tune-batches"]
    memory: list[int] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options.model_repository, flags, workload, options.seconds) as server,
    ):
        texts, vectors = Path(folder, "texts.txt"), Path(folder, "vectors.npy")
        texts.write_text("".join(f"{it}\n" for it in workload.texts))
        command: list[Any] = [COMMAND, "--target", server.server.target, "embed", texts, "--output", vectors]

        def run() -> Measurement:
            began = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                while process.poll() is None:
                    memory.append(peak_bytes(process.pid))  # what wait4 says would be of this program too
                    time.sleep(0.05)
            if process.returncode:
                raise RuntimeError(f"the command ended with {process.returncode}")
            if len(found := np.load(vectors, mmap_mode="r")) != options.lines:
                raise RuntimeError(f"{len(found)} vectors of {options.lines} lines")
            return Measurement(workload.tokens, time.perf_counter() - began)

        callers = next(side for side in server.sides() if side.name == POOLED)
        sides = [callers, Side(FILE, FILE, run)]
        found = measure(sides, options.rounds, 0, lambda *_: None, Patience(120, lambda: OtherWork().share))
    for side in sides:
        print(f"{side.label}: {np.median([it.tokens_per_second for it in found[side.name]]):,.0f} tokens/s")
    ratio = spread(ratios(found[FILE], found[POOLED]))
    print(
        f"ratio {ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}], the command held {max(memory) / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
