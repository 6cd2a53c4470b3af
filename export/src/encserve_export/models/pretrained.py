"""A checkpoint as transformers computes it: loaded without a guess, and written as ONNX by PyTorch.

Nothing that a checkpoint brings is executed: its weights are read here, and code of its own is refused.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encserve_export.ground import names
from encserve_export.ground.arrays import Ids, Mask, Rows
from encserve_export.ground.errors import (
    ConfigError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
    first_line,
)
from encserve_export.models.module import Exporter, example, write_module
from encserve_export.models.own.layouts.base import listed
from encserve_export.source.weights import INDICES, Weights, read_object

OWN_ONNX = "export it as ONNX yourself, ids and mask in and rows out, and give the file to `encserve-export onnx`"
# A pooler may be missing from weights, or a decoder; a model this much larger than its weights is another one.
_MOST_MISSING, _LEAST_PARAMETERS = 4, 2**24


class _Rows(nn.Module):
    """Ids and mask, int64 (batch, seq), the mask as `manifest.proto` has it -> rows, float32 (batch, seq, d_model)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden state."""
        attended = (attention_mask == 1).long()  # (batch, seq), without tokens that have rows and that none attends to
        rows: Tensor = self.model(input_ids=input_ids, attention_mask=attended).last_hidden_state
        return rows


@dataclasses.dataclass(frozen=True)
class TransformersModel:
    """An encoder of transformers', in float32, every number of it from the checkpoint.

    Attributes:
        module: Ids and mask, int64 (batch, seq) -> rows (batch, seq, d_model), in the type of its weights.
        description: The name of its class.
        positions: The longest sequence that it has positions for; None where nothing bounds it.
        vocab_size: The rows of its table of tokens.
        pad_token_id: The id that fills a padded batch.
        left_behind: The parts of the checkpoint that make no rows, such as heads.
    """

    module: nn.Module
    description: str
    positions: int | None
    vocab_size: int
    pad_token_id: int
    left_behind: tuple[str, ...]

    def __call__(self, ids: Ids, mask: Mask) -> Rows:
        """Runs one batch in PyTorch: int64 (batch, seq) both -> (batch, seq, d_model), in the type of the weights.

        Raises:
            UnsupportedModelError: The model does not run with ids and mask alone, or not with these.
        """
        with torch.inference_mode():
            rows: Rows = _run(self.module, torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        return rows


def package() -> Any:
    """The package transformers, told to be quiet."""
    import transformers  # takes a second

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_model(directory: Path, weights: Weights) -> TransformersModel:
    """Makes transformers' model of a checkpoint.

    Args:
        directory: Where its config.json is.
        weights: Its weights.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or has no encoder of text for it.
        ConfigError: transformers does not take config.json.
        WeightNamesError: Weights that the rows are made with are missing, or layers are left over.
        WeightShapeError: Weights have other shapes than config.json says.
        WeightValueError: A weight holds NaN or infinity.
    """
    settings = read_object(directory / "config.json")
    transformers = package()
    config = _read_config(transformers, directory, settings)
    kind = _model_class(transformers, config)
    _refuse_larger(kind, config, weights)
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
    except Exception as error:  # whatever a model of somebody else's raises
        raise ConfigError(
            f"transformers cannot make a {kind.__name__} of config.json: {first_line(error)}; is it this checkpoint's?"
        ) from error
    _refuse_mismatched(info["mismatched_keys"])
    left_behind = _left_behind(model, weights.tensors, info["unexpected_keys"])
    encoder = model.get_encoder() if config.is_encoder_decoder and hasattr(model, "decoder") else model
    vocab_size = _vocab_size(encoder)
    module = _Rows(encoder).eval().requires_grad_(False)
    unused = _unused_parts(module, model, info["missing_keys"])
    _refuse_not_finite(model)
    pad_token_id = getattr(config, "pad_token_id", None)
    return TransformersModel(
        module,
        type(encoder).__name__,
        positions(encoder, config),
        vocab_size,
        pad_token_id if isinstance(pad_token_id, int) and 0 <= pad_token_id < vocab_size else 0,
        tuple(sorted(left_behind | unused)),
    )


def load_reference(directory: Path) -> Any:
    """The model that transformers reads of a directory by itself, in float32.

    Returns:
        A PreTrainedModel, the encoder of one with a decoder, that takes what its tokenizer makes of texts.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or has no encoder of text for it.
        ConfigError: transformers does not take config.json or the weights.
    """
    settings = read_object(directory / "config.json")
    transformers = package()
    config = _read_config(transformers, directory, settings)
    kind = _model_class(transformers, config)
    try:
        model = kind.from_pretrained(
            directory, config=config, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception as error:  # whatever a model of somebody else's raises
        raise ConfigError(
            f"transformers cannot make a {kind.__name__} of {directory}: {first_line(error)}; is config.json of this "
            "checkpoint?"
        ) from error
    encoder = model.get_encoder() if config.is_encoder_decoder and hasattr(model, "decoder") else model
    return encoder.eval().requires_grad_(False)


def write_onnx(model: TransformersModel, exporter: Exporter, path: Path) -> None:
    """Writes a model as ONNX, by the names of a bundle.

    Raises:
        UnsupportedModelError: This exporter does not take it.
    """
    ids, mask = example(lambda length: torch.arange(length) % model.vocab_size)
    write_module(model.module, (ids, mask), names.INPUT_IDS, exporter, path, model.description)


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
            "the checkpoint is quantised (quantization_config in config.json); export the one that it was made of, "
            "with --precision"
        )
    try:
        whole = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        config = whole if whole.is_encoder_decoder else whole.get_text_config()
    except Exception as error:  # whatever the checks of a configuration raise
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
    """The longest sequence that a model of transformers' has positions for; None where nothing bounds it."""
    tables = [
        module
        for name, module in encoder.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    if tables:
        # RoBERTa's kind begins to count after the padding's row.
        unused = 0 if tables[0].padding_idx is None else tables[0].padding_idx + 1
        return tables[0].num_embeddings - unused
    number = getattr(config, "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None


def _refuse_larger(kind: Any, config: Any, weights: Weights) -> None:
    """Refuses a configuration of more numbers than the weights have, before memory is taken for them."""
    try:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in kind(config).parameters())
    except Exception:  # whatever a model of somebody else's raises; loading it says so
        return
    there = sum(tensor.numel() for tensor in weights.tensors.values())
    if parameters > _MOST_MISSING * there + _LEAST_PARAMETERS:
        raise WeightShapeError(f"config.json describes a model of {parameters:,} numbers; the weights have {there:,}")


def _refuse_mismatched(mismatched: Any) -> None:
    if mismatched:
        name, found, due = sorted(mismatched)[0]
        raise WeightShapeError(
            f"{name} has shape {tuple(found)}; config.json asks for {tuple(due)}"
            + (f", and {len(mismatched) - 1} more weights have another shape" if len(mismatched) > 1 else "")
        )


def _vocab_size(encoder: Any) -> int:
    try:
        return int(encoder.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        raise UnsupportedModelError(
            f"{type(encoder).__name__} has no table of tokens, so it takes no token ids as an encoder of text does; "
            f"{OWN_ONNX}"
        ) from None


def _left_behind(model: Any, names: Iterable[str], unexpected: Iterable[str]) -> set[str]:
    """The parts that weights nobody asked for belong to, unless they are of a part that the model has."""
    parts = {name for name, _ in model.named_children()}
    unasked = {name: _part(model, name) for name in unexpected}
    inside = sorted(name for name, part in unasked.items() if part in parts and not name.endswith(INDICES))
    if inside:
        raise WeightNamesError(f"there are weights that config.json has no place for: {listed(inside)}")
    # transformers itself says nothing of the decoder where the encoder alone is loaded.
    ignored = {"decoder"} & {_part(model, name) for name in names} - parts
    return ignored | {part for name, part in unasked.items() if not name.endswith(INDICES)}


def _part(model: Any, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _unused_parts(module: _Rows, model: Any, missing: Iterable[str]) -> set[str]:
    """The parts of a model that its rows are not made with, such as poolers.

    Raises:
        WeightNamesError: The rows are made with weights that are missing, and that would be random numbers.
        UnsupportedModelError: The model does not run with ids and mask alone.
    """
    parameters = dict(model.named_parameters())
    random = {name for name in missing if name in parameters}
    # The two smallest of a part stand for all of it: gradients of everything would take the model's memory again. The
    # table of tokens is used anyway, and often larger than all the rest.
    encoder: Any = module.model
    table = encoder.get_input_embeddings().weight
    parts: dict[str, list[str]] = {}
    for name in sorted(parameters, key=lambda name: parameters[name].numel()):
        if name not in random and parameters[name] is not table:
            parts.setdefault(_part(model, name), []).append(name)
    samples = {part: set(names[:2]) for part, names in parts.items()}
    asked = sorted(random.union(*samples.values()))
    for name in asked:
        parameters[name].requires_grad_(True)
    ids = torch.zeros((2, 3), dtype=torch.int64)  # (batch, seq)
    with torch.enable_grad():
        rows = _run(module, ids, torch.ones_like(ids))  # (batch, seq, d_model)
        found: tuple[Tensor | None, ...] = (None,) * len(asked)
        if rows.requires_grad:
            found = torch.autograd.grad(rows.sum(), [parameters[name] for name in asked], allow_unused=True)
    model.requires_grad_(False)
    used = {name for name, gradient in zip(asked, found, strict=True) if gradient is not None}
    needed = sorted((random & used) | {name for name in missing if name not in parameters})
    if needed:
        raise WeightNamesError(f"weights are missing: {listed(needed)}")
    return {part for part, names in samples.items() if not names & used}


def _run(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """int64 (batch, seq) both -> (batch, seq, d_model)."""
    try:
        rows: Tensor = module(ids, mask)
    except Exception as error:  # whatever a model of somebody else's raises
        raise UnsupportedModelError(
            f"the model does not run in PyTorch with {ids.shape[0]} sequences of {ids.shape[1]} token ids and their "
            f"mask: {first_line(error)}; {OWN_ONNX}"
        ) from error
    return rows


def _refuse_not_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise WeightValueError(f"{name} holds numbers that are not finite")
