"""The export of an encoder that comes as ONNX: checked, run, and put into a bundle."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx

from encserve_export.bundle import manifest, store
from encserve_export.bundle.space import digest_onnx, is_quantized
from encserve_export.bundle.write import Exported, Progress, Target, complete, show_progress
from encserve_export.check import agreement
from encserve_export.check.expected import read_expected
from encserve_export.ground import names
from encserve_export.ground.errors import (
    ConfigError,
    ExportError,
    OnnxModelError,
    ParityError,
    TokenizerError,
    UnsupportedModelError,
    VocabularyError,
)
from encserve_export.ground.precision import Precision
from encserve_export.kinds.spec import ModelSpec
from encserve_export.models.module import EXPORTERS, Exporter
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.onnx_graph import convert, external, foreign
from encserve_export.onnx_graph.foreign import Interface, Names
from encserve_export.onnx_graph.run import Runner, check_file
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    """What an ONNX file does not tell of its model.

    Attributes:
        names: What its inputs and outputs are called.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        pad_token_id: The id that fills a padded batch.
        vocab_size: One more than the largest token id; None for what the embedding table or the tokenizer says.
        vector: How the model was trained to make one vector of a sequence.
        tokenizer: What turns text into ids; without one the model takes token ids only.
        precision: What the bundle computes in; None for what the file computes in.
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
    reference: agreement.Reference | None = None,
    expect: Path | None = None,
    progress: Progress = show_progress,
) -> Exported:
    """Exports an encoder from an ONNX file: ids and mask, int64 (batch, seq) -> rows, float32 (batch, seq, d_model).

    In place of ids it may take vectors, float32 (batch, seq, width).

    Args:
        path: The file. Weights in other files must lie in its folder.
        target: Where the bundle goes.
        options: What the file does not tell.
        source: What the manifest is to say of where the model comes from; by default that it came as this file, which
            is also what is hashed where it names no weights, or has no digest of a model that `reference` is.
        reference: What its rows must be, in PyTorch; None where there is nothing to compare with.
        expect: A .npz or .safetensors file of rows that the bundle must give, see `check.expected`; where `source` is
            given, its own counts.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    options = options or OnnxOptions()
    expected = None if expect is None else read_expected(expect)
    progress("reading the file")
    model = foreign.read_model(path)
    interface = foreign.find_interface(model, options.names)
    rows = foreign.embedding_rows(model, interface.input_ids)
    apart = external.take_in(model, path.parent)
    weights = sha256([path, *apart])
    width = foreign.vector_width(model, interface)
    digest = "" if source is None or is_quantized(foreign.precision(model)) else source.model_digest
    digest = digest or digest_onnx(model, interface)
    with store.draft(target.model_repository, target.name, target.version, overwrite=target.overwrite) as folder:
        progress("copying and checking the file")
        files = external.write_model(model, path, apart, folder)
        model = onnx.load(files[0], load_external_data=False)  # the same without the weights
        check_file(files[0])
        wanted = None
        if reference is not None:  # before ONNX Runtime needs memory too
            progress("running the model in PyTorch")
            wanted = agreement.reference_rows(
                reference,
                vocab_size=0 if width else _vocab_size(options, rows),
                max_sequence_tokens=options.max_sequence_tokens,
                module=reference.module if _is_exact(foreign.precision(model), options) else None,
                width=width,
            )
        runner = Runner(model, files[0], interface)
        # Only now: where the file itself is at fault, an option would not help.
        vocab_size = 0 if width else _vocab_size(options, rows)
        check_options(options, vocab_size, width)
        if options.precision not in (None, "float32"):
            progress(f"rounding it to {options.precision}")
            longest = options.max_sequence_tokens
            wanted = wanted or agreement.reference_rows(
                runner, vocab_size=vocab_size, max_sequence_tokens=longest, width=width
            )
            del runner  # the memory of its weights
            model = convert.convert(files[0], interface, vocab_size, options.max_sequence_tokens, options.precision)
            files = external.save_model(model, folder, apart=len(files) > 1)
            model = onnx.load(files[0], load_external_data=False)
            runner = Runner(model, files[0], interface)
        takes = f"it takes vectors of {width} numbers" if width else f"there are {vocab_size} token ids"
        progress(f"the rows are its output {interface.output}; {takes}")
        progress(f"running it, with 1 to {options.max_sequence_tokens} tokens")
        runner.check_ends(vocab_size, options.max_sequence_tokens, options.pad_token_id)
        if reference is not None:
            progress("comparing ONNX Runtime with PyTorch")
        parity = _check_rows(runner, options, vocab_size, width, foreign.precision(model), wanted)
        progress("writing the bundle")
        source = source or manifest.Source(
            "onnx",
            foreign.description(model),
            vector=options.vector,
            tokenizer=options.tokenizer,
            expected=expected,
        )
        source = dataclasses.replace(source, weights_sha256=source.weights_sha256 or weights, model_digest=digest)
        described = _describe(model, interface, options, vocab_size, runner.d_model)
        del runner, wanted  # the comparison of texts opens a session of its own
        return complete(folder, target, described, source, parity, files)


def export_traced(
    write: Callable[[Exporter, Path], None],
    export: Callable[[Path], Exported],
    target: Target,
    description: str,
    progress: Progress,
) -> Exported:
    """Exports a module by the first of PyTorch's exporters whose graph gives the module's rows.

    Args:
        write: Has PyTorch write the module into a file.
        export: Exports that file.
        target: Where the bundle goes. The file lies beside it, where there has to be room for the model anyway.
        description: What the module is called.
        progress: Called with what is being done.

    Raises:
        ExportError: What each exporter was refused for; of the kind of the first whose graph was written.
    """
    refused: list[ExportError] = []
    for exporter in EXPORTERS:
        progress(f"having PyTorch write {description} as ONNX ({exporter})")
        try:
            with store.scratch(target.model_repository, target.name) as folder:
                path = folder / names.FILE
                write(exporter, path)
                return export(path)
        except (UnsupportedModelError, OnnxModelError, ParityError) as error:
            progress(str(error))
            refused.append(type(error)(str(error)))  # without the frames, which hold the models of this attempt
    kinds = [type(it) for it in refused if not isinstance(it, UnsupportedModelError)]
    raise [*kinds, UnsupportedModelError][0]("; ".join(dict.fromkeys(map(str, refused))))


def _vocab_size(options: OnnxOptions, rows: int | None) -> int:
    """How many token ids the model has: what was asked for, its table's rows, or what the tokenizer can give."""
    tokenizer, wanted = options.tokenizer, options.vocab_size
    if wanted is not None and rows is not None and wanted > rows:
        raise VocabularyError(f"vocab_size must be at most {rows}, the rows of the embedding table; was {wanted}")
    if wanted is None:
        wanted = rows if rows is not None or tokenizer is None else tokenizer.largest_id + 1
    if wanted is None:
        raise VocabularyError(
            "nothing tells how many token ids the model has: no table in the file is looked up by input_ids directly. "
            "Give --vocab-size or --tokenizer"
        )
    if wanted < 1:
        raise VocabularyError(f"vocab_size must be at least 1; was {wanted}")
    if tokenizer is not None:
        tokenizer.check_fits(wanted)
    return wanted


def check_options(options: OnnxOptions, vocab_size: int, width: int) -> None:
    """Refuses options that are out of range, or do not go together.

    Args:
        options: The options.
        vocab_size: One more than the largest token id; 0 where the model takes vectors.
        width: The numbers of a vector; 0 where the model takes ids.

    Raises:
        ConfigError: One is; the text names the numbers.
        TokenizerError: There is a tokenizer for a model that takes vectors.
    """
    if options.max_sequence_tokens < 1:
        raise ConfigError(f"max_sequence_tokens must be at least 1; was {options.max_sequence_tokens}")
    if width:
        if options.tokenizer is not None:
            raise TokenizerError("a tokenizer gives token ids, but this model's input is embeddings; leave it out")
        if options.pad_token_id or options.vocab_size:
            raise ConfigError(
                "vocab_size and pad_token_id must be 0 where the input is embeddings; was "
                f"{options.vocab_size} and {options.pad_token_id}"
            )
    elif not 0 <= options.pad_token_id < vocab_size:
        raise ConfigError(f"pad_token_id must be from 0 to {vocab_size - 1}; was {options.pad_token_id}")
    vector = options.vector
    if vector.l2_normalize and vector.pooling == manifest_pb2.POOLING_UNSPECIFIED:
        raise ConfigError("l2_normalize is of pooled vectors; give the pooling too")


def _is_exact(precision: str, options: OnnxOptions) -> bool:
    """Whether the bundle computes in float32, and is judged by float64."""
    return {precision, options.precision or precision} == {"float32"}


def _check_rows(
    runner: Runner,
    options: OnnxOptions,
    vocab_size: int,
    width: int,
    precision: str,
    wanted: agreement.Wanted | None,
) -> agreement.Parity:
    advice = (
        "it ignores its attention mask in part or altogether, or was exported for training (without model.eval()), and "
        "batches would change its rows"
    )
    if precision != "float32":
        advice = f"{advice}; or it computes in {precision}, whose rounding differs with the batch: export it in float32"
    return agreement.check_rows(
        runner,
        vocab_size=vocab_size,
        max_sequence_tokens=options.max_sequence_tokens,
        pad_token_id=options.pad_token_id,
        wanted=wanted,
        precision=precision,
        advice=advice,
        width=width,
    )


def _describe(
    model: onnx.ModelProto, interface: Interface, options: OnnxOptions, vocab_size: int, d_model: int
) -> manifest.Model:
    width = foreign.vector_width(model, interface)
    # Of the rest of the shape nothing is known: 0 and empty.
    shape = manifest_pb2.EncoderShape(
        d_model=d_model,
        vocab_size=vocab_size,
        max_sequence_tokens=options.max_sequence_tokens,
        pad_token_id=options.pad_token_id,
    )
    described = manifest_pb2.Graph(
        file=names.FILE,
        opset=foreign.opset(model),
        input_ids_name="" if width else interface.input_ids,
        embeddings_name=interface.input_ids if width else "",
        attention_mask_name=interface.attention_mask,
        token_type_ids_name=interface.token_type_ids,
        output_name=interface.output,
        precision=foreign.precision(model),
    )
    return manifest.Model(shape, described, {"other": foreign.count_parameters(model)})
