"""Tests that the docs agree with the code: links, commands, flags, paths, tables and generated pages."""

import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from encserve_cli.commands import cli as client
from encserve_export.cli import main as exporter
from encserve_export.models.own.layouts import known_layouts
from encserve_server import ledger
from encserve_server.__main__ import main as server
from encserve_server.errors import CALLER_ERRORS, EmptyInputs, EncserveError, UnknownField
from encserve_server.statuses import UNKNOWN, Status

ROOT = Path(__file__).parent.parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
EVERY_PAGE = pytest.mark.parametrize("page", PAGES)
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
# The docs may also mention flags of docker compose, of the Makefile and of the programs in bench/.
OTHERS = " ".join(path.read_text() for path in (*ROOT.glob("bench/**/*.py"), ROOT / "Makefile"))
OTHER_FLAGS = {"--profile", "--volumes", "--build-arg", "--target", *re.findall(r'"(--[a-z-]+)"', OTHERS)}
# A line with one of these phrases may name a removed program, because the program measured the figures in the line.
REMOVED = ("in 4c14468", "at commit de57fdd")


def slugs(text: str) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_under(page: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table under a heading, without backticks. The key of a row is the first cell."""
    section = re.split(rf"^#+ {heading}$", PAGES[page], flags=re.M)[1]
    table = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    lines = list(itertools.takewhile(lambda line: line.startswith("|"), table))
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


def flags(command: click.Command) -> set[str]:
    """Return the flags of a command and of its subcommands."""
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return {"--help", "--version"}.union(own, *map(flags, inner))


@EVERY_PAGE
def test_links_and_anchors_exist(page: str) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", PAGES[page]):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in slugs(target.read_text()), f"{path}#{anchor}"


def test_the_readme_links_every_page() -> None:
    assert [page for page in PAGES if page != "README.md" and f"]({page})" not in PAGES["README.md"]] == []


@EVERY_PAGE
def test_install_lines_name_extras(page: str) -> None:
    for extras in re.findall(r"(?:\bencserve|\"\.)\[([\w,]*)\]", PAGES[page]):
        assert set(extras.split(",")) <= EXTRAS, extras


def test_length_of_readme() -> None:
    assert PAGES["README.md"].count("\n") <= 200


@functools.cache
def make_targets() -> set[str]:
    command = ["make", "-pq", "help"]  # prints make's rules and runs nothing
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"^([a-z-]+):", printed, flags=re.M))


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"CHANGELOG.md"}))  # the changelog may name removed commands
def test_commands_flags_and_paths_exist(page: str) -> None:
    targets = make_targets()
    known = OTHER_FLAGS.union(*map(flags, (client, exporter, server)))
    for line in PAGES[page].splitlines():
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", line):
            assert target in targets, line
        for program, name in re.findall(r"(?:`|\$ |^(?=encserve-))(encserve|encserve-export) ([a-z]+)", line):
            assert name in (client if program == "encserve" else exporter).commands, line
        for flag in re.findall(r"`(?:encserve[a-z -]* )?(--[a-z][a-z-]*)(?![\w.-])", line):
            assert flag in known, line
        for path in re.findall(r"(?<![\w/-])(?:bench|clients|deploy|export|scripts|server|tests)/[\w/.-]*\w", line):
            assert any(commit in line for commit in REMOVED) or any(ROOT.glob(f"{path}*")), line


@pytest.mark.parametrize("page", ["settings", "metrics"])
def test_generated_pages_are_current(page: str, tmp_path: Path) -> None:
    made = tmp_path / f"{page}.md"
    subprocess.run([sys.executable, ROOT / f"scripts/make_{page}_page.py", made], check=True, timeout=60)
    assert made.read_text() == PAGES[f"docs/{page}.md"], "run `make docs`"


def test_the_layouts_table() -> None:
    rows = table_under("docs/models.md", "A state dict")
    assert rows == {name: [layout.summary, layout.marker] for name, layout in known_layouts().items()}


def test_the_table_of_shares() -> None:
    """docs/architecture.md has the numbers of the module `ledger`."""
    table = ROOT.joinpath("docs/architecture.md").read_text()
    table = table[table.index("## What bounds a caller") : table.index("| a caller can make large |")]
    rows = {row.split("|")[1].strip(): row for row in table.splitlines() if row.startswith("| ")}
    share, large = ledger._SHARE, ledger._LARGE_SHARE
    places, watches = rows["requests that arrive slowly, and open streams"], rows["health watches"]
    assert f"at least {ledger._LEAST_PLACES};" in places
    assert f"{share} times the free places" in places
    assert f"for at least {ledger.ARRIVAL_SECONDS:.0f} s" in places
    assert f"| {ledger.MAX_WATCHES:,} | {share} times" in watches
    small_kib = ledger.SMALL_BYTES // 1024
    assert f"{share} times the free bytes, or {large} times with a call of more than {small_kib} KiB" in table
    assert f"fills {share}/{share + 1} of a" in table.replace("\n", " ")


def test_the_errors_table() -> None:
    """The table in docs/errors.md has every error reason, with its gRPC status and its HTTP statuses."""
    documented = {reason: tuple(row[:2]) for reason, row in table_under("docs/errors.md", "Errors").items()}
    own = {error.reason: status for error, status in CALLER_ERRORS.items() if error not in (EmptyInputs, UnknownField)}

    def row(status: Status) -> tuple[str, str]:
        return status.grpc, " / ".join(map(str, dict.fromkeys((status.openai, status.tei))))

    assert documented == {reason: row(status) for reason, status in {EncserveError.reason: UNKNOWN, **own}.items()}
