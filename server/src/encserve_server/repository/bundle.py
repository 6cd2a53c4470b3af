"""Reads and verifies a model bundle. Each file's checksum is checked before the file is used."""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from google.protobuf import json_format

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint
from encserve_server.errors import BundleError
from encserve_server.repository.heads import ManifestReader, VerifiedPath
from encserve_server.types.bundles import Bundle, Graph, HeadGraph, InspectGraph, ModelPooling
from encserve_server.types.inspections import InspectKind
from encserve_server.types.requests import OutputKind

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_POOLING: dict[int, OutputKind] = {
    manifest_pb2.POOLING_MEAN: OutputKind.MEAN,
    manifest_pb2.POOLING_CLS: OutputKind.CLS,
    manifest_pb2.POOLING_MAX: OutputKind.MAX,
    manifest_pb2.POOLING_LAST_TOKEN: OutputKind.LAST_TOKEN,
    manifest_pb2.POOLING_WEIGHTED_MEAN: OutputKind.WEIGHTED_MEAN,
    manifest_pb2.POOLING_MEAN_SQRT_LENGTH: OutputKind.MEAN_SQRT_LENGTH,
}


def read_bundle(directory: Path, key: tuple[str, str] | None = None) -> Bundle:
    """Read and verify a bundle.

    Args:
        directory: The folder of the bundle.
        key: The name and the version that the manifest must have. Default: `directory` is <name>/<version>/ in a model
            repository.

    Raises:
        BundleError: A file is missing, altered or unreadable, or fields contradict each other. The text names the file
            or field.
    """
    manifest = read_manifest(directory / MANIFEST_NAME)
    name, version = key or (directory.parent.name, directory.name)
    if (manifest.name, manifest.version) != (name, version):
        command = ["encserve", "bundle", "rename", str(directory), "--name", name, "--version", version]
        raise BundleError(
            f"{directory / MANIFEST_NAME}: it describes {manifest.name}/{manifest.version} but is in {name}/{version}; "
            f"`{shlex.join(command)}` corrects the manifest"
        )
    verified = {file.path: _verify_listed(directory, file) for file in manifest.files}
    _refuse_unlisted(directory, set(verified.values()))
    if manifest.fingerprint != fingerprint(manifest):
        raise BundleError(
            f"{directory / MANIFEST_NAME}: its fingerprint is {manifest.fingerprint!r}; its other fields have the "
            f"fingerprint {fingerprint(manifest)!r}"
        )
    _check_text_facts(directory, manifest)

    def verified_path(field: str, path: str) -> Path:
        if path not in verified:
            raise BundleError(f"{directory / MANIFEST_NAME}: {field} names {path!r}, which `files` does not list")
        return verified[path]

    shape, graph = manifest.encoder, _graph(directory, manifest, verified_path("graph.file", manifest.graph.file))
    for field in ("d_model", "max_sequence_tokens", *(() if graph.takes_vectors else ("vocab_size",))):
        if getattr(shape, field) < 1:
            raise BundleError(f"{directory / MANIFEST_NAME}: encoder.{field} must be >= 1; was {getattr(shape, field)}")
    if not graph.takes_vectors and shape.pad_token_id >= shape.vocab_size:
        raise BundleError(
            f"{directory / MANIFEST_NAME}: encoder.pad_token_id must be below encoder.vocab_size, {shape.vocab_size}; "
            f"was {shape.pad_token_id}"
        )
    reader = ManifestReader(directory / MANIFEST_NAME, manifest, verified_path)
    return Bundle(
        name=manifest.name,
        version=manifest.version,
        fingerprint=manifest.fingerprint,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        vocab_size=shape.vocab_size,
        max_sequence_tokens=shape.max_sequence_tokens,
        special_token_ids=tuple(manifest.text.special_token_ids),
        takes_empty_texts=manifest.text.takes_empty,
        pooling=_pooling(directory, manifest, verified_path),
        tokenizer_file=(
            verified_path("text.tokenizer_file", manifest.text.tokenizer_file) if manifest.HasField("text") else None
        ),
        graph=graph,
        inspect_graph=(
            _inspect_graph(directory, manifest, graph, verified_path) if manifest.HasField("inspect_graph") else None
        ),
        position=shape.position,
        parameters={part.part: part.count for part in manifest.parameters},
        prompts=dict(sorted(manifest.prompts.items())),
        default_prompt_name=manifest.default_prompt_name,
        similarity=manifest.similarity,
        space_id=manifest.space_id,
        tasks=reader.tasks(),
        multi_vector=reader.multi_vector(),
        sparse=reader.sparse(),
        scores=reader.scores(),
        split_special_tokens=manifest.text.split_special_tokens,
        max_text_tokens=reader.max_text_tokens(),
        template=reader.template(),
        repository=manifest.source.repository,
    )


def _check_text_facts(directory: Path, manifest: manifest_pb2.Manifest) -> None:
    """Refuse an unknown pooling, and a default prompt that is not among the prompts."""
    for pooling in (manifest.pooling, *manifest.more_poolings):
        if pooling not in _POOLING and (pooling or manifest.more_poolings):
            raise BundleError(f"{directory / MANIFEST_NAME}: pooling {pooling} is not known to this server")
    if manifest.default_prompt_name and manifest.default_prompt_name not in manifest.prompts:
        raise BundleError(
            f"{directory / MANIFEST_NAME}: default_prompt_name is {manifest.default_prompt_name!r}; the prompts are "
            f"{', '.join(sorted(manifest.prompts)) or 'none'}"
        )


def _pooling(directory: Path, manifest: manifest_pb2.Manifest, verified_path: VerifiedPath) -> ModelPooling | None:
    """Return the pooling that the model was trained with."""
    if not manifest.pooling:
        return None
    kinds = tuple(_POOLING[pooling] for pooling in (manifest.pooling, *manifest.more_poolings))
    width = pooled_width = len(kinds) * manifest.encoder.d_model
    head = None
    if manifest.HasField("head"):
        graph, width = manifest.head, manifest.head.width
        path = verified_path("head.file", graph.file)
        head = HeadGraph(path, (graph.input_name,), graph.output_name, pooled_width, width)
    if width < 1 or manifest.dimensions > width:
        raise BundleError(
            f"{directory / MANIFEST_NAME}: vectors must have at least max(1, dimensions) components; they have "
            f"{width}, dimensions is {manifest.dimensions}"
        )
    return ModelPooling(kinds, manifest.l2_normalize, width, head, manifest.pooling_skips_prompt, manifest.dimensions)


def _graph(directory: Path, manifest: manifest_pb2.Manifest, path: Path) -> Graph:
    """Return the inputs and outputs of the ONNX file."""
    graph, shape = manifest.graph, manifest.encoder
    if bool(graph.input_ids_name) == bool(graph.embeddings_name):
        raise BundleError(
            f"{directory / MANIFEST_NAME}: graph must name input_ids_name or embeddings_name; it names "
            f"{graph.input_ids_name!r} and {graph.embeddings_name!r}"
        )
    return Graph(
        path=path,
        input_name=graph.embeddings_name or graph.input_ids_name,
        takes_vectors=bool(graph.embeddings_name),
        attention_mask_name=graph.attention_mask_name,
        output_name=graph.output_name,
        pad_token_id=shape.pad_token_id,
        d_model=shape.d_model,
        precision=graph.precision,
        token_type_ids_name=graph.token_type_ids_name,
        vocab_size=shape.vocab_size,
    )


def _inspect_graph(
    directory: Path, manifest: manifest_pb2.Manifest, graph: Graph, verified_path: VerifiedPath
) -> InspectGraph:
    """Return the inputs and outputs of the ONNX file for inspections."""
    inspect, n_layers, position = manifest.inspect_graph, manifest.encoder.n_layers, manifest.encoder.position
    if n_layers < 1:
        raise BundleError(f"{directory / MANIFEST_NAME}: inspect_graph needs encoder.n_layers >= 1; was {n_layers}")
    if bool(inspect.positions_name) != (position in ("learned", "sinusoidal")):
        due = "empty" if inspect.positions_name else "set"
        raise BundleError(
            f"{directory / MANIFEST_NAME}: inspect_graph.positions_name must be {due} for position {position!r}; was "
            f"{inspect.positions_name!r}"
        )
    wanted = {"attention_weights_names": n_layers, "hidden_state_names": n_layers + 1}
    for field, count in wanted.items():
        if len(getattr(inspect, field)) != count:
            raise BundleError(
                f"{directory / MANIFEST_NAME}: inspect_graph.{field} must hold {count} names for n_layers {n_layers}; "
                f"was {len(getattr(inspect, field))}"
            )
    names = {
        InspectKind.ATTENTION_WEIGHTS: tuple(inspect.attention_weights_names),
        InspectKind.HIDDEN_STATES: tuple(inspect.hidden_state_names),
    }
    if inspect.positions_name:
        names[InspectKind.POSITIONS] = (inspect.positions_name,)
    # The graph may load weights from any file of the bundle. So all files are checked again before the load.
    files = {directory / file.path: file.sha256 for file in manifest.files}
    path = verified_path("inspect_graph.file", inspect.file)
    own = dataclasses.replace(graph, path=path, output_name=inspect.hidden_state_names[-1])
    return InspectGraph(own, names, files)


def verify_unchanged(files: Mapping[Path, str]) -> None:
    """Check files against their SHA-256 again, because a bundle may have been replaced since it was read.

    Raises:
        BundleError: A file is missing or altered.
    """
    for path, sha256 in files.items():
        _verify_sha256(path, sha256)


def read_manifest(path: Path) -> manifest_pb2.Manifest:
    """Parse a manifest and check that this server knows its format. The files of the bundle are not read.

    Raises:
        BundleError: The file cannot be read, is not a manifest, or has another format version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    try:
        # The format version is read first, because a later format may have fields that this parser does not know.
        version = json.loads(text).get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(f"{path}: format_version must be {FORMAT_VERSION} for this server; was {version}")
        return json_format.Parse(text, manifest_pb2.Manifest())
    except (ValueError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise BundleError(f"{path}: not a manifest: {error}") from error


def _verify_listed(directory: Path, file: manifest_pb2.BundleFile) -> Path:
    """Return the path of a listed file. First check that the file is inside the bundle and unaltered."""
    relative = PurePosixPath(file.path)
    if not file.path or relative.is_absolute() or ".." in relative.parts:
        raise BundleError(f"{directory / MANIFEST_NAME}: files lists {file.path!r}, which is outside the bundle")
    path = directory / relative
    try:
        if not path.resolve().is_relative_to(directory.resolve()):
            raise BundleError(f"{path}: it is a link to a path outside the bundle")
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            raise BundleError(f"{path}: {size_bytes} bytes; its manifest says {file.size_bytes}")
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from error
    _verify_sha256(path, file.sha256)
    return path


def _verify_sha256(path: Path, wanted: str) -> None:
    try:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from error
    if sha256 != wanted:
        raise BundleError(f"{path}: its sha256 is {sha256}; its manifest says {wanted}")


def _refuse_unlisted(directory: Path, listed: set[Path]) -> None:
    """Refuse files without a checksum, because an ONNX file can read weights from any file in its folder."""
    for path in sorted(directory.rglob("*")):
        if not path.is_dir() and path not in listed and path != directory / MANIFEST_NAME:
            raise BundleError(f"{path}: the manifest does not list this file, so it cannot be verified")
