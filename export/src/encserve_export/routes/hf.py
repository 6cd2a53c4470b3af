"""The export of a Hugging Face checkpoint: a directory is read, a route is planned, and that route builds the bundle.

The routes are our own encoder, the directory's own ONNX file, transformers, and, for static embeddings, a table.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from encserve_export.bundle import manifest, store
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target, show_progress
from encserve_export.check import agreement
from encserve_export.check.expected import Expected, read_expected
from encserve_export.check.pipeline import LONGEST_BY_DEFAULT, Comparison, prepare_comparison
from encserve_export.ground import names
from encserve_export.ground.arrays import Ids, Mask, Rows
from encserve_export.ground.errors import (
    CheckpointFileError,
    ConfigError,
    ExportError,
    OnnxModelError,
    ParityError,
    TokenizerError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.ground.precision import Precision, allowed
from encserve_export.kinds.bge_m3 import with_bge_m3
from encserve_export.kinds.reading import read
from encserve_export.kinds.spec import NO_BOUND, ModelSpec, read_pooling
from encserve_export.kinds.static import write_graph
from encserve_export.models import pretrained
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder, shortened, shortened_config
from encserve_export.models.own.layouts import hf_bert, hf_rotary
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.models.pretrained import TransformersModel
from encserve_export.onnx_graph.query_blocks import LONGEST_AT_ONCE
from encserve_export.routes.encoder import export_encoder
from encserve_export.routes.onnx import OnnxOptions, export_onnx, export_traced
from encserve_export.source.hub import Snapshot
from encserve_export.source.tokenizer import TokenizerFile, tokenizer_source, write_tokenizer
from encserve_export.source.weights import Weights, holds_weights, read_object, read_weights

# How the graph is made, in the order of preference. Our own encoder can be inspected, and for BERT's kind is fastest.
Route = Literal["own", "onnx", "transformers", "static"]
ROUTES: tuple[Route, ...] = ("own", "onnx", "transformers")
ONNX_FILE = Path("onnx", "model.onnx")
# Our own encoder is no faster for hf_rotary's than transformers' graph (docs/performance.md). It takes them where texts
# may be long, whose memory would grow with the square of their length.
_OWN_LAST: tuple[Route, ...] = ("onnx", "transformers", "own")
# Models whose positions begin after the padding's row.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")
# The batch that our own encoder is compared with transformers by: longer than the windows of local attention.
_COMPARED_TOKENS = (160, 7, 1)
_TOLERANCE = 1e-5
_LANGUAGE_MODEL = (
    "which is a language model's head. If that makes SPLADE's weights, save the directory with sentence-transformers, "
    "SparseEncoder(DIRECTORY).save_pretrained(OTHER), and export OTHER"
)
_NOT_OF_ONE_MODEL = "config.json and the weights must be of one model: download or save them again, together"
_CODE_OF_ITS_OWN = (
    "config.json names code of its own (auto_map), which is never executed; where the weights are for that, "
    f"{pretrained.OWN_ONNX}"
)
_NO_WEIGHTS = "the directory holds no weights"
# The model types of transformers that read position_embedding_type "rotary"; all others ignore what they do not have.
_READ_POSITION_TYPES = ("esm", "evolla")
_KNOWN_POSITION_TYPES = ("absolute", "rope")
_NAMES: Mapping[Route, str] = {
    "own": "our own encoder",
    "onnx": str(ONNX_FILE),
    "transformers": "transformers",
    "static": "a table, without an encoder",
}
# The errors that mean that another route may do.
_REFUSALS: Mapping[Route, tuple[type[ExportError], ...]] = {
    "own": (UnsupportedModelError,),
    "onnx": (UnsupportedModelError, OnnxModelError, ParityError),
    "transformers": (UnsupportedModelError,),
    "static": (),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a directory says, and the routes to its bundle.

    Attributes:
        recipe: How its rows become vectors.
        settings: config.json of the encoder.
        order: The routes in the order of preference.
        refusals: Why some of them do not take the model; those without are tried, and usually the first does.
        reason: Why the order is another one than usual; empty where it is not.
        remarks: What may surprise, for people.
    """

    recipe: ModelSpec
    settings: Mapping[str, Any]
    order: tuple[Route, ...]
    refusals: Mapping[Route, str]
    reason: str
    remarks: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where the encoder and its tokenizer lie."""
        return self.recipe.encoder


def plan(recipe: ModelSpec, max_sequence_tokens: int | None = None) -> Plan:
    """Says which routes take a directory, and why; reads config.json and which files there are, and runs nothing.

    Args:
        recipe: What `kinds.reading.read` made of the directory.
        max_sequence_tokens: The longest sequence to serve that was asked for, in tokens; None for the default.

    Raises:
        CheckpointFileError: config.json is missing or unreadable, or there are neither weights nor an ONNX file.
        ConfigError: A size in config.json is out of range.
    """
    directory = recipe.encoder
    if recipe.table is not None:
        return Plan(recipe, {}, ("static",), {}, "", ())
    settings = _read_settings(directory)
    refusals: dict[Route, str] = {}
    if not holds_weights(directory):
        refusals["own"] = refusals["transformers"] = _NO_WEIGHTS
    else:
        try:
            hf_bert.read_layout(settings)
        except UnsupportedModelError as error:
            refusals["own"] = str(error)
        except ConfigError as error:
            raise ConfigError(f"{directory / 'config.json'}: {error}. {_NOT_OF_ONE_MODEL}") from error
    if not (directory / ONNX_FILE).is_file():
        refusals["onnx"] = f"there is no {ONNX_FILE}"
    elif any(its.HasField("expansion") and not its.expansion.attended for its in recipe.tasks.values()):
        refusals["onnx"] = "queries are made longer with tokens that none attends to: it has no rows for them"
    order, reason = ROUTES, ""
    if "own" not in refusals and settings.get("model_type") in hf_rotary.MODEL_TYPES:
        longest, _ = _longest(recipe, _facts(settings).positions, max_sequence_tokens)
        if longest <= LONGEST_AT_ONCE:
            order = _OWN_LAST
            reason = (
                f"our own encoder is no faster for it up to {LONGEST_AT_ONCE} tokens; "
                "with --via own it can be inspected"
            )
    return Plan(recipe, settings, order, refusals, reason, tuple(_remarks(settings)))


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
    """Exports a checkpoint in the layout of Hugging Face.

    Args:
        directory: config.json and the weights; tokenizer.json and the files of sentence-transformers where there are.
        target: Where the bundle goes.
        max_sequence_tokens: The longest sequence to serve, in tokens, at most as many as the model has positions; by
            default the max_seq_length of sentence-transformers, or all of them.
        precision: What the bundle computes in.
        via: How the graph is made; by default the first route that takes the model, in the order of `ROUTES`.
        pooling: One of `POOLINGS`, for a directory that does not say how rows become one vector.
        ids_only: Whether a directory without a tokenizer is exported, as a model that takes token ids only.
        ignore_head: Whether a classifier or a cross-encoder is exported as its encoder alone.
        expect: A .npz or .safetensors file of rows that the bundle must give, see `check.expected`.
        origin: Where on the hub the directory came from, for the manifest.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    expected = None if expect is None else read_expected(expect)
    progress("reading the directory")
    recipe = read(directory, "" if origin is None else origin.repository, ignore_head=ignore_head)
    with store.temporary_folder() as folder:
        tokenizer, text = _make_tokenizer(recipe, folder)
        if recipe.kind == "dense":
            recipe = with_bge_m3(recipe, recipe.encoder, tokenizer)
        if pooling is not None:
            if recipe.pooling or recipe.kind != "dense":
                raise ConfigError("pooling is for a checkpoint that does not say its own; this one's files do")
            recipe = dataclasses.replace(recipe, pooling=read_pooling(pooling))
        planned = plan(recipe, max_sequence_tokens)
        _check_sides(recipe.encoder)
        if tokenizer is not None and ids_only:
            raise ConfigError(
                f"--ids-only is for a directory without a tokenizer, and {directory} has one: leave --ids-only "
                "out, and the model takes text and token ids"
            )
        if tokenizer is None and not ids_only:
            raise TokenizerError(
                f"{directory} has no {manifest.TOKENIZER_FILE}, nor an older file to make one of: put the one there "
                "that the model was trained with, or give --ids-only, and the model takes token ids and no text"
            )
        if text:
            progress(text)
        pipeline = prepare_comparison(
            recipe, takes_text=tokenizer is not None, asked=max_sequence_tokens, progress=progress
        )
        # The model of sentence-transformers has answered. Without it there is room for the graph's weights.
        recipe = dataclasses.replace(recipe, loaded=None)
        planned = dataclasses.replace(planned, recipe=recipe)
        gc.collect()  # its modules refer to each other
        build = _Build(planned, target, tokenizer, max_sequence_tokens, precision, origin, progress, pipeline, expected)
        exported = _try_routes(build) if via is None or recipe.table is not None else _build_as_asked(build, via)
    # The head of a language model makes no rows, but weights of them.
    used = exported.unused_parts if exported.manifest.sparse.mask_name else recipe.used_parts
    unused_parts = tuple(part for part in exported.unused_parts if part not in used)
    if _has_language_model(planned.settings, recipe) and set(unused_parts) - {"pooler"}:
        unused_parts += (_LANGUAGE_MODEL,)
    remark = "; ".join(it for it in (exported.notes.get("remark"), recipe.remark, *planned.remarks) if it)
    return dataclasses.replace(exported, unused_parts=unused_parts).with_notes({"text": text, "remark": remark})


@dataclasses.dataclass(frozen=True)
class _Build:
    """What every route builds with.

    Attributes:
        plan: What the directory says.
        target: Where the bundle goes.
        tokenizer: Its tokenizer, or None where there is none.
        asked: The longest sequence that was asked for, in tokens, or None.
        precision: What the bundle computes in.
        origin: Where on the hub it came from, or None.
        progress: Called with what is being done.
        pipeline: Compares the bundle with sentence-transformers.
        expected: Rows that the bundle must give, or None.
    """

    plan: Plan
    target: Target
    tokenizer: TokenizerFile | None
    asked: int | None
    precision: Precision
    origin: Snapshot | None
    progress: Progress
    pipeline: Comparison
    expected: Expected | None

    def source(self, route: Route, description: str, weights: Weights | None) -> manifest.Source:
        """What the manifest is to say; `weights` are those that the graph has been made of or is compared with."""
        came = {} if self.origin is None else {"repository": self.origin.repository, "revision": self.origin.revision}
        return manifest.Source(
            "hf",
            description,
            "" if weights is None or route == "onnx" else weights.sha256,
            self.plan.recipe,
            self.tokenizer,
            route,
            pipeline=self.pipeline,
            expected=self.expected,
            model_digest="" if weights is None else digest_model(weights.tensors, self.plan.settings),
            **came,
        )

    def longest(self, positions: int | None) -> tuple[int, str]:
        """The longest sequence to serve, and a remark, for a model with so many positions."""
        longest, remark = _longest(self.plan.recipe, positions, self.asked)
        if remark:
            self.progress(remark)
        return longest, remark


def _build_as_asked(build: _Build, via: Route) -> Exported:
    """Builds by this route alone."""
    try:
        if via in build.plan.refusals:
            raise UnsupportedModelError(build.plan.refusals[via])
        exported = _build_by(via, build)
    except _REFUSALS[via] as error:
        raise type(error)(f"{error}. Without --via {via}, every way is tried") from error
    return exported.with_notes({"route": f"{_NAMES[via]}, as --via asks"})


def _try_routes(build: _Build) -> Exported:
    """Builds by the first route of the plan that takes the model."""
    planned = build.plan
    routes = [route for route in planned.order if route not in planned.refusals]
    if not routes:
        read_weights(planned.directory)  # whose error says what is looked for
    said: list[str] = []
    failed = False
    for route in planned.order:
        try:
            if route in planned.refusals:
                raise UnsupportedModelError(planned.refusals[route])
            exported = _build_by(route, build)
        except ExportError as error:
            refused = isinstance(error, _REFUSALS[route])
            if route == routes[-1] and (refused or failed):
                raise type(error)("; ".join([*said, str(error)])) from error
            if not refused:
                raise
            said.append(f"{_NAMES[route]} does not take it: {error}")
            failed = failed or route in routes
            build.progress(said[-1])
        else:
            reasons = [planned.reason] if planned.reason and not failed else []
            return exported.with_notes({"route": "; ".join([_NAMES[route], *said, *reasons])})
    raise AssertionError("the last route returns or raises")


def _build_by(route: Route, build: _Build) -> Exported:
    makers: Mapping[Route, Callable[[_Build], Exported]] = {
        "own": _build_own,
        "onnx": _build_onnx,
        "transformers": _build_transformers,
        "static": _build_static,
    }
    try:
        return makers[route](build)
    except (WeightNamesError, WeightShapeError) as error:
        advice = _CODE_OF_ITS_OWN if "auto_map" in build.plan.settings else _NOT_OF_ONE_MODEL
        raise type(error)(f"{error}. {advice}") from error
    except WeightValueError as error:
        raise WeightValueError(f"{error}. Take an earlier checkpoint, or download it again") from error


def _remarks(settings: Mapping[str, Any]) -> list[str]:
    """What config.json says and transformers' own code for its model_type does not do."""
    model_type, positions = settings.get("model_type"), settings.get("position_embedding_type")
    found = []
    if "auto_map" in settings:
        found.append(
            "the code that config.json names (auto_map) was not run: the model is read as transformers' own "
            f"{model_type}"
        )
    if positions not in (None, *_KNOWN_POSITION_TYPES) and model_type not in _READ_POSITION_TYPES:
        found.append(
            f"config.json has position_embedding_type {positions!r}, which transformers' own {model_type} ignores: if "
            f"the model was trained with it, {pretrained.OWN_ONNX}"
        )
    return found


def _has_language_model(settings: Mapping[str, Any], vector: ModelSpec) -> bool:
    """Whether a directory that says nothing of vectors is a masked-language model's, as those of SPLADE often are."""
    named = any(str(it).endswith("ForMaskedLM") for it in settings.get("architectures") or ())
    return named and not (vector.pooling or vector.multi_vector or vector.sparse)


def _check_sides(directory: Path) -> None:
    """Refuses a tokenizer that cuts texts at their beginning, as transformers reads it."""
    config, file = (
        read_object(path) if (path := directory / name).is_file() else {}
        for name in ("tokenizer_config.json", manifest.TOKENIZER_FILE)
    )
    side = config.get("truncation_side") or (file.get("truncation") or {}).get("direction") or "right"
    if side.lower() != "right":
        raise UnsupportedModelError(
            f"{directory}: its tokenizer cuts long texts at their beginning (truncation_side {side!r}), which a bundle "
            'cannot express. Write "truncation_side": "right" into tokenizer_config.json, and have callers send the '
            "end of what is too long"
        )


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointFileError(
            f"{path} is missing: this is no directory of transformers or sentence-transformers. A state dict is "
            "exported with `encserve-export checkpoint`, an ONNX file with `encserve-export onnx`"
        )
    return read_object(path)


def _make_tokenizer(spec: ModelSpec, folder: Path) -> tuple[TokenizerFile | None, str]:
    """Write the tokenizer into a folder; or return None and the reason."""
    if spec.tokenizer is None:
        return None, f"going on without {manifest.TOKENIZER_FILE}: the model will take token ids only"
    return write_tokenizer(
        spec.tokenizer,
        folder / manifest.TOKENIZER_FILE,
        made_of=tokenizer_source(spec.encoder),
        add_special_tokens=spec.template is None and spec.kind != "static",
    ), ""


def _longest(recipe: ModelSpec, positions: int | None, asked: int | None) -> tuple[int, str]:
    """The longest sequence to serve, and a remark, for a model with so many positions."""
    usual = recipe.max_seq_length
    known = [length for length in (positions, _model_max_length(recipe.encoder)) if length is not None]
    bound = min(known, default=DEFAULT_LONGEST)
    if usual is None and asked is None and bound > LONGEST_BY_DEFAULT:
        return LONGEST_BY_DEFAULT, (
            f"max_sequence_tokens is {LONGEST_BY_DEFAULT}; the checkpoint allows {bound}: --max-sequence-tokens "
            "sets more, which takes memory with its square"
        )
    if usual is None and positions is not None and bound < positions:
        usual = bound
    return longest_sequence(bound if usual is None else positions or usual, usual, asked)


def _model_max_length(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    length = read_object(path).get("model_max_length") if path.is_file() else None
    return length if type(length) is int and 0 < length < NO_BOUND else None


def longest_sequence(positions: int, usual: int | None, asked: int | None) -> tuple[int, str]:
    """The longest sequence to serve, in tokens, and a remark where that is not simply all positions.

    Args:
        positions: As many as the model has.
        usual: What sentence-transformers cuts texts to; None where it does not say.
        asked: What was asked for, or None.
    """
    longest = min(positions, usual or positions) if asked is None else asked
    if usual is None or longest == usual == positions:
        return longest, ""
    remark = (
        f"max_sequence_tokens is {longest}; the checkpoint's max_seq_length is {usual}, its positions are {positions}"
    )
    if asked is not None and asked != usual:
        remark += f": for texts of more than {min(asked, usual)} tokens sentence-transformers gives other vectors"
    return longest, remark


def _build_own(build: _Build) -> Exported:
    planned = build.plan
    layout = hf_bert.read_layout(planned.settings)
    longest, remark = build.longest(layout.config.max_sequence_tokens)
    config = shortened_config(layout.config, longest)
    build.progress("reading the weights")
    weights = read_weights(planned.directory)
    source = build.source("own", layout.description, weights)
    tensors = hf_bert.plain_names(weights.tensors)
    heads = sorted({name.partition(".")[0] for name in layout.unused(tensors)})
    try:
        layout.check_names(tensors)
    except WeightNamesError as error:
        if planned.settings["model_type"] not in hf_rotary.MODEL_TYPES:
            raise
        raise UnsupportedModelError(str(error)) from error  # transformers reads these by other names too
    build.progress("running transformers' model, which our own encoder is compared with")
    wanted = _rows_of_transformers(planned.directory, weights, config)
    encoder = shortened(layout.load(tensors), longest)
    _compare_with_transformers(encoder, wanted)
    del weights, tensors, wanted  # the encoder has what it needs of them
    exported = export_encoder(encoder, source, build.target, precision=build.precision, progress=build.progress)
    return dataclasses.replace(exported, unused_parts=tuple(heads)).with_notes({"longest": remark})


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A batch as transformers computes it.

    Attributes:
        description: What the model is called.
        ids: int64 (batch, seq).
        mask: int64 (batch, seq).
        rows: (batch, seq, d_model), in float32.
        exact: The same in float64; in float32 where the model does not run in float64, or hides tokens with what is -∞
            there.
    """

    description: str
    ids: Ids
    mask: Mask
    rows: Rows
    exact: Rows


def _rows_of_transformers(directory: Path, weights: Weights, config: EncoderConfig) -> _Wanted:
    """Runs transformers' model, before our own encoder needs memory for its weights too."""
    random = np.random.default_rng(0)
    lengths = [min(length, config.max_sequence_tokens) for length in _COMPARED_TOKENS]
    ids = random.integers(0, config.vocab_size, (len(lengths), lengths[0]))  # (batch, seq)
    mask = (np.arange(lengths[0]) < np.array(lengths)[:, None]).astype(np.int64)  # (batch, seq)
    ids = np.where(mask == 1, ids, config.pad_token_id)
    ids[0, lengths[0] // 2] = config.pad_token_id  # some models count positions without it, wherever it stands
    model = pretrained.load_model(directory, weights)
    rows = exact = model(ids, mask)  # (batch, seq, d_model)
    model.module.double()
    with contextlib.suppress(UnsupportedModelError):
        exact = model(ids, mask)  # (batch, seq, d_model)
    return _Wanted(model.description, ids, mask, rows, exact if np.isfinite(exact[mask == 1]).all() else rows)


def _compare_with_transformers(encoder: Encoder, wanted: _Wanted) -> None:
    """Refuses an encoder that computes something else than transformers' model of the same directory.

    Raises:
        ParityError: A row differs from transformers' in float64 by more than rounding to float32 explains.
    """
    with torch.inference_mode():
        ours = encoder(torch.from_numpy(wanted.ids), torch.from_numpy(wanted.mask)).numpy()  # (batch, seq, d_model)
    for row, length in enumerate(wanted.mask.sum(axis=1)):
        exact = wanted.exact[row, :length]  # (length, d_model)
        error = agreement.relative_error(ours[row, :length], exact)
        rounding = agreement.relative_error(wanted.rows[row, :length], exact)
        if not error <= (tolerance := allowed(_TOLERANCE, rounding)):
            raise ParityError(
                f"our own encoder computes something else than transformers' {wanted.description}: relative error "
                f"{error:.1e} of a row of {length} tokens, tolerance {tolerance:.1e}. Export it with --via transformers"
            )


def _build_onnx(build: _Build) -> Exported:
    planned = build.plan
    reference, weights = _load_if_possible(build)
    if reference is not None:
        facts = _Facts(reference.positions, reference.pad_token_id, reference.vocab_size)
    else:
        facts = _facts(planned.settings)
    source = build.source("onnx", str(ONNX_FILE), weights)
    del weights  # the reference has what it needs of them
    exported = _export_file(planned.directory / ONNX_FILE, build, facts, source, reference)
    return dataclasses.replace(exported, unused_parts=() if reference is None else reference.left_behind)


def _build_transformers(build: _Build) -> Exported:
    build.progress("reading the weights")
    weights = read_weights(build.plan.directory)
    model = pretrained.load_model(build.plan.directory, weights)
    facts = _Facts(model.positions, model.pad_token_id, model.vocab_size)
    source = build.source("transformers", model.description, weights)
    del weights  # the model has what it needs of them
    agreement.check_padding(
        model,
        longest=model.positions,
        pad_token_id=model.pad_token_id,
        advice="What it makes of a text depends on the texts beside it, so it cannot be served in batches: choose "
        "another model",
    )
    try:
        exported = export_traced(
            lambda exporter, path: pretrained.write_onnx(model, exporter, path),
            lambda path: _export_file(path, build, facts, source, model),
            build.target,
            model.description,
            build.progress,
        )
    except (UnsupportedModelError, OnnxModelError, ParityError) as error:
        raise type(error)(f"{error}; {pretrained.OWN_ONNX}") from error
    return dataclasses.replace(exported, unused_parts=model.left_behind)


def _build_static(build: _Build) -> Exported:
    recipe = build.plan.recipe
    assert recipe.table is not None  # noqa: S101
    source = build.source("static", "StaticEmbedding", read_weights(build.plan.directory))
    with store.scratch(build.target.model_repository, build.target.name) as folder:
        path = folder / names.FILE
        write_graph(recipe.table, path)
        return _export_file(path, build, _Facts(None, 0, len(recipe.table)), source, None)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What an ONNX file does not tell of a model: see `TransformersModel`."""

    positions: int | None
    pad_token_id: int
    vocab_size: int | None


def _facts(settings: Mapping[str, Any]) -> _Facts:
    """What config.json says of a model that transformers does not load."""
    numbers = {
        name: value if type(value := settings.get(name)) is int else None
        for name in ("max_position_embeddings", "pad_token_id", "vocab_size")
    }
    positions, pad_token_id = numbers["max_position_embeddings"], numbers["pad_token_id"] or 0
    if positions is not None and settings.get("model_type") in _OFFSET_POSITIONS:
        positions -= pad_token_id + 1
    return _Facts(positions, pad_token_id, numbers["vocab_size"])


def _load_if_possible(build: _Build) -> tuple[TransformersModel, Weights] | tuple[None, None]:
    """The model that an ONNX file is compared with; None without weights, and where transformers does not have it."""
    directory = build.plan.directory
    if not holds_weights(directory):
        build.progress("going on without a comparison with PyTorch: there are no weights")
        return None, None
    try:
        weights = read_weights(directory)
        return pretrained.load_model(directory, weights), weights
    except UnsupportedModelError as error:
        build.progress(f"going on without a comparison with PyTorch: {error}")
        return None, None


def _export_file(
    path: Path, build: _Build, facts: _Facts, source: manifest.Source, reference: TransformersModel | None
) -> Exported:
    longest, remark = build.longest(facts.positions)
    if facts.positions is not None and longest > facts.positions:
        raise ConfigError(f"max_sequence_tokens must be at most {facts.positions} for this model; was {longest}")
    options = OnnxOptions(
        max_sequence_tokens=longest,
        pad_token_id=facts.pad_token_id,
        vocab_size=facts.vocab_size,
        vector=build.plan.recipe,
        tokenizer=build.tokenizer,
        precision=build.precision,
    )
    exported = export_onnx(path, build.target, options, source=source, reference=reference, progress=build.progress)
    return exported.with_notes({"longest": remark})
