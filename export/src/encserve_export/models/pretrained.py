"""Loads a checkpoint as a PyTorch model of the transformers library.

Code in a checkpoint is never executed: `source.weights` reads the weights, and this module refuses custom model
classes.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encserve_export.core.errors import (
    ConfigError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    first_line,
)
from encserve_export.models.reference import Inspection, Reference
from encserve_export.models.tensors import check_values, listed
from encserve_export.source.tokenizer import import_transformers
from encserve_export.source.weights import INDICES, Weights, read_object
from encserve_proto.bundle.v1 import manifest_pb2

OWN_ONNX = (
    "export the model to ONNX yourself (inputs: ids and mask; output: the last hidden states), and run "
    "`encserve-export onnx FILE`"
)
_OTHER_CONFIG = "does config.json belong to this checkpoint?"
# The manifest's names for the values of transformers' `hidden_act`.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_POSITION_TABLES = ("position_embeddings", "position_embedding")


class _Rows(nn.Module):
    """Maps ids and mask, int64 (batch, seq), to hidden states, float32 (batch, seq, d_model). See `Reference`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the last hidden state of each token."""
        rows: Tensor = self.model(**_inputs(input_ids, attention_mask, token_type_ids)).last_hidden_state
        return rows


class _Inspected(_Rows):
    """Maps ids and mask to all hidden states and attention weights. See `Inspection`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        """Return all hidden states, then all attention weights. The model's final norm is applied to the last state."""
        inputs = _inputs(input_ids, attention_mask, token_type_ids)
        output = self.model(**inputs, output_hidden_states=True, output_attentions=True)
        return (*output.hidden_states[:-1], output.last_hidden_state, *output.attentions)


def _inputs(input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> dict[str, Tensor]:
    """Return the arguments of a transformers model. Many models have no argument for token types."""
    types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    return {"input_ids": input_ids, "attention_mask": _binary(attention_mask), **types}


def _binary(attention_mask: Tensor) -> Tensor:
    """Convert a mask of `Reference.module`, int64 (batch, seq), to a 0/1 mask for transformers.

    A 2 marks a token that no other token may attend to. The result has a 0 for such a token.
    """
    return (attention_mask == 1).long()


def load_model(directory: Path, weights: Weights, *, token_types: bool = False) -> Reference:
    """Build the transformers model of a checkpoint from its loaded weights.

    Args:
        directory: The folder of config.json.
        weights: The weights of the checkpoint.
        token_types: Whether the graph has an input for token types. Otherwise, all tokens have type 0.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or has no text encoder for this
            architecture. Or the checkpoint is quantized, brings its own code, or takes no token ids.
        ConfigError: transformers refuses config.json.
        WeightNamesError: The hidden states depend on missing weights. Or the checkpoint has a weight for a part of the
            model, such as "encoder", but the model has no weight with this name.
        WeightShapeError: The shape of a weight contradicts config.json.
        WeightValueError: A weight contains NaN, infinity or integers. Integers are quantized weights, and transformers
            would not apply the scale of these weights.
    """
    config, (model, info) = _from_pretrained(
        directory,
        None,
        state_dict=dict(weights.tensors),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _refuse_mismatched(info["mismatched_keys"])
    surplus_parts = _surplus_parts(model, weights.tensors, info["unexpected_keys"])
    encoder = _encoder_of(model, config)
    vocab_size = _vocab_size(encoder)
    module = _Rows(encoder).eval().requires_grad_(False)
    unused_parts = _unused_parts(module, model, info["missing_keys"])
    for name in sorted(weights.tensors.keys() - set(info["unexpected_keys"])):
        if not name.endswith(INDICES):
            check_values(name, weights.tensors[name])
    pad_token_id = getattr(config, "pad_token_id", None)
    reference = Reference(
        module=module,
        description=type(encoder).__name__,
        vocab_size=vocab_size,
        positions=positions(encoder, config),
        pad_token_id=pad_token_id if isinstance(pad_token_id, int) and 0 <= pad_token_id < vocab_size else 0,
        unused_parts=tuple(sorted(surplus_parts | unused_parts)),
        long_attention=lambda: _sdpa(encoder),
        has_token_types=token_types,
    )
    return _with_inspection(reference, encoder, config)


def load_reference(directory: Path) -> Any:
    """Load a directory with transformers' own `from_pretrained`, in float32.

    Returns:
        A PreTrainedModel, or only its encoder if the model has a decoder. Call the returned model with the output of
        the tokenizer as keyword arguments.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or has no text encoder for this
            architecture.
        ConfigError: transformers refuses config.json or the weights.
    """
    config, model = _from_pretrained(directory, directory, local_files_only=True)
    return _encoder_of(model, config).eval().requires_grad_(False)


def read_positions(directory: Path) -> int | None:
    """Return the largest number of tokens in a sequence; None without a limit. This function loads no weights."""
    try:
        config, kind = _read_config(directory)
        with torch.device("meta"):
            return positions(_encoder_of(kind(config), config), config)
    except Exception:  # transformers cannot build the model, so config.json gives the limit
        return _positive(read_object(directory / "config.json").get("max_position_embeddings"))


def positions(encoder: nn.Module, config: Any) -> int | None:
    """Return the number of positions of a transformers model, or None without a limit."""
    if table := _position_table(encoder):
        return table[1].num_embeddings - _first_position(table[1])
    return _positive(getattr(config, "max_position_embeddings", None))


def _positive(number: Any) -> int | None:
    return number if isinstance(number, int) and number > 0 else None


def _position_table(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    tables = (
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES
    )
    return next(tables, None)


def _first_position(table: nn.Embedding) -> int:
    """Return the row of the position table for the first token. RoBERTa starts after the padding token's row."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _from_pretrained(directory: Path, weights: Path | None, **arguments: Any) -> tuple[Any, Any]:
    """Return the configuration of a directory, and the result of transformers' from_pretrained."""
    config, kind = _read_config(directory)
    try:
        return config, kind.from_pretrained(
            weights, config=config, dtype=torch.float32, attn_implementation="eager", **arguments
        )
    except Exception as error:  # the model's code may raise any exception
        raise ConfigError(
            f"transformers cannot load {directory} as {kind.__name__}: {first_line(error)}; {_OTHER_CONFIG}"
        ) from error


def _read_config(directory: Path) -> tuple[Any, Any]:
    """Return the configuration of a directory's text model, and transformers' class for the model."""
    transformers = import_transformers()
    settings = read_object(directory / "config.json")
    model_type = settings.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        if "auto_map" in settings:
            raise UnsupportedModelError(
                f"model_type {model_type!r} needs its own code (auto_map in config.json), which is never executed. "
                f"Instead, {OWN_ONNX}"
            )
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r}; a newer version "
            f"may know it (pip install -U transformers). Otherwise {OWN_ONNX}"
        )
    if "quantization_config" in settings:
        raise UnsupportedModelError(
            "the checkpoint is quantized (quantization_config in config.json); export the original checkpoint with "
            "--precision"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        if not config.is_encoder_decoder:
            config = config.get_text_config()
    except Exception as error:  # transformers' checks may raise any exception
        raise ConfigError(f"transformers refuses config.json: {first_line(error)}; {_OTHER_CONFIG}") from error
    config.use_cache = False
    for mapping in (transformers.MODEL_FOR_TEXT_ENCODING_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return config, kind[0] if isinstance(kind, tuple) else kind
    raise UnsupportedModelError(
        f"transformers has no base model for model_type {config.model_type!r}. Instead, {OWN_ONNX}"
    )


def _encoder_of(model: Any, config: Any) -> Any:
    return model.get_encoder() if config.is_encoder_decoder and hasattr(model, "decoder") else model


def _with_inspection(reference: Reference, encoder: Any, config: Any) -> Reference:
    """Set `inspection` and `shape` if the model returns hidden states and attention weights of the usual shapes."""
    module = _Inspected(encoder).eval()
    example = reference.example()
    try:
        with torch.inference_mode():
            outputs = module(*example)
    except Exception:  # the model's code may raise any exception; then inspection is not possible
        return reference
    n_layers = len(outputs) // 2
    states, weights = outputs[: n_layers + 1], outputs[n_layers + 1 :]
    batch, seq = example[1].shape
    n_heads = weights[0].shape[1] if weights and weights[0] is not None and weights[0].dim() == 4 else 0
    if (
        len(weights) != n_layers
        or any(output is None for output in outputs)
        or any(tuple(state.shape) != tuple(states[-1].shape) for state in states)
        or any(tuple(weight.shape) != (batch, n_heads, seq, seq) for weight in weights)
    ):
        return reference
    table = _position_table(module)
    if table and table[1].embedding_dim != states[-1].shape[2]:
        table = None
    inspection = Inspection(
        module=module,
        n_layers=n_layers,
        position_table=f"{table[0]}.weight" if table else "",
        first_position=_first_position(table[1]) if table else 0,
    )
    position = "learned" if table else "rotary" if getattr(config, "rope_parameters", None) else ""
    d_ff = getattr(config, "intermediate_size", None)
    shape = manifest_pb2.EncoderShape(
        n_layers=n_layers,
        n_heads=n_heads,
        d_ff=d_ff if type(d_ff) is int else 0,
        activation=_ACTIVATIONS.get(str(getattr(config, "hidden_act", "")), ""),
        position=position,
    )
    return dataclasses.replace(reference, inspection=inspection, shape=shape)


@contextlib.contextmanager
def _sdpa(encoder: Any) -> Iterator[None]:
    """Use PyTorch's scaled_dot_product_attention (SDPA) within a `with` block, if the model supports SDPA.

    SDPA does not store a (batch, heads, seq, seq) tensor of attention scores.
    """
    try:
        encoder.set_attn_implementation("sdpa")
    except ValueError:  # the model does not support SDPA
        yield
        return
    try:
        yield
    finally:
        encoder.set_attn_implementation("eager")


def _refuse_mismatched(mismatched: Any) -> None:
    if mismatched:
        name, found, expected = sorted(mismatched)[0]
        raise WeightShapeError(
            f"{name} has shape {tuple(found)}; config.json asks for {tuple(expected)}"
            + (f", and {len(mismatched) - 1} more weights have a wrong shape" if len(mismatched) > 1 else "")
        )


def _vocab_size(encoder: Any) -> int:
    try:
        return int(encoder.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        raise UnsupportedModelError(
            f"{type(encoder).__name__} has no token table, so it does not take token ids. Instead, {OWN_ONNX}"
        ) from None


def _surplus_parts(model: Any, names: Iterable[str], unexpected: Iterable[str]) -> set[str]:
    """Return the parts of the checkpoint that the model does not have, such as heads.

    A part is the first component of the weights' names, such as "pooler".

    Raises:
        WeightNamesError: The name of a weight begins with a part of the model, such as "encoder". But the model has no
            weight with this name.
    """
    parts = {name for name, _ in model.named_children()}
    surplus = {name: _part(model, name) for name in unexpected if not name.endswith(INDICES)}
    misplaced = sorted(name for name, part in surplus.items() if part in parts)
    if misplaced:
        raise WeightNamesError(
            f"the checkpoint has weights that the model of config.json does not have: {listed(misplaced)}"
        )
    # If transformers loads only an encoder, it does not report the decoder's weights as unexpected. So the decoder is
    # added here.
    decoder = {"decoder"} & {_part(model, name) for name in names} - parts
    return decoder | set(surplus.values())


def _part(model: Any, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _unused_parts(module: _Rows, model: Any, missing: Iterable[str]) -> set[str]:
    """Return the parts of a model that do not affect its hidden states, such as poolers.

    Raises:
        WeightNamesError: The hidden states depend on weights that the checkpoint lacks. transformers fills missing
            weights with random numbers.
        UnsupportedModelError: The model does not run with only ids and a mask.
    """
    parameters = dict(model.named_parameters())
    random = {name for name in missing if name in parameters}
    # A parameter affects the hidden states if PyTorch can compute its gradient. Gradients of all parameters would take
    # as much memory as the model. So PyTorch computes gradients only for the missing parameters, and for the two
    # smallest parameters of each part. The token table is left out, because it always affects the hidden states and is
    # often the largest parameter.
    encoder: Any = module.model
    table = encoder.get_input_embeddings().weight
    parts: dict[str, list[str]] = {}
    for name in sorted(parameters, key=lambda name: parameters[name].numel()):
        if name not in random and parameters[name] is not table:
            parts.setdefault(_part(model, name), []).append(name)
    samples = {part: set(names[:2]) for part, names in parts.items()}
    used = _used_parameters(module, {name: parameters[name] for name in sorted(random.union(*samples.values()))})
    model.requires_grad_(False)
    needed = sorted((random & used) | {name for name in missing if name not in parameters})
    if needed:
        raise WeightNamesError(f"weights are missing: {listed(needed)}")
    return {part for part, names in samples.items() if not names & used}


def _used_parameters(module: _Rows, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names of the parameters that affect the hidden states. PyTorch computes no gradient for the others."""
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    ids = torch.zeros((2, 3), dtype=torch.int64)  # (batch, seq)
    with torch.enable_grad():
        try:
            rows = module(ids, torch.ones_like(ids))  # (batch, seq, d_model)
        except Exception as error:  # the model's code may raise any exception
            raise UnsupportedModelError(
                f"the model does not run in PyTorch with token ids of shape (2, 3) and their mask: "
                f"{first_line(error)}; {OWN_ONNX}"
            ) from error
        if not rows.requires_grad:
            return set()
        gradients = torch.autograd.grad(rows.sum(), list(parameters.values()), allow_unused=True)
    return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
