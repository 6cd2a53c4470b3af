"""Describes models for tests that need no model files. POOL has the formula of each pooling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from encserve_server.outputs import SPAN_POOLINGS
from encserve_server.types.bundles import (
    Bundle,
    Graph,
    HeadGraph,
    ModelPooling,
    MultiVector,
    Scores,
    Sparse,
    SparsePooling,
    TaskSettings,
)
from encserve_server.types.requests import Activation, OutputKind, Task

LABELS = ("no", "maybe", "yes")
# The formula of each pooling. `rows` are the hidden states of one sequence, (seq, d_model).
POOL: dict[OutputKind, Callable[[Any], Any]] = {
    OutputKind.MEAN: lambda rows: rows.mean(axis=0),
    OutputKind.CLS: lambda rows: rows[0],
    OutputKind.MAX: lambda rows: rows.max(axis=0),
    OutputKind.LAST_TOKEN: lambda rows: rows[-1],
    OutputKind.WEIGHTED_MEAN: lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1)),
    OutputKind.MEAN_SQRT_LENGTH: lambda rows: rows.sum(axis=0) / np.sqrt(len(rows)),
}


def head_graph(d_model: int, width: int, inputs: int = 1) -> HeadGraph:
    """Describe a head. The inputs are hidden states, and with `inputs=2` also a mask."""
    return HeadGraph(Path("head.onnx"), ("rows", "mask")[:inputs], "out", d_model, width)


def plain_bundle(d_model: int, vocabulary: int, **changes: Any) -> Bundle:
    """Describe a model that has no heads, no pooling and no tasks."""
    parts: dict[str, Any] = {
        "name": "tiny",
        "version": "1",
        "fingerprint": "",
        "d_model": d_model,
        "n_layers": 6,
        "n_heads": 1,
        "vocab_size": vocabulary,
        "max_sequence_tokens": 8192,
        "special_token_ids": (),
        "pooling": None,
        "tokenizer_file": None,
        "graph": Graph(Path("model.onnx"), "ids", False, "mask", "rows", 0, d_model, "float32"),
        "inspect_graph": None,
        "position": "",
        "parameters": {},
    }
    return Bundle(**parts | changes)


def rich_bundle(d_model: int, vocabulary: int, width: int, **changes: Any) -> Bundle:
    """Describe a model with every kind of output. `width` is the width of the MaxSim vectors."""
    parts: dict[str, Any] = {
        "pooling": ModelPooling(
            SPAN_POOLINGS, l2_normalize=False, width=d_model * len(SPAN_POOLINGS), head=head_graph(d_model, 1)
        ),
        "multi_vector": MultiVector(head_graph(d_model, width), "maxsim", skips_first_token=False),
        "sparse": Sparse(head_graph(d_model, vocabulary, 2), vocabulary, SparsePooling.MAX, (), 0),
        "scores": Scores(
            head_graph(d_model, len(LABELS)), LABELS, OutputKind.MEAN, None, Activation.NONE, cuts_only_second=False
        ),
        "tasks": {Task.QUERY: TaskSettings("", 64), Task.DOCUMENT: TaskSettings("", 8192)},
    }
    return plain_bundle(d_model, vocabulary, **parts | changes)
