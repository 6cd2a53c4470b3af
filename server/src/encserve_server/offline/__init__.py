"""Computes vectors from a bundle in this process, without gRPC, asyncio or a queue.

with Embedder("models/all-MiniLM-L6-v2") as embedder:
    vectors = embedder.embed(["a text", "another"])  # (2, width)
"""

from encserve_server.offline.embedder import Embedder, Stopped
from encserve_server.offline.options import EmbedOptions, Input, LoadOptions, OutputName
from encserve_server.offline.results import Embedded, OnBatch, SparseVector

__all__ = [
    "EmbedOptions",
    "Embedded",
    "Embedder",
    "Input",
    "LoadOptions",
    "OnBatch",
    "OutputName",
    "SparseVector",
    "Stopped",
]
