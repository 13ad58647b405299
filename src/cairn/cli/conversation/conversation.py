"""A conversation: its messages, the loop that reads questions and answers them, and its commands."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.cli.common.output import counted, printable, talk
from cairn.cli.common.sampling import FLAGS
from cairn.cli.conversation.commands import Command, CommandTable, is_command
from cairn.cli.conversation.full_context import OFFER, Messages, older_half, summary_of
from cairn.cli.conversation.line_reader import LineReader, PipeReader, TerminalReader, mark_pastes, no_echo
from cairn.cli.conversation.markdown_view import WrappedView, view_of_terminal
from cairn.cli.conversation.quoted_lines import question_of, unquoted
from cairn.cli.conversation.saved_chats import SavedChat, SavedChats
from cairn.cli.conversation.settings import Settings, help_of_set
from cairn.config.paths import expanded
from cairn.types.errors import CairnError, ContextTooLong
from cairn.types.outputs import REPETITION

if TYPE_CHECKING:
    from rich.status import Status

    from cairn.cli.common.sampling import Answering, AnswerSource
    from cairn.entrypoints.answer import Answer

KEYS = '''
Ctrl-C stops an answer; the text so far stays. The Up key brings back earlier questions.
Several lines: paste them, put """ around them, press Alt-Enter, or end a line with \\.'''
LISTED = 20
"""Most chats that `/chats` lists."""


def _no_rows() -> list[tuple[str, str]]:
    return []


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a conversation."""

    name: str = ""
    """The model's name in saved chats."""
    context: int | None = None
    """Tokens of the context; None if not known."""
    describe: Callable[[], list[tuple[str, str]]] = _no_rows
    """Returns facts about the model, for `/show`."""
    chats: SavedChats | None = None
    """The folder of saved chats; None saves none."""
    markdown: bool = True
    verbose: bool = False


class Conversation:
    """The messages so far, and the loop that reads and answers questions."""

    def __init__(
        self,
        model: AnswerSource,
        sampling: dict[str, Any],
        system: str | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.messages: Messages = []
        self.system = system
        self._model = model
        self._setting = setting or Setting()
        self._settings = Settings(sampling, markdown=self._setting.markdown, verbose=self._setting.verbose)
        self._talk = talk()
        self._commands = self._make_commands()
        self._chat_id = SavedChats.new_id()
        self._listed: list[SavedChat] = []
        self._reader: LineReader = PipeReader()

    def _make_commands(self) -> CommandTable:
        return CommandTable(
            (
                Command(("/help", "/?"), "", "this list", self._help),
                Command(("/system",), "TEXT", "set the system prompt; alone: show it", self._system),
                Command(("/set",), "NAME VALUE", "change sampling and more; alone: list the settings", self._set),
                Command(("/show",), "", "the model, and the settings", self._show_facts),
                Command(("/undo",), "", "take back the last question and its answer", self._undo),
                Command(("/clear", "/new"), "", "start a new chat (the system prompt stays)", self._clear),
                Command(("/drop",), "", "drop the older half of this chat, to make room", self._drop),
                Command(("/summarise", "/summarize"), "", "replace the older half by a summary", self._summarise),
                Command(("/save",), "FILE", "write the conversation as JSON", self._save),
                Command(("/chats",), "", "list the saved chats", self._list_chats),
                Command(("/resume",), "N", "continue a chat of that list", self._resume_chat),
                Command(("/forget",), "", "delete this chat", self._forget),
                Command(("/exit", "/bye", "/quit"), "", "leave; Ctrl-D does too", self._leave),
            )
        )

    def resume(self, chat: SavedChat) -> None:
        """Continue a saved chat."""
        self.messages = list(chat.messages)
        self.system = chat.system if self.system is None else self.system
        self._chat_id = chat.id
        turns = sum(message["role"] == "user" for message in self.messages)
        self._say(f"(continuing: {chat.title}; {counted(turns, 'question')} so far)")
        if self.messages and self.messages[-1]["role"] == "assistant":
            self._view_text(str(self.messages[-1].get("content") or ""))

    def run(self) -> None:
        """Read and answer questions until /exit or the end of input."""
        interactive = sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if interactive:
            folder = self._setting.chats.folder / "history" if self._setting.chats is not None else None
            self._reader = TerminalReader(folder, self._commands.words)
        with no_echo() if interactive else nullcontext():
            try:
                while True:
                    self._turn()
            except EOFError:
                return

    def _turn(self) -> None:
        """Read one question or command and handle it. Raises EOFError at the end of the conversation."""
        if sys.stdin.isatty():
            self._say("")
        try:
            line = self._reader.read()
        except KeyboardInterrupt:
            self._say("(Ctrl-D or /exit leaves)")
            return
        mark_pastes()
        try:
            if is_command(line):
                word, _, rest = line.strip().partition(" ")
                self._command(word, unquoted(rest.strip()))
            elif line.strip():
                self.ask(question_of(line))
        except KeyboardInterrupt:  # before the answer began, or a second time
            self._say("(stopped)")

    def ask(self, question: str) -> None:
        """Answer one question on the terminal and keep both; a failed question is taken back.

        If the conversation no longer fits the context, offer to make room and ask again.
        """
        while True:
            try:
                self._answer(question)
            except ContextTooLong as error:
                if not self._offer_room(error):
                    self._say("(your question was taken back)")
                    return
            else:
                return

    def _answer(self, question: str) -> None:
        """Answer one question. Raises ContextTooLong if it does not fit."""
        asked = {"role": "user", "content": question.encode("utf-8", "replace").decode()}
        first = [{"role": "system", "content": self.system}] if self.system else []
        started = time.monotonic()
        answering: Answering | None = None
        waiting = self._thinking()
        try:
            answering = self._model.chat([*first, *self.messages, asked], **self._settings.sampling)
            waiting.stop()
            stopped, first_at = self._show(answering)
        except KeyboardInterrupt:
            stopped, first_at = True, None
        except ContextTooLong:
            raise
        except CairnError as error:
            self._lost(error)
            return
        finally:
            waiting.stop()
            if answering is not None:
                answering.close()
        answer = answering.answer if answering is not None else None
        if answer is None or not (answer.text or answer.reasoning or answer.tool_calls):
            self._say("(there was no answer; your question was taken back)")
            return
        self.messages += [asked, answer.message]
        self._keep()
        self._show_cost(answer, started, first_at, stopped)

    def _show_cost(self, answer: Answer, started: float, first_at: float | None, stopped: bool) -> None:
        """Print an answer's tokens and times, and whether the context is full."""
        if not self._settings.quiet:
            self._say(summary(answer, time.monotonic() - started, stopped))
        if self._settings.verbose:
            self._say(figures(answer, started, first_at, time.monotonic()))
        usage, context = answer.usage, self._setting.context
        if usage and context and usage.prompt_tokens + usage.completion_tokens >= context:
            self._say(f"(the context of {context} tokens is full: /drop, /summarise or /clear make room)")

    def _lost(self, error: CairnError) -> None:
        """Report a failed answer; its question is not kept."""
        self._say(f"{error}\n(your question was taken back)")

    def _show(self, answering: Answering) -> tuple[bool, float | None]:
        """Write an answer's pieces as they come; return whether Ctrl-C stopped it, and the time of the first."""
        view = view_of_terminal(self._settings.markdown)
        thoughts = WrappedView(
            lambda text: self._talk.print(text, end="", style="dim italic", markup=False), self._talk.width
        )
        thought, first_at = False, None
        waiting = self._thinking()
        try:
            for piece in answering:
                first_at = first_at or time.monotonic()
                waiting.stop()
                if piece.reasoning:
                    thoughts.push(printable(piece.reasoning))
                    thought = True
                if piece.text:
                    if thought:
                        thoughts.close()
                        self._say("")
                    view.push(printable(piece.text))
                    thought = False
        except KeyboardInterrupt:
            return True, first_at
        finally:
            waiting.stop()
            thoughts.close()
            view.close()
        for call in answering.answer.tool_calls:
            print(printable(f"{call.name}({call.arguments})"))
        return False, first_at

    def _thinking(self) -> Status:
        """Show on a terminal that the answer is being computed; return the spinner to stop."""
        waiting = self._talk.status("thinking")
        if self._talk.is_terminal:
            waiting.start()
        return waiting

    def _view_text(self, text: str) -> None:
        view = view_of_terminal(self._settings.markdown)
        view.push(printable(text))
        view.close()

    # ------------------------------------------------------------------------------------------------------ commands

    def _command(self, word: str, text: str) -> None:
        command = self._commands.find(word)
        if command is None:
            self._say(f"unknown command {word}; /? lists all{self._commands.near(word)}")
            return
        try:
            command.run(text)
        except CairnError as error:
            self._say(str(error))

    def _help(self, text: str) -> None:
        self._say(help_of_set() if text.endswith("set") else f"{self._commands.help()}\n{KEYS}")

    def _leave(self, _: str) -> None:
        raise EOFError

    def _clear(self, _: str) -> None:
        self.messages.clear()
        self._chat_id = SavedChats.new_id()
        self._say("(a new conversation)")

    def _system(self, text: str) -> None:
        if text:
            self.system = text
        self._say(f"system: {self.system or '(none)'}")

    def _set(self, text: str) -> None:
        if not text:
            self._say(help_of_set())
            return
        word, _, rest = text.partition(" ")
        if word == "system":
            self._system(unquoted(rest.strip()))
            return
        self._say(self._settings.change(text))
        self._reader.keep_history(self._settings.history)

    def _show_facts(self, text: str) -> None:
        rows = [] if text in ("system", "parameters") else self._setting.describe()
        if text in ("", "info", "system"):
            rows.append(("system", self.system or "(none)"))
        if text in ("", "info", "parameters"):
            rows += [
                (name, str(value))
                for name, value in self._settings.sampling.items()
                if name in FLAGS or name == "response_format"
            ]
        width = max((len(name) for name, _ in rows), default=0) + 2
        self._say("\n".join(f"{name:<{width}}{value}" for name, value in rows) or "(nothing is set)")

    def _undo(self, _: str) -> None:
        if not self.messages:
            self._say("(there is nothing to take back)")
            return
        taken = self.messages[-2]["content"]
        del self.messages[-2:]
        self._keep()
        self._say(f"(took back: {taken})")

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save needs the name of a file")
            return
        first = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps([*first, *self.messages], ensure_ascii=False, indent=2) + "\n"
        try:
            with expanded(name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._say(f"{name} exists already; give another name")
        except (OSError, ValueError) as error:
            self._say(f"{name} cannot be written: {getattr(error, 'strerror', None) or error}")
        else:
            self._say(f"(saved {len(self.messages)} messages to {name})")

    # ---------------------------------------------------------------------------------------------- a full context

    def _offer_room(self, error: ContextTooLong) -> bool:
        """Ask how to make room, and make it. Return whether to ask the question again."""
        self._say(str(error))
        if not self._history():
            self._say("(the question alone is too long for this context)")
            return False
        if not isinstance(self._reader, TerminalReader):
            self._say("(/drop, /summarise or /clear make room)")
            return False
        self._say(OFFER)
        ways: dict[str, Callable[[str], None]] = {"d": self._drop, "s": self._summarise, "n": self._clear}
        try:
            way = ways.get(self._reader.choose("d, s or n: ").strip().lower()[:1])
        except (KeyboardInterrupt, EOFError):
            return False
        if way is None:
            return False
        try:
            way("")
        except CairnError as failed:
            self._say(str(failed))
            return False
        return True

    def _drop(self, _: str) -> None:
        messages = self._history()
        count = older_half(messages)
        if not count:
            self._say("(there is nothing to drop)")
            return
        self._go_on_with(messages[count:])
        self._say(f"(dropped the oldest {count} messages)")

    def _summarise(self, _: str) -> None:
        messages = self._history()
        count = older_half(messages)
        if not count:
            self._say("(there is nothing to summarise)")
            return
        with self._talk.status("summarising"):
            short = self._summary(messages[:count])
        self._go_on_with([*short, *messages[count:]])
        self._say(f"(the oldest {count} messages are now: {short[1]['content']})")

    def _summary(self, older: Messages) -> Messages:
        """Return a question and an answer that stand for older messages; an agent's conversation asks otherwise."""
        return summary_of(self._model, older, self.system, self._setting.context)

    def _history(self) -> Messages:
        """Return the messages that fill the context, without the system prompt."""
        return self.messages

    def _go_on_with(self, messages: Messages) -> None:
        """Make these the messages. The chat saved so far stays whole; the rest is saved as a new one."""
        if self._setting.chats is not None:
            self._chat_id = SavedChats.new_id()
        self.messages[:] = messages
        self._keep()

    # -------------------------------------------------------------------------------------------------- kept chats

    def _keep(self) -> None:
        """Save the chat, if chats are saved. An error is reported once, and the conversation goes on unsaved."""
        chats = self._setting.chats
        if chats is None or not self._settings.history:
            return
        try:
            if not self.messages:  # its only question was taken back
                chats.delete(self._chat_id)
                return
            chats.save(SavedChat(self._chat_id, self._setting.name, self.system, self.messages))
        except CairnError as error:
            self._settings.history = False
            self._say(str(error))

    def _list_chats(self, _: str) -> None:
        self._listed = self._setting.chats.newest(LISTED) if self._setting.chats is not None else []
        lines = [
            f"{number:>3}  {chat.day}  {chat.title}" + ("  (this one)" if chat.id == self._chat_id else "")
            for number, chat in enumerate(self._listed, 1)
        ]
        self._say("\n".join(lines) or "(there are no saved chats)")

    def _resume_chat(self, text: str) -> None:
        chats = self._setting.chats
        if not self._listed and chats is not None:
            self._listed = chats.newest(LISTED)
        if chats is None or not text.isdecimal() or not 1 <= int(text) <= len(self._listed):
            self._say("/resume needs a number from the list of /chats")
            return
        chat = chats.load(self._listed[int(text) - 1].id)  # it may have gone on since the list
        self.system = None
        self.resume(chat)

    def _forget(self, _: str) -> None:
        if self._setting.chats is not None:
            self._setting.chats.delete(self._chat_id)
        self.messages.clear()
        self._say("(this chat was deleted)")

    def _say(self, text: str) -> None:
        # A terminal breaks lines between words; elsewhere a line stays one.
        self._talk.print(printable(text), style="dim", markup=False, soft_wrap=not self._talk.is_terminal)


def summary(answer: Answer, seconds: float, stopped: bool) -> str:
    """Return an answer's tokens and time in one line."""
    parts = ["stopped"] if stopped else []
    if answer.finish_reason == "length":
        repeats = answer.detail == REPETITION
        parts.append("stopped because it repeated itself" if repeats else "cut at the token limit")
    usage = answer.usage
    if usage is not None:
        parts.append(f"{counted(usage.completion_tokens, 'token')} in {seconds:.1f} s")
        read = f", {answer.cache.disk} read from disk" if answer.cache is not None and answer.cache.disk else ""
        parts.append(
            f"prompt {counted(usage.prompt_tokens, 'token')}, {usage.cached_tokens} of them already computed{read}"
        )
    return f"({'; '.join(parts)})" if parts else ""


def figures(answer: Answer, started: float, first_at: float | None, ended: float) -> str:
    """Return an answer's times and rates, one per line, for `--verbose`."""
    usage = answer.usage
    first = (first_at or ended) - started
    rows = [("total", f"{ended - started:.2f} s"), ("first token after", f"{first:.2f} s")]
    if usage is not None:
        computed = usage.prompt_tokens - usage.cached_tokens
        rows.append(("prompt", f"{usage.prompt_tokens} tokens, {computed} computed: {_rate(computed, first)}"))
        made = ended - started - first
        rows.append(("answer", f"{usage.completion_tokens} tokens: {_rate(usage.completion_tokens - 1, made)}"))
    return "\n".join(f"  {name:<18}{value}" for name, value in rows)


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if seconds > 0.001 and count > 0 else "too fast to measure"


def chats_of_terminal(folder: Path) -> SavedChats | None:
    """Return the folder of saved chats on a terminal; None otherwise: the chats of scripts are not saved."""
    return SavedChats(folder) if sys.stdin.isatty() else None
