"""Real coding agents, each led through ten turns with a tool, with the server killed between the fifth and the sixth.

In one turn before that, and in one after it, the tool reads an image. The agents are npm programs (`make clients`),
installed there or anywhere on the path; a test without its agent is skipped.
"""

from __future__ import annotations

import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cairn.cli.launch import ServerAddress, start
from cairn.cli.launch_table import AGENTS
from tests.clients.stage import Prompter, calling, environment, found, stage

TURNS = 10
KILLED = 5
PICTURED = (2, 7)
"""Turns in which an image is read."""
ASKED = "Read the notes, one after another."
LAST = "All notes are read."


class Part(NamedTuple):
    """How an agent is led."""

    arguments: tuple[str, ...]
    tool: str
    """The tool that it calls each turn."""
    given: dict[str, Any]
    """The tool's arguments; {n} is the turn, {folder} where the agent works."""
    seer: str
    """The tool that reads an image, and its arguments."""
    seen: dict[str, Any]
    sends: bool = True
    """Whether it sends images to a model that is not in its own catalogue."""


PARTS = {
    "claude": Part(
        ("-p", ASKED, "--allowedTools", "Read", "--output-format", "text"),
        "Read",
        {"file_path": "{folder}/note{n}.txt"},
        "Read",
        {"file_path": "{folder}/note{n}.png"},
    ),
    "codex": Part(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED),
        "exec_command",
        {"cmd": "cat {folder}/note{n}.txt"},
        "view_image",
        {"path": "{folder}/note{n}.png"},
    ),
    "opencode": Part(
        ("run", ASKED),
        "read",
        {"filePath": "{folder}/note{n}.txt"},
        "read",
        {"filePath": "{folder}/note{n}.png"},
    ),
    "qwen": Part(
        ("--yolo", "-p", ASKED),
        "read_file",
        {"file_path": "{folder}/note{n}.txt"},
        "read_file",
        {"file_path": "{folder}/note{n}.png"},
    ),
    "copilot": Part(
        ("-p", ASKED, "--allow-all-tools", "--allow-all-paths"),
        "view",
        {"path": "{folder}/note{n}.txt"},
        "view",
        {"path": "{folder}/note{n}.png"},
        sends=False,
    ),
}


def answers(part: Part, folder: Path) -> list[list[str]]:
    def filled(turn: int) -> dict[str, Any]:
        arguments = part.seen if turn in PICTURED else part.given
        text = json.dumps(arguments).replace("{n}", str(turn)).replace("{folder}", str(folder))
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    tools = [part.seer if turn in PICTURED else part.tool for turn in range(TURNS)]
    return [calling(tool, filled(turn)) for turn, tool in enumerate(tools)] + [[LAST]]


def picture(seed: int) -> bytes:
    """Return a PNG of 32 by 32 grey pixels."""
    rows = b"".join(b"\0" + bytes((seed + 8 * y + x) % 256 for x in range(32)) for y in range(32))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def seeing(settings: str) -> str:
    """Return the configuration that tells opencode and qwen-code that the model accepts images."""
    if not settings.startswith("{"):
        return settings
    parsed = json.loads(settings)
    if "provider" in parsed:
        model = parsed["provider"]["cairn"]["models"]["part"]
        model |= {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    elif "model" in parsed:
        parsed["model"]["generationConfig"]["modalities"] = {"image": True}
    return json.dumps(parsed)


def parts_of(body: Any) -> Iterator[dict[str, Any]]:
    """Yield every object within a request."""
    if isinstance(body, dict):
        yield body
    for inner in body.values() if isinstance(body, dict) else body if isinstance(body, list) else ():
        yield from parts_of(inner)


def run(name: str, at: Prompter, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    program = found(AGENTS[name].program)
    assert program is not None
    begun = start(AGENTS[name], ServerAddress(at.url, "part", "none", 65_536), home, PARTS[name].arguments)
    for path, text in begun.files.items():
        path.write_text(seeing(text))
    return subprocess.run(
        begun.command,
        executable=program,
        cwd=folder,
        env=environment(program, home, **{key: seeing(value) for key, value in begun.env.items()}),
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
        (folder / f"note{turn}.png").write_bytes(picture(turn))
    # codex always sends `store: false`, and the server's option stores its answers nevertheless.
    with stage(tmp_path, answers(PARTS[name], folder), kill_before=KILLED, store_kv="always") as at:
        done = run(name, at, folder, home)
        report = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{at.others}"
        assert done.returncode == 0 and LAST in done.stdout, report
        assert len(at.answered) == TURNS + 1 and at.killed == 1, report
        for turn, (prompt, cached) in enumerate(at.cached()[1:], 2):
            assert cached >= 0.95 * prompt, f"turn {turn}: {cached} of {prompt}: {at.cached()}"
        kinds = ("image", "input_image", "image_url")
        images = [part for part in parts_of(at.asked[-1]) if part.get("type") in kinds]
        wanted = len(PICTURED) if PARTS[name].sends else 0
        assert len(images) == wanted, f"{len(images)} images in the last request: {report}"


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
