"""Models for the tests with attacks: with wide outputs, long sequences, slow batches, or a tokenizer that panics."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import write_bundle
from tiny_heads import multi_vector, scores, sparse
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from encserve_proto.bundle.v1 import manifest_pb2

VOCAB_SIZE = 64
# In the wide model, the hidden state of a token has 64 KiB. So the reply for 1,000 tokens has 62.5 MiB. The limit of
# a reply is 64 MiB.
WIDE, WIDE_TOKENS = 16_384, 1_000
NARROW = 8
LONGEST = 8_192
MULTI_VECTOR_WIDTH = 16
INSPECTED = 2_048
SPARSE_WIDTH, SPARSE_D_MODEL = 30_522, 384
# For each token with the id SLOW_ID in a batch, the slow model does SLOW_STEPS matrix multiplications.
SLOW_ID, SLOW_STEPS = 7, 100
# With this text, the tokenizer's regular expression stops after 10 million attempts. Then the tokenizers library
# panics. In Python, the panic is a BaseException.
PANIC_TEXT = "a" * 40 + "b"
# The hidden state of the word "nan" is NaN.
NAN_TEXT, NAN_ID = "nan", 5
_INT64, _FLOAT = TensorProto.INT64, TensorProto.FLOAT
Array = npt.NDArray[Any]


def write_narrow(repository: Path) -> None:
    """Write a model with short hidden states: 8 numbers for each token."""
    _write(repository, "narrow", NARROW)


def write_wide(repository: Path) -> None:
    """Write a model with very long hidden states: 64 KiB for each token."""
    _write(repository, "wide", WIDE, encoder__max_sequence_tokens=WIDE_TOKENS)


def write_sparse(repository: Path) -> None:
    """Write a sparse model with a vocabulary of the common size 30,522."""
    head = _head(
        [
            helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
            helper.make_node("MatMul", ["rows", "w"], ["logits"]),
            helper.make_node("Mul", ["logits", "column"], ["masked"]),
            helper.make_node("ReduceMax", ["masked"], ["largest"], axes=[1], keepdims=0),
            helper.make_node("Relu", ["largest"], ["out"]),
        ],
        {"rows": ["batch", "seq", SPARSE_D_MODEL], "mask": ["batch", "seq"]},
        ["batch", SPARSE_WIDTH],
        w=_random(SPARSE_D_MODEL, SPARSE_WIDTH),
        last=np.array([-1]),
    )
    files = {"sparse.onnx": head, "model.onnx": _lookup_graph(SPARSE_D_MODEL, SPARSE_WIDTH)}
    _write(
        repository,
        "sparse",
        SPARSE_D_MODEL,
        files=files,
        sparse=sparse(width=SPARSE_WIDTH),
        encoder__vocab_size=SPARSE_WIDTH,
        encoder__max_sequence_tokens=512,
    )


def write_multi_vector(repository: Path) -> None:
    """Write a multi-vector model for texts of up to 8,192 tokens."""
    head = _head(
        [
            helper.make_node("MatMul", ["rows", "w"], ["projected"]),
            helper.make_node("ReduceL2", ["projected"], ["norm"], axes=[-1], keepdims=1),
            helper.make_node("Div", ["projected", "norm"], ["out"]),
        ],
        {"rows": ["tokens", NARROW]},
        ["tokens", MULTI_VECTOR_WIDTH],
        w=_random(NARROW, MULTI_VECTOR_WIDTH),
    )
    part = multi_vector(width=MULTI_VECTOR_WIDTH)
    _write(repository, "multi-vector", NARROW, files={"multi_vector.onnx": head}, multi_vector=part)


def write_slow(repository: Path, steps_per_run: int = 0) -> None:
    """Write the slow model. Each batch needs `steps_per_run` matrix multiplications.

    Each token with the id SLOW_ID adds SLOW_STEPS multiplications.
    """
    files = {"model.onnx": _slow_graph(steps_per_run)}
    write_bundle(
        repository,
        "slow",
        files=files,
        encoder__d_model=NARROW,
        encoder__vocab_size=VOCAB_SIZE,
        encoder__max_sequence_tokens=LONGEST,
    )


def write_panicking(repository: Path) -> None:
    """Write a model whose tokenizer panics on PANIC_TEXT."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    _write(repository, "panicking", NARROW, tokenizer=tokenizer)


def write_words(repository: Path) -> None:
    """Write a model whose tokenizer knows four words."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "dog": 2, "cat": 3, "on": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _write(repository, "words", NARROW, tokenizer=tokenizer, encoder__max_sequence_tokens=512)


def write_cross_encoder(repository: Path, labels: int = 1) -> None:
    """Write a cross-encoder or classifier for texts of up to 512 tokens. A text with "nan" has scores of NaN."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "dog": 2, NAN_TEXT: NAN_ID}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    head = _head(
        [helper.make_node("MatMul", ["pooled", "w"], ["out"])],
        {"pooled": ["batch", NARROW]},
        ["batch", labels],
        w=_random(NARROW, labels),
    )
    part = scores(
        labels=[f"label {i}" for i in range(labels)] if labels > 1 else ["relevant"],
        pooling=manifest_pb2.POOLING_MEAN,
        activation=manifest_pb2.ACTIVATION_NONE,
    )
    _write(
        repository,
        "cross-encoder",
        NARROW,
        files={"scores.onnx": head, "model.onnx": _lookup_graph(NARROW, nan_id=NAN_ID)},
        scores=part,
        tokenizer=tokenizer,
        encoder__max_sequence_tokens=512,
    )


def write_classifier(repository: Path) -> None:
    """Write a classifier with 10,000 labels."""
    write_cross_encoder(repository, labels=10_000)


def write_inspected(repository: Path) -> None:
    """Write a model with a tokenizer and a graph for inspections. The two hidden states of a token have 16 KiB.

    The attention weights are copies of the hidden states.
    """
    graph = onnx.load_from_string(_lookup_graph(INSPECTED))
    for name in ("last", "weights"):
        graph.graph.node.append(helper.make_node("Identity", ["rows"], [name]))
        graph.graph.output.append(helper.make_tensor_value_info(name, _FLOAT, ["batch", "seq", INSPECTED]))
    inspected = manifest_pb2.InspectGraph(
        file="inspect.onnx", hidden_state_names=["rows", "last"], attention_weights_names=["weights"]
    )
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    _write(
        repository,
        "inspected",
        INSPECTED,
        files={"inspect.onnx": graph.SerializeToString()},
        tokenizer=tokenizer,
        inspect_graph=inspected,
        encoder__position="none",
    )


def _write(repository: Path, name: str, d_model: int, *, files: dict[str, bytes] | None = None, **changes: Any) -> None:
    """Write a bundle. By default, the graph reads the hidden state of each token from a table."""
    shape = {
        "encoder__d_model": d_model,
        "encoder__vocab_size": VOCAB_SIZE,
        "encoder__max_sequence_tokens": LONGEST,
    }
    write_bundle(repository, name, files={"model.onnx": _lookup_graph(d_model), **(files or {})}, **shape | changes)


def _random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _inputs() -> list[Any]:
    return [helper.make_tensor_value_info(name, _INT64, ["batch", "seq"]) for name in ("ids", "mask")]


def _lookup_graph(d_model: int, vocab_size: int = VOCAB_SIZE, nan_id: int | None = None) -> bytes:
    """Return a graph that reads the hidden state of each token from a table, and ignores the mask.

    The hidden state of `nan_id` is NaN.

    The ids have the shape (batch, seq). The hidden states have the shape (batch, seq, d_model).
    """
    rows = helper.make_tensor_value_info("rows", _FLOAT, ["batch", "seq", d_model])
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"])]
    table = _random(vocab_size, d_model)
    if nan_id is not None:
        table[nan_id] = np.nan
    constant = numpy_helper.from_array(table, "table")
    return _bytes(helper.make_graph(nodes, "lookup", _inputs(), [rows], [constant]))


def _slow_graph(steps_per_run: int) -> bytes:
    """Return a graph that reads the hidden states from a table, after a loop of matrix multiplications.

    The number of multiplications depends on the ids. The loop always returns 0, so the loop does not change the output.
    """
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["matrix_in", "fixed"], ["matrix_out"]),
            helper.make_node("Identity", ["condition_in"], ["condition_out"]),
        ],
        "step",
        [
            scalar("step", _INT64, []),
            scalar("condition_in", TensorProto.BOOL, []),
            scalar("matrix_in", _FLOAT, [256, 256]),
        ],
        [scalar("condition_out", TensorProto.BOOL, []), scalar("matrix_out", _FLOAT, [256, 256])],
    )
    nodes = [
        helper.make_node("Equal", ["ids", "slow_id"], ["is_slow"]),
        helper.make_node("Cast", ["is_slow"], ["slow"], to=_INT64),
        helper.make_node("ReduceSum", ["slow"], ["count"], keepdims=0),
        helper.make_node("Mul", ["count", "steps_each"], ["steps_asked"]),
        helper.make_node("Add", ["steps_asked", "steps_per_run"], ["steps"]),
        helper.make_node("Loop", ["steps", "always", "fixed"], ["product"], body=body),
        helper.make_node("ReduceSum", ["product"], ["total"], keepdims=0),
        helper.make_node("Gather", ["table", "ids"], ["vectors"]),
        helper.make_node("Add", ["vectors", "total"], ["rows"]),
    ]
    constants = {
        "slow_id": np.array(SLOW_ID),
        "steps_each": np.array(SLOW_STEPS),
        "steps_per_run": np.array(steps_per_run),
        "always": np.array(True),
        "fixed": np.zeros((256, 256), np.float32),
        "table": _random(VOCAB_SIZE, NARROW),
    }
    rows = helper.make_tensor_value_info("rows", _FLOAT, ["batch", "seq", NARROW])
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    return _bytes(helper.make_graph(nodes, "slow", _inputs(), [rows], initializers))


def _head(nodes: list[Any], inputs: dict[str, list[Any]], outputs: list[Any], **constants: Array) -> bytes:
    return _bytes(
        helper.make_graph(
            nodes,
            "head",
            [helper.make_tensor_value_info(name, _FLOAT, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info("out", _FLOAT, outputs)],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
    )


def _bytes(graph: Any) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
