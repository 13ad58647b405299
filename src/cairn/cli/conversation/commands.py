"""The commands of a conversation: their names, arguments and help."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cairn.config.option import closest

Run = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `names`: its own name first, then aliases from other programs."""

    names: tuple[str, ...]
    takes: str
    """Its argument, as the help shows it."""
    help: str
    run: Run


class CommandTable:
    """The commands of a conversation, by name and alias."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._commands = tuple(commands)
        self._by_name = {name: one for one in self._commands for name in one.names}

    def words(self) -> list[str]:
        """Return all names and aliases."""
        return list(self._by_name)

    def find(self, word: str) -> Command | None:
        """Return the command with a name, or None."""
        return self._by_name.get(word)

    def near(self, word: str) -> str:
        """Return a hint with the closest name, or ""."""
        return closest(word, self._by_name)

    def help(self) -> str:
        """Return the list of commands, one per line."""
        heads = [" ".join(filter(None, (", ".join(one.names), one.takes))) for one in self._commands]
        width = max(map(len, heads)) + 2
        return "\n".join(f"{head:<{width}}{one.help}" for head, one in zip(heads, self._commands, strict=True))


def is_command(line: str) -> bool:
    """Return whether a line is a command: its first word begins with a slash and is not a path such as /etc/hosts."""
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    return word.startswith("/") and "/" not in word[1:]
