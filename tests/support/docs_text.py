"""Reads code blocks and tables from pages of the docs."""

import re


def code_blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Return the (language, code) of each code block in these languages, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(language, code) for language, code in found if language in languages]


def first_cells(text: str, heading: str) -> list[str]:
    """Return the first cell of each row of the table under a heading of level 2, without the head of the table."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]
