"""Has a checkpoint from the Hugging Face hub, at one commit."""

import dataclasses
import errno
import glob
import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from encserve_export.ground.errors import HubError, first_line
from encserve_export.source.weights import holds_weights

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything that says what the model is, and its weights in the one form that holds nothing but tensors.
_FILES = [
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.safetensors",
    "artifact.metadata",
    "colbert_linear.pt",
    "sparse_linear.pt",
]
_ONNX_FILES = ["onnx/model.onnx", "onnx/model.onnx_data*", "onnx/model.onnx.data*"]
# Of older models, in folders that have no other.
_PICKLES = "pytorch_model*.bin"
# The same weights for other programs.
_IGNORED = ["openvino/*", "coreml/*", "tf_model*", "flax_model*"]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A checkpoint of the hub, on this machine.

    Attributes:
        directory: Where it lies.
        repository: Its name there, OWNER/NAME.
        revision: The commit that it is of, in hex.
    """

    directory: Path
    repository: str
    revision: str


def is_id(text: str) -> bool:
    """Whether this could be OWNER/NAME on the hub."""
    return _ID.fullmatch(text) is not None


def download(repository: str, revision: str | None = None, *, with_onnx: bool = False) -> Snapshot:
    """Downloads a checkpoint into the cache of huggingface_hub, or finds it there.

    Args:
        repository: OWNER/NAME.
        revision: A branch, a tag or a commit; by default the main branch.
        with_onnx: Whether its onnx/model.onnx is wanted too; where there are no weights it is fetched anyway.

    Raises:
        HubError: It is not there, not open to this user, or the hub is not reached; the disk of the cache is full, and
            the text names the folder; or no revision is given and OWNER
            is a directory here, so that NAME is more likely a typing error than a model of the hub.
    """
    owner = repository.partition("/")[0]
    if revision is None and Path(owner).is_dir():
        raise HubError(
            f"there is no directory {repository}, though there is a directory {owner}. If you mean the model of that "
            "name on the hub, say so with --revision main"
        )
    wanted = [*_FILES, *(_ONNX_FILES if with_onnx else [])]
    try:
        path = Path(_snapshot(repository, revision, wanted))
        # The first answer told the commit, so the others are of the same one.
        _snapshot(repository, path.name, [_PICKLES, f"*/{_PICKLES}"], _pickles_beside_safetensors(path))
        if not with_onnx and not any(holds_weights(folder) for folder in (path, *path.glob("*/"))):
            _snapshot(repository, path.name, _ONNX_FILES)
    except GatedRepoError as error:
        raise HubError(
            f"{repository} is not open to everybody: ask for access on its page, then log in (hf auth login)"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repository} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"there is neither a directory {repository} here nor a model of that name on the hub that you may read"
        ) from error
    # RuntimeError is what the downloader of large files (hf_xet) raises.
    except (EntryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError, RuntimeError) as error:
        reason = first_line(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise HubError(
                f"the disk of {huggingface_hub.constants.HF_HUB_CACHE} is full: {reason}. Make room there, or name "
                "another folder with HF_HUB_CACHE"
            ) from error
        raise HubError(f"{repository} cannot be had from the hub, and there is no such directory: {reason}") from error
    return Snapshot(path, repository, path.name)


def _pickles_beside_safetensors(path: Path) -> list[str]:
    """The patterns of weights that a snapshot has in the better form already, folder by folder."""
    folders = {file.parent.relative_to(path).as_posix() for file in path.glob("**/*.safetensors")}
    return [_PICKLES if folder == "." else f"{glob.escape(folder)}/{_PICKLES}" for folder in folders]


def _snapshot(repository: str, revision: str | None, wanted: list[str], unwanted: Sequence[str] = ()) -> str:
    return str(
        huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=wanted, ignore_patterns=[*_IGNORED, *unwanted]
        )
    )
