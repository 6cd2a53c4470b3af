"""What identifies a vector space: the same for every bundle of one model, whoever exported it and on whatever route.

A space is of the model as its authors left it, never of a file that an exporter or PyTorch writes. What counts:

- the weights: every tensor of the checkpoint by its own name, with its type, shape and bytes, in whatever files or
  format it came (`digest_model`), a head's too, but for indices that older versions saved;
- the configuration: every key of config.json, or of `EncoderConfig`, but for those that change no row: where it came
  from, versions, types in memory, classes, labels, what only training reads, and what to return. A key that is not
  known here counts. The longest sequence is counted by itself, as the bundle has it;
- the tokenizer: what tokenizer.json says, but for truncation and padding, which servers decide; how its JSON is
  formatted is nothing to it, nor is which way its merges are written;
- how rows become vectors: poolings, the modules behind them with their weights, dimensions, prompts, tasks, and whether
  texts are put into lower case;
- whether it is quantised. Weights of 8 bits are other weights. float16 is not: it rounds more finely than a server that
  computes float32 weights in bfloat16, and that does not change the space either.

An ONNX file that was compared with the checkpoint beside it is the checkpoint's model. One that came alone, or is
quantised, is its own: its initializers by their names, and its nodes.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf import json_format
from onnx import NodeProto, TensorProto, numpy_helper
from torch import Tensor, nn

from encserve_export.kinds.recipe import Recipe
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder
from encserve_export.onnx_graph.foreign import Interface
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import INDICES, read_object
from encserve_proto.bundle.v1 import manifest_pb2

# Keys of config.json that change no row, at any depth; and parts of the names of those that only training reads.
_HARMLESS = {
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "chunk_size_feed_forward", "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor",
    "initializer_range", "label2id", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "use_cache",
}  # fmt: skip
_TRAINING = ("dropout", "_pdrop")
# How rows become vectors, of the manifest; and what of it is of the files alone.
_FACTS = (
    "pooling",
    "more_poolings",
    "l2_normalize",
    "pooling_skips_prompt",
    "prompts",
    "default_prompt_name",
    "dimensions",
    "query",
    "document",
    "multi_vector",
    "sparse",
)
_OF_FILES = {"file", "input_name", "output_name", "rows_name", "mask_name", "tokenizer_file", "weights_file"}
# The types of weights that are only rounded.
_ROUNDED = ("float64", "float32", "float16", "bfloat16")


def is_quantized(precision: str) -> bool:
    """Whether weights of a precision, in the words of `Graph.precision`, are other weights."""
    return precision not in _ROUNDED


def space_id(manifest: manifest_pb2.Manifest, model: str, tokenizer: TokenizerFile | None, vector: Recipe) -> str:
    """Identifies a vector space: 32 hex digits.

    Args:
        manifest: What a bundle says of itself.
        model: What `digest_model`, `digest_encoder` or `digest_onnx` gave.
        tokenizer: Its tokenizer.
        vector: How the model makes one vector of a text; of it the modules count here, the rest from the manifest.
    """
    said = json_format.MessageToDict(manifest, preserving_proto_field_name=True)
    rows = None if vector.multi_vector is None else vector.multi_vector.module
    weights = None if vector.sparse is None else vector.sparse.module
    static = nn.ModuleList(vector.static_weights) if vector.static_weights else None
    modules: dict[str, nn.Module | None] = {
        "head": vector.head,
        "multi_vector": rows,
        "sparse": weights,
        "static_weights": static,
    }
    facts: dict[str, Any] = {
        "model": model,
        "max_sequence_tokens": manifest.encoder.max_sequence_tokens,
        "vectors": _plain({name: said[name] for name in _FACTS if name in said}, _OF_FILES),
        "modules": {name: _digest_module(it) for name, it in modules.items() if it is not None},
        "tokenizer": None if tokenizer is None else _tokenizer_facts(tokenizer),
        "quantized": manifest.graph.precision if is_quantized(manifest.graph.precision) else None,
    }
    if vector.static_weights:
        facts["static_tokenizers"] = [_plain_tokenizer(dict(it.tokenizer)) for it in vector.static_weights]
    return _digest(facts)[:32]


def digest_model(tensors: Mapping[str, Tensor], configuration: Mapping[str, Any] | EncoderConfig) -> str:
    """Identifies a checkpoint, in hex.

    Args:
        tensors: Its tensors by their own names.
        configuration: config.json, or the configuration of an `Encoder`, whose fields at their default do not count: a
            field that is added later changes no space.
    """
    if isinstance(configuration, EncoderConfig):
        counted: Any = {
            its.name: value
            for its in dataclasses.fields(configuration)
            if (value := getattr(configuration, its.name)) != its.default and its.name != "max_sequence_tokens"
        }
    else:
        counted = _plain(configuration, _HARMLESS, _TRAINING)
    return _digest({"tensors": _digest_tensors(tensors), "configuration": counted})


def digest_encoder(encoder: Encoder) -> str:
    """Identifies an encoder that comes from no checkpoint, in hex."""
    return digest_model(encoder.state_dict(), encoder.config)


def digest_onnx(model: onnx.ModelProto, interface: Interface) -> str:
    """Identifies a model that came as ONNX, with its weights in it, in hex.

    What its nodes are called and where their code stood does not count; what goes in and comes out of each does.
    """
    tensors = {tensor.name: _digest_initializer(tensor) for tensor in model.graph.initializer}
    return _digest(
        {
            "initializers": tensors,
            "sparse": [_digest_message(it) for it in model.graph.sparse_initializer],
            "nodes": [_digest_node(it) for it in model.graph.node],
            "functions": [[it.domain, it.name, *map(_digest_node, it.node)] for it in model.functions],
            "opsets": sorted([it.domain, it.version] for it in model.opset_import),
            "interface": dataclasses.asdict(interface),
        }
    )


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """The type, the shape and the SHA-256 of each, whose bytes are not copied."""
    found: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        if not name.endswith(INDICES):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            kind = str(tensor.dtype).removeprefix("torch.")
            found[name] = [kind, list(tensor.shape), hashlib.sha256(flat.numpy().data).hexdigest()]
    return found


def _digest_module(module: nn.Module) -> dict[str, Any]:
    """What comes after rows or pooling: which modules, in which order, and their weights."""
    kinds = [[name, type(it).__name__] for name, it in module.named_modules()]
    settings = getattr(module, "settings", None)  # of modules that are not ours
    return {"kinds": kinds, "settings": settings, "tensors": _digest_tensors(module.state_dict())}


def _digest_initializer(tensor: TensorProto) -> list[Any]:
    """As of a tensor of PyTorch's; a file may write the same numbers in two ways."""
    if tensor.data_type == TensorProto.STRING:
        return [_digest_message(tensor)]
    flat = numpy_helper.to_array(tensor).reshape(-1).view(np.uint8)
    return [tensor.data_type, list(tensor.dims), hashlib.sha256(flat.data).hexdigest()]


def _digest_node(node: NodeProto) -> str:
    plain = NodeProto()
    plain.CopyFrom(node)
    for field in ("name", "doc_string", "metadata_props"):
        plain.ClearField(field)
    return _digest_message(plain)


def _digest_message(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _plain(value: Any, names: Collection[str], parts: Collection[str] = ()) -> Any:
    """JSON without the keys of these names, or with one of these parts in their names, at any depth."""
    if isinstance(value, list):
        return [_plain(it, names, parts) for it in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _plain(it, names, parts)
        for key, it in value.items()
        if key not in names and not any(part in key for part in parts)
    }


def _tokenizer_facts(tokenizer: TokenizerFile) -> dict[str, Any]:
    facts = _plain_tokenizer(read_object(tokenizer.path))
    return {**facts, "lowercase": False} | ({"split_special_tokens": True} if tokenizer.split_special_tokens else {})


def _plain_tokenizer(settings: dict[str, Any]) -> dict[str, Any]:
    """What tokenizer.json says, but for what servers decide and how it is written."""
    for name in ("truncation", "padding", "version"):
        settings.pop(name, None)
    model = settings.get("model") or {}
    if isinstance(merges := model.get("merges"), list):
        # Newer versions write the two parts of a merge apart.
        model["merges"] = [it.split(" ") if isinstance(it, str) else it for it in merges]
    return settings
