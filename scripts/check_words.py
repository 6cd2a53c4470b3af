"""Checks the words and the length of sentences. `make lint` runs this script.

The script reads the Markdown pages and the comments of the contracts. In the product's Python files it reads the
docstrings, the help of options and the texts of raised errors. Code in these texts counts as one word.
"""

import argparse
import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md")
CODE = ("src", "proto/src", "export/src", "server/src", "clients/python/src", "clients/cli/src", "clients/examples")
CONTRACTS = "proto/encserve/**/*.proto"
LONGEST = 30  # words in a sentence

# A pattern, and the advice for it.
FORMS = {
    r"\bwhat (?:is|was|are|has|have|can|cannot|makes?|waits?|comes?|goes|stands?|does|its|their|they|it)\b[^?]*$": (
        "name the thing instead of 'what …'"
    ),
    r"\bthose (?:that|who|which)\b": "repeat the noun instead of 'those'",
    r"\bthe (?:one|ones) (?:that|of|which)\b": "repeat the noun instead of 'the one'",
    r"\bthe (?:latter|former)\b": "repeat the noun",
    r"(?<!there )\b(?:is|are|was|be) (?-i:no|none|nobody)\b(?! longer)": "write 'is not a …' or 'has no …'",
    r"\b(?:nobody|everybody|somebody|anybody|whoever|whatever)\b": "name the person or the thing",
    r"\b(?:anew|mends?|mended|dear|reckon\w*|lest|beforehand|wherein|whence|be had|told apart)\b": "use a common word",
    r"\bnot any more\b": "say what is true now, without history",
    r"\bof (?:its|theirs|ours) own(?=\W*$|[,.;:)]| (?:and|for|in|on|or|so|that|to|with)\b)": "write 'its own …'",
    r"\bhas (?:it|them|the \w+) (?:be|do|go|made|done)\b": "use a verb with a subject",
}
_FORMS = {re.compile(pattern, re.I): advice for pattern, advice in FORMS.items()}
# The patterns apply to sentences of at least this many words. A shorter text is a label, such as the head of a column.
_SHORTEST = 5

_COMMENT = re.compile(r"<!--.*?-->", re.S)
# Inline code, or a name in italics such as the title of a diagram, counts as one word.
_NAME = re.compile(r"``.+?``|`[^`]+`|(?<![*\w])\*(?![*\s])[^*]+(?<!\s)\*(?![*\w])")
# A list of inline codes or numbers also counts as one word.
_LIST = re.compile(r"(?:`…`|\d[\d.,]*)(?:,? (?:(?:and|or) )?(?:`…`|\d[\d.]*),?)+")
_LINK = re.compile(r"!?\[([^][]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[\"')*_]*\s+")
_WORD = re.compile(r"[^\W_]|`")
# These lines begin a new text: a list item, a heading, a row of a table, or an entry of a docstring such as `Args`.
_BEGIN = re.compile(r"\s*(?:[-*+] |\d+\. |#|\||>|\w+:$|\*{0,2}[\w.]+(?: \(.*\))?: )")
_FENCE = ("```", "~~~")
_CODE_INDENT = " " * 4


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph, a list item or a cell of a table, without markup. `line` is the line in its file."""

    path: Path
    line: int
    text: str


def main() -> None:
    """Print each problem. Exit with status 1 if there are problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE", help="Default: all files of the project.")
    parser.add_argument("--count", action="store_true", help="Print the number of problems of each file.")
    options = parser.parse_args()
    problems = [(it.path, line) for path in options.paths or files() for it in prose(path) for line in problems_of(it)]
    if options.count:
        for path, count in Counter(path for path, _ in problems).most_common():
            print(f"{count:5} {path}")
    else:
        for _, line in problems:
            print(line)
    if problems:
        sys.exit(f"{len(problems)} problems")


def files() -> list[Path]:
    """Return the files whose words are checked."""
    found = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    found += [path for folder in CODE for path in ROOT.joinpath(folder).rglob("*.py") if "_pb2" not in path.name]
    return [Path(os.path.relpath(path)) for path in sorted({*found, *ROOT.glob(CONTRACTS)})]


def problems_of(prose: Prose) -> Iterator[str]:
    """Yield a line for each problem of a text."""
    for sentence in _SENTENCE_END.split(prose.text):
        place = f"{prose.path}:{prose.line}"
        words = sum(1 for word in _LIST.sub("`…`", sentence).split() if _WORD.search(word))
        if words > LONGEST:
            yield f"{place}: {words} words in a sentence, at most {LONGEST}: {sentence}"
        for form, advice in _FORMS.items():
            if words >= _SHORTEST and (found := form.search(sentence)):
                yield f"{place}: {found[0]!r}: {advice}: {sentence}"


def prose(path: Path) -> Iterator[Prose]:
    """Yield the texts of a file that people read."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _paragraphs(path, 1, _COMMENT.sub(lambda it: "\n" * it[0].count("\n"), text))
    elif path.suffix == ".proto":
        lines = (line.strip() for line in text.splitlines())
        yield from _paragraphs(path, 1, "\n".join(it.removeprefix("//") if it.startswith("//") else "" for it in lines))
    else:
        for line, words in _texts_of_code(ast.parse(text)):
            yield from _paragraphs(path, line, words)


def _texts_of_code(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, help texts of options and texts of raised errors, each with the number of its first line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.replace("\n" + " " * node.col_offset, "\n")
        elif isinstance(node, ast.keyword) and node.arg in ("help", "short_help"):
            yield from _strings(node.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield from _strings(argument)


def _strings(node: ast.expr) -> Iterator[tuple[int, str]]:
    """Yield a literal string. A value in an f-string counts as code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(str(it.value) if isinstance(it, ast.Constant) else "`x`" for it in node.values)


def _paragraphs(path: Path, line: int, text: str) -> Iterator[Prose]:
    """Yield the paragraphs, list items and cells of a text."""
    words: list[str] = []
    start = line
    for number, content in enumerate([*_without_code(text), ""], line):
        if words and (not content or _BEGIN.match(content)):
            yield from _cells(path, start, " ".join(words))
            words = []
        if content:
            start = start if words else number
            words.append(content.strip())


def _without_code(text: str) -> Iterator[str]:
    r"""Yield the lines of a text. Yield blank lines for fenced code, for blocks that are indented, and after `\b`."""
    is_fenced = is_block = False
    before = ""
    for line in map(str.rstrip, text.split("\n")):
        is_fence = line.lstrip().startswith(_FENCE)
        is_fenced ^= is_fence
        is_block = bool(line) and (is_block or line == "\b" or (not before and line.startswith(_CODE_INDENT)))
        yield "" if is_fenced or is_fence or is_block or line.startswith(":::") else line
        before = line


def _cells(path: Path, line: int, text: str) -> Iterator[Prose]:
    text = _LINK.sub(r"\1", _NAME.sub("`…`", text)).lstrip("#>-*+ ")
    for cell in re.split(r"(?<!\\)\||<br>", text) if text.startswith("|") else [text]:
        yield Prose(path, line, cell.strip())


if __name__ == "__main__":
    main()
