"""A newcomer's first minutes: a chat's model, why an answer ended, lists on a phone, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.process import Served
from tests.web.browser import Visit, browser, missing, scripted

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
__all__ = ["browser"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server of two models: one answers, the other repeats itself without end."""
    folder = tmp_path_factory.mktemp("first-minutes")
    scripted(folder / "brief.gguf", "A cairn is a heap of stones.")
    scripted(folder / "loop.gguf", "One two three four five six. ", end=None, context=4000)
    lines = [f"[[models]]\nmodel = {json.dumps(str(folder / name))}\n" for name in ("brief.gguf", "loop.gguf")]
    (folder / "cairn.toml").write_text("".join(lines))
    options = {"config_file": str(folder / "cairn.toml"), "kv_dir": str(folder / "kv"), "kv_gb": 0.02}
    server = Served(**options, engine="auto", agents_dir=str(folder / "agents"), keep_packed=False)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


def test_a_chat_goes_on_with_its_own_model_and_says_why_an_answer_ended(browser: Any, home: Served) -> None:
    visit = Visit(browser, home.url).open()
    model = visit.page.get_by_label("Model", exact=True)
    assert model.input_value() == "brief", "the first"
    model.select_option("loop")
    visit.send("Count.")
    assert "repeated itself" in visit.last(".facts")
    visit.page.reload()
    visit.page.wait_for_selector(".turn .facts:has-text('repeated itself')")
    visit.page.wait_for_function("() => document.querySelector('.talkhead select').value === 'loop'")
    elsewhere = Visit(browser, home.url).open(visit.page.url.removeprefix(f"{home.url}/"))
    facts = elsewhere.page.locator(".turn .facts:has-text('repeated itself')")
    facts.wait_for()
    assert "tokens/s" in facts.inner_text() and re.search(r"first token after [1-9.]", facts.inner_text())
    elsewhere.close()
    visit.close()
    assert visit.errors == []


def test_lists_open_and_close_on_a_phone(browser: Any, home: Served) -> None:
    visit = Visit(browser, home.url, size=(380, 760)).open()
    visit.send("Hello")
    head = visit.page.locator(".talkhead")
    parts = [one.bounding_box() for one in head.locator("> button, > select, > details > summary").all()]
    assert len({round(box["y"] + box["height"] / 2) // 8 for box in parts}) == 1, "the chat's head is one row"
    for _ in range(2):
        visit.button("Chats").click()
        visit.page.locator(".side").get_by_role("link", name="Hello").wait_for()
        assert not visit.page.locator(".log").is_visible()
        visit.button("Chats").click()
        visit.page.locator(".log").wait_for()
        assert not visit.page.locator(".side").is_visible()
    visit.button("Chats").click()
    visit.page.locator(".side").get_by_role("link", name="Hello").click()
    visit.page.locator(".log").wait_for()
    visit.close()
    assert visit.errors == []


def test_panels_over_the_chat_close_and_its_beginning_is_found(browser: Any, home: Served) -> None:
    begun = [{"role": "user", "content": "Of quartz."}, {"role": "assistant", "content": "Feldspar."}]
    body = {"messages": begun, "metadata": {"title": "Stones"}}
    httpx.post(f"{home.url}/v1/agents", json=body).raise_for_status()
    visit = Visit(browser, home.url).open()
    settings, effort = visit.page.locator(".settings:not(.menu) .panel"), visit.page.locator(".sampling select")
    summary = visit.page.locator(".settings > summary", has_text="Settings")
    for close in (lambda: visit.page.keyboard.press("Escape"), lambda: visit.page.locator(".log").click()):
        summary.click()
        assert effort.bounding_box()["width"] > 100, "as the model does: all of it can be read"
        close()
        settings.wait_for(state="hidden")
    visit.page.get_by_label("Search chats").fill("feldspar")
    visit.page.locator(".side").get_by_role("link", name="Stones").wait_for()
    visit.open("#/teams")
    visit.page.get_by_text("cairn workflow run FILE").wait_for()
    visit.close()
    assert visit.errors == []


def test_what_a_dialog_asked_for_is_refused_in_it(browser: Any, home: Served) -> None:
    httpx.post(f"{home.url}/v1/teams", json={"id": "taken", "members": [{"name": "ann"}]}).raise_for_status()
    visit = Visit(browser, home.url).open("#/teams")
    visit.button("New team").click()
    visit.page.get_by_label("Name", exact=True).fill("taken")
    visit.button("Make it").click()
    visit.page.locator("dialog [role=alert]:has-text('there is a team taken already')").wait_for()
    visit.page.get_by_label("Name", exact=True).fill("free")
    visit.button("Make it").click()
    visit.page.get_by_role("heading", name="free").wait_for()
    assert visit.page.locator(".said").is_hidden(), "nothing was said yet"
    visit.close()
