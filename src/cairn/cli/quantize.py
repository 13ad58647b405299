"""`cairn quantize`: write a model as a GGUF file of another number format."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.types.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from cairn.models.packing.gguf_writer import Loss


def register(app: typer.Typer) -> None:
    """Add `cairn quantize`."""

    @app.command(rich_help_panel="Models")
    def quantize(
        source: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a .gguf file, or a pulled model.")],
        destination: Annotated[Path, typer.Argument(metavar="DST", help="The .gguf file to write.")],
        kind: Annotated[
            str, typer.Option("--type", metavar="TYPE", help="F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0.")
        ] = "Q8_0",
        force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    ) -> None:
        """Write a model as one GGUF file, with tokenizer and chat template, and list the rounding errors.

        Needs the gguf package: pip install gguf.
        """
        from rich.progress import Progress, TextColumn

        from cairn.cli.common.output import table, talk

        columns = TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:]
        with Progress(*columns, console=talk(), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task(destination.name, total=None)

            def show(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            losses = write(source, destination, kind, force=force, progress=show)
        rows = [
            (one.part, one.type, str(one.tensors), str(one.values), f"{one.error:.3%}", f"{one.worst:.3g}")
            for one in losses
        ]
        table(("tensors", "type", "count", "values", "error", "largest"), rows)
        size = destination.stat().st_size
        if sys.stderr.isatty():
            talk().print(f"{destination} has {size / 1e6:.1f} MB. Try: cairn chat {destination}", markup=False)


def write(
    source: str,
    destination: Path,
    kind: str,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Loss]:
    """Write `source` to `destination`, whole and checked or not at all; return rounding errors by tensor class.

    `progress` is called with the number of values written and the total.
    Raises `ConfigError` for a type or a path that cannot be written, `ModelError` or `ModelFileError` for a source
    that cannot be read or expressed in GGUF.
    """
    from cairn.models.files import is_gguf, parts
    from cairn.models.hub import hub
    from cairn.models.packing.gguf_writer import TYPES, check_written, package, write_gguf
    from cairn.models.spec.config import check_decodes, load_spec
    from cairn.text.chat.gguf_metadata import check_same, texts_of

    kind = kind.upper()
    if kind not in TYPES:
        raise ConfigError(f"--type must be one of {', '.join(TYPES)}, found {kind}")
    if not is_gguf(destination) or len(parts(destination.name)) != 1:
        raise ConfigError(f"{destination} must be the name of a .gguf file, and not of one part of a split file")
    if destination.exists() and not force:
        raise ConfigError(f"{destination} exists already; --force replaces it")
    package()
    folder = hub.locate(source)
    spec = check_decodes(load_spec(folder, identify=False))
    texts = {} if is_gguf(folder) else texts_of(folder, spec.vocab, spec.eos_ids)
    _clear(destination)
    fresh = destination.with_name(f".{destination.stem}.{os.getpid()}.gguf")
    try:
        losses = write_gguf(folder, spec, fresh, kind, texts, progress)
        check_written(spec, load_spec(fresh, identify=False))
        if not is_gguf(folder):
            check_same(folder, fresh)
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        if destination.exists() and not force:
            raise ConfigError(f"{destination} exists already; --force replaces it")
        fresh.replace(destination)
    except OSError as error:
        raise ModelError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        fresh.unlink(missing_ok=True)
    return losses


def _clear(destination: Path) -> None:
    """Remove temporary files for this destination that killed runs left: those of processes that no longer exist."""
    for path in destination.parent.glob(f".{glob.escape(destination.stem)}.*.gguf"):
        pid = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if not pid.isdecimal() or path.name != f".{destination.stem}.{pid}.gguf":
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                path.unlink()
        except (OSError, OverflowError):
            continue
