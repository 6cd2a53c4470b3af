"""What identifies a vector space: the same for every bundle of one model, by any exporter and any route.

docs/models.md ("The name of a vector space") defines version s2 in words that another program can implement. What is
written here follows that page. A change to what counts is a new version with a new prefix, because indexes keep the
ids.
"""

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import NodeProto, TensorProto, numpy_helper
from tokenizers import Tokenizer
from torch import Tensor

from encserve_export.ground.errors import ConfigError
from encserve_export.kinds.spec import TASKS, ModuleFacts
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder
from encserve_export.onnx_graph.foreign import Interface
from encserve_export.source.weights import INDICES, read_json, read_object
from encserve_proto.bundle.v1 import manifest_pb2

VERSION = "s2"
# Ids of today, and those of bundles from before they had a version.
_FORM = re.compile(rf"(?:{VERSION}-)?[0-9a-f]{{32}}")
_TEXTS = Path(__file__).with_name("s2_texts.json")
# Keys of config.json that change no row, at any depth; and parts of the names of those that only training reads.
_HARMLESS = {
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "chunk_size_feed_forward", "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor",
    "initializer_range", "label2id", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "use_cache",
}  # fmt: skip
_TRAINING = ("dropout", "_pdrop")
# Ends of the names of tensors that transformers ties to others: a .bin file holds the copy, safetensors leaves it out.
_TIED = (
    "lm_head.weight",
    "decoder.weight",
    "decoder.bias",
    "vocab_projector.weight",
    "generator_lm_head.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
# The fields of the manifest that count, by message; tests/export/test_export_space.py lists those that do not.
COUNTED: Mapping[str, tuple[str, ...]] = {
    "Manifest": (
        *("pooling", "more_poolings", "l2_normalize", "pooling_skips_prompt", "prompts", "default_prompt_name"),
        *("dimensions", "text", "query", "document", "multi_vector", "sparse"),
    ),
    "TextInput": ("split_special_tokens", "max_tokens", "template"),
    "TextTemplate": ("before", "before_prompt", "after_prompt", "after", "after_tokens"),
    "TaskSettings": (
        *("prompt_name", "max_tokens", "expansion", "skipped_token_ids", "kept_token_ids", "token_pooling"),
        "static_sparse",
    ),
    "Expansion": ("min_tokens", "token_id", "attended"),
    "TokenPooling": ("factor", "protected_tokens", "l2_normalize"),
    "MultiVector": ("skips_first_token",),
    "Sparse": ("pooling", "skipped_token_ids", "max_active_dims"),
    "StaticSparse": ("max_tokens",),
}
# The settings of modules that count, with their defaults. Sizes follow from the tensors.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "Dense": {"activation_function": "Tanh", "use_residual": False},
    "LayerNorm": {},
    "Normalize": {},
    "SpladePooling": {"pooling_strategy": "max", "activation_function": "relu"},
    "SparseStaticEmbedding": {},
}
# The types of weights that are only rounded.
_ROUNDED = ("float64", "float32", "float16", "bfloat16")


def is_quantized(precision: str) -> bool:
    """Whether weights of a precision, in the words of `Graph.precision`, are other weights."""
    return precision not in _ROUNDED


def check_form(given: str) -> None:
    """Refuses what no exporter has ever written as a `space_id`.

    Raises:
        ConfigError: It is neither "s2-" and 32 hex digits nor 32 hex digits.
    """
    if not _FORM.fullmatch(given):
        raise ConfigError(
            f"a space_id is {VERSION}- and 32 hex digits, or 32 hex digits in older bundles; was {given!r}. `encserve "
            "models --json` and the bundle's manifest.json have it"
        )


def space_id(manifest: manifest_pb2.Manifest, model: str, modules: Sequence[ModuleFacts], folder: Path) -> str:
    """Identifies a vector space: "s2-" and 32 hex digits.

    Args:
        manifest: What a bundle says of itself.
        model: What `digest_model`, `digest_encoder` or `digest_onnx` gave.
        modules: What comes after the encoder, see `ModelSpec.modules`.
        folder: Where the tokenizers lie that the manifest names.
    """
    precision = manifest.graph.precision
    tasks = {task: getattr(manifest, task) for task in TASKS}
    facts = {
        "model": model,
        "max_sequence_tokens": manifest.encoder.max_sequence_tokens,
        "vectors": _vector_facts(manifest),
        "modules": [_module_facts(it) for it in modules],
        "tokenizer": _digest_tokenizer(folder / manifest.text.tokenizer_file) if manifest.HasField("text") else None,
        "static_tokenizers": {
            task: _digest_tokenizer(folder / its.static_sparse.tokenizer_file)
            for task, its in tasks.items()
            if its.HasField("static_sparse")
        },
        "quantized": precision if is_quantized(precision) else None,
    }
    return f"{VERSION}-{_digest(facts)[:32]}"


def digest_model(tensors: Mapping[str, Tensor], configuration: Mapping[str, Any] | EncoderConfig) -> str:
    """Identifies a checkpoint, in hex.

    Args:
        tensors: The tensors of its files by their own names.
        configuration: config.json, or the configuration of an `Encoder`, whose fields at their default do not count: a
            field that is added later changes no space.

    Raises:
        ConfigError: The configuration holds what JSON cannot say.
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
    return _digest(
        {
            "initializers": {tensor.name: _digest_initializer(tensor) for tensor in model.graph.initializer},
            "sparse_initializers": [_digest_message(it) for it in model.graph.sparse_initializer],
            "nodes": [_digest_node(it) for it in model.graph.node],
            "functions": [[it.domain, it.name, *map(_digest_node, it.node)] for it in model.functions],
            "opsets": sorted([it.domain, it.version] for it in model.opset_import),
            "inputs": [interface.input_ids, interface.attention_mask, interface.token_type_ids],
            "output": interface.output,
        }
    )


def _digest(facts: Any) -> str:
    """The SHA-256 of the canonical JSON, in hex."""
    text = json.dumps(_canonical(facts), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _canonical(value: Any) -> Any:
    """JSON in which a number is written in one way: a whole one in decimal digits, any other by its bits as float64."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else f"f64:{struct.pack('>d', value).hex()}"
    if isinstance(value, list | tuple):
        return [_canonical(it) for it in value]
    if isinstance(value, Mapping):
        return {_key(key): _canonical(it) for key, it in value.items()}
    if value is None or isinstance(value, bool | int | str):
        return value
    raise ConfigError(f"a configuration must be what JSON can say; it holds {value!r}, a {type(value).__name__}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"the keys of a configuration must be texts; was {key!r}, a {type(key).__name__}")
    return key


def _digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """The type, the shape and the SHA-256 of each, whose bytes are not copied; without indices and tied copies."""
    found: dict[str, list[Any]] = {}
    for name in sorted(tensors):
        if not name.endswith(INDICES):
            tensor = tensors[name].detach()
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            kind = str(tensor.dtype).removeprefix("torch.")
            found[name] = [kind, list(tensor.shape), hashlib.sha256(flat.numpy().data).hexdigest()]
    for end in _TIED:
        for name in [it for it in found if it.endswith(end)]:
            if any(its == found[name] for other, its in found.items() if other != name):
                del found[name]
    return found


def _module_facts(module: ModuleFacts) -> dict[str, Any]:
    settings = dict(module.settings)
    if (counted := _SETTINGS.get(module.kind)) is not None:
        settings = {key: value for key, value in settings.items() if key in counted}
        if "activation_function" in settings:  # a class of PyTorch, wherever it lies there
            settings["activation_function"] = str(settings["activation_function"]).rpartition(".")[2]
        settings = {key: value for key, value in settings.items() if value != counted[key]}
    return {"kind": module.kind, "settings": settings, "tensors": _digest_tensors(module.tensors)}


def _vector_facts(manifest: manifest_pb2.Manifest) -> dict[str, Any]:
    """What the manifest says of how rows become vectors, without prompts that put nothing before a text."""
    prompts = {name: text for name, text in manifest.prompts.items() if text}
    said = _counted(manifest) | ({"prompts": prompts} if prompts else {})
    if manifest.default_prompt_name not in prompts:
        said.pop("default_prompt_name", None)
    return said


def _counted(message: Message) -> dict[str, Any]:
    """The fields of `COUNTED` by their names, those at their default left out, enumerations by their names."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in COUNTED[message.DESCRIPTOR.name] and field.name != "prompts":
            single = isinstance(value, int | float | str | Message)
            found[field.name] = _said(field, value) if single else [_said(field, it) for it in value]
    return found


def _said(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Message):
        return _counted(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name


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


def _digest_message(message: Message) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _plain(value: Any, names: Collection[str], parts: Collection[str]) -> Any:
    """JSON without the keys of these names, or with one of these parts in their names, at any depth."""
    if isinstance(value, list | tuple):
        return [_plain(it, names, parts) for it in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _plain(it, names, parts)
        for key, it in value.items()
        if _key(key) not in names and not any(part in key for part in parts)
    }


def _digest_tokenizer(path: Path) -> str:
    """Of a tokenizer.json: its tokens, its merges or scores, and what it makes of the texts of this version."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = read_object(path)["model"]
    vocabulary = model.get("vocab")
    return _digest(
        {
            "tokens": tokenizer.get_vocab(with_added_tokens=True),
            # Newer versions write the two parts of a merge apart.
            "merges": [it.split(" ") if isinstance(it, str) else it for it in model.get("merges") or []],
            "scores": [score for _, score in vocabulary] if isinstance(vocabulary, list) else [],
            "ids": [tokenizer.encode(text).ids for text in texts()],
        }
    )


@cache
def texts() -> tuple[str, ...]:
    """The texts whose token ids count. They belong to version s2 and never change."""
    return tuple(read_json(_TEXTS))
