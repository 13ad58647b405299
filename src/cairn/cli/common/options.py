"""Command-line flags generated from `Config`, and `cairn config`, which shows every value and its source."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperOption

from cairn.cli.common.profiles import profiled
from cairn.cli.connection.trust import TRUST_PARAMETERS, TrustFlags
from cairn.cli.connection.trust import chosen as chosen_trust
from cairn.config.config import Config
from cairn.config.option import Option, local_options, options
from cairn.config.resolve import Resolved, resolve
from cairn.types.errors import CairnError, ConfigError
from cairn.types.request import SAMPLING_RANGES

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client

ALL = tuple(option.name for option in options() if option.name != "models")
"""Every option but `models`, which commands take as arguments."""
LOCAL = local_options()
"""Options of a model in this process, without a server."""

COMMON = frozenset(
    (
        "context", "kv_gb", "threads", "weights", "chat_template",
        "max_running", "kv_dir", "kv_disk_gb", "agents_dir", "models_dir", "served_name",
        "host", "port", "api_key", "admin_key", "unsafe_no_auth", "cors_origins", "tls_cert", "tls_key", "log_level",
        "max_tokens", "temperature", "top_p", "seed", "stop",
    )
)  # fmt: skip
"""The options that `--help` shows; `--help-all` shows all."""
_OF_SERVERS = frozenset(("max_running", "kv_dir", "kv_disk_gb", "chat_template"))
"""The options of COMMON that only the help of `cairn serve` shows."""
WIDEST = 24
"""Characters of the widest list of choices that stands beside its flag."""
FEW = 12
"""The most generated flags of a command whose `--help` shows all of them."""

Host = Annotated[str | None, typer.Option(metavar="URL", help="The server; default: the configured address and port.")]
"""The flag of commands that need a running server."""

_METAVARS = {
    "int": "N",
    "float": "X",
    "str": "TEXT",
    "secret": "KEY",
    "bool": "",
    "tenant": "NAME=KEY",
    "model": "MODEL",
    "adapter": "NAME=PATH",
}

Command = Callable[..., None]


def server(resolved: Resolved, host: str | None, model: str = "") -> Client:
    """Return a client of the server that `--host` or the configuration names, for a `with`; see `connect`."""
    from cairn.cli.connection.client import connect

    return connect(resolved, host, model)


def configured(
    names: Sequence[str],
    *,
    model: bool = True,
    several: bool = False,
    more: Sequence[inspect.Parameter] = (),
) -> Callable[[Command], Command]:
    """Decorate a command: add the named options as flags, `--config`, and with `model` the argument MODEL.

    MODEL is optional, and may be repeated if `several`. The command is called with a `Resolved`, then its own
    arguments. Parameters in `more` that were set are passed as the dictionary `sampling`.
    """

    def wrap(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        known = {option.name: option for option in options()}
        flags = [_parameter(known[name]) for name in names if name != "model"]
        first = [_model_parameter(known["model"], several)] if model else []
        extra = [parameter.name for parameter in more]
        own = [parameter for parameter in own if parameter.name != "sampling"]
        of_config = [parameter.name for parameter in first + flags]
        known_flags = [*more, *flags]
        few = len(known_flags) <= FEW
        shown = COMMON if "port" in names else COMMON - _OF_SERVERS
        known_flags = [flag if few or flag.name in shown else _hidden(flag) for flag in known_flags]
        trust = TRUST_PARAMETERS if any(parameter.name == "host" for parameter in own) else ()
        all_help = [] if few else [_keyword("help_all", _HELP_ALL, False)]
        generated = [*first, *own, *known_flags, *trust, _config_parameter(), *all_help]

        def run(**values: Any) -> None:
            chosen = {name: values.pop(name) for name in of_config}
            values.pop("help_all", None)
            if several and (models := chosen.pop("model")):
                chosen |= {"models": models} if len(models) > 1 else {"model": models[0]}
            if more:
                sampling = {name: values.pop(name) for name in extra}
                values["sampling"] = {name: value for name, value in sampling.items() if value not in (None, [])}
                _check_ranges(values["sampling"])
            if trust:
                chosen_trust.set(TrustFlags(values.pop("cacert"), values.pop("insecure")))
            resolved = resolve(chosen, file=values.pop("config_file"))
            command(profiled(resolved) if "profile" in names else resolved, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in generated]
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in generated}
        return run

    return wrap


def _check_ranges(sampling: Mapping[str, Any]) -> None:
    """Raise ConfigError for a sampling flag that is out of range."""
    for name, (least, most) in SAMPLING_RANGES.items():
        if name in sampling and not least <= sampling[name] <= most:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {sampling[name]} but must be from {least:g} to {most:g}", field=name)


def _show_all(context: typer.Context, wanted: bool) -> None:
    """Show the help with every option, and exit."""
    if not wanted:
        return
    for parameter in context.command.params:
        if isinstance(parameter, TyperOption):
            parameter.hidden = False
    print(context.get_help(), end="")
    raise typer.Exit


_HELP_ALL = Annotated[
    bool, typer.Option("--help-all", help="Show every option and exit.", is_eager=True, callback=_show_all)
]


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a copy of the flag that `--help` leaves out."""
    kind, info = get_args(parameter.annotation)
    info = copy.copy(info)
    info.hidden = True
    return parameter.replace(annotation=Annotated[kind, info])


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = bool if option.kind == "bool" else list[str] if option.many else str
    names = f"{option.flag}/--no-{option.flag[2:]}" if option.kind == "bool" else option.flag
    # A list of choices that is wider than this would be broken anywhere, and leave no room for the help beside it.
    listed = "|".join(option.choices)
    metavar = ("NAME" if len(listed) > WIDEST else listed) or _METAVARS[option.kind]
    info = typer.Option(
        names, help=_help(option), rich_help_panel=option.panel, metavar=metavar or None, show_default=False
    )
    return _keyword(option.name, Annotated[kind | None, info], None)


def _help(option: Option) -> str:
    choices = f"one of {', '.join(option.choices)}" if len("|".join(option.choices)) > WIDEST else ""
    notes = [note for note in (choices, option.limits, _default(option)) if note]
    text = option.help.replace("[", r"\[")
    return f"{text} [dim]({'; '.join(notes)})[/dim]" if notes else text


def _default(option: Option) -> str:
    return "" if option.default in (None, (), False) else f"default {_shown(option.default)}"


def _model_parameter(option: Option, several: bool) -> inspect.Parameter:
    more = " With several, requests choose by name." if several else ""
    info = typer.Argument(metavar="MODEL", help=_help(option) + more, show_default=False)
    kind: Any = list[str] if several else str
    return _keyword("model", Annotated[kind | None, info], None)


def _config_parameter() -> inspect.Parameter:
    text = "File of options; default: ./cairn.toml, else ~/.config/cairn/cairn.toml."
    return _keyword("config_file", Annotated[Path | None, typer.Option("--config", metavar="FILE", help=text)], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shown(value: object) -> str:
    """Format a value for people; a `Secret` stays hidden."""
    if isinstance(value, tuple):
        return ", ".join(_shown(item) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def register(app: typer.Typer) -> None:
    """Add `cairn config`."""

    @app.command(name="config", rich_help_panel="This machine")
    @configured(ALL)
    def config(resolved: Resolved) -> None:
        """Show every option's value, the model's sampling defaults, and where each comes from. Keys are never shown."""
        from cairn.cli.common.output import table

        rows = []
        for option in options():
            value: Any = getattr(resolved.config, option.name)
            shown = "not set" if value is None and option.kind == "secret" else _shown(value)
            rows.append((option.name, shown, resolved.source(option.name)))
        table(("option", "value", "from"), [*rows, *_sampling(resolved.config)])


def _sampling(config: Config) -> list[tuple[str, str, str]]:
    """Return the sampling defaults as rows, or one row that says why the model cannot be read."""
    from cairn.frontend.sampling_defaults import sampling_defaults, with_options
    from cairn.models.files import is_gguf
    from cairn.models.hub import hub
    from cairn.models.spec.config import load_spec

    try:
        place = hub.locate(config.model)
        spec = with_options(load_spec(place, identify=False), config)
    except CairnError as error:
        return [("sampling", "not known", str(error))]
    sources = {"model": place.name if is_gguf(place) else "generation_config.json", "default": "default"}
    sources["option"] = "options"
    if spec.makers is not None:
        sources["makers"] = f"{spec.makers.source}, read {spec.makers.read}"
    rows = [("", sampling_defaults(spec))]
    if rows[0][1] != (thinking := sampling_defaults(spec, thinking=True)):
        rows.append((" with reasoning", thinking))
    return [
        (f"sampling.{name}{when}", _shown(value), sources[source])
        for when, defaults in rows
        for name, (value, source) in defaults.items()
    ]
