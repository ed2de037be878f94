"""A browser for the tests that are marked so: Chromium, a fresh one for each test."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

_GATE = "LMCACHE_STREAM_BROWSER"
_ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

# playwright's own types would make it a requirement of mypy.
Page = Any
Opened = Callable[..., Awaitable[Page]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(_GATE):
        return
    reason = f"a browser: `apt-get install chromium`, `pip install -e '.[browser]'`, then {_GATE}=1"
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path. Playwright is imported here, since a slow import would hold a test's loop."""
    importlib.import_module("playwright.async_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.fail(f"{_GATE} is set, but there is no chromium in PATH: apt-get install chromium")
    return path


@pytest.fixture
async def open_page(chromium: str) -> AsyncIterator[Opened]:
    """Opens a file as a page and waits for its list; options are those of playwright's ``new_context``. With
    ``is_refused`` the console may tell what the page's security policy has refused.

    At the end no page may have asked for anything but its file, nor have met an error.
    """
    from playwright.async_api import async_playwright

    asked: list[str] = []
    wanted: list[str] = []
    errors: list[str] = []
    async with AsyncExitStack() as exits:
        playwright = await exits.enter_async_context(async_playwright())
        # Playwright gives it a profile of its own and removes it at the end.
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        exits.push_async_callback(browser.close)

        async def open_(
            path: Path, *, is_waiting: bool = True, is_refused: bool = False, **options: Any
        ) -> Page:
            context = await browser.new_context(**options)
            page = await context.new_page()
            context.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: errors.append(str(error)))
            if not is_refused:
                page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
            wanted.append(path.as_uri())
            if is_waiting:
                await page.goto(path.as_uri())
                await page.locator(".items > li").first.wait_for()
            return page

        yield open_
    assert asked == wanted
    assert errors == []
