"""A bundle appears complete or not at all, under a plain name."""

from pathlib import Path

import pytest

from encserve_export.bundle.store import draft, name_from
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
    with pytest.raises(BundleError, match=r"model/1 cannot be written: .*Permission denied"):
        write(models, "x")
    assert not models.exists()


def test_a_disk_that_cannot_be_written(models: Path) -> None:
    with pytest.raises(BundleError, match="cannot be written: disk full"), draft(models, "m", "1", overwrite=False):
        raise OSError("disk full")
    assert not models.exists()


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
