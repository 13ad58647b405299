"""Headless Chromium, and the page of a real server in it. Without Chromium, tests are skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.process import Served
from tests.scripted_model import write_scripted

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
WAIT = 20_000
"""Milliseconds that anything on the page may take, as the machine may be busy."""


def missing() -> str:
    """Return why there is no browser here, or an empty text."""
    if importlib.util.find_spec("playwright") is None or importlib.util.find_spec("axe_playwright_python") is None:
        return "the extra web-test is not installed: pip install -e '.[web-test]'"
    return "" if CHROMIUM else "there is no Chromium here: apt-get install chromium"


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser."""
    from playwright.sync_api import sync_playwright

    # As root, which CI is, Chromium has no sandbox of its own.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*flags, "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A browser tab of one person, which records errors and requested hosts."""

    def __init__(self, browser: Any, url: str, *, size: tuple[int, int] = (1200, 800), scheme: str = "light") -> None:
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.url = url
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type == "error" else None)
        self.page.on("dialog", self._dialog)
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, place: str = "", *, live: bool = True) -> Visit:
        self.page.goto(f"{self.url}/{place}")
        if live:
            self.page.wait_for_selector("#link.live")
        return self

    def send(self, text: str, *, wait: bool = True) -> None:
        """Type a message and send it by key; wait until it is answered."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.get_by_label("Message", exact=True).press("Enter")
        said = "t => [...document.querySelectorAll('.turn:last-child .asked .text')].some((one) => one.innerText === t)"
        self.page.wait_for_function(said, arg=text)
        if wait:
            self.answered()

    def answered(self) -> None:
        """Wait until no answer is in progress."""
        self.page.wait_for_selector(".log:not([aria-busy])")

    def last(self, part: str) -> str:
        """Return the text of a part of the last turn."""
        result: str = self.page.locator(f".turn:last-child {part}").first.inner_text()
        return result

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name)

    def close(self) -> None:
        self.context.close()


class Home:
    """A server with everything in one folder, so that it can be restarted."""

    def __init__(self, folder: Path, model: Path, **options: Any) -> None:
        self.options = {
            "model": str(model),
            "engine": "auto",
            "kv_gb": 0.05,
            "agents_dir": str(folder / "agents"),
            "kv_dir": str(folder / "kv"),
            "keep_packed": False,
        } | options
        self.server = Served(**self.options)
        self.options["port"] = self.server.port

    @property
    def url(self) -> str:
        return self.server.url

    def ready(self) -> Home:
        self.server.wait_ready()
        return self

    def end(self, *, clean: bool = False) -> None:
        if clean:
            self.server.signal()
            self.server.wait()
        self.server.end()

    def start(self) -> None:
        self.server = Served(**self.options)


def scripted(path: Path, text: str, **more: Any) -> Path:
    """Write a model that says this text, whatever it is asked."""
    pieces = re.findall(r"<\|?/?[a-z_]+\|?>|\s*[^\s<]{1,6}|\s+|<", text)
    assert "".join(pieces) == text
    return write_scripted(path, pieces, **more)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if why := missing():
        pytest.skip(why)
    with chromium() as launched:
        yield launched
