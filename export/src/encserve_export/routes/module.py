"""The export of a PyTorch module of the caller's own, traced as it is and compared with itself."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from encserve_export.bundle import store
from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.check import agreement
from encserve_export.ground import names
from encserve_export.ground.arrays import Input as Inputs
from encserve_export.ground.arrays import Mask, Rows
from encserve_export.ground.errors import (
    ConfigError,
    UnsupportedModelError,
    VocabularyError,
    first_line,
)
from encserve_export.ground.precision import Precision
from encserve_export.kinds.recipe import pooled
from encserve_export.models.module import example, refuse_control_flow, write_module
from encserve_export.models.own.config import Input
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.onnx_graph.foreign import Names
from encserve_export.routes.onnx import OnnxOptions, check_options, export_onnx, export_traced
from encserve_export.source.tokenizer import TokenizerFile

_INPUT_NAMES: Mapping[Input, str] = {"token_ids": names.INPUT_IDS, "embeddings": names.EMBEDDINGS}


class _Rows(nn.Module):
    """A module of the caller's with the mask of a bundle: int64 (batch, seq), 1 for a token."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        """Rows, float32 (batch, seq, d_model)."""
        rows: Tensor = self.module(inputs, attention_mask == 1)
        return rows


@dataclasses.dataclass(frozen=True)
class OwnModule:
    """A module of the caller's as the reference of its own graph.

    Attributes:
        module: Inputs and mask, int64 (batch, seq) -> rows, float32 (batch, seq, d_model).
        description: The name of its class.
        vocab_size: One more than the largest token id; 0 where it takes vectors.
        width: The numbers of a vector; 0 where it takes ids.
    """

    module: nn.Module
    description: str
    vocab_size: int
    width: int

    def __call__(self, inputs: Inputs, mask: Mask) -> Rows:
        """Runs one batch in PyTorch: ids or vectors and their mask, int64 (batch, seq) -> (batch, seq, d_model)."""
        given = torch.from_numpy(inputs)
        if given.is_floating_point():  # as the module's numbers are, which may be float64
            given = given.to(next((it.dtype for it in self.module.parameters()), given.dtype))
        try:
            with torch.inference_mode():
                rows: Rows = self.module(given, torch.from_numpy(mask)).numpy()
        except Exception as error:  # whatever a module of somebody else's raises
            raise UnsupportedModelError(
                f"{self.description} does not run with inputs of shape {tuple(inputs.shape)}: {first_line(error)}"
            ) from error
        return rows


def export_module(
    module: nn.Module,
    target: Target,
    *,
    configuration: Mapping[str, Any],
    input: Input = "token_ids",  # noqa: A002 - what `checkpoint --input` calls it
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
    """Exports any PyTorch module that turns a padded batch into rows.

    PyTorch writes the module as ONNX as it is, and the graph is compared with the module. Such a bundle cannot be
    inspected.

    Args:
        module: Called with ids, int64 (batch, seq), or vectors, float32 (batch, seq, d_model), and a mask, bool
            (batch, seq), True for a token; returns rows, float32 (batch, seq, d_model). It must be on the CPU. It runs
            in eval mode, and is left in the mode it was in.
        target: Where the bundle goes.
        configuration: What identifies the model beside its `state_dict()`, in the terms of JSON: whatever tells it from
            another model with the same weights, such as {"activation": "gelu", "norm_first": true}.
        input: What the module takes, "token_ids" or "embeddings".
        vocab_size: One more than the largest token id; by default what the tokenizer can give. Not for embeddings.
        d_model: The width of the vectors, and of the rows. For embeddings alone.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        pad_token_id: The id that fills a padded batch.
        tokenizer: What turns text into ids; without one the model takes token ids only.
        pooling: One of `POOLINGS`, how the model was trained to make one vector; None where callers are to say it.
        l2_normalize: Whether that vector is scaled to length 1.
        precision: What the bundle computes in.
        progress: Called with what is being done.

    Raises:
        UnsupportedModelError: The module does not run, gives something else than rows, or PyTorch cannot export it: the
            text has PyTorch's reason, such as control flow that depends on the numbers in a tensor.
        ParityError: ONNX Runtime does not reproduce the module, or padding changes its rows.
        ExportError: Another of its kinds, by cause. Nothing is left on the disk.
    """
    _check_configuration(configuration)
    options = OnnxOptions(
        names=Names(input_ids=_input_name(input)),
        max_sequence_tokens=max_sequence_tokens,
        pad_token_id=pad_token_id,
        vocab_size=vocab_size,
        vector=pooled(pooling, l2_normalize=l2_normalize),
        tokenizer=tokenizer,
        precision=precision,
    )
    store.check_target(target.model_repository, target.name, target.version, overwrite=target.overwrite)
    vocab_size = _check_sizes(options, d_model)
    with _in_eval_mode(module):
        model = OwnModule(_Rows(module).eval(), type(module).__name__, vocab_size, d_model or 0)
        batch = example(lambda length: _draw(model, length))
        progress(f"running {model.description}")
        _check_module(model, batch)
        agreement.check_padding(
            model,
            longest=options.max_sequence_tokens,
            pad_token_id=options.pad_token_id,
            advice="Where the mask is False, no token may be attended to",
            width=model.width,
        )
        refuse_control_flow(model.module, batch, model.description)
        source = Source(
            "module",
            model.description,
            vector=options.vector,
            tokenizer=tokenizer,
            model_digest=digest_model(
                {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}, configuration
            ),
        )
        return export_traced(
            lambda exporter, path: write_module(
                model.module, batch, options.names.input_ids, exporter, path, model.description
            ),
            lambda path: export_onnx(path, target, options, source=source, reference=model, progress=progress),
            target,
            model.description,
            progress,
        )


def _input_name(given: Input) -> str:
    if given not in get_args(Input):
        raise ConfigError(f"input must be one of {', '.join(get_args(Input))}; was {given!r}")
    return _INPUT_NAMES[given]


def _check_configuration(configuration: Mapping[str, Any]) -> None:
    try:
        json.dumps(configuration, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"configuration must be JSON, it identifies the model: {error}") from error
    if not isinstance(configuration, dict):
        raise ConfigError(f"configuration must be a dict; was {type(configuration).__name__}")


def _check_sizes(options: OnnxOptions, d_model: int | None) -> int:
    """How many token ids there are; 0 where the module takes vectors."""
    if options.names.input_ids == names.EMBEDDINGS:
        if d_model is None or d_model < 1:
            raise ConfigError(f"d_model must be given where the input is embeddings, and be at least 1; was {d_model}")
        check_options(options, 0, d_model)
        return 0
    if d_model is not None:
        raise ConfigError("d_model is of vectors; leave it out where the input is token_ids")
    tokenizer, vocab_size = options.tokenizer, options.vocab_size
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.largest_id + 1
    if vocab_size is None or vocab_size < 1:
        raise VocabularyError(f"vocab_size must be given, or a tokenizer, and be at least 1; was {vocab_size}")
    check_options(options, vocab_size, 0)
    return vocab_size


def _draw(model: OwnModule, length: int) -> Tensor:
    """So many ids, the largest among them, or vectors (length, width); always the same."""
    if model.width:
        return torch.randn((length, model.width), generator=torch.Generator().manual_seed(0))
    return (model.vocab_size - 1 - torch.arange(length)) % model.vocab_size


def _check_module(model: OwnModule, batch: tuple[Tensor, Tensor]) -> None:
    """Refuses a module that does not run, or gives something else than rows."""
    inputs, mask = batch
    description, shape = model.description, tuple(mask.shape)
    given = f"vectors of {model.width} numbers" if model.width else f"token ids up to {model.vocab_size - 1}"
    try:
        with torch.inference_mode():
            made = model.module(inputs, mask)
    except Exception as error:  # whatever a module of somebody else's raises
        raise UnsupportedModelError(
            f"{description} does not run on the CPU with {given} of shape {tuple(inputs.shape)} and a mask, bool "
            f"{shape}: {first_line(error)}"
        ) from error
    if not isinstance(made, Tensor):
        raise UnsupportedModelError(f"{description} must return one tensor of rows; was {type(made).__name__}")
    if made.dtype != torch.float32 or made.dim() != 3 or tuple(made.shape[:2]) != shape:
        advice = ""
        if made.dim() == 2 and len(made) == shape[0]:
            advice = ". If it pools, return the rows before pooling, and give the pooling with pooling= or --pooling"
        raise UnsupportedModelError(
            f"{description} must return rows, float32 ({shape[0]}, {shape[1]}, d_model) for a mask of shape {shape}; "
            f"was {str(made.dtype).removeprefix('torch.')} {tuple(made.shape)}{advice}"
        )
    if model.width not in (0, made.shape[2]):
        raise UnsupportedModelError(f"{description} gives rows of {made.shape[2]} numbers; d_model is {model.width}")
    if not bool(torch.isfinite(made[mask == 1]).all()):
        raise UnsupportedModelError(f"{description} gives rows that are not finite")


@contextlib.contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module into eval mode, and each of its parts back into the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
