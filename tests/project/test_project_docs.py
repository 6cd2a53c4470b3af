"""The README's tables say what the code has, no more and no less."""

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path

from encserve_export.layouts import known_layouts
from encserve_server.rpc.status import ERROR_TABLE
from encserve_server.settings import Settings

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def table_under(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, cells stripped."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    lines = list(itertools.takewhile(lambda line: line.startswith("|"), table))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_settings_table() -> None:
    rows = {row[0].strip("`"): row for row in table_under("Settings")}
    fields = {f"--{field.name.replace('_', '-')}": field for field in dataclasses.fields(Settings)}
    assert set(rows) == set(fields)
    for flag, field in fields.items():
        assert rows[flag][2] == field.metadata["help"], flag
        if field.default not in (dataclasses.MISSING, (), None):
            assert rows[flag][1].strip("`") == str(field.default).lower(), flag


def test_the_metrics_page_is_made_of_the_code(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    subprocess.run([sys.executable, ROOT / "scripts/make_metrics_page.py", page], check=True, timeout=60)
    assert page.read_text() == (ROOT / "docs/metrics.md").read_text(), "run `make docs`"


def test_the_layouts_table() -> None:
    rows = {row[0].strip("`"): (row[1], row[2].strip("`")) for row in table_under("Bring your own model")}
    assert rows == {name: (layout.summary, layout.marker) for name, layout in known_layouts().items()}


def test_every_local_link_leads_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_make_target_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in targets, f"{page.name} names `make {target}`"


def test_the_errors_table() -> None:
    """docs/errors.md has every reason with its status code."""
    lines = [line for line in (ROOT / "docs/errors.md").read_text().splitlines() if line.startswith("| `")]
    documented = {cells[1].strip(" `"): cells[2].strip() for cells in (line.split("|") for line in lines)}
    raised = {mapping.reason: mapping.code.name for mapping in ERROR_TABLE.values()} | {"INTERNAL": "INTERNAL"}
    assert documented == raised
