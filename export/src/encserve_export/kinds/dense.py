"""Reads the directory of a model that computes one vector per text.

If the directory has a modules.json, sentence-transformers loads the model. The functions of this file then read the
settings from the loaded model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encserve_export.core.errors import UnsupportedModelError
from encserve_export.kinds.directory import (
    MODULES,
    SETTINGS,
    load,
    read_modules,
    refusal,
    states_length,
    transformer_folder,
    transformer_settings,
)
from encserve_export.kinds.spec import NO_BOUND, TASKS, ModelSpec, ModuleFacts, Steps, read_pooling
from encserve_export.kinds.template import TemplateReader, read_template
from encserve_export.source.tokenizer import load_tokenizer, tokenizer_source
from encserve_export.source.weights import holds_weights, read_json, read_object, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

_SENTENCE = "sentence_embedding"
_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")


def read_dense(directory: Path, repository: str, *, ignore_head: bool = False) -> ModelSpec:
    """Read the directory of a model that computes one vector per text. Without modules.json, the pooling is unknown.

    Args:
        directory: The directory.
        repository: The model's name on the hub, OWNER/NAME; empty for a local directory.
        ignore_head: Whether to read only the encoder, without the other modules of modules.json.

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another file.
        TokenizerError: transformers cannot load the tokenizer.
    """
    encoder = transformer_folder(directory)
    settings = transformer_settings(encoder)
    if ignore_head or not (directory / MODULES).is_file():
        return ModelSpec(
            encoder=encoder, max_seq_length=settings.get("max_seq_length"), tokenizer=load_tokenizer(encoder)
        )
    kinds = [kind for kind, _ in read_modules(directory)]
    others = [kind for kind in kinds if kind not in _MODULES]
    if others or kinds[:1] != ["Transformer"]:
        raise UnsupportedModelError(refusal((others or kinds)[0]))
    loaded = load(directory, "dense", repository)
    transformer, *rest = loaded.children()
    if transformer.query_expansion is not None:
        raise UnsupportedModelError(f"{encoder}: query_expansion is for multi-vector models; remove it")
    text, vector = read_text(encoder, loaded, transformer), read_vector(directory, loaded, rest)
    tasks = read_tasks(loaded.prompts, transformer)
    # Use the loaded model's lengths only if a settings file states a length, because the model's authors chose such a
    # length. Otherwise, the loaded model has limits of the tokenizer or of the positions, which the authors did not
    # choose.
    lengths = read_lengths(transformer, tasks) if states_length(settings) else {}
    return dataclasses.replace(
        vector,
        **text,
        **lengths,
        skips_prompt=vector.skips_prompt and text["template"] is None,  # with a template, the prompt length is unknown
        tasks=tasks,
    )


def read_text(
    encoder: Path, loaded: Any, transformer: Any, template_of: TemplateReader = read_template
) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` that describe how a text becomes token ids.

    Args:
        encoder: The folder of the encoder.
        loaded: A model of sentence-transformers.
        transformer: The Transformer module of `loaded`.
        template_of: The function that reads the chat template. It is called only for a model with a chat template.

    Raises:
        UnsupportedModelError: The model accepts images or other inputs that are not text. Or sentence-transformers
            pools the hidden states of a decoder. Or a chat template changes a text.
    """
    modalities, config = set(transformer.modalities), transformer.model.config
    if not {"text"} <= modalities <= {"text", "message"}:
        raise UnsupportedModelError(
            f"{encoder}: the model takes {', '.join(map(str, transformer.modalities))}; a bundle takes text only. Save "
            "the text model alone with save_pretrained, and export the saved directory"
        )
    if config.is_encoder_decoder and hasattr(transformer.model, "decoder"):
        raise UnsupportedModelError(
            f"{encoder / 'config.json'}: for model_type {config.model_type!r}, sentence-transformers pools the hidden "
            "states of the decoder, but a bundle has no decoder. To export only the encoder, remove modules.json"
        )
    has_prompts = any(loaded.prompts.values())
    return {
        "encoder": encoder,
        "loaded": loaded,
        # Without tokenizer files, transformers creates a tokenizer with only special tokens. Do not use this tokenizer.
        "tokenizer": None if tokenizer_source(encoder) is None else transformer.tokenizer,
        "template": template_of(transformer, has_prompts=has_prompts) if "message" in modalities else None,
        "prompts": dict(loaded.prompts),
        "default_prompt_name": loaded.default_prompt_name or "",
    }


def read_vector(
    directory: Path,
    loaded: Any,
    modules: Sequence[Any],
    pooling: manifest_pb2.Pooling = manifest_pb2.POOLING_UNSPECIFIED,
) -> ModelSpec:
    """Read the modules after the encoder.

    Args:
        directory: The directory.
        loaded: A model of sentence-transformers.
        modules: The modules of `loaded` after the encoder.
        pooling: The pooling of a model without a Pooling module. POOLING_UNSPECIFIED if a Pooling module gives the
            pooling.

    Raises:
        CheckpointFileError: The weights of a module are unreadable.
        UnsupportedModelError: A bundle cannot express a module.
    """
    spec = ModelSpec(pooling, dimensions=loaded.truncate_dim or 0, similarity=_similarity(directory, loaded))
    head: list[Any] = []
    for module in modules:
        kind = type(module).__name__
        if kind == "Pooling" and not spec.pooling:
            modes = module.pooling_mode
            first, *more = [read_pooling(it) for it in ([modes] if isinstance(modes, str) else modes)]
            spec = dataclasses.replace(
                spec, pooling=first, more_poolings=tuple(more), skips_prompt=not module.include_prompt
            )
        elif kind in ("Dense", "LayerNorm", "Normalize") and spec.pooling:
            if {getattr(module, f"module_{end}_name", _SENTENCE) for end in ("input", "output")} != {_SENTENCE}:
                raise UnsupportedModelError(refusal(kind))
            head.append(module)
        elif kind != "Dropout":  # Dropout has no effect after training
            raise UnsupportedModelError(refusal(kind))
    while head and type(head[-1]).__name__ == "Normalize":
        head.pop()
        spec = dataclasses.replace(spec, l2_normalize=True)
    if not head:
        return spec
    return dataclasses.replace(spec, head=Steps(head, _SENTENCE), modules=facts(directory, loaded, head))


def read_tasks(prompts: Mapping[str, str], transformer: Any) -> dict[str, manifest_pb2.TaskSettings]:
    """Return the settings for queries and for documents: the prompt name and the maximum number of tokens.

    Args:
        prompts: The model's prompts by name.
        transformer: The Transformer module; None for a static embedding.
    """
    return {
        task: manifest_pb2.TaskSettings(
            prompt_name=task if prompts.get(task) else "",
            max_tokens=getattr(transformer, f"{task}_length", None) or 0,
        )
        for task in TASKS
    }


def read_lengths(transformer: Any, tasks: Mapping[str, manifest_pb2.TaskSettings]) -> dict[str, Any]:
    """Return `max_seq_length` and `max_tokens` of a `ModelSpec`.

    A task may have a longer limit than the Transformer module's max_seq_length. If so, the longest limit becomes
    `max_seq_length` of the `ModelSpec`. The module's limit then applies to texts without a task, and to tasks that have
    no limit.

    Args:
        transformer: The Transformer module.
        tasks: The settings of each task. This function sets `max_tokens` in place.
    """
    usual = transformer.max_seq_length
    if usual is None or usual >= NO_BOUND:
        return {"max_seq_length": None}
    longest = max(usual, *(settings.max_tokens for settings in tasks.values()))
    shorter = usual if usual < longest else 0
    for settings in tasks.values():
        settings.max_tokens = settings.max_tokens or shorter
    return {"max_seq_length": longest, "max_tokens": shorter}


def facts(directory: Path, loaded: Any, modules: Sequence[Any]) -> tuple[ModuleFacts, ...]:
    """Return the settings and tensors of modules.

    The space_id, the id of the model's vector space, depends on these settings and tensors.

    Args:
        directory: The directory.
        loaded: A model of sentence-transformers.
        modules: The modules of `loaded` to describe.

    Raises:
        CheckpointFileError: The weights of a module are unreadable.
    """
    path = directory / MODULES
    folders = {str(it["name"]): directory / it["path"] for it in (read_json(path) if path.is_file() else [])}
    named = {id(module): name for name, module in loaded.named_children()}
    found = []
    for module in modules:
        settings: dict[str, Any] = {}
        if type(module).__name__ == "Dense":
            activation = type(module.activation_function).__name__
            settings = {"activation_function": activation} if activation != "Tanh" else {}
            settings |= {"use_residual": True} if module.use_residual else {}
        folder = folders.get(named[id(module)])
        tensors = read_weights(folder).tensors if folder is not None and holds_weights(folder) else {}
        found.append(ModuleFacts(type(module).__name__, settings, tensors))
    return tuple(found)


def _similarity(directory: Path, loaded: Any) -> str:
    """Return the name of the similarity function in the directory's settings.

    Return "" if the settings name no function, or if sentence-transformers does not support the named function. The
    loaded model does not show whether its similarity is a default, so this function reads the settings.
    """
    settings = read_object(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    stated = settings.get("similarity_fn_name")
    return str(stated) if stated in loaded.SUPPORTED_SIMILARITY_FN_NAMES else ""
