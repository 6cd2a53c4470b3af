"""Exports an encoder from an ONNX file, after checking and running the file."""

import dataclasses
from pathlib import Path
from typing import get_args

import onnx

from encserve_export.bundle import manifest, store
from encserve_export.bundle.space import digest_onnx, is_quantized
from encserve_export.bundle.write import Exported, Progress, Target, complete, show_progress
from encserve_export.check import agreement
from encserve_export.check.expected import read_expected
from encserve_export.core import names
from encserve_export.core.errors import ConfigError, UnsupportedModelError, VocabularyError
from encserve_export.core.precision import Precision
from encserve_export.kinds.spec import ModelSpec
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.models.reference import Reference
from encserve_export.onnx_graph import convert, external
from encserve_export.onnx_graph.interface import (
    Interface,
    Names,
    count_parameters,
    description,
    embedding_rows,
    find_interface,
    opset,
    precision_of,
    read_model,
    vector_width,
)
from encserve_export.onnx_graph.run import OnnxEncoder, check_file, check_range
from encserve_export.routes.reference import check_sizes
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    """The facts of a model that its ONNX file does not contain.

    Attributes:
        names: The names of the file's inputs and outputs.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        pad_token_id: The token id that pads a batch.
        vocab_size: The number of token ids. If it is None, the embedding table gives the number. Without such a
            table, the tokenizer gives the number.
        vector: How the vectors of a text are computed from its hidden states.
        tokenizer: The tokenizer. If it is None, the model takes token ids only.
        precision: The precision of the bundle; None for the precision of the file.
    """

    names: Names = dataclasses.field(default_factory=Names)
    max_sequence_tokens: int = DEFAULT_LONGEST
    pad_token_id: int = 0
    vocab_size: int | None = None
    vector: ModelSpec = dataclasses.field(default_factory=ModelSpec)
    tokenizer: TokenizerFile | None = None
    precision: Precision | None = None


def export_onnx(
    path: Path,
    target: Target,
    options: OnnxOptions | None = None,
    *,
    source: manifest.Source | None = None,
    reference: Reference | None = None,
    expect: Path | None = None,
    progress: Progress = show_progress,
) -> Exported:
    """Export an encoder from an ONNX file.

    The encoder maps ids and mask, int64 (batch, seq), to hidden states, float32 (batch, seq, d_model). An encoder may
    take vectors, float32 (batch, seq, width), instead of ids.

    Args:
        path: The file. If the weights are in other files, these files must be in the same folder.
        target: The destination of the bundle.
        options: The facts that the file does not contain.
        source: The origin of the model, for the manifest. None if the file itself is the origin. If `weights_sha256` or
            `model_digest` of the source is empty, this function computes the value from the file.
        reference: The PyTorch model that the file is compared with, or None.
        expect: A .npz or .safetensors file with outputs that the bundle must reproduce; see `check.expected`. If
            `source` is given, `expect` is ignored, because a source has its own expected outputs.
        progress: Called with a line of text before each step.

    Raises:
        ExportError: The export failed. No files are left. The subclass shows the cause.
    """
    options = options or OnnxOptions()
    expected = None if expect is None else read_expected(expect)
    progress("reading the file")
    model = read_model(path)
    interface = find_interface(model, options.names)
    rows, width = embedding_rows(model, interface.input_ids), vector_width(model, interface)
    apart = external.take_in(model, path.parent)
    source = source or manifest.Source(
        "onnx",
        description(model),
        vector=options.vector,
        tokenizer=options.tokenizer,
        expected=expected,
    )
    digest = "" if is_quantized(precision_of(model)) else source.model_digest
    source = dataclasses.replace(
        source,
        weights_sha256=source.weights_sha256 or sha256([path, *apart]),
        model_digest=digest or digest_onnx(model, interface),
    )
    with store.draft(target.model_repository, target.name, target.version, overwrite=target.overwrite) as folder:
        progress("copying and checking the file")
        files = external.write_model(model, path, apart, folder)
        model = onnx.load(files[0], load_external_data=False)  # the same model without its weights
        check_file(files[0])
        graph = _describe(model, interface, width)
        if reference is None:  # no PyTorch model is in memory, so there is room for the graph
            encoder = OnnxEncoder(files[0], graph)
        # The options are checked after the file, because no option can repair a faulty file.
        vocab_size = (options.vocab_size or 0) if width else _vocab_size(options, rows)
        longest = options.max_sequence_tokens
        check_sizes(
            vocab_size=vocab_size,
            width=width,
            pad_token_id=options.pad_token_id,
            max_sequence_tokens=longest,
            tokenizer=options.tokenizer,
        )
        sequences = agreement.random_sequences(longest, vocab_size=vocab_size, width=width)
        want = None
        if reference is not None:
            progress("running the model in PyTorch")
            exact = {graph.precision, options.precision or graph.precision} == {"float32"}
            want = agreement.reference_rows(reference, sequences, reference.module if exact else None)
            encoder = OnnxEncoder(files[0], graph)
        if options.precision not in (None, graph.precision):
            precision = _conversion(options.precision, graph.precision)
            progress(f"rounding the model to {precision}")
            want = want or agreement.reference_rows(encoder, sequences)
            del encoder
            model = convert.convert(
                files[0], graph, vocab_size=vocab_size, width=width, longest=longest, precision=precision
            )
            files = external.save_model(model, folder, apart=len(files) > 1)
            model = onnx.load(files[0], load_external_data=False)
            graph.precision = precision_of(model)
            if graph.precision != precision:
                raise UnsupportedModelError(f"nothing in this graph could be rounded to {precision}; export in float32")
            encoder = OnnxEncoder(files[0], graph)
        takes = f"the model takes vectors of {width} numbers" if width else f"there are {vocab_size} token ids"
        progress(f"the hidden states are the output {interface.output}; {takes}")
        progress(f"running the model with sequences of 1 to {longest} tokens")
        check_range(
            encoder,
            vocab_size=vocab_size,
            width=width,
            max_sequence_tokens=longest,
            pad_token_id=options.pad_token_id,
        )
        parity = agreement.check_rows(
            encoder,
            sequences,
            options.pad_token_id,
            want=want,
            precision=graph.precision,
            advice=_padding_advice(graph.precision),
        )
        progress("writing the bundle")
        shape = manifest_pb2.EncoderShape(
            d_model=encoder.d_model,
            vocab_size=vocab_size,
            max_sequence_tokens=longest,
            pad_token_id=options.pad_token_id,
        )
        described = manifest.Model(shape, graph, {"other": count_parameters(model)})
        del encoder, want  # `complete` opens another session to compare texts
        return complete(folder, target, described, source, parity, files)


def _conversion(asked: Precision | None, found: str) -> Precision:
    """Return the precision to convert to. Refuse a file that does not compute in float32."""
    if asked is None or asked == "float32" or found != "float32":
        raise ConfigError(
            f"the file computes in {found} and cannot be converted to {asked}: "
            + (f"give --precision {found}" if found in get_args(Precision) else "give the float32 file")
        )
    return asked


def _vocab_size(options: OnnxOptions, rows: int | None) -> int:
    """Return the number of token ids, from the option, the embedding table or the tokenizer, in this order."""
    vocab_size = options.vocab_size
    if vocab_size is not None:
        if rows is not None and vocab_size > rows:
            raise VocabularyError(
                f"vocab_size must be at most {rows}, the rows of the embedding table; was {vocab_size}"
            )
        return vocab_size
    if rows is not None:
        return rows
    if options.tokenizer is not None:
        return options.tokenizer.largest_id + 1
    raise VocabularyError(
        "the number of token ids is not known: the file has no table that input_ids indexes directly. Give "
        "--vocab-size or --tokenizer"
    )


def _padding_advice(precision: str) -> str:
    """Return advice for the error that padding changes the hidden states. The advice lists possible causes."""
    advice = (
        "possible causes: the model ignores its attention mask or a part of the mask; the model was exported for "
        "training (without model.eval())"
    )
    if precision != "float32":
        advice += f"; the model computes in {precision}, and rounding differs between batches: export it in float32"
    return advice


def _describe(model: onnx.ModelProto, interface: Interface, width: int) -> manifest_pb2.Graph:
    return manifest_pb2.Graph(
        file=names.FILE,
        opset=opset(model),
        input_ids_name="" if width else interface.input_ids,
        embeddings_name=interface.input_ids if width else "",
        attention_mask_name=interface.attention_mask,
        token_type_ids_name=interface.token_type_ids,
        output_name=interface.output,
        precision=precision_of(model),
    )
