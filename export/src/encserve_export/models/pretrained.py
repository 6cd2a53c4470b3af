"""Loads a checkpoint as transformers computes it.

No code of the checkpoint is executed: its weights are read by `source.weights`, and its own classes are refused.
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
    WeightValueError,
    first_line,
)
from encserve_export.models.own.layouts.base import listed
from encserve_export.models.reference import Inspection, Reference
from encserve_export.source.weights import INDICES, Weights, read_object
from encserve_proto.bundle.v1 import manifest_pb2

OWN_ONNX = "export it as ONNX yourself, ids and mask in and rows out, and give the file to `encserve-export onnx`"
# The names of the manifest for transformers' `hidden_act`.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_POSITION_TABLES = ("position_embeddings.weight", "position_embedding.weight")


class _Rows(nn.Module):
    """Ids and mask, int64 (batch, seq), see `Reference.module` -> rows, float32 (batch, seq, d_model)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden state."""
        rows: Tensor = self.model(input_ids=input_ids, attention_mask=_attended(attention_mask)).last_hidden_state
        return rows


class _Inspected(_Rows):
    """The same inputs -> hidden states and attention weights, see `Inspection.module`."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """All hidden states, the last one with the model's final norm, then all attention weights."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=_attended(attention_mask),
            output_hidden_states=True,
            output_attentions=True,
        )
        return (*output.hidden_states[:-1], output.last_hidden_state, *output.attentions)


def _attended(attention_mask: Tensor) -> Tensor:
    """1 for the tokens that others attend to, int64 (batch, seq); a 2 in the mask is a token that has a row only."""
    return (attention_mask == 1).long()


def package() -> Any:
    """Imports transformers and turns off its log and its progress bars."""
    import transformers  # takes a second

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_model(directory: Path, weights: Weights) -> Reference:
    """Loads transformers' model of a checkpoint.

    Args:
        directory: The folder of config.json.
        weights: The weights of the checkpoint.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or has no text encoder for it.
        ConfigError: transformers does not take config.json.
        WeightNamesError: Weights that the rows depend on are missing, or layers are left over.
        WeightShapeError: Weights have other shapes than config.json says.
        WeightValueError: A weight holds NaN or infinity.
    """
    config, kind = _read_kind(directory)
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights.tensors),
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # another author's model may raise anything
        raise ConfigError(
            f"transformers cannot make a {kind.__name__} of config.json: {first_line(error)}; is it this checkpoint's?"
        ) from error
    _refuse_mismatched(info["mismatched_keys"])
    surplus_parts = _parts_without_place(model, weights.tensors, info["unexpected_keys"])
    encoder = _encoder_of(model, config)
    vocab_size = _vocab_size(encoder)
    module = _Rows(encoder).eval().requires_grad_(False)
    unused = _unused_parts(module, model, info["missing_keys"])
    _refuse_not_finite(model)
    _refuse_integers(weights, info["unexpected_keys"])
    pad_token_id = getattr(config, "pad_token_id", None)
    reference = Reference(
        module=module,
        description=type(encoder).__name__,
        vocab_size=vocab_size,
        positions=positions(encoder, config),
        pad_token_id=pad_token_id if isinstance(pad_token_id, int) and 0 <= pad_token_id < vocab_size else 0,
        unused_parts=tuple(sorted(surplus_parts | unused)),
        long_attention=lambda: _sdpa(encoder),
    )
    return _with_inspection(reference, encoder, config)


def _read_kind(directory: Path) -> tuple[Any, Any]:
    """The configuration in a directory, and transformers' class of its text encoder."""
    transformers = package()
    config = _read_config(transformers, directory, read_object(directory / "config.json"))
    return config, _model_class(transformers, config)


def _encoder_of(model: Any, config: Any) -> Any:
    return model.get_encoder() if config.is_encoder_decoder and hasattr(model, "decoder") else model


def load_reference(directory: Path) -> Any:
    """Loads the model of a directory as transformers reads it by itself, in float32.

    Returns:
        A PreTrainedModel, the encoder of one with a decoder, that takes the output of its tokenizer.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or has no text encoder for it.
        ConfigError: transformers does not take config.json or the weights.
    """
    config, kind = _read_kind(directory)
    try:
        model = kind.from_pretrained(
            directory, config=config, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception as error:  # another author's model may raise anything
        raise ConfigError(
            f"transformers cannot make a {kind.__name__} of {directory}: {first_line(error)}; is config.json of this "
            "checkpoint?"
        ) from error
    encoder = _encoder_of(model, config)
    return encoder.eval().requires_grad_(False)


def _read_config(transformers: Any, directory: Path, settings: Mapping[str, Any]) -> Any:
    """The configuration of the part that reads text."""
    model_type = settings.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        if "auto_map" in settings:
            raise UnsupportedModelError(
                f"model_type {model_type!r} brings code of its own (auto_map in config.json), which is never executed; "
                f"{OWN_ONNX}"
            )
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r}; a newer one may "
            f"(pip install -U transformers). Otherwise {OWN_ONNX}"
        )
    if "quantization_config" in settings:
        raise UnsupportedModelError(
            "the checkpoint is quantised (quantization_config in config.json); export the original checkpoint with "
            "--precision"
        )
    try:
        whole = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        config = whole if whole.is_encoder_decoder else whole.get_text_config()
    except Exception as error:  # the checks of a configuration may raise anything
        raise ConfigError(
            f"transformers does not take config.json: {first_line(error)}; is it this checkpoint's?"
        ) from error
    config.use_cache = False
    return config


def _model_class(transformers: Any, config: Any) -> Any:
    for mapping in (transformers.MODEL_FOR_TEXT_ENCODING_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    raise UnsupportedModelError(f"transformers has no plain model for model_type {config.model_type!r}; {OWN_ONNX}")


def positions(encoder: nn.Module, config: Any) -> int | None:
    """The longest sequence that a model of transformers has positions for; None without a limit."""
    tables = [
        module
        for name, module in encoder.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    if tables:
        return tables[0].num_embeddings - _first_position(tables[0])
    number = getattr(config, "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None


def _first_position(table: nn.Embedding) -> int:
    """The row of the first token: models like RoBERTa count from the row after the padding's."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _with_inspection(reference: Reference, encoder: Any, config: Any) -> Reference:
    """Adds the inspection if the model gives hidden states and attention weights of the usual shapes."""
    module = _Inspected(encoder).eval()
    inputs, mask = reference.example()
    try:
        with torch.inference_mode():
            outputs = module(inputs, mask)
    except Exception:  # another author's model may raise anything; then it has no inspection
        return reference
    n_layers = len(outputs) // 2
    states, weights = outputs[: n_layers + 1], outputs[n_layers + 1 :]
    batch, seq = mask.shape
    n_heads = weights[0].shape[1] if weights and weights[0] is not None and weights[0].dim() == 4 else 0
    if (
        len(weights) != n_layers
        or any(output is None for output in outputs)
        or any(tuple(state.shape) != tuple(states[-1].shape) for state in states)
        or any(tuple(weight.shape) != (batch, n_heads, seq, seq) for weight in weights)
    ):
        return reference
    table, first = _position_table(module, states[-1].shape[2])
    inspection = Inspection(module=module, n_layers=n_layers, position_table=table, first_position=first)
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


def _position_table(module: nn.Module, d_model: int) -> tuple[str, int]:
    """The name of the position table, (rows, d_model), and its row for the first token; empty without a table."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) and f"{name}.weight".endswith(_POSITION_TABLES):
            return (f"{name}.weight", _first_position(part)) if part.embedding_dim == d_model else ("", 0)
    return "", 0


@contextlib.contextmanager
def _sdpa(encoder: Any) -> Iterator[None]:
    """Computes attention without a tensor of all scores, if the model can."""
    try:
        encoder.set_attn_implementation("sdpa")
    except ValueError:  # the model has no such attention
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
            + (f", and {len(mismatched) - 1} more weights have another shape" if len(mismatched) > 1 else "")
        )


def _vocab_size(encoder: Any) -> int:
    try:
        return int(encoder.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        raise UnsupportedModelError(
            f"{type(encoder).__name__} has no token table, so it does not take token ids as a text encoder does; "
            f"{OWN_ONNX}"
        ) from None


def _parts_without_place(model: Any, names: Iterable[str], unexpected: Iterable[str]) -> set[str]:
    """The parts of the checkpoint that the model does not have.

    Raises:
        WeightNamesError: Surplus weights belong to a part that the model has.
    """
    parts = {name for name, _ in model.named_children()}
    surplus = {name: _part(model, name) for name in unexpected}
    inside = sorted(name for name, part in surplus.items() if part in parts and not name.endswith(INDICES))
    if inside:
        raise WeightNamesError(f"there are weights that config.json has no place for: {listed(inside)}")
    # transformers itself says nothing of the decoder if the encoder alone is loaded.
    ignored = {"decoder"} & {_part(model, name) for name in names} - parts
    return ignored | {part for name, part in surplus.items() if not name.endswith(INDICES)}


def _part(model: Any, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _unused_parts(module: _Rows, model: Any, missing: Iterable[str]) -> set[str]:
    """The parts of a model that do not contribute to its rows, such as poolers.

    Raises:
        WeightNamesError: The rows depend on missing weights, which would be random numbers.
        UnsupportedModelError: The model does not run with ids and mask alone.
    """
    parameters = dict(model.named_parameters())
    random = {name for name in missing if name in parameters}
    # The two smallest parameters of a part stand for the part: gradients of all would take the model's memory again.
    # The token table always contributes, and is often the largest.
    encoder: Any = module.model
    table = encoder.get_input_embeddings().weight
    parts: dict[str, list[str]] = {}
    for name in sorted(parameters, key=lambda name: parameters[name].numel()):
        if name not in random and parameters[name] is not table:
            parts.setdefault(_part(model, name), []).append(name)
    samples = {part: set(names[:2]) for part, names in parts.items()}
    tried = sorted(random.union(*samples.values()))
    for name in tried:
        parameters[name].requires_grad_(True)
    ids = torch.zeros((2, 3), dtype=torch.int64)  # (batch, seq)
    with torch.enable_grad():
        try:
            rows = module(ids, torch.ones_like(ids))  # (batch, seq, d_model)
        except Exception as error:  # another author's model may raise anything
            raise UnsupportedModelError(
                f"the model does not run in PyTorch with token ids of shape (2, 3) and their mask: "
                f"{first_line(error)}; {OWN_ONNX}"
            ) from error
        found: tuple[Tensor | None, ...] = (None,) * len(tried)
        if rows.requires_grad:
            found = torch.autograd.grad(rows.sum(), [parameters[name] for name in tried], allow_unused=True)
    model.requires_grad_(False)
    used = {name for name, gradient in zip(tried, found, strict=True) if gradient is not None}
    needed = sorted((random & used) | {name for name in missing if name not in parameters})
    if needed:
        raise WeightNamesError(f"weights are missing: {listed(needed)}")
    return {part for part, names in samples.items() if not names & used}


def _refuse_integers(weights: Weights, unexpected: Iterable[str]) -> None:
    """Refuses integer weights, which transformers would use without the scales that they need."""
    for name in sorted(set(weights.tensors) - set(unexpected)):
        tensor = weights.tensors[name]
        if not tensor.is_floating_point() and not name.endswith(INDICES):
            raise WeightValueError(
                f"{name} must hold floating-point numbers; was {str(tensor.dtype).removeprefix('torch.')}"
            )


def _refuse_not_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise WeightValueError(f"{name} holds numbers that are not finite")
