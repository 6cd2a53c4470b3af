"""An export writes a complete bundle or no bundle. The bundle's folder is named after the model and the version."""

import errno
from pathlib import Path

import pytest

from encserve_export.bundle.store import draft, name_from, scratch, temporary_folder
from encserve_export.core.errors import BundleError, BundleExistsError, BundleNameError


def write(models: Path, content: str, *, overwrite: bool = False, version: str = "1") -> None:
    with draft(models, "model", version, overwrite=overwrite) as folder:
        (folder / "manifest.json").write_text(content)


def write_half(models: Path, error: BaseException, *, overwrite: bool = False) -> None:
    with draft(models, "model", "1", overwrite=overwrite) as folder:
        (folder / "manifest.json").write_text("new")
        raise error


def files(models: Path) -> dict[str, str]:
    """Return the content of every file below a folder, by path. Files in hidden folders are included."""
    return {str(path.relative_to(models)): path.read_text() for path in models.rglob("*") if path.is_file()}


def folders(models: Path) -> list[str]:
    return sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.is_dir())


def test_a_draft_becomes_the_version(models: Path) -> None:
    with draft(models, "model", "1", overwrite=False) as folder:
        assert folder.parent == models / "model"
        assert folder.name.startswith("."), "a server would load the draft"
        (folder / "manifest.json").write_text("a")
        (folder / "manifest.json").chmod(0o600)
        assert not (models / "model" / "1").exists()
    assert files(models) == {"model/1/manifest.json": "a"}
    assert folders(models) == ["model", "model/1"]
    assert (models / "model" / "1").stat().st_mode & 0o777 == 0o755
    assert (models / "model" / "1" / "manifest.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_export_leaves_nothing(models: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write_half(models, error)
    assert not models.exists()


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_export_leaves_the_old_version(models: Path, error: BaseException) -> None:
    write(models, "old")
    with pytest.raises(type(error)):
        write_half(models, error, overwrite=True)
    assert files(models) == {"model/1/manifest.json": "old"}
    assert folders(models) == ["model", "model/1"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad sector"), KeyboardInterrupt()])
@pytest.mark.parametrize("happens", ["before the rename", "after the rename"])
@pytest.mark.parametrize("which", [1, 2])
def test_an_interruption_between_the_renames_leaves_one_version(
    models: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, happens: str, which: int
) -> None:
    write(models, "old")
    rename, renames = Path.rename, [0]

    def interrupted(path: Path, target: Path) -> Path:
        renames[0] += 1
        if renames[0] == which and happens == "before the rename":
            raise error
        renamed = rename(path, target)
        if renames[0] == which:
            raise error
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((BundleError, KeyboardInterrupt)):
        write(models, "new", overwrite=True)
    new = which == 2 and happens == "after the rename"
    assert files(models) == {"model/1/manifest.json": "new" if new else "old"}
    assert folders(models) == ["model", "model/1"]


def test_only_overwrite_replaces_a_version(models: Path) -> None:
    write(models, "old")
    with pytest.raises(BundleExistsError, match=r"model/1 exists; give another --version, or --overwrite"):
        write(models, "new")
    assert files(models) == {"model/1/manifest.json": "old"}
    write(models, "new", overwrite=True)
    assert files(models) == {"model/1/manifest.json": "new"}
    assert folders(models) == ["model", "model/1"]


def test_the_export_that_ends_first_wins(models: Path) -> None:
    with pytest.raises(BundleExistsError, match="model/1 exists"), draft(models, "model", "1", overwrite=False):
        write(models, "first")
    assert files(models) == {"model/1/manifest.json": "first"}


def test_two_exports_of_one_model_do_not_disturb_each_other(models: Path) -> None:
    with scratch(models, "model") as beside, draft(models, "model", "1", overwrite=False) as folder:
        assert beside.parent == folder.parent == models / "model"
        (beside / "large").write_text("x")
        write(models, "b", version="2")
        (folder / "manifest.json").write_text("a")
    assert files(models) == {"model/1/manifest.json": "a", "model/2/manifest.json": "b"}


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "ä", "x" * 65, "a\n"])
def test_invalid_names_are_refused(models: Path, name: str) -> None:
    for arguments in ((name, "1"), ("model", name)):
        with (
            pytest.raises(BundleNameError, match="must be 1 to 64 letters, digits"),
            draft(models, *arguments, overwrite=False),
        ):
            pass
    assert not models.exists()


def test_the_error_names_a_repository_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(BundleError, match="the export to .*models/model failed: "):
        write(tmp_path / "models", "x")


def test_the_error_reports_a_full_disk(models: Path) -> None:
    with pytest.raises(BundleError, match=r"the export to .*models/model failed: .*No space left on device"):
        write_half(models, OSError(errno.ENOSPC, "No space left on device"))
    assert not models.exists()
    with pytest.raises(BundleError, match="the export to .* failed: .*No space"), temporary_folder() as folder:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("my model (new)", "my-model-new-"),
        (".cache", "cache"),
        ("x" * 70, "x" * 64),
    ],
)
def test_a_name_is_made_from_a_directory(tmp_path: Path, directory: str, name: str) -> None:
    assert name_from(tmp_path / directory) == name


def test_a_directory_name_without_letters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleNameError, match="give a name with --name"):
        name_from(tmp_path / "___")
