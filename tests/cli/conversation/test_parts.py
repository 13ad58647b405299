"""Parts of a conversation in the terminal: joined lines, wrapped words, Markdown blocks, chat files."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cairn.cli.conversation.commands import is_command
from cairn.cli.conversation.conversation import Conversation, Setting
from cairn.cli.conversation.full_context import older_half, summary_of
from cairn.cli.conversation.line_reader import MAX_HISTORY, _shorten
from cairn.cli.conversation.markdown_view import MarkdownView, WrappedView
from cairn.cli.conversation.quoted_lines import question_of, unfinished, unquoted
from cairn.cli.conversation.saved_chats import SavedChat, SavedChats
from cairn.cli.conversation.settings import Settings
from cairn.entrypoints.answer import Answer
from cairn.types.errors import CairnError, ConfigError, ContextTooLong, NotFound
from cairn.types.outputs import FinishReason, Usage


@pytest.mark.parametrize(
    ("typed", "goes_on", "question"),
    [
        ("plain", False, "plain"),
        ("a\\", True, None),
        ("a\\\nb", False, "a\nb"),
        ('"""a', True, None),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\na\n"""', False, "a"),
        ('say """ to me', False, 'say """ to me'),
        ('"""Doc."""\nimport os', False, '"""Doc."""\nimport os'),
        ('/set system """be', True, None),
    ],
)
def test_lines_that_belong_together(typed: str, goes_on: bool, question: str | None) -> None:
    assert unfinished(typed) == goes_on
    if question is not None:
        assert question_of(typed) == question


def test_a_setting_goes_back_to_what_it_was() -> None:
    settings = Settings({"temperature": 0.5})
    for name in ("temperature", "num_predict", "stop"):
        assert settings.change(f"{name} 2").endswith(": 2)")
        settings.change(f"{name} default")
    assert settings.sampling == {"temperature": 0.5}, "of the command line"
    with pytest.raises(ConfigError, match="/set stop default takes it back"):
        settings.change("stop")


def test_arguments_and_commands() -> None:
    assert [unquoted(one) for one in ('"a b"', "'x'", '"""y"""', '"', "z")] == ["a b", "x", "y", '"', "z"]
    assert is_command("/set x 1") and is_command(" /bye") and not is_command("/etc/hosts") and not is_command("")


def test_words_are_wrapped_whatever_the_pieces() -> None:
    rng = random.Random(1)
    text = "".join(rng.choice(["word ", "longer ", "a", "\n", "  ", "x" * 30, "日本 "]) for _ in range(300))
    for _ in range(5):
        out: list[str] = []
        view = WrappedView(out.append, 20)
        at = 0
        while at < len(text):
            size = rng.choice((1, 2, 5, 40))
            view.push(text[at : at + size])
            at += size
        view.close()
        lines = "".join(out).split("\n")
        assert all(len(line.rstrip()) <= 20 for line in lines)
        assert "".join("".join(out).split()) == "".join(text.split()), "nothing is lost"


def test_blocks_are_the_same_whatever_the_pieces() -> None:
    blocks = (
        "# Title",
        "One *two*\nthree.",
        "- a\n- b",
        "```sh\nls\n\nls -l\n```",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "end <b>",
    )
    text = "\n\n".join(blocks)

    def shown(size: int) -> str:
        console = Console(file=io.StringIO(), width=60, force_terminal=False)
        view = MarkdownView(console, now=lambda: next(ticks))
        ticks = iter(range(1_000_000))
        for at in range(0, len(text), size):
            view.push(text[at : at + size])
        view.close()
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    whole = shown(len(text))
    for words in ("Title", "One two ", "three.", " • a", "ls -l", "end <b>"):
        assert words in whole, words
    strip = [" ".join(shown(size).split()) for size in (1, 3, 17)]
    assert strip == [" ".join(whole.split())] * 3


def test_a_block_longer_than_the_screen_shows_its_end() -> None:
    console = Console(file=io.StringIO(), width=40, height=10, force_terminal=True, color_system=None)
    view = MarkdownView(console, now=lambda: 0.0)
    view._next = -1.0
    view.push("```\n" + "".join(f"line {number}\n" for number in range(100)))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "line 99" in drawn and "line 5\n" not in drawn
    view.close()
    assert console.file.getvalue().count("line 42") == 1, "all of it is there in the end"


def test_the_older_half_is_whole_turns() -> None:
    def messages(*sizes: int) -> list[dict[str, str]]:
        return [{"role": role, "content": "x" * size} for size in sizes for role in ("user", "assistant")]

    assert older_half(messages(10, 10, 10, 10)) == 4
    assert older_half(messages(100, 1, 1)) == 2
    assert older_half(messages(40, 60)) == 2, "the newest turn stays, though the other is less than half"
    assert older_half(messages(1, 1, 100)) == 6, "dropping two short turns would make no room"
    assert older_half(messages(5)) == 2 and older_half([]) == 0


class Narrow:
    """A model with one token per character and a small context, whose answers are as long as they may be."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.asked: list[list[dict[str, Any]]] = []

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Any:
        self.asked.append([dict(message) for message in messages])
        size = sum(len(message["content"]) for message in messages)
        if size >= self.context:
            raise ContextTooLong("too long", prompt_tokens=size, context=self.context)
        room = min(self.context - size, sampling["max_tokens"])
        answer = Answer(
            text="s" * room,
            reasoning="",
            tool_calls=(),
            tokens=(),
            finish_reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=size, completion_tokens=room, cached_tokens=0),
            cache=None,
        )
        return Said(answer)

    def generate(self, prompt: str, **sampling: Any) -> Any:
        raise NotImplementedError


class Said:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def close(self) -> None:
        pass


@pytest.mark.parametrize("context", [600, None])
@pytest.mark.parametrize("sizes", [(500, 90), (250, 200, 120), (100, 150, 100)])
def test_a_summary_is_made_of_the_turns_that_fit(sizes: tuple[int, ...], context: int | None) -> None:
    """Some cases have one turn that fills the context, so that the summary's prompt does not fit; others have
    several.
    """
    model = Narrow(600)
    older = [
        {"role": role, "content": f"{role} {number} ".ljust(size // 2, "x") + "end"}
        for number, size in enumerate(sizes)
        for role in ("user", "assistant")
    ]
    short = summary_of(model, older, "Be kind.", context)
    length = len(short[1]["content"])
    assert length == 100 if context else 100 <= length <= 300, "a sixth of the context, where that is known"
    last = model.asked[-1]
    assert last[0] == {"role": "system", "content": "Be kind."} and last[-2]["content"].endswith("end")
    assert len(model.asked) <= 6


def test_chats_of_files(tmp_path: Path) -> None:
    chats = SavedChats(tmp_path / "chats")
    assert chats.newest(5) == []
    for number in range(3):
        chats.save(SavedChat(f"2026112{number}-x", "m", None, [{"role": "user", "content": f"hello {number} " * 30}]))
    assert [one.id for one in chats.newest(2)] == ["20261122-x", "20261121-x"]
    assert len(chats.newest(1)[0].title) == 60 and chats.newest(1)[0].day == "2026-11-22"
    with pytest.raises(NotFound):
        chats.load("gone")
    with pytest.raises(NotFound):
        chats.load("../chats/20261122-x")
    for text, words in (("{", "cannot be read as a chat"), (json.dumps({"version": 9}), "of version 9")):
        (tmp_path / "chats" / "bad.json").write_text(text)
        with pytest.raises(CairnError, match=words):
            chats.load("bad")
    assert len(chats.newest(9)) == 3, "a broken file hides no other"
    chats.delete("20261122-x")
    chats.delete("20261122-x")
    assert len(chats.newest(9)) == 2
    (tmp_path / "file").touch()
    with pytest.raises(CairnError, match="cannot be saved"):
        SavedChats(tmp_path / "file").save(SavedChat("a", "m"))


def test_a_long_history_keeps_its_newer_half(tmp_path: Path) -> None:
    path = tmp_path / "history"
    entry = "\n# 2026-11-28 10:00:00\n+question {}\n"
    path.write_text("".join(entry.format(number) for number in range(40_000)))
    assert path.stat().st_size > MAX_HISTORY
    _shorten(path)
    text = path.read_text()
    assert len(text) < MAX_HISTORY and text.endswith("+question 39999\n") and text.startswith("\n# 2026")


class Agreeing:
    """A model that says yes."""

    answer = Answer(text="yes", finish_reason=FinishReason.STOP)

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Agreeing:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def close(self) -> None:
        pass


def test_a_listed_chat_goes_on_from_its_newest_turn(tmp_path: Path) -> None:
    chats = SavedChats(tmp_path)
    talk = Conversation(Agreeing(), {}, None, Setting(chats=chats))
    talk.ask("A1")
    talk._clear("")
    talk.ask("B1")
    talk._list_chats("")  # 1 is the chat of B, 2 that of A
    for command, question in (("2", "A2"), ("1", "B2"), ("2", "A3")):
        talk._resume_chat(command)
        talk.ask(question)
    said = [[one["content"] for one in chat.messages if one["role"] == "user"] for chat in chats.newest(2)]
    assert said == [["A1", "A2", "A3"], ["B1", "B2"]]


def test_a_chat_whose_only_question_was_taken_back_is_not_kept(tmp_path: Path) -> None:
    chats = SavedChats(tmp_path)
    talk = Conversation(Agreeing(), {}, None, Setting(chats=chats))
    talk.ask("A1")
    talk._undo("")
    assert chats.newest(1) == []
