"""`cairn chat` as a person uses it: typing, pasting, history, commands, stored chats, and a full context."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import MAIN, Terminal, canned, elsewhere, run, sse  # noqa: F401  (fixtures by name)

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
END = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}


@pytest.fixture
def asked(canned) -> list[dict[str, Any]]:  # noqa: F811
    """Collect the bodies sent to a server that answers "answer 1", "answer 2", ... unless a test scripts it
    otherwise.
    """
    bodies: list[dict[str, Any]] = []
    canned.say = lambda body: f"answer {len(bodies)}"
    canned.refuse = lambda body: None

    def chat(handler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        if handler.path != "/v1/chat/completions":
            handler.answer(body)
            return
        bodies.append(body)
        refusal = canned.refuse(body)
        text = refusal or sse({"choices": [{"delta": {"content": canned.say(body)}}]}, stop(), END, "[DONE]")
        handler.send_response(400 if refusal else 200)
        handler.send_header("content-length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())

    canned.do_POST = chat
    return bodies


def stop() -> dict[str, Any]:
    return {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def chat(canned, *more: str) -> Terminal:  # noqa: F811
    terminal = Terminal("chat", "--host", canned.url, *more)
    terminal.expect("is ready")
    terminal.expect("> ")
    return terminal


def questions(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


def leave(terminal: Terminal) -> None:
    terminal.type("/bye\r")
    assert terminal.process.wait(60) == 0


def test_pasted_lines_are_one_question(canned, asked):  # noqa: F811
    lines = "one\ntwo\nthree\nfour\nfive\nsix"
    with chat(canned) as terminal:
        terminal.type(PASTE + lines + PASTED)
        terminal.expect("six")
        terminal.type("\r")
        terminal.expect("tokens in")
        leave(terminal)
    assert [questions(body) for body in asked] == [[lines]]


def test_lines_in_triple_quotes_or_with_alt_enter_are_one_question(canned, asked):  # noqa: F811
    with chat(canned) as terminal:
        for line in ('"""first', "second", '"""'):
            terminal.type(line + "\r")
        terminal.expect("tokens in")
        terminal.type("a\x1b\rb\r")
        terminal.expect("tokens in")
        terminal.type("c\\\rd\r")
        terminal.expect("tokens in")
        leave(terminal)
    assert questions(asked[-1]) == ["first\nsecond", "a\nb", "c\nd"]


def test_keys_typed_during_an_answer_wait_for_the_next_prompt(canned, asked):  # noqa: F811
    """It is neither mixed into the answer nor lost, and pasted lines stay one question."""
    going, shown = threading.Event(), threading.Event()

    def say(body):
        if len(asked) == 1:
            going.set()
            assert shown.wait(60)
        return "the answer"

    canned.say = say
    with chat(canned) as terminal:
        terminal.type("x\r")
        assert going.wait(60)
        terminal.expect("[?2004h")
        assert not termios.tcgetattr(terminal.master)[3] & termios.ECHO
        terminal.type(PASTE + "typed\nahead" + PASTED)
        shown.set()
        before = terminal.expect("tokens in")
        assert "typed" not in before and "ahead" not in before
        terminal.expect("ahead")
        terminal.type("\r")
        terminal.expect("tokens in")
        leave(terminal)
    assert questions(asked[-1]) == ["x", "typed\nahead"]


def test_the_terminals_mode_is_restored(canned, asked):  # noqa: F811
    with chat(canned) as terminal:
        terminal.type("x\r")
        terminal.expect("tokens in")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
        flags = termios.tcgetattr(terminal.master)
        assert flags[3] & termios.ECHO and flags[3] & termios.ICANON and flags[0] & termios.ICRNL


def test_questions_of_earlier_sessions_come_back(canned, asked, elsewhere):  # noqa: F811
    with chat(canned) as terminal:
        terminal.type("remember this\r")
        terminal.expect("tokens in")
        terminal.type("/set nohistory\r")
        terminal.expect("(nohistory)")
        terminal.type("not this\r")
        terminal.expect("tokens in")
        leave(terminal)
    with chat(canned) as terminal:
        terminal.type("\x1b[A")
        terminal.expect("/set nohistory")
        terminal.type("\x1b[A")
        terminal.expect("remember this")
        terminal.type("\r")
        terminal.expect("tokens in")
        leave(terminal)
    assert questions(asked[-1]) == ["remember this"]
    history = elsewhere / ".local/share/cairn/chats/history"
    assert history.stat().st_mode & 0o777 == 0o600 and "not this" not in history.read_text()


def test_a_chat_is_kept_and_goes_on(canned, asked, elsewhere):  # noqa: F811
    with chat(canned, "--system", "Be brief.") as terminal:
        terminal.type("I am Ada.\r")
        terminal.expect("tokens in")
        leave(terminal)
    with chat(canned) as terminal:
        terminal.type("another\r")
        terminal.expect("tokens in")
        terminal.type("/chats\r")
        terminal.expect("another")
        terminal.expect("this one")
        terminal.expect("I am Ada.")
        terminal.type("/resume 2\r")
        terminal.expect("continuing: I am Ada.")
        terminal.expect("answer 1")
        terminal.type("Who am I?\r")
        terminal.expect("tokens in")
        leave(terminal)
    assert [message["content"] for message in asked[-1]["messages"]] == [
        "Be brief.",
        "I am Ada.",
        "answer 1",
        "Who am I?",
    ]
    with Terminal("chat", "--host", canned.url, "--resume") as terminal:
        terminal.expect("continuing: I am Ada.; 2 questions so far")
        terminal.expect("> ")
        terminal.type("/forget\r")
        terminal.expect("was deleted")
        leave(terminal)
    kept = list((elsewhere / ".local/share/cairn/chats").glob("*.json"))
    assert [json.loads(one.read_text())["messages"][0]["content"] for one in kept] == ["another"]
    assert all(one.stat().st_mode & 0o777 == 0o600 for one in kept)


def test_a_script_keeps_no_chats(canned, asked, elsewhere):  # noqa: F811
    assert run("chat", "--host", canned.url, typed='"""a\nb"""\nc\n').returncode == 0
    assert questions(asked[-1]) == ["a\nb", "c"]
    assert not (elsewhere / ".local").exists()


def test_options_can_be_set_in_a_conversation(canned, asked):  # noqa: F811
    lines = [
        "/set parameter temperature 0.5",
        "/set repeat_penalty 1.1",
        "/set system Be kind.",
        "/set format json",
        "/set verbose",
        "hello",
        "/set noformat",
        "/set temperature hot",
        "/set temprature 1",
        "/set top_p 7",
        "/set num_ctx 4096",
        "/etc/hosts is a path",
        "/show parameters",
        "/?",
        "/bye",
        "never",
    ]
    done = run("chat", "--host", canned.url, typed="\n".join(lines) + "\n")
    first, second = asked
    assert (first["temperature"], first["repetition_penalty"]) == (0.5, 1.1)
    assert first["messages"][0] == {"role": "system", "content": "Be kind."}
    assert first["response_format"] == {"type": "json_object"} and "response_format" not in second
    assert questions(second)[-1] == "/etc/hosts is a path"
    for words in (
        "first token after",
        "temperature is 'hot' but must be a number",
        "did you mean temperature?",
        "top_p is 7 but must be from 0 to 1",
        "--context N",
        "/exit, /bye, /quit",
    ):
        assert words in done.stderr, words


FULL = '{"error": {"message": "the prompt has 70 tokens; the context is 64", "code": "context_length_exceeded"}}'


@pytest.mark.parametrize(
    ("way", "left"),
    [("d", ["b", "c"]), ("s", ["What did we say before this?", "b", "c"]), ("n", ["c"]), ("", None)],
)
def test_a_full_context_offers_three_ways_on(canned, asked, elsewhere, way, left):  # noqa: F811
    canned.refuse = lambda body: FULL if questions(body)[:3] == ["a", "b", "c"] else None
    with chat(canned) as terminal:
        for line in ("a", "b"):
            terminal.type(line + "\r")
            terminal.expect("tokens in")
        terminal.type("c\r")
        terminal.expect("the prompt has 70 tokens")
        terminal.expect("d, s or n:")
        terminal.type(way + "\r")
        terminal.expect("tokens in" if left else "taken back")
        leave(terminal)
    if left is not None:
        assert questions(asked[-1]) == left
        kept = [
            json.loads(path.read_text())["messages"] for path in (elsewhere / ".local/share/cairn/chats").glob("*.json")
        ]
        assert [one["content"] for one in min(kept, key=lambda one: one[0]["content"] != "a")] == [
            "a",
            "answer 1",
            "b",
            "answer 2",
        ], "the conversation is still stored whole"


def test_a_full_context_is_no_dead_end_in_a_script(canned, asked):  # noqa: F811
    canned.refuse = lambda body: FULL if len(questions(body)) > 1 else None
    done = run("chat", "--host", canned.url, typed="a\nb\n/drop\nc\n")
    assert "/drop, /summarise or /clear make room" in done.stderr and "taken back" in done.stderr
    assert questions(asked[-1]) == ["c"] and done.returncode == 0


def test_a_context_filled_by_an_answer_is_reported(canned, asked):  # noqa: F811
    canned.answers["/v1/models"] = (200, '{"data": [{"id": "m", "max_model_len": 13}]}')
    done = run("chat", "--host", canned.url, typed="a\n")
    assert "the context of 13 tokens is full: /drop, /summarise or /clear make room" in done.stderr


# --------------------------------------------------------------------------------------------------------- one prompt


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_model_and_prompt_are_given_alike_and_a_pipe_comes_behind(canned, asked, command):  # noqa: F811
    where = ("--host", canned.url)
    done = run(command, "m", "Summarise:", *where, typed="a long text\n")
    assert (done.returncode, done.stdout) == (0, "answer 1\n"), done.stderr
    assert questions(asked[-1]) == ["Summarise:\n\na long text"] and asked[-1]["model"] == "m"
    assert run(command, "m", "No pipe", *where).returncode == 0
    assert questions(asked[-1]) == ["No pipe"]


@pytest.mark.parametrize("command", ["run", "generate"])
def test_a_pipe_alone_is_the_prompt(canned, asked, command):  # noqa: F811
    assert run(command, "m", "--host", canned.url, typed="one\ntwo\n").stdout == "answer 1\n"
    assert questions(asked[-1]) == ["one\ntwo"]


def test_a_prompt_that_is_missing_or_given_twice(canned):  # noqa: F811
    for arguments, words in ((("m", "a", "-p", "b"), "given twice"), (("m",), "there is no prompt")):
        done = run("generate", *arguments, "--host", canned.url)
        assert done.returncode == 2 and words in done.stderr


def test_dev_null_and_a_terminal_are_no_text(canned, asked):  # noqa: F811
    command = [sys.executable, "-c", MAIN, "run", "m", "hello", "--host", canned.url]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, questions(asked[-1])) == (0, "answer 1\n", ["hello"])
    with Terminal("run", "m", "hello", "--host", canned.url) as terminal:
        terminal.expect("answer 2")
        assert terminal.process.wait(60) == 0
    assert questions(asked[-1]) == ["hello"]


def test_an_open_pipe_is_announced(canned, asked):  # noqa: F811
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", MAIN, "run", "m", "hello", "--host", canned.url]
    with subprocess.Popen(command, stdin=ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.close(ours)
        assert process.stderr is not None and process.stdout is not None
        assert "reading text from stdin" in process.stderr.readline()
        os.close(theirs)
        assert process.stdout.read() == "answer 1\n"
        process.stderr.read()


def test_verbose_and_format_and_keepalive(canned, asked, tmp_path: Path):  # noqa: F811
    canned.answers["/api/generate"] = (200, '{"done": true}')
    (tmp_path / "seven.json").write_text('{"const": 7}')
    more = ("--verbose", "--format", "seven.json", "--keepalive", "10m", "--host", canned.url)
    done = run("run", "m", "x", *more)
    assert "first token after" in done.stderr and done.stdout == "answer 1\n"
    assert asked[-1]["response_format"]["json_schema"]["schema"] == {"const": 7}
    kept = [body for path, _, body in canned.seen if path == "/api/generate"]
    assert kept == [{"model": "m", "keep_alive": "10m", "stream": False}]
    done = run("run", "demo", "x", "--keepalive", "10m", "--local")
    assert done.returncode == 2 and "--keepalive is for a server" in done.stderr


# ----------------------------------------------------------------------------------------------------------- Markdown

ANSWER = """\
# Title

Some **bold** words, `code` and a line
that goes on. <div>HTML is text</div>

| a | b |
|---|--:|
| 1 | 22 |

```python
print("hello")
```

- one
- two
"""


def plain(text: str) -> str:
    """Return what a terminal shows, without its colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_markdown_is_rendered_in_a_terminal(canned, asked):  # noqa: F811
    canned.say = lambda body: ANSWER
    with chat(canned) as terminal:
        terminal.type("x\r")
        shown = plain(terminal.expect("tokens in"))
        for words in (
            "Title",
            "Some bold words, code and a line",
            "<div>HTML is text</div>",
            'print("hello")',
            " • one",
        ):
            assert words in shown, words
        assert "**" not in shown and "```" not in shown and "|---" not in shown
        terminal.type("/set nomarkdown\r")
        terminal.type("x\r")
        assert "**bold**" in plain(terminal.expect("tokens in"))
        leave(terminal)
    assert run("run", "m", "x", "--host", canned.url).stdout == ANSWER, "a pipe gets the text as it is"


def test_words_are_wrapped_between_words(canned, asked, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "30")
    canned.say = lambda body: "wonderful " * 20
    for more in ((), ("--plain",)):
        with Terminal("run", "m", "x", "--host", canned.url, *more) as terminal:
            seen = terminal.rest()
            lines = [line.strip() for line in plain(seen).splitlines() if "wonderful" in line]
        assert lines and all(set(line.split()) == {"wonderful"} for line in lines), lines
