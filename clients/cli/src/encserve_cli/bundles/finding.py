"""Finds or makes the bundle of a model."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from encserve import __version__, hub
from encserve.extras import needs
from encserve_cli.bundles import exporting
from encserve_cli.bundles.argument import (
    BundleFolder,
    Checkpoint,
    HubModel,
    Model,
    RemoteBundle,
    check_version,
    read_model,
)
from encserve_cli.bundles.cache import BundleCache, LastKnown, Make, key_of, publish
from encserve_cli.bundles.exporting import ExportOptions
from encserve_cli.bundles.work import Work, shown_work
from encserve_cli.shared import one_line

_FIRST_VERSION = "1"
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class _Source:
    """A model that becomes a bundle.

    Attributes:
        name: The name of the model.
        version: The version of the model.
        facts: The properties that determine the bundle.
        make: Makes the bundle NAME/VERSION.
    """

    name: str
    version: str
    facts: Mapping[str, object]
    make: Make


def find_bundle(given: str) -> Path:
    """Return the folder of the bundle of --bundle. Show the preparation on standard error.

    Args:
        given: See `read_model`.

    Raises:
        ValueError: The argument is not a model, or the model cannot become a bundle on this machine.
        RuntimeError: The download or the export failed.
        OSError: A file cannot be read, or the cache cannot be written.
    """
    try:
        with shown_work() as work:
            return prepare(read_model(given), ExportOptions(), work)
    except ValueError as error:
        raise ValueError(f"--bundle {error}") from error
    except (RuntimeError, hub.HubError) as error:
        raise RuntimeError(f"--bundle {error}") from error


def prepare(model: Model, options: ExportOptions, work: Work) -> Path:
    """Return the folder of a model's bundle. If the cache does not have the bundle, make the bundle in the cache.

    If the newest commit cannot become a bundle now, the finished bundle of the last served commit is returned.

    Raises:
        ValueError: The model cannot become a bundle on this machine: PyTorch or memory is missing, or a URI is wrong.
        HubError: The checkpoint cannot be downloaded.
        RuntimeError: The export failed.
        OSError: A file cannot be read, or the cache cannot be written.
        Stopped: `work` stopped the preparation.
    """
    if isinstance(model, BundleFolder):
        return model.folder
    cache = BundleCache()
    last_known = LastKnown(cache.folder)
    work.stage("looking for the model")
    try:
        source = _source_of(model, options, _FIRST_VERSION, work)
        bundle = cache.get(source.name, key_of(source.facts), source.make, work)
    except hub.UnknownRevision:
        raise
    except (ValueError, OSError, RuntimeError, hub.HubError) as error:
        earlier = _earlier_source(model, options, _FIRST_VERSION, last_known, error)
        if earlier is None:
            raise
        finished = cache.find(earlier.name, key_of(earlier.facts), work)
        if finished is None:
            raise
        work.note(_continuing(error, earlier))
        return finished
    _remember(model, source, last_known)
    return bundle


def pull(model: Model, options: ExportOptions, repository: Path, version: str, work: Work) -> Path:
    """Make the bundle of a model in a model repository, as NAME/VERSION. Return the folder of the bundle.

    A finished bundle in the user's cache is copied.

    Raises:
        ValueError: See `prepare`. Also if the version exists and is another bundle. Also if the model is a bundle
            already, or `version` cannot be the name of a folder.
        HubError, RuntimeError, OSError, Stopped: See `prepare`.
    """
    check_version(version)
    if isinstance(model, BundleFolder):
        raise ValueError(f"{model.folder}: is a bundle already; `encserve serve {model.folder}` serves the bundle")
    work.stage("looking for the model")
    cache, last_known = BundleCache(), LastKnown(repository)
    failed: Exception | None = None
    try:
        source = _source_of(model, options, version, work)
    except hub.UnknownRevision:
        raise
    except (hub.HubError, OSError) as error:
        earlier = _earlier_source(model, options, version, last_known, error)
        if earlier is None:
            raise
        source, failed = earlier, error
    key = key_of(source.facts)

    def make(folder: Path, temporary: Path) -> None:
        kept = cache.find(source.name, key, work)
        if kept is None:
            source.make(folder, temporary)
        else:
            shutil.copytree(kept, folder / source.name / source.version)

    bundle = publish(repository, source.name, source.version, source.facts, make, work)
    if failed is not None:
        work.note(_continuing(failed, source))
    _remember(model, source, last_known)
    return bundle


def _source_of(
    model: Checkpoint | HubModel | RemoteBundle, options: ExportOptions, version: str, work: Work
) -> _Source:
    if isinstance(model, RemoteBundle):
        return _remote(model, work)
    if isinstance(model, Checkpoint):
        facts = _export_facts(model.name, options, version) | {"directory": _digest(model.directory, work)}
        return _Source(model.name, version, facts, _exports_directory(model, options, version, work))
    snapshot = hub.find(model.repository, model.revision)
    facts = _commit_facts(model, options, version, snapshot.revision)
    return _Source(model.name, version, facts, _exports_snapshot(model, snapshot, options, version, work))


def _export_facts(name: str, options: ExportOptions, version: str) -> dict[str, object]:
    return {"encserve": __version__, "name": name, "version": version, "options": asdict(options)}


def _commit_facts(model: HubModel, options: ExportOptions, version: str, commit: str) -> dict[str, object]:
    return _export_facts(model.name, options, version) | {"repository": model.repository, "commit": commit}


def _earlier_source(
    model: Model, options: ExportOptions, version: str, last_known: LastKnown, error: Exception
) -> _Source | None:
    """Return the last served commit of a model on the hub, or the last copied files of a URI, or None.

    If the cache has no finished bundle of this source, the source's `make` raises `error`.
    """

    def make(*_: Path) -> None:
        raise error

    if isinstance(model, HubModel) and (commit := last_known.recall(model.source)):
        return _Source(model.name, version, _commit_facts(model, options, version, commit), make)
    # Only an OSError can be an error of the network. A URI without a bundle raises ValueError.
    if isinstance(model, RemoteBundle) and isinstance(error, OSError) and (files := last_known.recall(model.uri)):
        return _Source(model.name, model.version, {"uri": model.uri, "files": json.loads(files)}, make)
    return None


def _continuing(error: Exception, source: _Source) -> str:
    what = f"commit {source.facts['commit']}, which was exported" if "commit" in source.facts else "the files copied"
    return f"{one_line(error)}. Continuing with {what} before"


def _remote(model: RemoteBundle, work: Work) -> _Source:
    with needs(model.uri, "cli", ValueError):
        from encserve_cli.bundles.uris import copy_bundle, list_bundle

    files = list_bundle(model.uri)

    def make(folder: Path, _: Path) -> None:
        copy_bundle(model.uri, files, folder / model.name / model.version, work)

    return _Source(model.name, model.version, {"uri": model.uri, "files": files}, make)


def _digest(directory: Path, work: Work) -> str:
    """Return the SHA-256 of the names and contents of the files that an export reads."""
    digest = hashlib.sha256()
    for name in hub.export_files(directory):
        work.stage(f"reading {name}")
        with (directory / name).open("rb") as file:
            digest.update(f"{name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _exports_directory(model: Checkpoint, options: ExportOptions, version: str, work: Work) -> Make:
    def plan() -> hub.Plan:
        names = hub.export_files(model.directory)
        return hub.Plan({name: (model.directory / name).stat().st_size for name in names}, ())

    return _exports(str(model.directory), model.name, model.directory, plan, options, version, work)


def _exports_snapshot(
    model: HubModel, snapshot: hub.Snapshot, options: ExportOptions, version: str, work: Work
) -> Make:
    return _exports(model.source, model.name, snapshot, lambda: hub.plan(snapshot), options, version, work)


def _exports(
    source: str,
    name: str,
    checkpoint: Path | hub.Snapshot,
    plan_files: Callable[[], hub.Plan],
    options: ExportOptions,
    version: str,
    work: Work,
) -> Make:
    """Return a function that checks, downloads if necessary, and exports a checkpoint.

    `source` names the checkpoint in messages.
    """
    directory = checkpoint.directory if isinstance(checkpoint, hub.Snapshot) else checkpoint

    def make(folder: Path, temporary: Path) -> None:
        exporting.check_exporter(source, name)
        exporting.check_settings(source, directory, options)
        plan = plan_files()
        needed = exporting.check_memory(source, plan.weights_bytes, directory)
        _announce(source, needed, plan.missing_bytes, work)
        if isinstance(checkpoint, hub.Snapshot):
            hub.fetch(checkpoint, plan, tell)
        exporting.export(checkpoint, name, options, version=version, repository=folder, temporary=temporary, work=work)

    def tell(done: int, total: int) -> None:
        fraction = done / total if total else None
        work.stage(f"downloading {done / _MB:,.0f} of {total / _MB:,.0f} MB", fraction)

    return make


def _announce(source: str, memory_bytes: int, download_bytes: int, work: Work) -> None:
    """Say what a first start takes."""
    download = f"download {download_bytes / _MB:,.0f} MB, then " if download_bytes else ""
    work.note(
        f"{source} is not a bundle yet: {download}export with up to {memory_bytes / 1e9:.1f} GB of memory. "
        "Later starts use the finished bundle"
    )


def _remember(model: Model, source: _Source, last_known: LastKnown) -> None:
    if isinstance(model, HubModel):
        last_known.remember(model.source, str(source.facts["commit"]))
    elif isinstance(model, RemoteBundle):
        last_known.remember(model.uri, json.dumps(source.facts["files"]))
