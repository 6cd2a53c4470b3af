"""Exports the project's own encoder, with weights from any source."""

import dataclasses

from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_encoder
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.core.precision import Precision
from encserve_export.models.own.encoder import Encoder
from encserve_export.models.own.reference import encoder_reference
from encserve_export.routes.reference import export_reference


def export_encoder(
    encoder: Encoder,
    source: Source,
    target: Target,
    *,
    precision: Precision = "float32",
    progress: Progress = show_progress,
) -> Exported:
    """Write the graph of an encoder, compare the graph with the encoder, and write the bundle.

    Args:
        encoder: The encoder, in float32.
        source: The origin of the encoder, for the manifest.
        target: The destination of the bundle.
        precision: The precision of the bundle.
        progress: Called with a line of text before each step.

    Raises:
        TokenizerError: The tokenizer has ids that the encoder does not have. Or the encoder takes embeddings, so it
            cannot have a tokenizer.
        ParityError: The graph's outputs differ from the encoder's outputs by more than the precision allows.
        BundleError: The bundle cannot be written. The subclass shows the cause.
    """
    source = dataclasses.replace(source, model_digest=source.model_digest or digest_encoder(encoder))
    return export_reference(
        encoder_reference(encoder),
        source,
        target,
        max_sequence_tokens=encoder.config.max_sequence_tokens,
        precision=precision,
        progress=progress,
    )
