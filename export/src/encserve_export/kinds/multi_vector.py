"""Reads a multi-vector (late interaction) directory of sentence-transformers, PyLate, or Stanford's ColBERT.

sentence-transformers loads all three, and adds the settings that older layouts lack.
"""

from pathlib import Path
from typing import Any

from torch import nn

from encserve_export.core.errors import UnsupportedModelError
from encserve_export.kinds.dense import facts, longest_text, read_text
from encserve_export.kinds.directory import MODULES, load, transformer_folder, transformer_settings
from encserve_export.kinds.spec import TASKS, ModelSpec, MultiVectorHead, Steps
from encserve_proto.bundle.v1 import manifest_pb2

_ROWS = "token_embeddings"


def read_multi_vector(directory: Path) -> ModelSpec:
    """Read a directory of the kind "multi_vector".

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another one.
    """
    encoder = transformer_folder(directory)
    transformer_settings(encoder)
    loaded = load(directory, "multi_vector")
    first, *rest = loaded.children()
    if type(first).__name__ != "Transformer":
        raise UnsupportedModelError(
            f"{directory}: its first module must be a Transformer of text; was {type(first).__name__}"
        )
    text = read_text(encoder, loaded, first)
    projections, mask, pooling = _sorted(rest)
    tasks = {task: _task(task, first, mask, pooling) for task in TASKS}
    usual = longest_text(first) or 0
    longest = max(usual, *(settings.max_tokens for settings in tasks.values()))
    shorter = usual if usual < longest else 0
    for name, settings in tasks.items():
        settings.prompt_name = name if loaded.prompts.get(name) else ""
        settings.max_tokens = settings.max_tokens or shorter
    return ModelSpec(
        kind="multi_vector",
        **text,
        max_seq_length=longest or None,
        max_tokens=shorter,
        used_parts=() if (directory / MODULES).is_file() else ("linear",),
        modules=facts(directory, loaded, projections),
        tasks=tasks,
        multi_vector=MultiVectorHead(Steps(projections, _ROWS), loaded.similarity_fn_name),
    )


def _sorted(modules: list[Any]) -> tuple[list[nn.Module], Any, Any]:
    """Split modules into projections, a mask of tokens or None, and a token pooling or None."""
    projections: list[nn.Module] = []
    mask = pooling = None
    for module in modules:
        kind = type(module).__name__
        ends = [getattr(module, end, None) for end in ("module_input_name", "module_output_name")]
        if pooling is not None:
            raise UnsupportedModelError(f"a {kind} module follows the token pooling, which must be the last module")
        if kind in ("Dense", "Normalize", "LayerNorm") and ends == [_ROWS] * 2:
            projections.append(module)
        elif kind == "MultiVectorMask" and mask is None:
            mask = module
        elif kind == "HierarchicalTokenPooling":
            pooling = module
        elif kind != "Dropout":
            of = "" if ends[0] in (None, _ROWS) else f" of {ends[0]}"
            raise UnsupportedModelError(
                f"modules.json has a {kind} module{of}, which a bundle of multi-vectors cannot express; serve it with "
                "sentence-transformers"
            )
    return projections, mask, pooling


def _task(task: str, first: Any, mask: Any, pooling: Any) -> manifest_pb2.TaskSettings:
    """The settings of a task without its prompt."""
    settings = manifest_pb2.TaskSettings(max_tokens=getattr(first, f"{task}_length") or 0)
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
    return settings


def _expand(settings: manifest_pb2.TaskSettings, first: Any) -> None:
    expansion, tokenizer = first.query_expansion, first.tokenizer
    if tokenizer.padding_side != "right":
        raise UnsupportedModelError("queries are expanded on their left (padding_side), which a bundle cannot express")
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
    """The ids of words without a vector. A word outside the vocabulary does not skip the unknown token."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = tokenizer.unk_token_id
    return sorted({it for word, it in ids.items() if it is not None and (it != unknown or word == tokenizer.unk_token)})
