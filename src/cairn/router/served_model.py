"""One of the models that a server has: what it is called, where it lies, and whether it is loaded."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.config.config import Config, ModelOptions, turns_of
from cairn.config.paths import expanded
from cairn.frontend.launch import First, launch_first
from cairn.models.files import is_gguf, stem
from cairn.models.hub import hub
from cairn.router.fit import Fit, fit
from cairn.system.posix import SystemClock
from cairn.types.errors import CairnError, ConfigError, ModelError
from cairn.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from cairn.frontend.service import Service

log = logging.getLogger("cairn.api")

State = Literal["loaded", "loading", "unloading", "on disk", "failed"]
MOST_FOUND = 1000
"""How many models of a folder can be asked for."""
_DEMO = "demo"


class LoadedModel:
    """A model that is loaded now."""

    __slots__ = ("closing", "fit", "service", "since", "ttl", "used", "users")

    def __init__(self, service: Service, fit: Fit | None, now: float, ttl: float) -> None:
        self.service = service
        self.fit = fit
        """What memory it takes; None where nobody asked before it was loaded."""
        self.since = self.used = now
        self.ttl = ttl
        """Seconds without calls after which it is unloaded; infinite for never."""
        self.users = 0
        """Calls that have it now."""
        self.closing = False
        """It takes no new calls, and goes once those it has are over."""

    @property
    def idle(self) -> bool:
        """Whether nobody has it and nothing of it runs."""
        return self.users == 0 and not self.service.busy


class ServedModel:
    """A model by its names. `loaded` is what answers in them now, if anything does."""

    def __init__(self, config: Config, options: ModelOptions, *, found: bool = False) -> None:
        """`config`: of the server. `found`: in the folder of models, not named by an option."""
        self.config = config_of(config, options)
        """What it is loaded with."""
        self.own = frozenset(options.options)
        """The options that are of this model alone."""
        self.options = options
        """As the server's options have it; a swap changes nothing of them."""
        self.reference = options.model
        self.pinned, self.at_start, self.found = options.pin, options.load and not found, found
        self.ttl = (config.model_ttl if options.ttl is None else options.ttl) or math.inf
        self.share = options.kv_share
        self.part = 0.0
        """Its part of the bytes of stored KV, where several models share them."""
        last = options.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
        self.name = self.config.served_name or last or options.model
        """What clients call it: its own name, once that is known, unless an option gives another."""
        self.names: frozenset[str] = frozenset({self.name, *self.config.alias, *ends_of(options.model)})
        self.place: Path | None = None
        self.spec: ModelSpec | None = None
        """What its files say, once they were read."""
        self.identity = b""
        """Of what was loaded last."""
        self.loaded: LoadedModel | None = None
        self.loading: asyncio.Task[None] | None = None
        self.swapping: asyncio.Future[None] | None = None
        """Done when the swap that is under way has ended, well or not."""
        self.waiting = 0
        """Calls that wait until it is loaded."""
        self.failure = ""
        """Why it could not be loaded the last time."""
        self.failed_at = 0.0
        self.asked_at = 0.0
        """When the load that is under way was asked for."""
        self.delay = ""
        """Why there was no room for it the last time."""
        self.loads = self.failures = self.swaps = 0
        self.load_seconds = 0.0
        """How long the last load took."""

    def configure(self, config: Config, options: ModelOptions) -> dict[str, str]:
        """Take the aliases, pin and time to live that the options have now; those that are others and cannot change
        here, with what they need."""
        before, self.options = (
            self.options,
            msgspec.structs.replace(self.options, aliases=options.aliases, pin=options.pin, ttl=options.ttl),
        )
        self.pinned = options.pin
        self.ttl = (config.model_ttl if options.ttl is None else options.ttl) or math.inf
        old, new = frozenset(self.config.alias), frozenset(options.aliases)
        self.config = msgspec.structs.replace(self.config, alias=options.aliases)
        self.names = (self.names - old) | new | {self.name}
        if self.loaded is not None:
            self.loaded.service.names = (self.loaded.service.names - old) | new | {self.name}
            self.loaded.ttl = self.ttl
        names = ("name", "kv_share", "load", "options")
        fixed = [one for one in names if getattr(before, one) != getattr(options, one)]
        return {f"models.{self.name}.{one}": "it takes a restart of the server" for one in fixed}

    @property
    def state(self) -> State:
        """What is true of it now."""
        if self.loaded is not None:
            return "unloading" if self.loaded.closing else "loaded"
        if self.loading is not None or self.swapping is not None:
            return "loading"
        return "failed" if self.failure else "on disk"

    def note_failure(self, error: Exception, now: float) -> None:
        """Note why it could not be loaded, at that time."""
        self.failures += 1
        self.failure = str(error) if isinstance(error, CairnError) else type(error).__name__
        self.failed_at = now
        log.error("%s cannot be loaded: %s", self.name, self.failure)

    @property
    def kind(self) -> str:
        """What it is for; empty where that is not known yet."""
        spec = self.loaded.service.spec if self.loaded is not None else self.spec
        return spec.kind if spec is not None else ""

    @property
    def held(self) -> int:
        """Bytes of memory that it takes while it is loaded; 0 where it is not, or nobody knows."""
        return self.loaded.fit.held if self.loaded is not None and self.loaded.fit is not None else 0

    def describe(self) -> None:
        """Read what its files say. Raises ModelError where they cannot be served. Any thread."""
        from cairn.models.spec.config import load_spec
        from cairn.models.spec.judge import with_judge

        self.place = place = hub.locate(self.config.model)
        self.spec = with_judge(load_spec(place, identify=False), place, self.config.kind)
        if "context" not in self.own and (self.config.context or 0) > self.spec.context:
            self.config = msgspec.structs.replace(self.config, context=None)  # of all models the longest


def ends_of(reference: str) -> set[str]:
    """What a model may be called by where it lies."""
    last = reference.rstrip("/").rpartition("/")[2]
    return {reference, last, last.removesuffix(".gguf")} - {""}


def config_of(config: Config, options: ModelOptions) -> Config:
    """The configuration of one model of the server's."""
    own = {"model": options.model, "models": (), **options.options}
    if options.name is not None:
        own["served_name"] = options.name
    if options.aliases:
        own["alias"] = options.aliases
    return msgspec.structs.replace(config, **own)


def served_models(config: Config) -> list[ServedModel]:
    """The models of a configuration: those of its options first, then those of its folder. There is at least one.

    Raises ConfigError for a folder that cannot be read.
    """
    named = list(config.models)
    if not named and (config.model != _DEMO or config.models_dir is None):
        named = [ModelOptions(model=config.model, name=config.served_name, aliases=config.alias, pin=False)]
    if len(named) > 1 and (config.served_name is not None or config.alias):
        raise ConfigError(
            "served_name and alias are for a server with one model; give name and aliases in [[models]]",
            field="served_name",
        )
    plain = msgspec.structs.replace(config, served_name=None, alias=(), models=())
    base = plain if config.models or config.models_dir is not None else config
    models = [ServedModel(base, one) for one in named]
    taken = {name for model in models for name in model.names}
    for options in _in_folder(config) if config.models_dir is not None else ():
        if str(options) not in taken:
            models.append(ServedModel(plain, options, found=True))
    if not models:
        raise ConfigError(f"models_dir {config.models_dir} has no models: no .gguf files, no folders with config.json")
    if not any(model.at_start for model in models):
        models[0].at_start = True
    if len(models) > 1:
        _part(models)
    return models


def _part(models: list[ServedModel]) -> None:
    """Part the bytes of stored KV among models: as their options say, the rest in equal parts. ConfigError where they
    say more than there is. Models of a folder have one part together for each."""
    given = sum(model.share for model in models if model.share is not None)
    rest = [model for model in models if model.share is None]
    if given > 1 + 1e-9 or (rest and given > 1 - 1e-6):
        raise ConfigError(f"kv_share: models have {given:g} of the bytes together; there is 1 for all", field="models")
    for model in models:
        model.part = model.share if model.share is not None else (1 - given) / len(rest)


def _in_folder(config: Config) -> Iterable[ModelOptions]:
    """The models in `models_dir`, by name: .gguf files, folders with a config.json, and those a folder further down."""
    assert config.models_dir is not None
    folder = expanded(config.models_dir)
    try:
        found = sorted(_places(folder, 2))
    except OSError as error:
        raise ConfigError(
            f"models_dir {folder} cannot be read: {error.strerror or error}", field="models_dir"
        ) from None
    if len(found) > MOST_FOUND:
        raise ConfigError(f"models_dir {folder} has {len(found)} models; the limit is {MOST_FOUND}", field="models_dir")
    names: dict[str, Path] = {}
    for place in found:
        name = stem(place) if is_gguf(place) else str(place.relative_to(folder))
        names.setdefault(name, place)  # a split file is named by its first part
    return [ModelOptions(model=str(place), name=name) for name, place in names.items()]


def _places(folder: Path, depth: int) -> Iterable[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith((".", "mmproj")):
            continue
        try:
            entry.name.encode()
            yield from _models_at(entry, depth)
        except UnicodeEncodeError:
            log.warning("%s is passed over: its name is not UTF-8", ascii(str(entry)))
        except OSError as error:
            log.warning("%s is passed over: it cannot be read (%s)", entry, error.strerror or error)


def _models_at(entry: Path, depth: int) -> Iterable[Path]:
    """Yield the model that an entry of a folder is, or those in it."""
    if is_gguf(entry):
        yield entry
    elif entry.is_dir():
        if (entry / "config.json").is_file():
            yield entry
        elif depth > 1:
            yield from _places(entry, depth - 1)


def check_names(models: Iterable[ServedModel]) -> Mapping[str, ServedModel]:
    """Every name that a model has, the first that has it where several do. Of names that options give there is one
    model each (`resolve`)."""
    by_name: dict[str, ServedModel] = {}
    for model in models:
        by_name.setdefault(model.name, model)
        for alias in model.config.alias:
            by_name.setdefault(alias, model)
    for model in models:
        for name in sorted(model.names):
            by_name.setdefault(name, model)
    return by_name


def locate(model: ServedModel) -> Path:
    """Where it lies. Raises ModelError."""
    try:
        model.place = hub.locate(model.config.model)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    return model.place


def first_of(models: Sequence[ServedModel]) -> ServedModel:
    """Return the one that is loaded first: a pinned one before others, and after all others one that could not be."""
    left = [one for one in models if not one.failure] or models
    starting = [one for one in left if one.at_start] or left
    return next((one for one in starting if one.pinned), starting[0])


def first_worker(config: Config, models: list[ServedModel]) -> First:
    """Start the worker of the model that is loaded first. Of several, one that cannot be loaded is passed over.

    Raises what was wrong with the first of them where there is no other: ModelError, also where it takes more memory
    than there is, or ConfigError.
    """
    refused: CairnError | None = None
    while True:
        model = first_of(models)
        try:
            return _worker_of(config, model)
        except CairnError as error:
            refused = refused or error
            model.note_failure(error, SystemClock().now())
            if all(one.failure for one in models):
                raise refused from None


def _worker_of(config: Config, model: ServedModel) -> First:
    blocks: tuple[int, ...] = ()
    place = locate(model)
    if config.memory_gb is not None:
        found = fit(model.config, place, int(config.memory_gb * 10**9))
        if found.most > config.memory_gb * 10**9:
            raise ModelError(
                f"{model.name} needs {found.most / 10**9:.2f} GB of memory, and memory_gb is {config.memory_gb:g}"
            )
        blocks = found.blocks
    return launch_first(model.config, False, place, blocks, model.part, turns_of(config))
