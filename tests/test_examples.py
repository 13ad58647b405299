"""Every program of examples/ runs and prints what it demonstrates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.process import Served, served
from tests.real_models import minilm, smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
ALONE = {
    "chat.py": r"Your name is Ada\.[^(]*\((\d+) tokens in the prompt, (?!\1 )\d+ computed\)",  # not all of them
    "batch.py": r"cat: .+(?:\n\w+: .+){7}\Z",
    "tools.py": r"height\(.*\) -> \{'mountain': .*\}\n.*\w",
    "structure.py": r"mood (good|bad|mixed), [1-5] stars, (not )?recommended",
}
SERVED = {"agents.py", "documents.py"}


def said(example: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")}
    command = [sys.executable, "-W", "error", str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_example_is_tried() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {*ALONE, *SERVED, "remember.py"}


@pytest.mark.parametrize("example", ALONE)
def test_a_model_in_this_process(example: str) -> None:
    assert re.search(ALONE[example], said(example))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Yield a server of real models, since sources of an answer are found by meaning."""
    with served(models=[str(smollm2()), str(minilm())], engine="cpu") as process:
        yield process


def test_agents_of_a_server(server: Served) -> None:
    counts = re.findall(r"(.*)   \((\d+) tokens in the prompt, (\d+) computed\)", said("agents.py", server.url))
    _, (asked, *_), (fork, *_), (again, *_) = counts
    assert asked and (fork, again) == (f"the fork: {asked}", f"again, after turn 1: {asked}")
    assert all(int(computed) < int(prompt) for _, prompt, computed in counts[1:])
    assert httpx.get(f"{server.url}/v1/agents").json()["data"] == []


def test_questions_of_documents(server: Served) -> None:
    best, _, rest = said("documents.py", server.url).partition("\n")
    assert "rules.md" in best and "four weeks" in best
    assert "How long may I keep a book?\n" in rest and "[1] " in rest
    assert httpx.get(f"{server.url}/v1/collections").json()["data"] == []


def test_agents_that_remember(prove: bool) -> None:
    if not prove:
        pytest.skip("a minute or two: for `make prove`")
    assert "bob moved to a second server and says the same" in said("remember.py")
