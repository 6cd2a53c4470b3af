"""The files of a checkpoint on the Hugging Face hub. The exporter and the command `encserve` download with this module.

All files are from the same commit. huggingface_hub reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, and keeps
the files in its cache.
"""

import fnmatch
import glob
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIGURATIONS = ("config.json", "modules.json")
_ROUTER = "router_config.json"
# The files that an export reads: configuration, tokenizer, safetensors, and the small pickles of ColBERT and BGE-M3.
_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"),
    *("artifact.metadata", "colbert_linear.pt", "sparse_linear.pt"),
)
# The weights of older models, for folders without safetensors.
_PICKLES = ("pytorch_model*.bin",)
_ONNX_FOLDER = "onnx"
_ONNX = ("model.onnx", "model.onnx_data*", "model.onnx.data*")
_WEIGHTS = ("*.safetensors", *_PICKLES, *_ONNX)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HOLDS_WEIGHTS = {"model.safetensors", "pytorch_model.bin", *_INDEXES}  # a folder with one of these has weights
_UNAUTHORIZED = 401
# huggingface_hub warns of patterns without a file, and its HTTP client logs each request.
_LOG_LEVELS = {"huggingface_hub": logging.ERROR, "httpx": logging.WARNING, "httpx2": logging.WARNING}
_MB = 1_000_000
_ANSWER_SECONDS = 10.0

OnBytes = Callable[[int, int], None]


class HubError(Exception):
    """A checkpoint cannot be downloaded from the Hugging Face hub."""


class UnknownRevision(HubError):
    """The repository has no such branch, tag or commit."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in huggingface_hub's cache.

    Attributes:
        directory: The folder of the checkpoint.
        repository: OWNER/NAME on the hub.
        revision: The hash of the commit, in hex.
    """

    directory: Path
    repository: str
    revision: str


@dataclass(frozen=True)
class Plan:
    """The files of a snapshot that an export reads.

    Attributes:
        files: The size in bytes of each file, by its path in the repository.
        missing: The paths of the files that are not in huggingface_hub's cache.
    """

    files: Mapping[str, int]
    missing: tuple[str, ...]

    @property
    def missing_bytes(self) -> int:
        """The number of bytes to download."""
        return sum(self.files[name] for name in self.missing)

    @property
    def weights_bytes(self) -> int:
        """The size of the weights in bytes, without ONNX files if there are other weights."""
        weights = [name for name in self.files if _matches(PurePosixPath(name).name, _WEIGHTS)]
        others = [name for name in weights if PurePosixPath(name).parent.name != _ONNX_FOLDER]
        return sum(self.files[name] for name in others or weights)


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
        HubError: The repository or the revision does not exist or is not accessible. Or the download failed.
    """
    snapshot = find(repository, revision)
    fetch(snapshot, plan(snapshot, with_onnx=with_onnx))
    return snapshot


def find(repository: str, revision: str | None = None) -> Snapshot:
    """Find the commit of a revision, and download only the files that name the parts of the checkpoint.

    If the hub does not answer within 10 seconds, the commit is the one in huggingface_hub's cache.

    Raises:
        UnknownRevision: The repository has no such revision.
        HubError: See `download`.
    """
    unreached = None if _is_offline() else _problem(repository, revision)
    try:
        with _named_errors(repository, revision):
            patterns = [*_CONFIGURATIONS, f"*{_ROUTER}"]
            path = _snapshot(repository, revision, patterns, local_files_only=unreached is not None)
    except HubError as error:
        raise unreached or error from None
    return Snapshot(path, repository, path.name)


def _problem(repository: str, revision: str | None) -> HubError | None:
    """Look for a revision on the hub. Return the error if the hub does not answer, or refuses the answer.

    `snapshot_download` alone would wait for a silent hub without limit.

    Raises:
        UnknownRevision: The repository has no such revision.
    """
    import huggingface_hub

    try:
        with _named_errors(repository, revision):
            huggingface_hub.HfApi().model_info(repository, revision=revision, timeout=_ANSWER_SECONDS)
    except UnknownRevision:
        raise
    except HubError as error:
        return error
    return None


def plan(snapshot: Snapshot, *, with_onnx: bool = False) -> Plan:
    """Return the files that an export of a snapshot reads. For `with_onnx`, see `download`.

    Raises:
        HubError: The hub cannot be reached, and a file is not in huggingface_hub's cache.
    """
    folders = _module_folders(snapshot.directory)
    if not _is_offline():
        try:
            return _plan_download(snapshot, folders, with_onnx=with_onnx)
        except HubError:
            if _missing_file(snapshot.directory, folders):
                raise
    elif missing := _missing_file(snapshot.directory, folders):
        raise HubError(_not_cached(snapshot.repository, snapshot.revision, missing))
    names = export_files(snapshot.directory, with_onnx=with_onnx)
    return Plan({name: (snapshot.directory / name).stat().st_size for name in names}, ())


def _plan_download(snapshot: Snapshot, folders: Sequence[str], *, with_onnx: bool) -> Plan:
    found: dict[str, Any] = {}
    with _named_errors(snapshot.repository, snapshot.revision):
        for folder in (*folders, _ONNX_FOLDER):
            found |= _listed(snapshot, folder)
    names = _selected(found, folders, with_onnx=with_onnx)
    files = {name: found[name].file_size or 0 for name in names}
    return Plan(files, tuple(name for name in names if found[name].will_download))


def fetch(snapshot: Snapshot, plan: Plan, on_bytes: OnBytes | None = None) -> None:
    """Download the missing files of a plan. A broken connection is resumed a few times.

    Args:
        snapshot: The checkpoint.
        plan: The plan of this checkpoint.
        on_bytes: Called with the number of downloaded bytes and the number of all bytes. An exception of `on_bytes`
            ends a download over HTTP and passes through. A download over Xet may go on.

    Raises:
        HubError: The download failed, or the disk has too little space.
    """
    if not plan.missing:
        return
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(it for it in (cache, *cache.parents) if it.exists())).free
    if free < plan.missing_bytes:
        raise HubError(
            f"{snapshot.repository}: the download needs {plan.missing_bytes / _MB:,.0f} MB in {cache}, but only "
            f"{free / _MB:,.0f} MB are free. Free some space, or set HF_HOME to a folder on another disk"
        )
    with _named_errors(snapshot.repository, snapshot.revision):
        _snapshot(
            snapshot.repository,
            snapshot.revision,
            [glob.escape(name) for name in plan.files],
            tqdm_class=None if on_bytes is None else _counter(on_bytes, plan.missing_bytes),
        )


def export_files(directory: Path, *, with_onnx: bool = True) -> list[str]:
    """Return the files of a directory that an export reads, as paths in the directory, sorted.

    Raises:
        OSError: A folder cannot be read.
    """
    folders = _module_folders(directory)
    names = []
    for folder in (*folders, _ONNX_FOLDER):
        if (directory / folder).is_dir():
            names += [_joined(folder, it.name) for it in (directory / folder).iterdir() if it.is_file()]
    return sorted(_selected(names, folders, with_onnx=with_onnx))


def _selected(names: Iterable[str], folders: Sequence[str], *, with_onnx: bool) -> list[str]:
    """Return the names of the files that an export reads."""
    by_folder: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_folder.setdefault(name.rpartition("/")[0], []).append(name)
    chosen = []
    for folder in folders:
        inside = by_folder.get(folder, [])
        found = [name for name in inside if _matches(PurePosixPath(name).name, _FILES)]
        if not any(name.endswith(".safetensors") for name in found):
            found += [name for name in inside if _matches(PurePosixPath(name).name, _PICKLES)]
        chosen += found
    if with_onnx or not _hold_weights(chosen):
        onnx = by_folder.get(_ONNX_FOLDER, [])
        chosen += [name for name in onnx if name not in chosen and _matches(PurePosixPath(name).name, _ONNX)]
    return chosen


def _hold_weights(names: Iterable[str]) -> bool:
    return any(PurePosixPath(name).name in _HOLDS_WEIGHTS for name in names)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _module_folders(directory: Path) -> list[str]:
    """Return the root and the folders of the sentence-transformers modules, including the folders that routers name."""
    folders = [""]
    try:
        modules = json.loads((directory / "modules.json").read_bytes())
        folders += [str(module["path"]) for module in modules if module["path"]]
        for folder in list(folders):
            router = directory / folder / _ROUTER
            if router.is_file():
                folders += [_joined(folder, str(inner)) for inner in json.loads(router.read_bytes())["types"]]
    except FileNotFoundError:
        pass  # a checkpoint without modules
    except (OSError, ValueError, TypeError, KeyError):
        return [""]  # the exporter reads the file again later, and reports the error
    return list(dict.fromkeys(folders))


def _missing_file(directory: Path, folders: Sequence[str]) -> str:
    """Return a file that an export needs and that an incomplete snapshot does not have. Empty for a complete one."""
    if not any((directory / name).is_file() for name in _CONFIGURATIONS):
        return _CONFIGURATIONS[0]
    for folder in folders:
        for index in _INDEXES:
            if (path := directory / folder / index).is_file():
                for name in sorted(set(json.loads(path.read_bytes())["weight_map"].values())):
                    if not (directory / folder / name).is_file():
                        return _joined(folder, name)
    names = export_files(directory)
    has_onnx = any(_matches(name, [f"{_ONNX_FOLDER}/{_ONNX[0]}"]) for name in names)
    return "" if has_onnx or _hold_weights(names) else "model.safetensors"


def _listed(snapshot: Snapshot, folder: str) -> dict[str, Any]:
    """Return huggingface_hub's `DryRunFileInfo` of each file in a folder that an export may read, by its path."""
    import huggingface_hub

    patterns = _ONNX if folder == _ONNX_FOLDER else (*_FILES, *_PICKLES)
    prefix = f"{glob.escape(folder)}/" if folder else ""
    found: Any = huggingface_hub.snapshot_download(
        snapshot.repository,
        revision=snapshot.revision,
        allow_patterns=[f"{prefix}{pattern}" for pattern in patterns],
        ignore_patterns=[f"{prefix}*/*"],  # a "*" also matches "/"
        dry_run=True,
        tqdm_class=_counter(lambda *_: None, 0),
    )
    return {it.filename: it for it in found}


def _snapshot(
    repository: str,
    revision: str | None,
    patterns: list[str],
    tqdm_class: Any = None,
    *,
    local_files_only: bool = False,
) -> Path:
    import huggingface_hub

    found = huggingface_hub.snapshot_download(
        repository,
        revision=revision,
        allow_patterns=patterns,
        tqdm_class=tqdm_class or _counter(lambda *_: None, 0),
        local_files_only=local_files_only,
    )
    return Path(found)


def _counter(on_bytes: OnBytes, total_bytes: int) -> Any:
    """Return a class for `tqdm_class`: silent bars that report the number of bytes.

    huggingface_hub has two bars of bytes: one for the network, and one for the disk. The larger number is reported.
    """
    from tqdm.auto import tqdm

    counts: dict[int, float] = {}

    class Counter(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._counts_bytes = settings.get("unit") == "B"
            settings.pop("name", None)  # huggingface_hub's own class takes a name
            super().__init__(*arguments, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes:
                counts[id(self)] = counts.get(id(self), 0) + (n or 0)
                on_bytes(min(int(max(counts.values())), total_bytes), total_bytes)
            return super().update(n)  # type: ignore[no-any-return]

    return Counter


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _named_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub, which have no common base class, into a `HubError` in one line.

    Errors of the HTTP library pass through huggingface_hub. Their base class is a base of `HfHubHTTPError`.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    bases = (it for it in HfHubHTTPError.__bases__ if issubclass(it, Exception))
    failures: tuple[type[Exception], ...] = (EntryNotFoundError, RuntimeError, *bases)
    for name, level in _LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{repository} is gated: request access on its page, then log in (hf auth login), or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise UnknownRevision(f"{repository} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"no directory {repository}, and no such model on the hub that you can read; a private model needs hf auth "
            "login, or HF_TOKEN"
        ) from error
    except failures as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == _UNAUTHORIZED:
            raise HubError(
                f"{repository}: the hub refuses your token. Set HF_TOKEN to a valid token, or log in again (hf auth "
                "login)"
            ) from error
        if _is_offline():
            raise HubError(_not_cached(repository, revision, "a file")) from error
        raise HubError(
            f"no directory {repository}, and its download from the hub to {constants.HF_HUB_CACHE} "
            f"failed: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _not_cached(repository: str, revision: str | None, name: str) -> str:
    from huggingface_hub import constants

    at = "" if revision is None else f"@{revision}"
    return (
        f"no directory {repository}, and {name} of {repository}{at} is not in "
        f"{constants.HF_HUB_CACHE}; HF_HUB_OFFLINE forbids a download. With a network, run: "
        f"HF_HUB_OFFLINE=0 encserve pull {repository}{at} --to models"
    )
