"""Questions as they are read: from a terminal with editing and history, or from a pipe line by line."""

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
"""Bytes of the history file; of a larger one the older half is dropped."""
_PASTE_ON = "\x1b[?2004h"
"""Asks the terminal to mark what is pasted, so that its line ends are not taken for the Enter key."""


class LineReader(Protocol):
    """Where questions come from."""

    def read(self) -> str:
        """Return the next question, of one line or several. EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        ...

    def keep_history(self, keep: bool) -> None:
        """Set whether questions from now on are written to the history file."""
        ...


class PipeReader:
    """Questions from a pipe, a file or a terminal that can do nothing: one a line, unless quotes or a backslash join
    several."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):  # a line of other bytes is no reason to lose what was said
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
        """Nothing is kept of a pipe."""


def _line(prompt: str) -> str:
    """One line. Prompts are talk: where stdout is a file they go to stderr, where nobody types there are none."""
    if not sys.stdin.isatty():
        prompt = ""
    elif not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)


class TerminalReader:
    """Questions from a terminal. Pasted lines are one question; Alt-Enter begins a new line; Up recalls."""

    def __init__(self, history: Path | None, words: Callable[[], Iterable[str]]) -> None:
        """`history`: the file of earlier questions, None to keep none. `words`: the commands, for the Tab key."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.output import create_output
        from prompt_toolkit.styles import Style

        class Commands(Completer):
            """The commands that begin as what was typed."""

            def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
                typed = document.text_before_cursor
                if typed.startswith("/"):
                    yield from (Completion(word, -len(typed)) for word in words() if word.startswith(typed))

        # Prompts are talk: where stdout is a file they go to stderr.
        output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
        output.enable_cpr = False  # type: ignore[attr-defined]  # a terminal that does not answer would be waited for
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
        """Return the line that answers a question of the program; it is not kept."""
        from prompt_toolkit import PromptSession

        return PromptSession[str](prompt, output=self._session.output).prompt()

    def keep_history(self, keep: bool) -> None:
        """Set whether questions from now on are written to the history file."""
        self._history.kept = keep  # type: ignore[attr-defined]


def _history(path: Path | None) -> History:
    """The questions of earlier sessions. A file that cannot be used is no reason not to talk."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class KeptHistory(FileHistory):
        """A history file, for as long as it is to be kept."""

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
    """Drop the older half of a history file that is too large; an entry begins behind an empty line."""
    if path.stat().st_size <= MAX_HISTORY:
        return
    data = path.read_bytes()
    cut = data.find(b"\n\n", len(data) // 2)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data[cut + 1 :] if cut >= 0 else b"")
    fresh.replace(path)


def _keys() -> KeyBindings:
    """Enter sends what is complete; Alt-Enter begins a new line."""
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
    """Keep what is typed meanwhile out of the answers: it is not shown, and waits for the next prompt.

    Ctrl-C is still a signal.
    """
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    quiet = list(before)
    quiet[0] &= ~termios.ICRNL  # Enter stays what it is for the prompt that reads it later
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def mark_pastes() -> None:
    """Let the terminal mark what is pasted during an answer, as it does at the prompt."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        sys.stdout.write(_PASTE_ON)
        sys.stdout.flush()
