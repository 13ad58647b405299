"""Readers of questions: from a terminal with editing and history, or from a pipe line by line."""

from __future__ import annotations

import io
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cairn.cli.conversation.quoted_lines import unfinished

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

MAX_HISTORY = 1 << 20
"""Most bytes of the history file; the older half of a larger one is dropped."""
_PASTE_ON = "\x1b[?2004h"
"""Makes the terminal mark pasted text (bracketed paste), so that its newlines are not taken for the Enter key."""


class LineReader(Protocol):
    """A source of questions."""

    def read(self) -> str:
        """Return the next question, one line or several. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        ...

    def keep_history(self, keep: bool) -> None:
        """Set whether further questions are written to the history file."""
        ...


class PipeReader:
    """Reader of a pipe, a file or a dumb terminal: one question per line, unless quotes or a backslash join lines."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):  # a line that is not UTF-8 must not end the conversation
            sys.stdin.reconfigure(errors="surrogateescape")

    def read(self) -> str:
        """Return the next question."""
        text = _line("> ")
        while unfinished(text):
            try:
                text += "\n" + _line(". ")
            except EOFError:
                break
        return text

    def keep_history(self, keep: bool) -> None:
        """Do nothing: there is no history of a pipe."""


def _line(prompt: str) -> str:
    """Read one line. The prompt goes to stderr if stdout is a file; without a terminal there is none."""
    if not sys.stdin.isatty():
        prompt = ""
    elif not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)


class TerminalReader:
    """Reader of a terminal. Pasted lines are one question; Alt-Enter starts a new line; Up recalls a question."""

    def __init__(self, history: Path | None, words: Callable[[], Iterable[str]]) -> None:
        """Open the prompt. `history`: the file of earlier questions, or None. `words`: commands for the Tab key."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.output import create_output
        from prompt_toolkit.styles import Style

        class Commands(Completer):
            """Completion of commands."""

            def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
                typed = document.text_before_cursor
                if typed.startswith("/"):
                    yield from (Completion(word, -len(typed)) for word in words() if word.startswith(typed))

        # Prompts are not data: if stdout is a file they go to stderr.
        output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
        output.enable_cpr = False  # type: ignore[attr-defined]  # it would wait for terminals that do not answer
        self._history = _history(history)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            prompt_continuation="  ",
            history=self._history,
            completer=Commands(),
            complete_while_typing=False,
            key_bindings=_keys(),
            output=output,
            enable_suspend=True,
            placeholder=[("class:hint", "Ask something; /? lists the commands")],
            style=Style.from_dict({"hint": "fg:ansibrightblack"}),
        )

    def read(self) -> str:
        """Return the next question."""
        return self._session.prompt()

    def choose(self, prompt: str) -> str:
        """Ask the user and return the line; it does not enter the history."""
        from prompt_toolkit import PromptSession

        return PromptSession[str](prompt, output=self._session.output).prompt()

    def keep_history(self, keep: bool) -> None:
        """Set whether further questions are written to the history file."""
        self._history.kept = keep  # type: ignore[attr-defined]


def _history(path: Path | None) -> History:
    """Return the history of questions; in memory only if there is no file or it cannot be used."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class KeptHistory(FileHistory):
        """A history file whose writing can be switched off."""

        kept = True

        def store_string(self, string: str) -> None:
            if self.kept:
                with suppress(OSError):
                    super().store_string(string.encode("utf-8", "replace").decode())

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        _shorten(path)
        return KeptHistory(str(path))
    except OSError:
        return InMemoryHistory()


def _shorten(path: Path) -> None:
    """Drop the older half of a history file that is too large; entries are separated by empty lines."""
    if path.stat().st_size <= MAX_HISTORY:
        return
    data = path.read_bytes()
    cut = data.find(b"\n\n", len(data) // 2)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data[cut + 1 :] if cut >= 0 else b"")
    fresh.replace(path)


def _keys() -> KeyBindings:
    """Return key bindings: Enter sends a complete question, Alt-Enter starts a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text) and buffer.document.is_cursor_at_the_end:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


@contextmanager
def no_echo() -> Iterator[None]:
    """Hide what is typed during answers; it waits for the next prompt. Ctrl-C is still a signal."""
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    quiet = list(before)
    quiet[0] &= ~termios.ICRNL  # the prompt that reads it later needs Enter unchanged
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def mark_pastes() -> None:
    """Make the terminal mark text pasted during an answer, as it does at the prompt."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        sys.stdout.write(_PASTE_ON)
        sys.stdout.flush()
