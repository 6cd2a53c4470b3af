"""Asserts how much memory servers of one model take together, with weights that they share and without.

    python bench/memory.py [--servers 8] [--layers 12] [--width 768] [--heads 12] [--calls 16] [--mib 200]

A model of these sizes, by default those of BERT-base, gets random weights and is exported by `encserve-export init`.
So many servers of it start one after the other, and each is asked by 8 callers for texts of 1 to 256 tokens; first with
`--cache-dir off`, then with a new cache. What counts is the proportional set size of all of them (Linux's
smaps_rollup), in which a page that several processes map counts once. The exit status is 1 where that is more than 1.5
times the weights and --mib for each server, or where a server that finds the cache takes longer to load the model, in
the median, than one without. The defaults take some 3 minutes on 2 CPUs and 8 GB of memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.workload import Sequence64, random_workload
from real_server import RealServer, real_server

from encserve_client import EncoderClient

EXPORT = Path(sys.executable).parent / "encserve-export"
NAME = "bert-base"
VOCABULARY = 30_522
LONGEST_TOKENS = 256
CALLERS = 8
OF_WEIGHTS = 1.5
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Taken:
    """What servers took.

    Attributes:
        together_mib: The proportional set size of all of them.
        private_mib: What no other process has, for each, in MiB.
        load_seconds: How long each took to load the model, in the order in which they started.
    """

    together_mib: float
    private_mib: list[float]
    load_seconds: list[float]


def read_smaps(pid: int) -> dict[str, int]:
    """A process's memory by Linux's kinds, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {kind: int(size.split()[0]) * 1024 for kind, _, size in (line.partition(":") for line in lines)}


def ask(server: RealServer, texts: Sequence[Sequence64]) -> None:
    """Encodes every text by a call of its own, several at once."""
    with EncoderClient(server.target) as client, ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(lambda text: client.encode([text]), texts))


def measure(models: Path, servers: int, texts: Sequence[Sequence64], cache_dir: str) -> Taken:
    """Starts servers, asks each, and looks at their memory while all are there."""
    load_seconds = []
    with ExitStack() as stack:
        running = []
        for _ in range(servers):
            server = stack.enter_context(real_server(models, "--cache-dir", cache_dir))
            running.append(server)
            ask(server, texts)
            (loaded,) = [line for line in server.log if line["message"] == "model loaded"]
            load_seconds.append(float(loaded["load_seconds"]))
        found = [read_smaps(server.process.pid) for server in running]
    return Taken(
        sum(it["Pss"] for it in found) / MIB,
        [(it["Private_Clean"] + it["Private_Dirty"]) / MIB for it in found],
        load_seconds,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports, serves, prints a table, and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--calls", type=int, default=16, help="texts that each server is asked for")
    parser.add_argument("--mib", type=float, default=200, help="allowed for each server, beside the weights")
    options = parser.parse_args(arguments)
    config = {
        "vocab_size": VOCABULARY,
        "d_model": options.width,
        "n_heads": options.heads,
        "d_ff": 4 * options.width,
        "n_layers": options.layers,
        "activation": "gelu",
        "position": "learned",
    }
    lengths = [1 + (LONGEST_TOKENS - 1) * place // max(options.calls - 1, 1) for place in range(options.calls)]
    texts = random_workload(lengths, vocab_size=VOCABULARY, seed=0).sequences
    with tempfile.TemporaryDirectory() as name:
        folder, models = Path(name), Path(name) / "models"
        (folder / "config.json").write_text(json.dumps(config))
        flags: list[str | Path] = ["--config", folder / "config.json", "--model-repository", models, "--name", NAME]
        subprocess.run([EXPORT, "init", *flags], check=True, stdout=subprocess.DEVNULL)
        weights_mib = (models / NAME / "1/model.onnx.data").stat().st_size / MIB
        print(f"{options.servers} servers, weights of {weights_mib:.0f} MiB, {options.calls} texts each")
        print("| weights | together, MiB | private, MiB each | first load, s | later loads, s |")
        print("|---|---|---|---|---|")
        found = {}
        for what, cache_dir in (("each its own", "off"), ("shared", str(folder / "cache"))):
            its = found[what] = measure(models, options.servers, texts, cache_dir)
            later = its.load_seconds[1:]
            print(
                f"| {what} | {its.together_mib:,.0f} | {min(its.private_mib):.0f} to {max(its.private_mib):.0f} | "
                f"{its.load_seconds[0]:.2f} | {statistics.median(later):.2f} ({min(later):.2f} to {max(later):.2f}) |",
                flush=True,
            )
    own, shared = found["each its own"], found["shared"]
    allowed_mib = OF_WEIGHTS * weights_mib + options.mib * options.servers
    print(f"allowed together: {allowed_mib:,.0f} MiB")
    if shared.together_mib > allowed_mib:
        raise SystemExit(f"not met: {shared.together_mib:,.0f} MiB together; {allowed_mib:,.0f} are allowed")
    if statistics.median(shared.load_seconds[1:]) > statistics.median(own.load_seconds):
        raise SystemExit("not met: a model whose weights are shared takes longer to load")


if __name__ == "__main__":
    main()
