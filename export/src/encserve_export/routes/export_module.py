"""Exports a user's PyTorch module, and compares the graph's outputs with the module's outputs."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from encserve_export.bundle import store
from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.core.errors import ConfigError, UnsupportedModelError, VocabularyError, first_line
from encserve_export.core.precision import Precision
from encserve_export.kinds.spec import spec_from_options
from encserve_export.models.graphs import refuse_control_flow
from encserve_export.models.own.config import Input
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.models.reference import Reference
from encserve_export.routes.reference import check_sizes, export_reference
from encserve_export.source.tokenizer import TokenizerFile


class _Rows(nn.Module):
    """Calls the user's module with a bool mask: True for a token, False for padding."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden states, float32 (batch, seq, d_model). The mask is int64 (batch, seq)."""
        rows: Tensor = self.module(inputs, attention_mask == 1)
        return rows


def export_module(
    module: nn.Module,
    target: Target,
    *,
    configuration: Mapping[str, Any],
    input: Input = "token_ids",  # noqa: A002 - as `checkpoint --input`
    vocab_size: int | None = None,
    d_model: int | None = None,
    max_sequence_tokens: int = DEFAULT_LONGEST,
    pad_token_id: int = 0,
    tokenizer: TokenizerFile | None = None,
    pooling: str | None = None,
    l2_normalize: bool = False,
    precision: Precision = "float32",
    progress: Progress = show_progress,
) -> Exported:
    """Export any PyTorch module that returns the hidden states of a padded batch.

    PyTorch writes the module as ONNX. Then the graph's outputs are compared with the module's outputs. The bundle does
    not support inspection of attention weights and inner hidden states, because the module returns only the last hidden
    states.

    Args:
        module: The module, on the CPU. Its first argument is token ids, int64 (batch, seq), or vectors, float32 (batch,
            seq, d_model). Its second argument is a mask, bool (batch, seq): True for a token. The module returns the
            last hidden states, float32 (batch, seq, d_model). The module runs in eval mode, and its previous mode is
            restored afterwards.
        target: The destination of the bundle.
        configuration: JSON with the settings that `state_dict()` does not show, such as {"activation": "gelu",
            "norm_first": true}. The settings are part of the space_id, which identifies the model's vector space.
        input: The module's input, "token_ids" or "embeddings".
        vocab_size: The number of token ids. The default is the tokenizer's number of ids. Leave this argument out for
            embeddings.
        d_model: The width of the input vectors and of the hidden states. Only for embeddings.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        pad_token_id: The token id that pads a batch.
        tokenizer: The tokenizer. If it is None, the model takes token ids only.
        pooling: The pooling that the model was trained with, one of `POOLINGS`. If it is None, each caller of the
            server chooses a pooling.
        l2_normalize: Whether pooled vectors are scaled to length 1.
        precision: The precision of the bundle.
        progress: Called with a line of text before each step.

    Raises:
        UnsupportedModelError: The module does not run, its output has a wrong type or shape, or PyTorch cannot export
            the module. The message gives the reason, such as control flow that depends on the numbers in a tensor.
        ParityError: The graph's outputs differ too much from the module's outputs, or padding changes the outputs.
        ExportError: The export failed for another reason. The subclass shows the cause. No files are left.
    """
    _check_configuration(configuration)
    vector = spec_from_options(pooling, l2_normalize=l2_normalize)
    vocab_size = _vocab_size(input, vocab_size, d_model, tokenizer)
    check_sizes(
        vocab_size=vocab_size,
        width=d_model or 0,
        pad_token_id=pad_token_id,
        max_sequence_tokens=max_sequence_tokens,
        tokenizer=tokenizer,
    )
    store.check_target(target.model_repository, target.name, target.version, overwrite=target.overwrite)
    with _in_eval_mode(module):
        reference = Reference(
            module=_Rows(module).eval(),
            description=type(module).__name__,
            vocab_size=vocab_size,
            width=d_model or 0,
            pad_token_id=pad_token_id,
        )
        progress(f"running {reference.description}")
        _check_module(reference)
        refuse_control_flow(reference)
        source = Source(
            "module",
            reference.description,
            vector=vector,
            tokenizer=tokenizer,
            model_digest=_digest(module, configuration),
        )
        return export_reference(
            reference,
            source,
            target,
            max_sequence_tokens=max_sequence_tokens,
            precision=precision,
            progress=progress,
        )


def _check_configuration(configuration: Mapping[str, Any]) -> None:
    try:
        json.dumps(configuration, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"configuration must be JSON, because it identifies the model: {error}") from error
    if not isinstance(configuration, dict):
        raise ConfigError(f"configuration must be a dict; was {type(configuration).__name__}")


def _digest(module: nn.Module, configuration: Mapping[str, Any]) -> str:
    # No reference to `tensors` may remain after this function. Later, the export converts the module's weights to
    # float64 for a while. A reference would keep the float32 weights in memory too.
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return digest_model(tensors, configuration)


def _vocab_size(
    model_input: Input, vocab_size: int | None, d_model: int | None, tokenizer: TokenizerFile | None
) -> int:
    """Return the number of token ids, from `vocab_size` or else from the tokenizer; 0 if the module takes vectors."""
    if model_input not in get_args(Input):
        raise ConfigError(f"input must be one of {', '.join(get_args(Input))}; was {model_input!r}")
    if model_input == "embeddings":
        if d_model is None or d_model < 1:
            raise ConfigError(f"d_model must be a number of at least 1 if the input is embeddings; was {d_model}")
        return vocab_size or 0
    if d_model is not None:
        raise ConfigError('d_model is only for the input "embeddings"; leave it out for "token_ids"')
    if vocab_size is None:
        if tokenizer is None:
            raise VocabularyError("the number of token ids is not known: give vocab_size or a tokenizer")
        return tokenizer.largest_id + 1
    return vocab_size


def _check_module(reference: Reference) -> None:
    """Refuse a module that does not run, or whose output is not finite float32 (batch, seq, d_model)."""
    inputs, mask = reference.example()
    description, shape = reference.description, tuple(mask.shape)
    given = (
        f"vectors of {reference.width} numbers" if reference.width else f"token ids up to {reference.vocab_size - 1}"
    )
    try:
        with torch.inference_mode():
            rows = reference.module(inputs, mask)
    except Exception as error:  # the module's code may raise any exception
        raise UnsupportedModelError(
            f"{description} does not run on the CPU with {given} of shape {tuple(inputs.shape)} and a mask, bool "
            f"{shape}: {first_line(error)}"
        ) from error
    if not isinstance(rows, Tensor):
        raise UnsupportedModelError(f"{description} must return one tensor of hidden states; was {type(rows).__name__}")
    if rows.dtype != torch.float32 or rows.dim() != 3 or tuple(rows.shape[:2]) != shape:
        advice = ""
        if rows.dim() == 2 and len(rows) == shape[0]:
            advice = ". If it pools, return the hidden states before pooling, and give pooling= or --pooling"
        raise UnsupportedModelError(
            f"{description} must return hidden states, float32 ({shape[0]}, {shape[1]}, d_model) for a mask of shape "
            f"{shape}; was {str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}{advice}"
        )
    if reference.width not in (0, rows.shape[2]):
        raise UnsupportedModelError(
            f"{description} returns hidden states of {rows.shape[2]} numbers; d_model is {reference.width}"
        )
    if not bool(torch.isfinite(rows[mask == 1]).all()):
        raise UnsupportedModelError(f"{description} returns hidden states that are not finite")


@contextlib.contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode for a `with` block. Afterwards, restore the mode of each submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
