"""Reads a directory: what kind of model it is, and how rows become vectors. Nothing else decides on the kind."""

from pathlib import Path

from encserve_export.kinds.dense import read_dense
from encserve_export.kinds.directory import kind_of
from encserve_export.kinds.multi_vector import read_multi_vector
from encserve_export.kinds.recipe import Recipe
from encserve_export.kinds.sparse import read_sparse
from encserve_export.kinds.static import read_static


def read(directory: Path, repository: str = "") -> Recipe:
    """Reads a directory of transformers, of sentence-transformers, of PyLate, or of Stanford's ColBERT.

    Args:
        directory: The directory.
        repository: Where on the hub it came from, OWNER/NAME; empty where it did not.

    Raises:
        UnsupportedModelError: A bundle cannot express what it does, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts itself.
    """
    kind = kind_of(directory)
    if kind == "dense":
        return read_dense(directory, repository)
    return {"multi_vector": read_multi_vector, "sparse": read_sparse, "static": read_static}[kind](directory)
