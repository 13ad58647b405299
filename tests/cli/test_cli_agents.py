"""`cairn agents` and `cairn chat --agent` against a real server on the fake engine."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cairn.cli import main
from cairn.cli.agents import tree
from cairn.cli.connection.client import Client
from cairn.types.errors import CairnError
from tests.api.process import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(max_running=4, holds=True) as process:
        yield process


def run(server: Served, *arguments: str, typed: str = "") -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        main([*arguments, "--host", server.url])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def rows(server: Served, *arguments: str) -> list[list[str]]:
    code, out, err = run(server, *arguments)
    assert code == 0, err
    return [line.split("\t") for line in out.splitlines()]


def turn(server: Served, id: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "ignore_eos": True}
    server.post(f"/v1/agents/{id}/turns", body)


def test_agents_are_listed_shown_forked_rolled_back_moved_and_deleted(server: Served, tmp_path: Path) -> None:
    server.post("/v1/agents", {"id": "ada", "system": "You remember."})
    for text in ("one", "two", "three"):
        turn(server, "ada", text)
    assert rows(server, "agents", "fork", "ada", "--turn", "1", "--name", "bob") == [["bob"]]
    assert run(server, "agents", "rollback", "ada", "2")[0] == 0
    assert run(server, "agents", "pin", "ada")[0] == 0
    listed = {row[0]: row for row in rows(server, "agents", "list")}
    assert listed["ada"][1] == "2" and listed["ada"][5] == "yes" and listed["bob"][6] == "ada at turn 1"
    shown = rows(server, "agents", "show", "ada")
    assert ["pinned", "yes"] in shown
    turns = [row for row in shown if row[0] == "turn"]
    assert [row[1:4] for row in turns] == [["1", "0", "current"], ["2", "1", "current"], ["3", "2", "abandoned"]]
    file = tmp_path / "ada.cairn"
    assert rows(server, "agents", "export", "ada", str(file)) == [[str(file)]]
    assert rows(server, "agents", "import", str(file), "--name", "eve") == [["eve"]]
    with_kv = file.with_name("with-kv.cairn")
    assert rows(server, "agents", "export", "ada", str(with_kv), "--kv") == [[str(with_kv)]]
    assert with_kv.read_bytes().startswith(b"cairn agent kv 1")
    assert rows(server, "agents", "import", str(with_kv), "--name", "kim", "--kv") == [["kim"]]
    assert run(server, "agents", "rm", "kim")[0] == 0
    assert [row for row in rows(server, "agents", "show", "eve") if row[0] == "turn"] == turns
    code, _, err = run(server, "agents", "export", "ada", str(file))
    assert code == 1 and "exists already" in err
    folder = tmp_path / "all"
    assert len(rows(server, "agents", "export", "--all", str(folder))) == 3
    (folder / "eve.cairn").unlink()
    code, out, err = run(server, "agents", "export", "--all", str(folder))
    assert (code, out) == (1, "") and "so nothing was exported; give another folder" in err
    assert not (folder / "eve.cairn").exists()
    assert run(server, "agents", "pin", "ada", "--off")[0] == 0
    for id in ("ada", "bob", "eve"):
        assert run(server, "agents", "rm", id)[0] == 0
    assert rows(server, "agents", "list") == []
    code, out, err = run(server, "agents", "show", "ada")
    assert (code, out) == (1, "") and "there is no agent ada" in err


def test_an_agents_kv_is_given_up_and_brought_back(server: Served) -> None:
    server.post("/v1/agents", {"id": "kay", "system": "You remember what you are told, all of it, and for long."})
    turn(server, "kay", "one")
    [(_, before)] = rows(server, "agents", "prefetch", "kay")
    assert before.startswith("pool ")
    [(_, gone)] = rows(server, "agents", "evict", "kay", "--disk")
    assert gone == "-"
    assert rows(server, "agents", "prefetch", "kay") == [["KV", "-"]]  # nothing is left to load
    assert run(server, "agents", "rm", "kay")[0] == 0


def test_an_interrupted_turn_is_resumed(server: Served) -> None:
    server.post("/v1/agents", {"id": "rex"})
    client = Client(server.url)
    server.hold.touch()
    with contextlib.closing(
        client.turn("rex", {"role": "user", "content": "Go on."}, max_tokens=1500, ignore_eos=True)
    ) as stream:
        next(stream)
        assert client.post(f"/v1/requests/{stream.request}/cancel", {})["cancelled"]
        with contextlib.suppress(CairnError):
            for _ in stream:
                pass
    client.close()
    server.hold.unlink()
    code, out, err = run(server, "agents", "resume", "rex", "--stream")
    assert (code, err) == (0, "(the answer was cut at the token limit: finish_reason length)\n")
    assert len(out) > 500
    code, _, err = run(server, "agents", "resume", "rex")
    assert code == 1 and "rex" in err
    assert run(server, "agents", "rm", "rex")[0] == 0


def test_a_turn_that_the_log_lost_is_named(tmp_path: Path) -> None:
    with served(agents_dir=str(tmp_path)) as server:
        server.post("/v1/agents", {"id": "ada", "system": "You remember."})
        turn(server, "ada", "one")
        turn(server, "ada", "the second message")
        assert "damage" not in [row[0] for row in rows(server, "agents", "show", "ada")]
        (path,) = tmp_path.glob("*.log")
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(b"the second message"))
            file.write(b"T")
        [(_, said)] = [row for row in rows(server, "agents", "show", "ada") if row[0] == "damage"]
        assert said.startswith("turn 2 of agent ada cannot be read") and "roll back to turn 1" in said


@pytest.mark.parametrize("id", ["", ".", "..", "a/turns", "a?x", "import", "x" * 65, "\u00e4"])
def test_an_invalid_id_is_never_sent(server: Served, id: str, tmp_path: Path) -> None:
    for arguments in (
        ("rm", id),
        ("show", id),
        ("pin", id),
        ("prefetch", id),
        ("evict", id),
        ("resume", id),
        ("fork", id),
        ("rollback", id, "1"),
        ("export", id, str(tmp_path / "new")),
    ):
        code, out, err = run(server, "agents", *arguments)
        assert (code, out) == (2, "") and f"{id!r} is not an agent's id: an agent's id has 1 to 64" in err
    code, _, err = run(server, "chat", "--agent", id)
    assert code == 2 and "is not an agent's id" in err
    assert not list(tmp_path.iterdir())


def test_an_unusable_file_is_a_short_error(server: Served, tmp_path: Path) -> None:
    server.post("/v1/agents", {"id": "filed"})
    absent = tmp_path / "no" / "filed.cairn"
    assert run(server, "agents", "import", str(absent)) == (
        1,
        "",
        f"cairn: {absent} cannot be read: No such file or directory\n",
    )
    assert run(server, "agents", "import", str(tmp_path))[2] == f"cairn: {tmp_path} cannot be read: Is a directory\n"
    code, _, err = run(server, "agents", "export", "filed", str(absent))
    assert (code, err) == (1, f"cairn: {absent} cannot be written: No such file or directory\n")
    full = tmp_path / "full"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode: _Full(self))
        code, _, err = run(server, "agents", "export", "filed", str(full))
    assert (code, err) == (1, f"cairn: {full} cannot be written: No space left on device\n")
    assert not full.exists(), "half a file would be taken for a whole one"


class _Full(io.FileIO):
    """A new file on a full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")

    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_chat_with_an_agent_goes_on_where_it_was_left(server: Served) -> None:
    options = ["--agent", "mona", "--max-tokens", "6", "--temperature", "0"]
    code, first, err = run(server, "chat", *options, "--system", "Be brief.", typed="My name is Mona.\n")
    assert code == 0 and first.strip() and "agent mona is new" in err
    code, second, err = run(server, "chat", *options, typed="And now?\n/undo\nAnd now?\n/nonsense\n")
    assert code == 0 and "continues after turn 1" in err and "took back: And now?" in err and "unknown command" in err
    answers = second.split("\n")
    assert answers[0] == answers[1] != "", "the same question behind the same turn"
    turns = [row for row in rows(server, "agents", "show", "mona") if row[0] == "turn"]
    assert [row[3] for row in turns] == ["current", "abandoned", "current"]
    code, _, err = run(server, "chat", *options, "--system", "Be long.", typed="")
    assert code == 1 and "--system is for a new one" in err
    code, _, err = run(server, "chat", *options, "--kv-gb", "1", typed="")
    assert code == 2 and "--kv-gb is for a model in this process" in err


def answered(seen: bytes) -> str:
    """Return the text behind the question, without terminal codes and the progress sign."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode(errors="replace").rpartition("a story")[2])
    return re.sub(r"\S thinking|\s", "", text)


def test_ctrl_c_takes_the_question_back(server: Served) -> None:
    code = "from cairn.cli import main; main()"
    arguments = ["chat", "--agent", "zoe", "--host", server.url, "--max-tokens", "1900", "--temperature", "0"]
    lead, follow = pty.openpty()
    talk = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=follow, stdout=follow, stderr=follow, start_new_session=True
    )
    os.close(follow)
    seen = b""

    def read_until(text: bytes, more: int = 0) -> None:
        nonlocal seen
        end = time.monotonic() + 120
        while text not in seen or len(seen) < more:
            assert time.monotonic() < end, seen
            if select.select([lead], [], [], 0.5)[0]:
                seen += os.read(lead, 4096)

    server.hold.touch()
    try:
        read_until(b"agent zoe is new")
        read_until(b"[?2004h")  # the prompt reads from here on; earlier input is not for it
        os.write(lead, b"Tell me a story\n")
        read_until(b"story")
        until = time.monotonic() + 10  # the server holds the answer; the terminal may hold back an incomplete line
        while len(answered(seen)) < 20 and time.monotonic() < until:
            if select.select([lead], [], [], 0.5)[0]:
                seen += os.read(lead, 4096)
        talk.send_signal(signal.SIGINT)
        read_until(b"(stopped)")
        server.hold.unlink()
        read_until(b"took back: Tell me a story")
        os.write(lead, b"/exit\n")
        assert talk.wait(30) == 0
    finally:
        server.hold.unlink(missing_ok=True)
        talk.kill()
        talk.wait()
        os.close(lead)
    (only,) = [row for row in rows(server, "agents", "show", "zoe") if row[0] == "turn"]
    assert only[3] == "abandoned"


def one(number: int, parent: int, current: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number} " + "x" * 99 + "\x1b[31m"}]
    answer = {"role": "assistant", "content": f"answer {number}"}
    return {
        "number": number,
        "parent": parent,
        "current": current,
        "state": "finished" if current else "interrupted",
        "messages": messages,
        "answer": answer,
    }


def drawn(head: int, turns: list[dict[str, Any]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(tree({"id": "ada", "head": head}, turns))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tree_shows_branches_and_the_head() -> None:
    text = drawn(3, [one(1, 0, True), one(2, 1, False), one(3, 1, True)], 120)
    assert "\x1b" not in text and text.count("...") == 3 and "(interrupted)" in text
    lines = text.splitlines()
    assert [line for line in lines if "<- head" in line] == [line for line in lines if "answer 3" in line]
    indents = [next(line.index(f"question {n}") for line in lines if f"question {n}" in line) for n in (1, 2, 3)]
    assert indents[0] < indents[1] == indents[2]


def test_a_long_conversation_is_shown_to_its_end() -> None:
    """On a narrow terminal, also after a branch, whose turns are marked as such."""
    side = [one(100, 30, False), one(101, 100, False)]
    lines = drawn(60, [*(one(n, n - 1, True) for n in range(1, 61)), *side], 80).splitlines()
    for number in (1, 29, 30, 31, 59, 60, 100, 101):
        assert any(f"question {number} " in line for line in lines), number
    (last,) = [line for line in lines if "<- head" in line]
    assert "answer 60" in last
    indent = {n: next(line.index("question") for line in lines if f"{n} question {n} " in line) for n in (30, 31, 60)}
    assert indent[30] < indent[31] == indent[60]
    assert [line.split("answer ")[1] for line in lines if "follows" in line] == ["31  (follows 30)"]
