"""Compares encserve with other ways to rank documents with one cross-encoder.

    python bench/rerank.py MODEL_REPOSITORY --checkpoint DIRECTORY [--make-model] [--rounds 4] [--calls 32]
                           [--documents 100] [--only SIDE ...] [--json FILE]

A side is one way to compute the scores. Each of 16 callers sends one query with 100 documents, and sends the next query
after the reply. The documents have the lengths of real texts. All sides compute the same calls on the same CPUs. Each
round runs every side once, in random order. Ratios are computed within a round.

- The ceiling is ONNX Runtime alone, with the server's session options. All pairs are known, and are sorted by length.
- encserve is called over gRPC (`Score`) and over HTTP (`POST /rerank`).
- sentence-transformers' `CrossEncoder.predict` gets all pairs in one call.
- infinity is called over HTTP (`POST /rerank`). infinity gets a virtual environment under .venv-peers at first use.

Before the rounds, sweeps choose the batch sizes of the ceiling and of sentence-transformers, and infinity's setting.
After the rounds, another caller sends pairs to the server: first alone, then while the 16 callers also send calls.

With --make-model, the program first writes a cross-encoder with random weights to DIRECTORY, and exports this model to
MODEL_REPOSITORY. The model has the shape of cross-encoder/ms-marco-MiniLM-L6-v2.
"""

import argparse
import asyncio
import hashlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
import orjson

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.command import Comparison, console, make_parser, run_comparison
from harness.meter import Meter, histogram, percentile_between
from harness.peers import INFINITY, INFINITY_SETTINGS, infinity_server
from harness.programs import PeerUnavailable
from harness.report import Found, Target, ratio_target, ratios_between
from harness.rounds import Measurement, Side, best_rates, spread
from harness.sides import CEILING, SWEEP_ROUNDS, ceiling_side, sweep_budgets
from harness.workload import Workload, choose_lengths, open_tokenizer, read_newest, text_workload
from real_server import RealServer, real_server
from score_models import change, worst_error, write_scores

from encserve_client import AsyncEncoderClient
from encserve_export import Target as ExportTarget
from encserve_export import export_hf
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus
from encserve_server.types.bundles import Bundle

GRPC, HTTP, SENTENCES = "encserve-grpc", "encserve-http", "sentence-transformers"
SIDES = (CEILING, GRPC, HTTP, SENTENCES, INFINITY)
# The lowest allowed ratio (encserve's tokens/s) / (other side's tokens/s).
BOUNDS = {CEILING: 0.93, SENTENCES: 2.0, INFINITY: 2.0}
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
MADE_MODEL = "cross-encoder"
CALLERS = 16
QUERY_TOKENS = 8
PAIR_SPECIAL, TEXT_SPECIAL = 3, 2  # the number of special tokens in a pair, and in a text
SWEEP_PAIRS = 600
BATCH_SIZES = (8, 16, 32, 64, 128)
MOST_ERROR = 1e-4  # the largest allowed difference of a score from sentence-transformers, relative for scores above 1
TIMEOUT_SECONDS = 600.0
# While the 16 callers send calls, a query of another caller may wait for two batches. So the p99 latency of the query
# may increase by at most QUERY_BATCHES times the p95 computing time of a batch.
QUERY_BATCHES, QUERY_EVERY_SECONDS, SETTLE_SECONDS = 2.0, 0.25, 3.0
KEYS = {"rerank": "key-of-the-16-callers", "query": "key-of-the-other-caller"}

Ask = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class RankCall:
    """One query with its documents."""

    query: str
    documents: list[str]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The (query, document) pairs."""
        return [(self.query, document) for document in self.documents]

    def to_proto(self) -> bytes:
        """Return a serialized ScoreRequest."""
        data: bytes = pb.ScoreRequest(query=self.query, documents=self.documents).SerializeToString()
        return data

    def to_json(self, model: str) -> bytes:
        """Return the body of POST /rerank in the form of Jina, vLLM and infinity."""
        fields = {"model": model, "query": self.query, "documents": self.documents, "return_documents": False}
        return orjson.dumps(fields)


def make_model(checkpoint: Path, model_repository: Path) -> None:
    """Write a cross-encoder with random weights, and export the model."""
    write_scores(checkpoint, **SHAPE)  # type: ignore[arg-type]
    change(checkpoint / "tokenizer_config.json", model_max_length=SHAPE["max_position_embeddings"])
    export_hf(checkpoint, ExportTarget(model_repository=model_repository, name=MADE_MODEL))


def make_calls(bundle: Bundle, count: int, documents: int, seed: int) -> tuple[list[RankCall], Workload]:
    """Return calls of random words, and the token ids of all pairs.

    Raises:
        ValueError: The model has no tokenizer for texts.
    """
    longest = bundle.max_sequence_tokens - QUERY_TOKENS - PAIR_SPECIAL + TEXT_SPECIAL
    lengths = choose_lengths(count * documents, seed=seed, longest=longest)
    queries = text_workload(bundle, [QUERY_TOKENS + TEXT_SPECIAL] * count, seed=seed + 1).texts
    texts = iter(text_workload(bundle, lengths, seed=seed).texts)
    calls = [RankCall(query, list(itertools.islice(texts, documents))) for query in queries]
    assert bundle.tokenizer_file is not None  # noqa: S101 - `text_workload` needs the file too
    tokenizer = open_tokenizer(bundle.tokenizer_file)
    pairs = [pair for call in calls for pair in call.pairs]
    return calls, Workload([np.array(it.ids, np.int64) for it in tokenizer.encode_batch(pairs)])


@asynccontextmanager
async def grpc_asking(target: str, key: str) -> AsyncIterator[Ask]:
    """Yield a function that sends a ScoreRequest."""
    async with AsyncEncoderClient(target, api_key=key) as client:
        await client.models()  # connects
        yield partial(client.raw_method("Score"), timeout=TIMEOUT_SECONDS)


@asynccontextmanager
async def http_asking(address: str, key: str) -> AsyncIterator[Ask]:
    """Yield a function that sends the body of POST /rerank."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:

        async def ask(body: bytes) -> bytes:
            async with http.post(f"http://{address}/rerank", data=body) as reply:
                content = await reply.read()
                if not reply.ok:
                    raise RuntimeError(f"{address}: {reply.status} {content[:200]!r}")
                return content

        yield ask


async def ask_all(ask: Ask, requests: Iterable[bytes]) -> list[float]:
    """Send the requests from 16 callers. Return the latency of each call, in seconds."""
    left, latencies = iter(requests), list[float]()

    async def caller() -> None:
        for request in left:
            began = time.perf_counter()
            await ask(request)
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return latencies


class CalledSide:
    """A side that calls a server.

    Attributes:
        side: The side.
    """

    def __init__(
        self,
        name: str,
        label: str,
        asking: Callable[[], AbstractAsyncContextManager[Ask]],
        requests: Sequence[bytes],
        tokens: int,
        metrics_port: int | None = None,
    ) -> None:
        """Make the side.

        Args:
            name: The name of the side.
            label: The label of the side.
            asking: Opens connections, and yields a function that makes one call.
            requests: The requests of a run.
            tokens: The number of tokens of all requests.
            metrics_port: The port of encserve's metrics page, for the CPU time of the server.
        """
        self.side = Side(name, label, self.run)
        self._asking = asking
        self._requests = requests
        self._tokens = tokens
        self._metrics_port = metrics_port

    def run(self) -> Measurement:
        """Send all requests, and return the measurement."""
        meter = None if self._metrics_port is None else Meter(self._metrics_port)
        if meter is None:
            return asyncio.run(self._run())
        meter.read()
        measurement = asyncio.run(self._run())
        meter.read()
        return replace(measurement, server_cpu_ms=1000 * meter.cpu_seconds / max(meter.sequences, 1))

    async def _run(self) -> Measurement:
        async with self._asking() as ask:
            began = time.perf_counter()
            latencies = await ask_all(ask, self._requests)
            seconds = time.perf_counter() - began
        return Measurement(self._tokens, seconds, [(0, it) for it in latencies])

    def first_reply(self) -> bytes:
        """Return the reply to the first request."""

        async def ask_once() -> bytes:
            async with self._asking() as ask:
                return await ask(self._requests[0])

        return asyncio.run(ask_once())


def scores_of(reply: bytes) -> Any:
    """Return the scores in a reply of POST /rerank, (documents,), in the order of the documents."""
    results = sorted(orjson.loads(reply)["results"], key=lambda it: it["index"])
    return np.array([it["relevance_score"] for it in results], np.float32)


class Sides:
    """All sides. The scores of the first call are compared with the scores of sentence-transformers.

    Attributes:
        sides: The sides, the ceiling first.
        sweeps: The tokens/s by setting. The keys are the names of the sides.
        agreement: The largest difference of a score from sentence-transformers, by side.
        missing: The reasons why sides are missing, by side.
    """

    def __init__(self, comparison: Comparison, calls: Sequence[RankCall], stack: ExitStack) -> None:
        """Open the ceiling, and load the model with sentence-transformers."""
        self._options, self._bundle, self._workload = comparison.options, comparison.bundle, comparison.workload
        self._calls, self._stack = calls, stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._sample = Workload(self._workload.sequences[:SWEEP_PAIRS])
        self.sides: list[Side] = []
        self.sweeps: dict[str, dict[str, float]] = {}
        self.agreement: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        engine = OnnxEngine(self._bundle.graph, device="cpu", intra_op_threads=usable_cpus(), parallel_runs=None)
        stack.callback(engine.close)
        rates = sweep_budgets(engine, self._sample, self._options.seed)
        best = int(self._best(CEILING, {str(budget): rate for budget, rate in rates.items()}))
        self.sides.append(ceiling_side(engine, self._workload, best))
        self._predict = self._open_library()
        self._want = self._predict(calls[0].pairs, 1)

    def _open_library(self) -> Callable[[Sequence[tuple[str, str]], int], Any]:
        """Return a function that takes pairs and a batch size, and returns the scores, (pairs,)."""
        import torch
        from sentence_transformers import CrossEncoder

        torch.set_num_threads(usable_cpus())
        model = CrossEncoder(str(self._options.checkpoint), device="cpu", model_kwargs={"dtype": torch.float32})

        def predict(pairs: Sequence[tuple[str, str]], size: int) -> Any:
            # The server's tokenizer turns off the threads of all tokenizers in this process. Turn the threads on again.
            with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="true"):
                return model.predict(list(pairs), batch_size=size, show_progress_bar=False)

        return predict

    def add_library(self) -> None:
        """Add sentence-transformers with its best batch size."""
        pairs = [pair for call in self._calls for pair in call.pairs]

        def run(count: int, size: int) -> Measurement:
            began = time.perf_counter()
            self._predict(pairs[:count], size)
            return Measurement(sum(self._workload.lengths[:count]), time.perf_counter() - began)

        run(SWEEP_PAIRS, max(BATCH_SIZES))  # the first run allocates PyTorch's memory
        sizes = [Side(str(size), "", partial(run, SWEEP_PAIRS, size)) for size in BATCH_SIZES]
        best = int(self._best(SENTENCES, best_rates(sizes, SWEEP_ROUNDS, self._options.seed)))
        self.agreement[SENTENCES] = worst_error(self._predict(self._calls[0].pairs, best), self._want)
        label = f"sentence-transformers' CrossEncoder.predict, batches of {best}"
        self.sides.append(Side(SENTENCES, label, partial(run, len(pairs), best)))

    def add_server(self, server: RealServer) -> None:
        """Add the sides that call encserve."""
        key, label = KEYS["rerank"], f"encserve, {CALLERS} callers, {{}}"
        asking = partial(grpc_asking, server.target, key)
        requests = [it.to_proto() for it in self._calls]
        over_grpc = self._called(GRPC, label.format("gRPC"), asking, requests, server.metrics_port)
        scores = np.frombuffer(pb.ScoreResponse.FromString(over_grpc.first_reply()).scores, "<f4")
        self._add(over_grpc, scores)
        requests = [it.to_json(self._bundle.name) for it in self._calls]
        asking = partial(http_asking, f"127.0.0.1:{server.http_port}", key)
        over_http = self._called(HTTP, label.format("HTTP"), asking, requests, server.metrics_port)
        self._add(over_http, scores_of(over_http.first_reply()))

    def add_infinity(self) -> None:
        """Add infinity in its fastest setting. If infinity cannot be used, add the reason to `missing`."""
        own = {name: self._stack.enter_context(ExitStack()) for name in INFINITY_SETTINGS}
        requests = [it.to_json("encoder") for it in self._calls]
        count = max(1, min(SWEEP_PAIRS // self._options.documents, len(requests)))
        called = {}
        try:
            for name, flags in INFINITY_SETTINGS.items():
                console.print(f"starting infinity: {name} …")
                address = infinity_server(self._options.checkpoint.resolve(), flags, self._folder, own[name])
                called[name] = partial(http_asking, address, "")
                self._called(INFINITY, "", called[name], requests[:count]).run()  # allocates the server's memory
            sides = [
                Side(name, "", self._called(INFINITY, "", it, requests[:count]).run) for name, it in called.items()
            ]
            best = self._best(INFINITY, best_rates(sides, SWEEP_ROUNDS, self._options.seed))
            label = f"infinity, {CALLERS} callers, HTTP, {best}"
            chosen = self._called(INFINITY, label, called[best], requests)
            self._add(chosen, scores_of(chosen.first_reply()))
        except (PeerUnavailable, RuntimeError, aiohttp.ClientError) as error:
            self.missing[INFINITY] = str(error)
            best = ""
        for name, it in own.items():
            if name != best:
                it.close()

    def _called(
        self,
        name: str,
        label: str,
        asking: Callable[[], AbstractAsyncContextManager[Ask]],
        requests: Sequence[bytes],
        metrics_port: int | None = None,
    ) -> CalledSide:
        pairs = len(requests) * self._options.documents
        return CalledSide(name, label, asking, requests, sum(self._workload.lengths[:pairs]), metrics_port)

    def _add(self, called: CalledSide, scores: Any) -> None:
        name = called.side.name
        self.agreement[name] = worst_error(scores, self._want)
        if self.agreement[name] > MOST_ERROR:
            raise RuntimeError(f"{name}: a score differs by {self.agreement[name]:.1e} from sentence-transformers")
        self.sides.append(called.side)

    def _best(self, side: str, rates: dict[str, float]) -> str:
        self.sweeps[side] = rates
        console.print(f"{side}, tokens/s: " + ", ".join(f"{name}: {rate:,.0f}" for name, rate in rates.items()))
        return max(rates, key=lambda name: rates[name])


async def query_latencies(target: str, request: bytes, seconds: float) -> list[float]:
    """Send a request at fixed intervals, with the key of the other caller. Return the latencies in seconds."""
    latencies = []
    async with grpc_asking(target, KEYS["query"]) as ask, asyncio.TaskGroup() as group:

        async def ask_once() -> None:
            began = time.perf_counter()
            await ask(request)
            latencies.append(time.perf_counter() - began)

        await ask_once()
        latencies.clear()
        for _ in range(max(1, round(seconds / QUERY_EVERY_SECONDS))):
            group.create_task(ask_once())
            await asyncio.sleep(QUERY_EVERY_SECONDS)
    return latencies


async def measure_query(server: RealServer, calls: Sequence[RankCall], seconds: float) -> dict[str, float]:
    """Measure the latency of another caller's query in seconds, first alone, then while the 16 callers call."""
    request = RankCall(calls[0].query, calls[0].documents[:1]).to_proto()
    alone = await query_latencies(server.target, request, seconds)
    read = partial(histogram, server.metrics_port, "encserve_stage_seconds", stage="compute")
    async with grpc_asking(server.target, KEYS["rerank"]) as ask:
        load = asyncio.create_task(ask_all(ask, itertools.cycle([it.to_proto() for it in calls])))
        await asyncio.sleep(min(SETTLE_SECONDS, seconds))
        before = await asyncio.to_thread(read)
        beside = await query_latencies(server.target, request, seconds)
        batches = percentile_between(before, await asyncio.to_thread(read), 95)
        if load.done():
            load.result()
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    p99 = [float(np.quantile(it, 0.99)) for it in (alone, beside)]
    return {"p99_alone": p99[0], "p99_beside": p99[1], "batch_p95": batches}


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, checkpoint_for="the other libraries", needs_checkpoint=True, rounds=4, patience=120)
    parser.add_argument("--make-model", action="store_true", help="write the checkpoint and the bundle first")
    parser.add_argument("--calls", type=int, default=2 * CALLERS, help="the number of queries in a round")
    parser.add_argument("--documents", type=int, default=100, help="the number of documents of a query")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help="the sides to run")
    query_help = "the duration of each measurement of the other caller's query; 0 leaves these measurements out"
    parser.add_argument("--query-seconds", type=float, default=30, metavar="SECONDS", help=query_help)
    parser.add_argument("--server-flags", default="", help="further flags of encserve-server, in one string")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Start all sides, run the rounds, and return the report."""
    model = options.model
    if options.make_model:
        make_model(options.checkpoint, options.model_repository)
        model = model or MADE_MODEL  # without --model, measure the model that was just made
    bundle = read_newest(options.model_repository, model)
    calls, workload = make_calls(bundle, options.calls, options.documents, options.seed)
    comparison = Comparison(options, bundle, workload)
    sides = Sides(comparison, calls, stack)
    callers = Path(stack.enter_context(tempfile.TemporaryDirectory()), "callers.toml")
    entry = '[[caller]]\nname = "{}"\nkey_sha256 = ["{}"]\n'
    callers.write_text("".join(entry.format(it, hashlib.sha256(key.encode()).hexdigest()) for it, key in KEYS.items()))
    flags = ["--model", f"{bundle.name}@{bundle.version}", "--device", "cpu", "--tune-batches"]
    flags += ["--http-port", "0", "--callers", str(callers), *options.server_flags.split()]
    server = stack.enter_context(real_server(options.model_repository, *flags))
    sides.add_server(server)
    if SENTENCES in options.only:
        sides.add_library()
    if INFINITY in options.only:
        sides.add_infinity()
    chosen = [side for side in sides.sides if side.name in (CEILING, *options.only)]
    for side in chosen:
        if side.name in (GRPC, HTTP):
            side.run()  # the first calls allocate the server's memory
    found = comparison.measure(chosen)
    query = asyncio.run(measure_query(server, calls, options.query_seconds)) if options.query_seconds else {}
    ours = [side.name for side in chosen if side.name in (GRPC, HTTP)]
    ratios = ratios_between(found, ours, [side.name for side in chosen if side.name not in ours])
    return comparison.report(
        chosen, found, rank_targets(found, query), ratios,
        agreement=sides.agreement, sweeps=sides.sweeps, missing=sides.missing, query_seconds=query,
    )  # fmt: skip


def rank_targets(found: Found, query: dict[str, float]) -> list[Target]:
    """Return the targets of the sides that ran, and the target for the latency of the other caller's query."""
    targets = [
        target
        for side in (GRPC, HTTP)
        for base, bound in BOUNDS.items()
        for target in ratio_target(found, side, base, f"{side}, ratio to {base}", bound)
    ]
    if query:
        batches = (query["p99_beside"] - query["p99_alone"]) / query["batch_p95"]
        text = "a query of another caller, p99 beside the load - p99 alone, in batches (p95)"
        targets.append(Target(text, f"≤ {QUERY_BATCHES:g}", spread([batches]), batches <= QUERY_BATCHES))
    return targets


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the sides, print the report, and write it to the file of --json. Exit with 1 if a side is missing."""
    report = run_comparison(compare, read_arguments(arguments))
    console.print(
        "largest difference of a score: " + ", ".join(f"{k}: {v:.1e}" for k, v in report["agreement"].items())
    )
    if query := report["query_seconds"]:
        console.print("query of another caller: " + ", ".join(f"{k}: {1000 * v:.0f} ms" for k, v in query.items()))
    for name, reason in report["missing"].items():
        console.print(f"[bold red]Missing: {name}[/]")
        console.print(reason, markup=False)
    if report["missing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
