"""Checks the words and the length of sentences. `make lint` runs this script.

The script reads the Markdown pages, the comments of the contracts, and in the product's Python files the docstrings, the
help of options and the texts of raised errors. Code in these texts counts as one word.
"""

import argparse
import ast
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
    r"\bthose (?:that|who|of|which)\b": "repeat the noun instead of 'those'",
    r"\bthe (?:one|ones) (?:that|of|which)\b": "repeat the noun instead of 'the one'",
    r"\bthe (?:latter|former)\b": "repeat the noun",
    r"(?<!there )\b(?:is|are|was|be) (?:no|none|nobody)\b": "write 'is not a …' or 'has no …'",
    r"\b(?:nobody|everybody|somebody|anybody|whoever|whatever)\b": "name the person or the thing",
    r"\b(?:anew|mends?|mended|dear|reckon\w*|lest|beforehand|wherein|whence|for ever|be had|told apart)\b": (
        "use a common word"
    ),
    r"\b(?:not any more|no longer)\b": "say what is true now, without history",
    r"\bof (?:its|theirs|ours) own\b": "write 'its own …' or 'a separate …'",
    r"\bhas (?:it|them|the \w+) (?:be|do|go|made|done)\b": "use a verb with a subject",
}
_FORMS = {re.compile(pattern, re.I): advice for pattern, advice in FORMS.items()}

_COMMENT = re.compile(r"<!--.*?-->", re.S)
_INLINE_CODE = re.compile(r"``.+?``|`[^`]+`", re.S)
_LINK = re.compile(r"!?\[([^][]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[^a-z])")
_WORD = re.compile(r"[^\W_]")
# A line that begins a new text: a list item, a heading, a row of a table, or an entry of a docstring such as `Args`.
_BEGIN = re.compile(r"\s*(?:[-*+] |\d+\. |#|\||>|\w+:$|\*{0,2}[\w.]+(?: \(.*\))?: )")


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
    return [path.relative_to(Path.cwd()) for path in sorted({*found, *ROOT.glob(CONTRACTS)})]


def problems_of(prose: Prose) -> Iterator[str]:
    """Yield a line for each problem of a text."""
    for sentence in _SENTENCE_END.split(prose.text):
        place = f"{prose.path}:{prose.line}"
        words = sum(1 for word in sentence.split() if _WORD.search(word))
        if words > LONGEST:
            yield f"{place}: {words} words in a sentence, at most {LONGEST}: {sentence}"
        for form, advice in _FORMS.items():
            if found := form.search(sentence):
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
    """Yield docstrings, helps of options and texts of raised errors, each with its first line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, _without_examples(node.value.value)
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


def _without_examples(docstring: str) -> str:
    r"""Remove blocks that are indented like code, and blocks after `\b`, whose lines click keeps."""
    blocks = re.split(r"(\n\s*\n)", docstring)
    return "".join("\n" * it.count("\n") if "\b" in it or _is_code(it) else it for it in blocks)


def _is_code(block: str) -> bool:
    return bool(re.match(r"( {4})+ {0,3}(?:\w+ = |\w+\(|with |async |for |from |import |>>> )", block))


def _paragraphs(path: Path, line: int, text: str) -> Iterator[Prose]:
    """Yield the paragraphs, list items and cells of a text. Fenced code and indented code are left out."""
    words: list[str] = []
    start = line
    is_fenced = False
    for number, content in enumerate([*text.split("\n"), ""], line):
        if content.lstrip().startswith(("```", "~~~")):
            is_fenced = not is_fenced
        begins = not content.strip() or is_fenced or _BEGIN.match(content)
        if begins and words:
            yield from _cells(path, start, " ".join(words))
            words = []
        if content.strip() and not is_fenced and not content.lstrip().startswith(("```", "~~~", ":::")):
            start = start if words else number
            words.append(content.strip())


def _cells(path: Path, line: int, text: str) -> Iterator[Prose]:
    text = _LINK.sub(r"\1", _INLINE_CODE.sub("code", text)).lstrip("#>-*+ ")
    for cell in re.split(r"(?<!\\)\||<br>", text) if text.startswith("|") else [text]:
        yield Prose(path, line, cell.strip())


if __name__ == "__main__":
    main()
