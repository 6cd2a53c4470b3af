"""Reads the argument MODEL: the folder of a bundle, a checkpoint, a model on the hub, or a URI."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from encserve import hub
from encserve_server.errors import BundleError
from encserve_server.repository.scan import check_name, version_key

MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHECKPOINT = ("config.json", "modules.json")  # a directory that has one of these is a checkpoint


@dataclass(frozen=True, slots=True)
class BundleFolder:
    """The folder of a bundle on this machine.

    Attributes:
        folder: NAME/VERSION.
        is_pinned: Whether the argument names the version. Otherwise the newest version is served.
    """

    folder: Path
    is_pinned: bool

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.folder.absolute().parent.name

    @property
    def repository(self) -> Path:
        """The model repository of the bundle."""
        return self.folder.absolute().parent.parent


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with a checkpoint.

    Attributes:
        directory: The directory.
        name: The name of the exported model.
    """

    directory: Path
    name: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A checkpoint on the hub.

    Attributes:
        repository: OWNER/NAME.
        revision: A branch, a tag or a commit; None for the main branch.
        name: The name of the exported model.
    """

    repository: str
    revision: str | None
    name: str

    @property
    def source(self) -> str:
        """OWNER/NAME or OWNER/NAME@REVISION."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RemoteBundle:
    """The URI of a bundle, which ends in NAME/VERSION."""

    uri: str

    @property
    def name(self) -> str:
        """The name of the model."""
        return PurePosixPath(urlsplit(self.uri).path).parent.name

    @property
    def version(self) -> str:
        """The version of the model."""
        return PurePosixPath(urlsplit(self.uri).path).name


Model = BundleFolder | Checkpoint | HubModel | RemoteBundle


def split_name(given: str) -> tuple[str | None, str]:
    """Split NAME=MODEL. The name is None if the argument is only a model."""
    name, equals, model = given.partition("=")
    if equals and NAME.fullmatch(name) and not Path(given).exists():
        return name, model
    return None, given


def check_version(version: str) -> None:
    """Check the argument of --version.

    Raises:
        ValueError: The version cannot be the name of a folder in a model repository.
    """
    try:
        check_name("--version", version)
    except BundleError as error:
        raise ValueError(str(error)) from error


def is_uri(given: str) -> bool:
    """Return whether an argument is the URI of a bundle."""
    return "://" in given


def read_model(given: str, name: str | None = None) -> Model:
    """Return the model that an argument names.

    Args:
        given: The argument has one of these forms:
            - NAME/VERSION, the folder of a bundle. This folder has a manifest.json.
            - NAME, a folder with versions of a bundle.
            - The URI of a bundle.
            - A directory with a checkpoint.
            - OWNER/NAME or OWNER/NAME@REVISION, a checkpoint on the hub.
        name: The name of the exported model; None for the name of the directory or of the repository.

    Raises:
        ValueError: The argument has none of these forms.
    """
    if is_uri(given):
        return RemoteBundle(given)
    path = Path(given).expanduser()
    if path.is_dir():
        return _in_directory(path, name)
    if path.exists():
        raise ValueError(f"{given}: is a file; a bundle is a folder with {MANIFEST}")
    repository, at, revision = given.partition("@")
    if not hub.is_id(repository) or (at and not revision):
        raise ValueError(
            f"{given}: there is no such folder; a model of the hub is named OWNER/NAME or OWNER/NAME@REVISION"
        )
    if not at and path.parent.is_dir():  # the user probably means a path
        raise ValueError(f"{given}: there is no such folder; for the model on the hub, give {given}@main")
    return HubModel(repository, revision or None, name or _name_of(repository.partition("/")[2]))


def newest_bundle(folder: Path) -> Path | None:
    """Return the newest version in the folder of a model; None if the folder has no bundle."""
    return max(_bundles(folder.iterdir()), key=lambda it: version_key(it.name), default=None)


def _in_directory(path: Path, name: str | None) -> Model:
    if (path / MANIFEST).is_file():
        return BundleFolder(path, is_pinned=True)
    if (newest := newest_bundle(path)) is not None:
        return BundleFolder(newest, is_pinned=False)
    if any((path / it).is_file() for it in _CHECKPOINT):
        directory = path.resolve()
        return Checkpoint(directory, name or _name_of(directory.name))
    models = sorted({it.parent.name for it in _bundles(path.glob("*/*"))})
    if models:
        raise ValueError(f"{path}: holds the models {', '.join(models)}; name one, as {path / models[0]}")
    raise ValueError(
        f"{path}: is not a bundle (has no {MANIFEST}), not a folder with versions of a bundle, and not a "
        f"checkpoint (has no {' or '.join(_CHECKPOINT)})"
    )


def _bundles(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are bundles. A folder with a leading "." is still being written."""
    return [it for it in folders if not it.name.startswith(".") and (it / MANIFEST).is_file()]


def _name_of(text: str) -> str:
    """Return a text as the name of a model."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:64] or "model"
