"""Reads a model's directory. Finds the kind of the model, and how the model turns texts into vectors."""

from pathlib import Path

from encserve_export.core.errors import ConfigError
from encserve_export.kinds.bge_m3 import with_bge_m3
from encserve_export.kinds.dense import read_dense
from encserve_export.kinds.directory import kind_of
from encserve_export.kinds.multi_vector import read_multi_vector
from encserve_export.kinds.scores import read_scores
from encserve_export.kinds.sparse import read_sparse
from encserve_export.kinds.spec import ModelSpec
from encserve_export.kinds.static import read_static


def read(directory: Path, repository: str = "", *, ignore_head: bool = False) -> ModelSpec:
    """Read a directory of transformers, sentence-transformers, PyLate, or Stanford's ColBERT.

    Args:
        directory: The directory.
        repository: The model's name on the hub, OWNER/NAME; empty for a local directory.
        ignore_head: Whether to read only the encoder of a classifier or a cross-encoder.

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another file.
        UnsafeWeightsError: A file of BGE-M3's heads contains objects that are not tensors.
        TokenizerError: transformers cannot load the tokenizer.
        ConfigError: `ignore_head` is set for a sparse, multi-vector or static model.
        WeightNamesError: A cross-encoder or a classifier lacks the weights of its head.
    """
    kind = kind_of(directory, ignore_head=ignore_head)
    if ignore_head and kind != "dense":
        raise ConfigError(f"--ignore-head is for a classifier or a cross-encoder; {directory} is a {kind} model")
    if kind == "dense":
        return with_bge_m3(read_dense(directory, repository, ignore_head=ignore_head))
    return {
        "multi_vector": read_multi_vector,
        "sparse": read_sparse,
        "static": read_static,
        "scores": read_scores,
    }[kind](directory)
