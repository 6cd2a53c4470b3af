"""The export of a bare state dict, and of random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.check.expected import read_expected
from encserve_export.ground.precision import Precision
from encserve_export.kinds.spec import spec_from_options
from encserve_export.models.own.config import EncoderConfig, Input
from encserve_export.models.own.init import random_encoder
from encserve_export.models.own.state_dict import Table, find_encoder
from encserve_export.routes.encoder import export_encoder
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import read_checkpoint, read_table


def export_checkpoint(
    path: Path,
    target: Target,
    *,
    fields: Mapping[str, Any] | None = None,
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
    """Exports a bare state dict in one of the layouts of `known_layouts`.

    Args:
        path: The file: safetensors, or a pickle of tensors, bare or under one of the usual keys.
        target: Where the bundle goes.
        fields: Fields of EncoderConfig; what the weights do not tell has to be among them.
        embeddings: The file with the table of token embeddings, where `path` has none.
        tokenizer: What turns text into ids; without one the model takes token ids only.
        layout: The layout's name; without one it is recognised.
        model_input: What the model is to take; for "embeddings" no table of them is needed.
        max_sequence_tokens: The longest sequence to serve, in tokens; by default 512, or as far as a table reaches.
        precision: What the bundle computes in.
        pooling: One of `POOLINGS`, how the model was trained to make one vector; None where callers are to say it.
        l2_normalize: Whether that vector is scaled to length 1.
        expect: A .npz or .safetensors file of rows that the original module made, which the bundle must give: see
            `check.expected`. Without it nothing tells whether `fields` describe that module.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    vector = spec_from_options(pooling, l2_normalize=l2_normalize)
    expected = None if expect is None else read_expected(expect)
    progress("reading the weights")
    weights = read_checkpoint(path, embeddings)
    table = None if embeddings is None else Table(*read_table(embeddings))
    found = find_encoder(
        weights.tensors,
        fields or {},
        embeddings=table,
        layout=layout,
        model_input=model_input,
        max_sequence_tokens=max_sequence_tokens,
    )
    for remark in (f"the layout is {found.layout}", *found.remarks):
        progress(remark)
    tensors = weights.tensors if table is None else {**weights.tensors, table.name: table.values}
    digest = digest_model(tensors, found.encoder.config)
    source = Source(
        "checkpoint",
        found.layout,
        weights.sha256,
        vector,
        tokenizer,
        model_digest=digest,
        expected=expected,
    )
    del weights, tensors, table  # the encoder has what it needs of them
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
    """Exports an encoder with random weights.

    Args:
        config: The encoder's sizes and choices.
        seed: Fixes the weights.
        target: Where the bundle goes.
        tokenizer: What turns text into ids; without one the model takes token ids only.
        precision: What the bundle computes in.
        pooling: One of `POOLINGS`, how the model was trained to make one vector; None where callers are to say it.
        l2_normalize: Whether that vector is scaled to length 1.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    vector = spec_from_options(pooling, l2_normalize=l2_normalize)
    progress("making the weights")
    source = Source("init", f"random weights, seed {seed}", vector=vector, tokenizer=tokenizer)
    return export_encoder(random_encoder(config, seed), source, target, precision=precision, progress=progress)
