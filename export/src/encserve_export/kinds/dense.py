"""Reads what sentence-transformers puts beside a checkpoint: prompts, the longest text, how rows become one vector.

What is read is what sentence-transformers 5 and 6 read, and the folders of older versions; what a bundle cannot express
is refused.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from encserve_export.ground.errors import CheckpointFileError, UnsupportedModelError
from encserve_export.kinds.modules import Normalize, read_dense, read_layer_norm
from encserve_export.kinds.recipe import POOLINGS, TASKS, Recipe
from encserve_export.source.weights import read_json, read_object
from encserve_proto.bundle.v1 import manifest_pb2

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# The older form: one flag for each, joined in this order.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Older versions named it after the model within.
_TRANSFORMER_FILES = [
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Settings of the Transformer module that change no vector.
_HARMLESS = {
    "model": {"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype", "use_safetensors", "device_map"},
    "processor": {"model_max_length", "padding_side", "use_fast", "clean_up_tokenization_spaces"},
    "config": {"attn_implementation", "use_cache"},
}
# How the tokenizer is called, of which these change no vector of a text.
_HARMLESS_CALLS = {"padding", "pad_to_multiple_of", "return_tensors"}
_TEXT_OUTPUTS = {"feature-extraction": "last_hidden_state", "fill-mask": "logits"}
_TRANSFORMERS = ("Transformer", "MLMTransformer")
# Modules that only a SparseEncoder has.
_SPARSE = ("MLMTransformer", "SpladePooling", "SparseStaticEmbedding", "SparseAutoEncoder")
# Why a bundle has no place for a directory of another kind, or a module, and what to do.
_OTHER_KINDS = {
    "CrossEncoder": "it scores pairs of texts and gives no vector of one; serve it with a server for rerankers",
}
_OTHER_MODULES = {
    "Router": "queries and documents go through different modules; export each of its folders by itself",
    "Asym": "queries and documents go through different modules; export each of its folders by itself",
    "StaticEmbedding": "it looks vectors up and averages them; there is no encoder to serve",
    "BoW": "there is no encoder to serve",
    "WordEmbeddings": "there is no encoder to serve",
    "CLIPModel": "it takes images too; save its text model alone (CLIPTextModel.save_pretrained) and export that",
}
_CLASSIFIER = "ForSequenceClassification"
# Of these encoder-decoders sentence-transformers runs the encoder; of all others the decoder, on the text again.
_ENCODER_ALONE = {
    *("t5", "mt5", "umt5", "longt5", "t5gemma", "t5gemma2", "switch_transformers", "prophetnet", "m2m_100", "marian"),
    *("blenderbot", "blenderbot-small", "pegasus", "pegasus_x"),
}
# What sentence-transformers has whether or not a directory says so.
_EMPTY_PROMPTS = {"query": "", "document": ""}
_ALONE = "without modules.json the encoder alone is exported"


def read_modules(directory: Path) -> list[tuple[str, Path]]:
    """The class and the folder of each module that modules.json lists; none where there is no such file.

    Raises:
        CheckpointFileError: It is unreadable, or names a folder elsewhere.
    """
    path = directory / MODULES
    if not path.is_file():
        return []
    try:
        found = [(str(module["type"]), directory / str(module["path"])) for module in read_json(path)]
    except (TypeError, KeyError):
        raise CheckpointFileError(f"{path} must be a list of modules, each with a type and a path") from None
    for _, folder in found:
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise CheckpointFileError(
                f"{path} names a folder outside {directory}: {os.path.relpath(folder, directory)!r}"
            )
    return found


def transformer_folder(directory: Path) -> Path:
    """Where the encoder and its tokenizer lie: the directory itself, or the folder that modules.json names.

    Raises:
        CheckpointFileError: modules.json is unreadable, or names a folder elsewhere.
    """
    encoders = [folder for kind, folder in routed_modules(directory) if kind in _TRANSFORMERS]
    return encoders[0] if encoders else directory


def is_sparse_encoder(directory: Path) -> bool:
    """Whether a directory is a SparseEncoder's, by what it says of itself or by its modules.

    Raises:
        CheckpointFileError: A file is unreadable or contradicts itself.
        UnsupportedModelError: A module is code of its own.
    """
    said = read_object(directory / SETTINGS).get("model_type") if (directory / SETTINGS).is_file() else None
    kinds = {kind for kind, _ in routed_modules(directory)}
    return said == "SparseEncoder" or (said is None and not kinds.isdisjoint(_SPARSE))


def read_sentence_vector(directory: Path) -> Recipe:
    """Reads modules.json, what it names, and config_sentence_transformers.json.

    Args:
        directory: The checkpoint; without a modules.json, nothing is known of pooling.

    Raises:
        UnsupportedModelError: The model makes its vector in a way that a bundle cannot express.
        CheckpointFileError: A file is unreadable or contradicts itself.
    """
    _refuse_other_kinds(directory)
    _refuse_adapter(transformer_folder(directory))
    vector = Recipe()
    head: list[nn.Module] = []
    for i, (kind, path) in enumerate(_modules(directory)):
        if kind == "Transformer" and i == 0:
            check_transformer(path)
            _refuse_decoder(path)
        elif kind == "Pooling" and vector.pooling == manifest_pb2.POOLING_UNSPECIFIED:
            first, *more, skips_prompt = _pooling(path / "config.json")
            vector = dataclasses.replace(vector, pooling=first, more_poolings=tuple(more), skips_prompt=skips_prompt)
        elif kind == "Dropout":
            pass  # it does nothing once a model is trained
        elif kind in _HEAD and vector.pooling != manifest_pb2.POOLING_UNSPECIFIED:
            head += _HEAD[kind](path)
        else:
            why = _OTHER_MODULES.get(kind, _ALONE)
            raise UnsupportedModelError(f"modules.json has a {kind} module, which a bundle cannot express here: {why}")
    while head and isinstance(head[-1], Normalize):
        head.pop()
        vector = dataclasses.replace(vector, l2_normalize=True)
    if head:
        vector = dataclasses.replace(vector, head=nn.Sequential(*head).eval().requires_grad_(False))
    vector = _with_settings(vector, directory / SETTINGS)
    if (directory / MODULES).is_file():
        vector = dataclasses.replace(vector, tasks=read_tasks(vector.prompts, transformer_folder(directory)))
    return vector


def read_max_seq_length(directory: Path) -> int | None:
    """The most tokens of a text that sentence-transformers gives the model, special ones included.

    Args:
        directory: Where the encoder lies.

    Returns:
        max_seq_length, or None where the checkpoint does not say.

    Raises:
        CheckpointFileError: The file that says it is unreadable, or says no length.
    """
    path, settings = _transformer_settings(directory)
    length = _arguments(settings, "processor").get("model_max_length", settings.get("max_seq_length"))
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointFileError(f"{path} must give max_seq_length as a number of tokens from 1; was {length!r}")
    return length


def renders_messages(directory: Path) -> bool:
    """Whether sentence-transformers renders texts as messages, by a chat template; `directory` as above."""
    return "message" in (_transformer_settings(directory)[1].get("modality_config") or {})


def read_lowercase(directory: Path) -> bool:
    """Whether sentence-transformers puts texts into lower case, whatever the tokenizer does; `directory` as above."""
    return bool(_transformer_settings(directory)[1].get("do_lower_case"))


def _transformer_settings(directory: Path) -> tuple[Path | None, dict[str, Any]]:
    """The file of the Transformer module's settings, and what is in it."""
    path = next((directory / name for name in _TRANSFORMER_FILES if (directory / name).is_file()), None)
    return path, {} if path is None else read_object(path)


def _arguments(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the module's file gives to the "model", the "processor" or the "config", under its new name or its old."""
    old = "tokenizer_args" if name == "processor" else f"{name}_args"
    found = settings.get(old, settings.get(f"{name}_kwargs"))
    return found if isinstance(found, dict) else {}


def check_transformer(directory: Path, task: str = "feature-extraction") -> None:
    """Refuses settings of the Transformer module that would change a vector.

    Args:
        directory: Where the encoder lies.
        task: The transformer_task that it must have.

    Raises:
        UnsupportedModelError: There is such a setting.
    """
    path, settings = _transformer_settings(directory)
    found = settings.get("transformer_task", task)
    if found != task:
        raise UnsupportedModelError(f"{path}: transformer_task must be {task} for this kind of model; was {found!r}")
    _check_modalities(path, settings, task)
    if settings.get("query_expansion") is not None:
        raise UnsupportedModelError(f"{path}: query_expansion is for multi-vector models; take it out")
    calls = settings.get("processing_kwargs") or {}
    called = {name for kind in ("text", "common") for name in calls.get(kind) or {}}
    if unknown := sorted(called - _HARMLESS_CALLS):
        raise UnsupportedModelError(
            f"{path}: processing_kwargs calls the tokenizer with {', '.join(unknown)}, which a bundle cannot express; "
            "write it into tokenizer.json, and take it out"
        )
    if settings.get("tokenizer_name_or_path"):
        raise UnsupportedModelError(
            f"{path}: its tokenizer is that of {settings['tokenizer_name_or_path']!r}; put that tokenizer.json beside "
            "config.json, and take tokenizer_name_or_path out"
        )
    for name, harmless in _HARMLESS.items():
        if unknown := sorted(_arguments(settings, name).keys() - harmless):
            raise UnsupportedModelError(
                f"{path}: what it changes of the {name} is not known here: {', '.join(unknown)}; write it into the "
                "directory's own files, and take it out"
            )


def _check_modalities(path: Path | None, settings: Mapping[str, Any], task: str) -> None:
    """Refuses a model whose texts do not become the rows of its last layer."""
    methods = settings.get("modality_config")
    if not isinstance(methods, dict):
        return
    if "text" not in methods:
        raise UnsupportedModelError(
            f"{path}: the model takes {', '.join(methods)} and no plain text, which a bundle cannot express"
        )
    # Where there are messages, texts are rendered as such.
    method: dict[str, Any] = methods["message" if "message" in methods else "text"]
    text = {name: value for name, value in method.items() if name != "format"}
    output = settings.get("module_output_name", "token_embeddings")
    wanted = {"method": "forward", "method_output_name": _TEXT_OUTPUTS[task]}
    if text != wanted or output != "token_embeddings":
        raise UnsupportedModelError(
            f"{path}: a text must become token_embeddings, by {wanted}; here it becomes {output}, by {text}. "
            "Save its text model alone with save_pretrained, and export that"
        )


def _refuse_decoder(directory: Path) -> None:
    path = directory / "config.json"
    settings = read_object(path) if path.is_file() else {}
    kind = settings.get("model_type")
    if settings.get("is_encoder_decoder") and kind not in _ENCODER_ALONE:
        raise UnsupportedModelError(
            f"{path}: of model_type {kind!r} sentence-transformers pools the rows of the decoder, which are not served "
            f"here; {_ALONE}"
        )


def _refuse_adapter(directory: Path) -> None:
    if (directory / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{directory} holds an adapter (adapter_config.json), which changes the weights of another model; merge "
            "them with PEFT's merge_and_unload, save that with save_pretrained, and export it"
        )


def _refuse_other_kinds(directory: Path) -> None:
    settings_path, config_path = directory / SETTINGS, directory / "config.json"
    kind = read_object(settings_path).get("model_type") if settings_path.is_file() else None
    config = read_object(config_path) if config_path.is_file() else {}
    if kind is None and _scores_pairs(config):
        kind = "CrossEncoder"
    if kind in _OTHER_KINDS:
        raise UnsupportedModelError(f"{directory} is a {kind}: {_OTHER_KINDS[kind]}")
    classes = [str(name) for name in config.get("architectures") or []]
    if classes and all(name.endswith(_CLASSIFIER) for name in classes) and not (directory / "modules.json").is_file():
        raise UnsupportedModelError(
            f"{config_path} names {' and '.join(classes)}, and no modules.json says that texts are embedded with it: "
            "it is a cross-encoder or a classifier, which gives scores and no vector; serve it with a server for such. "
            'For the rows of the encoder within it, take "architectures" out of config.json'
        )


def _scores_pairs(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a cross-encoder, which has had several ways to say so."""
    own = config.get("sentence_transformers")
    return "sbert_ce_default_activation_function" in config or (isinstance(own, dict) and "activation_fn" in own)


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """The class name, without its package, and the folder of each module."""
    return [(_own_class(directory / MODULES, name), folder) for name, folder in read_modules(directory)]


def routed_modules(directory: Path) -> list[tuple[str, Path]]:
    """The class name, without its package, and the folder of each module, those of a Router in its place.

    Raises:
        CheckpointFileError: A file is unreadable or contradicts itself.
        UnsupportedModelError: A module is code of its own.
    """
    found = []
    for kind, folder in _modules(directory):
        path = folder / "router_config.json"
        types = read_object(path).get("types") if kind == "Router" and path.is_file() else None
        if isinstance(types, dict):
            found += [(_own_class(path, str(name)), folder / str(inner)) for inner, name in types.items()]
        else:
            found.append((kind, folder))
    return found


def _own_class(path: Path, name: str) -> str:
    if not name.startswith("sentence_transformers."):
        raise UnsupportedModelError(
            f"{path} has a module {name}, which is code of its own and never run here; {_ALONE}"
        )
    return name.rpartition(".")[2]


def _pooling(path: Path) -> tuple[Any, ...]:
    """The poolings, in order, and at last whether a prompt is left out."""
    settings = read_object(path)
    if "pooling_mode" in settings:
        given = settings["pooling_mode"]
        modes = [given] if isinstance(given, str) else given if isinstance(given, list) else [str(given)]
    else:
        modes = [name for flag, name in _FLAGS.items() if settings.get(flag)] or ["mean"]
    if not modes or not all(mode in POOLINGS for mode in modes):
        raise UnsupportedModelError(
            f"{path}: pooling must be of {', '.join(POOLINGS)}; was {' and '.join(map(str, modes)) or 'none'}"
        )
    return (*(POOLINGS[mode] for mode in modes), not settings.get("include_prompt", True))


def _normalize(folder: Path) -> list[nn.Module]:
    path = folder / "config.json"
    settings = read_object(path) if path.is_file() else {}
    ends = [settings.get(f"module_{end}_name") for end in ("input", "output")]
    if any(name not in (None, "sentence_embedding") for name in ends):
        raise UnsupportedModelError(f"{path}: only the sentence's vector can be normalised by a bundle; {_ALONE}")
    return [Normalize()]


_HEAD: dict[str, Callable[[Path], list[nn.Module]]] = {
    "Dense": lambda folder: [read_dense(folder)],
    "LayerNorm": lambda folder: [read_layer_norm(folder)],
    "Normalize": _normalize,
}


def read_tasks(prompts: Mapping[str, str], directory: Path) -> dict[str, manifest_pb2.TaskSettings]:
    """What encode_query and encode_document do: a prompt, or none in place of the default one, and a longest text.

    Args:
        prompts: The model's prompts by name.
        directory: Where the encoder lies.

    Raises:
        CheckpointFileError: A length is none.
        UnsupportedModelError: A length is more than that of all texts.
    """
    path, settings = _transformer_settings(directory)
    tasks = {}
    for task in TASKS:
        length = settings.get(f"{task}_length")
        if length is not None and (type(length) is not int or length < 1):
            raise CheckpointFileError(f"{path} must give {task}_length as a number of tokens from 1; was {length!r}")
        if length is not None and length > (usual := read_max_seq_length(directory) or length):
            raise UnsupportedModelError(
                f"{path}: {task}_length must be at most max_seq_length, {usual}, a bundle's longest; was {length}"
            )
        tasks[task] = manifest_pb2.TaskSettings(prompt_name=task if prompts.get(task) else "", max_tokens=length or 0)
    return tasks


def _with_settings(vector: Recipe, path: Path) -> Recipe:
    """Adds what config_sentence_transformers.json says."""
    settings = read_object(path) if path.is_file() else {}
    # None stands for a prompt that nobody has filled in.
    given = {name: text or "" for name, text in (settings.get("prompts") or {}).items()}
    prompts = (_EMPTY_PROMPTS if vector.pooling else {}) | given
    default, dimensions = settings.get("default_prompt_name"), settings.get("truncate_dim")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointFileError(f"{path} must give prompts as texts by name; was {settings['prompts']!r}")
    if default is not None and default not in prompts:
        raise CheckpointFileError(f"{path}: default_prompt_name is {default!r}; the prompts are {sorted(prompts)}")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise CheckpointFileError(f"{path} must give truncate_dim as a number from 1; was {dimensions!r}")
    similarity = settings.get("similarity_fn_name")
    return dataclasses.replace(
        vector,
        prompts=prompts,
        default_prompt_name=default or "",
        dimensions=dimensions or 0,
        similarity=similarity if similarity in _SIMILARITIES else "",
    )
