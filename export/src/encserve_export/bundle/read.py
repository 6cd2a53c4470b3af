"""Reads a bundle back: its files are those that its manifest lists, unaltered, and no others."""

import dataclasses
import json
from pathlib import Path, PurePosixPath

from google.protobuf import json_format

from encserve_export.bundle.manifest import FILE, FORMAT_VERSION
from encserve_export.ground.errors import BundleError
from encserve_export.source.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

_HEADS = ("head", "multi_vector", "sparse")


@dataclasses.dataclass(frozen=True)
class ReadBundle:
    """A bundle whose files are those that its manifest lists, and no others.

    Attributes:
        path: Its folder.
        manifest: What its manifest.json says.
    """

    path: Path
    manifest: manifest_pb2.Manifest


def read_bundle(directory: Path) -> ReadBundle:
    """Reads the bundle in a folder, <name>/<version>/ of a model repository.

    Raises:
        BundleError: There is no bundle, its format is another, or a file is missing, altered, or not listed.
    """
    path = directory / FILE
    try:
        text = path.read_text(encoding="utf-8")
        version = json.loads(text).get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(f"{path}: format_version must be {FORMAT_VERSION}; was {version}")
        manifest = json_format.Parse(text, manifest_pb2.Manifest())
    except FileNotFoundError as error:
        raise BundleError(
            f"{directory} holds no bundle: there is no {FILE} in it; give MODEL_REPOSITORY/NAME/VERSION"
        ) from error
    except (OSError, ValueError, AttributeError, json_format.ParseError) as error:
        raise BundleError(f"{path} is no manifest: {error}") from error
    listed = {file.path for file in manifest.files}
    _refuse_foreign(directory, manifest, listed)
    for file in manifest.files:
        _verify(directory / file.path, file.sha256)
    if manifest.fingerprint != (due := fingerprint(manifest)):
        raise BundleError(f"{path}: its fingerprint is {manifest.fingerprint!r}; what it describes has {due!r}")
    return ReadBundle(directory, manifest)


def _refuse_foreign(directory: Path, manifest: manifest_pb2.Manifest, listed: set[str]) -> None:
    """Refuses files that lie elsewhere or that no checksum covers: an ONNX file may read its weights from any file."""
    for name in listed:
        relative = PurePosixPath(name)
        inside = (directory / relative).resolve().is_relative_to(directory.resolve())
        if relative.is_absolute() or ".." in relative.parts or not inside:
            raise BundleError(f"{directory / FILE}: files lists {name!r}, which is outside the bundle")
    named = {"graph.file": manifest.graph.file}
    if manifest.HasField("inspect_graph"):
        named["inspect_graph.file"] = manifest.inspect_graph.file
    if manifest.HasField("text"):
        named["text.tokenizer_file"] = manifest.text.tokenizer_file
    named |= {f"{it}.file": getattr(manifest, it).file for it in _HEADS if manifest.HasField(it)}
    for field, name in named.items():
        if name not in listed:
            raise BundleError(f"{directory / FILE}: {field} names {name!r}, which the manifest does not list")
    for found in sorted(directory.rglob("*")):
        name = found.relative_to(directory).as_posix()
        if not found.is_dir() and name not in listed and name != FILE:
            raise BundleError(f"{directory} holds {name}, which the manifest does not list")


def _verify(path: Path, wanted: str) -> None:
    try:
        found = sha256([path])
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    if found != wanted:
        raise BundleError(f"{path} is altered: its sha256 is {found}; the manifest says {wanted}")
