"""`cairn merge`: write a model with a LoRA adapter in its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.config.paths import expanded
from cairn.types.errors import ConfigError

if TYPE_CHECKING:
    from cairn.models.adapters.merge import Number


def register(app: typer.Typer) -> None:
    """Add `cairn merge`."""

    @app.command(rich_help_panel="Models")
    def merge(
        base: Annotated[str, typer.Argument(metavar="BASE", help="A folder of safetensors, or a pulled model.")],
        adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A PEFT folder or a .gguf adapter.")],
        out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The new folder to write.")],
        kind: Annotated[
            str, typer.Option("--type", metavar="TYPE", help="BF16 or F16; default: the base's own, or BF16.")
        ] = "",
    ) -> None:
        """Write a model with a LoRA adapter merged into its weights, as a folder of safetensors."""
        from rich.progress import Progress, TextColumn

        from cairn.cli.common.output import talk
        from cairn.models.adapters.merge import NUMBERS
        from cairn.models.adapters.merge import merge as write
        from cairn.models.hub import hub

        kind = kind.upper()
        if kind and kind not in NUMBERS:
            raise ConfigError(f"--type must be one of {', '.join(NUMBERS)}, found {kind}")
        number: Number | None = "BF16" if kind == "BF16" else "F16" if kind else None
        columns = TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:]
        with Progress(*columns, console=talk(), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task(out.name, total=None)
            size = write(
                hub.locate(base),
                expanded(adapter),
                out,
                number,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        print(f"{out} has {size / 1e6:.1f} MB of weights")
