"""Every code block of the documentation runs: shell against one server, Python on the bundled model.

Files are read by the code that reads them in use. The recipes of docs/clients.md run in tests/clients, where the
clients are installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import typer

from cairn.cli import app
from cairn.cli.yaml_files import load_yaml
from cairn.config.resolve import resolve
from cairn.teams.scenario import scenario_of
from cairn.workflows.checks import check_workflow
from cairn.workflows.definition import workflow_of
from tests.api.process import Served, served

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):8000")
RUN = frozenset({"doctor", "collection", "agents", "backup", "restore", "config"})
"""Commands of `cairn` that are run. Others need the network, a terminal or hours; only their words are checked."""
AGENTS = "server-agents"
"""Folder of the server's agents, beside the reader's."""
VARIABLES = ("OPENAI_", "ANTHROPIC_", "CLAUDE_CODE_", "OLLAMA_")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    number: int
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    made = []
    for page in PAGES:
        fences = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        made += [Block(page.name, at, *fence) for at, fence in enumerate(fences, 1) if fence[0] in languages]
    return made


def each(*languages: str) -> pytest.MarkDecorator:
    """Parametrize over the blocks of these languages."""
    some = blocks(*languages)
    return pytest.mark.parametrize("block", some, ids=[f"{block.page}-{block.number}" for block in some])


def test_every_block_is_in_a_language_that_is_tested() -> None:
    tested = {"sh", "python", "yaml", "toml", "json", "mermaid", "js"}
    fences = [one for page in PAGES for one in re.findall(r"^```(\w+)", page.read_text(encoding="utf-8"), re.M)]
    assert set(fences) <= tested and len(fences) > 40
    assert {block.page for block in blocks("js")} <= {"clients.md"}


def test_blocks_without_a_language_hold_no_commands() -> None:
    """A command in one would run in no test."""
    bare = []
    for page in PAGES:
        fences = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        bare += [(page.name, text) for language, text in fences if not language]
    assert len(bare) >= 3
    assert not [block for block in bare if re.search(r"^\s*(\$ )?(cairn|curl|pip|make|python) ", block[1], re.M)]


def test_measurements_that_take_hours_name_scripts_and_options_that_there_are() -> None:
    """The commands of docs/performance.md compile llama.cpp and run for hours, so only their words are checked."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\.venv/bin/python (benchmarks/\w+\.py)(.*)$", page, re.M)
    assert len(lines) >= 5
    for script, words in lines:
        source = (ROOT / script).read_text(encoding="utf-8")
        assert not [option for option in re.findall(r"--[a-z][a-z-]*", words) if f'"{option}"' not in source], script


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random embedding model."""
    pytest.importorskip("torch", reason="torch writes the tiny model for vectors")
    from tests.encoders import write_encoder, write_tokenizer

    folder = tmp_path_factory.mktemp("models") / "all-MiniLM-L6-v2"
    write_encoder(folder, "Bert")
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def server(embedder: Path, folder: Path) -> Iterator[Served]:
    """Yield one server for all pages: the bundled model, and the tiny one for embeddings."""
    file = folder / ".server.toml"
    file.write_text(f'[[models]]\nmodel = "demo"\n[[models]]\nmodel = "{embedder}"\n')
    agents = file.parent / AGENTS
    with served(engine="cpu", config_file=str(file), agents_dir=str(agents)) as process:
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as a reader has it: the repository's files and some documents of their own."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    from tests.rag.document_files import pdf

    (folder / "manual.pdf").write_bytes(pdf(["An agent is deleted by DELETE.", "A box is opened by its lid."]))
    (folder / "notes").mkdir()
    (folder / "notes" / "one.md").write_text("# Notes\n\nAgents are deleted with their KV.\n")
    return folder


def environment(port: int, folder: Path) -> dict[str, str]:
    """Return the variables of a reader whose server is not on port 8000, and whose `cairn` is this one."""
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    (tools / "cairn").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cairn "$@"\n')
    (tools / "cairn").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_", *VARIABLES))}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return kept | {
        "CAIRN_PORT": str(port),
        "CAIRN_AGENTS_DIR": str(folder / AGENTS),
        "PATH": path,
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def commands(text: str) -> list[str]:
    """Return the lines of a shell block, continued ones joined."""
    return [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


def check_words(line: str) -> None:
    """Fail if `cairn` has no such command or option."""
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    context = command.make_context("cairn", words)
    while isinstance(command, typer.core.TyperGroup):
        name, inner, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None and name is not None
        command = inner
        context = command.make_context(name, words, parent=context)


def runs(line: str) -> bool:
    """Return whether a shell line is run here."""
    words = line.split()
    if words[0] == "cairn":
        return words[1] in RUN or "--print" in words
    return (
        words[0] not in ("make", "git", "claude", "qwen", "copilot", "aider", "pipx", "uv", "cat")
        and "tests.laws" not in line
    )


def forget(server: Served, kind: str, id: str) -> None:
    """Delete what an earlier block may have created under the same name."""
    for name in (id, f"{id}-2", f"{id}-3"):
        request = urllib.request.Request(f"{server.url}/v1/{kind}/{name}", method="DELETE")
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=60).close()


@each("sh")
def test_shell(block: Block, server: Served, folder: Path) -> None:
    text = block.text.replace(".venv/bin/cairn", "cairn").replace(".venv/bin/python", sys.executable)
    lines = commands(ADDRESS.sub(f"127.0.0.1:{server.port}", text))
    for line in [line for line in lines if line.startswith("cairn ")]:
        for part in line.split(" && "):
            check_words(part)
    targets = re.findall(r"^make ([a-z]+)", text, re.M)
    assert set(targets) <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    if "curl" in text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    # Lines that are not run are dropped; the rest of the block is one script, whose lines share variables.
    ran = [line for line in lines if runs(line)]
    for kind, id in re.findall(r"v1/(agents|collections|teams) .*?\"id\": \"([\w-]+)\"", text):
        forget(server, kind, id)
    for id in re.findall(r"cairn collection create (\w+)", text):
        forget(server, "collections", id)
    script = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n' + "\n".join(ran)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(server.port, folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (script, done.stdout[-2000:], done.stderr[-2000:])


@each("toml")
def test_toml_is_a_configuration(block: Block, tmp_path: Path) -> None:
    if block.page == "clients.md":
        pytest.skip("a client's own configuration: tests/clients")
    text = block.text
    for place in re.findall(r'"@([^"]+)"', text):
        (tmp_path / Path(place).name).write_text(f"sk-{Path(place).name}-0123456789\n")
        text = text.replace(place, str(tmp_path / Path(place).name))
    (tmp_path / "cairn.toml").write_text(text)
    assert resolve({}, {}, tmp_path / "cairn.toml").config


@each("yaml")
def test_yaml_is_a_scenario_or_a_workflow(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "page.yaml"
    file.write_text(block.text)
    content = load_yaml(file)
    if "team" in content:
        assert scenario_of(content, file).expect
    else:
        assert check_workflow(workflow_of(content)).nodes


@each("json")
def test_json_is_json(block: Block) -> None:
    assert msgspec.json.decode(block.text)


@each("python")
def test_python(block: Block, server: Served, embedder: Path, folder: Path) -> None:
    if block.page == "clients.md":
        pytest.skip("the clients' recipes run in tests/clients")
    text = ADDRESS.sub(f"127.0.0.1:{server.port}", block.text)
    if "client." in text and "client =" not in text:
        text = f'client = openai.OpenAI(base_url="http://127.0.0.1:{server.port}/v1", api_key="none")\n{text}'
        text = "import openai\n" + text.replace('model="any"', 'model="demo"')  # the server has two
    text = text.replace('"minilm"', repr(str(embedder)))
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env=environment(server.port, folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (text, done.stderr[-2000:])
