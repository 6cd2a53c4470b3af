"""Reads a directory that makes one vector of a text: the modules that sentence-transformers loads are translated.

What a bundle cannot express is refused.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encserve_export.ground.errors import UnsupportedModelError
from encserve_export.kinds.directory import (
    MODULES,
    SETTINGS,
    check_transformer,
    load,
    read_modules,
    refusal,
    says_length,
    transformer_folder,
    transformer_settings,
)
from encserve_export.kinds.recipe import NO_BOUND, TASKS, ModuleFacts, Recipe, Steps, read_pooling
from encserve_export.kinds.template import read_template
from encserve_export.source.weights import holds_weights, read_json, read_object, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

_SENTENCE = "sentence_embedding"
# How a text becomes rows; anything else changes them.
_TEXT = {
    "feature-extraction": {"method": "forward", "method_output_name": "last_hidden_state"},
    "fill-mask": {"method": "forward", "method_output_name": "logits"},
}


def read_dense(directory: Path, repository: str) -> Recipe:
    """Reads a directory whose kind is "dense"; without a modules.json nothing is known of pooling.

    Args:
        directory: The directory.
        repository: Where on the hub it came from, OWNER/NAME; empty where it did not.

    Raises:
        UnsupportedModelError: The model makes its vector in a way that a bundle cannot express, or
            sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts itself.
    """
    encoder = transformer_folder(directory)
    check_transformer(encoder)
    settings = transformer_settings(encoder)[1]
    if not (directory / MODULES).is_file():
        return Recipe(encoder=encoder, max_seq_length=settings.get("max_seq_length"))
    kinds = [kind for kind, _ in read_modules(directory)]
    if "Router" in kinds or kinds[:1] != ["Transformer"]:
        raise UnsupportedModelError(refusal("Router" if "Router" in kinds else (kinds or ["missing"])[0]))
    loaded = load(directory, "dense", repository)
    first, *rest = loaded.children()
    check_text(encoder, first)
    if first.query_expansion is not None:
        raise UnsupportedModelError(f"{encoder}: query_expansion is for multi-vector models; take it out")
    template, vector = template_of(first, loaded), read_vector(directory, loaded, rest)
    return dataclasses.replace(
        vector,
        template=template,
        skips_prompt=vector.skips_prompt and template is None,  # messages know nothing of it
        encoder=encoder,
        # What only the tokenizer or the model's positions bound is no choice of the authors.
        max_seq_length=longest_text(first) if says_length(settings) else None,
        tokenizer=first.tokenizer,
        tasks=read_tasks(loaded.prompts, first),
    )


def read_vector(
    directory: Path,
    loaded: Any,
    modules: Sequence[Any],
    pooling: manifest_pb2.Pooling = manifest_pb2.POOLING_UNSPECIFIED,
) -> Recipe:
    """What modules behind the encoder make of rows, and what the model says of texts and vectors.

    Args:
        directory: The directory.
        loaded: A model of sentence-transformers.
        modules: Those of its modules that follow the encoder.
        pooling: How the encoder itself makes one vector of rows; unspecified where a Pooling module says so.

    Raises:
        CheckpointFileError: The weights of one of them are unreadable.
        UnsupportedModelError: A bundle cannot express one of them here.
    """
    recipe = Recipe(
        pooling,
        dimensions=loaded.truncate_dim or 0,
        similarity=_similarity(directory, loaded),
        **prompts(loaded),
    )
    head: list[Any] = []
    for module in modules:
        kind = type(module).__name__
        if kind == "Pooling" and not recipe.pooling:
            modes = module.pooling_mode
            first, *more = [read_pooling(it) for it in ([modes] if isinstance(modes, str) else modes)]
            recipe = dataclasses.replace(
                recipe, pooling=first, more_poolings=tuple(more), skips_prompt=not module.include_prompt
            )
        elif kind in ("Dense", "LayerNorm", "Normalize") and recipe.pooling:
            ends = {getattr(module, f"module_{end}_name", _SENTENCE) for end in ("input", "output")}
            if ends != {_SENTENCE}:
                raise UnsupportedModelError(
                    f"its {kind} module must read and write {_SENTENCE}, a text's vector; here it is of "
                    f"{' and '.join(sorted(map(str, ends)))}. Serve it with sentence-transformers"
                )
            head.append(module)
        elif kind != "Dropout":  # which does nothing once a model is trained
            raise UnsupportedModelError(refusal(kind))
    while head and type(head[-1]).__name__ == "Normalize":
        head.pop()
        recipe = dataclasses.replace(recipe, l2_normalize=True)
    if not head:
        return recipe
    return dataclasses.replace(recipe, head=Steps(head, _SENTENCE), modules=facts(directory, loaded, head))


def prompts(loaded: Any) -> dict[str, Any]:
    """The fields of a `Recipe` that say what stands before texts."""
    return {"prompts": dict(loaded.prompts), "default_prompt_name": loaded.default_prompt_name or ""}


def check_text(directory: Path, transformer: Any, task: str = "feature-extraction") -> None:
    """Refuses an encoder whose texts do not become the rows of its last layer.

    Args:
        directory: Where it lies.
        transformer: It, as sentence-transformers loads it.
        task: What it is for.

    Raises:
        UnsupportedModelError: They do not, or the tokenizer is no plain one.
    """
    path, _ = transformer_settings(directory)
    modalities, methods, output = transformer.modalities, transformer.modality_config, transformer.module_output_name
    if not {"text"} <= set(modalities) <= {"text", "message"}:
        raise UnsupportedModelError(
            f"{path}: the model takes {', '.join(map(str, modalities))}: only models of text alone are served"
        )
    # Where there are messages, sentence-transformers renders every text as one.
    how = {name: value for name, value in methods.get("message", methods["text"]).items() if name != "format"}
    if how != _TEXT[task] or output != "token_embeddings":
        raise UnsupportedModelError(
            f"{path}: a text must become token_embeddings, by {_TEXT[task]}; here it becomes {output}, by "
            f"{how}. Save its text model alone with save_pretrained, and export that"
        )
    model = transformer.model
    if model.config.is_encoder_decoder and hasattr(model, "decoder"):
        raise UnsupportedModelError(
            f"{directory / 'config.json'}: of model_type {model.config.model_type!r} sentence-transformers pools the "
            "rows of the decoder, which are not served here; without modules.json the encoder alone is exported"
        )
    if not hasattr(transformer.tokenizer, "backend_tokenizer"):
        raise UnsupportedModelError(f"{directory} has no tokenizer of text that can be written as tokenizer.json")


def template_of(transformer: Any, loaded: Any) -> manifest_pb2.TextTemplate | None:
    """What the chat template of a model puts around every text; None where texts are not rendered as messages.

    Raises:
        UnsupportedModelError: The template does more than that.
    """
    if "message" not in transformer.modalities:
        return None
    return read_template(transformer, has_prompts=any(loaded.prompts.values()))


def longest_text(transformer: Any) -> int | None:
    """The most tokens of a text that sentence-transformers gives the model; None where nothing bounds it."""
    length = transformer.max_seq_length
    return length if length is not None and length < NO_BOUND else None


def read_tasks(prompts: Mapping[str, str], transformer: Any) -> dict[str, manifest_pb2.TaskSettings]:
    """What encode_query and encode_document do: a prompt, or none in place of the default one, and a longest text.

    Args:
        prompts: The model's prompts by name.
        transformer: The encoder as sentence-transformers loads it.

    Raises:
        UnsupportedModelError: A length is more than that of all texts.
    """
    tasks = {}
    for task in TASKS:
        length, usual = getattr(transformer, f"{task}_length"), longest_text(transformer)
        if length is not None and usual is not None and length > usual:
            raise UnsupportedModelError(
                f"{task}_length must be at most max_seq_length, {usual}, a bundle's longest; was {length}"
            )
        tasks[task] = manifest_pb2.TaskSettings(prompt_name=task if prompts.get(task) else "", max_tokens=length or 0)
    return tasks


def facts(directory: Path, loaded: Any, modules: Sequence[Any]) -> tuple[ModuleFacts, ...]:
    """What some of a model's modules add to the name of the vector space.

    Args:
        directory: The directory.
        loaded: A model of sentence-transformers.
        modules: Modules of it.

    Raises:
        CheckpointFileError: Their weights are unreadable.
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
    """How vectors are compared, as far as the directory says."""
    settings = read_object(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    said = settings.get("similarity_fn_name")
    return str(said) if said in loaded.SUPPORTED_SIMILARITY_FN_NAMES else ""
