"""Tests of the search for the bundle that --bundle names. A bundle is the folder of an exported model.

The argument is a bundle, a model's folder, a URI, a checkpoint, or a name on the Hugging Face hub.
"""

import errno
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_exporter import FakeExporter
from tiny_bundle import write_bundle

from encserve_cli.bundles import exporting, finding
from encserve_cli.bundles.argument import BundleFolder, HubModel, read_model, split_name
from encserve_cli.bundles.exporting import ExportOptions
from encserve_cli.bundles.finding import find_bundle, prepare, pull
from encserve_cli.bundles.work import Stopped

Exports = Callable[[], list[str]]


class Steps:
    """A `Work` that stores all stages, notes and details. `stage` calls `on_stage`."""

    def __init__(self, on_stage: Callable[[str], None] = lambda _: None) -> None:
        self.on_stage = on_stage
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.details: list[str] = []

    def stage(self, text: str, fraction: float | None = None) -> None:
        del fraction
        self.stages.append(text)
        self.on_stage(text)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def detail(self, line: str) -> None:
        self.details.append(line)


def stop_at(beginning: str) -> Steps:
    """Make a `Work` that stops at the first stage whose text starts with `beginning`."""

    def stop(text: str) -> None:
        if text.startswith(beginning):
            raise Stopped

    return Steps(stop)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move the user's cache into the test's folder, and return the folder of the cached bundles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "encserve" / "bundles"


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exports:
    """Install a fake encserve-export. Return a function that lists the runs of the fake as "SOURCE NAME OPTION…"."""
    exporter = FakeExporter(tmp_path / "exporter")
    monkeypatch.setenv("PYTHONPATH", exporter.python_path)
    return exporter.runs


def make_bundle(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0")
    return folder


def refuse_to_write(*_: object, **__: object) -> str:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def entries(cache: Path) -> list[str]:
    """Return the names of everything in the cache, hidden files and locks included."""
    return sorted(it.name for it in cache.iterdir())


# Tests of the argument.


def test_the_folder_of_a_bundle_is_used_directly(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "models" / "tiny" / "1")
    assert find_bundle(str(bundle)) == bundle
    assert read_model(str(bundle)) == BundleFolder(bundle, is_pinned=True)


def test_the_folder_of_a_model_gives_the_newest_version(tmp_path: Path) -> None:
    for version in ("1", "9", "10", "10-rc1", ".11-unfinished"):
        make_bundle(tmp_path / "models" / "tiny" / version)
    assert find_bundle("models/tiny") == Path("models/tiny/10")
    assert read_model("models/tiny") == BundleFolder(Path("models/tiny/10"), is_pinned=False)


def test_the_error_of_a_repository_lists_the_models(tmp_path: Path) -> None:
    for name in ("tiny", "large"):
        make_bundle(tmp_path / "models" / name / "1")
    with pytest.raises(ValueError, match="holds the models large, tiny; name one, as models/large"):
        find_bundle("models")


@pytest.mark.parametrize("given", ["models/tiny", "./tiny", "/no/such/folder", "tiny", "a/b/c", "~/none", "a/b@"])
def test_a_missing_path_is_not_a_hub_name(given: str, tmp_path: Path, exports: Exports) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match=f"--bundle {given}: "):
        find_bundle(given)
    assert exports() == []


def test_a_folder_without_a_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a bundle .* and not a checkpoint"):
        find_bundle("empty")
    with pytest.raises(ValueError, match="is a file"):
        find_bundle("file")


def test_a_hub_name_may_have_a_revision_and_a_name(tmp_path: Path) -> None:
    assert read_model("owner/name-v2") == HubModel("owner/name-v2", None, "name-v2")
    assert read_model("owner/name@refs/pr/1") == HubModel("owner/name", "refs/pr/1", "name")
    (tmp_path / "owner").mkdir()
    with pytest.raises(ValueError, match="for the model on the hub, give owner/name@main"):
        read_model("owner/name")
    assert read_model("owner/name@main") == HubModel("owner/name", "main", "name")
    assert split_name("mine=owner/name") == ("mine", "owner/name")
    assert split_name("owner/name") == (None, "owner/name")
    assert read_model("owner/name@main", "mine") == HubModel("owner/name", "main", "mine")
    (tmp_path / "a=b").mkdir()
    assert split_name("a=b") == (None, "a=b")


# Tests of exports.


def test_a_checkpoint_is_exported_once(
    tmp_path: Path, cache: Path, exports: Exports, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exporter writes the bundle of a checkpoint to the user's cache. A second call uses this bundle.

    If a file that an export reads has changed, the exporter writes another bundle. Nothing is written to stdout.
    """
    checkpoint = make_checkpoint(tmp_path / "my encoder")
    bundle = find_bundle("my encoder")
    assert bundle == find_bundle(str(checkpoint))
    assert bundle.parts[-2:] == ("my-encoder", "1")
    assert bundle.is_relative_to(cache)
    assert exports() == [f"{checkpoint} my-encoder --precision float32"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "exporting: reading the weights\n" in err
    assert "is not a bundle yet: export with up to 1.0 GB of memory" in err
    for path in checkpoint.iterdir():
        os.utime(path, (0, 0))
    (checkpoint / "README.md").write_text("not read by an export")
    assert find_bundle("my encoder") == bundle
    (checkpoint / "model.safetensors").write_bytes(b"1")
    assert find_bundle("my encoder") != bundle
    assert len(exports()) == 2
    assert len(entries(cache)) == 2


def test_each_option_and_name_has_its_own_bundle(tmp_path: Path, exports: Exports) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "my-encoder"))
    write_bundle(tmp_path / "exporter" / "ready", "other", "1")
    work = Steps()
    int8 = ExportOptions("int8", "cls", 64, ignore_head=True)
    found = {
        prepare(read_model(checkpoint, name), options, work)
        for name, options in ((None, ExportOptions()), (None, int8), ("other", ExportOptions()))
        for _ in range(2)
    }
    assert len(found) == 3
    assert exports() == [
        f"{checkpoint} my-encoder --precision float32",
        f"{checkpoint} my-encoder --precision int8 --pooling cls --max-sequence-tokens 64 --ignore-head",
        f"{checkpoint} other --precision float32",
    ]
    assert work.details == ["the report"] * 3


def test_a_program_on_the_path_is_not_the_exporter(
    tmp_path: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs the installed exporter. It runs neither a program on PATH nor a module in the current folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in (programs / "encserve-export", tmp_path / "encserve.py"):
        program.write_text("#!/bin/sh\nexit 9\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    find_bundle(str(make_checkpoint(tmp_path / "my-encoder")))
    assert len(exports()) == 1


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, exports: Exports, cache: Path) -> None:
    make_checkpoint(tmp_path / "broken")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^--bundle the weights are broken$"):
            find_bundle("broken")
    assert len(exports()) == 2
    assert entries(cache) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "no manifest", "no folder"])
def test_a_broken_bundle_is_made_again(tmp_path: Path, exports: Exports, damage: str) -> None:
    model = read_model(str(make_checkpoint(tmp_path / "my-encoder")))
    work = Steps()
    bundle = prepare(model, ExportOptions(), work)
    graph = bundle / "model.onnx"
    if damage == "cut":
        os.truncate(graph, 10)
    elif damage == "changed":
        graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    elif damage == "no manifest":
        (bundle / "manifest.json").unlink()
    else:
        shutil.rmtree(bundle.parent)
    work.notes.clear()
    assert prepare(model, ExportOptions(), work) == bundle
    assert len(exports()) == 2
    assert "and will be made again" in work.notes[0]
    assert prepare(model, ExportOptions(), work) == bundle
    assert len(exports()) == 2


def test_a_stop_ends_the_export_and_leaves_nothing(tmp_path: Path, exports: Exports, cache: Path) -> None:
    model = read_model(str(make_checkpoint(tmp_path / "my-encoder")))
    with pytest.raises(Stopped):
        prepare(model, ExportOptions(), stop_at("exporting"))
    assert entries(cache) == []


def test_two_processes_make_a_bundle_once(tmp_path: Path, exports: Exports, cache: Path) -> None:
    """A process that does not get the lock waits, and then finds the finished bundle."""
    model = read_model(str(make_checkpoint(tmp_path / "my-encoder")))
    bundle = prepare(model, ExportOptions(), Steps())
    entry = bundle.parent.parent
    entry.rename(cache / "elsewhere")
    waiting = threading.Event()
    work = Steps(lambda text: waiting.set() if text.startswith("waiting for another process") else None)
    found: list[Path] = []
    with (cache / f".{entry.name}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(prepare(model, ExportOptions(), work)))
        thread.start()
        assert waiting.wait(60)
        (cache / "elsewhere").rename(entry)
    thread.join(60)
    assert found == [bundle]
    assert len(exports()) == 1
    assert entries(cache) == [entry.name]


def test_the_folders_of_killed_processes_are_removed(tmp_path: Path, exports: Exports, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / ".my-encoder-0123.making" / "bundle").mkdir(parents=True)
    (cache / ".busy-4567.making").mkdir()
    with (cache / ".busy-4567.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        bundle = find_bundle(str(make_checkpoint(tmp_path / "my-encoder")))
        assert entries(cache) == [".busy-4567.lock", ".busy-4567.making", bundle.parent.parent.name]


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, exports: Exports, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(OSError, match="other users can write to it; chmod 700"):
        find_bundle(str(make_checkpoint(tmp_path / "my-encoder")))
    cache.chmod(0o700)
    find_bundle("my-encoder")
    cache.chmod(0o777)
    with pytest.raises(OSError, match="other users can write to it; chmod 700"):
        find_bundle("my-encoder")


def test_a_finished_bundle_is_used_from_a_read_only_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model(f"file://{write_bundle(tmp_path / 'remote')}")
    bundle = prepare(model, ExportOptions(), Steps())
    for path in cache.glob(".commit-*"):
        path.unlink()
    monkeypatch.setattr(tempfile, "mkdtemp", refuse_to_write)
    monkeypatch.setattr(Path, "write_text", refuse_to_write)
    assert prepare(model, ExportOptions(), Steps()) == bundle


def test_without_pytorch_the_error_names_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    checkpoint = make_checkpoint(tmp_path / "my-encoder")
    with pytest.raises(ValueError, match="needs PyTorch") as error:
        find_bundle(str(checkpoint))
    assert str(error.value) == (
        f"--bundle {checkpoint} is a checkpoint and must be exported first. The export needs PyTorch (1.4 GB on disk "
        'for the CPU build). Install PyTorch with: pip install "encserve[export]". Or run `encserve pull '
        f"{checkpoint} --to models` on another machine, and use models/my-encoder here"
    )


def test_an_export_that_needs_more_memory_than_the_machine_has_is_refused(
    tmp_path: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, 40 MB of float16 weights take 80 MB. An export takes 3 times 80 MB, plus 1.03 GB."""
    checkpoint = make_checkpoint(tmp_path / "my-encoder")
    (checkpoint / "config.json").write_text('{"torch_dtype": "float16"}')
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(40_000_000)
    monkeypatch.setattr(exporting, "usable_bytes", lambda: 1_240_000_000)
    with pytest.raises(ValueError, match=r"needs up to 1\.3 GB of memory, but this machine or container has 1\.2 GB"):
        find_bundle(str(checkpoint))
    assert exports() == []
    monkeypatch.setattr(exporting, "usable_bytes", lambda: 1_300_000_000)
    find_bundle(str(checkpoint))


# Tests of URIs.


def test_the_bundle_of_a_uri_is_copied_once(tmp_path: Path, cache: Path) -> None:
    remote = write_bundle(tmp_path / "remote")
    bundle = find_bundle(f"file://{remote}")
    assert bundle.is_relative_to(cache)
    assert bundle.parts[-2:] == ("tiny", "1")
    assert {it.name for it in bundle.iterdir()} == {it.name for it in remote.iterdir()}
    assert find_bundle(f"file://{remote}") == bundle
    shutil.rmtree(remote)
    write_bundle(tmp_path / "remote", prompts={"query": "query: "})
    assert find_bundle(f"file://{remote}") != bundle
    with pytest.raises(ValueError, match=r"has no manifest.json"):
        find_bundle(f"file://{remote.parent}")


def test_the_copy_of_a_uri_is_found_without_the_store(tmp_path: Path, cache: Path) -> None:
    model = read_model(f"file://{write_bundle(tmp_path / 'remote')}")
    bundle = prepare(model, ExportOptions(), Steps())
    pulled = pull(model, ExportOptions(), tmp_path / "models", "1", Steps())
    shutil.rmtree(tmp_path / "remote")
    (tmp_path / "remote").symlink_to("remote")  # the link points to itself, so every read raises OSError
    work = Steps()
    assert prepare(model, ExportOptions(), work) == bundle
    assert pull(model, ExportOptions(), tmp_path / "models", "1", work) == pulled
    assert all(note.endswith(". Continuing with the files copied before") for note in work.notes)
    assert len(work.notes) == 2
    shutil.rmtree(bundle.parent.parent)
    with pytest.raises(OSError, match="remote"):
        prepare(model, ExportOptions(), work)


def test_a_copy_names_its_stage_and_can_be_stopped(tmp_path: Path, cache: Path) -> None:
    work = stop_at("copying ")
    with pytest.raises(Stopped):
        prepare(read_model(f"file://{write_bundle(tmp_path / 'remote')}"), ExportOptions(), work)
    assert work.stages[-1].endswith(" MB")
    assert entries(cache) == []


def test_a_uri_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"file://{write_bundle(tmp_path / 'remote')}"
    monkeypatch.delitem(sys.modules, "encserve_cli.bundles.uris", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with pytest.raises(ValueError, match=r'needs pyarrow: pip install "encserve\[cli\]"'):
        find_bundle(uri)


# Tests of `encserve pull`.


def test_pull_writes_a_bundle_into_a_model_repository(tmp_path: Path, exports: Exports) -> None:
    checkpoint, models, work = make_checkpoint(tmp_path / "my-encoder"), tmp_path / "models", Steps()
    model = read_model(str(checkpoint))
    assert pull(model, ExportOptions(), models, "1", work) == models / "my-encoder" / "1"
    assert pull(model, ExportOptions(), models, "1", work) == models / "my-encoder" / "1"
    assert len(exports()) == 1
    (models / "my-encoder" / "1" / "model.onnx").write_bytes(b"")
    assert pull(model, ExportOptions(), models, "1", work) == models / "my-encoder" / "1"
    assert len(exports()) == 2
    (checkpoint / "model.safetensors").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"my-encoder/1 exists and holds another bundle: give another --version"):
        pull(model, ExportOptions(), models, "1", work)
    assert pull(model, ExportOptions(), models, "2", work) == models / "my-encoder" / "2"
    assert [it.name for it in models.iterdir()] == ["my-encoder"]
    with pytest.raises(ValueError, match="is a bundle already"):
        pull(read_model(str(models / "my-encoder")), ExportOptions(), models, "1", work)


def test_pull_keeps_the_bundle_of_another_version_of_encserve(
    tmp_path: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model(str(make_checkpoint(tmp_path / "my-encoder")))
    pulled = pull(model, ExportOptions(), tmp_path / "models", "1", Steps())
    monkeypatch.setattr(finding, "__version__", "999.0.0")
    assert pull(model, ExportOptions(), tmp_path / "models", "1", Steps()) == pulled
    assert len(exports()) == 1


def test_pull_does_not_take_a_bundle_in_the_place_of_its_own(tmp_path: Path, exports: Exports) -> None:
    """`pull` refuses to overwrite another bundle, which the user has put into the folder of the pulled bundle."""
    model = read_model(str(make_checkpoint(tmp_path / "my-encoder")))
    pulled = pull(model, ExportOptions(), tmp_path / "models", "1", Steps())
    shutil.rmtree(pulled)
    write_bundle(tmp_path / "models", "my-encoder", "1", prompts={"query": "query: "})
    with pytest.raises(ValueError, match="exists and holds another bundle"):
        pull(model, ExportOptions(), tmp_path / "models", "1", Steps())


def test_pull_copies_a_finished_bundle_from_the_cache(tmp_path: Path, exports: Exports) -> None:
    model = read_model(str(make_checkpoint(tmp_path / "my-encoder")))
    prepare(model, ExportOptions(), Steps())
    pulled = pull(model, ExportOptions(), tmp_path / "models", "1", Steps())
    assert (pulled / "manifest.json").is_file()
    assert len(exports()) == 1
