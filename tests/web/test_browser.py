"""The page as a person uses it, in headless Chromium against a real server.

These take longer than other tests, as they start a browser and servers that load a model.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.process import Served
from tests.service.several import make_models
from tests.web.browser import WAIT, Home, Visit, browser, missing, scripted

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
__all__ = ["browser"]

HOSTILE = (
    "Hello <script>window.hit = 1</script> and <img src=x onerror=alert(2)> or [click](javascript:alert(3)) with "
    "[good](https://example.com/a) ![pixel](https://evil.example/p.png) <svg onload=alert(4)> `code <b>` **bold** "
    "<a href=data:text/html,x>no</a>."
)
TALK = "# Stones\n\nA **cairn** is a heap of `stones`.\n\n- one\n- two\n\n```python\nprint(1)\n```\n\nThat is all."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page-models")
    scripted(folder / "talk.gguf", TALK)
    scripted(folder / "hostile.gguf", HOSTILE)
    # It repeats after 150 words: the page ends an answer that repeats a piece of up to 64 tokens.
    scripted(folder / "long.gguf", " ".join(f"w{number:03}" for number in range(150)) + " ", end=None, context=30_000)
    return folder


@pytest.fixture(scope="module")
def talking(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("talking"), models / "talk.gguf")
    try:
        yield home.ready()
    finally:
        home.end()


@pytest.fixture(scope="module")
def endless(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A server whose answers are so long, on slow kernels, that they can be stopped in the middle on any machine."""
    home = Home(tmp_path_factory.mktemp("endless"), models / "long.gguf", kv_gb=0.1, kernels="portable")
    try:
        yield home.ready()
    finally:
        home.end()


@pytest.fixture
def visit(browser: Any, talking: Home) -> Iterator[Visit]:
    made = Visit(browser, talking.url)
    yield made
    made.close()
    assert made.errors == [] and made.dialogs == []
    assert [url for url in made.asked if not url.removeprefix("blob:").startswith(talking.url + "/")] == []


def agent_of(visit: Visit) -> str:
    match = re.search(r"#/chat/([\w.-]+)$", visit.page.url)
    assert match, visit.page.url
    return match[1]


def test_a_first_visit(visit: Visit) -> None:
    visit.open()
    assert visit.page.title() == "Chat · Cairn"
    assert visit.page.get_by_role("heading", name="What is on your mind?").is_visible()
    assert visit.page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    assert visit.page.get_by_label("Model", exact=True).input_value() == "talk"
    for name in ("Contexts", "Teams", "Now", "Savings", "Chat"):
        visit.page.get_by_role("link", name=name, exact=True).click()
        visit.page.wait_for_selector(f"#nav a[aria-current]:has-text('{name}')")


def test_a_chat_is_shown_well_kept_and_found_again(visit: Visit, talking: Home) -> None:
    visit.open().send("What is a cairn?")
    assert visit.last(".answer h2") == "Stones" and visit.last(".answer strong") == "cairn"
    assert visit.last(".answer p code") == "stones" and "print(1)" in visit.last(".answer figure.code pre")
    assert visit.page.locator(".turn:last-child .answer li").all_inner_texts() == ["one", "two"]
    first = visit.last(".provenance")
    assert "computed now" in first and "tokens/s" in visit.last(".facts")
    visit.send("And what is it for?")
    assert "from the pool" in visit.last(".provenance")
    visit.page.reload()
    visit.page.wait_for_selector(".turn:nth-child(2) .answer h2")
    assert "from the pool" in visit.last(".provenance")
    names = visit.page.locator(".names .name").all_inner_texts()
    assert "What is a cairn?" in names
    turns = httpx.get(f"{talking.url}/v1/agents/{agent_of(visit)}/turns", trust_env=False).json()["data"]
    assert [turn["answer"]["content"] for turn in turns] == [TALK, TALK]


def test_an_answer_is_copied_as_it_was_written(visit: Visit) -> None:
    visit.open().send("Say it.")
    visit.page.locator(".turn:last-child .actions").last.get_by_role("button", name="Copy").click()
    visit.page.wait_for_function("() => navigator.clipboard.readText().then((text) => text.startsWith('# Stones'))")
    visit.page.locator(".turn:last-child figcaption button").click()
    visit.page.wait_for_function("() => navigator.clipboard.readText().then((text) => text === 'print(1)')")


def test_a_message_is_edited_and_its_versions_are_kept(visit: Visit) -> None:
    visit.open().send("First")
    visit.send("Second")
    visit.page.locator(".turn:first-child").get_by_role("button", name="Edit").click()
    visit.page.locator("dialog textarea").fill("Other first")
    visit.page.locator("dialog").get_by_role("button", name="Send").click()
    visit.page.wait_for_selector(".versions:has-text('version 2 of 2')")
    visit.answered()
    assert visit.page.locator(".asked .text").all_inner_texts() == ["Other first"]
    visit.button("Previous version").click()
    visit.page.wait_for_selector(".versions:has-text('version 1 of 2')")
    assert visit.page.locator(".asked .text").all_inner_texts() == ["First", "Second"]


def test_an_edit_that_is_refused_leaves_the_chat_as_it_was(browser: Any, narrow_room: Home) -> None:
    visit = Visit(browser, narrow_room.url).open()
    visit.send("First")
    visit.send("Second")
    visit.page.locator(".turn:first-child").get_by_role("button", name="Edit").click()
    visit.page.locator("dialog textarea").fill("stone " * 2000)
    visit.page.locator("dialog").get_by_role("button", name="Send").click()
    visit.page.wait_for_selector(".ways:has-text('has filled the model')")
    visit.page.wait_for_function("() => document.querySelector('.composer textarea').value.startsWith('stone')")
    assert visit.page.locator(".asked .text").all_inner_texts() == ["First", "Second"]
    assert httpx.get(f"{narrow_room.url}/v1/agents/{agent_of(visit)}", trust_env=False).json()["head"] == 2
    visit.close()


def test_what_was_typed_stays_while_other_views_are_shown(visit: Visit) -> None:
    message = visit.open().page.get_by_label("Message", exact=True)
    message.fill("Half a thought")
    visit.page.get_by_role("link", name="Contexts", exact=True).click()
    visit.page.wait_for_selector("#nav a[aria-current]:has-text('Contexts')")
    visit.page.get_by_role("link", name="Chat", exact=True).click()
    assert message.input_value() == "Half a thought"
    message.press("Enter")
    visit.page.wait_for_selector(".turn .answer .text:has-text('Stones')")
    visit.answered()
    visit.open("#/chat")
    assert message.input_value() == ""


def test_the_content_is_reached_by_keyboard_in_the_same_view(visit: Visit) -> None:
    visit.open("#/contexts").page.locator(".skip").focus()
    visit.page.keyboard.press("Enter")
    assert visit.page.evaluate("document.activeElement.id") == "main"
    assert visit.page.title() == "Contexts · Cairn" and visit.page.url.endswith("#/contexts")


def test_an_answer_is_asked_for_again(visit: Visit) -> None:
    visit.open().send("Again and again")
    visit.button("Again").click()
    visit.page.wait_for_selector(".versions:has-text('version 2 of 2')")
    visit.answered()
    assert visit.page.locator(".asked .text").all_inner_texts() == ["Again and again"]


def test_a_branch_goes_its_own_way(visit: Visit) -> None:
    visit.open().send("The trunk")
    trunk = agent_of(visit)
    visit.button("Branch").click()
    visit.page.wait_for_url(lambda url: "#/chat/" in url and trunk not in url)
    visit.page.wait_for_selector(".turn .answer h2")
    visit.send("The branch")
    assert visit.page.locator(".asked .text").all_inner_texts() == ["The trunk", "The branch"]
    visit.open(f"#/chat/{trunk}")
    visit.page.wait_for_selector(".turn")
    assert visit.page.locator(".asked .text").all_inner_texts() == ["The trunk"]


def test_settings_are_sent_and_kept(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_text("Settings").click()
    visit.page.get_by_label("System prompt").fill("Be brief.")
    visit.page.get_by_label("Most tokens", exact=True).fill("3")
    assert visit.page.get_by_label("Temperature").get_attribute("placeholder") == "0.8"
    visit.page.get_by_text("Settings").click()
    visit.send("Short")
    assert "3 tokens" in visit.last(".facts") and "cut at the token limit" in visit.last(".facts")
    assert "Be brief." in visit.page.locator("details.aside").text_content()
    visit.page.reload()
    visit.page.get_by_text("Settings").click()
    assert visit.page.get_by_label("Most tokens", exact=True).input_value() == "3"


def test_streaming_stop_and_going_on(browser: Any, endless: Home) -> None:
    visit = Visit(browser, endless.url).open()
    visit.send("Count", wait=False)
    lengths = []
    for _ in range(3):
        visit.page.wait_for_function(
            "n => document.querySelector('.answer .text:not(.reasoning .text)')?.innerText.length > n",
            arg=lengths[-1] if lengths else 0,
        )
        lengths.append(len(visit.last(".answer > .text")))
    assert lengths == sorted(set(lengths))
    visit.button("Stop").click()
    visit.page.wait_for_selector(".status:has-text('This answer was interrupted.')")
    cut = visit.last(".answer > .text")
    assert 0 < len(cut) < 20_000
    visit.button("Go on").click()
    visit.page.wait_for_function(
        "n => document.querySelector('.answer > .text').innerText.length > n", arg=len(cut) + 20
    )
    visit.button("Stop").click()
    visit.page.wait_for_selector(".status:has-text('This answer was interrupted.')")
    assert visit.last(".answer > .text").startswith(cut[:200])
    visit.send("Something else", wait=False)  # the interrupted turn is left as it is
    visit.button("Stop").click()
    visit.page.wait_for_selector(".status:has-text('This answer was interrupted.')")
    assert visit.page.locator(".asked .text").all_inner_texts() == ["Something else"]
    assert visit.page.locator(".versions").inner_text() == "version 2 of 2"
    assert visit.errors == []
    visit.close()


def test_an_answer_goes_on_after_a_reload_and_shows_under_now(browser: Any, endless: Home) -> None:
    visit, other = Visit(browser, endless.url).open(), Visit(browser, endless.url).open("#/now")
    visit.send("Count", wait=False)
    visit.page.wait_for_function("() => document.querySelector('.answer > .text')?.innerText.length > 50")
    visit.page.reload()
    visit.page.wait_for_function(
        "() => document.querySelector('.log[aria-busy] .answer > .text')?.innerText.length > 50"
    )
    other.page.get_by_role("cell", name="answers").wait_for()
    other.button("Cancel").focus()
    said = other.page.locator("td:nth-child(4)").first.inner_text()
    other.page.wait_for_function("t => document.querySelector('td:nth-child(4)').innerText !== t", arg=said)
    assert other.page.evaluate("document.activeElement.innerText") == "Cancel", "what has the focus keeps it"
    other.page.keyboard.press("Enter")
    other.page.get_by_text("Nothing runs and nothing waits.").wait_for()
    visit.page.wait_for_selector(".status:has-text('This answer was interrupted.')")
    assert visit.errors == [] and other.errors == []
    visit.close()
    other.close()


def test_a_server_that_goes_and_comes_back(browser: Any, models: Path, tmp_path: Path) -> None:
    home = Home(tmp_path, models / "talk.gguf").ready()
    try:
        visit = Visit(browser, home.url).open()
        visit.send("A question that is long enough for a whole chunk of the store: " + "stone " * 30)
        home.end(clean=True)
        visit.page.wait_for_selector("#link:not(.live)")
        visit.page.get_by_label("Message", exact=True).fill("Are you there?")
        visit.page.get_by_label("Message", exact=True).press("Enter")
        visit.page.wait_for_selector(".turn.refused, .status .warn")
        assert visit.page.get_by_label("Message", exact=True).input_value() == "Are you there?"
        home.start()
        visit.page.wait_for_selector("#link.live", timeout=60_000)
        visit.button("Send").click()
        visit.page.wait_for_selector(".turn:not(.refused):nth-last-child(1) .provenance")
        visit.answered()
        assert "from the disk" in visit.last(".provenance")
        visit.close()
    finally:
        home.end()


def test_the_tree_by_keys(visit: Visit, talking: Home) -> None:
    with httpx.Client(base_url=talking.url, trust_env=False, timeout=20) as http:
        http.post("/v1/agents", json={"id": "tree", "metadata": {"title": "A tree"}})
        turn = {"messages": [{"role": "user", "content": "leaf"}], "max_tokens": 3}
        for _ in range(2):
            http.post("/v1/agents/tree/turns", json=turn).raise_for_status()
        page = visit.open("#/contexts").page
        page.keyboard.press("/")
        page.keyboard.type("a tree")
        page.get_by_role("treeitem").nth(0).wait_for()
        page.wait_for_function("() => document.querySelectorAll('[role=treeitem]').length === 1")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        page.get_by_role("treeitem").nth(2).wait_for()
        assert page.locator(".node[aria-selected=true]").get_attribute("aria-expanded") == "true"
        page.locator(".chip:has-text('pool')").first.wait_for()
        page.keyboard.press("p")
        page.locator(".node .tag:has-text('pinned')").wait_for()
        assert http.get("/v1/agents/tree").json()["pinned"] is True
        page.keyboard.press("p")
        page.locator(".node .tag:has-text('pinned')").wait_for(state="detached")
        page.keyboard.press("e")
        page.keyboard.press("ArrowDown")  # turn 1
        page.keyboard.press("r")
        page.locator(".node .tag:has-text('left')").wait_for()
        assert http.get("/v1/agents/tree").json()["head"] == 1
        page.keyboard.press("f")
        page.locator("dialog input").fill("tree-2")
        page.locator("dialog").get_by_role("button", name="Fork").click()
        page.locator("dialog").wait_for(state="detached")
        assert http.get("/v1/agents/tree-2").json()["origin"] == "tree"
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        assert download.value.suggested_filename in ("tree.cairn", "tree-2.cairn")
        page.locator("[aria-label='Search contexts']").fill("")
        page.get_by_role("treeitem").filter(has_text="A tree").first.click()
        selected = page.locator(".node[aria-selected=true]")
        before = httpx.get(f"{talking.url}/v1/agents", trust_env=False).json()["data"]
        selected.wait_for()
        page.get_by_role("tree").press("Delete")
        page.locator("dialog").get_by_role("button", name="Delete it").click()
        page.locator("dialog").wait_for(state="detached")
        for _ in range(100):
            after = http.get("/v1/agents").json()["data"]
            if len(after) < len(before):
                break
            time.sleep(0.05)
        assert len(after) == len(before) - 1
        for id in ("tree", "tree-2"):
            http.delete(f"/v1/agents/{id}")


def test_a_change_by_another_client_shows_at_once(visit: Visit, talking: Home) -> None:
    page = visit.open("#/contexts").page
    with httpx.Client(base_url=talking.url, trust_env=False, timeout=20) as http:
        http.post("/v1/agents", json={"id": "from-elsewhere"}).raise_for_status()
        page.get_by_role("treeitem").filter(has_text="from-elsewhere").wait_for(timeout=WAIT)
        http.delete("/v1/agents/from-elsewhere").raise_for_status()
        page.get_by_role("treeitem").filter(has_text="from-elsewhere").wait_for(state="detached", timeout=WAIT)


def test_savings_are_shown(visit: Visit) -> None:
    visit.open().send("To be counted: " + "stone " * 20)
    visit.send("And once more")
    page = visit.page
    page.get_by_role("link", name="Savings").click()
    page.locator("dl.cards dd").first.wait_for()
    assert page.locator(".chart rect").count() >= 1
    assert page.get_by_role("link", name="To be counted").first.is_visible()


def test_models_are_unloaded_and_loaded_while_pages_are_open(browser: Any, tmp_path: Path) -> None:
    """A page follows the server's events all the time, which must not delay a model's unloading."""
    places = make_models(tmp_path / "models", "alpha beta")
    lines = [f"[[models]]\nmodel = {json.dumps(str(place))}\n" for place in places]
    (tmp_path / "cairn.toml").write_text("".join(lines))
    given = {"config_file": str(tmp_path / "cairn.toml"), "kv_dir": str(tmp_path / "kv"), "kv_gb": 0.02}
    server = Served(**given, agents_dir=str(tmp_path / "agents"))
    try:
        server.wait_ready()
        visit = Visit(browser, server.url).open("#/now")
        page = visit.page
        page.get_by_role("button", name="Unload beta").click()
        page.get_by_role("button", name="Load beta", exact=True).wait_for(timeout=10_000)
        page.get_by_role("button", name="Load beta", exact=True).click()
        page.get_by_role("button", name="Unload beta").wait_for()
        page.get_by_role("button", name="Swap alpha").click()
        chosen = page.locator("dialog").get_by_label("The other")
        assert chosen.locator("option").all_inner_texts() == ["beta", "another …"]
        assert not page.get_by_label("Its folder, file or name").is_visible()
        chosen.select_option("another …")
        page.get_by_label("Its folder, file or name").fill("nowhere")
        page.locator("dialog").get_by_role("button", name="Swap").click()
        page.locator("dialog [role=alert]:has-text('there is no folder nowhere')").wait_for()
        assert page.get_by_label("Its folder, file or name").input_value() == "nowhere", "it can be corrected"
        assert len(visit.errors) == 1 and "Failed to load resource" in visit.errors.pop()
        page.locator("dialog").get_by_role("button", name="Cancel").click()
        page.get_by_role("link", name="Chat", exact=True).click()
        options = page.get_by_label("Model", exact=True).locator("option")
        options.nth(1).wait_for(state="attached")
        assert options.all_inner_texts() == ["alpha", "beta"]
        assert visit.errors == []
        visit.close()
    finally:
        server.end()


def test_a_key_is_asked_for_and_a_wrong_one_refused(browser: Any, tmp_path: Path) -> None:
    server = Served(api_key=["right"], admin_key="root", agents_dir=str(tmp_path / "agents"))
    try:
        server.wait_ready()
        visit = Visit(browser, server.url).open(live=False)
        page = visit.page
        page.get_by_role("dialog", name="Keys").wait_for()
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use them").click()
        page.get_by_text("This server does not know that key. Look for a missing character").first.wait_for()
        page.get_by_label("API key").fill("right")
        page.get_by_role("button", name="Use them").click()
        page.wait_for_selector("#link.live")
        page.get_by_role("link", name="Now").click()
        page.get_by_text("Figures of the whole server need its admin key").wait_for()
        page.get_by_role("button", name="Keys").click()
        page.get_by_label("Admin key").fill("root")
        page.get_by_role("button", name="Use them").click()
        page.get_by_text("room for").wait_for()
        assert page.evaluate("[sessionStorage.length, JSON.stringify(localStorage).includes('right')]") == [2, False]
        other = Visit(browser, server.url).open(live=False)
        other.page.get_by_role("dialog", name="Keys").wait_for()  # another tab does not have it
        other.close()
        visit.close()
    finally:
        server.end()


def test_a_team_is_made_speaks_and_votes(visit: Visit, talking: Home) -> None:
    page = visit.open("#/teams").page
    page.get_by_role("button", name="New team").click()
    page.get_by_label("Name", exact=True).fill("review")
    page.get_by_role("button", name="Make it").click()
    page.get_by_role("heading", name="review").wait_for()
    page.get_by_label("Say to the team").fill("What now?")
    page.get_by_role("button", name="Say it").click()
    page.locator(".said .asked:has-text('What now?')").wait_for()
    page.get_by_role("button", name="Let them speak").click()
    page.wait_for_function("() => document.querySelectorAll('.said:not([aria-busy]) .answer .facts').length === 2")
    assert page.locator(".said .answer h3").all_inner_texts() == ["ada", "bob"]
    page.get_by_role("button", name="Vote", exact=True).click()
    page.get_by_label("Question").fill("Are we done?")
    page.get_by_role("button", name="Let them vote").click()
    page.locator(".said:not([aria-busy]) .vote:has-text('Are we done?')").wait_for()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    page.wait_for_url("**/#/teams")
    assert httpx.get(f"{talking.url}/v1/teams", trust_env=False).json()["data"] == []


def test_a_run_of_a_workflow_is_shown_with_its_graph(visit: Visit, talking: Home) -> None:
    workflow = {
        "name": "Two steps",
        "nodes": [
            {"id": "plan", "role": "planner", "prompt": "Plan it."},
            {"id": "code", "role": "coder", "prompt": "Write this: {{ plan }}"},
        ],
    }
    made = httpx.post(f"{talking.url}/v1/workflows/runs", json={"workflow": workflow}, trust_env=False, timeout=60)
    page = visit.open(f"#/teams/run/{made.json()['id']}").page
    page.get_by_role("heading", name="Two steps").wait_for()
    page.wait_for_function("() => document.querySelector('.graph img')?.naturalWidth > 10")
    page.set_viewport_size({"width": 380, "height": 700})  # the table keeps its size, and scrolls
    shown = "(n) => [n.offsetWidth, n.naturalWidth, getComputedStyle(n.parentNode).overflowX]"
    width, drawn, overflow = page.locator(".graph img").evaluate(shown)
    assert width == drawn and overflow == "auto"
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    rows = page.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [["plan", "done"], ["code", "done"]]


# ------------------------------------------------------------------------------------------------- hostile answers


def test_a_hostile_answer_does_nothing(browser: Any, models: Path, tmp_path: Path) -> None:
    home = Home(tmp_path, models / "hostile.gguf").ready()
    try:
        visit = Visit(browser, home.url).open()
        visit.send("<img src=x onerror=alert(0)>")
        assert "<script>window.hit = 1</script>" in visit.last(".answer > .text")
        assert visit.page.evaluate("window.hit") is None
        assert visit.page.locator(".log script, .log img, .log svg, .log b").count() == 0
        links = visit.page.locator(".log a").evaluate_all("links => links.map(one => [one.href, one.rel, one.target])")
        assert [link[0] for link in links] == ["https://example.com/a", "https://evil.example/p.png"]
        assert all("noopener" in rel and target == "_blank" for _, rel, target in links)
        visit.page.goto(f"{home.url}/#/contexts/{agent_of(visit)}")
        visit.page.locator(".node.turn").click()
        visit.page.get_by_role("heading", name="Turn 1").wait_for()
        assert (visit.errors, visit.dialogs) == ([], [])
        assert all(url.startswith(home.url) for url in visit.asked)
        visit.close()
    finally:
        home.end()


RENDER = """async (text) => {
  const { nodes, Growing } = await import("/web/markdown.js");
  const box = document.createElement("div");
  document.querySelector("main").append(box);
  const began = performance.now();
  box.append(...nodes(text));
  const took = performance.now() - began;
  const grown = document.createElement("div");
  const growing = new Growing(grown);
  if (text.length < 5000) for (let end = 0; end <= text.length; end++) growing.show(text.slice(0, end));
  else growing.show(text);
  const names = [...box.querySelectorAll("*")].map((one) => one.tagName.toLowerCase());
  const attributes = [...box.querySelectorAll("*")].flatMap((one) => [...one.attributes].map((at) => at.name));
  const links = [...box.querySelectorAll("a")].map((one) => one.protocol);
  const found = { took, names: [...new Set(names)], attributes: [...new Set(attributes)], links: [...new Set(links)],
    shown: box.textContent.length, same: grown.innerHTML === box.innerHTML };
  box.remove();
  return found;
}"""
TAGS = set(
    re.findall(
        r"\w+",
        "p h2 h3 h4 h5 h6 ul ol li blockquote pre code figure figcaption span button strong em del a br hr div table "
        "thead tbody tr th td",
    )
)
ATTRIBUTES = {"class", "tabindex", "type", "href", "rel", "target", "start", "scope", "role", "aria-label"}
NASTY = [
    HOSTILE,
    "[a](java\nscript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](&#106;avascript:alert(1)) [d]( javascript:alert(1))",
    "[e](data:text/html;base64,PHNjcmlwdD4=) [f](vbscript:x) [g](//evil.example) [h](/v1/agents) [i](https://ok.example)",
    '<https://a.example> <javascript:alert(1)> http://x.example/"onmouseover=alert(1) https://user:pw@evil.example',
    '![x](javascript:alert(1)) ![y](x" onerror="alert(1)) [![z](https://i.example)](javascript:alert(1))',
    "| <b>a</b> | b |\n|---|---|\n| <img src=x onerror=alert(1)> | [x](javascript:alert(1)) |",
    "```html onload=alert(1)\n<script>alert(1)</script>\n```\n~~~\nopen",
    "> " * 40 + "deep\n" + "- " * 40 + "deep",
    "**" * 500 + "a" + "__" * 500,
    "# " + "*_`~[" * 200,
    "1. one\n2. two\n\n   more\n\n   ```\n   code\n   ```\n3. three\n- other\n  - nested\n\ntext",
    "a" * 1_000_000,
    "[" * 200_000,
    "*a " * 100_000,
    "`" * 100_000 + "x",
    "|" * 100_000 + "\n" + "|-" * 1000 + "\n" + "|x" * 50_000,
    "\n" * 200_000 + "end",
    "- a\n" * 20_000,
    "\u202e\u0000\ud83d\ufffd" * 100,
]


def test_whatever_a_model_writes_becomes_harmless_nodes_in_linear_time(visit: Visit) -> None:
    visit.open()
    for text in NASTY:
        result = visit.page.evaluate(RENDER, text)
        assert set(result["names"]) <= TAGS and set(result["attributes"]) <= ATTRIBUTES, (text[:60], result)
        assert set(result["links"]) <= {"https:", "http:", "mailto:"}, (text[:60], result)
        assert result["took"] < 3000, (text[:20], result["took"])
        assert result["same"], text[:60]  # rendering piece by piece gives what rendering at once gives
    assert visit.page.evaluate("window.hit") is None


@pytest.mark.parametrize(
    ("text", "inside", "shown"),
    [
        ("- a\n  - b\n    - c", "li li li", ["c"]),
        ("- a\n    - b\n        - c", "li li li", ["c"]),
        ("- x\n  ```yaml\n  a:\n    b:\n      c: 1\n  ```", "li pre", ["a:\n  b:\n    c: 1"]),
        ("1. x\n  ```\n  a:\n    b\n  ```", "li pre", ["a:\n  b"]),
        ("- x\n    ```py\n    def f():\n        pass\n    ```", "li pre", ["def f():\n    pass"]),
        ("1. x\n    ```\n    make", "li pre", ["make"]),
        ("   ```\n   a\n  b\n    c\n   ```", "pre", ["a\nb\n c"]),
        ("```ls -la```\n\nThen **do** this.", "p code, strong", ["ls -la", "do"]),
        ("Here it is:\n| a | b |\n|---|---|\n| 1 | 2 |", "p, td", ["Here it is:", "1", "2"]),
    ],
)
def test_markdown_as_models_write_it(visit: Visit, text: str, inside: str, shown: list[str]) -> None:
    visit.open()
    found = visit.page.evaluate(
        """async ([text, inside]) => {
          const { nodes } = await import("/web/markdown.js");
          const box = document.createElement("div");
          box.append(...nodes(text));
          return [...box.querySelectorAll(inside)].map((one) => one.textContent.trimEnd());
        }""",
        [text, inside],
    )
    assert found == shown
    assert visit.page.evaluate(RENDER, text)["same"]


def test_a_huge_line_is_shown_in_part_until_all_is_asked_for(visit: Visit) -> None:
    visit.open()
    result = visit.page.evaluate(RENDER, "a" * 1_000_000)
    assert 50_000 < result["shown"] < 70_000


def test_text_cannot_become_html_on_this_page_at_all(visit: Visit) -> None:
    visit.open()
    refused = visit.page.evaluate(
        "() => { try { document.createElement('p').innerHTML = '<b>x</b>'; return ''; } catch (e) { return e.name; } }"
    )
    assert refused == "TypeError"
    visit.errors.clear()  # the console reports the refusal


# ------------------------------------------------------------------------------------------------ for all, and much


@pytest.mark.parametrize(("size", "scheme"), [((1200, 800), "light"), ((380, 700), "dark")])
def test_an_accessibility_check_finds_nothing(browser: Any, talking: Home, size: tuple[int, int], scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    visit = Visit(browser, talking.url, size=size, scheme=scheme).open()
    visit.send("What is a cairn?")
    id = agent_of(visit)
    with httpx.Client(base_url=talking.url, trust_env=False, timeout=60) as http:
        team = {"id": f"team-{scheme}", "members": [{"name": "ada"}, {"name": "bob"}]}
        http.post("/v1/teams", json=team).raise_for_status()
        http.post(f"/v1/teams/team-{scheme}/rounds", json={}).raise_for_status()
        nodes = [{"id": "plan", "role": "planner", "prompt": "Plan it."}]
        run = http.post("/v1/workflows/runs", json={"workflow": {"name": "One", "nodes": nodes}}).json()["id"]
    places = [f"#/chat/{id}", f"#/contexts/{id}", f"#/teams/team/team-{scheme}", f"#/teams/run/{run}", "#/teams"]
    for place in (*places, "#/now", "#/savings", "docs", "#/chat"):
        visit.open(place, live=place != "docs")
        visit.page.wait_for_timeout(400)
        if place == "docs":
            visit.page.locator("summary").first.click()
        violations = Axe().run(visit.page).response["violations"]
        results = [
            (violation["id"], violation["impact"], [node["html"][:120] for node in violation["nodes"]][:3])
            for violation in violations
        ]
        assert results == [], (place, scheme, results)
        wide = visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, (place, wide)
    visit.close()


def test_the_narrow_page_has_its_list_of_chats_behind_a_button(browser: Any, talking: Home) -> None:
    visit = Visit(browser, talking.url, size=(380, 700)).open()
    visit.send("On a small screen")
    assert not visit.page.locator(".side").is_visible()
    visit.button("Chats").click()
    assert visit.page.locator(".side").is_visible()
    visit.close()


AGENTS, TURNS = 5000, 20


class Work:
    """What a page has done: CPU seconds of its main thread, and nodes added to it."""

    def __init__(self, visit: Visit) -> None:
        self._page = visit.page
        self._session = visit.context.new_cdp_session(visit.page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._page.evaluate(
            """() => {
              window.added = 0;
              const count = (changes) => changes.forEach((one) => (window.added += one.addedNodes.length));
              new MutationObserver(count).observe(document, { childList: true, subtree: true });
            }"""
        )
        self._before = self._now()

    def _now(self) -> tuple[float, int]:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        seconds = next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
        return seconds, self._page.evaluate("window.added")

    def since(self) -> tuple[float, int]:
        """Return the seconds and the nodes since the last call."""
        before, self._before = self._before, self._now()
        return self._before[0] - before[0], self._before[1] - before[1]


def test_thousands_of_agents_open_within_a_second(browser: Any, models: Path, tmp_path: Path) -> None:
    """5,000 agents of 20 turns each, written into the log as the server writes them.

    The limit is the page's CPU time: the clock would measure what else the machine does.
    """
    from tests.web.many_agents import write_agents

    write_agents(tmp_path / "agents", AGENTS, TURNS)
    home = Home(tmp_path, models / "talk.gguf").ready()
    try:
        visit = Visit(browser, home.url).open("#/now")
        page = visit.page
        page.wait_for_timeout(1500)
        work = Work(visit)
        page.evaluate(
            """async () => {
              location.hash = "#/contexts";
              while (document.querySelectorAll("[role=treeitem]").length < 10) await new Promise(requestAnimationFrame);
            }"""
        )
        opened, nodes = work.since()
        assert page.get_by_text(f"{AGENTS:,} agents").is_visible()
        assert page.get_by_role("treeitem").count() < 100
        page.evaluate(
            """async () => {
              const { connect, store } = await import("/web/store.js");
              store.agents = new Map();
              await connect();
              while (store.agents.size < 5000) await new Promise((go) => setTimeout(go, 5));
            }"""
        )
        cold, _ = work.since()
        page.get_by_role("tree").focus()
        page.keyboard.press("End")
        page.locator(f"[aria-posinset='{AGENTS - AGENTS // 10}']").wait_for()  # the others hang below these
        page.keyboard.press("ArrowRight")
        page.locator(".node.turn").first.wait_for()
        page.keyboard.press("End")
        page.locator(f".node.turn[aria-selected=true] .number:has-text('{TURNS}')").wait_for()
        work.since()
        page.evaluate(
            """async () => {
              const box = document.querySelector("[role=tree]");
              for (let n = 0; n < 60; n++) {
                box.scrollTop = (box.scrollHeight * n) / 60;
                await new Promise(requestAnimationFrame);
              }
            }"""
        )
        seconds, drawn = work.since()
        print("figures", opened, nodes, cold, seconds / 60, drawn / 60)
        assert opened < 1 and cold < 3 and seconds / 60 < 0.05, (opened, cold, seconds)
        assert 10 < nodes < 500 and 0 < drawn / 60 < 500, "only visible rows are drawn"
        assert _idle_share(home, page) < 0.01
        assert visit.errors == []
        visit.close()
    finally:
        home.end()


def _idle_share(home: Home, page: Any) -> float:
    """Return the additional share of a core that the front takes with the page open."""

    def used() -> float:
        parts = Path(f"/proc/{home.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / 100

    def over(seconds: float) -> float:
        before = used()
        time.sleep(seconds)
        return (used() - before) / seconds

    page.wait_for_timeout(3000)
    shown = over(4)
    page.goto("about:blank")
    time.sleep(1)
    return shown - over(4)


# ---------------------------------------------------------------------------------------- the list, and full contexts

TABLE = "# Big\n\n## Less\n\n- [x] done\n- [ ] open\n\n| name | weight | size |\n|:---|---:|:-:|\n| a | 1 | 2 |\n"


def test_the_list_has_ones_own_chats_alone_and_finds_them_by_their_text(visit: Visit, talking: Home) -> None:
    with httpx.Client(base_url=talking.url, trust_env=False, timeout=60) as http:
        http.post("/v1/agents", json={"id": "session-of-a-program"}).raise_for_status()
        http.post("/v1/teams", json={"id": "panel", "members": [{"name": "ann"}, {"name": "bob"}]}).raise_for_status()
    visit.open().send("Where do puffins sleep?")
    names = visit.page.locator(".names .name")
    assert not {"session-of-a-program", "panel.ann", "panel.bob"} & set(names.all_inner_texts())
    visit.send("An aside about quartz.")
    visit.open("#/chat").send("Something else.")
    visit.page.get_by_label("Search chats").fill("QUARTZ")  # no title has it
    visit.page.wait_for_function("() => document.querySelectorAll('.names .name').length === 1")
    assert names.all_inner_texts() == ["Where do puffins sleep?"]
    visit.page.get_by_label("Search chats").fill("nobody said this")
    visit.page.get_by_text("No chat has this.").wait_for()
    httpx.delete(f"{talking.url}/v1/teams/panel", trust_env=False, timeout=60).raise_for_status()


def test_a_chat_is_renamed_exported_and_deleted(visit: Visit, talking: Home) -> None:
    visit.open().send("Its first name")
    id = agent_of(visit)
    menu = visit.page.locator(".menu")
    menu.locator("summary").click()
    menu.get_by_role("button", name="Rename").click()
    visit.page.get_by_label("Name", exact=True).fill("Its second name")
    visit.page.locator("dialog").get_by_role("button", name="Rename").click()
    visit.page.wait_for_selector(".names .name:has-text('Its second name')")
    visit.page.reload()
    visit.page.wait_for_selector("h1:has-text('Its second name')")
    kept = httpx.get(f"{talking.url}/v1/agents/{id}", trust_env=False).json()
    assert kept["metadata"]["title"] == "Its second name"
    menu.locator("summary").click()
    with visit.page.expect_download() as download:
        menu.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == f"{id}.cairn"
    menu.locator("summary").click()
    menu.get_by_role("button", name="Delete").click()
    visit.page.get_by_role("button", name="Delete it").click()
    visit.page.get_by_role("heading", name="What is on your mind?").wait_for()
    assert httpx.get(f"{talking.url}/v1/agents/{id}", trust_env=False).status_code == 404
    assert "Its second name" not in visit.page.locator(".names .name").all_inner_texts()


def test_new_chat_is_not_squeezed_by_a_long_list(browser: Any, talking: Home) -> None:
    visit = Visit(browser, talking.url, size=(900, 500)).open()
    height = visit.page.locator(".side .button").bounding_box()["height"]
    with httpx.Client(base_url=talking.url, trust_env=False, timeout=60) as http:
        for number in range(25):
            http.post("/v1/agents", json={"id": f"long-list-{number}", "metadata": {"title": f"Chat {number}"}})
    visit.page.wait_for_function("() => document.querySelectorAll('.names .name').length >= 25")
    assert visit.page.locator(".side .button").bounding_box()["height"] == height
    with httpx.Client(base_url=talking.url, trust_env=False, timeout=60) as http:
        for number in range(25):
            http.delete(f"/v1/agents/long-list-{number}")
    visit.close()


@pytest.fixture(scope="module")
def narrow_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return a model whose context some turns fill."""
    folder = tmp_path_factory.mktemp("narrow-room")
    home = Home(folder, scripted(folder / "brief.gguf", TALK, context=600))
    try:
        yield home.ready()
    finally:
        home.end()


@pytest.mark.parametrize("way", ["Leave out the oldest turns", "Summarise the oldest turns", "New chat"])
def test_a_full_context_is_reported_and_can_be_continued(browser: Any, narrow_room: Home, way: str) -> None:
    visit = Visit(browser, narrow_room.url, size=(380, 760)).open()
    visit.send("First")
    meter = visit.page.locator(".roommeter")
    visit.page.wait_for_function(
        "() => /\\d+ of 600 tokens of the context are used/.test(document.querySelector('.roommeter').title)"
    )
    for turn in range(20):
        if visit.page.locator(".ways").count():
            break
        visit.send(f"More {turn}", wait=True)
    visit.page.wait_for_selector(".ways:has-text('has filled the model')")
    assert visit.page.locator(".ways").is_visible() and "few" in (meter.get_attribute("class") or "")
    full = agent_of(visit)
    visit.page.get_by_label("Message", exact=True).fill("What I wanted to say")
    visit.page.locator(".ways").get_by_role("button", name=way).click()
    visit.page.wait_for_function("(id) => !location.hash.includes(id)", arg=full)
    visit.page.wait_for_function("() => document.querySelector('.composer textarea')?.value === 'What I wanted to say'")
    visit.page.get_by_label("Message", exact=True).press("Enter")
    visit.page.wait_for_selector(".turn .answer .text:has-text('Stones')")
    visit.answered()
    made = httpx.get(f"{narrow_room.url}/v1/agents/{agent_of(visit)}", trust_env=False).json()
    begins = [message["role"] for message in made["messages"]]
    assert begins[-2:] == ([] if way == "New chat" else ["user", "assistant"])
    if way.startswith("Summarise"):
        assert begins[0] == "system" and "in short: # Stones" in made["messages"][0]["content"]
    still = httpx.get(f"{narrow_room.url}/v1/agents/{full}", trust_env=False).json()
    assert still["tokens"] > 100, "the full chat stays as it is"
    visit.close()
    assert visit.dialogs == []


def test_tasks_tables_headings_and_code_are_drawn(browser: Any, tmp_path: Path) -> None:
    home = Home(tmp_path, scripted(tmp_path / "table.gguf", TABLE + "\n```python\nx\n```\n\nend")).ready()
    try:
        visit = Visit(browser, home.url).open()
        visit.send("Draw")
        page = visit.page
        boxes = page.locator(".task input")
        assert [box.is_checked() for box in boxes.all()] == [True, False] and boxes.first.is_disabled()
        aligned = "(n) => [...n.querySelectorAll('td')].map((one) => getComputedStyle(one).textAlign)"
        assert page.locator(".answer table").evaluate(aligned) == ["left", "right", "center"]
        size = "(n) => parseFloat(getComputedStyle(n).fontSize)"
        sizes = [page.locator(f".answer .text {one}").first.evaluate(size) for one in ("h2", "h3", ".wide td")]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
        language, copy = (page.locator(f".code figcaption {one}").bounding_box() for one in ("span", "button"))
        assert abs(language["y"] + language["height"] / 2 - copy["y"] - copy["height"] / 2) < 2
        line = page.locator(".provenance > summary")
        assert line.bounding_box()["height"] < 30
        line.click()
        page.wait_for_selector(".provenance[open] p")
        before = visit.last(".facts")
        assert "tokens/s" in before
        page.reload()
        page.wait_for_selector(".turn .facts:has-text('tokens/s')")
        assert visit.last(".facts") == before, "how fast it was survives a reload"
        assert page.locator("select").first.evaluate("(n) => getComputedStyle(n).appearance") == "none"
        visit.close()
    finally:
        home.end()


def test_teams_work_on_a_narrow_page(browser: Any, talking: Home) -> None:
    visit = Visit(browser, talking.url, size=(380, 760)).open("#/teams")
    page = visit.page
    page.get_by_role("button", name="New team").click()
    page.get_by_label("Name", exact=True).fill("slim")
    page.get_by_role("button", name="Make it").click()
    page.get_by_role("heading", name="slim").wait_for()
    page.get_by_role("button", name="Let them speak").click()
    page.locator(".said:not([aria-busy]) .answer").nth(1).wait_for()
    page.get_by_role("button", name="Teams and runs").click()
    page.locator(".side").get_by_role("link", name="slim").click()
    page.locator(".talk").get_by_role("button", name="Delete").scroll_into_view_if_needed()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 380
    httpx.delete(f"{talking.url}/v1/teams/slim", trust_env=False, timeout=60).raise_for_status()
    visit.close()


def test_the_description_of_the_api_is_linked_both_ways(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_role("link", name="API").click()
    visit.page.get_by_role("heading", name="Cairn's API").wait_for()
    visit.page.get_by_role("link", name="Chat").first.click()
    visit.page.wait_for_selector("#link.live")
