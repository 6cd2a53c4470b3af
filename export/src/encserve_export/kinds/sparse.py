"""Reads the directories of sparse encoders: SPLADE, with queries that take no run of the model or without.

sentence-transformers reads them, and what it has loaded is translated here. So its own mending of old layouts holds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from encserve_export.ground.errors import UnsupportedModelError
from encserve_export.kinds.dense import check_transformer, read_tasks, routed_modules, transformer_folder
from encserve_export.kinds.multi_vector import load
from encserve_export.kinds.recipe import TASKS, ModuleFacts, Recipe, SparseHead, StaticWeights
from encserve_export.source.weights import holds_weights, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

_POOLINGS = {"max": manifest_pb2.SPARSE_POOLING_MAX, "sum": manifest_pb2.SPARSE_POOLING_SUM}
_LOGARITHMS = {"relu": 1, "log1p_relu": 2}
_STATIC = "SparseStaticEmbedding"
# Where nobody set a tokenizer's longest text, transformers writes a number of 31 digits.
_NO_BOUND = 1_000_000
_OTHER_MODULES = {
    "SparseAutoEncoder": "its weights come of one pooled vector and not of every token; serve the dense model within, "
    "or use sentence-transformers' SparseEncoder"
}


class SpladeLayers(nn.Module):
    """The head of a masked-language model and SPLADE's pooling over it."""

    def __init__(self, language_model: nn.Module, pooling: str, logarithms: int) -> None:
        super().__init__()
        self.language_model = language_model
        self.pooling = pooling
        self.logarithms = logarithms

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """(batch, seq, d_model) and (batch, seq) of 1 and 0 to (batch, vocab_size)."""
        logits: Tensor = self.language_model(inputs_embeds=rows).logits
        logits = logits * mask[:, :, None]  # (batch, seq, vocab_size)
        if self.pooling == "max":  # what follows is monotone, and there is less of it to compute
            return self._activate(logits.amax(dim=1))
        return self._activate(logits).sum(dim=1)

    def _activate(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self.logarithms):
            weights = weights.log1p()
        return weights


class _Given(nn.Module):
    """Stands for the encoder within a model: its last hidden state is what the model is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """The same in transformers' own form."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)


def load_sparse_encoder(directory: Path) -> Any:
    """A directory as sentence-transformers' SparseEncoder, in float32, without any code of the directory's.

    Raises:
        MissingPackageError: sentence-transformers is not installed.
        CheckpointFileError: It cannot read the directory.
    """
    return load(directory, "SparseEncoder")


def read_sparse_encoder(directory: Path) -> Recipe:
    """Reads a directory for which `is_sparse_encoder` holds.

    Raises:
        MissingPackageError, CheckpointFileError: As for `load_sparse_encoder`.
        UnsupportedModelError: The model computes what a bundle cannot express.
    """
    for kind, _ in routed_modules(directory):
        if kind in _OTHER_MODULES:
            raise UnsupportedModelError(
                f"{directory} has a {kind}, which a bundle cannot express: {_OTHER_MODULES[kind]}"
            )
    check_transformer(transformer_folder(directory), "fill-mask")
    loaded = load_sparse_encoder(directory)
    branches = {task: _branch(directory, loaded, task) for task in TASKS}
    encoders = {id(it[0]): it for it in branches.values() if len(it) == 2}
    if len(encoders) != 1:
        which = "several encoders" if encoders else "no encoder"
        raise UnsupportedModelError(
            f"{directory} has {which} to serve, for queries and for documents; export each of its folders by itself"
        )
    ((transformer, pooling),) = encoders.values()
    head = _splade(transformer.model, pooling, loaded.max_active_dims)
    width = int(transformer.model.get_output_embeddings().weight.shape[0])
    prompts = {name: text or "" for name, text in loaded.prompts.items()}
    tasks = read_tasks(prompts, transformer_folder(directory))
    static = {task: _static(directory, it[0], task, width) for task, it in branches.items() if len(it) == 1}
    settings = {"pooling_strategy": pooling.pooling_strategy, "activation_function": pooling.activation_function}
    # The head of the language model lies among the encoder's weights.
    modules = [ModuleFacts("SpladePooling", settings, {})]
    if static:
        (weights,) = static.values()
        kept = [folder for kind, folder in routed_modules(directory) if kind == _STATIC and holds_weights(folder)]
        # Without a file of tensors its weights are written as JSON.
        tensors = read_weights(kept[0]).tensors if kept else {"weight": weights.weight}
        modules.append(ModuleFacts(_STATIC, {}, tensors))
    for task, its in static.items():
        tasks[task].static_sparse.CopyFrom(its.files)
    return Recipe(
        prompts=prompts,
        default_prompt_name=loaded.default_prompt_name or "",
        similarity=loaded.similarity_fn_name,
        tasks=tasks,
        sparse=head,
        static_weights=tuple(static.values()),
        remark=_remark(loaded[0], branches),
        modules=tuple(modules),
    )


def _branch(directory: Path, loaded: Any, task: str) -> Sequence[Any]:
    """The modules that texts of a task go through: an encoder and its pooling, or one that needs no encoder."""
    modules = list(loaded.children())
    if type(modules[0]).__name__ == "Router":
        try:
            route = modules[0]._resolve_route(task=task, modality="text")
        except ValueError as error:
            raise UnsupportedModelError(f"{directory}: its Router has no way for a {task}: {error}") from error
        modules = [*modules[0].sub_modules[route], *modules[1:]]
    names = [type(it).__name__ for it in modules]
    if names[1:] == ["SpladePooling"] and names[0] in ("Transformer", "MLMTransformer"):
        return modules
    if names == [_STATIC]:
        return modules
    raise UnsupportedModelError(
        f"{directory}: a {task} goes through {', '.join(names)}; a bundle can express Transformer, SpladePooling, or "
        "SparseStaticEmbedding alone"
    )


def _splade(language_model: Any, pooling: Any, max_active_dims: int | None) -> SparseHead:
    """The head of the language model without its encoder, whose weights a tied decoder keeps."""
    setattr(language_model, language_model.base_model_prefix, _Given())
    layers = SpladeLayers(language_model, pooling.pooling_strategy, _LOGARITHMS[pooling.activation_function])
    return SparseHead(
        layers.eval().requires_grad_(False),
        _POOLINGS[pooling.pooling_strategy],
        max_active_dims=max_active_dims or 0,
    )


def _static(directory: Path, module: Any, task: str, width: int) -> StaticWeights:
    if len(module.weight) != width:
        raise UnsupportedModelError(
            f"{directory}: its SparseStaticEmbedding has {len(module.weight)} weights, its language model {width} words"
        )
    tokenizer = json.loads(module.tokenizer.backend_tokenizer.to_str())
    tokenizer |= {"post_processor": None, "truncation": None, "padding": None}
    longest = module.tokenizer.model_max_length
    files = manifest_pb2.StaticSparse(
        tokenizer_file=f"{task}_tokenizer.json",
        weights_file=f"{task}_weights.npy",
        max_tokens=longest if longest < _NO_BOUND else 0,
    )
    return StaticWeights(module.weight, tokenizer, files)


def _remark(first: Any, branches: dict[str, Sequence[Any]]) -> str:
    if branches["query"][0] is branches["document"][0]:
        return ""
    default = first._resolve_route(modality="text")
    if first.sub_modules[default][0] is branches["document"][0]:
        return ""
    return "a text without a task is a document here; sentence-transformers takes it as a query"
