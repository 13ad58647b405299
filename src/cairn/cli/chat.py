"""`cairn chat` and `cairn run`: talk in the terminal, or answer one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cairn.cli.answer_source import Reached, answers
from cairn.cli.common.options import LOCAL, configured, server
from cairn.cli.common.output import talk
from cairn.cli.common.sampling import refuse_local, sampling_parameters
from cairn.cli.generate import FORMAT, PROMPT, SYSTEM, formatted, one_answer, one_prompt
from cairn.config.resolve import Resolved
from cairn.models.hub.hub import DEMO
from cairn.types.errors import ConfigError

if TYPE_CHECKING:
    from cairn.cli.conversation.saved_chats import SavedChat

BUNDLED = """\
It is the small model that comes with Cairn: ask it what Cairn is, or tell it your name.
For a larger one: cairn run smollm2, or cairn run qwen3:0.6b"""

NO_LOOPS = {"repetition_stop": True}
"""Ends answers that repeat themselves: in a terminal they would scroll by for minutes."""

_Host = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Talk to this server; default: the one on this machine, if one runs."),
]
_Local = Annotated[bool, typer.Option("--local", help="Load a model in this process even if a server runs.")]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Show the times and rates of each answer.")]
_Plain = Annotated[bool, typer.Option("--plain", help="Write answers as they are, without rendering Markdown.")]
_Keepalive = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="How long a server of several models keeps this one: 10m, 0, or -1 (for ever)."),
]


def register(app: typer.Typer) -> None:
    """Add `cairn chat` and `cairn run`."""

    @app.command(rich_help_panel="Run a model")
    @configured((*LOCAL, "api_key"), more=sampling_parameters())
    def chat(
        resolved: Resolved,
        prompt: PROMPT = None,
        system: SYSTEM = None,
        host: _Host = None,
        local: _Local = False,
        agent: Annotated[
            str | None,
            typer.Option(metavar="ID", help="Talk to this agent of a running server; it is created if missing."),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue the last chat; /chats lists others.")] = False,
        verbose: _Verbose = False,
        plain: _Plain = False,
        form: FORMAT = None,
        keepalive: _Keepalive = None,
        *,
        sampling: dict[str, Any],
    ) -> None:
        """Talk with this machine's server, or load a model if none runs. Ctrl-C stops an answer; /? lists commands.

        A named MODEL is used from the server if it has it, and loaded here otherwise. From a pipe, each line is a
        question. With PROMPT, answer it and exit.
        """
        sampling |= formatted(form) | NO_LOOPS
        if agent is not None:
            if local or resume or prompt is not None:
                other = "--local" if local else "--resume" if resume else "PROMPT"
                raise ConfigError(f"--agent talks with an agent of a server; it cannot be used with {other}")
            _talk_to_agent(resolved, host, agent, sampling, system, verbose, plain)
            return
        kept = _last_chat() if resume else None
        if kept is not None and resolved.source("model") == "default" and kept.model:
            resolved = _with_model(resolved, kept.model)
        with answers(resolved, host, local, keepalive=keepalive) as found:
            if prompt is None:
                talk_with(found, sampling, system, verbose=verbose, plain=plain, kept=kept)
            else:
                _answer(found, one_prompt(prompt) or prompt, system, sampling, verbose, plain)

    @app.command(rich_help_panel="Run a model")
    @configured((*LOCAL, "api_key"), more=sampling_parameters())
    def run(
        resolved: Resolved,
        prompt: PROMPT = None,
        system: SYSTEM = None,
        host: _Host = None,
        local: _Local = False,
        verbose: _Verbose = False,
        plain: _Plain = False,
        form: FORMAT = None,
        keepalive: _Keepalive = None,
        *,
        sampling: dict[str, Any],
    ) -> None:
        """Answer PROMPT or text from a pipe; with neither, talk as `cairn chat` does.

        A model that is not on this machine is pulled first. Text from a pipe is appended to PROMPT.
        """
        from cairn.cli.models import pull_missing

        sampling |= formatted(form) | NO_LOOPS
        text = one_prompt(prompt)
        with answers(resolved, host, local, pull_missing, keepalive) as found:
            if text is None:
                talk_with(found, sampling, system, verbose=verbose, plain=plain)
            else:
                _answer(found, text, system, sampling, verbose, plain)


def talk_with(
    found: Reached,
    sampling: dict[str, Any],
    system: str | None,
    *,
    verbose: bool = False,
    plain: bool = False,
    kept: SavedChat | None = None,
) -> None:
    """Print who answers, then run the conversation."""
    from cairn.cli.conversation.conversation import Conversation, Setting, chats_of_terminal
    from cairn.cli.conversation.saved_chats import chats_folder

    talk().print(f"{found.name} is ready. /? lists the commands, Ctrl-D leaves.", style="dim", markup=False)
    if found.model == DEMO:
        talk().print(BUNDLED, style="dim", markup=False)
    setting = Setting(
        name=found.asked,
        context=found.context,
        describe=found.describe,
        chats=chats_of_terminal(chats_folder()),
        markdown=not plain,
        verbose=verbose,
    )
    conversation = Conversation(found.source, sampling, system, setting)
    if kept is not None:
        conversation.resume(kept)
    conversation.run()


def _answer(
    found: Reached, prompt: str, system: str | None, sampling: dict[str, Any], verbose: bool, plain: bool
) -> None:
    """Print the answer to one prompt, rendered as Markdown on a terminal."""
    from cairn.cli.conversation.markdown_view import view_of_terminal

    view = view_of_terminal(not plain)
    one_answer(found.source, prompt, system, sampling, stream=True, view=view, verbose=verbose)


def _last_chat() -> SavedChat:
    from cairn.cli.conversation.saved_chats import SavedChats, chats_folder

    folder = chats_folder()
    found = SavedChats(folder).newest(1)
    if not found:
        raise ConfigError(f"there is no chat to continue in {folder}, where chats in a terminal are saved")
    return found[0]


def _with_model(resolved: Resolved, model: str) -> Resolved:
    """Return the options as if MODEL had been given, to continue a chat with its own model."""
    config = msgspec.structs.replace(resolved.config, model=model)
    return msgspec.structs.replace(resolved, config=config, sources={**resolved.sources, "model": "MODEL"})


def _talk_to_agent(
    resolved: Resolved,
    host: str | None,
    agent: str,
    sampling: dict[str, Any],
    system: str | None,
    verbose: bool,
    plain: bool,
) -> None:
    from cairn.cli.conversation.agent_conversation import AgentConversation
    from cairn.cli.conversation.conversation import Setting

    refuse_local(resolved, "the server that has the agent")
    with server(resolved, host) as client:
        AgentConversation(client, agent, sampling, system, Setting(markdown=not plain, verbose=verbose)).run()
