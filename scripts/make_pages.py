"""Writes the pages of docs/reference that come from the code: commands, gRPC, HTTP, metrics and settings."""

import argparse
import re
from pathlib import Path

from pages import cli, grpc, http, metrics, settings

REFERENCE = Path(__file__).parent.parent / "docs/reference"
PAGES = {"cli": cli.page, "grpc": grpc.page, "http": http.page, "metrics": metrics.page, "settings": settings.page}


def text_of(name: str) -> str:
    """Return a page of docs/reference, with links to the pages that help texts name, such as docs/how-to/tls.md."""
    return re.sub(r"\bdocs/((?:[\w-]+/)*([\w-]+)\.md)\b", r"[\2](../\1)", PAGES[name]())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE, help="Default: docs/reference.")
    folder = parser.parse_args().folder
    for name in PAGES:
        folder.joinpath(f"{name}.md").write_text(text_of(name), encoding="utf-8")
