"""The peers: how each is started, in which settings, and asked what.

A peer has several settings that may be its best. All are tried before anything is measured, and the fastest takes part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from encserve_server.types.bundles import Graph
from harness.load import CALLERS, warmup_of
from harness.programs import START_SECONDS, Program, ensure_environment, free_ports, running, script
from harness.rounds import Measurement, Side
from harness.workload import Workload

INFINITY, SENTENCES, TRITON = "infinity", "sentence-transformers", "triton"
AS_IT_COMES = "-as-it-comes"  # behind a peer's name: in the setting of somebody who sets nothing
ROWS, VECTORS = "rows", "vectors"  # what a side gives: (seq, d_model) or (1, d_model) for each sequence


@dataclass(frozen=True, slots=True)
class Given:
    """What every peer is given.

    Attributes:
        workload: The sequences, as texts too.
        file: The same, as JSON with `texts` and `ids`.
        graph: The bundle's own ONNX graph.
        checkpoint: The model in Hugging Face's layout.
        threads: CPUs to use.
        seconds: How long a load lasts.
        folder: A place for files.
    """

    workload: Workload
    file: Path
    graph: Graph
    checkpoint: Path
    threads: int
    seconds: float
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


def _asked(given: Given, own: ExitStack, peer: str, address: str, name: str, label: str, kind: str) -> Setting:
    """A running server with 64 callers of `peer_callers.py`; `kind` is what it answers with."""
    flags = {"--peer": peer, "--address": address, "--workload": given.file}
    log = given.folder / f"{peer}-callers-{address.rpartition(':')[2]}.log"
    callers = own.enter_context(running(peer, script(peer, "peer_callers.py", flags), log))
    lengths, versions = given.workload.lengths, callers.read(START_SECONDS)

    def run() -> Measurement:
        answer = callers.ask("run", callers=CALLERS, warmup_seconds=warmup_of(given.seconds), seconds=given.seconds)
        latencies = [(lengths[place], seconds) for place, seconds in answer["answered"]]
        if not latencies:
            raise RuntimeError(f"{peer} has answered nothing in {given.seconds:g} s; give --seconds more")
        return Measurement(sum(tokens for tokens, _ in latencies), given.seconds, latencies)

    def computed(places: Sequence[int]) -> dict[str, tuple[str, list[Any]]]:
        return {peer: (kind, _saved(callers, given.folder, places))}

    return Setting(name, [Side(peer, f"{label}, {name}", run)], computed, versions, own.close)


# Triton.


def _triton(given: Given, stack: ExitStack) -> Iterator[Setting]:
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
        command = script(TRITON, "triton_server.py", flags)
        server = own.enter_context(running(TRITON, command, given.folder / f"triton-{instances}.log"))
        versions = server.read(START_SECONDS)
        name = f"{instances} × {given.threads // instances} threads"
        label = f"Triton, {CALLERS} gRPC callers, dynamic batcher"
        setting = _asked(given, own, TRITON, f"127.0.0.1:{ports[0]}", name, label, ROWS)
        yield replace(setting, versions=versions | setting.versions, as_it_comes=instances == 1)


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
    for name, flags in INFINITY_SETTINGS.items():
        own = stack.enter_context(ExitStack())
        (port,) = free_ports(1)
        command = [binaries / "infinity_emb", "v2", "--model-id", given.checkpoint, "--served-model-name", "encoder"]
        command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-compile", *flags]
        # Every round asks for the same texts: a cache would answer in the model's place.
        command += ["--no-vector-disk-cache", "--host", "127.0.0.1", "--port", port, "--log-level", "warning"]
        server = own.enter_context(running(INFINITY, command, given.folder / f"infinity-{port}.log"))
        server.wait_for_page(f"http://127.0.0.1:{port}/health")
        label = f"infinity, {CALLERS} HTTP callers, pooled"
        setting = _asked(given, own, INFINITY, f"127.0.0.1:{port}", name, label, VECTORS)
        yield replace(setting, as_it_comes=name == INFINITY_AS_IT_COMES)


# sentence-transformers.


def _sentences(given: Given, stack: ExitStack) -> Iterator[Setting]:
    flags = {"--checkpoint": given.checkpoint, "--workload": given.file, "--threads": given.threads}
    command = script(SENTENCES, "sentence_transformers_encode.py", flags)
    program = stack.enter_context(running(SENTENCES, command, given.folder / "sentence-transformers.log"))
    versions = program.read(START_SECONDS)
    for size in (8, 16, 32, 64):
        yield Setting(
            name=f"batches of {size}",
            sides=[_sentences_side(program, given.workload, output, size) for output in ("tokens", "pooled")],
            computed=lambda places: {
                SENTENCES: (ROWS, _saved(program, given.folder, places, output="tokens")),
                f"{SENTENCES}-pooled": (VECTORS, _saved(program, given.folder, places, output="pooled")),
            },
            versions=versions,
            close=lambda: None,  # the others run in the same process
            as_it_comes=size == 32,
        )


def _sentences_side(program: Program, workload: Workload, output: str, size: int) -> Side:
    def run() -> Measurement:
        answer = program.ask("run", output=output, batch_size=size, count=len(workload.texts))
        return Measurement(workload.tokens, answer["seconds"])

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
