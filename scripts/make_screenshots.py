"""Writes the screenshots of `encserve inspect` into docs/images.

    scripts/make_screenshots.py --model-repository models [--model NAME]

The script runs `encserve inspect` and opens the HTML report in Chromium.
CONTRIBUTING.md has the command that installs Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
# Two helpers of the tests are imported: `browser` drives Chromium, and `real_server` starts the server.
sys.path.insert(0, str(ROOT / "tests/support"))

from browser import OpenPage, chromium, find_chromium  # noqa: E402
from real_server import real_server  # noqa: E402

COMMAND = Path(sys.executable).parent / "encserve"
# The keys are widths of the window in pixels. The values are the last sections in the pictures.
LAST_SECTIONS = {1400: "similarity", 390: "attention"}
MAX_BYTES = 300_000  # the largest allowed size of a picture
MARGIN = 16  # the number of pixels below the last section


def take_pictures(page: Path, folder: Path) -> None:
    """Write a picture of the page for each window width in LAST_SECTIONS. A picture ends after the last section.

    Raises:
        click.ClickException: The page has errors, a section is missing, or a picture is too large.
    """
    with chromium() as browser:
        for width, section in LAST_SECTIONS.items():
            opened = OpenPage(browser, page, width)
            box = opened.page.locator(f"#{section}").bounding_box()
            if opened.complaints or box is None:
                raise click.ClickException(f"{page} has errors, or no section {section!r}: {opened.complaints}")
            path = folder / f"inspect-{width}.png"
            height = box["y"] + box["height"] + MARGIN
            clip: dict[str, float] = {"x": 0, "y": 0, "width": width, "height": height}
            opened.page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
            opened.close()
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise click.ClickException(f"{path} has {size} bytes, more than {MAX_BYTES}: choose a shorter --text")
            print(f"wrote {path}: {width} × {height:.0f}, {size / 1000:.0f} kB")


@click.command()
@click.option("--model-repository", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--model", help="The model. Default: the server's default model.")
@click.option("--text", default="I understand this", show_default=True, help="The text to inspect.")
def main(model_repository: Path, model: str | None, text: str) -> None:
    """Write the screenshots of `encserve inspect` into docs/images."""
    if find_chromium() is None:
        raise click.ClickException("this script needs Chromium: apt-get install chromium")
    flags = ["--model", model] if model else []
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        with real_server(model_repository, *flags) as server:
            subprocess.run([COMMAND, "--target", server.target, "inspect", text, "--html", page, *flags], check=True)
        take_pictures(page, ROOT / "docs/images")


if __name__ == "__main__":
    main()
