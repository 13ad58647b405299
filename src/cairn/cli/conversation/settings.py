"""Settings that `/set` changes in a conversation, by Cairn's and Ollama's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.cli.common.sampling import FLAGS
from cairn.config.option import SAMPLING_NAMES, closest
from cairn.types.errors import ConfigError
from cairn.types.request import SAMPLING_RANGES

_OF_THE_SERVER = {
    "num_ctx": "the context is set where the model is loaded: --context N",
    "num_gpu": "the device is set where the model is loaded: --device NAME",
    "num_thread": "threads are set where the model is loaded: --threads N",
}
HELP = """\
/set system TEXT              the system prompt
/set NAME VALUE               sampling: {names}
/set NAME default             what applied before it was set
/set format json | FILE       answers in JSON, or in JSON that fits the schema in a file; /set noformat ends that
/set verbose, /set quiet      more figures after each answer, or none
/set markdown, nomarkdown     whether to render answers
/set history, nohistory       whether to save the chat, and questions for the Up key"""


@dataclass(slots=True)
class Settings:
    """Settings of how answers are sampled and shown."""

    sampling: dict[str, Any]
    verbose: bool = False
    quiet: bool = False
    """Whether figures after answers are left out."""
    markdown: bool = True
    history: bool = True
    words: dict[str, Callable[[Settings], None]] = field(default_factory=dict)
    _before: dict[str, Any] = field(default_factory=dict)
    """The sampling that the command was started with."""

    def __post_init__(self) -> None:
        self._before = dict(self.sampling)
        self.words = {
            "verbose": lambda one: one._show(verbose=True),
            "quiet": lambda one: one._show(quiet=True),
            "noverbose": lambda one: one._show(),
            "markdown": lambda one: setattr(one, "markdown", True),
            "nomarkdown": lambda one: setattr(one, "markdown", False),
            "wordwrap": lambda one: setattr(one, "markdown", True),
            "nowordwrap": lambda one: setattr(one, "markdown", False),
            "history": lambda one: setattr(one, "history", True),
            "nohistory": lambda one: setattr(one, "history", False),
            "noformat": lambda one: one.sampling.pop("response_format", None) and None,
        }

    def _show(self, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose, self.quiet = verbose, quiet

    def change(self, text: str) -> str:
        """Apply the text after `/set`; return a confirmation. Raises ConfigError for an unknown name or a bad value."""
        name, _, value = text.partition(" ")
        value = value.strip()
        if name == "parameter":  # Ollama's form: /set parameter NAME VALUE
            name, _, value = value.partition(" ")
            value = value.strip()
        if name in self.words and not value:
            self.words[name](self)
            return f"({name})"
        if name == "format":
            self.sampling["response_format"] = response_format(value)
            return f"(answers are {value or 'json'})"
        name = SAMPLING_NAMES.get(name, name)
        if name in _OF_THE_SERVER:
            raise ConfigError(f"{name} cannot be set in a conversation: {_OF_THE_SERVER[name]}")
        if name not in FLAGS:
            known = [*FLAGS, *self.words, "system", "format"]
            raise ConfigError(f"there is no setting {name}; /set alone lists all{closest(name, known)}")
        if not value:
            raise ConfigError(f"/set {name} needs a value: {FLAGS[name][2]} /set {name} default takes it back.")
        if value == "default":
            self.sampling.pop(name, None)
            self.sampling |= {name: self._before[name]} if name in self._before else {}
            return f"({name}: {self.sampling.get(name, 'default')})"
        self.sampling[name] = _value(name, value)
        return f"({name}: {value})"


def _value(name: str, text: str) -> Any:
    """Parse the value of a sampling option. Raises ConfigError if it is not a number or out of range."""
    kind = FLAGS[name][0]
    if kind not in (int, float):
        return [text]
    try:
        number = kind(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} but must be {'a whole number' if kind is int else 'a number'}") from None
    least, most = SAMPLING_RANGES.get(name, (-(1 << 63), 1 << 63))
    if not least <= number <= most:
        raise ConfigError(f"{name} is {text} but must be from {least:g} to {most:g}")
    return number


def response_format(asked: str) -> dict[str, Any]:
    """Return `response_format` for "json", a JSON schema, or the path of one. Raises ConfigError."""
    if asked in ("", "json"):
        return {"type": "json_object"}
    if asked.lstrip().startswith("{"):
        return _schema(asked, "answer", "--format")
    return schema_in(Path(asked), "--format")


def schema_in(path: Path, option: str) -> dict[str, Any]:
    """Return `response_format` for the JSON schema in a file. Raises ConfigError that names the option."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: cannot be read as JSON ({error})", field="json_schema") from None
    return _schema(text, path.stem[:64] or "answer", f"{option} {path}")


def _schema(text: str, name: str, where: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cannot be read as JSON ({error})", field="json_schema") from None
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def help_of_set() -> str:
    """Return the list of settings, one per line."""
    return HELP.format(names=", ".join(FLAGS))
