"""The screenshots of docs/page.md, made by `python -m tests.web.pictures` with answers of the bundled model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx

from tests.web.browser import Home, Visit, chromium, missing

DOCS = Path(__file__).parent.parent.parent / "docs"
SIZE = (900, 560)
TASKS = (
    "Sort the mail of today",
    "Plan the trip to Porto",
    "Read the log of Tuesday",
    "Name the new room",
    "Review the patch",
)


def fill(url: str) -> None:
    """Create some agents with turns and branches."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        for number, task in enumerate(TASKS):
            id = f"worker-{number + 1}"
            http.post("/v1/agents", json={"id": id, "metadata": {"title": task}, "system": "Be brief. " * 40})
            for turn in range(1 + number % 3):
                message = {"role": "user", "content": f"{task}, part {turn + 1}."}
                http.post(f"/v1/agents/{id}/turns", json={"messages": [message], "max_tokens": 60}).raise_for_status()
        http.post("/v1/agents/worker-3/fork", json={"turn": 1, "id": "worker-3-b"}).raise_for_status()
        http.post("/v1/agents/worker-3/pin").raise_for_status()
        http.post("/v1/agents/worker-2/evict", json={}).raise_for_status()


def main() -> None:
    """Start a server, do what a person does, and take the pictures."""
    if why := missing():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        home = Home(Path(folder), Path("demo"), kv_gb=0.2)
        home.options["model"] = "demo"
        try:
            fill(home.ready().url)
            visit = Visit(browser, home.url, size=SIZE).open()
            visit.send("What is a cairn?")
            visit.send("And what can it remember?")
            _take(visit, "page-chat.png")
            visit.open("#/contexts/worker-3")
            visit.page.locator(".node.turn").first.wait_for()
            visit.page.get_by_role("tree").focus()
            visit.page.wait_for_timeout(1500)
            _take(visit, "page-contexts.png")
            visit.close()
        finally:
            home.end()


def _take(visit: Visit, name: str) -> None:
    visit.page.screenshot(path=DOCS / name)


if __name__ == "__main__":
    main()
