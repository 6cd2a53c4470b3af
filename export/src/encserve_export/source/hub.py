"""Downloads a checkpoint from the Hugging Face hub. All files are from the same commit."""

import dataclasses
import glob
import re
from collections.abc import Iterable
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from encserve_export.core.errors import CheckpointFileError, HubError
from encserve_export.source.weights import holds_weights, read_json

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The files to download: configuration, tokenizer, safetensors, and the small pickles of ColBERT and BGE-M3.
_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.safetensors",
    "artifact.metadata",
    "colbert_linear.pt",
    "sparse_linear.pt",
)
# The weights of older models. They are downloaded for folders without safetensors.
_PICKLES = ("pytorch_model*.bin",)
_ONNX = ("model.onnx", "model.onnx_data*", "model.onnx.data*")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A downloaded checkpoint.

    Attributes:
        directory: The folder of the checkpoint in huggingface_hub's cache.
        repository: OWNER/NAME on the hub.
        revision: The hash of the downloaded commit, in hex.
    """

    directory: Path
    repository: str
    revision: str


def is_id(text: str) -> bool:
    """Return whether a text has the form OWNER/NAME."""
    return _ID.fullmatch(text) is not None


def download(repository: str, revision: str | None = None, *, with_onnx: bool = False) -> Snapshot:
    """Download a checkpoint into huggingface_hub's cache, unless the cache already has the checkpoint.

    The files come from the repository's root, and from the folders that modules.json and router_config.json name.

    Args:
        repository: OWNER/NAME.
        revision: A branch, a tag or a commit; None for the main branch.
        with_onnx: Whether to download onnx/model.onnx too. If the repository has no other weights, this file is always
            downloaded.

    Raises:
        HubError: The repository or the revision does not exist or is not accessible. Or the download failed. Or OWNER
            is a local directory and no revision is given: NAME may then be a typing error.
    """
    owner = repository.partition("/")[0]
    if revision is None and Path(owner).is_dir():
        raise HubError(
            f"no directory {repository}, but a directory {owner}. For the model on the hub, add --revision main"
        )
    try:
        return _download(repository, revision, with_onnx=with_onnx)
    except GatedRepoError as error:
        raise HubError(f"{repository} is gated: request access on its page, then log in (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repository} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"no directory {repository}, and no such model on the hub that you can read; a private model needs hf auth "
            "login"
        ) from error
    except (EntryNotFoundError, OSError, RuntimeError) as error:  # huggingface_hub's errors have no common base class
        raise HubError(
            f"no directory {repository}, and its download from the hub to {huggingface_hub.constants.HF_HUB_CACHE} "
            f"failed: {' '.join(str(error).split())}"
        ) from error


def _download(repository: str, revision: str | None, *, with_onnx: bool) -> Snapshot:
    path = _fetch(repository, revision, "", _FILES)
    commit = path.name  # all later requests use the same commit
    fetched = [""]
    while new := [folder for folder in _module_folders(path) if folder not in fetched]:
        for folder in new:
            _fetch(repository, commit, folder, _FILES)  # the folder may have a router_config.json
        fetched += new
    for folder in fetched:
        if not any((path / folder).glob("*.safetensors")):
            _fetch(repository, commit, folder, _PICKLES)
    if with_onnx or not any(holds_weights(path / folder) for folder in fetched):
        _fetch(repository, commit, "onnx", _ONNX)
    return Snapshot(path, repository, commit)


def _fetch(repository: str, revision: str | None, folder: str, patterns: Iterable[str]) -> Path:
    """Download the files of a folder, without its subfolders.

    A "*" in a pattern also matches "/". So `ignore_patterns` excludes the subfolders.
    """
    prefix = f"{glob.escape(folder)}/" if folder else ""
    return Path(
        huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[f"{prefix}{pattern}" for pattern in patterns],
            ignore_patterns=[f"{prefix}*/*"],
        )
    )


def _module_folders(snapshot: Path) -> list[str]:
    """Return the folders of the sentence-transformers modules, including the folders that routers name."""
    try:
        modules = read_json(snapshot / "modules.json")
        folders = [str(module["path"]) for module in modules if module["path"]]
        for folder in ["", *folders]:
            router = snapshot / folder / "router_config.json"
            if router.is_file():
                folders += [f"{folder}/{inner}".lstrip("/") for inner in read_json(router)["types"]]
    except (CheckpointFileError, TypeError, KeyError):  # the exporter reads the file again later, and reports the error
        return []
    return folders
