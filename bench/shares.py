"""Measures how callers share a server: a search beside jobs, a search beside a flood, and three floods by weight.

    python bench/shares.py MODEL_REPOSITORY [--seconds 20] [--rounds 3] [--only jobs|flood|weights]

jobs: one caller sends a text every 50 ms, alone and beside one and four processes that embed 6,000 texts each with no
setting at all; in turns. flood: one caller offers ten times what the server can do, in calls of 64 texts; another sends
2 texts a second. weights: three callers with weights 1, 2 and 4 flood. Texts have the lengths of bench/lengths.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import numpy as np
from harness.workload import choose_lengths, open_tokenizer, read_newest, text_workload
from prometheus_client.parser import text_string_to_metric_families
from real_server import RealServer, real_server

from encserve_client import EncoderClient, OverloadedError, RetryPolicy
from encserve_server.callers.keys import digest_of, make_key

EVERY_SECONDS, JOB_TEXTS, FLOOD_TEXTS = 0.05, 6000, 64
NEVER = RetryPolicy(max_attempts=1)


def probe(target: str, texts: Sequence[str], seconds: float, every: float, token: str | None = None) -> dict[str, Any]:
    """Sends a text so often, each when it is due; latencies in ms, and how many calls were refused."""
    latencies, refused = [], 0
    with EncoderClient(target, token=token, retry=NEVER) as client, ThreadPoolExecutor(64) as pool:
        client.embed(texts[:1])

        def ask(text: str) -> None:
            nonlocal refused
            began = time.perf_counter()
            try:
                client.embed([text])
            except OverloadedError:
                refused += 1
            latencies.append(time.perf_counter() - began)

        began = time.perf_counter()
        for i in range(int(seconds / every)):
            time.sleep(max(began + i * every - time.perf_counter(), 0))
            pool.submit(ask, texts[i % len(texts)])
    return {
        "calls": len(latencies),
        "refused": refused,
        "p50_ms": float(np.quantile(latencies, 0.5)) * 1000,
        "p99_ms": float(np.quantile(latencies, 0.99)) * 1000,
    }


def job(target: str, texts: Sequence[str], seconds: float) -> None:
    """Embeds 6,000 texts again and again; prints how many tokens a second were served."""
    tokens, began = 0, time.perf_counter()
    with EncoderClient(target) as client:
        while time.perf_counter() < began + seconds:
            result = client.run(texts, outputs=["model"], detail="counts")
            tokens += sum(it.token_count for it in result.sequences)
    print(json.dumps({"tokens_per_second": tokens / (time.perf_counter() - began)}))


@contextmanager
def jobs(count: int, target: str, texts_file: Path, seconds: float) -> Iterator[list[dict[str, float]]]:
    """So many processes with a job each beside the block; what they printed, once it has ended."""
    command = [sys.executable, __file__, "--job", target, str(texts_file), str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    found: list[dict[str, float]] = []
    time.sleep(3 if count else 0)  # Python starts, and the queue fills
    yield found
    found += [json.loads(process.communicate()[0]) for process in processes]


class Batches:
    """The batches of a server from the making of this on.

    Attributes:
        busy_seconds: Time in which at least one ran.
        p95_ms: The 95th percentile of how long they ran, between the bounds of the histogram.
    """

    def __init__(self, server: RealServer) -> None:
        """Begins to count."""
        self._server = server
        self._busy_before, self._before = self._read()
        self.busy_seconds = self.p95_ms = 0.0

    def end(self) -> "Batches":
        """Ends it."""
        busy, after = self._read()
        self.busy_seconds = busy - self._busy_before
        counts = {bound: count - self._before[bound] for bound, count in after.items()}
        wanted, low, below = 0.95 * max(counts.values()), 0.0, 0.0
        for bound in sorted(counts):
            if counts[bound] >= wanted:
                self.p95_ms = 1000 * (low + (bound - low) * (wanted - below) / max(counts[bound] - below, 1))
                break
            low, below = bound, counts[bound]
        return self

    def _read(self) -> tuple[float, dict[float, float]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._server.metrics_port}/metrics", timeout=60) as page:
            families = text_string_to_metric_families(page.read().decode())
            samples = [sample for family in families for sample in family.samples]
        buckets = {
            float(it.labels["le"]): it.value
            for it in samples
            if it.name == "encserve_stage_seconds_bucket" and it.labels["stage"] == "compute"
        }
        return sum(it.value for it in samples if it.name == "encserve_device_busy_seconds_total"), buckets


def measure_jobs(server: RealServer, texts: Sequence[str], texts_file: Path, seconds: float) -> list[dict[str, Any]]:
    """One round: a search alone, beside one and beside four jobs, and the jobs without a search."""
    rows = []
    for count, has_search in ((0, True), (1, True), (1, False), (4, True), (4, False)):
        with jobs(count, server.target, texts_file, seconds + 3) as ended:
            batches = Batches(server)
            if has_search:
                search = probe(server.target, texts, seconds, EVERY_SECONDS)
            else:
                time.sleep(seconds)
            batches.end()
        row = {"jobs": count, "batch_p95_ms": batches.p95_ms, "busy": batches.busy_seconds / seconds}
        row["job_tokens_per_second"] = sum(it["tokens_per_second"] for it in ended)
        rows.append(row | (search if has_search else {}))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def flood(target: str, texts: Sequence[str], key: str, seconds: float, offered: float) -> dict[str, float]:
    """Offers so many tokens a second in calls of 64 texts; how many tokens a second were served, and calls refused."""
    served = refused = 0
    calls = [list(texts[i : i + FLOOD_TEXTS]) for i in range(0, len(texts) - FLOOD_TEXTS, FLOOD_TEXTS)]
    with EncoderClient(target, token=key, retry=NEVER, priority="interactive") as client:
        tokens = [sum(it.token_count for it in client.tokenize(call)) for call in calls]
        began = time.perf_counter()

        def ask(place: int) -> None:
            nonlocal served, refused
            try:
                client.embed(calls[place])
                if time.perf_counter() < began + seconds:
                    served += tokens[place]
            except OverloadedError:
                refused += 1

        with ThreadPoolExecutor(256) as pool:
            due, i = began, 0
            while due < began + seconds:
                time.sleep(max(due - time.perf_counter(), 0))
                pool.submit(ask, i % len(calls))
                due += tokens[i % len(calls)] / offered
                i += 1
    return {"tokens_per_second": served / seconds, "refused": refused}


@contextmanager
def named_callers(model_repository: Path, weights: dict[str, float]) -> Iterator[tuple[RealServer, dict[str, str]]]:
    """A server with a callers file, and the key of each caller."""
    keys = {name: make_key() for name in weights}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "callers.toml")
        entry = '[[caller]]\nname = "{}"\nkey_sha256 = ["{}"]\nweight = {}\n'
        file.write_text("".join(entry.format(it, digest_of(keys[it]).hex(), weights[it]) for it in weights))
        with real_server(model_repository, "--callers", str(file)) as server:
            yield server, keys


def floods(
    server: RealServer, keys: dict[str, str], names: Sequence[str], texts_file: Path, seconds: float, offered: float
) -> list["subprocess.Popen[str]"]:
    """A process for each of these callers."""
    command = [sys.executable, __file__, "--flood", server.target, str(texts_file), str(seconds), str(offered)]
    return [subprocess.Popen([*command, keys[name]], stdout=subprocess.PIPE, text=True) for name in names]


def measure_flood(model_repository: Path, texts: Sequence[str], texts_file: Path, seconds: float) -> dict[str, Any]:
    """A search of 2 texts a second, alone and beside a flood of ten times what the server can do."""
    with named_callers(model_repository, {"flood": 1.0, "search": 1.0}) as (server, keys):
        with EncoderClient(server.target, token=keys["flood"]) as client:
            began = time.perf_counter()
            result = client.run(texts[:1024], outputs=["model"])
            can = sum(it.token_count for it in result.sequences) / (time.perf_counter() - began)
        alone = probe(server.target, texts, seconds, 0.5, keys["search"])
        (process,) = floods(server, keys, ["flood"], texts_file, seconds + 5, 10 * can)
        time.sleep(4)
        batches = Batches(server)
        beside = probe(server.target, texts, seconds, 0.5, keys["search"])
        p95 = batches.end().p95_ms
        return {"alone": alone, "beside": beside, "batch_p95_ms": p95, "flood": json.loads(process.communicate()[0])}


def measure_weights(model_repository: Path, texts_file: Path, seconds: float) -> dict[str, float]:
    """What three floods of the weights 1, 2 and 4 get, in tokens a second, while all of them run."""
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    with named_callers(model_repository, weights) as (server, keys):
        running = floods(server, keys, list(weights), texts_file, seconds + 10, 30_000)
        time.sleep(7)  # Python starts, and the queue fills
        before = {name: server.metric("encserve_caller_tokens_total", caller=name) for name in weights}
        time.sleep(seconds)
        after = {name: server.metric("encserve_caller_tokens_total", caller=name) for name in weights}
        for process in running:
            process.communicate()
        return {name: (after[name] - before[name]) / seconds for name in weights}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what was measured, a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["jobs", "flood", "weights"])
    options = parser.parse_args(arguments)
    bundle = read_newest(options.model_repository, None)
    if bundle.tokenizer_file is None:
        parser.error(f"{bundle.name} has no tokenizer, so it takes no text")
    lengths = choose_lengths(JOB_TEXTS, seed=0, longest=bundle.max_sequence_tokens)
    texts = text_workload(lengths, open_tokenizer(bundle.tokenizer_file), seed=0).texts
    with tempfile.TemporaryDirectory() as folder:
        texts_file = Path(folder, "texts.json")
        texts_file.write_text(json.dumps(texts))
        if options.only in (None, "jobs"):
            with real_server(options.model_repository) as server:
                for _ in range(options.rounds):
                    measure_jobs(server, texts, texts_file, options.seconds)
        for _ in range(options.rounds if options.only in (None, "flood") else 0):
            print(json.dumps(measure_flood(options.model_repository, texts, texts_file, options.seconds)), flush=True)
        for _ in range(options.rounds if options.only in (None, "weights") else 0):
            print(json.dumps(measure_weights(options.model_repository, texts_file, options.seconds)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), float(sys.argv[4]))
    elif sys.argv[1:2] == ["--flood"]:
        texts, seconds, offered = json.loads(Path(sys.argv[3]).read_text()), float(sys.argv[4]), float(sys.argv[5])
        print(json.dumps(flood(sys.argv[2], texts, sys.argv[6], seconds, offered)))
    else:
        main()
