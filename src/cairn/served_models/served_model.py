"""A model of the server: its names, its files, its options, and whether it is loaded."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.config.config import Config, turns_of
from cairn.config.paths import expanded
from cairn.config.values import ModelOptions
from cairn.frontend.launch import First, launch_first
from cairn.models.files import is_gguf, stem
from cairn.models.hub import hub
from cairn.served_models.fit import Fit, fit
from cairn.system.posix import SystemClock
from cairn.types.errors import CairnError, ConfigError, ModelError
from cairn.types.model_spec import ModelSpec

if TYPE_CHECKING:
    from cairn.frontend.adapter_services import ServedAdapters
    from cairn.frontend.service import Service

log = logging.getLogger("cairn.api")

State = Literal["loaded", "loading", "unloading", "on disk", "failed"]
MOST_FOUND = 1000
"""Limit on the models in a folder."""
_DEMO = "demo"


class LoadedModel:
    """State of a model while it is loaded."""

    __slots__ = ("adapters", "closing", "fit", "service", "since", "ttl", "used", "users")

    def __init__(self, service: Service, fit: Fit | None, now: float, ttl: float, adapters: ServedAdapters) -> None:
        self.service, self.adapters = service, adapters
        self.fit = fit
        """Memory that it takes; None if it was not measured before the load."""
        self.since = self.used = now
        self.ttl = ttl
        """Seconds without calls after which it is unloaded; infinity for never."""
        self.users = 0
        """Calls that use it now."""
        self.closing = False
        """Whether it takes no new calls and is unloaded once its calls are over."""

    @property
    def idle(self) -> bool:
        """Whether no call uses it and nothing runs on it."""
        return self.users == 0 and not self.service.busy


class ServedModel:
    """A model by its names. `loaded` holds what answers under them now, if anything."""

    def __init__(self, config: Config, options: ModelOptions, *, found: bool = False) -> None:
        """Create it from the server's `config` and its own `options`.

        `found`: whether it was found in the models' folder and is not named by an option.
        """
        self.config = config_of(config, options)
        """Configuration that it is loaded with; a swap replaces it."""
        self.own_config = self.config
        """Configuration as the server was given it, for a swap back."""
        self.own = frozenset(options.options)
        """Names of the options that were set for this model alone."""
        self.options = options
        """Options as the server was given them; a swap does not change them."""
        self.reference = options.model
        self.pinned, self.at_start, self.found = options.pin, options.load and not found, found
        self.ttl = (config.model_ttl if options.ttl is None else options.ttl) or math.inf
        self.share = options.kv_share
        self.part = 0.0
        """Its share of the stored KV's bytes, on a server with several models."""
        last = options.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
        self.name = self.config.served_name or last or options.model
        """Main name: set by an option, else the name in its files once they were read."""
        self.own_names = frozenset({self.name, *self.config.alias, *ends_of(options.model)})
        """Names that it has whatever is swapped in."""
        self.swapped_names = frozenset[str]()
        """Names of the model that was swapped in last."""
        self.place: Path | None = None
        self.spec: ModelSpec | None = None
        """Contents of its configuration files, once they were read."""
        self.identity = b""
        """Identity of the weights that were loaded last."""
        self.loaded: LoadedModel | None = None
        self.loading: asyncio.Task[None] | None = None
        self.swapping: asyncio.Future[None] | None = None
        """Future that is done when the current swap has ended, successfully or not."""
        self.waiting = 0
        """Calls that wait until it is loaded."""
        self.failure = ""
        """Error of the last load; empty if it succeeded."""
        self.failed_at = 0.0
        self.asked_at = 0.0
        """When the current load was requested."""
        self.delay = ""
        """Why there was no memory for it the last time."""
        self.loads = self.failures = self.swaps = 0
        self.load_seconds = 0.0
        """Duration of the last load."""

    def configure(self, config: Config, options: ModelOptions) -> dict[str, str]:
        """Apply the aliases, pin and time to live of new options.

        Return the changed options that cannot change at run time, with what they need.
        """
        before, self.options = (
            self.options,
            msgspec.structs.replace(self.options, aliases=options.aliases, pin=options.pin, ttl=options.ttl),
        )
        self.pinned = options.pin
        self.ttl = (config.model_ttl if options.ttl is None else options.ttl) or math.inf
        old, new = frozenset(self.config.alias), frozenset(options.aliases)
        self.config = msgspec.structs.replace(self.config, alias=options.aliases)
        self.own_names = (self.own_names - old) | new | {self.name}
        self.swapped_names -= old
        if self.loaded is not None:
            self.loaded.service.names = (self.loaded.service.names - old) | new | {self.name}
            self.loaded.ttl = self.ttl
        names = ("name", "kv_share", "load", "options")
        fixed = [one for one in names if getattr(before, one) != getattr(options, one)]
        return {f"models.{self.name}.{one}": "it takes a restart of the server" for one in fixed}

    @property
    def names(self) -> frozenset[str]:
        """All names that it has now."""
        return self.own_names | self.swapped_names

    @property
    def adapter_names(self) -> frozenset[str]:
        """Names of its adapters, those that it will be loaded with if it is not loaded."""
        if self.loaded is None:
            return frozenset(one.name for one in self.config.adapters)
        return self.loaded.adapters.known

    @property
    def state(self) -> State:
        """Current state, as clients see it."""
        if self.loaded is not None:
            return "unloading" if self.loaded.closing else "loaded"
        if self.loading is not None or self.swapping is not None:
            return "loading"
        return "failed" if self.failure else "on disk"

    def note_failure(self, error: Exception, now: float) -> None:
        """Record the error of a failed load and its time."""
        self.failures += 1
        self.failure = str(error) if isinstance(error, CairnError) else type(error).__name__
        self.failed_at = now
        log.error("%s cannot be loaded: %s", self.name, self.failure)

    @property
    def kind(self) -> str:
        """What it is for (`chat`, `embedding`, ...); empty while that is unknown."""
        spec = self.loaded.service.spec if self.loaded is not None else self.spec
        return spec.kind if spec is not None else ""

    @property
    def held(self) -> int:
        """Bytes of memory that it takes while it is loaded; 0 if it is not loaded or was not measured."""
        return self.loaded.fit.held if self.loaded is not None and self.loaded.fit is not None else 0

    def describe(self) -> None:
        """Read the model's configuration files. Any thread.

        Raise ModelError if they cannot be served.
        """
        from cairn.models.spec.config import load_spec
        from cairn.models.spec.judge import with_judge

        self.place = place = hub.locate(self.config.model)
        self.spec = with_judge(load_spec(place, identify=False), place, self.config.kind)
        if "context" not in self.own and (self.config.context or 0) > self.spec.context:
            # The server's `context` is meant for the model with the longest one.
            self.config = msgspec.structs.replace(self.config, context=None)
            self.own_config = msgspec.structs.replace(self.own_config, context=None)


def ends_of(reference: str) -> set[str]:
    """Return the names that follow from a model's place: the reference, its last part, that without `.gguf`."""
    last = reference.rstrip("/").rpartition("/")[2]
    return {reference, last, last.removesuffix(".gguf")} - {""}


def config_of(config: Config, options: ModelOptions) -> Config:
    """Return the configuration of one model: the server's, with the model's own options and adapters."""
    names = {None, options.name, *options.aliases, *ends_of(options.model)}
    adapters = tuple(one for one in config.adapters if one.model in names)
    own = {"model": options.model, "models": (), "adapters": adapters, **options.options}
    if options.name is not None:
        own["served_name"] = options.name
    if options.aliases:
        own["alias"] = options.aliases
    return msgspec.structs.replace(config, **own)


def served_models(config: Config) -> list[ServedModel]:
    """Return the models of a configuration: those of its options, then those of its folder. At least one.

    Raise ConfigError for a folder that cannot be read or has no models, and for options that contradict each other.
    """
    named = list(config.models)
    if not named and (config.model != _DEMO or config.models_dir is None):
        named = [ModelOptions(model=config.model, name=config.served_name, aliases=config.alias, pin=False)]
    if (config.models or not named) and (config.served_name is not None or config.alias):
        raise ConfigError(
            "served_name and alias are for a server with one model, given as MODEL; in [[models]] give name and "
            "aliases, and models of models_dir have the names of their files",
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
    _check_adapters(config, models)
    if len(models) > 1:
        _part(models)
    return models


def _check_adapters(config: Config, models: list[ServedModel]) -> None:
    """Raise ConfigError for an adapter of no model, or of all models."""
    for one in config.adapters:
        if one.model is None and len(models) > 1:
            raise ConfigError(
                f"adapters: {one.name} must say its model, as this server has several: [[adapters]] with model",
                field="adapters",
            )
        if not any(one in model.config.adapters for model in models):
            raise ConfigError(f"adapters: {one.name} belongs to {one.model}, which is not served", field="adapters")


def _part(models: list[ServedModel]) -> None:
    """Divide the bytes of stored KV among models: as their options say, the rest in equal parts.

    Raise ConfigError if the options exceed the total.
    """
    total = sum(model.share for model in models if model.share is not None)
    rest = [model for model in models if model.share is None]
    if total > 1 + 1e-9 or (rest and total > 1 - 1e-6):
        raise ConfigError(
            f"kv_share: the models' shares add up to {total:g}; the limit is 1, and below 1 if a model has no share",
            field="models",
        )
    for model in models:
        model.part = model.share if model.share is not None else (1 - total) / len(rest)


def _in_folder(config: Config) -> Iterable[ModelOptions]:
    """Return the models in `models_dir` by name: .gguf files and folders with config.json, two levels deep."""
    assert config.models_dir is not None
    folder = expanded(config.models_dir)
    try:
        places = sorted(_places(folder, 2))
    except OSError as error:
        raise ConfigError(
            f"models_dir {folder} cannot be read: {error.strerror or error}", field="models_dir"
        ) from None
    if len(places) > MOST_FOUND:
        raise ConfigError(
            f"models_dir {folder} has {len(places)} models; the limit is {MOST_FOUND}", field="models_dir"
        )
    names: dict[str, Path] = {}
    for place in places:
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
            log.warning("%s is skipped: its name is not UTF-8", ascii(str(entry)))
        except OSError as error:
            log.warning("%s is skipped: it cannot be read (%s)", entry, error.strerror or error)


def _models_at(entry: Path, depth: int) -> Iterable[Path]:
    """Yield the model at a folder's entry, or those inside it."""
    if is_gguf(entry):
        yield entry
    elif entry.is_dir():
        if (entry / "config.json").is_file():
            yield entry
        elif depth > 1:
            yield from _places(entry, depth - 1)


def check_names(models: Sequence[ServedModel]) -> Mapping[str, ServedModel]:
    """Return the models by every name they have. A shared name belongs to the first model.

    Names set by options, which `resolve` has checked to be unique, come before names that follow from files, and those
    before names of swapped-in models.
    """
    by_name: dict[str, ServedModel] = {}
    for model in models:
        by_name.setdefault(model.name, model)
        for alias in model.config.alias:
            by_name.setdefault(alias, model)
    for model in models:
        for name in sorted(model.own_names):
            by_name.setdefault(name, model)
    for model in models:
        for name in sorted(model.swapped_names):
            by_name.setdefault(name, model)
    return by_name


def locate(model: ServedModel) -> Path:
    """Find the model's files and return their place. Raise ModelError."""
    try:
        model.place = hub.locate(model.config.model)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    return model.place


def first_of(models: Sequence[ServedModel]) -> ServedModel:
    """Return the model to load first: a pinned one before others, one that failed after all others."""
    left = [one for one in models if not one.failure] or models
    starting = [one for one in left if one.at_start] or left
    return next((one for one in starting if one.pinned), starting[0])


def first_worker(config: Config, models: list[ServedModel]) -> First:
    """Start the worker of the model to load first. If it cannot be loaded, try the next one.

    If none can be loaded, raise the error of the first: ModelError, also for too little memory, or ConfigError.
    """
    refused: CairnError | None = None
    while True:
        model = first_of(models)
        try:
            return _worker_of(config, model)
        except CairnError as error:
            if len(models) == 1:
                raise  # the caller reports it
            refused = refused or error
            model.note_failure(error, SystemClock().now())
            if all(one.failure for one in models):
                raise refused from None


def _worker_of(config: Config, model: ServedModel) -> First:
    blocks: tuple[int, ...] = ()
    place = locate(model)
    if config.memory_gb is not None:
        memory = fit(model.config, place, int(config.memory_gb * 10**9))
        if memory.most > config.memory_gb * 10**9:
            raise ModelError(
                f"{model.name} needs {memory.most / 10**9:.2f} GB of memory, and memory_gb is {config.memory_gb:g}"
            )
        blocks = memory.blocks
    return launch_first(model.config, False, place, blocks, model.part, turns_of(config))
