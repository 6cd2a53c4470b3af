"""Exports a PyTorch model as a bundle. The outputs of ONNX Runtime must agree with the outputs of PyTorch."""

import dataclasses
from pathlib import Path

from encserve_export.bundle import manifest, store
from encserve_export.bundle.manifest import Source
from encserve_export.bundle.write import Exported, Progress, Target, complete, show_progress
from encserve_export.check import agreement
from encserve_export.core.errors import (
    ConfigError,
    ExportError,
    OnnxModelError,
    OnnxRunError,
    ParityError,
    TokenizerError,
    UnsupportedModelError,
    VocabularyError,
)
from encserve_export.core.precision import Precision
from encserve_export.models.graphs import EXPORTERS, Exporter, Graphs, write_graphs
from encserve_export.models.reference import Reference
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2

_PADDING_ADVICE = (
    "A text's vector would depend on the other texts of its batch. If the module is yours, no token may attend to "
    "tokens with a mask of False. If not, choose another model"
)


def export_reference(
    reference: Reference,
    source: Source,
    target: Target,
    *,
    max_sequence_tokens: int,
    precision: Precision = "float32",
    progress: Progress = show_progress,
) -> Exported:
    """Exports a model with the first PyTorch exporter whose graph reproduces the model's outputs.

    Args:
        reference: The PyTorch model.
        source: The origin of the model, for the manifest.
        target: The destination of the bundle.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        precision: The precision of the bundle.
        progress: Called with a line of text before each step.

    Raises:
        ConfigError: A size is out of range; see `check_sizes`.
        VocabularyError: The model takes token ids, but its vocab_size is less than 1.
        TokenizerError: The tokenizer has ids that the model does not have. Or the model takes vectors, so it cannot
            have a tokenizer.
        ParityError: Padding changes the outputs, or every graph's outputs differ too much for this precision.
        UnsupportedModelError: No PyTorch exporter can write the model.
        BundleError: The bundle cannot be written. The subclass shows the cause.
    """
    check_sizes(
        vocab_size=reference.vocab_size,
        width=reference.width,
        pad_token_id=reference.pad_token_id,
        max_sequence_tokens=max_sequence_tokens,
        tokenizer=source.tokenizer,
    )
    with store.draft(target.model_repository, target.name, target.version, overwrite=target.overwrite) as folder:
        progress(f"running {reference.description} in PyTorch")
        agreement.check_padding(reference, max_sequence_tokens, _PADDING_ADVICE)
        sequences = agreement.random_sequences(
            max_sequence_tokens, vocab_size=reference.vocab_size, width=reference.width
        )
        module = reference.module if precision == "float32" else None
        want = agreement.reference_rows(reference, sequences, module)
        graphs, model, parity, remark = _write_first(reference, folder, want, max_sequence_tokens, precision, progress)
        progress("writing the bundle")
        if source.kind == "module":
            source = dataclasses.replace(source, weights_sha256=sha256(list(graphs.files)))
        exported = complete(folder, target, model, source, parity, graphs.files)
        exported = dataclasses.replace(exported, unused_parts=reference.unused_parts)
        return exported.with_notes({"inspection": remark})


def check_sizes(
    *, vocab_size: int, width: int, pad_token_id: int, max_sequence_tokens: int, tokenizer: TokenizerFile | None
) -> None:
    """Refuse sizes that are out of range, or that contradict each other.

    Args:
        vocab_size: The number of token ids; 0 for a model that takes vectors.
        width: The size of an input vector; 0 for a model that takes token ids.
        pad_token_id: The id that pads a batch; 0 for a model that takes vectors.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        tokenizer: The tokenizer, or None.

    Raises:
        ConfigError: A number is out of range, or a model that takes vectors has a vocab_size or pad_token_id.
        VocabularyError: The model takes token ids, and `vocab_size` is less than 1.
        TokenizerError: The tokenizer has ids that the model does not have. Or the model takes vectors, so it cannot
            have a tokenizer.
    """
    if max_sequence_tokens < 1:
        raise ConfigError(f"max_sequence_tokens must be at least 1; was {max_sequence_tokens}")
    if width:
        if tokenizer is not None:
            raise TokenizerError(
                "a tokenizer gives token ids, but this model's input is embeddings; leave the tokenizer out"
            )
        if vocab_size or pad_token_id:
            raise ConfigError(
                f"vocab_size and pad_token_id must be 0 if the input is embeddings; was {vocab_size} and {pad_token_id}"
            )
        return
    if vocab_size < 1:
        raise VocabularyError(f"vocab_size must be at least 1; was {vocab_size}")
    if tokenizer is not None:
        tokenizer.check_fits(vocab_size)
    if not 0 <= pad_token_id < vocab_size:
        raise ConfigError(f"pad_token_id must be from 0 to {vocab_size - 1}; was {pad_token_id}")


def _write_first(
    reference: Reference,
    folder: Path,
    want: agreement.ReferenceRows,
    max_sequence_tokens: int,
    precision: Precision,
    progress: Progress,
) -> tuple[Graphs, manifest.Model, agreement.Parity, str]:
    """Writes the graphs with the first exporter whose graphs pass all comparisons with PyTorch.

    Returns:
        The graphs, the model for the manifest, the measured parity, and a remark. The remark is empty if the bundle
        supports inspection, which returns hidden states and attention weights of all blocks.

    Raises:
        ExportError: Every exporter failed. The message has all reasons.
    """
    exporters = list(EXPORTERS)
    if reference.inspection is None:
        exporters.remove("tracing with inspection")
    failures: list[ExportError] = []
    while exporters:
        exporter = exporters.pop(0)
        progress(f"writing {reference.description} as ONNX with PyTorch ({exporter})")
        try:
            graphs = write_graphs(
                reference, folder, exporter, precision=precision, max_sequence_tokens=max_sequence_tokens
            )
            progress("comparing ONNX Runtime with PyTorch")
            try:
                model, parity = _check_rows(reference, graphs, folder, want, max_sequence_tokens)
            except (OnnxModelError, ParityError):
                if "tracing" in exporters:  # tracing without inspection would write the same graph
                    exporters.remove("tracing")
                raise
            if graphs.inspect_graph is not None:
                agreement.check_inspection(
                    folder, graphs.graph, graphs.inspect_graph, reference, longest=max_sequence_tokens
                )
        except (UnsupportedModelError, OnnxModelError, ParityError) as error:
            progress(str(error))
            failures.append(type(error)(str(error)))  # a traceback would keep this attempt's models in memory
            for path in folder.iterdir():
                path.unlink()
        else:
            return graphs, model, parity, _inspection_remark(reference, exporter, failures)
    kinds = [type(error) for error in failures if not isinstance(error, UnsupportedModelError)]
    raise [*kinds, UnsupportedModelError][0]("; ".join(dict.fromkeys(map(str, failures))))


def _inspection_remark(reference: Reference, exporter: Exporter, failures: list[ExportError]) -> str:
    if exporter == "tracing with inspection":
        return ""
    reason = (
        failures[0]
        if reference.inspection is not None
        else "the model does not return the hidden states and attention weights of all blocks"
    )
    return f"not possible: {reason}"


def _check_rows(
    reference: Reference, graphs: Graphs, folder: Path, want: agreement.ReferenceRows, max_sequence_tokens: int
) -> tuple[manifest.Model, agreement.Parity]:
    encoder = OnnxEncoder(folder, graphs.graph, half_types=reference.has_token_types)
    precision = graphs.graph.precision
    try:
        parity = agreement.check_rows(encoder, want.sequences, reference.pad_token_id, want=want, precision=precision)
    except OnnxRunError as error:
        if precision == "float32":
            raise
        raise ParityError(f"{error}, in {precision}. Export in float32 instead") from error
    shape = manifest_pb2.EncoderShape()
    shape.CopyFrom(reference.shape)
    shape.d_model = encoder.d_model
    shape.vocab_size = reference.vocab_size
    shape.max_sequence_tokens = max_sequence_tokens
    shape.pad_token_id = reference.pad_token_id
    parameters = reference.parameters or {"other": graphs.n_parameters}
    return manifest.Model(shape, graphs.graph, parameters, graphs.inspect_graph), parity
