"""`cairn chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.cli.answer_source import Reached, answers
from cairn.cli.options import LOCAL, configured, server
from cairn.cli.output import printable, talk
from cairn.cli.sampling import Answering, AnswerSource, refuse_local, sampling_parameters
from cairn.config.option import closest
from cairn.config.paths import expanded
from cairn.config.resolve import Resolved
from cairn.models.hub.hub import DEMO
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from cairn.entrypoints.answer import Answer

BUNDLED = """\
It is the small model that comes with Cairn: ask it what Cairn is, or tell it your name.
For a larger one: cairn pull Qwen/Qwen3-0.6B, then cairn chat Qwen/Qwen3-0.6B"""

_Host = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Talk to this server; default: the one on this machine, if one runs."),
]
_Local = Annotated[bool, typer.Option("--local", help="Load a model here even where a server runs.")]

HELP = """\
/help          this list
/system TEXT   what the model is told before everything; alone: show it
/undo          take back the last question and its answer
/clear         start over (the system text stays)
/save FILE     write the conversation as JSON
/exit          leave; Ctrl-D does too

Ctrl-C stops an answer; what was said of it stays. A line that ends in \\ goes on in the next."""


def register(app: typer.Typer) -> None:
    """Add `cairn chat`."""

    @app.command(rich_help_panel="Run a model")
    @configured((*LOCAL, "api_key"), more=sampling_parameters())
    def chat(
        resolved: Resolved,
        system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told first.")] = None,
        host: _Host = None,
        local: _Local = False,
        agent: Annotated[
            str | None,
            typer.Option(metavar="ID", help="Talk to this agent of a running server; it is made if there is none."),
        ] = None,
        *,
        sampling: dict[str, Any],
    ) -> None:
        """Talk with the server that runs here, or a model that is loaded. Ctrl-C stops an answer; /help lists commands.

        A model that is named is asked of that server if it has it.
        """
        if agent is not None:
            if local:
                raise ConfigError("--agent is for a server; --local loads a model in this process")
            _talk_to_agent(resolved, host, agent, sampling, system)
            return
        with answers(resolved, host, local) as found:
            talk_with(found, sampling, system)

    @app.command(rich_help_panel="Run a model")
    @configured((*LOCAL, "api_key"), more=sampling_parameters())
    def run(
        resolved: Resolved,
        prompt: Annotated[
            str | None, typer.Argument(metavar="PROMPT", help="Answer this and leave.", show_default=False)
        ] = None,
        system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told first.")] = None,
        host: _Host = None,
        local: _Local = False,
        *,
        sampling: dict[str, Any],
    ) -> None:
        """Talk with a model as `chat` does; one of the hub that is not on this machine is pulled first."""
        from cairn.cli.generate import one_answer
        from cairn.cli.models import pull_missing

        with answers(resolved, host, local, pull_missing) as found:
            if prompt is None:
                talk_with(found, sampling, system)
            else:
                one_answer(found.source, prompt, system, sampling, stream=True)


def talk_with(found: Reached, sampling: dict[str, Any], system: str | None) -> None:
    """The conversation, behind a line that says with whom."""
    talk().print(f"{found.name} is ready. /help lists the commands, Ctrl-D leaves.", style="dim", markup=False)
    if found.model == DEMO:
        talk().print(BUNDLED, style="dim", markup=False)
    Conversation(found.source, sampling, system).run()


def _talk_to_agent(
    resolved: Resolved, host: str | None, agent: str, sampling: dict[str, Any], system: str | None
) -> None:
    from cairn.cli.agent_chat import AgentConversation

    refuse_local(resolved, "the server that has the agent")
    with server(resolved, host) as client:
        AgentConversation(client, agent, sampling, system).run()


class Conversation:
    """The messages so far, and the loop that reads lines and answers them."""

    def __init__(self, model: AnswerSource, sampling: dict[str, Any], system: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.system = system
        self._model = model
        self._sampling = sampling
        self._talk = talk()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(HELP),
            "/clear": self._clear,
            "/system": self._system,
            "/save": self._save,
            "/undo": self._undo,
        }

    def run(self) -> None:
        """Until /exit or the end of input."""
        if isinstance(sys.stdin, io.TextIOWrapper):  # a line of other bytes is no reason to lose what was said
            sys.stdin.reconfigure(errors="surrogateescape")
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` line editing and history)
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                self._say("\n(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                return
            word = line.split(maxsplit=1)[0] if line.strip() else ""
            if word in ("/exit", "/quit"):
                return
            try:
                if word.startswith("/"):
                    self._command(word, line.strip()[len(word) :].strip())
                elif word:
                    self.ask(line)
            except KeyboardInterrupt:  # not in the middle of an answer, or once more
                self._say("(stopped)")

    def ask(self, question: str) -> None:
        """Answer one question on the terminal and remember both; a failed one is forgotten."""
        asked = {"role": "user", "content": question.encode("utf-8", "replace").decode()}
        first = [{"role": "system", "content": self.system}] if self.system else []
        started = time.monotonic()
        answering: Answering | None = None
        try:
            answering = self._model.chat([*first, *self.messages, asked], **self._sampling)
            stopped = self._show(answering)
        except KeyboardInterrupt:
            stopped = True
        except CairnError as error:
            self._lost(error)
            return
        finally:
            if answering is not None:
                answering.close()
        answer = answering.answer if answering is not None else None
        if answer is None or not (answer.text or answer.reasoning or answer.tool_calls):
            self._say("(nothing was said; your question was taken back)")
            return
        self.messages += [asked, answer.message]
        self._say(_summary(answer, time.monotonic() - started, stopped))

    def _lost(self, error: CairnError) -> None:
        """No answer, or half of one: the question is not remembered."""
        self._say(f"{error}\n(your question was taken back)")

    def _show(self, answering: Answering) -> bool:
        """Write the pieces as they come; whether Ctrl-C ended that."""
        thought, last = False, ""
        waiting = self._talk.status("thinking")
        if self._talk.is_terminal:
            waiting.start()
        try:
            for piece in answering:
                waiting.stop()
                if piece.reasoning:
                    self._talk.print(printable(piece.reasoning), end="", style="dim italic", markup=False)
                    thought = True
                if piece.text:
                    if thought:
                        self._say("\n")
                    sys.stdout.write(printable(piece.text))
                    sys.stdout.flush()
                    thought, last = False, piece.text
        except KeyboardInterrupt:
            return True
        finally:
            waiting.stop()
            if last and not last.endswith("\n"):
                print(flush=True)
        for call in answering.answer.tool_calls:
            print(printable(f"{call.name}({call.arguments})"))
        return False

    def _read(self) -> str:
        """One line; a backslash at its end goes on in the next. EOFError at the end of input."""
        lines: list[str] = []
        prompt = "> " if sys.stdin.isatty() else ""
        if prompt:
            self._say("")
        while True:
            line = self._line(prompt)
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
            prompt = ". " if prompt else ""

    @staticmethod
    def _line(prompt: str) -> str:
        if prompt and not sys.stdout.isatty():  # where `input` would write it among the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        return input(prompt)

    def _command(self, word: str, text: str) -> None:
        command = self._commands.get(word)
        if command is None:
            self._say(f"unknown command {word}{closest(word, [*self._commands, '/exit'])}")
            return
        try:
            command(text)
        except CairnError as error:
            self._say(str(error))

    def _clear(self, _: str) -> None:
        self.messages.clear()
        self._say("(a new conversation)")

    def _system(self, text: str) -> None:
        if text:
            self.system = text
        self._say(f"system: {self.system or '(none)'}")

    def _undo(self, _: str) -> None:
        if not self.messages:
            self._say("(there is nothing to take back)")
            return
        taken = self.messages[-2]["content"]
        del self.messages[-2:]
        self._say(f"(took back: {taken})")

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save needs the name of a file")
            return
        first = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps([*first, *self.messages], ensure_ascii=False, indent=2) + "\n"
        try:
            with expanded(name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._say(f"{name} exists already; give another name")
        except (OSError, ValueError) as error:
            self._say(f"{name} cannot be written: {getattr(error, 'strerror', None) or error}")
        else:
            self._say(f"(saved {len(self.messages)} messages to {name})")

    def _say(self, text: str) -> None:
        self._talk.print(printable(text), style="dim", markup=False, soft_wrap=True)


def _summary(answer: Answer, seconds: float, stopped: bool) -> str:
    """What the last answer cost, in a line."""
    parts = ["stopped"] if stopped else []
    if answer.finish_reason == "length":
        parts.append("cut at the token limit")
    usage = answer.usage
    if usage is not None:
        parts.append(f"{usage.completion_tokens} tokens in {seconds:.1f} s")
        read = f", {answer.cache.disk} read from disk" if answer.cache is not None and answer.cache.disk else ""
        parts.append(f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} of them already computed{read}")
    return f"({'; '.join(parts)})" if parts else ""
