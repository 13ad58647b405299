"""Sampling flags, and the source of answers: a model in this process or a running server."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from cairn.cli.common.options import server
from cairn.config.option import local_options, options
from cairn.config.resolve import Resolved
from cairn.types.errors import ConfigError
from cairn.types.outputs import Delta

if TYPE_CHECKING:
    from cairn.entrypoints.answer import Answer

_PANEL = "Sampling (default: the model's own; cairn config shows it)"
FLAGS: dict[str, tuple[Any, str, str]] = {
    "max_tokens": (int, "N", "Most tokens of an answer; default: what is left of the context."),
    "temperature": (float, "X", "0 always takes the likeliest token; higher is more varied."),
    "top_p": (float, "X", "Keep the likeliest tokens that together have this probability."),
    "top_k": (int, "N", "Keep this many of the likeliest tokens."),
    "min_p": (float, "X", "Keep tokens at least this fraction as likely as the likeliest."),
    "repetition_penalty": (float, "X", "Above 1: earlier tokens become less likely."),
    "presence_penalty": (float, "X", "Make tokens that the answer already has less likely."),
    "frequency_penalty": (float, "X", "Make tokens less likely each time that the answer has them."),
    "seed": (int, "N", "The same seed gives the same answer."),
    "stop": (list[str], "TEXT", "End the answer before this text; repeat for several."),
}


def sampling_parameters() -> list[inspect.Parameter]:
    """Return the sampling flags as parameters of a command."""
    found = []
    for name, (kind, metavar, text) in FLAGS.items():
        flag = "--" + name.replace("_", "-")
        info = typer.Option(flag, metavar=metavar, help=text, rich_help_panel=_PANEL, show_default=False)
        wanted: Any = kind
        annotation = Annotated[wanted | None, info]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


class Answering(Protocol):
    """A stream of one answer's pieces."""

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        ...

    def __iter__(self) -> Iterator[Delta]: ...

    def close(self) -> None:
        """Cancel the request if it still runs."""
        ...


class AnswerSource(Protocol):
    """A source of answers: a model in this process, or a server."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Answering:
        """Answer a conversation."""
        ...

    def generate(self, prompt: str, **sampling: Any) -> Answering:
        """Continue a text."""
        ...


class _Local:
    """A model in this process."""

    def __init__(self, resolved: Resolved) -> None:
        from cairn.entrypoints.llm import LLM

        self.llm = LLM(config=resolved.config)

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Answering:
        """Answer a conversation."""
        return self.llm.chat(messages, stream=True, **sampling)

    def generate(self, prompt: str, **sampling: Any) -> Answering:
        """Continue a text."""
        return self.llm.generate(prompt, stream=True, **sampling)


@contextmanager
def source(resolved: Resolved, host: str | None) -> Iterator[AnswerSource]:
    """Yield a model in this process, or the server at `host`. Raises ConfigError for local options with `host`."""
    if host is None:
        if resolved.source("api_key").startswith("--"):
            raise ConfigError("--api-key is for a server; give --host too")
        local = _Local(resolved)
        try:
            yield local
        finally:
            local.llm.close()
        return
    refuse_local(resolved, "the server at --host")
    with server(resolved, host) as client:
        yield client


def refuse_local(resolved: Resolved, what: str) -> None:
    """Raise ConfigError if a flag was set that applies only to a model in this process."""
    for option in options():
        if option.name in local_options() and resolved.source(option.name) == option.flag and option.name != "model":
            raise ConfigError(f"{option.flag} is for a model in this process; {what} has its own")
