"""Reads the directory of a cross-encoder or a classifier. Such a model computes one logit for each of its labels.

sentence-transformers loads the model as a CrossEncoder. Any version of the library may have written the directory. The
logits must depend only on one pooled hidden state. The exported head is the whole model with a stub in place of the
encoder. The input of the head is this hidden state, as a sequence of one token.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encserve_export.core.errors import UnsupportedModelError, WeightNamesError, first_line
from encserve_export.kinds.dense import read_text
from encserve_export.kinds.directory import (
    SETTINGS,
    activation_path,
    is_cross_encoder,
    load,
    refusal,
    states_length,
    transformer_folder,
    transformer_settings,
)
from encserve_export.kinds.spec import NO_BOUND, ModelSpec, ModuleFacts, ScoreHead
from encserve_export.kinds.template import read_pair_template, read_template
from encserve_export.source.weights import holds_weights, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

MOST_LABELS = 16_384
_ACTIVATIONS = {
    "Identity": manifest_pb2.ACTIVATION_NONE,
    "Sigmoid": manifest_pb2.ACTIVATION_SIGMOID,
    "Softmax": manifest_pb2.ACTIVATION_SOFTMAX,
}
_TRUNCATIONS = {
    "longest_first": manifest_pb2.PAIR_TRUNCATION_LONGEST_FIRST,
    "only_second": manifest_pb2.PAIR_TRUNCATION_ONLY_SECOND,
}
_PAIR = ("a", "b")
_ADVICE = "serve the model with sentence-transformers, or export its encoder alone with --ignore-head"


class EncoderStub(nn.Module):
    """Replaces the encoder of a model, so that only the model's head runs.

    The stub returns `rows` as the last hidden state. If `rows` is None, the stub returns inputs_embeds unchanged.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(encoder, "pooler", None)
        self.pooler_activation = getattr(encoder, "pooler_activation", None)  # only ALBERT has this attribute
        self.rows: Tensor | None = None

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Any:
        """Wrap the hidden states in transformers' output class."""
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        rows: Any = inputs_embeds if self.rows is None else self.rows
        pooled = None
        if self.pooler_activation is not None and self.pooler is not None:
            pooled = self.pooler_activation(self.pooler(rows[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(rows)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=rows, pooler_output=pooled)


class PooledLogits(nn.Module):
    """Computes logits from pooled hidden states. The model has an `EncoderStub` in place of its encoder.

    Each pooled hidden state is passed to the model as a sequence of one token.
    """

    def __init__(self, model: Any, stub: EncoderStub, *, is_language_model: bool) -> None:
        super().__init__()
        self.model: Any = model
        self._stub = (stub,)  # a tuple hides the stub from nn.Module, because `model` already registers it
        self.is_language_model = is_language_model
        self.eval().requires_grad_(False)

    def forward(self, pooled: Tensor) -> Tensor:
        """Map (batch, d_model) to (batch, labels)."""
        rows = pooled[:, None]  # (batch, 1, d_model)
        mask = torch.ones_like(rows[:, :, 0], dtype=torch.int64)  # (batch, 1)
        return self._logits(inputs_embeds=rows, attention_mask=mask)

    def of_rows(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Compute the logits of sequences as the original model does.

        Args:
            rows: (batch, seq, d_model), the hidden states.
            ids: int64 (batch, seq), the token ids.

        Returns:
            (batch, labels).
        """
        (stub,) = self._stub
        stub.rows = rows
        try:
            return self._logits(input_ids=ids, attention_mask=torch.ones_like(ids))
        finally:
            stub.rows = None

    def _logits(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**inputs).logits
        if not self.is_language_model:
            return logits
        last = logits[:, -1]  # (batch, 1 or 2): the true token, and the false token if any
        return last if last.shape[1] == 1 else last[:, :1] - last[:, 1:]


def read_scores(directory: Path) -> ModelSpec:
    """Read the directory of a cross-encoder or a classifier.

    Raises:
        UnsupportedModelError: A bundle cannot express the model, or sentence-transformers cannot load it.
        CheckpointFileError: A file is unreadable or contradicts another file.
        WeightNamesError: The files have no weights for the head.
        TokenizerError: transformers cannot load the tokenizer.
    """
    encoder = transformer_folder(directory)
    _check_activation(directory)
    loaded = load(directory, "scores")
    transformer, *rest = loaded.children()
    kinds = [type(module).__name__ for module in rest]
    if type(transformer).__name__ != "Transformer" or kinds not in ([], ["LogitScore"]):
        raise UnsupportedModelError(refusal(next((it for it in kinds if it != "LogitScore"), "LogitScore")))
    if transformer.transformer_task not in ("sequence-classification", "text-generation"):
        raise UnsupportedModelError(
            f"{directory}: transformer_task must be sequence-classification or text-generation; was "
            f"{transformer.transformer_task!r}; {_ADVICE}"
        )
    takes_pairs = is_cross_encoder(directory) or loaded.num_labels == 1
    text = read_text(encoder, loaded, transformer, read_pair_template if takes_pairs else read_template)
    if text["tokenizer"] is None:
        raise UnsupportedModelError(
            f"{encoder} has no tokenizer, which a cross-encoder or a classifier needs: add the tokenizer, or give "
            "--ignore-head for the encoder alone"
        )
    head, facts = _head(transformer, rest)
    _check_weights(encoder, head, is_language_model=bool(rest))
    pooling, not_last = _pooling(transformer, head)
    settings = transformer_settings(encoder)
    longest = transformer.max_seq_length if states_length(settings) else None
    return ModelSpec(
        kind="scores",
        **text,
        max_seq_length=None if longest is None or longest >= NO_BOUND else longest,
        modules=facts,
        used_parts=tuple(name for name, _ in (*transformer.model.named_children(), ("pooler", None))),
        scores=ScoreHead(
            module=head,
            pooling=pooling,
            not_last_token_id=not_last,
            labels=_labels(directory, transformer.model.config, loaded.num_labels),
            activation=_activation(directory, loaded, transformer.model.config),
            pair_truncation=_truncation(encoder, transformer),
            token_types=_reads_types(transformer),
        ),
    )


def _head(transformer: Any, rest: list[Any]) -> tuple[PooledLogits, tuple[ModuleFacts, ...]]:
    """Return the head: a copy of the model with a stub as its encoder. The copy shares the weights."""
    model = transformer.model
    encoder = getattr(model, model.base_model_prefix)
    stub = EncoderStub(encoder)
    shared: dict[int, Any] = {id(weight): weight for weight in model.parameters()} | {id(encoder): stub}
    decoder = model.get_output_embeddings() if rest else None
    if decoder is not None:
        shared[id(decoder)] = _rows_of(decoder, rest[0])
    head = PooledLogits(copy.deepcopy(model, shared), stub, is_language_model=bool(rest))
    config = head.model.config.get_text_config()
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # without an id, the classifiers of decoders refuse batches
    if not rest:
        return head, ()
    tokens = {"true_token_id": rest[0].true_token_id, "false_token_id": rest[0].false_token_id}
    return head, (ModuleFacts("LogitScore", tokens, {}),)


def _rows_of(decoder: nn.Linear, score: Any) -> nn.Linear:
    """Return a smaller copy of a language model's last layer, which computes only the logits of a LogitScore's tokens.

    LogitScore is a module of sentence-transformers. It computes a score from the logits of one or two tokens.
    """
    ids = [it for it in (score.true_token_id, score.false_token_id) if it is not None]
    rows = nn.Linear(decoder.in_features, len(ids), bias=decoder.bias is not None)
    with torch.no_grad():
        rows.weight.copy_(decoder.weight[ids])
        if decoder.bias is not None:
            rows.bias.copy_(decoder.bias[ids])
    return rows


def _check_weights(encoder: Path, head: PooledLogits, *, is_language_model: bool) -> None:
    """Refuse a checkpoint without the weights of its head. transformers would fill them with random numbers."""
    if is_language_model or not holds_weights(encoder):  # the last layer of a language model is its token table
        return
    tensors = read_weights(encoder).tensors.values()
    missing = [
        name.removeprefix("model.")
        for name, weight in head.named_parameters()
        if not any(it.shape == weight.shape and torch.equal(it.float(), weight) for it in tensors)
    ]
    if missing:
        raise WeightNamesError(
            f"weights of the head are missing: {', '.join(missing[:5])}. Download or save the model again, or give "
            "--ignore-head for the encoder alone"
        )


def _pooling(transformer: Any, head: PooledLogits) -> tuple[manifest_pb2.Pooling, int | None]:
    """Return the pooling of the head, and the token id that last-token pooling skips.

    The id is None if last-token pooling skips no token. This function computes the logits of random hidden states as
    the original model does. Then it finds the pooling that gives the same logits.

    Raises:
        UnsupportedModelError: The logits are not a function of one pooled hidden state.
    """
    config = transformer.model.config.get_text_config()
    rows = torch.randn((1, 5, config.hidden_size), generator=torch.Generator().manual_seed(0))
    pad = getattr(config, "pad_token_id", None)
    ids = torch.full((1, 5), 1 if pad in (None, 0) else 0)
    poolings = {
        manifest_pb2.POOLING_CLS: rows[:, 0],
        manifest_pb2.POOLING_MEAN: rows.mean(dim=1),
        manifest_pb2.POOLING_LAST_TOKEN: rows[:, -1],
    }
    try:
        with torch.inference_mode():
            want = head.of_rows(rows, ids)
            found = [kind for kind, pooled in poolings.items() if torch.allclose(head(pooled), want, 1e-4, 1e-5)]
            if found == [manifest_pb2.POOLING_LAST_TOKEN] and pad is not None:
                ids[0, 3:] = pad
                if torch.allclose(head(rows[:, 2]), head.of_rows(rows, ids), 1e-4, 1e-5):
                    return found[0], int(pad)
    except Exception as error:  # the model's code may raise any exception
        raise UnsupportedModelError(
            f"the head of {type(transformer.model).__name__} does not run on hidden states: {first_line(error)}; "
            f"{_ADVICE}"
        ) from error
    if len(found) != 1:
        raise UnsupportedModelError(
            f"a bundle cannot express the head of {type(transformer.model).__name__}; {_ADVICE}"
        )
    return found[0], None


def _labels(directory: Path, config: Any, count: int) -> tuple[str, ...]:
    if not 1 <= count <= MOST_LABELS:
        raise UnsupportedModelError(f"{directory}: a model must have 1 to {MOST_LABELS} labels; has {count}")
    names = config.id2label or {}
    return tuple(str(names.get(i, f"LABEL_{i}")) for i in range(count))


def _activation(directory: Path, loaded: Any, config: Any) -> manifest_pb2.Activation:
    """Return the activation that turns logits into scores in sentence-transformers.

    If sentence-transformers did not save the directory, return the activation of transformers' pipeline.
    """
    if not is_cross_encoder(directory):
        if config.problem_type == "regression":
            return manifest_pb2.ACTIVATION_NONE
        if loaded.num_labels > 1:
            is_multi_label = config.problem_type == "multi_label_classification"
            return manifest_pb2.ACTIVATION_SIGMOID if is_multi_label else manifest_pb2.ACTIVATION_SOFTMAX
    name = type(loaded.activation_fn).__name__
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{directory}: activation_fn must be one of {', '.join(_ACTIVATIONS)}; was {name}; {_ADVICE}"
        )
    return _ACTIVATIONS[name]


def _check_activation(directory: Path) -> None:
    """Refuse an activation class outside of PyTorch. sentence-transformers would use a default class instead."""
    path = activation_path(directory)
    if path is not None and not path.startswith("torch."):
        raise UnsupportedModelError(
            f"{directory / SETTINGS} or config.json: activation_fn must be a class of torch.nn; was {path!r}. The "
            "exporter runs no code from a directory. Write the class of torch.nn with the same function, for example "
            '"torch.nn.modules.activation.Sigmoid"'
        )


def _truncation(encoder: Path, transformer: Any) -> manifest_pb2.PairTruncation:
    """Return how sentence-transformers truncates a pair of texts that is too long."""
    own = transformer.processing_kwargs
    stated = {**(own.get("text") or {}), **(own.get("common") or {})}.get("truncation", True)
    truncation = _TRUNCATIONS.get("longest_first" if stated is True else str(stated))
    if truncation is None:
        raise UnsupportedModelError(
            f"{encoder}: truncation must be one of {', '.join(_TRUNCATIONS)}; was {stated!r}. Set it in "
            "processing_kwargs of sentence_bert_config.json"
        )
    return truncation


def _reads_types(transformer: Any) -> bool:
    """Return whether the hidden states depend on token types: 0 for the first text of a pair, 1 for the second.

    Raises:
        UnsupportedModelError: The token types of a pair are not zeros followed by ones.
    """
    if "message" in transformer.modalities:
        return False
    features = transformer.preprocess([_PAIR])
    types = features.get("token_type_ids")
    if types is None or not types.any():
        return False
    with torch.inference_mode():
        rows, plain = (
            _hidden_states(transformer, features["input_ids"], features["attention_mask"], it)
            for it in (types, torch.zeros_like(types))
        )
    if torch.equal(rows, plain):
        return False
    listed = types[0].tolist()
    if listed != sorted(listed) or not set(listed) <= {0, 1}:
        raise UnsupportedModelError(
            f"the token types of a pair must be zeros, then ones; the tokenizer gives {listed}; {_ADVICE}"
        )
    return True


def _hidden_states(transformer: Any, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
    model = transformer.model
    encoder = getattr(model, model.base_model_prefix)
    try:
        rows: Tensor = encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    except TypeError:  # the encoder takes no token types
        return torch.zeros(1)
    except IndexError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails for the token types of a pair: {first_line(error)}; {_ADVICE}"
        ) from error
    return rows
