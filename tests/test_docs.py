"""What the documentation claims exists: commands, routes, options, files, links and tests.

A feature in the README with no route behind it is known failure 50.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cairn.api.app import build_app
from cairn.api.http.not_found import canonical
from cairn.cli import app
from cairn.config.config import Config
from cairn.config.option import options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = README + "".join((ROOT / "docs" / name).read_text() for name in ("features.md", "agents.md", "clients.md"))
ROUTES = sorted(set(re.findall(r"`(/[a-z0-9/{}*_]+)`", PAGES)) - {"/cancel"})


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_that_a_page_names_is_there(route: str) -> None:
    app = build_app(None, Config())
    paths = {"/health/*": ["/health", "/health/live", "/health/ready", "/health/startup"]}
    for path in paths.get(route, [route.replace("{id}", "0")]):
        assert app.router.find(canonical(path)), path
    assert len(ROUTES) >= 7


def test_every_part_of_an_agents_route_is_there() -> None:
    table = PAGES.partition("| Route below `/v1/agents/{id}` |")[2].partition("\n\n")[0]
    parts = [part for line in table.splitlines() for part in re.findall(r"`([a-z]+)`", line.split(" | ")[0])]
    find = build_app(None, Config()).router.find
    assert len(parts) >= 9 and all(find(f"/v1/agents/0/{part}") for part in parts)
    assert not find("/v1/agents/0/nothing")


def test_every_option_and_command_that_a_page_names_is_there() -> None:
    known = {option.variable for option in options()} | {option.name for option in options()}
    assert set(re.findall(r"CAIRN_[A-Z_]+", PAGES)) <= known
    assert set(re.findall(r"`([a-z_]+) = ", PAGES)) <= known
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups}
    used = set(re.findall(r"(?:bin/|`)cairn ([a-z]+)", PAGES))
    assert used and used <= groups | commands


def test_teams_workflows_and_sources_have_a_page_with_a_diagram_and_the_words_that_people_look_for() -> None:
    words = {
        "teams": ("whisper", "scenario", "topology", "cairn team run"),
        "workflows": ("planner", "coder", "reviewer", "tester", "fixer", "handoff contract", "cairn workflow run"),
        "collections": ("min_score", "rerank", "file_search", "vector_stores", "cairn collection"),
    }
    for name, wanted in words.items():
        page = (ROOT / "docs" / f"{name}.md").read_text()
        assert "```mermaid" in page and not [word for word in wanted if word not in page], name


def test_every_make_target_that_a_page_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    names = ("CONTRIBUTING.md", "docs/reliability.md", ".ci/run")
    pages = README + "".join((ROOT / name).read_text() for name in names)
    used = set(re.findall(r"(?:`|^)make ([a-z-]+)", pages, re.M))
    assert {"serve", "test", "check", "prove"} <= used <= targets


def test_every_link_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())]
    assert not [(page.name, target) for page, target in links if not (page.parent / target).exists()]
    # links of pages in the root, of pages in docs/ and of pictures are among them
    kinds = {(page.parent.name == "docs", Path(target).suffix) for page, target in links}
    assert {(False, ".md"), (True, ".md"), (True, ".png")} <= kinds


def test_every_known_failure_is_named_by_a_test_that_would_catch_it() -> None:
    """18 concerns GPUs and 48 swaps between models, which a CPU server of one model does not have."""
    numbers = set(map(int, re.findall(r"^(\d+)\. ", (ROOT / "docs" / "known-failures.md").read_text(), re.M)))
    texts = [path.read_text() for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lists = [
        numbers
        for text in texts
        for numbers in re.findall(r"[Kk]nown failures?\s+(\d+(?:(?:,| and| to|\s)+\d+)*)", text)
    ]
    named = {int(number) for one in lists for number in re.findall(r"\d+", one)}
    assert numbers == set(range(1, 51)) and numbers - {18, 48} <= named <= numbers


def test_every_test_that_the_table_of_bounds_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(named) >= 12 and not [name for name in named if not any(f"def {name}(" in text for text in texts)]


def test_every_file_that_the_architecture_names_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|h))`", page))
    files = [str(path) for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.*")]
    assert len(named) > 40 and not [
        name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)
    ]
