"""Exports a state dict, or an encoder with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.check.expected import read_expected
from encserve_export.core.precision import Precision
from encserve_export.kinds.spec import spec_from_options
from encserve_export.models.own.config import EncoderConfig, Input
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.state_dict import Table, find_encoder, rename_tensors
from encserve_export.routes.encoder import export_encoder
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import read_checkpoint, read_table


def export_checkpoint(
    path: Path,
    target: Target,
    *,
    fields: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    embeddings: Path | None = None,
    tokenizer: TokenizerFile | None = None,
    layout: str | None = None,
    model_input: Input = "token_ids",
    max_sequence_tokens: int | None = None,
    precision: Precision = "float32",
    pooling: str | None = None,
    l2_normalize: bool = False,
    expect: Path | None = None,
    progress: Progress = show_progress,
) -> Exported:
    """Export a state dict in one of the layouts of `known_layouts`. A layout is a naming scheme of weights.

    Args:
        path: The file: safetensors, or a pickle of tensors.
        target: The destination of the bundle.
        fields: Fields of EncoderConfig that the weights do not show. If some fields are missing, the error lists these
            fields.
        rename: Parts of weight names in the file, and the new text for each part; see `state_dict.rename_tensors`.
        embeddings: The file of the token embedding table, if `path` has none.
        tokenizer: The tokenizer; without a tokenizer, the model takes token ids only.
        layout: The layout's name; None to detect the layout.
        model_input: The model's input, "token_ids" or "embeddings". "embeddings" needs no embedding table.
        max_sequence_tokens: The longest sequence to serve, in tokens. The default is 512, or the length of the position
            table if that is shorter.
        precision: The precision of the bundle.
        pooling: The pooling that the model was trained with, one of `POOLINGS`. If it is None, each caller of the
            server chooses a pooling.
        l2_normalize: Whether pooled vectors are scaled to length 1.
        expect: A .npz or .safetensors file with outputs of your own module, which the bundle must reproduce; see
            `check.expected`. Without this file, a wrong value in `fields` may remain undetected.
        progress: Called with a line of text before each step.

    Raises:
        ExportError: The export failed, and left no files. The subclass shows the cause.
    """
    vector = spec_from_options(pooling, l2_normalize=l2_normalize)
    expected = None if expect is None else read_expected(expect)
    progress(f"reading {path.name}")
    weights = read_checkpoint(path, embeddings)
    tensors = rename_tensors(weights.tensors, rename or {})
    table = None if embeddings is None else Table(*read_table(embeddings))
    found = find_encoder(
        tensors,
        fields or {},
        embeddings=table,
        layout=layout,
        model_input=model_input,
        max_sequence_tokens=max_sequence_tokens,
    )
    for remark in (f"the layout is {found.layout}", *found.remarks):
        progress(remark)
    if table is not None:
        tensors[table.name] = table.values
    source = Source(
        "checkpoint",
        found.layout,
        weights.sha256,
        vector,
        tokenizer,
        model_digest=digest_model(tensors, found.encoder.config),
        expected=expected,
    )
    del weights, tensors, table  # the encoder has copies of the weights that it needs
    return export_encoder(found.encoder, source, target, precision=precision, progress=progress)


def export_init(
    config: EncoderConfig,
    seed: int,
    target: Target,
    *,
    tokenizer: TokenizerFile | None = None,
    precision: Precision = "float32",
    pooling: str | None = None,
    l2_normalize: bool = False,
    progress: Progress = show_progress,
) -> Exported:
    """Export an encoder with random weights.

    Args:
        config: The encoder's sizes and settings.
        seed: The seed of the weights.
        target: The destination of the bundle.
        tokenizer: The tokenizer; without a tokenizer, the model takes token ids only.
        precision: The precision of the bundle.
        pooling: The pooling of the model's vectors, one of `POOLINGS`. If it is None, each caller of the server chooses
            a pooling.
        l2_normalize: Whether pooled vectors are scaled to length 1.
        progress: Called with a line of text before each step.

    Raises:
        ExportError: The export failed, and left no files. The subclass shows the cause.
    """
    vector = spec_from_options(pooling, l2_normalize=l2_normalize)
    progress("creating random weights")
    source = Source("init", f"random weights, seed {seed}", vector=vector, tokenizer=tokenizer)
    return export_encoder(random_encoder(config, seed), source, target, precision=precision, progress=progress)
