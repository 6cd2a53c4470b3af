"""A bundle appears complete or not at all, under a plain name."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from encserve_export.bundle.store import draft, held_signals, name_from, scratch, temporary_folder
from encserve_export.ground.errors import BundleError, BundleExistsError, BundleNameError


def write(models: Path, content: str, *, overwrite: bool = False) -> None:
    with draft(models, "model", "1", overwrite=overwrite) as folder:
        (folder / "manifest.json").write_text(content)


def write_half(models: Path, *, overwrite: bool) -> None:
    with draft(models, "model", "1", overwrite=overwrite) as folder:
        (folder / "manifest.json").write_text("new")
        raise ZeroDivisionError


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_draft_becomes_the_version(models: Path) -> None:
    with draft(models, "model", "1", overwrite=False) as folder:
        assert folder.parent == models / "model"
        assert folder.name.startswith("."), "a server that looks for versions must not see it"
        (folder / "manifest.json").write_text("a")
        (folder / "manifest.json").chmod(0o600)
        assert not (models / "model" / "1").exists()
    assert everything(models) == ["model", "model/1", "model/1/manifest.json"]
    assert (models / "model" / "1").stat().st_mode & 0o777 == 0o755
    assert (models / "model" / "1" / "manifest.json").stat().st_mode & 0o777 == 0o644


def test_a_failure_leaves_nothing(models: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_half(models, overwrite=False)
    assert not models.exists()


def test_a_failure_leaves_what_was_there(models: Path) -> None:
    write(models, "old")
    with pytest.raises(ZeroDivisionError):
        write_half(models, overwrite=True)
    assert everything(models) == ["model", "model/1", "model/1/manifest.json"]
    assert (models / "model" / "1" / "manifest.json").read_text() == "old"


def test_a_version_is_not_replaced_unless_asked(models: Path) -> None:
    write(models, "old")
    with pytest.raises(BundleExistsError, match=r"model/1 exists; give another version, or --overwrite"):
        write(models, "new")
    assert (models / "model" / "1" / "manifest.json").read_text() == "old"
    write(models, "new", overwrite=True)
    assert everything(models) == ["model", "model/1", "model/1/manifest.json"]
    assert (models / "model" / "1" / "manifest.json").read_text() == "new"


def test_a_version_that_another_export_finished_first_is_not_replaced(models: Path) -> None:
    with pytest.raises(BundleExistsError, match="model/1 exists"), draft(models, "model", "1", overwrite=False):
        write(models, "first")
    assert everything(models) == ["model", "model/1", "model/1/manifest.json"]
    assert (models / "model" / "1" / "manifest.json").read_text() == "first"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "ä", "x" * 65, "a\n"])
def test_only_plain_names(models: Path, name: str) -> None:
    for arguments in ((name, "1"), ("model", name)):
        with (
            pytest.raises(BundleNameError, match="must be 1 to 64 letters, digits"),
            draft(models, *arguments, overwrite=False),
        ):
            pass
    assert not models.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(BundleError, match="cannot be made"):
        write(tmp_path / "models", "x")


def test_a_folder_that_nothing_can_be_made_in(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("encserve_export.bundle.store.tempfile.mkdtemp", refuse)
    with pytest.raises(BundleError, match=r"nothing can be written in .*model: .*Permission denied"):
        write(models, "x")
    assert not models.exists()


def test_a_disk_that_cannot_be_written(models: Path) -> None:
    with (
        pytest.raises(BundleError, match="nothing can be written in .*models/m: .*bad sector"),
        draft(models, "m", "1", overwrite=False),
    ):
        raise OSError(errno.EIO, "bad sector")
    assert not models.exists()


_Usage = namedtuple("_Usage", "free")


def fill(monkeypatch: pytest.MonkeyPatch, full: str | Path) -> None:
    """Has a folder's disk be full, and no other's."""

    def disk_usage(folder: str | Path) -> _Usage:
        return _Usage(1000 if Path(folder) == Path(full) else 10**10)

    monkeypatch.setattr("encserve_export.bundle.store.shutil.disk_usage", disk_usage)


def write_until_full(models: Path, error: Exception) -> None:
    with draft(models, "m", "1", overwrite=True) as folder:
        (folder / "model.onnx").write_text("half")
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("the library's own way to say so")]
)
def test_a_full_disk_is_named(models: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with draft(models, "m", "1", overwrite=False) as folder:
        (folder / "manifest.json").write_text("old")
    fill(monkeypatch, models / "m")
    with pytest.raises(BundleError, match=rf"the disk of {models}/m is full: .*\. Make room there$"):
        write_until_full(models, error)
    assert everything(models) == ["m", "m/1", "m/1/manifest.json"]


def test_a_full_temporary_folder_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a bundle is written, and before."""
    fill(monkeypatch, tempfile.gettempdir())
    full = rf"the disk of {tempfile.gettempdir()} is full: .*No space.*name another folder with TMPDIR"
    with pytest.raises(BundleError, match=full):
        write_until_full(models, OSError(errno.ENOSPC, "No space left on device"))
    assert not models.exists()
    with pytest.raises(BundleError, match="is full"), temporary_folder() as folder:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not folder.exists()


@pytest.mark.system
def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    """Where the test may mount one of 2 MiB."""
    program = """
import sys
from pathlib import Path
from encserve_export.bundle.store import draft
with draft(Path(sys.argv[1]), "m", "1", overwrite=False) as folder:
    (folder / "model.onnx").write_bytes(bytes(3 << 20))
"""
    mounted = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", program, str(tmp_path / "a")]
    if shutil.which("unshare") is None or subprocess.run([*command[:5], str(tmp_path), "true"], check=False).returncode:
        pytest.skip("this user may mount nothing")
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"BundleError: the disk of {tmp_path}/a/m is full: " in found.stderr


def test_large_files_of_an_export_lie_beside_the_bundle(models: Path) -> None:
    with scratch(models, "m") as beside, draft(models, "m", "1", overwrite=False) as folder:
        assert beside.parent == folder.parent == models / "m"
        (beside / "large").write_text("x")
    assert everything(models) == ["m", "m/1"]


def test_what_another_export_is_writing_is_left_alone(models: Path) -> None:
    with draft(models, "m", "1", overwrite=False) as first:
        (first / "manifest.json").write_text("first")
        with draft(models, "m", "2", overwrite=False):
            assert first.is_dir()
    assert everything(models) == ["m", "m/1", "m/1/manifest.json", "m/2"]


@pytest.mark.parametrize("moment", ["while it is written", "between the renames", "after the renames"])
@pytest.mark.system
def test_what_a_killed_export_leaves_is_repaired_by_the_next(models: Path, moment: str) -> None:
    """The next export of that name, of another version too."""
    write(models, "old")
    program = """
import os, signal, sys
from pathlib import Path
from encserve_export.bundle import store
rename, done, moment = Path.rename, [], sys.argv[2]
def counted(self, target):
    rename(self, target)
    done.append(self)
    if len(done) == {"between the renames": 1, "after the renames": 2}.get(moment):
        os.kill(os.getpid(), signal.SIGKILL)
Path.rename = counted
with store.draft(Path(sys.argv[1]), "model", "1", overwrite=True) as folder:
    (folder / "manifest.json").write_text("new")
    if moment == "while it is written":
        os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(models), moment], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(everything(models)) > 3
    if moment == "between the renames":
        assert not (models / "model" / "1").exists()
    with draft(models, "model", "2", overwrite=False):
        pass
    assert everything(models) == ["model", "model/1", "model/1/manifest.json", "model/2"]
    content = (models / "model" / "1" / "manifest.json").read_text()
    assert content == ("new" if moment == "after the renames" else "old")


def test_a_version_that_a_killed_export_moved_aside_is_not_replaced_unless_asked(models: Path) -> None:
    write(models, "old")
    (models / "model" / ".old-abcd").mkdir()
    (models / "model" / "1").rename(models / "model" / ".old-abcd" / "1")
    with pytest.raises(BundleExistsError, match="model/1 exists"):
        write(models, "new")
    assert (models / "model" / "1" / "manifest.json").read_text() == "old"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_held_between_the_renames(
    models: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    write(models, "old")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        found = rename(path, target)
        os.kill(os.getpid(), number)
        return found

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, leave)
    monkeypatch.setattr(Path, "rename", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            write(models, "new", overwrite=True)
        assert signal.getsignal(number) is leave
    finally:
        signal.signal(number, before)
    assert everything(models) == ["model", "model/1", "model/1/manifest.json"]
    assert (models / "model" / "1" / "manifest.json").read_text() == "new"


def test_a_second_signal_does_not_end_the_tidying(models: Path) -> None:
    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before, done = signal.signal(signal.SIGTERM, leave), []

    def tidy() -> None:
        with held_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("tidied")

    try:
        with pytest.raises(KeyboardInterrupt):
            tidy()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done


def test_a_second_rename_that_fails_puts_the_old_version_back(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(models, "old")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".draft-"):
            raise OSError(errno.EIO, "bad sector")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(BundleError, match="bad sector"):
        write(models, "new", overwrite=True)
    assert everything(models) == ["model", "model/1", "model/1/manifest.json"]
    assert (models / "model" / "1" / "manifest.json").read_text() == "old"


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("my model (new)", "my-model-new-"),
        (".cache", "cache"),
        ("x" * 70, "x" * 64),
    ],
)
def test_a_name_made_of_a_directory(tmp_path: Path, directory: str, name: str) -> None:
    assert name_from(tmp_path / directory) == name


def test_a_directory_without_a_usable_name(tmp_path: Path) -> None:
    with pytest.raises(BundleNameError, match="give one with --name"):
        name_from(tmp_path / "___")


@pytest.mark.parametrize("enter", ["draft", "temporary"])
def test_a_signal_that_comes_while_a_folder_is_made_leaves_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enter: str
) -> None:
    make = tempfile.mkdtemp

    def make_and_signal(**arguments: object) -> str:
        folder = make(**arguments)  # type: ignore[call-overload]
        os.kill(os.getpid(), signal.SIGINT)
        return str(folder)

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_signal)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    there = everything(tmp_path)
    folder = draft(models, "m", "1", overwrite=False) if enter == "draft" else temporary_folder()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a program in the background ignores
    try:
        with pytest.raises(KeyboardInterrupt), folder:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert everything(tmp_path) == there
