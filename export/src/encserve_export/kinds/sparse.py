"""Reads the directory of a sparse encoder (SPLADE).

sentence-transformers loads the model, and adds settings that are missing in older formats.

A Router is a module that sends queries and documents to different modules. For queries or for documents, a Router may
use a table of static weights instead of an encoder. The table has one weight per token of the vocabulary.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from encserve_export.core.errors import UnsupportedModelError
from encserve_export.kinds.dense import read_lengths, read_tasks, read_text
from encserve_export.kinds.directory import TRANSFORMERS, load, read_modules, transformer_folder
from encserve_export.kinds.spec import NO_BOUND, TASKS, ModelSpec, ModuleFacts, SparseHead, StaticWeights
from encserve_export.source.weights import holds_weights, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

_POOLINGS = {"max": manifest_pb2.SPARSE_POOLING_MAX, "sum": manifest_pb2.SPARSE_POOLING_SUM}
_LOGARITHMS = {"relu": 1, "log1p_relu": 2}
_STATIC = "SparseStaticEmbedding"


class SpladeLayers(nn.Module):
    """Runs the head of a masked language model on hidden states, and pools the results as SPLADE does."""

    def __init__(self, language_model: nn.Module, pooling: str, logarithms: int) -> None:
        super().__init__()
        self.language_model = language_model
        self.pooling = pooling
        self.logarithms = logarithms

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Map hidden states (batch, seq, d_model) and a 0/1 mask (batch, seq) to weights (batch, vocab_size)."""
        logits: Tensor = self.language_model(inputs_embeds=rows).logits
        logits = logits * mask[:, :, None]  # (batch, seq, vocab_size)
        if self.pooling == "max":  # the activation is monotone, so max pooling may come first, which saves work
            return self._activate(logits.amax(dim=1))
        return self._activate(logits).sum(dim=1)

    def _activate(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self.logarithms):
            weights = weights.log1p()
        return weights


class EncoderStub(nn.Module):
    """Replaces the encoder of a model, so that only the model's head runs.

    The stub returns inputs_embeds unchanged as the last hidden state.
    """

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Wrap inputs_embeds in transformers' output class."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)


def read_sparse(directory: Path) -> ModelSpec:
    """Read the directory of a sparse encoder.

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another file.
    """
    encoder = transformer_folder(directory)
    loaded = load(directory, "sparse")
    branches = {task: _branch(directory, loaded, task) for task in TASKS}
    encoders = {id(it[0]): it for it in branches.values() if len(it) == 2}
    if len(encoders) != 1:
        problem = "queries and documents use different encoders. Export the folder of each encoder separately"
        if not encoders:
            problem = "queries and documents both use static weights, without an encoder; a bundle needs an encoder"
        raise UnsupportedModelError(f"{directory}: {problem}")
    ((transformer, pooling),) = encoders.values()
    decoder = transformer.model.get_output_embeddings()
    if decoder is None:
        raise UnsupportedModelError(
            f"{encoder}: a {type(transformer.model).__name__} has no language-model head; SPLADE needs "
            '"transformer_task": "fill-mask"'
        )
    width = int(decoder.weight.shape[0])
    tasks = read_tasks(loaded.prompts, transformer)
    static = {task: _static(directory, it[0], task, width) for task, it in branches.items() if len(it) == 1}
    for task, weights in static.items():
        tasks[task].static_sparse.CopyFrom(weights.files)
    return ModelSpec(
        kind="sparse",
        **read_text(encoder, loaded, transformer),
        **read_lengths(transformer, tasks),
        modules=_facts(directory, pooling, tuple(static.values())),
        similarity=loaded.similarity_fn_name,
        tasks=tasks,
        sparse=_splade(transformer.model, pooling, loaded.max_active_dims),
        static_weights=tuple(static.values()),
        remark=_remark(loaded[0], branches),
    )


def _facts(directory: Path, pooling: Any, static: Sequence[StaticWeights]) -> tuple[ModuleFacts, ...]:
    """Return the settings of the pooling and the tensors of static weights.

    The space_id, the id of the model's vector space, depends on these settings and tensors.

    The tensors of the head are not in the result, because they are in the encoder's file. The space_id depends on all
    tensors of that file.
    """
    settings = {"pooling_strategy": pooling.pooling_strategy, "activation_function": pooling.activation_function}
    usual = {"pooling_strategy": "max", "activation_function": "relu"}
    settings = {name: value for name, value in settings.items() if value != usual[name]}
    folders = [folder for kind, folder in read_modules(directory) if kind == _STATIC and holds_weights(folder)]
    # A SparseStaticEmbedding without a file of tensors has a JSON file of weights. In this case, the weights are taken
    # from the loaded module.
    tensors = [read_weights(folders[0]).tensors if folders else {"weight": its.weight} for its in static]
    return (ModuleFacts("SpladePooling", settings, {}), *(ModuleFacts(_STATIC, {}, it) for it in tensors))


def _branch(directory: Path, loaded: Any, task: str) -> Sequence[Any]:
    """Return the modules that texts of a task go through: an encoder and its pooling, or static weights."""
    modules = list(loaded.children())
    if type(modules[0]).__name__ == "Router":
        route = _route(modules[0], task)
        if route is None:
            raise UnsupportedModelError(f"{directory}: its Router has no route for a {task}")
        modules = [*modules[0].sub_modules[route], *modules[1:]]
    names = [type(it).__name__ for it in modules]
    if names == [_STATIC] or (names[0] in TRANSFORMERS and names[1:] == ["SpladePooling"]):
        return modules
    raise UnsupportedModelError(
        f"{directory}: a {task} goes through the modules {', '.join(names)}. A bundle can express only a Transformer "
        "followed by a SpladePooling, or a single SparseStaticEmbedding"
    )


def _route(router: Any, task: str | None) -> str | None:
    """Return the Router's route for a task. The keys have the order of the documentation of sentence-transformers."""
    for key in ((task, "text"), (task, None), (None, "text"), (None, None)):
        if key in router.route_mappings:
            return str(router.route_mappings[key])
    direct = next((name for name in (task, "text") if name in router.sub_modules), None)
    return direct if task is not None or direct is not None else router.default_route


def _splade(language_model: Any, pooling: Any, max_active_dims: int | None) -> SparseHead:
    """Return the head: a copy of the language model with a stub as its encoder. The copy shares the weights."""
    encoder = getattr(language_model, language_model.base_model_prefix)
    shared: dict[int, Any] = {id(weight): weight for weight in language_model.parameters()}
    head = copy.deepcopy(language_model, shared | {id(encoder): EncoderStub()})
    layers = SpladeLayers(head, pooling.pooling_strategy, _LOGARITHMS[pooling.activation_function])
    return SparseHead(
        layers.eval().requires_grad_(False),
        _POOLINGS[pooling.pooling_strategy],
        max_active_dims=max_active_dims or 0,
    )


def _static(directory: Path, module: Any, task: str, width: int) -> StaticWeights:
    if len(module.weight) != width:
        raise UnsupportedModelError(
            f"{directory}: SparseStaticEmbedding has {len(module.weight)} weights, but the language model "
            f"has {width} words"
        )
    tokenizer = json.loads(module.tokenizer.backend_tokenizer.to_str())
    tokenizer |= {"post_processor": None, "truncation": None, "padding": None}
    longest = module.tokenizer.model_max_length
    files = manifest_pb2.StaticSparse(
        tokenizer_file=f"{task}_tokenizer.json",
        weights_file=f"{task}_weights.npy",
        max_tokens=longest if longest < NO_BOUND else 0,
    )
    return StaticWeights(module.weight, tokenizer, files)


def _remark(first: Any, branches: dict[str, Sequence[Any]]) -> str:
    if branches["query"][0] is branches["document"][0]:
        return ""
    default = _route(first, None)
    if default is None or first.sub_modules[default][0] is branches["document"][0]:
        return ""
    return "without a task, encserve encodes a text as a document; sentence-transformers encodes such a text as a query"
