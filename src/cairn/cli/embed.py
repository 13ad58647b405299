"""`cairn embed`: vectors of texts, a line of JSON each, for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer

from cairn.cli.options import LOCAL, configured
from cairn.config.resolve import Resolved
from cairn.types.errors import InvalidRequest

TOGETHER = 256
"""Texts that are computed before the first of them is written."""


def register(app: typer.Typer) -> None:
    """Add `cairn embed`."""

    @app.command(rich_help_panel="Run a model")
    @configured(LOCAL)
    def embed(
        resolved: Resolved,
        text: Annotated[
            list[str] | None,
            typer.Option("--text", "-t", metavar="TEXT", help="A text; may be given several times. None: stdin."),
        ] = None,
        dimensions: Annotated[int | None, typer.Option(metavar="N", help="Only the first so many numbers.")] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help="Cut a text that is longer than the model takes.")
        ] = False,
        normalize: Annotated[
            bool, typer.Option("--normalize/--no-normalize", help="Whether vectors have length 1.")
        ] = True,
        prompt_name: Annotated[
            str | None, typer.Option(metavar="NAME", help="Which of the model's own words stand before texts.")
        ] = None,
    ) -> None:
        """Write the embedding of each text, or of each line of stdin, as a line of JSON: {"text", "embedding"}."""
        from cairn.entrypoints.llm import LLM

        with LLM(config=resolved.config) as model:
            texts = iter(text or _lines())
            while some := list(islice(texts, TOGETHER)):
                made = model.embed(
                    some, truncate=truncate, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name
                )
                for one, vector in zip(some, made.tolist(), strict=True):
                    print(json.dumps({"text": one, "embedding": vector}, ensure_ascii=False))
                sys.stdout.flush()


def _lines() -> Iterator[str]:
    """The lines of stdin that are not empty."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"line {number} of stdin is not UTF-8: {error}", field="text") from None
        if text:
            yield text
