"""`cairn embed`: embeddings of texts, one line of JSON each, for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer

from cairn.cli.common.options import LOCAL, configured
from cairn.config.resolve import Resolved
from cairn.types.errors import ConfigError, InvalidRequest

TOGETHER = 256
"""Texts per batch; the results of a batch are printed together."""
_FLAGS = ("dimensions", "normalize", "prompt_name")
"""Fields of a request that are flags here: what is wrong with them is no failure of the texts."""


def register(app: typer.Typer) -> None:
    """Add `cairn embed`."""

    @app.command(rich_help_panel="Run a model")
    @configured(LOCAL)
    def embed(
        resolved: Resolved,
        text: Annotated[
            list[str] | None,
            typer.Option("--text", "-t", metavar="TEXT", help="A text; repeat for several. Default: lines of stdin."),
        ] = None,
        dimensions: Annotated[
            int | None, typer.Option(metavar="N", help="Keep only the first N numbers of each vector.")
        ] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help="Cut texts that are longer than the model takes.")
        ] = False,
        normalize: Annotated[
            bool, typer.Option("--normalize/--no-normalize", help="Whether to scale vectors to length 1.")
        ] = True,
        prompt_name: Annotated[
            str | None, typer.Option(metavar="NAME", help="The model's prompt to put before each text, such as query.")
        ] = None,
    ) -> None:
        """Print the embedding of each text, or of each line of stdin, as a line of JSON: {"text", "embedding"}."""
        from cairn.entrypoints.llm import LLM

        with LLM(config=resolved.config) as model:
            texts = iter(text or _lines())
            while some := list(islice(texts, TOGETHER)):
                try:
                    made = model.embed(
                        some, truncate=truncate, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name
                    )
                except InvalidRequest as error:
                    if error.field not in _FLAGS:
                        raise
                    raise ConfigError(str(error), field=error.field) from None
                for source, vector in zip(some, made.tolist(), strict=True):
                    print(json.dumps({"text": source, "embedding": vector}, ensure_ascii=False))
                sys.stdout.flush()


def _lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty. Raises InvalidRequest for a line that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"line {number} of stdin is not UTF-8: {error}", field="text") from None
        if text:
            yield text
