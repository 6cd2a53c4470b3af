"""The export of a Hugging Face checkpoint: through our own encoder, its own ONNX file, or transformers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from encserve_export.bundle import manifest, store
from encserve_export.bundle.space import digest_model
from encserve_export.bundle.write import Exported, Progress, Target
from encserve_export.check import agreement
from encserve_export.check.texts import Compared, check_pipeline
from encserve_export.ground import names
from encserve_export.ground.errors import (
    CheckpointFileError,
    ConfigError,
    ExportError,
    MissingPackageError,
    OnnxModelError,
    ParityError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
    WeightValueError,
)
from encserve_export.ground.precision import Precision
from encserve_export.kinds import multi_vector
from encserve_export.kinds.bge_m3 import with_bge_m3
from encserve_export.kinds.dense import (
    is_sparse_encoder,
    read_lowercase,
    read_max_seq_length,
    read_sentence_vector,
    transformer_folder,
)
from encserve_export.kinds.recipe import POOLINGS, Recipe
from encserve_export.kinds.sparse import read_sparse_encoder
from encserve_export.models import pretrained
from encserve_export.models.own.encoder import shortened
from encserve_export.models.own.layouts import hf_bert, hf_rotary
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.models.pretrained import TransformersModel
from encserve_export.onnx_graph.query_blocks import LONGEST_AT_ONCE
from encserve_export.routes.encoder import export_encoder
from encserve_export.routes.onnx import OnnxOptions, export_onnx
from encserve_export.source.hub import Snapshot
from encserve_export.source.tokenizer import TokenizerFile, read_tokenizer
from encserve_export.source.weights import Weights, check_harmless, holds_weights, read_object, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

# How the graph is made, in the order of preference. Our own encoder can be inspected, and for BERT's kind is fastest.
Route = Literal["own", "onnx", "transformers"]
ROUTES: tuple[Route, ...] = get_args(Route)
ONNX_FILE = Path("onnx", "model.onnx")
# Our own encoder is no faster for these than transformers' graph (docs/performance.md). It takes them where texts may
# be long, whose memory would grow with the square of their length, and where transformers is not installed.
_NO_FASTER = ("mpnet", *hf_rotary.MODEL_TYPES)
_OWN_LAST: tuple[Route, ...] = ("onnx", "transformers", "own")
# Models whose positions begin after the padding's row.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")
# By default; what decoders have positions for, nobody embeds, and checking it takes hours.
_LONGEST_BY_DEFAULT = 8192
_PADDED_TOKENS = 32
_LANGUAGE_MODEL = (
    "which is a language model's head. If that makes SPLADE's weights, save the directory with sentence-transformers, "
    "SparseEncoder(DIRECTORY).save_pretrained(OTHER), and export OTHER"
)
_NOT_OF_ONE_MODEL = "config.json and the weights must be of one model: download or save them again, together"
_CODE_OF_ITS_OWN = (
    "config.json names code of its own (auto_map), which is never executed; where the weights are for that, "
    f"{pretrained.OWN_ONNX}"
)


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """What a directory says, whichever route it takes.

    Attributes:
        directory: Where the encoder and its tokenizer lie.
        settings: config.json.
        vector: How its rows become one vector.
        usual: What sentence-transformers cuts texts to; None where it does not say.
        tokenizer: Its tokenizer, or None where there is none.
        asked: The longest sequence that was asked for, in tokens, or None.
        precision: What the bundle computes in.
        origin: Where on the hub it came from, or None.
        progress: Called with what is being done.
        pipeline: Compares the bundle with sentence-transformers.
    """

    directory: Path
    settings: Mapping[str, Any]
    vector: Recipe
    usual: int | None
    tokenizer: TokenizerFile | None
    asked: int | None
    precision: Precision
    origin: Snapshot | None
    progress: Progress
    pipeline: Callable[[Path, manifest_pb2.Manifest], Compared | None]

    def source(self, route: Route, description: str, weights: Weights | None) -> manifest.Source:
        """What the manifest is to say; `weights` are those that the graph has been made of or is compared with."""
        came = {} if self.origin is None else {"repository": self.origin.repository, "revision": self.origin.revision}
        return manifest.Source(
            "hf",
            description,
            "" if weights is None or route == "onnx" else weights.sha256,
            self.vector,
            self.tokenizer,
            route,
            pipeline=self.pipeline,
            model_digest="" if weights is None else digest_model(weights.tensors, self.settings),
            **came,
        )

    def longest(self, positions: int | None) -> tuple[int, str]:
        """The longest sequence to serve, and a remark, for a model with so many positions."""
        known = [length for length in (positions, self._model_max_length()) if length is not None]
        bound = min(known, default=DEFAULT_LONGEST)
        if self.usual is None and self.asked is None and bound > _LONGEST_BY_DEFAULT:
            return _LONGEST_BY_DEFAULT, (
                f"max_sequence_tokens is {_LONGEST_BY_DEFAULT}; the checkpoint allows {bound}: --max-sequence-tokens "
                "sets more, which takes memory with its square"
            )
        usual = self.usual
        if usual is None and positions is not None and bound < positions:
            usual = bound
        return longest_sequence(bound if usual is None else positions or usual, usual, self.asked)

    def _model_max_length(self) -> int | None:
        path = self.directory / "tokenizer_config.json"
        length = read_object(path).get("model_max_length") if path.is_file() else None
        # Where nobody set one, transformers writes a number of 31 digits.
        return length if type(length) is int and 0 < length < 1_000_000 else None


def export_hf(
    directory: Path,
    target: Target,
    *,
    max_sequence_tokens: int | None = None,
    precision: Precision = "float32",
    via: Route | None = None,
    pooling: str | None = None,
    origin: Snapshot | None = None,
    progress: Progress = lambda _: None,
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
        origin: Where on the hub the directory came from, for the manifest.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    progress("reading the checkpoint")
    check_harmless(directory)
    pipeline = functools.partial(check_pipeline, directory, progress)
    with store.temporary_folder() as folder:
        tokenizer: TokenizerFile | None
        inline: tuple[str, ...] = ()
        if multi_vector.is_multi_vector(directory):
            path = folder / manifest.TOKENIZER_FILE
            found = multi_vector.read(directory, path)
            vector, usual, directory, inline = found.vector, found.longest, found.encoder, found.inline
            tokenizer, text = read_tokenizer(path, made_of=directory / manifest.TOKENIZER_FILE), ""
        else:
            vector = read_sparse_encoder(directory) if is_sparse_encoder(directory) else read_sentence_vector(directory)
            directory = transformer_folder(directory)
            usual = read_max_seq_length(directory)
            tokenizer, text = _read_tokenizer(directory, folder)
            vector = with_bge_m3(vector, directory, tokenizer)
        if pooling is not None:
            if vector.pooling or vector.multi_vector or vector.sparse:
                raise ConfigError("pooling is for a checkpoint that does not say its own; this one's modules.json does")
            vector = dataclasses.replace(vector, pooling=POOLINGS[pooling])
        settings = _read_settings(directory)
        _check_sides(directory)
        if text:
            progress(text)
        checkpoint = _Checkpoint(
            directory,
            settings,
            vector,
            usual,
            tokenizer,
            max_sequence_tokens,
            precision,
            origin,
            progress,
            pipeline,
        )
        try:
            exported = _first_that_fits(checkpoint, target) if via is None else _by_route(via, checkpoint, target)
        except (WeightNamesError, WeightShapeError) as error:
            advice = _CODE_OF_ITS_OWN if "auto_map" in settings else _NOT_OF_ONE_MODEL
            raise type(error)(f"{error}. {advice}") from error
        except WeightValueError as error:
            raise WeightValueError(f"{error}. Take an earlier checkpoint, or download it again") from error
    code = "; the code that config.json names (auto_map) was not run" if "auto_map" in settings else ""
    # The head of a language model makes no rows, but weights of them.
    used = exported.left_behind if exported.manifest.sparse.mask_name else inline
    left_behind = tuple(part for part in exported.left_behind if part not in used)
    if _has_language_model(settings, vector) and set(left_behind) - {"pooler"}:
        left_behind += (_LANGUAGE_MODEL,)
    remark = "; ".join(it for it in (exported.remark, vector.remark) if it)
    return dataclasses.replace(exported, text=text, route=exported.route + code, remark=remark, left_behind=left_behind)


def _has_language_model(settings: Mapping[str, Any], vector: Recipe) -> bool:
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


def _read_tokenizer(directory: Path, folder: Path) -> tuple[TokenizerFile | None, str]:
    """The tokenizer, made of older files in a folder of its own where it must be; or None, and why."""
    path, lowercase = directory / manifest.TOKENIZER_FILE, read_lowercase(directory)
    if path.is_file():
        return read_tokenizer(path, lowercase=lowercase), ""
    none = f"going on without {manifest.TOKENIZER_FILE}: the model will take token ids only"
    older = next((name for name in pretrained.OLDER_TOKENIZERS if (directory / name).is_file()), None)
    if older is None:
        return None, none
    try:
        written = pretrained.write_tokenizer(directory, folder / manifest.TOKENIZER_FILE)
        return read_tokenizer(written, lowercase=lowercase, made_of=directory / older), ""
    except MissingPackageError as error:
        return None, f"{none}; making one of {older} {error}"


def _by_route(via: Route, checkpoint: _Checkpoint, target: Target) -> Exported:
    try:
        exported = _EXPORTS[via](checkpoint, target)
    except _REFUSALS[via] as error:
        raise type(error)(f"{error}. Without --via {via}, every way is tried") from error
    return dataclasses.replace(exported, route=f"{_NAMES[via]}, as --via asks")


def _first_that_fits(checkpoint: _Checkpoint, target: Target) -> Exported:
    refusals: list[str] = []
    *routes, last = _preferred(checkpoint)
    for route in routes:
        try:
            exported = _EXPORTS[route](checkpoint, target)
        except _REFUSALS[route] as error:
            refusals.append(f"{_NAMES[route]} does not take it: {error}")
            checkpoint.progress(refusals[-1])
        else:
            if last == "own":
                refusals.append(f"our own encoder is no faster for it up to {LONGEST_AT_ONCE} tokens")
                refusals.append("with --via own it can be inspected")
            return dataclasses.replace(exported, route="; ".join([_NAMES[route], *refusals]))
    try:
        exported = _EXPORTS[last](checkpoint, target)
    except ExportError as error:
        if not isinstance(error, _REFUSALS[last]) and not (checkpoint.directory / ONNX_FILE).is_file():
            raise  # the routes before had nothing to try
        raise type(error)("; ".join([*refusals, str(error)])) from error
    return dataclasses.replace(exported, route="; ".join([_NAMES[last], *refusals]))


def _preferred(checkpoint: _Checkpoint) -> tuple[Route, ...]:
    """The routes in the order in which they are tried."""
    if checkpoint.settings.get("model_type") not in _NO_FASTER:
        return ROUTES
    longest, _ = checkpoint.longest(_facts(checkpoint.settings).positions)
    return ROUTES if longest > LONGEST_AT_ONCE else _OWN_LAST


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


def _via_own(checkpoint: _Checkpoint, target: Target) -> Exported:
    try:
        layout = hf_bert.read_layout(checkpoint.settings)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.directory / 'config.json'}: {error}. {_NOT_OF_ONE_MODEL}") from error
    longest, remark = checkpoint.longest(layout.config.max_sequence_tokens)
    if remark:
        checkpoint.progress(remark)
    checkpoint.progress("reading the weights")
    weights = read_weights(checkpoint.directory)
    source = checkpoint.source("own", layout.description, weights)
    tensors = hf_bert.plain_names(weights.tensors)
    heads = sorted({name.partition(".")[0] for name in layout.unused(tensors)})
    try:
        encoder = shortened(layout.load(tensors), longest)
    except WeightNamesError as error:
        if checkpoint.settings["model_type"] not in hf_rotary.MODEL_TYPES:
            raise
        raise UnsupportedModelError(str(error)) from error  # transformers reads these by other names too
    del weights, tensors  # the encoder has what it needs of them
    exported = export_encoder(encoder, source, target, precision=checkpoint.precision, progress=checkpoint.progress)
    return dataclasses.replace(exported, remark=remark, left_behind=tuple(heads))


def _via_onnx(checkpoint: _Checkpoint, target: Target) -> Exported:
    path = checkpoint.directory / ONNX_FILE
    if not path.is_file():
        raise UnsupportedModelError(f"there is no {ONNX_FILE}")
    if any(its.HasField("expansion") and not its.expansion.attended for its in checkpoint.vector.tasks.values()):
        raise UnsupportedModelError("queries are made longer with tokens that none attends to: it has no rows for them")
    reference, weights = _load_if_possible(checkpoint)
    if reference is not None:
        facts = _Facts(reference.positions, reference.pad_token_id, reference.vocab_size)
    else:
        facts = _facts(checkpoint.settings)
    source = checkpoint.source("onnx", str(ONNX_FILE), weights)
    del weights  # the reference has what it needs of them
    exported = _export_file(path, checkpoint, target, facts, source, reference)
    return dataclasses.replace(exported, left_behind=() if reference is None else reference.left_behind)


def _via_transformers(checkpoint: _Checkpoint, target: Target) -> Exported:
    pretrained.package(f"model_type {checkpoint.settings.get('model_type')!r}")
    checkpoint.progress("reading the weights")
    weights = read_weights(checkpoint.directory)
    model = pretrained.load_model(checkpoint.directory, weights)
    facts = _Facts(model.positions, model.pad_token_id, model.vocab_size)
    source = checkpoint.source("transformers", model.description, weights)
    del weights  # the model has what it needs of them
    _refuse_padding(model)
    refused: ExportError | None = None
    for exporter in pretrained.EXPORTERS:
        checkpoint.progress(f"having PyTorch write {model.description} as ONNX ({exporter})")
        try:
            # Beside the bundle, where there has to be room for the model anyway.
            with store.scratch(target.model_repository, target.name) as folder:
                path = folder / names.FILE
                pretrained.write_onnx(model, exporter, path)
                exported = _export_file(path, checkpoint, target, facts, source, model)
        except (UnsupportedModelError, OnnxModelError, ParityError) as error:
            checkpoint.progress(str(error))
            # Without the traceback, whose frames hold the models of this attempt.
            refused = refused if isinstance(error, UnsupportedModelError) and refused else type(error)(str(error))
        else:
            return dataclasses.replace(exported, left_behind=model.left_behind)
    assert refused is not None  # noqa: S101
    raise type(refused)(f"{refused}; {pretrained.OWN_ONNX}") from refused


def _refuse_padding(model: TransformersModel) -> None:
    """Refuses a model that gives other rows in a padded batch in PyTorch already: no graph of it would do better."""
    longest = min(_PADDED_TOKENS, model.positions or _PADDED_TOKENS)
    try:
        agreement.check_rows(
            model, vocab_size=model.vocab_size, max_sequence_tokens=longest, pad_token_id=model.pad_token_id
        )
    except ParityError as error:
        raise ParityError(
            f"{model.description} gives other rows in a padded batch, in PyTorch already: {error}. What it makes of a "
            "text depends on the texts beside it, so it cannot be served in batches: choose another model"
        ) from error


_EXPORTS: Mapping[Route, Callable[[_Checkpoint, Target], Exported]] = {
    "own": _via_own,
    "onnx": _via_onnx,
    "transformers": _via_transformers,
}
_NAMES: Mapping[Route, str] = {"own": "our own encoder", "onnx": str(ONNX_FILE), "transformers": "transformers"}
# The errors that mean that another route may do.
_REFUSALS: Mapping[Route, tuple[type[ExportError], ...]] = {
    "own": (UnsupportedModelError,),
    "onnx": (UnsupportedModelError, OnnxModelError, ParityError),
    "transformers": (UnsupportedModelError, MissingPackageError),
}


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What an ONNX file does not tell of a model: see `TransformersModel`."""

    positions: int | None
    pad_token_id: int
    vocab_size: int | None


def _facts(settings: Mapping[str, Any]) -> _Facts:
    """What config.json says, where there is no transformers to understand it."""
    numbers = {
        name: value if type(value := settings.get(name)) is int else None
        for name in ("max_position_embeddings", "pad_token_id", "vocab_size")
    }
    positions, pad_token_id = numbers["max_position_embeddings"], numbers["pad_token_id"] or 0
    if positions is not None and settings.get("model_type") in _OFFSET_POSITIONS:
        positions -= pad_token_id + 1
    return _Facts(positions, pad_token_id, numbers["vocab_size"])


def _load_if_possible(checkpoint: _Checkpoint) -> tuple[TransformersModel, Weights] | tuple[None, None]:
    """The model that an ONNX file is compared with; None without weights, and where transformers does not have it."""
    if not holds_weights(checkpoint.directory):
        checkpoint.progress("going on without a comparison with PyTorch: there are no weights")
        return None, None
    try:
        pretrained.package("comparing with PyTorch")
        weights = read_weights(checkpoint.directory)
        return pretrained.load_model(checkpoint.directory, weights), weights
    except (MissingPackageError, UnsupportedModelError) as error:
        checkpoint.progress(f"going on without a comparison with PyTorch: {error}")
        return None, None


def _export_file(
    path: Path,
    checkpoint: _Checkpoint,
    target: Target,
    facts: _Facts,
    source: manifest.Source,
    reference: TransformersModel | None,
) -> Exported:
    longest, remark = checkpoint.longest(facts.positions)
    if facts.positions is not None and longest > facts.positions:
        raise ConfigError(f"max_sequence_tokens must be at most {facts.positions} for this model; was {longest}")
    if remark:
        checkpoint.progress(remark)
    options = OnnxOptions(
        max_sequence_tokens=longest,
        pad_token_id=facts.pad_token_id,
        vocab_size=facts.vocab_size,
        vector=checkpoint.vector,
        tokenizer=checkpoint.tokenizer,
        precision=checkpoint.precision,
    )
    exported = export_onnx(path, target, options, source=source, reference=reference, progress=checkpoint.progress)
    return dataclasses.replace(exported, remark=remark)
