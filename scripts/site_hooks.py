"""Hooks of mkdocs for links to files outside docs/. `mkdocs.yml` names this file.

The repository has no public address, so the site cannot link to files of the repository. The site has CHANGELOG.md,
CONTRIBUTING.md and RATIONALE.md as pages. A link to README.md leads to the start page of the site. A link to any other
file outside docs/ becomes plain text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# The keys are files of the repository outside docs/, and the values are their pages in the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "RATIONALE.md": "project/RATIONALE.md",
}
_SOURCES = {page: name for name, page in PAGES.items() if name != "README.md"}
# The pattern also matches code, so that `sub` finds no link inside code.
_CODE_OR_LINK = re.compile(
    r"^ *```.*?^ *```|`[^`\n]+`|(?<!!)\[(?P<text>[^][]*)\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)", re.M | re.S
)
_CODE = re.compile(r"`[^`\n]+`")


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    root = Path(config.docs_dir).parent
    for name, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=root.joinpath(name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and the pipes in code inside tables."""
    markdown = _CODE_OR_LINK.sub(lambda found: _in_site(found, page.file.src_uri), markdown)
    return "\n".join(_without_escapes(line) for line in markdown.split("\n"))


def _in_site(found: re.Match[str], page: str) -> str:
    """Return a link for the site, or only the link's text if the site lacks the file. Return code unchanged."""
    if found["path"] is None:
        return found[0]
    source = _SOURCES.get(page, f"docs/{page}")  # the path of the Markdown file in the repository
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["path"]))
    if target not in PAGES and not target.startswith("docs/"):
        return found["text"]
    target = PAGES.get(target, target.removeprefix("docs/"))
    return f"[{found['text']}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{found['anchor'] or ''})"


def _without_escapes(line: str) -> str:
    r"""Replace `\|` by `|` in the code of a table's row: GitHub needs the backslash, and Python-Markdown shows it."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
