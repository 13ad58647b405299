"""The recipes of docs/clients.md, taken from the page and run as they stand there.

Libraries and agents that are not installed (`make clients`) are skipped. The addresses of every recipe are requested,
and its names must be those by which `cairn launch` starts the same client, or be listed here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from cairn.cli.launch_table import AGENTS
from tests.clients.stage import FACTS, PAGES, Prompter, environment, found, run_script, stage

BASE = "http://127.0.0.1:8000"
ASKED, LAST = "How warm is it in Oslo?", "It is warm."
MODULES = {
    "openai-python": "openai",
    "anthropic-python": "anthropic",
    "openai-agents": "agents.run",
    "LangChain": "langchain_openai",
    "LlamaIndex": "llama_index.llms.openai_like",
    "pydantic-ai": "pydantic_ai",
    "instructor": "instructor",
    "LiteLLM": "litellm",
    "ollama-python": "ollama",
}


class Led(NamedTuple):
    """How to ask an agent something that a recipe has configured."""

    agent: str
    arguments: tuple[str, ...] = ()
    file: str = ""
    """File in the agent's home that gets the block; if empty, the block is run."""


LED = {
    "Claude Code": Led("claude", ("-p", ASKED)),
    "codex": Led(
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED),
        ".codex/config.toml",
    ),
    "opencode": Led("opencode", ("run", ASKED), ".config/opencode/opencode.json"),
    "qwen-code": Led("qwen", ("-p", ASKED)),
    "GitHub Copilot CLI": Led("copilot", ("-p", ASKED, "--allow-all-tools")),
    "aider": Led("aider"),
    "pi": Led("pi", (), ".pi/agent/models.json"),
}
LIBRARIES = "OpenAI's and Anthropic's libraries, and what is built on them"
OTHERS = {"Vercel's AI SDK", LIBRARIES}
FREE = {"name", "cairn", "any"}
"""Keys whose values are names of the user's choice."""


class Recipe(NamedTuple):
    """A block of the page."""

    client: str
    language: str
    text: str

    def lines(self) -> list[str]:
        """Return the lines without mere imports."""
        return [line for line in self.text.splitlines() if line and not re.match(r"(from|import) ", line)]

    def at(self, url: str) -> str:
        return self.text.replace(BASE, url)


def recipes() -> dict[str, Recipe]:
    page = (PAGES / "clients.md").read_text()
    part = page.partition("\n## Each client in three lines\n")[2].partition("\n## ")[0]
    results = re.findall(r"^### ([^\n]+)\n((?:(?!^### ).)*?)^```(\w+)\n(.*?)^```$", part, re.M | re.S)
    return {client: Recipe(client, language, text) for client, _, language, text in results}


RECIPES = recipes()


def variables(text: str) -> dict[str, str]:
    """Return the variables that a shell block exports."""
    return dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(re.findall(r"^export (.*)$", text, re.M))))


def keys(value: Any) -> Iterator[str]:
    """Yield all keys of a configuration, and its texts that are no numbers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def launched(name: str) -> set[str]:
    """Return every name that `cairn launch` has for an agent: variables, and keys of its configuration."""
    agent = AGENTS[name]
    names = set(agent.env) | set(re.findall(r"[\w.]+(?==)", " ".join(agent.arguments)))
    held: Iterable[Any] = [*agent.env.values(), *agent.files.values()]
    return names | {part for one in names for part in one.split(".")} | {key for one in held for key in keys(one)}


def test_every_client_has_a_recipe_of_three_lines() -> None:
    assert set(RECIPES) == {*MODULES, *LED, *OTHERS}
    long = {recipe.client: recipe.lines() for recipe in RECIPES.values() if len(recipe.lines()) > 3}
    assert not long


def test_every_name_in_a_recipe_is_one_that_its_client_reads() -> None:
    for client, led in LED.items():
        recipe = RECIPES[client]
        match recipe.language:
            case "sh":
                used = set(variables(recipe.text))
                assert recipe.lines()[-1].split()[0] == AGENTS[led.agent].program
                flags = set(re.findall(r" (--[\w-]+)", recipe.text))
                assert flags <= set(AGENTS[led.agent].arguments), client
            case "toml":
                used = set(keys(tomllib.loads(recipe.text)))
            case _:
                used = set(keys(json.loads(recipe.text)))
        assert used and used <= launched(led.agent) | FREE, client
    assert set(variables(RECIPES[LIBRARIES].text)) <= launched("claude") | launched("qwen")


def test_every_address_in_a_recipe_answers(at: Prompter) -> None:
    """An address that ends in /v1 lists its models; any other is requested as /v1/models and as Ollama's."""
    with httpx.Client(trust_env=False, verify=False) as http:
        for recipe in RECIPES.values():
            urls = re.findall(r"http://[^\s\"'`,]+", recipe.at(at.url))
            assert urls, recipe.client
            for url in urls:
                paths = ("/models",) if url.endswith("/v1") else ("/v1/models", "/api/version")
                assert all(http.get(url + path).status_code == 200 for path in paths), url


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("client", MODULES)
def test_a_librarys_recipe(client: str, at: Prompter) -> None:
    pytest.importorskip(MODULES[client], reason=f"{client} is not installed: make clients")
    code = RECIPES[client].at(at.url)
    # A process of its own, as a user would run it: some libraries leave an event loop behind.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert all(str(value) in done.stdout for value in FACTS.values()), done.stdout


@pytest.mark.usefixtures("quiet")
def test_libraries_read_the_address_from_their_environment(at: Prompter, monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: make clients")
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: make clients")
    for name, value in variables(RECIPES[LIBRARIES].at(at.url)).items():
        monkeypatch.setenv(name, value)
    said = openai.OpenAI().responses.create(model="any", input=ASKED).output_text
    assert json.loads(said) == FACTS
    asked = [{"role": "user", "content": ASKED}]
    answer = anthropic.Anthropic().messages.create(model="any", max_tokens=100, messages=asked)
    assert json.loads(answer.content[0].text) == FACTS


@pytest.mark.usefixtures("node")
def test_the_recipe_of_vercels_ai_sdk(at: Prompter) -> None:
    assert json.loads(run_script(RECIPES["Vercel's AI SDK"].at(at.url))) == FACTS


@pytest.mark.parametrize("client", LED)
def test_an_agents_recipe(client: str, tmp_path: Path, prove: bool) -> None:
    led, recipe = LED[client], RECIPES[client]
    program = found(AGENTS[led.agent].program)
    if program is None or not led.arguments:
        pytest.skip(f"{client} is not installed: {AGENTS[led.agent].install}")
    if not prove:
        pytest.skip("takes some seconds: make prove")
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    with stage(tmp_path, [[LAST]], [LAST]) as at:
        if led.file:
            (home / led.file).parent.mkdir(parents=True)
            (home / led.file).write_text(recipe.at(at.url))
            script = AGENTS[led.agent].program
        else:
            script = recipe.at(at.url).rstrip()
        done = subprocess.run(
            ["bash", "-c", f'{script} "$@"', "bash", *led.arguments],
            cwd=folder,
            env=environment(program, home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0 and LAST in done.stdout, (
            f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{at.others}"
        )
