"""Tests of scripts/check_words.py, which `make lint` runs."""

from pathlib import Path

import pytest
from check_words import FORMS, LONGEST, problems_of, prose

SENTENCES = (
    "The report shows at once what makes the server slow.",
    "Replies are sent first to those who have waited longest.",
    "Of all replicas, the client uses the one that is nearest.",
    "If both settings are given, the server uses the latter.",
    "A body that is no JSON is refused at once.",
    "The key is printed once, and nobody can read it again.",
    "After a change of the rules, make the dashboards anew.",
    "A caller that has gone is not any more in the queue.",
    "Each inspection waits in a queue of its own.",
    "The setting has the server do the oldest work first.",
)


def problems(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [problem.removeprefix(f"{path}:") for it in prose(path) for problem in problems_of(it)]


@pytest.mark.parametrize(("sentence", "advice"), list(zip(SENTENCES, FORMS.values(), strict=True)))
def test_each_form_is_found(sentence: str, advice: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "page.md", f"# A page\n\nA short text.\n{sentence}\n")
    assert problem.startswith("3: '")
    assert problem.endswith(f": {advice}: {sentence}")


@pytest.mark.parametrize(
    "text",
    [
        "```\nThis is code about those who wait longest.\n```\n",
        "A paragraph.\n\n    This is code about those who wait longest.\n",
        "The word `those who wait longest` is code.\n",
        "The panel *Calls of those who wait longest* is a name.\n",
        "<!-- A comment about those who wait longest. -->\n",
        "| name | what it is |\n|---|---|\n",
        "What is a bundle? This page says so in a few words.\n",
    ],
)
def test_code_names_and_questions_are_left_out(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path / "page.md", text) == []


def test_the_length_of_sentences(tmp_path: Path) -> None:
    """Inline code and a list of inline codes count as one word each, and a link counts its words.

    Each list item and each cell of a table is a separate text.
    """
    words = " ".join(["word"] * (LONGEST - 2))
    lines = [f"- {words} `a b c` last.", f"- {words} `a`, `b`, `c` and `d` [last](page.md).", f"| {words} | {words} |"]
    assert problems(tmp_path / "page.md", "\n".join(lines)) == []
    (problem,) = problems(tmp_path / "page.md", f"A short sentence. {words} and three more.")
    assert problem.startswith(f"1: {LONGEST + 1} words in a sentence, at most {LONGEST}: word")


def test_python_files(tmp_path: Path) -> None:
    """Docstrings, helps and texts of errors are checked; other strings, comments and examples are not."""
    text = '''"""Runs the calls of those who wait."""

# The calls of those who wait.
NAME = "the calls of those who wait"


def run():
    """Run the calls of those who wait.

        run()  # the calls of those who wait

    Args:
        calls: The calls of those who wait.
    """
    option("--calls", help="Run the calls of those who wait.")
    raise ValueError(f"{NAME}: the calls of those who wait")
'''
    found = [problem.partition(":")[0] for problem in problems(tmp_path / "module.py", text)]
    assert sorted(map(int, found)) == [1, 8, 13, 15, 16]


def test_contracts(tmp_path: Path) -> None:
    text = "// Run runs the calls\n// of those who wait.\nrpc Run(Those) returns (Those);\n"
    (problem,) = problems(tmp_path / "contract.proto", text)
    assert problem.startswith("1: 'those who'")
