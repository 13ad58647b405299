"""Real coding agents, each led through ten turns with a tool, the server killed between the fifth and the sixth.

They are programs of npm (`make clients`), there or anywhere on the path; where one is not, its test is skipped.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cairn.cli.launch import ServerAddress, start
from cairn.cli.launch_table import AGENTS
from tests.clients.stage import Prompter, calling, environment, found, stage

TURNS = 10
KILLED = 5
ASKED = "Read the notes, one after another."
LAST = "All notes are read."


class Part(NamedTuple):
    """How an agent is led."""

    arguments: tuple[str, ...]
    tool: str
    """The tool that it calls each turn."""
    given: dict[str, Any]
    """What the tool is given; {n} is the turn, {folder} where the agent works."""


PARTS = {
    "claude": Part(
        ("-p", ASKED, "--allowedTools", "Read", "--output-format", "text"),
        "Read",
        {"file_path": "{folder}/note{n}.txt"},
    ),
    "codex": Part(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED),
        "exec_command",
        {"cmd": "cat {folder}/note{n}.txt"},
    ),
    "opencode": Part(("run", ASKED), "read", {"filePath": "{folder}/note{n}.txt"}),
    "qwen": Part(("--yolo", "-p", ASKED), "read_file", {"file_path": "{folder}/note{n}.txt"}),
}


def answers(part: Part, folder: Path) -> list[list[str]]:
    def filled(turn: int) -> dict[str, Any]:
        text = json.dumps(part.given).replace("{n}", str(turn)).replace("{folder}", str(folder))
        found: dict[str, Any] = json.loads(text)
        return found

    return [calling(part.tool, filled(turn)) for turn in range(TURNS)] + [[LAST]]


def run(name: str, at: Prompter, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    program = found(AGENTS[name].program)
    assert program is not None
    begun = start(AGENTS[name], ServerAddress(at.url, "part", "none", 65_536), home, PARTS[name].arguments)
    for path, text in begun.files.items():
        path.write_text(text)
    return subprocess.run(
        begun.command,
        executable=program,
        cwd=folder,
        env=environment(program, home, **begun.env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", PARTS)
def test_ten_turns_with_a_tool_and_a_kill(name: str, tmp_path: Path, prove: bool) -> None:
    if found(AGENTS[name].program) is None:
        pytest.skip(f"{AGENTS[name].title} is not installed: {AGENTS[name].install}")
    if not prove:
        pytest.skip("takes a minute or two: make prove")
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    for turn in range(TURNS):
        (folder / f"note{turn}.txt").write_text(f"This is note number {turn}.\n" * 20)
    # codex says `store: false` unasked: what it asks is kept where the server's owner wants it kept.
    with stage(tmp_path, answers(PARTS[name], folder), kill_before=KILLED, store_kv="always") as at:
        done = run(name, at, folder, home)
        told = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{at.others}"
        assert done.returncode == 0 and LAST in done.stdout, told
        assert len(at.answered) == TURNS + 1 and at.killed == 1, told
        for turn, (prompt, cached) in enumerate(at.cached()[1:], 2):
            assert cached >= 0.95 * prompt, f"turn {turn}: {cached} of {prompt}: {at.cached()}"


def test_two_sessions_of_claude_code_in_one_folder_share_tools_and_system(tmp_path: Path, prove: bool) -> None:
    if found(AGENTS["claude"].program) is None:
        pytest.skip(f"{AGENTS['claude'].title} is not installed: {AGENTS['claude'].install}")
    if not prove:
        pytest.skip("takes half a minute: make prove")
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    with stage(tmp_path, [[LAST]]) as at:
        asked = []
        for _ in range(2):
            done = run("claude", at, folder, home)
            assert done.returncode == 0 and LAST in done.stdout, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            asked.append(len(at.asked))
        first, second = at.asked[0], at.asked[asked[0]]
        assert first["system"][0]["text"] != second["system"][0]["text"] or first["metadata"] != second["metadata"]
        begun = {key: second[key] for key in ("model", "system", "tools")}
        begun["messages"] = [{"role": "user", "content": "."}]
        shared = at.server.post("/v1/messages/count_tokens", begun)["input_tokens"]
        prompt, cached = at.cached()[asked[0]]
        assert prompt > cached >= 0.95 * shared > 5000, f"{cached} of {shared}, in a prompt of {prompt}"
