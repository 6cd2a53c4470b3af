"""Computes the space_id, which identifies the vector space of a model.

Two bundles with equal ids give equal vectors, up to rounding to float16. The id is a hash of everything that makes a
vector, taken from the model's own files:

- the weights: name, type, shape and bytes of every tensor,
- the configuration: config.json without settings that change no vector,
- an ONNX model without other weights: the expression that its output computes,
- the modules after the encoder: their settings and tensors,
- the tokenizer: tokenizer.json without settings for padding, truncation and decoding,
- the manifest's settings of pooling, prompts, tasks and lengths,
- the precision, if it is int8: quantized weights are different weights.

The exporter's version, the route, the names of ONNX nodes and values, and the number of weight files do not count.
Equal vectors do not guarantee equal ids: an unknown setting counts, even if it has no effect. docs/models.md ("The name
of a vector space") defines version s3. Indexes keep ids, so a change of the rule gets a new prefix.
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
# s2 is read until 0.2; ids without a prefix are from before s2.
_FORM = re.compile(r"(?:s[23]-)?[0-9a-f]{32}")
# Keys of config.json, at any depth, that change no vector, and parts of the names of training settings.
CONFIG_IGNORED = {
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "chunk_size_feed_forward", "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor",
    "initializer_range", "label2id", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "use_cache",
}  # fmt: skip
_TRAINING = ("dropout", "_pdrop")
_TOKENIZER_IGNORED = {"version", "truncation", "padding", "decoder"}
# Fields of the manifest that change no vector, or that the tensors, the configuration and the modules already cover.
MANIFEST_IGNORED = {
    "format_version", "name", "version", "fingerprint", "space_id", "source", "files", "parameters", "parity",
    "encoder", "graph", "head", "inspect_graph", "similarity",
}  # fmt: skip
# The same for the messages in the manifest, at any depth.
MESSAGE_IGNORED = {
    "tokenizer_file", "weights_file", "file", "input_name", "output_name", "rows_name", "mask_name", "width",
    "special_token_ids", "takes_empty", "similarity",
}  # fmt: skip
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def is_quantized(precision: str) -> bool:
    """Return whether a `Graph.precision` is not a floating-point type, such as "int8"."""
    return precision not in _FLOATS


def check_form(given: str) -> None:
    """Check the form of a space_id of this or an earlier version.

    Raises:
        ConfigError: The text is not 32 hex digits after "s3-", "s2-" or no prefix.
    """
    if not _FORM.fullmatch(given):
        raise ConfigError(
            f"a space_id is {VERSION}- and 32 hex digits, or s2- or no prefix in older bundles; was {given!r}. Copy it "
            "from the bundle's manifest.json or from `encserve models --json`"
        )


def space_id(manifest: manifest_pb2.Manifest, model: str, modules: Sequence[ModuleFacts], folder: Path) -> str:
    """Compute a space_id: "s3-" and 32 hex digits.

    Args:
        manifest: The manifest of the bundle.
        model: The result of `digest_model`, `digest_encoder` or `digest_onnx`.
        modules: The modules after the encoder, see `ModelSpec.modules`.
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
    """Digest a checkpoint, in hex.

    Args:
        tensors: The tensors of its files, by their names there.
        configuration: The content of config.json, or the configuration of an `Encoder`. Its fields at their default do
            not count, so a field that is added later changes no id.

    Raises:
        ConfigError: The configuration holds a value that JSON cannot express.
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
    """Digest an encoder that does not come from a checkpoint, in hex."""
    return digest_model(encoder.state_dict(), encoder.config)


def digest_onnx(model: onnx.ModelProto, interface: Interface) -> str:
    """Digest the expression that an ONNX model's output computes from its inputs, in hex.

    Every value is digested from the operator that makes it and from the digests of the operator's inputs. So operators,
    attributes, branches, opset versions and weights count. Names, the order of nodes and unused nodes do not. The
    model's functions count as the file has them, names included.
    """
    opsets = {it.domain: it.version for it in model.opset_import}
    inputs = {interface.input_ids: "ids", interface.attention_mask: "mask", interface.token_type_ids: "types"}
    values = {name: _digest(["input", use]) for name, use in inputs.items() if name}
    values = _graph_values(model.graph, values, opsets, depth=0)
    return _digest([values.get(interface.output), sorted(map(_digest_message, model.functions))])


def _graph_values(graph: GraphProto, outer: Mapping[str, str], opsets: Mapping[str, int], depth: int) -> dict[str, str]:
    """Digest the values of a graph or branch by name; `outer` has its inputs and the values that a branch can see."""
    values = {**outer, "": ""}  # an omitted optional input has no name
    values |= {it.name: _digest(["constant", _onnx_tensor(it)]) for it in graph.initializer}
    values |= {it.values.name: _digest_message(it) for it in graph.sparse_initializer}
    for node in graph.node:
        facts = [
            [node.domain, node.op_type, node.overload, opsets.get(node.domain), len(node.output)],
            sorted(_attribute(it, values, opsets, depth) for it in node.attribute),
            [values.get(name, f"unknown {name}") for name in node.input],  # the checker refuses it later
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
    """Type, shape and bytes of an ONNX tensor, from raw_data or from the field of its type."""
    array = numpy_helper.to_array(tensor)
    if tensor.data_type == TensorProto.STRING:
        return [tensor.data_type, list(tensor.dims), [str(it) for it in array.reshape(-1)]]
    return [tensor.data_type, list(tensor.dims), _digest_bytes(array.reshape(-1).view(np.uint8).data)]


def _tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Type, shape and bytes of each tensor, without 0, 1, 2, … and zeros that older versions of transformers saved."""
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
    if "merges" in model:  # older versions of tokenizers write "a b", newer ones ["a", "b"]
        model["merges"] = [it.split(" ") if isinstance(it, str) else it for it in model["merges"]]
    return _digest(tokenizer)


def _plain(value: Any, ignored: Iterable[str], ignored_parts: Iterable[str] = ()) -> Any:
    """Remove ignored keys at any depth, and keys with an ignored part. Whole numbers become int: 1.0 is 1."""
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
    """SHA-256 of JSON with sorted keys and without spaces, in hex."""
    try:
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration must hold JSON values only: {error}") from error
    return _digest_bytes(text.encode())


def _digest_message(message: Message) -> str:
    return _digest_bytes(message.SerializeToString(deterministic=True))


def _digest_bytes(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
