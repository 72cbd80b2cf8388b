"""A headless Chromium of the machine's own, and what its pages have done."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

DEADLINE_MS = 60_000.0
SMALL = (360, 740)
LARGE = (1400, 900)
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
# Of axe-core's findings, those of which the issue says that there are none.
_GRAVE = ("serious", "critical")


@dataclass
class Seen:
    """A page, what its console said that is an error, and every host it asked."""

    page: Any
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def numbers(self, name: str) -> str:
        """The text of the cell or value with that name."""
        return str(self.page.locator(f'[data-value="{name}"]').first.inner_text())

    def exact(self, name: str) -> str | None:
        """The exact number behind the cell with that name, which shows it rounded."""
        found = self.page.locator(f'[data-value="{name}"]').first.get_attribute("data-exact")
        return None if found is None else str(found)

    def wait(self, expression: str, argument: object = None) -> None:
        """Wait until JavaScript's *expression*, a function of *argument*, is true."""
        self.page.wait_for_function(expression, arg=argument, timeout=DEADLINE_MS)

    def wait_live(self) -> None:
        """Wait until the page follows the live stream."""
        self.wait("() => document.getElementById('status').dataset.state === 'live'")

    def grave(self) -> list[str]:
        """What axe-core finds that is serious or critical, with where."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found
            if each["impact"] in _GRAVE
            for node in each["nodes"]
        ]


class Browser:
    """Opens pages, each in a context of its own."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextmanager
    def open(self, url: str, size: tuple[int, int] = LARGE, scheme: str = "light", **options: object) -> Iterator[Seen]:
        """The page at *url*, once it has loaded. On leaving nothing may have gone wrong in it."""
        viewport = {"width": size[0], "height": size[1]}
        context = self._chromium.new_context(viewport=viewport, color_scheme=scheme, **options)
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        seen = Seen(page)
        page.on("console", lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("request", lambda asked: seen.hosts.add(urlsplit(asked.url).netloc or urlsplit(asked.url).scheme))
        try:
            page.goto(url)
            yield seen
        finally:
            context.close()


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(_NAMES)} is on the path")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS, headless=True)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
