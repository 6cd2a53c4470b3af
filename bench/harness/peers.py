"""Starts the peers of encserve in several settings, and makes their sides.

The peers are Triton, infinity and sentence-transformers. A side is one way to run the model. Before the rounds, each
peer runs in all its settings. In the rounds, each peer runs in its fastest setting and in its default setting.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from encserve_server.types.bundles import Graph
from harness.load import CALLERS, warmup_seconds
from harness.programs import START_SECONDS, Program, ensure_environment, free_ports, running, script
from harness.rounds import Measurement, Side
from harness.workload import Workload

INFINITY, SENTENCES, TRITON = "infinity", "sentence-transformers", "triton"
DEFAULT = "-as-it-comes"  # the names of sides in the peer's default setting end with this suffix
# The kinds of a peer's results. ROWS means an array (seq, d_model) per sequence, and VECTORS an array (1, d_model).
ROWS, VECTORS = "rows", "vectors"


@dataclass(frozen=True, slots=True)
class PeerInput:
    """The input of every peer.

    Attributes:
        workload: The sequences with their texts.
        file: The workload as JSON with `texts` and `ids`.
        graph: The bundle's ONNX graph.
        checkpoint: The model in Hugging Face's layout.
        threads: The number of usable CPUs.
        seconds: The duration of each load.
        folder: A temporary folder for logs and arrays.
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
    """A running peer in one of its settings.

    Attributes:
        name: A description of the setting.
        sides: The sides of this setting.
        compute: A function that takes indices of sequences. Returns for each side the kind of result, `ROWS` or
            `VECTORS`, and one array per sequence.
        versions: The versions of the peer's packages.
        close: Stops the processes that only this setting needs.
        is_default: Whether the peer uses this setting without options.
    """

    name: str
    sides: list[Side]
    compute: Callable[[Sequence[int]], dict[str, tuple[str, list[Any]]]]
    versions: dict[str, str]
    close: Callable[[], None]
    is_default: bool = False


def _arrays(program: Program, folder: Path, indices: Sequence[int], **arguments: Any) -> list[Any]:
    """Return the arrays that a program computes, one for each index."""
    file = folder / f"{program.peer}-{program.process.pid}.npz"
    program.ask("check", indices=list(indices), file=str(file), **arguments)
    with np.load(file) as content:
        return [content[name] for name in content.files]


def _called(given: PeerInput, own: ExitStack, peer: str, address: str, name: str, label: str, kind: str) -> Setting:
    """Start `peer_callers.py`, which calls a running server. Return the setting; `kind` is `ROWS` or `VECTORS`."""
    flags = {"--peer": peer, "--address": address, "--workload": given.file}
    log = given.folder / f"{peer}-callers-{address.rpartition(':')[2]}.log"
    callers = own.enter_context(running(peer, script(peer, "peer_callers.py", flags), log))
    lengths, versions = given.workload.lengths, callers.read(START_SECONDS)

    def run() -> Measurement:
        seconds = given.seconds
        answer = callers.ask("run", callers=CALLERS, warmup_seconds=warmup_seconds(seconds), seconds=seconds)
        latencies = [(lengths[index], latency) for index, latency in answer["answered"]]
        if not latencies:
            raise RuntimeError(f"{peer}: no call was answered in {seconds:g} s; raise --seconds")
        return Measurement(sum(tokens for tokens, _ in latencies), seconds, latencies)

    def compute(indices: Sequence[int]) -> dict[str, tuple[str, list[Any]]]:
        return {peer: (kind, _arrays(callers, given.folder, indices))}

    return Setting(name, [Side(peer, f"{label}, {name}", run)], compute, versions, own.close)


def _triton(given: PeerInput, stack: ExitStack) -> Iterator[Setting]:
    graph = given.graph
    names = [name for name in (graph.input_name, graph.attention_mask_name, graph.token_type_ids_name) if name]
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
        setting = _called(given, own, TRITON, f"127.0.0.1:{ports[0]}", name, label, ROWS)
        yield replace(setting, versions=versions | setting.versions, is_default=instances == 1)


# `pip install infinity-emb[all]` installs optimum 2, which does not contain BetterTransformer. So without options,
# infinity does not use BetterTransformer.
INFINITY_DEFAULT = "no BetterTransformer, batches of 32"
INFINITY_SETTINGS: Mapping[str, Sequence[Any]] = {
    "BetterTransformer, batches of 8": ("--bettertransformer", "--batch-size", 8),
    "BetterTransformer, batches of 32": ("--bettertransformer", "--batch-size", 32),
    "no BetterTransformer, batches of 8": ("--no-bettertransformer", "--batch-size", 8),
    INFINITY_DEFAULT: ("--no-bettertransformer", "--batch-size", 32),
}


def infinity_server(checkpoint: Path, flags: Sequence[Any], folder: Path, own: ExitStack) -> str:
    """Start infinity with a model, and return the address. `own` stops the server; `folder` gets the log.

    Raises:
        PeerUnavailable: infinity cannot be installed or started.
    """
    (port,) = free_ports(1)
    command = [ensure_environment(INFINITY) / "infinity_emb", "v2"]
    command += ["--model-id", checkpoint, "--served-model-name", "encoder"]
    command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-compile", *flags]
    # Every round sends the same texts. Without a cache, each reply comes from the model.
    command += ["--no-vector-disk-cache", "--host", "127.0.0.1", "--port", port, "--log-level", "warning"]
    server = own.enter_context(running(INFINITY, command, folder / f"infinity-{port}.log"))
    server.wait_for_page(f"http://127.0.0.1:{port}/health")
    return f"127.0.0.1:{port}"


def _infinity(given: PeerInput, stack: ExitStack) -> Iterator[Setting]:
    for name, flags in INFINITY_SETTINGS.items():
        own = stack.enter_context(ExitStack())
        address = infinity_server(given.checkpoint, flags, given.folder, own)
        label = f"infinity, {CALLERS} HTTP callers, pooled"
        setting = _called(given, own, INFINITY, address, name, label, VECTORS)
        yield replace(setting, is_default=name == INFINITY_DEFAULT)


def _sentences(given: PeerInput, stack: ExitStack) -> Iterator[Setting]:
    flags = {"--checkpoint": given.checkpoint, "--workload": given.file, "--threads": given.threads}
    command = script(SENTENCES, "sentence_transformers_encode.py", flags)
    program = stack.enter_context(running(SENTENCES, command, given.folder / "sentence-transformers.log"))
    versions = program.read(START_SECONDS)
    for size in (8, 16, 32, 64):
        yield Setting(
            name=f"batches of {size}",
            sides=[_sentences_side(program, given.workload, output, size) for output in ("tokens", "pooled")],
            compute=lambda indices: {
                SENTENCES: (ROWS, _arrays(program, given.folder, indices, output="tokens")),
                f"{SENTENCES}-pooled": (VECTORS, _arrays(program, given.folder, indices, output="pooled")),
            },
            versions=versions,
            close=lambda: None,  # all settings share one process
            is_default=size == 32,
        )


def _sentences_side(program: Program, workload: Workload, output: str, size: int) -> Side:
    def run() -> Measurement:
        answer = program.ask("run", output=output, batch_size=size, count=len(workload.texts))
        return Measurement(workload.tokens, answer["seconds"])

    pooled = output == "pooled"
    label = f"sentence-transformers, in process, {'pooled, ' if pooled else ''}batches of {size}"
    return Side(f"{SENTENCES}-pooled" if pooled else SENTENCES, label, run)


PEERS: Mapping[str, Callable[[PeerInput, ExitStack], Iterator[Setting]]] = {
    TRITON: _triton,
    INFINITY: _infinity,
    SENTENCES: _sentences,
}


@contextmanager
def opened(peer: str, given: PeerInput) -> Iterator[list[Setting]]:
    """Run a peer in all its settings until the end of the `with` block.

    Raises:
        PeerUnavailable: The peer cannot be installed or started.
    """
    with ExitStack() as stack:
        yield list(PEERS[peer](given, stack))
