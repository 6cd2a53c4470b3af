"""Computes the space_id, which identifies the vector space of a model.

Two bundles with equal ids compute equal vectors, up to rounding to float16. The id is a hash of everything that
determines the vectors. The hash is computed from the model's own files:

- the weights: name, type, shape and bytes of every tensor,
- the configuration: config.json without settings that do not affect vectors,
- for a model that is only an ONNX file: the operators and weights that the model's output depends on,
- the modules after the encoder: their settings and tensors,
- the tokenizer: tokenizer.json without settings for padding, truncation and decoding,
- the manifest's settings for pooling, prompts, tasks and lengths,
- the precision, if it is int8, because quantized weights are different weights.

The id does not depend on the exporter's version or on the export route. The export route is the way in which `hf`
exports a model: with transformers, or from the ONNX file. The id also does not depend on the names of ONNX nodes and
values, or on the number of weight files.

Models with equal vectors can have different ids. A setting that the exporter does not know always changes the id, even
if the setting does not affect vectors. docs/reference/space-id.md defines version s3 of the id. Vector indexes store
ids, so a change of this definition needs a new prefix instead of s3.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, TensorProto, numpy_helper
from torch import Tensor

from encserve_export.core.errors import ConfigError
from encserve_export.kinds.spec import ModuleFacts
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder
from encserve_export.onnx_graph.interface import Interface
from encserve_export.source.weights import read_object
from encserve_proto.bundle.v1 import manifest_pb2

VERSION = "s3"
# Ids with the prefix s2 are accepted until release 0.2. Ids without a prefix are older than s2.
_FORM = re.compile(r"(?:s[23]-)?[0-9a-f]{32}")
# Keys of config.json, at any depth, that do not affect vectors. Keys that contain a text of `_TRAINING` are settings of
# the training, and do not affect vectors either.
CONFIG_IGNORED = {
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "chunk_size_feed_forward", "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor",
    "initializer_range", "label2id", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "use_cache",
}  # fmt: skip
_TRAINING = ("dropout", "_pdrop")
_TOKENIZER_IGNORED = {"version", "truncation", "padding", "decoder"}
# Manifest fields that do not affect vectors, and fields whose content the hash already covers (tensors, configuration,
# modules).
MANIFEST_IGNORED = {
    "format_version", "name", "version", "fingerprint", "space_id", "source", "files", "parameters", "parity",
    "encoder", "graph", "head", "inspect_graph", "similarity",
}  # fmt: skip
# Fields of nested messages, at any depth, that are ignored for the same reasons as the fields above.
MESSAGE_IGNORED = {
    "tokenizer_file", "weights_file", "file", "input_name", "output_name", "rows_name", "mask_name", "width",
    "special_token_ids", "takes_empty", "similarity", "labels",
}  # fmt: skip
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def is_quantized(precision: str) -> bool:
    """Return whether a `Graph.precision`, such as "int8", is not a floating-point type."""
    return precision not in _FLOATS


def check_form(given: str) -> None:
    """Check that a text looks like a space_id of this or an earlier version.

    Raises:
        ConfigError: The text is not a space_id. A space_id has 32 hex digits, with the prefix "s3-" or "s2-" or
            without a prefix.
    """
    if not _FORM.fullmatch(given):
        raise ConfigError(
            f"a space_id is {VERSION}- and 32 hex digits; in older bundles the prefix is s2- or missing; "
            f"was {given!r}. Copy the id from the bundle's manifest.json or from `encserve models --json`"
        )


def space_id(manifest: manifest_pb2.Manifest, model: str, modules: Sequence[ModuleFacts], folder: Path) -> str:
    """Compute a space_id: "s3-" and 32 hex digits.

    Args:
        manifest: The manifest of the bundle.
        model: The result of `digest_model`, `digest_encoder` or `digest_onnx`.
        modules: The modules after the encoder; see `ModelSpec.modules`.
        folder: The folder of the tokenizer files that the manifest names.
    """
    fields = MessageToDict(manifest, preserving_proto_field_name=True)
    settings = {
        name: value if name == "prompts" else _plain(value, MESSAGE_IGNORED)
        for name, value in fields.items()
        if name not in MANIFEST_IGNORED
    }
    settings["prompts"] = {name: text for name, text in manifest.prompts.items() if text}
    tokenizers = {"text": manifest.text.tokenizer_file}
    for task in ("query", "document"):
        tokenizers[task] = getattr(manifest, task).static_sparse.tokenizer_file
    facts = {
        "model": model,
        "max_sequence_tokens": manifest.encoder.max_sequence_tokens,
        "settings": settings,
        "modules": [[it.kind, _plain(it.settings, ()), _tensors(it.tensors)] for it in modules],
        "tokenizers": {use: _digest_tokenizer(folder / file) for use, file in tokenizers.items() if file},
        "quantized": manifest.graph.precision if is_quantized(manifest.graph.precision) else None,
    }
    return f"{VERSION}-{_digest(facts)[:32]}"


def digest_model(tensors: Mapping[str, Tensor], configuration: Mapping[str, Any] | EncoderConfig) -> str:
    """Return the SHA-256 of a checkpoint's tensors and configuration, in hex.

    Args:
        tensors: The checkpoint's tensors, by their names in the files.
        configuration: The content of config.json, or the configuration of an `Encoder`. Fields of an `EncoderConfig`
            that have their default value are ignored, so a new field does not change existing ids.

    Raises:
        ConfigError: The configuration contains a value that JSON cannot express.
    """
    if isinstance(configuration, EncoderConfig):
        configuration = {
            field.name: value
            for field in dataclasses.fields(configuration)
            if (value := getattr(configuration, field.name)) != field.default and field.name != "max_sequence_tokens"
        }
    settings = _plain(configuration, CONFIG_IGNORED, _TRAINING)
    return _digest({"tensors": _tensors(tensors), "configuration": settings})


def digest_encoder(encoder: Encoder) -> str:
    """Return the SHA-256 of an encoder's tensors and configuration, in hex, as `digest_model` does."""
    return digest_model(encoder.state_dict(), encoder.config)


def digest_onnx(model: onnx.ModelProto, interface: Interface) -> str:
    """Return a SHA-256, in hex, of the computation from an ONNX model's inputs to its output.

    The hash of a value covers the operator that computes the value, and the hashes of the operator's inputs. So the
    result depends on operators, attributes, branches, opset versions and weights. It does not depend on names, the
    order of nodes, or unused nodes. Functions that the model defines are hashed completely, including their names.
    """
    opsets = {it.domain: it.version for it in model.opset_import}
    inputs = {interface.input_ids: "ids", interface.attention_mask: "mask", interface.token_type_ids: "types"}
    values = {name: _digest(["input", use]) for name, use in inputs.items() if name}
    values = _graph_values(model.graph, values, opsets, depth=0)
    return _digest([values.get(interface.output), sorted(map(_digest_message, model.functions))])


def _graph_values(graph: GraphProto, outer: Mapping[str, str], opsets: Mapping[str, int], depth: int) -> dict[str, str]:
    """Return the hash of each value of a graph or branch, by name.

    A branch is a graph inside a node, such as the two branches of `If`. `outer` has the hashes of the inputs. For a
    branch, `outer` also has the hashes of the surrounding graph's values.
    """
    values = {**outer, "": ""}  # an omitted optional input has the empty name
    values |= {it.name: _digest(["constant", _onnx_tensor(it)]) for it in graph.initializer}
    values |= {it.values.name: _digest_message(it) for it in graph.sparse_initializer}
    for node in graph.node:
        facts = [
            [node.domain, node.op_type, node.overload, opsets.get(node.domain), len(node.output)],
            sorted(_attribute(it, values, opsets, depth) for it in node.attribute),
            [values.get(name, f"unknown {name}") for name in node.input],  # ONNX refuses an unknown name later
        ]
        digest = _digest(facts)
        values |= {name: _digest([digest, i]) for i, name in enumerate(node.output) if name}
    return values


def _attribute(attribute: AttributeProto, outer: Mapping[str, str], opsets: Mapping[str, int], depth: int) -> str:
    content: Any
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        branches = [attribute.g] if attribute.HasField("g") else attribute.graphs
        content = [_branch(it, outer, opsets, depth + 1) for it in branches]
    elif attribute.type in (AttributeProto.TENSOR, AttributeProto.TENSORS):
        content = [_onnx_tensor(it) for it in ([attribute.t] if attribute.HasField("t") else attribute.tensors)]
    else:
        content = _digest_message(attribute)
    return json.dumps([attribute.name, attribute.type, content])


def _branch(graph: GraphProto, outer: Mapping[str, str], opsets: Mapping[str, int], depth: int) -> list[Any]:
    inputs = {it.name: _digest(["input of a branch", depth, i]) for i, it in enumerate(graph.input)}
    values = _graph_values(graph, {**outer, **inputs}, opsets, depth)
    return [len(graph.input), [values.get(it.name) for it in graph.output]]


def _onnx_tensor(tensor: TensorProto) -> list[Any]:
    """Return the type, the shape and the SHA-256 of an ONNX tensor; strings are listed instead of hashed."""
    array = numpy_helper.to_array(tensor)
    if tensor.data_type == TensorProto.STRING:
        return [tensor.data_type, list(tensor.dims), [str(it) for it in array.reshape(-1)]]
    return [tensor.data_type, list(tensor.dims), _digest_bytes(array.reshape(-1).view(np.uint8).data)]


def _tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the type, the shape and the SHA-256 of each tensor, by name.

    Older versions of transformers also saved position ids 0, 1, 2, … and token type ids 0. Such tensors are not
    weights, so they are left out.
    """
    facts: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        if not _is_index(name, tensor):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            kind = str(tensor.dtype).removeprefix("torch.")
            facts[name] = [kind, list(tensor.shape), _digest_bytes(flat.numpy().data)]
    return facts


def _is_index(name: str, tensor: Tensor) -> bool:
    if name.endswith("position_ids"):
        return torch.equal(tensor.flatten(), torch.arange(tensor.numel()))
    return name.endswith("token_type_ids") and not tensor.any()


def _digest_tokenizer(path: Path) -> str:
    tokenizer = {key: value for key, value in read_object(path).items() if key not in _TOKENIZER_IGNORED}
    model = tokenizer["model"]
    if "merges" in model:  # older versions of tokenizers write "a b", newer versions write ["a", "b"]
        model["merges"] = [it.split(" ") if isinstance(it, str) else it for it in model["merges"]]
    return _digest(tokenizer)


def _plain(value: Any, ignored: Iterable[str], ignored_parts: Iterable[str] = ()) -> Any:
    """Remove ignored keys, and keys that contain an ignored part, at any depth.

    A float without a fraction, such as 1.0, becomes an integer.
    """
    if isinstance(value, list | tuple):
        return [_plain(it, ignored, ignored_parts) for it in value]
    if isinstance(value, Mapping):
        return {
            key: _plain(it, ignored, ignored_parts)
            for key, it in value.items()
            if key not in ignored and not any(part in str(key) for part in ignored_parts)
        }
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(facts: Any) -> str:
    """Return the SHA-256 of the facts as JSON with sorted keys and without spaces, in hex."""
    try:
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration must hold JSON values only: {error}") from error
    return _digest_bytes(text.encode())


def _digest_message(message: Message) -> str:
    return _digest_bytes(message.SerializeToString(deterministic=True))


def _digest_bytes(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
