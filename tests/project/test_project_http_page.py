"""Tests that the tables in docs/reference/http.md are those of the server's OpenAPI document."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_tables_are_current(tmp_path: Path) -> None:
    made = tmp_path / "http.md"
    subprocess.run([sys.executable, ROOT / "scripts/make_http_page.py", made], check=True, timeout=60)
    assert made.read_text() == (ROOT / "docs/reference/http.md").read_text(), "run `make docs`"
