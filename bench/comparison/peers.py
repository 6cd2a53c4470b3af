"""The peers: how each is started, in which settings, and asked what.

A peer has several settings that may be its best. All are tried before anything is measured, and the fastest takes part.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from comparison.load import load_process
from comparison.programs import (
    START_SECONDS,
    Program,
    ensure_environment,
    free_ports,
    running,
    script,
)
from comparison.rounds import Measurement, Side
from comparison.sides import CALLERS, PASSES
from comparison.texts import Texts
from encserve_server.types import Graph

INFINITY, SENTENCES, TRITON = "infinity", "sentence-transformers", "triton"
AS_IT_COMES = "-as-it-comes"  # behind a peer's name: in the setting of somebody who sets nothing
TRITON_METHOD = "/inference.GRPCInferenceService/ModelInfer"
ROWS, VECTORS = "rows", "vectors"  # what a side gives: (seq, d_model) or (1, d_model) for each sequence


@dataclass(frozen=True, slots=True)
class Given:
    """What every peer is given.

    Attributes:
        texts: The sequences.
        file: The same, as JSON with `texts` and `ids`.
        graph: The bundle's own ONNX graph.
        checkpoint: The model in Hugging Face's layout.
        threads: CPUs to use.
        folder: A place for files.
    """

    texts: Texts
    file: Path
    graph: Graph
    checkpoint: Path
    threads: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Setting:
    """A peer in one of its settings, running.

    Attributes:
        name: The settings, in words.
        sides: What is measured of it.
        computed: Rows or vectors of the sequences at some places, by the side's name, and which of both they are.
        versions: Of its packages.
        close: Ends what of it no other setting needs.
        as_it_comes: Whether it is what somebody gets who sets nothing.
    """

    name: str
    sides: list[Side]
    computed: Callable[[Sequence[int]], dict[str, tuple[str, list[Any]]]]
    versions: dict[str, str]
    close: Callable[[], None]
    as_it_comes: bool = False


def _saved(program: Program, folder: Path, places: Sequence[int], **arguments: Any) -> list[Any]:
    """What a program computes for the sequences at some places: an array each."""
    file = folder / f"{program.peer}-{program.process.pid}.npz"
    program.ask("check", places=list(places), file=str(file), **arguments)
    with np.load(file) as content:
        return [content[name] for name in content.files]


# Triton.


def _triton(given: Given, stack: ExitStack) -> Iterator[Setting]:
    binaries = ensure_environment(TRITON)
    graph = given.graph
    names = [it for it in (graph.input_name, graph.attention_mask_name, graph.token_type_ids_name) if it]
    for instances in sorted({1, given.threads}):
        own = stack.enter_context(ExitStack())
        ports = free_ports(3)
        flags = {
            "--graph": graph.path,
            "--inputs": names,
            "--output": graph.output_name,
            "--d-model": graph.d_model,
            "--ports": ports,
            "--threads": given.threads,
            "--instances": instances,
        }
        command = script(TRITON, binaries, "triton_server.py", flags)
        server = own.enter_context(running(TRITON, command, given.folder / f"triton-{instances}.log"))
        versions = server.read(START_SECONDS)
        target = f"127.0.0.1:{ports[0]}"
        command = script(TRITON, binaries, "triton_calls.py", {"--target": target, "--workload": given.file})
        client = own.enter_context(running(TRITON, command, given.folder / f"triton-calls-{instances}.log"))
        client.read(START_SECONDS)
        name = f"{instances} × {given.threads // instances} threads"
        yield replace(_triton_setting(given, own, client, target, name, versions), as_it_comes=instances == 1)


def _triton_setting(
    given: Given, own: ExitStack, client: Program, target: str, name: str, versions: dict[str, str]
) -> Setting:
    requests = map(base64.b64decode, client.ask("requests")["requests"])
    calls = {"tokens": list(zip(given.texts.lengths, requests, strict=True))}
    load = own.enter_context(load_process(target, calls, TRITON_METHOD))
    count = PASSES * len(given.texts.texts)
    return Setting(
        name=name,
        sides=[
            Side(
                TRITON,
                f"Triton, {CALLERS} gRPC callers, dynamic batcher, {name}",
                lambda: load.ask("tokens", callers=CALLERS, count=count),
            )
        ],
        computed=lambda places: {TRITON: (ROWS, _saved(client, given.folder, places))},
        versions=versions,
        close=own.close,
    )


# infinity.

# What `pip install infinity-emb[all]` gives: it brings optimum 2, which no longer has BetterTransformer.
INFINITY_AS_IT_COMES = "no BetterTransformer, batches of 32"
INFINITY_SETTINGS: Mapping[str, Sequence[Any]] = {
    "BetterTransformer, batches of 8": ("--bettertransformer", "--batch-size", 8),
    "BetterTransformer, batches of 32": ("--bettertransformer", "--batch-size", 32),
    "no BetterTransformer, batches of 8": ("--no-bettertransformer", "--batch-size", 8),
    INFINITY_AS_IT_COMES: ("--no-bettertransformer", "--batch-size", 32),
}


def _infinity(given: Given, stack: ExitStack) -> Iterator[Setting]:
    binaries = ensure_environment(INFINITY)
    for number, (name, flags) in enumerate(INFINITY_SETTINGS.items()):
        own = stack.enter_context(ExitStack())
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [binaries / "infinity_emb", "v2", "--model-id", given.checkpoint, "--served-model-name", "encoder"]
        command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-compile", *flags]
        # Every round asks for the same texts: a cache would answer in the model's place.
        command += ["--no-vector-disk-cache", "--host", "127.0.0.1", "--port", port, "--log-level", "warning"]
        asked = {"--url": f"{url}/embeddings", "--workload": given.file}
        log = given.folder / f"infinity-{number}.log"
        own.enter_context(running(INFINITY, command, log)).wait_for_page(f"{url}/health")
        command = script(INFINITY, binaries, "infinity_callers.py", asked)
        callers = own.enter_context(running(INFINITY, command, given.folder / f"infinity-callers-{number}.log"))
        yield _infinity_setting(given, own, callers, name)


def _infinity_setting(given: Given, own: ExitStack, callers: Program, name: str) -> Setting:
    lengths, versions = given.texts.lengths, callers.read(START_SECONDS)

    def run() -> Measurement:
        answer = callers.ask("run", callers=CALLERS, count=PASSES * len(lengths))
        latencies = [(lengths[place], seconds) for place, seconds in answer["latencies"]]
        return Measurement(sum(tokens for tokens, _ in latencies), answer["seconds"], latencies)

    return Setting(
        name=name,
        sides=[Side(INFINITY, f"infinity, {CALLERS} HTTP callers, pooled, {name}", run)],
        computed=lambda places: {INFINITY: (VECTORS, _saved(callers, given.folder, places))},
        versions=versions,
        close=own.close,
        as_it_comes=name == INFINITY_AS_IT_COMES,
    )


# sentence-transformers.


def _sentences(given: Given, stack: ExitStack) -> Iterator[Setting]:
    binaries = ensure_environment(SENTENCES)
    flags = {"--checkpoint": given.checkpoint, "--workload": given.file, "--threads": given.threads}
    command = script(SENTENCES, binaries, "sentence_transformers_encode.py", flags)
    program = stack.enter_context(running(SENTENCES, command, given.folder / "sentence-transformers.log"))
    versions = program.read(START_SECONDS)
    for size in (8, 16, 32, 64):
        yield Setting(
            name=f"batches of {size}",
            sides=[_sentences_side(program, given.texts, output, size) for output in ("tokens", "pooled")],
            computed=lambda places: {
                SENTENCES: (ROWS, _saved(program, given.folder, places, output="tokens")),
                f"{SENTENCES}-pooled": (VECTORS, _saved(program, given.folder, places, output="pooled")),
            },
            versions=versions,
            close=lambda: None,  # the others run in the same process
            as_it_comes=size == 32,
        )


def _sentences_side(program: Program, texts: Texts, output: str, size: int) -> Side:
    tokens, count = texts.workload.tokens, len(texts.texts)

    def run() -> Measurement:
        answer = program.ask("run", output=output, batch_size=size, count=count)
        return Measurement(tokens, answer["seconds"])

    pooled = output == "pooled"
    label = f"sentence-transformers, in process, {'pooled, ' if pooled else ''}batches of {size}"
    return Side(f"{SENTENCES}-pooled" if pooled else SENTENCES, label, run)


PEERS_BY_NAME: Mapping[str, Callable[[Given, ExitStack], Iterator[Setting]]] = {
    TRITON: _triton,
    INFINITY: _infinity,
    SENTENCES: _sentences,
}


@contextmanager
def opened(peer: str, given: Given) -> Iterator[list[Setting]]:
    """A peer in all its settings, until the end of the block.

    Raises:
        PeerUnavailable: It cannot be installed or started.
    """
    with ExitStack() as stack:
        yield list(PEERS_BY_NAME[peer](given, stack))
