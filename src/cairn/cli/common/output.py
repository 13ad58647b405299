"""Output: data to stdout, messages to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})


def talk() -> Console:
    """Return the console on stderr, for everything that is not data."""
    return Console(stderr=True, highlight=False, emoji=False)


def printable(text: str) -> str:
    """Replace control characters, so that a model or a server cannot control the terminal."""
    return "".join(char if char in "\n\t" or " " <= char <= "~" or ord(char) >= 0xA0 else "\ufffd" for char in text)


def amount(count: float) -> str:
    """Format a number of bytes for people: 93.1 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"


def counted(count: int, what: str) -> str:
    """Return a count of things in words: 1 file, 2 files."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows on stdout: a table on a terminal, tab-separated lines without a header elsewhere.

    In tab-separated lines, newlines and tabs inside a value are written as a backslash and a letter.
    """
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(value.translate(_ESCAPES) for value in row))
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(header):
        shown.add_column(title, overflow="fold", style="" if index else "cyan")
    for row in rows:
        shown.add_row(*map(_cell, row))
    Console(highlight=False, markup=False).print(shown)


def _cell(value: str) -> Text:
    """Return a value of a table; an address is a link, which stays whole where it is folded."""
    text = printable(value)
    return Text(text, style=Style(link=text) if text.startswith("https://") else "")


def sections(parts: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
    """Print titled lists of (name, value) on stdout; off a terminal, tab-separated lines that begin with the title."""
    if not sys.stdout.isatty():
        for title, rows in parts:
            for name, value in rows:
                print(f"{title.lower()}\t{name}\t{value}")
        return
    console = Console(highlight=False, markup=False)
    width = max(len(name) for _, rows in parts for name, _ in rows)
    for title, rows in parts:
        console.print(title, style="bold")
        shown = Table.grid(padding=(0, 2))
        shown.add_column(style="cyan", min_width=width)
        shown.add_column(overflow="fold")
        for name, value in rows:
            shown.add_row("  " + name, value)
        console.print(shown)
