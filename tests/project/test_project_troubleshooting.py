"""Tests that each message in docs/how-to/troubleshoot.md is a message of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/how-to/troubleshoot.md"
SOURCES = ("server/src", "clients", "export/src", "src")
ANY = "…"  # replaces a value in a message
# The operating system or gRPC writes these parts of messages, so our code does not contain them.
OTHERS = ("--grpc-port", "Address already in use", "connection refused", "manifest.json", "message larger than max")


def messages() -> list[str]:
    """Return the messages in the first column of the page's tables."""
    return re.findall(r"^\| `(.+?)`(?: \(.+?\))? \|", PAGE.read_text(), re.MULTILINE)


def literals() -> Iterator[str]:
    """Yield the strings of the code. The values in f-strings and the fields of templates become `…`."""
    for folder in SOURCES:
        for path in ROOT.glob(f"{folder}/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [it.value if isinstance(it, ast.Constant) else ANY for it in node.values]
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"{\w*}", ANY, node.value)


def test_the_page_has_messages() -> None:
    assert len(messages()) > 30


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n".join(literals())


@pytest.mark.parametrize("message", messages())
def test_the_code_has_the_message(message: str, texts: str) -> None:
    """Each part of a message between two values is in the code."""
    for other in OTHERS:
        message = message.replace(other, ANY)
    for part in message.split(ANY):
        assert part.strip(" :;,.<>") in texts, part
