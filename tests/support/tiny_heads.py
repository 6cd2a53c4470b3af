"""Makes heads for a tiny bundle. A head computes vectors, weights or logits from hidden states.

A head consists of an ONNX file and a section of the manifest. NumPy computes the expected outputs.
"""

import io
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from fake_server import FakeServer
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import D_MODEL, VOCAB_SIZE, expected_rows
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.models.turns import FairThreadPool
from encserve_server.repository.loaded import LoadedModel
from encserve_server.repository.loading import load_model
from encserve_server.repository.manager import Loader
from encserve_server.settings import Settings

Array = npt.NDArray[Any]
WIDTH = 3  # the width of a MaxSim vector
FLOAT = TensorProto.FLOAT
BEGIN, END = 1, 2  # the ids of the special tokens around a text
SERVE_TINY: dict[str, Any] = {"model": ("tiny@1",), "tune_batches": False}  # settings for a server with a tiny bundle
Serve = Callable[..., Awaitable[FakeServer]]  # the type of the fixture `serve`


def npy(array: Array) -> bytes:
    """Return an array as the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def words(*, special: bool = True) -> Tokenizer:
    """Return a tokenizer in which each word contains the word's id. For example, the id of "w7" is 7.

    If `special` is true, the tokenizer adds special tokens. A text becomes BEGIN, text, END. A pair becomes BEGIN,
    first text, END, second text, END.
    """
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        around = [("w1", BEGIN), ("w2", END)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="w1 $A w2", pair="w1 $A w2 $B:1 w2:1", special_tokens=around
        )
    return tokenizer


def text(*ids: int) -> str:
    """Return a text with one word for each of these ids."""
    return " ".join(f"w{it}" for it in ids)


def weights(width: int, seed: int = 1) -> Array:
    """Return random float32 weights of shape (d_model, width)."""
    return np.random.default_rng(seed).standard_normal((D_MODEL, width)).astype(np.float32)


def _model(nodes: list[Any], inputs: dict[str, list[Any]], outputs: list[Any], **constants: Array) -> bytes:
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("out", FLOAT, outputs)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    data: bytes = made.SerializeToString()
    onnx.checker.check_model(made)
    return data


def multi_vector_file(width: int = WIDTH) -> bytes:
    """Return the ONNX file of a head that computes MaxSim vectors of length 1 from hidden states.

    The input has the shape (tokens, d_model). The output has the shape (tokens, width).
    """
    nodes = [
        helper.make_node("MatMul", ["rows", "w"], ["projected"]),
        helper.make_node("ReduceL2", ["projected"], ["norm"], axes=[-1], keepdims=1),
        helper.make_node("Div", ["projected", "norm"], ["out"]),
    ]
    return _model(nodes, {"rows": ["tokens", D_MODEL]}, ["tokens", width], w=weights(width))


def expected_vectors(rows: Array, width: int = WIDTH) -> Array:
    """Compute the expected output of `multi_vector_file`."""
    projected: Array = rows @ weights(width)
    return np.asarray(projected / np.linalg.norm(projected, axis=1, keepdims=True))


def sparse_file(pooling: str, width: int = VOCAB_SIZE, table: Array | None = None) -> bytes:
    """Return the ONNX file of a sparse head. The inputs are hidden states and a mask.

    For each token, the head computes log(1 + relu(logits)). The output is the maximum or the sum over the tokens, and
    has the shape (batch, width).
    """
    active = [
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("Add", ["positive", "one"], ["more"]),
        helper.make_node("Log", ["more"], ["y"]),
    ]
    masked = helper.make_node("Mul", ["logits", "column"], ["kept"])
    nodes = [
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("MatMul", ["rows", "w"], ["logits"]),
        masked,
    ]
    if pooling == "max":
        nodes += [helper.make_node("ReduceMax", ["kept"], ["x"], axes=[1], keepdims=0), *active]
        nodes[-1].output[0] = "out"
    else:
        active[0].input[0] = "kept"
        nodes += [*active, helper.make_node("ReduceSum", ["y", "seq"], ["out"], keepdims=0)]
    return _model(
        nodes,
        {"rows": ["batch", "seq", D_MODEL], "mask": ["batch", "seq"]},
        ["batch", width],
        w=weights(width, 2) if table is None else table,
        last=np.array([-1]),
        one=np.array(1, np.float32),
        seq=np.array([1]),
    )


def expected_weights(rows: Array, pooling: str, width: int = VOCAB_SIZE) -> Array:
    """Compute the expected output of `sparse_file` from hidden states.

    The hidden states have the shape (seq, d_model). The output has the shape (width,).
    """
    y = np.log1p(np.maximum(rows @ weights(width, 2), 0))
    return np.asarray(y.max(axis=0) if pooling == "max" else y.sum(axis=0))


def own_id_file() -> bytes:
    """Return the ONNX file of a head that computes one weight for each token from the hidden states.

    The input has the shape (tokens, d_model). The output has the shape (tokens, 1).
    """
    nodes = [helper.make_node("MatMul", ["rows", "w"], ["x"]), helper.make_node("Relu", ["x"], ["out"])]
    return _model(nodes, {"rows": ["tokens", D_MODEL]}, ["tokens", 1], w=weights(1, 3))


def multi_vector(**changes: Any) -> manifest_pb2.MultiVector:
    """Return the section of the manifest that describes `multi_vector_file`."""
    fields: dict[str, Any] = {
        "file": "multi_vector.onnx",
        "input_name": "rows",
        "output_name": "out",
        "width": WIDTH,
        "similarity": "maxsim",
    }
    return manifest_pb2.MultiVector(**fields | changes)


def sparse(**changes: Any) -> manifest_pb2.Sparse:
    """Return the section of the manifest that describes `sparse_file("max")`."""
    fields: dict[str, Any] = {
        "file": "sparse.onnx",
        "rows_name": "rows",
        "mask_name": "mask",
        "output_name": "out",
        "width": VOCAB_SIZE,
        "pooling": manifest_pb2.SPARSE_POOLING_MAX,
    }
    return manifest_pb2.Sparse(**fields | changes)


def scores_file(labels: int = 1, table: Array | None = None) -> bytes:
    """Return the ONNX file of a head that computes logits from pooled hidden states.

    The input has the shape (batch, d_model). The output has the shape (batch, labels).
    """
    nodes = [helper.make_node("MatMul", ["pooled", "w"], ["out"])]
    return _model(
        nodes, {"pooled": ["batch", D_MODEL]}, ["batch", labels], w=weights(labels, 4) if table is None else table
    )


def expected_logits(rows: Array, labels: int = 1) -> Array:
    """Compute the expected output of `scores_file` for the hidden states of one sequence, with the pooling CLS."""
    return np.asarray(rows[0] @ weights(labels, 4))


def pair_ids(query: list[int], document: list[int]) -> list[int]:
    """Return the ids of a pair of texts, with special tokens."""
    return [BEGIN, *query, END, *document, END]


def logits_of(sequences: list[list[int]], labels: int = 1) -> Any:
    """Return the expected logits, in the shape (sequences, labels)."""
    return np.array([expected_logits(expected_rows(ids), labels) for ids in sequences])


def sigmoid(logits: Any) -> Any:
    """Return the logistic function of logits."""
    return 1 / (1 + np.exp(-logits))


def softmax(logits: Any) -> Any:
    """Return the softmax of each row of `logits`, in the shape (n, labels)."""
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def scores(**changes: Any) -> manifest_pb2.Scores:
    """Return the section of the manifest that describes `scores_file()`."""
    fields: dict[str, Any] = {
        "file": "scores.onnx",
        "input_name": "pooled",
        "output_name": "out",
        "labels": ["relevant"],
        "pooling": manifest_pb2.POOLING_CLS,
        "activation": manifest_pb2.ACTIVATION_SIGMOID,
        "pair_truncation": manifest_pb2.PAIR_TRUNCATION_LONGEST_FIRST,
    }
    return manifest_pb2.Scores(**fields | changes)


def every_kind() -> dict[str, Any]:
    """Return arguments for `write_bundle`. With them, the bundle has every kind of output that BGE-M3 has."""
    return {
        "files": {"sparse.onnx": own_id_file(), "multi_vector.onnx": multi_vector_file()},
        "sparse": sparse(
            pooling=manifest_pb2.SPARSE_POOLING_OWN_ID,
            mask_name="",
            skipped_token_ids=[BEGIN, END],
        ),
        "multi_vector": multi_vector(),
    }


def every_kind_and_scores() -> dict[str, Any]:
    """Return the arguments from `every_kind`, and add the head of a cross-encoder."""
    kinds = every_kind()
    return kinds | {"files": kinds["files"] | {"scores.onnx": scores_file()}, "scores": scores()}


def loader(bundle: Path, engine: Any = "onnxruntime") -> Loader:
    """Return a loader that always loads `bundle`, and ignores the directory argument."""

    def load(_: Path, settings: Settings, pool: FairThreadPool, served: str) -> LoadedModel:
        return load_model(bundle, replace(settings, engine=engine), pool)

    return load
