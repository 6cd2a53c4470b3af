"""Opens HTML files in an installed Chromium with playwright, and blocks all network requests."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Route, sync_playwright
from waiting import PATIENCE_SECONDS

Scheme = Literal["light", "dark"]
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium, and close Chromium at the end of the block.

    If Chromium is not installed, skip the test. But with ENCSERVE_REQUIRE_CHROMIUM=1, fail the test.
    """
    path = find_chromium()
    if path is None:
        if os.environ.get("ENCSERVE_REQUIRE_CHROMIUM") == "1":
            pytest.fail("no Chromium, and ENCSERVE_REQUIRE_CHROMIUM is 1")
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the path (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class OpenPage:
    """An HTML file in a browser window.

    Attributes:
        page: The Page object of playwright.
        complaints: Errors and warnings of the page, dialogs, and blocked network requests.
    """

    def __init__(
        self, browser: Browser, path: Path, width: int, *, scheme: Scheme = "light", height: int = 900
    ) -> None:
        """Open a file in a window of `width` × `height` pixels, and wait until all figures are drawn."""
        self.complaints: list[str] = []
        self._context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self._context.route("**/*", self._only_files)
        self.page: Page = self._context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", self._refuse)
        self.page.on("console", self._listen)
        self.page.goto(path.as_uri())
        self.wait()

    def _only_files(self, route: Route) -> None:
        if route.request.url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            self.complaints.append(f"request: {route.request.url}")
            route.abort()

    def _refuse(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _listen(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. After PATIENCE_SECONDS, fail the test.

        The method does not use playwright's `wait_for_function`. That function evaluates text inside the page, but the
        page's Content Security Policy forbids this.
        """
        ends = time.monotonic() + PATIENCE_SECONDS
        while not self.page.evaluate(condition):
            assert time.monotonic() < ends, f"{condition} was not true within {PATIENCE_SECONDS:g} s"
            self.page.wait_for_timeout(20)

    def hover(self, box: str, x: float, y: float) -> str:
        """Move the mouse to a point of a figure, and return the text of the tooltip.

        `box` is the figure's CSS selector. `x` is a fraction of the plot area's width, from the left. `y` is a fraction
        of the plot area's height, from the top.
        """
        area = self.page.locator(f"{box} .nsewdrag").first
        area.scroll_into_view_if_needed()
        self.page.wait_for_timeout(150)  # the page hides an old tooltip one frame after a scroll
        found = area.bounding_box()
        assert found is not None
        self.page.mouse.move(found["x"] + found["width"] * x, found["y"] + found["height"] * y)
        self.page.wait_for_selector("#tip", state="visible")
        return " ".join((self.page.locator("#tip").text_content() or "").split())

    def wait(self) -> None:
        """Wait until all figures are drawn."""
        self.page.wait_for_selector("body[data-drawn]", timeout=60_000)

    def close(self) -> None:
        """Close the page and its window."""
        self._context.close()
