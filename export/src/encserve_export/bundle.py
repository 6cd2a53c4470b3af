"""Puts a bundle into a model repository as <name>/<version>/, complete or not at all; and reads one back."""

import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from google.protobuf import json_format

from encserve_export.errors import BundleError, BundleExistsError, BundleNameError
from encserve_export.manifest import FILE, FORMAT_VERSION
from encserve_export.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

_HEADS = ("head", "multi_vector", "sparse")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(what: str, name: str) -> None:
    """Refuses a name that could be anything but one plain part of a path.

    Args:
        what: What the name is for: "name" or "version".
        name: The name.

    Raises:
        BundleNameError: It is not of the form that the manifest asks for.
    """
    if not _NAME.fullmatch(name):
        raise BundleNameError(
            f"{what} must be 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit; was {name!r}"
        )


def name_from(directory: Path) -> str:
    """A model name made of a directory's own name, every run of other characters turned into '-'.

    Raises:
        BundleNameError: The directory's name holds no letter or digit.
    """
    own = directory.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", own).lstrip("._-")[:64]
    if not name:
        raise BundleNameError(f"no model name can be made of the directory name {own!r}; give one with --name")
    return name


def check_target(model_repository: Path, name: str, version: str, *, overwrite: bool) -> Path:
    """The folder of a version that may be written, <name>/<version>/.

    Raises:
        BundleNameError: The name or the version is no plain name.
        BundleExistsError: The version is there, and `overwrite` is false.
    """
    check_name("name", name)
    check_name("version", version)
    final = model_repository / name / version
    if final.exists() and not overwrite:
        raise BundleExistsError(f"{final} exists; give another version, or --overwrite to replace it")
    return final


@contextlib.contextmanager
def draft(model_repository: Path, name: str, version: str, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder to write a bundle into, which becomes <name>/<version>/ there when the block ends well.

    The folder lies beside the final one under a name that begins with '.', so that the last step is one rename. If the
    block raises, the folder is removed, and with it the parents that were made for it.

    Raises:
        BundleNameError: The name or the version is no plain name.
        BundleExistsError: The version is there, and `overwrite` is false.
        BundleError: The folder cannot be made or written to.
    """
    final = check_target(model_repository, name, version, overwrite=overwrite)
    with _parents(final.parent):
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=final.parent))
            try:
                yield folder
                # Another export may have put it there meanwhile.
                check_target(model_repository, name, version, overwrite=overwrite)
                _publish(folder, final)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise BundleError(f"{final} cannot be written: {error}") from error


@contextlib.contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """Makes a folder and its parents; if the block raises, removes those of them that it made."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        yield
    except BaseException:
        for path in missing:
            # Somebody else may have put something there meanwhile.
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _publish(folder: Path, final: Path) -> None:
    """Renames the draft; a version that is replaced is moved aside first, since a rename replaces no full folder."""
    # Temporary files are readable by their owner alone; a server may well run as somebody else.
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    if not final.exists():
        folder.rename(final)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}-old-", dir=final.parent))
    final.rename(aside / "old")
    folder.rename(final)
    shutil.rmtree(aside)


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
        BundleError: There is none, its format is another, or a file is missing, altered, or not listed.
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
