"""Reads the directory of a multi-vector (late interaction) model.

The directory has the format of sentence-transformers, PyLate, or Stanford's ColBERT. sentence-transformers loads all
three formats, and adds the settings that older formats lack.
"""

from pathlib import Path
from typing import Any

from torch import nn

from encserve_export.core.errors import UnsupportedModelError
from encserve_export.kinds.dense import facts, read_lengths, read_tasks, read_text
from encserve_export.kinds.directory import MODULES, load, refusal, transformer_folder
from encserve_export.kinds.spec import ModelSpec, MultiVectorHead, Steps
from encserve_proto.bundle.v1 import manifest_pb2

_ROWS = "token_embeddings"


def read_multi_vector(directory: Path) -> ModelSpec:
    """Read the directory of a model with several vectors per text, for MaxSim.

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another file.
    """
    encoder = transformer_folder(directory)
    loaded = load(directory, "multi_vector")
    first, *rest = loaded.children()
    if type(first).__name__ != "Transformer":
        raise UnsupportedModelError(
            f"{directory}: its first module must be a Transformer for text; was {type(first).__name__}"
        )
    text = read_text(encoder, loaded, first)
    projections, mask, pooling = _split(rest)
    tasks = read_tasks(loaded.prompts, first)
    for task, settings in tasks.items():
        _fill(settings, task, first, mask, pooling)
    return ModelSpec(
        kind="multi_vector",
        **text,
        **read_lengths(first, tasks),
        used_parts=() if (directory / MODULES).is_file() else ("linear",),
        modules=facts(directory, loaded, projections),
        tasks=tasks,
        multi_vector=MultiVectorHead(Steps(projections, _ROWS), loaded.similarity_fn_name),
    )


def _split(modules: list[Any]) -> tuple[list[nn.Module], Any, Any]:
    """Split modules into projections, a token mask, and a token pooling. The mask and the pooling may be None."""
    projections: list[nn.Module] = []
    mask = pooling = None
    for module in modules:
        kind = type(module).__name__
        ends = [getattr(module, end, None) for end in ("module_input_name", "module_output_name")]
        if kind == "Dropout":  # Dropout has no effect after training
            continue
        if pooling is not None:  # the token pooling must be the last module
            raise UnsupportedModelError(refusal(kind))
        if kind in ("Dense", "Normalize", "LayerNorm") and ends == [_ROWS] * 2:
            projections.append(module)
        elif kind == "MultiVectorMask" and mask is None:
            mask = module
        elif kind == "HierarchicalTokenPooling":
            pooling = module
        else:
            raise UnsupportedModelError(refusal(kind))
    return projections, mask, pooling


def _fill(settings: manifest_pb2.TaskSettings, task: str, first: Any, mask: Any, pooling: Any) -> None:
    """Extend the settings of a task with the settings for multi-vector models."""
    if task == "query" and first.query_expansion is not None:
        _expand(settings, first)
    if mask is not None:
        if task in mask.skiplist_tasks:
            settings.skipped_token_ids.extend(_skipped(mask.skiplist_words, first.tokenizer))
        if task == "document":
            settings.kept_token_ids.extend(sorted(mask.keep_only_token_ids or []))
    if pooling is not None and pooling.applies_to(task) and (pooling.pool_factor > 1 or pooling.normalize_embeddings):
        settings.token_pooling.CopyFrom(
            manifest_pb2.TokenPooling(
                factor=pooling.pool_factor,
                protected_tokens=pooling.num_protected_tokens,
                l2_normalize=pooling.normalize_embeddings,
            )
        )


def _expand(settings: manifest_pb2.TaskSettings, first: Any) -> None:
    expansion, tokenizer = first.query_expansion, first.tokenizer
    if tokenizer.padding_side != "right":
        raise UnsupportedModelError(
            "padding_side is left. A bundle cannot express queries that are expanded on the left"
        )
    token_id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if expansion["token"] is not None:
        token_id = tokenizer.convert_tokens_to_ids(expansion["token"])
    length = expansion["length"]
    if expansion["strategy"] == "fixed":
        settings.max_tokens = length
    elif settings.max_tokens:
        settings.max_tokens = max(settings.max_tokens, length)
    settings.expansion.CopyFrom(
        manifest_pb2.Expansion(min_tokens=length, token_id=token_id, attended=expansion["attend"])
    )


def _skipped(words: list[str], tokenizer: Any) -> list[int]:
    """Return the ids of words that get no vector.

    A word outside the vocabulary has the id of the unknown token. This id is left out, unless `words` contains the
    unknown token itself.
    """
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = tokenizer.unk_token_id
    return sorted({it for word, it in ids.items() if it is not None and (it != unknown or word == tokenizer.unk_token)})
