"""bench/files.py: that it measures what it says, on the demo's own weights."""

import re
from pathlib import Path

import files
import pytest
from checkpoints import minilm_directory

from encserve_export import Target, export_hf

pytestmark = pytest.mark.system


def test_a_file_is_embedded_beside_callers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_hf(minilm_directory(), Target(model_repository=tmp_path, name="m"))
    files.main([str(tmp_path), "--lines", "100", "--rounds", "1", "--seconds", "1"])
    assert re.search(r"^ratio [0-9.]+ .*, the command held [0-9]+ MiB$", capsys.readouterr().out, re.MULTILINE)
