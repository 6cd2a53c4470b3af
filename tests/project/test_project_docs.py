"""Tests that the docs agree with the code: links, commands, flags, paths, tables, generated pages and the site."""

import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import click
import make_pages
import pytest
import site_hooks

import encserve_cli.job
import encserve_client
import encserve_export
import encserve_server.offline
from encserve_cli.commands import cli as client
from encserve_export.cli import main as exporter
from encserve_export.models.own.layouts import known_layouts
from encserve_server import ledger
from encserve_server.__main__ import main as server
from encserve_server.errors import CALLER_ERRORS, EmptyInputs, EncserveError, UnknownField
from encserve_server.statuses import UNKNOWN, Status

ROOT = Path(__file__).parent.parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}
EVERY_PAGE = pytest.mark.parametrize("page", PAGES)
# These pages have no limit of words, because users look things up in these pages and do not read them in full.
REFERENCE = {page for page in PAGES if page.startswith("docs/reference/")}
LONG = REFERENCE | {"RATIONALE.md", "CHANGELOG.md"}
# The packages of the Python API. `__all__` of each package lists its public names.
PACKAGES = (encserve_client, encserve_export, encserve_server.offline, encserve_cli.job)
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


def table_of(*head: str) -> dict[str, list[str]]:
    """Return the rows of the only table with the head cells `head`. The key of a row is the row's first cell."""
    found = [
        text.split(f"| {' | '.join(head)} |", 1)[1] for text in PAGES.values() if f"| {' | '.join(head)} |" in text
    ]
    (after,) = found
    lines = itertools.takewhile(lambda line: line.startswith("|"), after.splitlines()[1:])
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in itertools.islice(lines, 1, None)]
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


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    own = {page: name for name, page in site_hooks.PAGES.items() if page.startswith("project/")}
    assert sorted(own.get(page, f"docs/{page}") for page in named) == sorted(PAGES.keys() - {"README.md"})


@pytest.mark.parametrize("page", sorted(PAGES.keys() - LONG))
def test_pages_are_short(page: str) -> None:
    without_figures = re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", PAGES[page], flags=re.S)
    assert len(without_figures.split()) <= 1500


@EVERY_PAGE
def test_install_lines_name_extras(page: str) -> None:
    for extras in re.findall(r"(?:\bencserve|\"\.)\[([\w,]*)\]", PAGES[page]):
        assert set(extras.split(",")) <= EXTRAS, extras


def test_length_of_readme() -> None:
    assert PAGES["README.md"].count("\n") <= 150


@functools.cache
def make_targets() -> set[str]:
    command = ["make", "-pq", "help"]  # prints make's rules and runs nothing
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"^([a-z-]+):", printed, flags=re.M))


def flags_of_tei() -> set[str]:
    """Return the flags in the first column of the tables for a migration from text-embeddings-inference."""
    cells = re.findall(r"^\|([^|]*)\|", PAGES["docs/how-to/migrate-from-tei.md"], flags=re.M)
    return set(re.findall(r"--[a-z-]+", " ".join(cells)))


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"CHANGELOG.md"}))  # the changelog may name removed commands
def test_commands_flags_and_paths_exist(page: str) -> None:
    targets = make_targets()
    known = OTHER_FLAGS.union(flags_of_tei(), *map(flags, (client, exporter, server)))
    for block in re.findall(r"^```.*?^```", PAGES[page], flags=re.M | re.S):
        assert targets.issuperset(re.findall(r"^make ([a-z-]+)", block, flags=re.M)), block
    for line in PAGES[page].splitlines():
        for target in re.findall(r"`make ([a-z-]+)", line):
            assert target in targets, line
        for program, name in re.findall(r"(?:`|\$ |^(?=encserve-))(encserve|encserve-export) ([a-z]+)", line):
            assert name in (client if program == "encserve" else exporter).commands, line
        for flag in re.findall(r"`(?:encserve[a-z -]* )?(--[a-z][a-z-]*)(?![\w.-])", line):
            assert flag in known, line
        for path in re.findall(r"(?<![\w/-])(?:bench|clients|deploy|export|scripts|server|tests)/[\w/.-]*\w", line):
            assert any(commit in line for commit in REMOVED) or any(ROOT.glob(f"{path}*")), line


@pytest.mark.parametrize("page", make_pages.PAGES)
def test_generated_pages_are_current(page: str) -> None:
    assert make_pages.text_of(page) == PAGES[f"docs/reference/{page}.md"], "run `make docs`"


def test_the_python_api_has_every_public_name() -> None:
    page = PAGES["docs/reference/python-api.md"]
    public = [f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__]
    assert sorted(re.findall(r"^::: (.*)$", page, flags=re.M)) == sorted(public)
    listed = sorted(re.findall(r"^- `(\w+)`: ", page, flags=re.M))
    assert listed == sorted(name.rpartition(".")[2] for name in public)


def test_a_link_in_the_site_stays_a_link_only_if_its_target_is_in_the_site() -> None:
    text = (
        "[a](../how-to/serve.md#x) [b](../../README.md) [`c`](../../scripts/demo.py) `[d](../../e.py)` [f](https://g)"
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/limits.md"))
    expected = "[a](../how-to/serve.md#x) [b](../index.md) `c` `[d](../../e.py)` [f](https://g)"
    assert site_hooks.on_page_markdown(text, page=page, config=None, files=None) == expected  # type: ignore[arg-type]


@pytest.mark.system
def test_the_site(tmp_path: Path) -> None:
    """The site is built without a warning, and has every page, the search index and the signatures of the client."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        in_site = site_hooks.PAGES.get(page, page.removeprefix("docs/"))
        assert tmp_path.joinpath(in_site).with_suffix(".html").is_file(), page
    assert tmp_path.joinpath("search/search_index.json").is_file()
    assert 'id="encserve_client.EncoderClient.embed"' in tmp_path.joinpath("reference/python-api.html").read_text()


def test_the_layouts_table() -> None:
    rows = table_of("layout", "what it is", "recognised by")
    assert rows == {name: [layout.summary, layout.marker] for name, layout in known_layouts().items()}


def test_the_table_of_shares() -> None:
    """The table in docs/explanation/overload.md has the same numbers as the server's module `ledger`."""
    table = PAGES["docs/explanation/overload.md"]
    table = table[table.index("## What bounds a caller") : table.index("| a caller can make large |")]
    rows = {row.split("|")[1].strip(): row for row in table.splitlines() if row.startswith("| ")}
    share, large = ledger._SHARE, ledger._LARGE_SHARE
    places, watches = rows["requests that arrive slowly, and open streams"], rows["health watches"]
    assert f"at least {ledger._LEAST_PLACES}." in places
    assert f"{share} times the free places" in places
    assert f"for at least {ledger.ARRIVAL_SECONDS:.0f} s" in places
    assert f"| {ledger.MAX_WATCHES:,} | {share} times" in watches
    small_kib = ledger.SMALL_BYTES // 1024
    assert f"{share} times the free bytes. For a call of more than {small_kib} KiB: {large} times" in table
    assert f"fills {share}/{share + 1} of a" in table.replace("\n", " ")


def test_the_errors_table() -> None:
    """The table of errors has every error reason, with its gRPC status and its HTTP statuses."""
    documented = {reason: tuple(row[:2]) for reason, row in table_of("reason", "status code", "HTTP").items()}
    own = {error.reason: status for error, status in CALLER_ERRORS.items() if error not in (EmptyInputs, UnknownField)}

    def row(status: Status) -> tuple[str, str]:
        return status.grpc, " / ".join(map(str, dict.fromkeys((status.openai, status.tei))))

    assert documented == {reason: row(status) for reason, status in {EncserveError.reason: UNKNOWN, **own}.items()}
