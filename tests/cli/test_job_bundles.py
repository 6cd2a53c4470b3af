"""Tests of `--bundle`. A bundle is the folder of an exported model.

The option accepts a bundle, a model's folder, a URI, a checkpoint or a name on the Hugging Face hub.
"""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from encserve_cli.job.bundles import find_bundle

EXPORTER = """#!{python}
import pathlib, sys
assert sys.argv[1] == "hf" and sys.argv[3] == "--model-repository" and sys.argv[5] == "--name"
source, folder, name = sys.argv[2], sys.argv[4], sys.argv[6]
with open({log!r}, "a") as log:
    log.write(source + " " + name + "\\n")
print("exporting")
if "broken" in source:
    sys.exit(2)
bundle = pathlib.Path(folder, name, "1")
bundle.mkdir(parents=True)
(bundle / "manifest.json").write_text("{{}}")
"""

Exports = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move the user's cache into the test's folder, and return the folder of the cached bundles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "encserve" / "bundles"


@pytest.fixture
def no_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to a single empty folder, so that encserve-export is not found. Return this folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs))
    return programs


@pytest.fixture
def exports(no_exporter: Path, tmp_path: Path) -> Exports:
    """Install a fake encserve-export. Return a function that lists the runs of the fake as "SOURCE NAME"."""
    program, log = no_exporter / "encserve-export", tmp_path / "log"
    program.write_text(EXPORTER.format(python=os.path.realpath("/proc/self/exe"), log=str(log)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    log.touch()
    return lambda: log.read_text().splitlines()


def make_bundle(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_folder_of_a_bundle_is_used_directly(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "models" / "tiny" / "1")
    assert find_bundle(str(bundle)) == bundle


def test_the_folder_of_a_model_gives_the_newest_version(tmp_path: Path) -> None:
    for version in ("1", "9", "10", "10-rc1", ".11-unfinished"):
        make_bundle(tmp_path / "models" / "tiny" / version)
    assert find_bundle("models/tiny") == Path("models/tiny/10")


def test_the_error_of_a_repository_lists_the_models(tmp_path: Path) -> None:
    for name in ("tiny", "large"):
        make_bundle(tmp_path / "models" / name / "1")
    with pytest.raises(ValueError, match="holds the models large, tiny; name one, as models/large"):
        find_bundle("models")


@pytest.mark.parametrize("given", ["models/tiny", "./tiny", "/no/such/folder", "tiny", "a/b/c", "~/none"])
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


def test_a_checkpoint_is_exported_once(
    tmp_path: Path, cache: Path, exports: Exports, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exporter writes the bundle of a checkpoint to the user's cache. A second call uses this bundle.

    After a file of the checkpoint has changed, the exporter runs again. The output of the exporter goes to stderr.
    """
    checkpoint = make_checkpoint(tmp_path / "my encoder")
    bundle = find_bundle("my encoder")
    assert bundle == find_bundle(str(checkpoint))
    assert bundle.parts[-2:] == ("my-encoder", "1")
    assert bundle.is_relative_to(cache)
    assert exports() == [f"{checkpoint} my-encoder"]
    assert capfd.readouterr() == ("", "exporting\n")
    (checkpoint / "weights").write_bytes(b"0")
    assert find_bundle("my encoder") != bundle
    assert len(exports()) == 2


def test_a_model_of_the_hub_is_exported_once(exports: Exports, cache: Path) -> None:
    bundle = find_bundle("owner/name-v2")
    assert bundle == find_bundle("owner/name-v2")
    assert bundle.is_relative_to(cache)
    assert exports() == ["owner/name-v2 name-v2"]


def test_an_export_that_fails_leaves_nothing(exports: Exports, cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="encserve-export failed with exit status 2"):
            find_bundle("owner/broken")
    assert len(exports()) == 2
    assert [it.name for it in cache.iterdir() if it.is_dir()] == []


def test_without_the_exporter_the_error_names_the_commands(no_exporter: Path) -> None:
    with pytest.raises(ValueError, match="pip install") as error:
        find_bundle("owner/name")
    assert "encserve-export hf owner/name --model-repository models --name name" in str(error.value)
    assert "--bundle models/name" in str(error.value)


def test_the_bundle_of_a_uri_is_copied_once(tmp_path: Path, cache: Path) -> None:
    remote = make_bundle(tmp_path / "remote" / "tiny" / "1")
    (remote / "weights").write_bytes(b"123")
    bundle = find_bundle(f"file://{remote}")
    assert bundle.is_relative_to(cache)
    assert {it.name for it in bundle.iterdir()} == {"manifest.json", "weights"}
    assert find_bundle(f"file://{remote}") == bundle
    (remote / "weights").write_bytes(b"1234")
    assert find_bundle(f"file://{remote}") != bundle
    with pytest.raises(ValueError, match=r"has no manifest.json"):
        find_bundle(f"file://{remote.parent}")
