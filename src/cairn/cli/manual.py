"""`cairn man`: manual pages in roff, generated from the same tables as `--help`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from cairn.config.paths import expanded
from cairn.types.errors import CairnError, ConfigError

_MARKUP = re.compile(r"(?<!\\)\[/?[a-z ]+\]")
"""Rich's markup, such as [dim] and [/dim]; a backslash before the bracket makes it text."""

Command = TyperCommand | TyperGroup


def register(app: typer.Typer) -> None:
    """Add `cairn man`."""

    @app.command(name="man", rich_help_panel="This machine")
    def man(
        command: Annotated[
            str | None, typer.Argument(metavar="COMMAND", help="The command, such as serve; default: cairn itself.")
        ] = None,
        write: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="Write all pages to this folder, such as ~/.local/share/man/man1."),
        ] = None,
    ) -> None:
        """Show a manual page, or write all of them to a folder. A pipe gets the page's source, for `man -l -`."""
        pages = manual_pages(app)
        if write is not None:
            _write(pages, write)
            print(f"{len(pages)} pages in {write}")
            return
        name = f"cairn-{command.replace(' ', '-')}" if command else "cairn"
        if name not in pages:
            raise ConfigError(f"there is no command {command}; cairn --help lists them")
        if not (sys.stdout.isatty() and _shown(pages[name])):
            print(pages[name], end="")


def _shown(page: str) -> bool:
    """Show a page with the program `man`; return whether it could."""
    program = shutil.which("man")
    if program is None:
        return False
    return subprocess.run([program, "-l", "-"], input=page, text=True, encoding="utf-8").returncode == 0


def manual_pages(app: typer.Typer) -> dict[str, str]:
    """Return all pages by name: cairn, cairn-serve, cairn-cache-stats, ..."""
    root = typer.main.get_command(app)
    assert isinstance(root, Command)
    return {"-".join(words): _page(words, command) for words, command in _commands(("cairn",), root)}


def _commands(words: tuple[str, ...], command: Command) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yield a command and all visible ones below it."""
    yield words, command
    if isinstance(command, TyperGroup):
        for name, below in sorted(command.commands.items()):
            if not below.hidden and isinstance(below, Command):
                yield from _commands((*words, name), below)


def _page(words: tuple[str, ...], command: Command) -> str:
    """Return a command's page in roff."""
    from cairn import __version__

    name = "-".join(words)
    help = _plain(command.help or "")
    first, _, rest = help.partition("\n\n")
    context = typer.Context(command, info_name=" ".join(words))
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{name.upper()}" "1" "" "Cairn {__version__}" "Cairn"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(first.partition('. ')[0].rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_roff(' '.join(words))}",
        _roff(usage),
        ".SH DESCRIPTION",
        *(_roff(" ".join(part.split())) + "\n.PP" for part in (first, *rest.split("\n\n")) if part.strip()),
        *_arguments(command),
        *_options(command),
    ]
    if isinstance(command, TyperGroup):
        lines.append(".SH COMMANDS")
        for word, below in sorted(command.commands.items()):
            if not below.hidden:
                summary = _roff(" ".join(_plain(below.help or "").split()))
                lines += [f".TP\n.B {_roff(name)}\\-{_roff(word)}(1)", summary]
    elif len(words) > 1:
        lines += [".SH SEE ALSO", f"{_roff('-'.join(words[:-1]))}(1)"]
    return "\n".join(lines) + "\n"


def _arguments(command: Command) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if isinstance(parameter, TyperArgument)]
    if arguments:
        yield ".SH ARGUMENTS"
    for argument in arguments:
        yield f".TP\n.I {_roff(argument.metavar or (argument.name or '').upper())}"
        yield _roff(_plain(getattr(argument, "help", None) or ""))


def _options(command: Command) -> Iterator[str]:
    """Yield all options by group, including those that `--help` leaves out."""
    panels: dict[str, list[TyperOption]] = {}
    for parameter in command.params:
        if isinstance(parameter, TyperOption):
            panels.setdefault(parameter.rich_help_panel or "Options", []).append(parameter)
    for title, options in panels.items():
        yield f".SH {_roff(title.upper())}"
        for option in options:
            names = ", ".join(f"\\fB{_roff(name)}\\fR" for name in (*option.opts, *option.secondary_opts))
            takes = "" if option.is_flag else f" \\fI{_roff(option.metavar or 'TEXT')}\\fR"
            yield f".TP\n{names}{takes}"
            yield _roff(_plain(option.help or ""))


def _plain(text: str) -> str:
    """Return help text without rich's markup."""
    return _MARKUP.sub("", text).replace(r"\[", "[")


def _roff(text: str) -> str:
    """Escape a line for roff: backslashes, hyphens, and a dot or quote at its start, which would be a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return "\\&" + text if text.startswith((".", "'")) else text


def _write(pages: dict[str, str], folder: Path) -> None:
    try:
        folder = expanded(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (folder / f"{name}.1").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CairnError(f"the pages cannot be written to {folder}: {error.strerror or error}") from None
