"""Reads static embeddings of sentence-transformers (StaticEmbedding) and model2vec.

A static embedding is a table with one vector per token. The bundle's encoder is a graph with one node, which looks up
token ids in this table. The bundle's pooling is the mean.
"""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from encserve_export.core import names
from encserve_export.core.arrays import Rows
from encserve_export.core.errors import UnsupportedModelError
from encserve_export.kinds.dense import read_tasks, read_vector
from encserve_export.kinds.directory import MODULES, load, read_modules
from encserve_export.kinds.spec import ModelSpec
from encserve_export.onnx_graph.external import place
from encserve_proto.bundle.v1 import manifest_pb2

# A static embedding accepts texts of any length, but the server needs a limit.
_LONGEST = 8192
_IR_VERSION = 9


def read_static(directory: Path) -> ModelSpec:
    """Read the directory of a static embedding.

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another file.
    """
    if not (directory / MODULES).is_file():
        raise UnsupportedModelError(
            f"{directory} is a model2vec directory without {MODULES}, so the pooling is unknown. Save the model again "
            "with StaticModel.save_pretrained of a recent model2vec, or with SentenceTransformer.save_pretrained"
        )
    loaded = load(directory, "static")
    first, *rest = loaded.children()
    truncation = first.tokenizer.truncation
    return dataclasses.replace(
        read_vector(directory, loaded, rest, manifest_pb2.POOLING_MEAN),
        kind="static",
        encoder=read_modules(directory)[0][1],
        loaded=loaded,
        tokenizer=first.tokenizer,
        max_seq_length=_LONGEST if truncation is None else min(_LONGEST, truncation["max_length"]),
        prompts=dict(loaded.prompts),
        default_prompt_name=loaded.default_prompt_name or "",
        table=first.embedding.weight.detach().float().numpy(),
        tasks=read_tasks(loaded.prompts, None),
    )


def write_graph(table: Rows, path: Path) -> None:
    """Write a graph that looks up token ids in a table (vocab_size, d_model).

    The table goes to a second file, which may exceed 2 GB.

    The graph maps ids and mask, int64 (batch, seq), to hidden states, float32 (batch, seq, d_model). A token's hidden
    state depends only on the token's id, so the graph ignores the mask.
    """
    axes = ["batch", "seq"]
    ids, mask = (
        helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name in (names.INPUT_IDS, names.ATTENTION_MASK)
    )
    rows = helper.make_tensor_value_info(names.OUTPUT, TensorProto.FLOAT, [*axes, table.shape[1]])
    node = helper.make_node("Gather", ["table", names.INPUT_IDS], [names.OUTPUT], name="lookup")
    weights = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=table.shape)
    with path.with_name(names.DATA_FILE).open("wb") as data:
        place(weights, np.ascontiguousarray(table, np.float32).data.cast("B"), data)
    graph = helper.make_graph([node], "static", [ids, mask], [rows], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", names.OPSET)], ir_version=_IR_VERSION)
    onnx.save_model(model, path)
