"""Runs a real server with a small cross-encoder or classifier, and computes scores with sentence-transformers."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import MODEL
from exporting import export_once
from real_server import RealServer, real_server
from score_models import Array, library_scores, write_scores

from encserve_export import Target, export_hf


@dataclass(frozen=True)
class Served:
    """A server with one model.

    Attributes:
        name: The name of the model.
        server: The server.
        directory: The directory from which the model was exported.
    """

    name: str
    server: RealServer
    directory: Path


@contextlib.contextmanager
def served_scores(folder: Path, name: str, **options: Any) -> Iterator[Served]:
    """Write a directory with `write_scores(**options)`, export the model as `name`, and run a server with it."""
    directory = write_scores(folder / name, **options)
    export_once(export_hf, directory, target=Target(model_repository=folder / "models", name=name))
    with real_server(folder / "models", "--model", name, "--http-port", "0") as server:
        yield Served(name, server, directory)


def scores_of_library(served: Served, queries: Sequence[str], documents: Sequence[str]) -> Array:
    """Return the scores of sentence-transformers for a cross-encoder or all-MiniLM-L6-v2.

    The shape is (queries, documents).
    """
    from sentence_transformers import SentenceTransformer

    if served.name != MODEL:
        pairs = list(itertools.product(queries, documents))
        return library_scores(served.directory, pairs, raw=False).reshape(len(queries), len(documents))
    library = SentenceTransformer(str(served.directory), device="cpu")
    similarities: Array = library.similarity(library.encode(list(queries)), library.encode(list(documents))).numpy()
    return similarities
