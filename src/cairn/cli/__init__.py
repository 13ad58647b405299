"""The command `cairn`. Each file here is one group of commands; a command's own imports happen when it runs.

Stdout carries data (an answer, a path, a table), stderr carries messages. A CairnError becomes one sentence on stderr
and an exit code: 2 for a model or an option that cannot be used, 1 for a later failure. Ctrl-C gives 130.
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from cairn.cli.common.output import printable
from cairn.config.option import OTHER_NAMES, SAMPLING_NAMES
from cairn.types.errors import CairnError, ConfigError


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


_OTHER_PROGRAMS = {
    "create": "a model is served from its files; give cairn serve a folder or a .gguf file",
    "cp": "to serve a model under another name: cairn serve MODEL --served-name NAME",
    "push": "Cairn uploads nothing",
    "signin": "a gated model needs HF_TOKEN in the environment",
    "login": "a gated model needs HF_TOKEN in the environment",
    "server": "it is called serve: cairn serve",
    "start": "it is called serve: cairn serve",
    "download": "it is called pull: cairn pull MODEL",
    "delete": "it is called rm: cairn rm MODEL",
    "remove": "it is called rm: cairn rm MODEL",
    "info": "it is called show: cairn show MODEL",
    "complete": "it is called generate: cairn generate -p TEXT --raw",
}
"""Commands of other programs -> what to use here."""
_FLAGS = OTHER_NAMES | SAMPLING_NAMES
"""Options of other programs, without their hyphens -> the name of the option here."""


START = """\
An LLM server for agents. The first steps:

  cairn chat           talk with a model in this terminal
  cairn run MODEL      the same; a missing model is downloaded first
  cairn serve MODEL    serve a model, with a page for the browser
  cairn list           the models on this machine
  cairn models --names     short names of models to download, such as qwen3:0.6b
  cairn doctor         what this machine can run

cairn --help lists all commands; cairn COMMAND --help explains one."""
"""Printed by `cairn` alone; the whole help is longer than a screen."""


GROUPS = (
    "serve",
    "chat",
    "generate",
    "embed",
    "models",
    "quantize",
    "merge",
    "remote",
    "launch",
    "agents",
    "team",
    "workflow",
    "collection",
    "cache",
    "cluster",
    "doctor",
    "backup",
    "bench",
    "tune",
    "options",
    "manual",
)
"""Modules with commands, in the order of the help. `options` is in `common`."""
_ALONE = ("serve",)
"""Modules of one command of the same name: others are not imported for it, which would take a third of its start."""


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(START)


def version() -> None:
    """Print the version."""
    from cairn import __version__

    print(__version__)


def _made(groups: Sequence[str]) -> typer.Typer:
    """Return the command line with the commands of these modules."""
    made = typer.Typer(
        name="cairn",
        help="An LLM server for agents: a context that was computed once is never computed again.",
        epilog="Start with: cairn chat   (or: cairn serve). For completion of commands and options in your shell: "
        "cairn --install-completion",
        invoke_without_command=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    made.callback()(_root)
    for name in groups:
        place = "common.options" if name == "options" else name
        importlib.import_module(f"cairn.cli.{place}").register(made)
    made.command(rich_help_panel="This machine")(version)
    return made


@functools.cache
def _complete() -> typer.Typer:
    """Return the command line with all commands."""
    return _made(GROUPS)


def __getattr__(name: str) -> Any:
    if name == "app":
        return _complete()
    raise AttributeError(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code."""
    _open_standard_streams()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        _check_words(words)
        _hide_types_of_flags()
        word = words[0] if words else ""
        app = _made((word,)) if word in _ALONE else _complete()
        code = app(arguments, standalone_mode=True)
        sys.stdout.flush()
    except CairnError as error:
        print(f"cairn: {printable(str(error))}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except MemoryError:
        print("cairn: out of memory: raise the limit (ulimit -v), or give this process less to do", file=sys.stderr)
        code = 1
    except BrokenPipeError:  # the reader of stdout is gone
        code = 1
    except OSError as error:  # most often: the disk of a redirected stdout is full
        where = f"{error.filename}: " if error.filename else ""
        print(f"cairn: {where}{error.strerror or error}", file=sys.stderr)
        code = 1
    if code:
        _forget_stdout()
    sys.exit(code)


def _hide_types_of_flags() -> None:
    """Leave out `<bool>` in the help of flags: it reads as if they took a value. Typer has no option for that."""
    shown = getattr(TyperOption, "display_type_rich", None)
    if shown is None or getattr(shown, "hides_flags", False):
        return

    def display_type_rich(self: TyperOption, ctx: typer.Context) -> str | None:
        found: str | None = None if self.is_flag and self.metavar is None else shown(self, ctx)
        return found

    display_type_rich.hides_flags = True  # type: ignore[attr-defined]
    TyperOption.display_type_rich = display_type_rich  # type: ignore[method-assign, assignment]


def _check_words(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a command or an option of another program; it names the one to use here."""
    word = arguments[0] if arguments else ""
    if word in _OTHER_PROGRAMS:
        raise ConfigError(f"there is no command {word}: {_OTHER_PROGRAMS[word]}")
    for argument in itertools.takewhile(lambda one: one != "--", arguments):
        flag = argument.partition("=")[0]
        right = _FLAGS.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        if right is not None:
            here = "the argument MODEL" if right == "model" else f"called --{right.replace('_', '-')}"
            raise ConfigError(f"there is no option {flag}: it is {here} here")


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr if the caller closed them: else a socket or file gets their numbers, and output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open until the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths keep their bytes; characters that the terminal's encoding lacks become question marks.
        unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "replace")


def _forget_stdout() -> None:
    """Flush stdout, or replace it if that fails: the interpreter's exit would try again and print a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
