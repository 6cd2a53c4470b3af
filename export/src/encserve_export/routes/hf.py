"""Exports a Hugging Face checkpoint as a bundle, a directory with an ONNX graph and a manifest.

There are three routes to a bundle. The first route loads the model with transformers. The second route takes the
directory's own ONNX file. The third route takes the table of a static embedding model.
"""

import dataclasses
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from encserve.hub import Snapshot
from encserve_export.bundle import manifest, store
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.check.expected import Expected, read_expected
from encserve_export.check.pipeline import LONGEST_BY_DEFAULT, PipelineCheck, prepare_comparison
from encserve_export.check.scores import ScoreCheck, prepare_scores
from encserve_export.core import names
from encserve_export.core.errors import (
    CheckpointFileError,
    ConfigError,
    OnnxModelError,
    ParityError,
    TokenizerError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.core.precision import Precision
from encserve_export.kinds.reading import read
from encserve_export.kinds.spec import NO_BOUND, ModelSpec, read_pooling
from encserve_export.kinds.static import write_graph
from encserve_export.models import pretrained
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.models.reference import Reference
from encserve_export.routes.onnx import OnnxOptions, export_onnx
from encserve_export.routes.reference import export_reference
from encserve_export.source.tokenizer import TokenizerFile, tokenizer_source, write_tokenizer
from encserve_export.source.weights import Weights, holds_weights, read_object, read_weights

# The routes in the order of preference. Static embedding models always use a third route.
Route = Literal["transformers", "onnx"]
ROUTES: tuple[Route, ...] = ("transformers", "onnx")
ONNX_FILE = Path("onnx", "model.onnx")
# An item of `unused_parts` in the report, with advice for the user.
_LANGUAGE_MODEL = (
    "the head of a language model. In a SPLADE model, this head computes the weights of words. To export a SPLADE "
    "model, run SparseEncoder(DIRECTORY).save_pretrained(OTHER) with sentence-transformers, and export OTHER"
)
_NOT_OF_ONE_MODEL = "config.json and the weights must belong to one model: download or save them again, together"
_CODE_OF_ITS_OWN = (
    "config.json names Python code (auto_map), and the exporter never runs such code. If the weights are for the model "
    f"in that code, {pretrained.OWN_ONNX}"
)
# The model types for which transformers reads position_embedding_type "rotary".
_READ_POSITION_TYPES = ("esm", "evolla")
# For other model types, transformers ignores position_embedding_type. The exporter reports an ignored value, except
# these values.
_KNOWN_POSITION_TYPES = ("absolute", "rope")


def export_hf(
    directory: Path,
    target: Target,
    *,
    max_sequence_tokens: int | None = None,
    precision: Precision = "float32",
    via: Route | None = None,
    pooling: str | None = None,
    ids_only: bool = False,
    ignore_head: bool = False,
    expect: Path | None = None,
    origin: Snapshot | None = None,
    progress: Progress = show_progress,
) -> Exported:
    """Export a checkpoint in the layout of Hugging Face.

    Args:
        directory: The folder with config.json and the weights. It may also contain a tokenizer and the files of
            sentence-transformers.
        target: The destination of the bundle.
        max_sequence_tokens: The longest sequence to serve, in tokens. It must not exceed the number of the model's
            positions. The default is the max_seq_length of sentence-transformers. Without a max_seq_length, the default
            is the smallest of the tokenizer's model_max_length, the number of positions, and LONGEST_BY_DEFAULT.
        precision: The precision of the bundle.
        via: The route, one of `ROUTES`. If it is None, transformers is tried first. If transformers cannot load
            the model, the directory's ONNX file is used.
        pooling: One of `POOLINGS`, for a directory that does not name its pooling.
        ids_only: Must be True for a directory without a tokenizer, and False for a directory with a tokenizer. A model
            without a tokenizer takes token ids only.
        ignore_head: Whether to export only the encoder of a classifier or a cross-encoder, without the head.
        expect: A .npz or .safetensors file with outputs that the bundle must reproduce; see `check.expected`.
        origin: The hub repository and revision of the directory, for the manifest; None for a local directory.
        progress: Called with a line of text before each step.

    Raises:
        ExportError: The export failed, and left no files. The subclass shows the cause.
    """
    if via not in (None, *ROUTES):
        raise ConfigError(f"via must be one of {', '.join(ROUTES)}; was {via!r}")
    expected = None if expect is None else read_expected(expect)
    progress("reading the directory")
    spec = read(directory, "" if origin is None else origin.repository, ignore_head=ignore_head)
    with store.temporary_folder() as folder:
        tokenizer, text = _make_tokenizer(spec, folder)
        if pooling is not None:
            if spec.kind == "scores":
                raise ConfigError(
                    f"{directory} is a cross-encoder or a classifier. Such a model computes scores, so leave out "
                    "--pooling. To export only the encoder with --pooling, give --ignore-head too"
                )
            if spec.pooling or spec.kind != "dense":
                raise ConfigError("the files of this checkpoint state its pooling; leave out --pooling")
            spec = dataclasses.replace(spec, pooling=read_pooling(pooling))
        settings = {} if spec.table is not None else _read_settings(spec.encoder)
        _check_side(spec)
        _check_ids_only(directory, tokenizer, ids_only=ids_only)
        if text:
            progress(text)
        pipeline: PipelineCheck | ScoreCheck
        if spec.kind == "scores":
            pipeline = prepare_scores(spec, asked=max_sequence_tokens, precision=precision, progress=progress)
        else:
            pipeline = prepare_comparison(
                spec, takes_text=tokenizer is not None, asked=max_sequence_tokens, progress=progress
            )
        # `prepare_comparison` has stored the outputs of the sentence-transformers model. Releasing this model makes
        # room for the weights of the graph.
        spec = dataclasses.replace(spec, loaded=None)
        gc.collect()  # the modules of the model refer to each other, so only the garbage collector frees them
        build = _Build(
            spec=spec,
            settings=settings,
            target=target,
            tokenizer=tokenizer,
            max_sequence_tokens=max_sequence_tokens,
            precision=precision,
            origin=origin,
            progress=progress,
            pipeline=pipeline,
            expected=expected,
        )
        exported = _export(build, via)
    # The encoder alone does not use the head of a language model, so `exported.unused_parts` lists this head. A SPLADE
    # bundle (a bundle with a mask_name) uses the head, so a SPLADE bundle has no unused parts.
    used = exported.unused_parts if exported.manifest.sparse.mask_name else spec.used_parts
    unused_parts = tuple(part for part in exported.unused_parts if part not in used)
    if _has_language_model(settings, spec) and set(unused_parts) - {"pooler"}:
        unused_parts += (_LANGUAGE_MODEL,)
    remark = "; ".join(it for it in (exported.notes.get("remark"), spec.remark, *_remarks(settings)) if it)
    return dataclasses.replace(exported, unused_parts=unused_parts).with_notes({"text": text, "remark": remark})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Build:
    """The values that every route needs to export a model."""

    spec: ModelSpec
    settings: Mapping[str, Any]  # the content of config.json; empty for a static embedding
    target: Target
    tokenizer: TokenizerFile | None
    max_sequence_tokens: int | None
    precision: Precision
    origin: Snapshot | None
    progress: Progress
    pipeline: PipelineCheck | ScoreCheck
    expected: Expected | None

    def source(self, route: str, description: str, weights: Weights | None) -> manifest.Source:
        """Return the origin of the model, for the manifest.

        `weights` are the weights of the graph, or of the PyTorch model that the graph is compared with. `weights` is
        None if the directory has no weights that transformers can load.
        """
        origin = {} if self.origin is None else {"repository": self.origin.repository, "revision": self.origin.revision}
        return manifest.Source(
            "hf",
            description,
            "" if weights is None or route == "onnx" else weights.sha256,
            self.spec,
            self.tokenizer,
            route,
            pipeline=self.pipeline,
            expected=self.expected,
            model_digest="" if weights is None else digest_model(weights.tensors, self.settings),
            **origin,
        )

    def longest(self, positions: int | None) -> tuple[int, str]:
        """Return the longest sequence to serve for a model with this many positions, and a remark for the user.

        A model without a limit has None for `positions`.
        """
        longest, remark = _longest(self.spec, positions, self.max_sequence_tokens)
        if remark:
            self.progress(remark)
        return longest, remark


def _export(build: _Build, via: Route | None) -> Exported:
    try:
        if build.spec.table is not None:
            return _export_static(build).with_notes({"route": "a table, without an encoder"})
        if via is None:
            return _export_by_default(build)
        try:
            exported = _export_onnx(build) if via == "onnx" else _export_transformers(build)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}. Without --via {via}, every route is tried") from error
        return exported.with_notes({"route": f"{ONNX_FILE if via == 'onnx' else via}, chosen by --via"})
    except (WeightNamesError, WeightShapeError) as error:
        advice = _CODE_OF_ITS_OWN if "auto_map" in build.settings else _NOT_OF_ONE_MODEL
        raise type(error)(f"{error}. {advice}") from error
    except WeightValueError as error:
        raise WeightValueError(f"{error}. Use an earlier checkpoint, or download this one again") from error


def _export_by_default(build: _Build) -> Exported:
    has_file = (build.spec.encoder / ONNX_FILE).is_file()
    if not holds_weights(build.spec.encoder) and has_file:
        reason = "the directory holds no weights for transformers"
        return _export_onnx(build).with_notes({"route": f"{ONNX_FILE}; {reason}"})
    try:
        return _export_transformers(build).with_notes({"route": "transformers"})
    except UnsupportedModelError as error:
        if not has_file:
            raise
        reason = f"the route transformers does not support this model: {error}"
        build.progress(reason)
    return _export_onnx(build).with_notes({"route": f"{ONNX_FILE}; {reason}"})


def _export_transformers(build: _Build) -> Exported:
    build.progress("reading the weights")
    weights = read_weights(build.spec.encoder)
    scores = build.spec.scores
    token_types = scores is not None and scores.token_types
    reference = pretrained.load_model(build.spec.encoder, weights, token_types=token_types)
    source = build.source("transformers", reference.description, weights)
    del weights  # the model keeps the tensors that it needs
    longest, remark = build.longest(reference.positions)
    try:
        exported = export_reference(
            reference,
            source,
            build.target,
            max_sequence_tokens=longest,
            precision=build.precision,
            progress=build.progress,
        )
    except (UnsupportedModelError, OnnxModelError, ParityError) as error:
        advice = _shorter_sequences(build.settings, longest)
        if not advice and not isinstance(error, ParityError):
            advice = pretrained.OWN_ONNX
        raise type(error)("; ".join(it for it in (str(error), advice) if it)) from error
    return exported.with_notes({"longest": remark})


def _shorter_sequences(settings: Mapping[str, Any], longest: int) -> str:
    """Return advice for a model that computes positions differently above a certain length, such as a longrope model.

    A graph can contain only one of the two computations. The advice is empty for other models. It is also empty if
    `longest` does not exceed the length at which the computation changes.
    """
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings", settings.get("original_max_position_embeddings"))
    if type(original) is not int or longest <= original:
        return ""
    return (
        f"the model computes the positions of a batch differently if one sequence has more than {original} tokens "
        f"(original_max_position_embeddings in config.json). Give --max-sequence-tokens {original} or less"
    )


def _export_onnx(build: _Build) -> Exported:
    """Export the directory's ONNX file. If the directory has weights, compare the file with the transformers model."""
    path = build.spec.encoder / ONNX_FILE
    if not path.is_file():
        raise UnsupportedModelError(f"there is no {ONNX_FILE} in {build.spec.encoder}")
    if build.spec.scores is not None:
        raise UnsupportedModelError(
            f"{ONNX_FILE} of a cross-encoder or a classifier computes logits instead of hidden states. Use --via "
            "transformers. Or give --ignore-head to export only the encoder"
        )
    tasks = build.spec.tasks.values()
    if any(task.HasField("expansion") and not task.expansion.attended for task in tasks):
        raise UnsupportedModelError(
            "this model adds tokens with an attention mask of 0 to each query, and needs the vectors of these tokens. "
            f"{ONNX_FILE} does not compute vectors of such tokens; use --via transformers"
        )
    reference: Reference | None = None
    weights: Weights | None = None
    if holds_weights(build.spec.encoder):
        try:
            weights = read_weights(build.spec.encoder)
            reference = pretrained.load_model(build.spec.encoder, weights)
        except UnsupportedModelError as error:
            build.progress(f"no comparison with PyTorch: {error}")
            weights = None
    else:
        build.progress("no comparison with PyTorch: the directory has no weights")
    source = build.source("onnx", str(ONNX_FILE), weights)
    del weights  # the reference keeps the tensors that it needs
    return _export_file(path, build, source, reference)


def _export_static(build: _Build) -> Exported:
    table = build.spec.table
    assert table is not None  # noqa: S101
    source = build.source("static", "StaticEmbedding", read_weights(build.spec.encoder))
    with store.scratch(build.target.model_repository, build.target.name) as folder:
        path = folder / names.FILE
        write_graph(table, path)
        return _export_file(path, build, source, None, vocab_size=len(table))


def _export_file(
    path: Path, build: _Build, source: manifest.Source, reference: Reference | None, vocab_size: int | None = None
) -> Exported:
    if reference is not None:
        positions, pad_token_id, vocab_size = reference.positions, reference.pad_token_id, reference.vocab_size
    else:
        positions = pretrained.read_positions(build.spec.encoder) if build.settings else None
        pad_token_id = _number(build.settings, "pad_token_id") or 0
        vocab_size = vocab_size or _number(build.settings, "vocab_size")
    longest, remark = build.longest(positions)
    options = OnnxOptions(
        max_sequence_tokens=longest,
        pad_token_id=pad_token_id,
        vocab_size=vocab_size,
        vector=build.spec,
        tokenizer=build.tokenizer,
        precision=build.precision,
    )
    exported = export_onnx(path, build.target, options, source=source, reference=reference, progress=build.progress)
    unused_parts = () if reference is None else reference.unused_parts
    return dataclasses.replace(exported, unused_parts=unused_parts).with_notes({"longest": remark})


def _number(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return value if type(value) is int else None


def _remarks(settings: Mapping[str, Any]) -> list[str]:
    """Return remarks about fields of config.json that transformers ignores for this model_type."""
    model_type, positions = settings.get("model_type"), settings.get("position_embedding_type")
    found = []
    if "auto_map" in settings:
        found.append(
            "the code that config.json names (auto_map) was not run: the model was loaded with transformers' code for "
            f"model_type {model_type}"
        )
    if positions not in (None, *_KNOWN_POSITION_TYPES) and model_type not in _READ_POSITION_TYPES:
        found.append(
            f"config.json has position_embedding_type {positions!r}, but transformers ignores it for model_type "
            f"{model_type}. If the model was trained with {positions!r}, {pretrained.OWN_ONNX}"
        )
    return found


def _has_language_model(settings: Mapping[str, Any], vector: ModelSpec) -> bool:
    """Return whether the directory has a masked language model without pooling, multi-vector or sparse settings.

    Many SPLADE models are saved as such a directory.
    """
    named = any(str(it).endswith("ForMaskedLM") for it in settings.get("architectures") or ())
    return named and not (vector.pooling or vector.multi_vector or vector.sparse)


def _check_ids_only(directory: Path, tokenizer: TokenizerFile | None, *, ids_only: bool) -> None:
    if tokenizer is not None and ids_only:
        raise ConfigError(
            f"--ids-only is for a directory without a tokenizer, but {directory} has a tokenizer. Without --ids-only "
            "the model takes text and token ids"
        )
    if tokenizer is None and not ids_only:
        raise TokenizerError(
            f"{directory} has no {manifest.TOKENIZER_FILE}, and no older tokenizer file. Add the tokenizer that the "
            "model was trained with. Or give --ids-only; the model then takes token ids only"
        )


def _check_side(spec: ModelSpec) -> None:
    """Refuse a tokenizer that cuts long texts at their beginning."""
    if spec.table is None:
        side = getattr(spec.tokenizer, "truncation_side", "right")
    else:
        side = (spec.tokenizer.truncation or {}).get("direction", "right")
    if side.lower() != "right":
        raise UnsupportedModelError(
            f"{spec.encoder}: its tokenizer cuts long texts at their beginning (truncation_side {side!r}), which a "
            'bundle cannot express. Write "truncation_side": "right" into tokenizer_config.json. Callers must then '
            "shorten long texts themselves, and send only the end"
        )


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointFileError(
            f"{path} is missing: this is not a directory of transformers or sentence-transformers. For a state dict, "
            "use `encserve-export checkpoint`. For an ONNX file, use `encserve-export onnx`"
        )
    return read_object(path)


def _make_tokenizer(spec: ModelSpec, folder: Path) -> tuple[TokenizerFile | None, str]:
    """Write the tokenizer into a folder. Without a tokenizer, return None and a message for the user."""
    if spec.tokenizer is None:
        return None, f"no {manifest.TOKENIZER_FILE}: the model will take token ids only"
    return write_tokenizer(
        spec.tokenizer,
        folder / manifest.TOKENIZER_FILE,
        made_of=tokenizer_source(spec.encoder),
        add_special_tokens=spec.template is None and spec.kind != "static",
    ), ""


def _longest(spec: ModelSpec, positions: int | None, asked: int | None) -> tuple[int, str]:
    """Return the longest sequence to serve for a model with this many positions, and a remark for the user.

    A model without a limit has None for `positions`.
    """
    if positions is not None and asked is not None and asked > positions:
        raise ConfigError(f"max_sequence_tokens must be at most {positions} for this model; was {asked}")
    usual = spec.max_seq_length
    known = [length for length in (positions, _model_max_length(spec.encoder)) if length is not None]
    bound = min(known, default=DEFAULT_LONGEST)
    if usual is None and asked is None and bound > LONGEST_BY_DEFAULT:
        return LONGEST_BY_DEFAULT, (
            f"max_sequence_tokens is {LONGEST_BY_DEFAULT}; the checkpoint allows {bound}. --max-sequence-tokens "
            "sets a larger limit. Memory grows with the square of the limit"
        )
    if usual is None and positions is not None and bound < positions:
        return longest_sequence(positions, bound, asked, "model_max_length")
    return longest_sequence(bound if usual is None else positions or usual, usual, asked)


def _model_max_length(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    length = read_object(path).get("model_max_length") if path.is_file() else None
    return length if type(length) is int and 0 < length < NO_BOUND else None


def longest_sequence(
    positions: int, usual: int | None, asked: int | None, field: str = "max_seq_length"
) -> tuple[int, str]:
    """Return the longest sequence to serve, in tokens, and a remark.

    The remark is empty if all known lengths are equal.

    Args:
        positions: The number of positions that the model has.
        usual: The length to which sentence-transformers cuts texts; None if no file has such a length.
        asked: The user's `max_sequence_tokens`, or None.
        field: The name of the checkpoint's field that contains `usual`.
    """
    longest = min(positions, usual or positions) if asked is None else asked
    if usual is None or longest == usual == positions:
        return longest, ""
    remark = (
        f"max_sequence_tokens is {longest}; the checkpoint's {field} is {usual}, the model has {positions} positions"
    )
    if asked is not None and asked != usual:
        remark += f". For texts of more than {min(asked, usual)} tokens, sentence-transformers gives different vectors"
    return longest, remark
