"""Views of a streamed answer: Markdown rendered on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from markdown_it import MarkdownIt  # which rich brings
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

_EVERY = 0.08
"""Least seconds between two drawings of the block that is still growing."""
_CODE = "ansi_dark"
"""Code uses the terminal's own colours, so that it is readable on light and dark backgrounds."""


class TextView(Protocol):
    """A view of an answer's text."""

    def push(self, text: str) -> None:
        """Show more text."""
        ...

    def close(self) -> None:
        """Show the rest, and end the line."""
        ...


class PlainView:
    """The text unchanged, with a newline at its end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ""

    def push(self, text: str) -> None:
        """Write the text at once."""
        self._out.write(text)
        self._out.flush()
        self._last = text or self._last

    def close(self) -> None:
        """End the line if the text did not."""
        if self._last and not self._last.endswith("\n"):
            self._out.write("\n")
            self._out.flush()


class WrappedView:
    """Plain text wrapped between words at the terminal's width."""

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write, self._width = write, max(width, 2)
        self._column = 0
        self._word = ""

    def push(self, text: str) -> None:
        """Write the words that are complete."""
        for character in text:
            if character.isspace():
                self._put_word()
                self._put_space(character)
            else:
                self._word += character
                if cell_len(self._word) >= self._width:  # a word longer than a line is broken
                    self._put_word()

    def close(self) -> None:
        """Write the last word and end the line."""
        self._put_word()
        if self._column:
            self._write("\n")
        self._column = 0

    def _put_word(self) -> None:
        if not self._word:
            return
        size = cell_len(self._word)
        if self._column and self._column + size > self._width:
            self._write("\n")
            self._column = 0
        self._write(self._word)
        self._column += size
        self._word = ""

    def _put_space(self, character: str) -> None:
        if character == "\n" or self._column + 1 >= self._width:
            self._write("\n")
            self._column = 0
        else:
            self._write(" " if character != "\t" else "    ")
            self._column += 1 if character != "\t" else 4


class ModelMarkdown(Markdown):
    """Markdown as models write it: newlines are kept, and HTML is text."""

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme=_CODE, hyperlinks=False)
        self.markup = text
        self.parsed = _parser().parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class MarkdownView:
    """Markdown blocks, printed once complete; the block that is still growing is redrawn below them."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, now
        self._text = ""
        self._printed = False
        self._next = 0.0
        """The earliest time of the next drawing."""
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def push(self, text: str) -> None:
        """Add text; draw at most every 80 ms."""
        self._text += text
        if (began := self._now()) < self._next:
            return
        done, self._text = _complete(self._text)
        if not self._live.is_started:
            self._live.start()
        self._print(done)
        self._live.update(_LastLines(self._text, below=self._printed), refresh=True)
        ended = self._now()
        self._next = ended + max(_EVERY, 2 * (ended - began))  # drawing takes at most a third of the time

    def close(self) -> None:
        """Print the rest."""
        self._live.stop()
        self._print(self._text)
        self._text = ""

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._printed:
            self._console.print()
        self._console.print(ModelMarkdown(text))
        self._printed = True


class _LastLines:
    """The last lines of a growing block that fit the screen; scrolled lines cannot be redrawn."""

    def __init__(self, text: str, below: bool) -> None:
        """Show `text`; `below`: other blocks are above it, so an empty line comes first."""
        self._text, self._below = text, below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(ModelMarkdown(self._text), options, pad=False)
        room = max(console.size.height - 3, 1)
        if self._below and any(segment.text.strip() for line in lines for segment in line):
            yield Segment.line()
        for line in lines[-room:]:
            yield from line
            yield Segment.line()


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def _complete(text: str) -> tuple[str, str]:
    """Split a text into the blocks that are complete, and the last one, which may still grow."""
    starts = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map]
    if not starts or starts[-1] == 0:
        return "", text
    lines = text.split("\n")
    return "\n".join(lines[: starts[-1]]) + "\n", "\n".join(lines[starts[-1] :])


def view_of_terminal(markdown: bool) -> TextView:
    """Return the view for an answer on stdout."""
    if not sys.stdout.isatty():
        return PlainView(sys.stdout)
    console = Console(highlight=False, emoji=False)
    if markdown and not console.is_dumb_terminal:
        return MarkdownView(console)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return WrappedView(write, console.width)
