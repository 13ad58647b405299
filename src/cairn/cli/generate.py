"""`cairn generate`: one answer, for scripts. Stdout carries the answer's text and nothing else.

The parts that `generate`, `run` and `chat` share are here too: the prompt as an argument, text from a pipe after it,
and the format of the answer.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.cli.common.options import LOCAL, configured
from cairn.cli.common.output import talk
from cairn.cli.common.sampling import Answering, AnswerSource, sampling_parameters, source
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError, InvalidRequest
from cairn.types.outputs import REPETITION, FinishReason

if TYPE_CHECKING:
    from cairn.cli.conversation.markdown_view import TextView

PROMPT = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The question; text from a pipe is appended to it.", show_default=False),
]
SYSTEM = Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")]
FORMAT = Annotated[
    str | None,
    typer.Option("--format", metavar="json|FILE", help="Answer in JSON, or in JSON that fits the schema in FILE."),
]
_PATIENCE = 1.0
"""Seconds of silence from a pipe before a message says that it is being read."""


def register(app: typer.Typer) -> None:
    """Add `cairn generate`."""

    @app.command(rich_help_panel="Run a model")
    @configured((*LOCAL, "api_key"), more=sampling_parameters())
    def generate(
        resolved: Resolved,
        prompt: PROMPT = None,
        text: Annotated[
            str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The same as PROMPT; - reads stdin.")
        ] = None,
        system: SYSTEM = None,
        raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")] = False,
        parse_special: Annotated[
            bool,
            typer.Option(
                "--parse-special/--no-parse-special",
                help="With --raw: whether text such as <|im_end|> is read as a control token.",
            ),
        ] = True,
        stream: Annotated[bool, typer.Option("--stream", help="Write the answer as it is generated.")] = False,
        form: FORMAT = None,
        json_schema: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as --format FILE.")] = None,
        host: Annotated[
            str | None, typer.Option(metavar="URL", help="Ask this running server; default: run the model here.")
        ] = None,
        *,
        sampling: dict[str, Any],
    ) -> None:
        """Answer one prompt and exit. Ctrl-C prints the answer so far."""
        if prompt is not None and text is not None:
            raise ConfigError("the prompt is given twice, as PROMPT and with --prompt; give one of them")
        asked = one_prompt(prompt if text is None else text)
        if asked is None:
            raise ConfigError("there is no prompt: cairn generate MODEL PROMPT, -p TEXT, or text from a pipe")
        if raw and system is not None:
            raise ConfigError("--system needs the chat template, which --raw leaves out", field="system")
        if not raw and not parse_special:
            raise ConfigError("--no-parse-special needs --raw; in a chat, control tokens in texts are always text")
        sampling |= formatted(form, json_schema)
        with source(resolved, host) as model:
            if raw:
                more = {} if parse_special else {"parse_special": False}
                write(model.generate(asked, **sampling, **more), stream)
            else:
                one_answer(model, asked, system, sampling, stream)


def one_prompt(prompt: str | None) -> str | None:
    """Return the prompt followed by text from a pipe, or whichever is there; None for neither.

    `-` stands for the text from the pipe alone. InvalidRequest for text that is not UTF-8.
    """
    piped = _piped(wanted=prompt == "-")
    if prompt is None or prompt == "-":
        return piped if piped or prompt == "-" else None
    return f"{prompt}\n\n{piped}" if piped and piped.strip() else prompt


def _piped(wanted: bool) -> str | None:
    """Return the text of stdin if it is a pipe or a file, else None; `wanted` reads it in any case."""
    if not wanted and not _is_piped():
        return None
    _announce_waiting()
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not UTF-8: {error}", field="prompt") from None


def _is_piped() -> bool:
    """Return whether stdin is a pipe or a file, not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except io.UnsupportedOperation:  # a stream in memory
        return True
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _announce_waiting() -> None:
    """Say that stdin is being read if nothing comes: the program at its other end may never close the pipe."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], _PATIENCE)
    except (OSError, ValueError):
        return
    if not ready:
        talk().print("(reading text from stdin; to read none, add </dev/null)", style="dim", markup=False)


def formatted(form: str | None, schema: Path | None = None) -> dict[str, Any]:
    """Return the sampling option `response_format` if a format was set. ConfigError for a file without JSON."""
    from cairn.cli.conversation.settings import response_format, schema_in

    if schema is not None:
        return {"response_format": schema_in(schema, "--json-schema")}
    return {} if form is None else {"response_format": response_format(form)}


def one_answer(
    model: AnswerSource,
    prompt: str,
    system: str | None,
    sampling: dict[str, Any],
    stream: bool,
    *,
    view: TextView | None = None,
    verbose: bool = False,
) -> None:
    """Print the answer to one question on stdout. `view` shows the text; default: plain text."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    started = time.monotonic()
    answering = _chat(model, [*messages, {"role": "user", "content": prompt.removesuffix("\n")}], sampling)
    first_at = write(answering, stream, view)
    if verbose:
        from cairn.cli.conversation.conversation import figures

        lines = figures(answering.answer, started, first_at, time.monotonic())
        talk().print(lines, style="dim", markup=False, highlight=False)


def _chat(model: AnswerSource, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Answering:
    try:
        return model.chat(messages, **sampling)
    except CairnError as error:
        if error.field != "messages":
            raise
        raise InvalidRequest(f"{error}; --raw continues the text without one", field="messages") from None


def write(answering: Answering, stream: bool, view: TextView | None = None) -> float | None:
    """Write an answer's text to stdout, whole or streamed, with one newline at its end.

    Return the time of its first piece. If the model did not end the answer itself, stderr says why it ended. An
    interrupt or an error first writes the answer so far, then propagates.
    """
    from cairn.cli.conversation.markdown_view import PlainView

    view = view or PlainView(sys.stdout)
    first_at: float | None = None
    try:
        for piece in answering:
            first_at = first_at or time.monotonic()
            if stream and piece.text:
                view.push(piece.text)
    finally:
        if not stream:
            view.push(answering.answer.text)
        view.close()
        sys.stdout.flush()
        answering.close()
    answer = answering.answer
    if answer.finish_reason == FinishReason.LENGTH and answer.detail == REPETITION:
        print("(the answer was stopped because it repeated itself: finish_reason length)", file=sys.stderr)
    elif answer.finish_reason == FinishReason.LENGTH:
        print("(the answer was cut at the token limit: finish_reason length)", file=sys.stderr)
    elif answer.finish_reason not in (None, FinishReason.STOP):
        print(f"(the answer is not complete: finish_reason {answer.finish_reason})", file=sys.stderr)
    return first_at
