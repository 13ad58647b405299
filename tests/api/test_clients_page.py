"""docs/clients.md: its table of accepted fields equals the code's."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

from cairn.api.chat.fields import ACCEPTED

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
MARK = "<!-- accepted -->\n"
TITLES = {
    "request": "Of a request",
    "messages": "Of a request to /v1/messages",
    "responses": "Of a request to /v1/responses",
    "ollama": "Of a request to /api/chat and /api/generate",
    "options": "Of its `options`",
    "model": "Of a request to /api/show, /api/pull and /api/delete",
    "embedding": "Of a request for embeddings or scores",
    "tokenize": "Of a request to /tokenize",
    "stream_options": "Of `stream_options`",
    "message": "Of a message",
    "part": "Of a part of a message's content",
    "tool": "Of a tool",
    "function": "Of a tool's `function`",
    "call": "Of a call in an assistant's message",
    "called": "Of a call's `function`",
}
PROVIDER = "@ai-sdk/openai-compatible"
"""A part of Vercel's AI SDK, which the page names as a whole."""
REWRITE = "CAIRN_TEST_WRITE_PAGES"
"""Environment variable that makes the test rewrite the page's tables."""


def tables() -> str:
    lines = []
    for place, dialects in ACCEPTED.items():
        lines += ["", f"### {TITLES[place]}", "", "| fields | sent by clients of | values | |", "|---|---|---|---|"]
        for dialect, rows in dialects.items():
            for row in rows:
                names = " ".join(f"`{name}`" for name in row.names.split())
                values = "any" if row.values is None else ", ".join(f"`{json.dumps(value)}`" for value in row.values)
                lines.append(f"| {names} | {dialect} | {values or 'null only'} | {row.why} |")
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_table() -> None:
    head, _, shown = PAGE.read_text().partition(MARK)
    if os.environ.pop(REWRITE, ""):
        PAGE.write_text(head + MARK + tables())
        return
    assert shown == tables(), f"run this test with {REWRITE}=1"


def test_the_tested_client_versions_are_those_installed() -> None:
    """The page names all versions of the extra `clients` in pyproject.toml and of the npm packages in the Makefile."""
    root = PAGE.parents[1]
    text = PAGE.read_text().partition("## What was tried")[2].partition("\n## ")[0]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = [one.partition("==") for one in [*extras["clients"], *extras["clients-older"]]]
    npm = re.findall(r"(@?[\w/-]+)@(\d+[.\d]+)", (root / "Makefile").read_text())
    wanted = {version for _, _, version in pins} | {version for name, version in npm if name != PROVIDER}
    assert len(wanted) > 10 and {version for version in wanted if version not in text} == set()
    named = set(re.findall(r"\d+\.\d+\.\d+", text))
    assert named == wanted, "and no other"
