"""`cairn generate`: one answer, for scripts. Stdout is the answer's text and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cairn.cli.options import LOCAL, configured
from cairn.cli.sampling import Answering, AnswerSource, sampling_parameters, source
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, InvalidRequest
from cairn.types.outputs import FinishReason


def register(app: typer.Typer) -> None:
    """Add `cairn generate`."""

    @app.command(rich_help_panel="Run a model")
    @configured((*LOCAL, "api_key"), more=sampling_parameters())
    def generate(
        resolved: Resolved,
        prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The question; - reads stdin.")],
        system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before it.")] = None,
        raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
        parse_special: Annotated[
            bool,
            typer.Option(
                "--parse-special/--no-parse-special",
                help="With --raw: whether control tokens written in the text, such as <|im_end|>, are control tokens.",
            ),
        ] = True,
        stream: Annotated[bool, typer.Option("--stream", help="Write the answer while it is made.")] = False,
        json_schema: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Answer with JSON that fits the JSON schema in this file.")
        ] = None,
        host: Annotated[
            str | None, typer.Option(metavar="URL", help="Ask this running server; otherwise the model runs here.")
        ] = None,
        *,
        sampling: dict[str, Any],
    ) -> None:
        """Answer one prompt and leave. Ctrl-C writes what there is of the answer."""
        text = _stdin() if prompt == "-" else prompt
        if raw and system is not None:
            raise InvalidRequest("--system needs the chat template, which --raw leaves out", field="system")
        if not raw and not parse_special:
            raise InvalidRequest("--no-parse-special is for --raw; a chat never reads control tokens from its texts")
        if json_schema is not None:
            sampling["response_format"] = _schema(json_schema)
        with source(resolved, host) as model:
            if raw:
                more = {} if parse_special else {"parse_special": False}
                write(model.generate(text, **sampling, **more), stream)
            else:
                one_answer(model, text.removesuffix("\n"), system, sampling, stream)


def _schema(path: Path) -> dict[str, Any]:
    """The form of an answer from a file with a JSON schema. InvalidRequest names the option."""
    try:
        schema = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"--json-schema {path}: cannot be read as JSON ({error})", field="json_schema") from None
    return {"type": "json_schema", "json_schema": {"name": path.stem[:64] or "answer", "schema": schema}}


def one_answer(model: AnswerSource, prompt: str, system: str | None, sampling: dict[str, Any], stream: bool) -> None:
    """The answer to one question on stdout."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    write(_chat(model, [*messages, {"role": "user", "content": prompt}], sampling), stream)


def _chat(model: AnswerSource, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Answering:
    try:
        return model.chat(messages, **sampling)
    except CairnError as error:
        if error.field != "messages":
            raise
        raise InvalidRequest(f"{error}; with --raw the text is continued as it is", field="messages") from None


def write(answering: Answering, stream: bool) -> None:
    """The text of an answer on stdout, at once or as it comes; one newline at the end, never two.

    Why it ended is said on stderr, unless the model came to its end. An interrupt or an error still writes what there
    is, then goes on its way.
    """
    last = ""
    try:
        for piece in answering:
            if stream and piece.text:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                last = piece.text
    finally:
        if not stream:
            last = answering.answer.text
            sys.stdout.write(last)
        if last and not last.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        answering.close()
    reason = answering.answer.finish_reason
    if reason == FinishReason.LENGTH:
        print("(the answer was cut at the token limit: finish_reason length)", file=sys.stderr)
    elif reason not in (None, FinishReason.STOP):
        print(f"(the answer did not come to its end: finish_reason {reason})", file=sys.stderr)


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not UTF-8: {error}", field="prompt") from None
