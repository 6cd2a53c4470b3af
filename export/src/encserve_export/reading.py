"""Reads a bundle back, to look into it."""

import dataclasses
import hashlib
import json
from pathlib import Path

from google.protobuf import json_format

from encserve_export.errors import BundleError
from encserve_export.manifest import FILE, FORMAT_VERSION
from encserve_proto.v1 import manifest_pb2


@dataclasses.dataclass(frozen=True)
class ReadBundle:
    """A bundle whose files are those that its manifest lists.

    Attributes:
        path: Its folder.
        manifest: What its manifest.json says.
    """

    path: Path
    manifest: manifest_pb2.Manifest


def read_bundle(directory: Path) -> ReadBundle:
    """Reads the bundle in MODELS/<name>/<version>/.

    Raises:
        BundleError: There is none, its format is another, or a file is missing or altered.
    """
    path = directory / FILE
    try:
        text = path.read_text(encoding="utf-8")
        version = json.loads(text).get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(f"{path}: format_version must be {FORMAT_VERSION}; was {version}")
        manifest = json_format.Parse(text, manifest_pb2.Manifest())
    except FileNotFoundError as error:
        raise BundleError(f"{directory} holds no bundle: there is no {FILE} in it; give MODELS/NAME/VERSION") from error
    except (OSError, ValueError, AttributeError, json_format.ParseError) as error:
        raise BundleError(f"{path} is no manifest: {error}") from error
    for file in manifest.files:
        _check(directory / file.path, file.sha256)
    return ReadBundle(directory, manifest)


def _check(path: Path, wanted: str) -> None:
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    if sha256 != wanted:
        raise BundleError(f"{path} is altered: its sha256 is {sha256}; the manifest says {wanted}")
