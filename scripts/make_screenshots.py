"""Makes the pictures of `encserve inspect` in docs/images: runs the real command, opens its page, takes the pictures.

    scripts/make_screenshots.py --target localhost:50051             # from a server that runs
    scripts/make_screenshots.py --model-repository models            # from one that is started for it

Needs Chromium; see CONTRIBUTING.md.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
# The tests' own helpers drive the browser and start the server; they are no package.
sys.path.insert(0, str(ROOT / "tests/support"))

from browser import OpenPage, chromium, find_chromium  # noqa: E402
from made_inspections import make_inspection  # noqa: E402
from real_server import real_server  # noqa: E402

from encserve_cli.report.page import build_page  # noqa: E402

BIN = Path(sys.executable).parent
TEXT = "I understand this"
LAST_SECTIONS = {1400: "similarity", 390: "attention"}  # the window's width in pixels, and where its picture ends
LARGEST = 300_000  # bytes of a picture
EDGE = 16  # pixels below the last section


def ask(target: str, model: str | None, text: str, page: Path) -> None:
    """Runs the command as a user would."""
    command: list[str | Path] = [BIN / "encserve", "--target", target, "inspect", text, "--html", page]
    subprocess.run([*command, *(["--model", model] if model else [])], check=True)


def take(page: Path, folder: Path) -> None:
    """Writes a picture of the page's first sections for each width. ClickException where something is wrong with it."""
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for width, section in LAST_SECTIONS.items():
            it = OpenPage(browser, page, width)
            box = it.page.locator(f"#{section}").bounding_box()
            if it.complaints or box is None:
                raise click.ClickException(f"the page is not as it should be: {it.complaints}")
            path = folder / f"inspect-{width}.png"
            height = box["y"] + box["height"] + EDGE
            it.page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
            it.close()
            size = path.stat().st_size
            if size > LARGEST:
                raise click.ClickException(f"{path} has {size} bytes, more than {LARGEST}: choose a shorter --text")
            print(f"wrote {path}: {width} × {height:.0f}, {size / 1000:.0f} kB")


@click.command()
@click.option("--target", help="A server that runs, host:port.")
@click.option("--model-repository", type=click.Path(path_type=Path, exists=True), help="Starts a server with it.")
@click.option("--model", help="Default: the server's default model.")
@click.option("--text", default=TEXT, show_default=True, help="What to inspect.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "docs/images", help="Default: docs/images.")
@click.option("--synthetic", is_flag=True, hidden=True, help="Made-up numbers, to try this script without a server.")
def main(
    target: str | None, model_repository: Path | None, model: str | None, text: str, output: Path, synthetic: bool
) -> None:
    """Makes the pictures of `encserve inspect`."""
    if find_chromium() is None:
        raise click.ClickException("this needs Chromium: apt-get install chromium")
    if [target is not None, model_repository is not None, synthetic].count(True) != 1:
        raise click.UsageError("give either --target or --model-repository")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if synthetic:
            page.write_text(build_page(*make_inspection(), text), encoding="utf-8", newline="\n")
        elif model_repository is not None:
            with real_server(model_repository, *(["--model", model] if model else [])) as server:
                ask(server.target, model, text, page)
        else:
            ask(str(target), model, text, page)
        take(page, output)


if __name__ == "__main__":
    main()
