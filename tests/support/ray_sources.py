"""Provides a fake backend for jobs on Ray, and starts a Ray cluster of several nodes on this machine.

A backend opens the encoder of a job. The fake backend needs no model. The processes of Ray import this module.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from encserve_cli.files.rows import Value
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.types import BatchProgress, Encoded, Stopped
from encserve_client import Block, EncodedOutput, EncodeResult, Timings

WIDTH = 4
DEADLY = "deadly"  # if an encoder gets this text, the encoder's process ends
FACTS = ModelFacts("fake", "1", "sha256:fake", "", "mean", WIDTH, 512)


class FakeEncoder:
    """Encodes each value into 4 numbers: the length of the value, and the value's first 3 bytes.

    Calls run one after another, and each call takes a fixed time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """Encode values. The protocol `Encoder` of encserve_cli defines this method."""
        if DEADLY in values:
            os._exit(1)
        with self._lock:
            if self._stopping.wait(self._seconds):
                raise Stopped
        rows = np.array([[len(str(it)), *str(it).encode()[:3].ljust(3)] for it in values], np.float32)
        output = EncodedOutput("mean", True, (Block(rows, np.ones(len(values), np.int64), None),), 0)
        result = EncodeResult("fake", "1", FACTS.fingerprint, (output,), (), Timings(0.0, 0.0, 0.0, 0.0, 0, 0), "")
        on_batch(len(values), len(values))
        return Encoded(result, {})

    def stop(self) -> None:
        """Let waiting calls and later calls of `encode` raise Stopped."""
        self._stopping.set()

    def close(self) -> None:
        """Do nothing, because this encoder holds no resources."""


@dataclass(frozen=True)
class FakeBackend:
    """Opens a `FakeEncoder`.

    Attributes:
        seconds: The duration of each call of `encode`.
        fingerprint_of: A folder with a file "fingerprint", which contains the model's fingerprint. If None, the
            fingerprint is in FACTS.
    """

    seconds: float = 0.0
    fingerprint_of: Path | None = None

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        """Return a worker with a `FakeEncoder`. The protocol `Backend` of encserve_cli defines this method."""
        facts = FACTS
        if self.fingerprint_of is not None:
            facts = replace(FACTS, fingerprint=(self.fingerprint_of / "fingerprint").read_text())
        return LocalWorker(replace(make, kind=make.kind or "model"), facts, FakeEncoder(self.seconds))


class SmallCluster:
    """A Ray cluster on this machine, without a dashboard. The nodes have different loopback addresses.

    Attributes:
        address: The address of the cluster.
        nodes: The nodes. The first node is the head.
    """

    def __init__(self, nodes: int, cpus: int = 1) -> None:
        """Start the nodes. Each node has `cpus` CPUs."""
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self._cluster = Cluster(initialize_head=True, head_node_args=self._settings(0))
        self.nodes: list[Any] = [self._cluster.head_node]
        for _ in range(nodes - 1):
            self.add()
        self.address: str = self._cluster.address

    def _settings(self, number: int) -> dict[str, Any]:
        return {
            "num_cpus": self._cpus,
            "object_store_memory": 80 * 1024 * 1024,
            "include_dashboard": False,
            "node_ip_address": f"127.0.0.{number + 2}",  # Ray would replace 127.0.0.1 by another address
        }

    def add(self) -> None:
        """Start another node."""
        self.nodes.append(self._cluster.add_node(**self._settings(len(self.nodes))))

    def kill(self, number: int) -> None:
        """Kill a node with all its processes."""
        self._cluster.remove_node(self.nodes[number], allow_graceful=False)

    def close(self) -> None:
        """Stop all nodes."""
        self._cluster.shutdown()  # type: ignore[no-untyped-call]
