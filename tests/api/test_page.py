"""The page's files: headers, contents, and who may fetch them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cairn.api.app import build_app
from cairn.api.page import FOLDER, KINDS
from cairn.config.config import Config
from cairn.config.values import Secret
from tests.api.scripted import ScriptedService
from tests.api.sockets import site

FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
TEXT = {path.name: path.read_text() for path in FILES}
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
ALLOWED_URLS = {"http://www.w3.org/2000/svg"}
"""Names of XML namespaces, which are never fetched."""
MOST_BYTES = 300 << 10
KEYS = Config(api_key=(Secret("k"),), admin_key=Secret("a"))


async def test_a_browser_gets_the_page_and_a_client_of_ollama_its_word() -> None:
    async with site(ScriptedService()) as web, web.http() as http:
        page = await http.get("/", headers=BROWSER)
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.text == TEXT["index.html"] and "accept" in page.headers["vary"]
        head = await http.head("/", headers=BROWSER)
        assert head.status_code == 200 and not head.content
        assert (await http.get("/")).text == "Ollama is running"
        assert (await http.post("/", headers=BROWSER)).status_code == 405


async def test_every_file_is_served_with_a_policy_that_lets_nothing_else_in() -> None:
    async with site(ScriptedService()) as web, web.http() as http:
        for path in FILES:
            answer = await http.get(f"/web/{path.name}")
            assert answer.status_code == 200 and answer.content == path.read_bytes()
            assert answer.headers["content-type"].encode() == KINDS[path.suffix]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["img-src"] == "'self' blob:"  # a run's graph, which is fetched with the key
            assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
            assert "unsafe" not in answer.headers["content-security-policy"]


async def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async with site(ScriptedService()) as web, web.http() as http:
        first = await http.get("/web/app.js")
        again = await http.get("/web/app.js", headers={"If-None-Match": first.headers["etag"]})
        other = await http.get("/web/app.js", headers={"If-None-Match": '"other"'})
        assert (again.status_code, again.content, other.status_code) == (304, b"", 200)
        assert "content-security-policy" in again.headers


@pytest.mark.parametrize("path", ["/web/", "/web/nothing.js", "/web/../app.py", "/web/%2e%2e/app.py", "/web/index"])
async def test_nothing_but_the_files_is_served(path: str) -> None:
    async with site(ScriptedService()) as web, web.http() as http:
        assert (await http.get(path)).status_code == 404


async def test_the_page_is_there_before_the_model() -> None:
    async with site(None) as web, web.http() as http:
        assert (await http.get("/", headers=BROWSER)).status_code == 200
        assert (await http.get("/web/app.js")).status_code == 200
        assert (await http.get("/v1/events")).status_code == 503


async def test_with_keys_the_files_are_open_and_what_they_show_is_not() -> None:
    async with site(ScriptedService(), KEYS) as web, web.http() as http:
        for path in ("/", "/docs", "/web/app.js"):
            assert (await http.get(path, headers=BROWSER)).status_code == 200
        for path in ("/openapi.json", "/v1/events", "/v1/savings", "/v1/agents"):
            assert (await http.get(path)).status_code == 401, path


async def test_a_host_that_is_not_ours_gets_no_page() -> None:
    async with site(ScriptedService()) as web, web.http() as http:
        assert (await http.get("/", headers={**BROWSER, "Host": "evil.example"})).status_code == 403


async def test_without_page_and_docs_their_routes_are_absent() -> None:
    async with site(ScriptedService(), Config(page=False, docs=False)) as web, web.http() as http:
        for path in ("/", "/web/index.html", "/web/style.css", "/docs", "/openapi.json"):
            assert (await http.get(path, headers=BROWSER)).status_code == 404, path
        assert (await http.get("/")).text == "Ollama is running"


async def test_the_page_and_the_docs_are_switched_off_apart() -> None:
    async with site(ScriptedService(), Config(docs=False)) as web, web.http() as http:
        got = {path: (await http.get(path, headers=BROWSER)).status_code for path in ("/", "/docs", "/web/docs.js")}
        assert got == {"/": 200, "/docs": 404, "/web/docs.js": 404}
    async with site(ScriptedService(), Config(page=False)) as web, web.http() as http:
        wanted = {"/": 404, "/docs": 200, "/web/docs.js": 200, "/web/style.css": 200, "/web/chat.js": 404}
        got = {path: (await http.get(path, headers=BROWSER)).status_code for path in wanted}
        assert got == wanted
        needed = re.findall(r'from "(/web/[^"]+)"', TEXT["docs.js"])
        assert needed and [(await http.get(path)).status_code for path in needed] == [200] * len(needed)


def test_no_file_is_read_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> bytes:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(Path, "read_bytes", read)
    build_app(None, Config())


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES


@pytest.mark.parametrize("name", TEXT)
def test_no_file_names_another_host_or_makes_html_of_text(name: str) -> None:
    text = TEXT[name]
    assert set(re.findall(r"https?://[\w.][^\s\"'<>)]*", text)) <= ALLOWED_URLS
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?//""", text)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "import("):
        assert sink not in text, sink


@pytest.mark.parametrize("name", [name for name in TEXT if name.endswith(".html")])
def test_no_document_holds_a_script_or_a_style(name: str) -> None:
    text = TEXT[name]
    assert re.findall(r"<script[^>]*>(.*?)</script>", text, re.S) == [""] * text.count("<script")
    assert "<style" not in text and not re.search(r"\s(?:on\w+|style)=", text)


def test_every_file_that_a_file_imports_is_there() -> None:
    named = {path for text in TEXT.values() for path in re.findall(r'"/web/([^"]+)"', text)}
    assert named <= set(TEXT) and set(TEXT) - named == {"index.html", "docs.html"}
