"""The export of our own encoder, wherever its weights come from."""

import dataclasses

from encserve_export.bundle import manifest, store
from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import digest_encoder
from encserve_export.bundle.write import Exported, Progress, Target, complete, show_progress
from encserve_export.check import agreement
from encserve_export.ground.errors import TokenizerError
from encserve_export.ground.precision import Precision
from encserve_export.models.own import trace
from encserve_export.models.own.encoder import Encoder


def export_encoder(
    encoder: Encoder,
    source: Source,
    target: Target,
    *,
    precision: Precision = "float32",
    progress: Progress = show_progress,
) -> Exported:
    """Traces an encoder, compares the graph with it, and writes the bundle.

    Args:
        encoder: The encoder, in float32.
        source: Where it comes from.
        target: Where the bundle goes.
        precision: What the bundle computes in.
        progress: Called with what is being done.

    Raises:
        TokenizerError: The tokenizer gives ids that the encoder does not have, or the encoder takes embeddings.
        ParityError: ONNX Runtime does not reproduce the encoder, or not well enough in this precision.
        BundleError: One of its kinds: the bundle cannot be written.
    """
    if source.tokenizer is not None:
        if encoder.config.input == "embeddings":
            raise TokenizerError("a tokenizer gives token ids, but this model's input is embeddings; leave it out")
        source.tokenizer.check_fits(encoder.config.vocab_size)
    with store.draft(target.model_repository, target.name, target.version, overwrite=target.overwrite) as folder:
        progress("tracing the graph")
        graphs = trace.write_graphs(encoder, folder, precision)
        progress("comparing ONNX Runtime with PyTorch")
        parity = agreement.check_parity(encoder, graphs.files[0], precision)
        agreement.check_inspection(encoder, graphs)
        progress("writing the bundle")
        source = dataclasses.replace(source, model_digest=source.model_digest or digest_encoder(encoder))
        return complete(folder, target, manifest.describe(encoder, graphs), source, parity, graphs.files)
