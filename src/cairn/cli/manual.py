"""`cairn man`: manual pages in man's own language, made of the same tables as `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from cairn.types.errors import CairnError, ConfigError

_MARKUP = re.compile(r"(?<!\\)\[/?[a-z ]+\]")
"""What rich takes for markup: [dim], [/dim]. A backslash before the bracket makes it text."""

Command = TyperCommand | TyperGroup


def register(app: typer.Typer) -> None:
    """Add `cairn man`."""

    @app.command(name="man", rich_help_panel="This machine")
    def man(
        command: Annotated[
            str | None, typer.Argument(metavar="COMMAND", help="Its page, such as serve; without it that of cairn.")
        ] = None,
        write: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="Write all pages into this folder, such as ~/.local/share/man/man1."),
        ] = None,
    ) -> None:
        """Print a manual page for `man -l -`, or write all of them into a folder."""
        pages = manual_pages(app)
        if write is not None:
            _write(pages, write)
            print(f"{len(pages)} pages in {write}")
            return
        name = f"cairn-{command.replace(' ', '-')}" if command else "cairn"
        if name not in pages:
            raise ConfigError(f"there is no command {command}; cairn --help lists them")
        print(pages[name], end="")


def manual_pages(app: typer.Typer) -> dict[str, str]:
    """Return every page by its name: cairn, cairn-serve, cairn-cache-stats, ..."""
    root = typer.main.get_command(app)
    assert isinstance(root, Command)
    return {"-".join(words): _page(words, command) for words, command in _commands(("cairn",), root)}


def _commands(words: tuple[str, ...], command: Command) -> Iterator[tuple[tuple[str, ...], Command]]:
    """A command and those below it that are not hidden."""
    yield words, command
    if isinstance(command, TyperGroup):
        for name, one in sorted(command.commands.items()):
            if not one.hidden and isinstance(one, Command):
                yield from _commands((*words, name), one)


def _page(words: tuple[str, ...], command: Command) -> str:
    """One page in roff."""
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
        for below, one in sorted(command.commands.items()):
            if not one.hidden:
                lines += [f".TP\n.B {_roff(name)}\\-{_roff(below)}(1)", _roff(" ".join(_plain(one.help or "").split()))]
    elif len(words) > 1:
        lines += [".SH SEE ALSO", f"{_roff('-'.join(words[:-1]))}(1)"]
    return "\n".join(lines) + "\n"


def _arguments(command: Command) -> Iterator[str]:
    found = [one for one in command.params if isinstance(one, TyperArgument)]
    if found:
        yield ".SH ARGUMENTS"
    for one in found:
        yield f".TP\n.I {_roff(one.metavar or (one.name or '').upper())}"
        yield _roff(_plain(getattr(one, "help", None) or ""))


def _options(command: Command) -> Iterator[str]:
    """Every option, also those that `--help` leaves out, by their groups."""
    panels: dict[str, list[TyperOption]] = {}
    for one in command.params:
        if isinstance(one, TyperOption):
            panels.setdefault(one.rich_help_panel or "Options", []).append(one)
    for title, options in panels.items():
        yield f".SH {_roff(title.upper())}"
        for option in options:
            names = ", ".join(f"\\fB{_roff(name)}\\fR" for name in (*option.opts, *option.secondary_opts))
            takes = "" if option.is_flag else f" \\fI{_roff(option.metavar or 'TEXT')}\\fR"
            yield f".TP\n{names}{takes}"
            yield _roff(_plain(option.help or ""))


def _plain(text: str) -> str:
    """Help without rich's markup."""
    return _MARKUP.sub("", text).replace(r"\[", "[")


def _roff(text: str) -> str:
    """Text of one line as roff reads it: backslashes, hyphens, and no command at its beginning."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return "\\&" + text if text.startswith((".", "'")) else text


def _write(pages: dict[str, str], folder: Path) -> None:
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (folder / f"{name}.1").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CairnError(f"the pages cannot be written to {folder}: {error.strerror or error}") from None
