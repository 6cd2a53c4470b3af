"""The export of a PyTorch module of the caller's own, traced as it is and compared with itself."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.store import check_target
from encserve_export.bundle.write import Exported, Progress, Target
from encserve_export.check import agreement
from encserve_export.ground import names
from encserve_export.ground.arrays import Input as Inputs
from encserve_export.ground.arrays import Mask, Rows
from encserve_export.ground.errors import (
    ConfigError,
    OnnxModelError,
    ParityError,
    UnsupportedModelError,
    VocabularyError,
    first_line,
)
from encserve_export.ground.precision import Precision
from encserve_export.kinds.recipe import pooled
from encserve_export.models.module import EXPORTERS, example, refuse_control_flow, write_module
from encserve_export.models.own.config import Input
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.onnx_graph.foreign import Names
from encserve_export.routes.onnx import OnnxOptions, check_options, export_onnx
from encserve_export.source.tokenizer import TokenizerFile

_PADDED_TOKENS = 32
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


class _Reference:
    """The module as what an ONNX file is compared with."""

    def __init__(self, module: _Rows) -> None:
        self.module: nn.Module = module

    def __call__(self, inputs: Inputs, mask: Mask, /) -> Rows:
        """Rows of arrays, in the type of the module's numbers."""
        given = torch.from_numpy(inputs)
        if given.is_floating_point():
            given = given.to(next((it.dtype for it in self.module.parameters()), given.dtype))
        with torch.inference_mode():
            rows: Rows = self.module(given, torch.from_numpy(mask)).numpy()
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
    progress: Progress = lambda _: None,
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
    check_target(target.model_repository, target.name, target.version, overwrite=target.overwrite)
    batch = _example(options, d_model)
    description = type(module).__name__
    with _in_eval_mode(module):
        rows = _Rows(module).eval()
        progress(f"running {description}")
        width = _check_module(rows, batch, description)
        if d_model is not None and width != d_model:
            raise UnsupportedModelError(f"{description} gives rows of {width} numbers; d_model is {d_model}")
        _refuse_padding(rows, batch, options, description)
        refuse_control_flow(rows, batch, description)
        tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        source = Source(
            "module",
            description,
            vector=options.vector,
            tokenizer=tokenizer,
            model_digest=digest_model(tensors, configuration),
        )
        return _export(rows, batch, description, source, target, options, progress)


def _export(
    rows: _Rows,
    batch: tuple[Tensor, Tensor],
    description: str,
    source: Source,
    target: Target,
    options: OnnxOptions,
    progress: Progress,
) -> Exported:
    """Takes the first of PyTorch's exporters whose graph gives the module's rows."""
    refused: list[str] = []
    for exporter in EXPORTERS:
        progress(f"having PyTorch write {description} as ONNX ({exporter})")
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, names.FILE)
                write_module(rows, batch, options.names.input_ids, exporter, path, description)
                return export_onnx(path, target, options, source=source, reference=_Reference(rows), progress=progress)
        except VocabularyError:
            raise
        except (UnsupportedModelError, OnnxModelError, ParityError) as error:
            progress(str(error))
            refused.append(str(error))
            kind = type(error)
    raise kind("; ".join(dict.fromkeys(refused)))


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


def _example(options: OnnxOptions, d_model: int | None) -> tuple[Tensor, Tensor]:
    """A batch to run and to write the graph with: ids or vectors, and their mask."""
    if options.names.input_ids == names.EMBEDDINGS:
        if d_model is None or d_model < 1:
            raise ConfigError(f"d_model must be given where the input is embeddings, and be at least 1; was {d_model}")
        check_options(options, 0, d_model)
        random = torch.Generator().manual_seed(0)
        return example(lambda length: torch.randn((length, d_model), generator=random))
    if d_model is not None:
        raise ConfigError("d_model is of vectors; leave it out where the input is token_ids")
    tokenizer, vocab_size = options.tokenizer, options.vocab_size
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.largest_id + 1
    if vocab_size is None or vocab_size < 1:
        raise VocabularyError(f"vocab_size must be given, or a tokenizer, and be at least 1; was {vocab_size}")
    check_options(options, vocab_size, 0)
    return example(lambda length: torch.arange(length) % vocab_size)


def _check_module(rows: _Rows, batch: tuple[Tensor, Tensor], description: str) -> int:
    """Runs one batch; the width of its rows."""
    inputs, mask = batch
    shape = tuple(mask.shape)
    try:
        with torch.inference_mode():
            made = rows(inputs, mask)
    except Exception as error:  # whatever a module of somebody else's raises
        raise UnsupportedModelError(
            f"{description} does not run on the CPU with inputs of shape {tuple(inputs.shape)} and a mask, bool "
            f"{shape}: {first_line(error)}"
        ) from error
    if not isinstance(made, Tensor):
        raise UnsupportedModelError(f"{description} must return one tensor of rows; was {type(made).__name__}")
    if made.dtype != torch.float32 or made.dim() != 3 or tuple(made.shape[:2]) != shape:
        raise UnsupportedModelError(
            f"{description} must return rows, float32 ({shape[0]}, {shape[1]}, d_model) for a mask of shape {shape}; "
            f"was {str(made.dtype).removeprefix('torch.')} {tuple(made.shape)}"
        )
    if not np.isfinite(made.numpy()[mask.numpy() == 1]).all():
        raise UnsupportedModelError(f"{description} gives rows that are not finite")
    return int(made.shape[2])


def _refuse_padding(rows: _Rows, batch: tuple[Tensor, Tensor], options: OnnxOptions, description: str) -> None:
    """Refuses a module that gives other rows in a padded batch in PyTorch already."""
    inputs, _ = batch
    width = inputs.shape[2] if inputs.dim() == 3 else 0
    vocab_size, longest = int(inputs.max()) + 1, min(_PADDED_TOKENS, options.max_sequence_tokens)
    reference = _Reference(rows)
    try:
        agreement.check_rows(
            reference,
            vocab_size=vocab_size,
            max_sequence_tokens=longest,
            pad_token_id=options.pad_token_id,
            wanted=agreement.reference_rows(
                reference, vocab_size=vocab_size, max_sequence_tokens=longest, module=rows, width=width
            ),
            width=width,
        )
    except ParityError as error:
        raise ParityError(
            f"{description} gives other rows in a padded batch, in PyTorch already: {error}. Where the mask is False, "
            "no token may be attended to"
        ) from error


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
