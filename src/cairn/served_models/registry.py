"""Names of a server's models, and leases that keep models loaded while calls use them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

import msgspec

from cairn.config.config import Config
from cairn.config.values import ModelOptions
from cairn.served_models.served_model import LoadedModel, ServedModel, check_names, first_of
from cairn.types.errors import InvalidRequest, UnknownModel


class Lease:
    """Use of a model by one call. Tasks started by the call share it, and see when it is over."""

    __slots__ = ("model", "over")

    def __init__(self, model: ServedModel) -> None:
        self.model, self.over = model, False


_HELD: ContextVar[tuple[Lease, ...]] = ContextVar("held", default=())
"""Leases of the current task's call."""


class ModelLeases:
    """Leases on one server's models. For use on one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Lease, ...]] = []
        """Leases of calls that wait for another model: these models are not released before it is loaded."""

    @staticmethod
    def held() -> tuple[Lease, ...]:
        """Return the valid leases of the current task's call."""
        return tuple(lease for lease in _HELD.get() if not lease.over)

    @contextlib.contextmanager
    def lease(self, model: ServedModel, loaded: LoadedModel) -> Iterator[None]:
        """Hold a loaded model for the current task's call within this context."""
        loaded.users += 1
        before, lease = _HELD.get(), Lease(model)
        _HELD.set((*before, lease))
        try:
            yield
        finally:
            lease.over = True
            _HELD.set(before)
            loaded.users -= 1

    @contextlib.contextmanager
    def waiting(self, model: ServedModel) -> Iterator[tuple[Lease, ...]]:
        """Mark the current task's call as waiting for a model within this context; yield its leases."""
        held = self.held()
        model.waiting += 1
        self._waiting.append(held)
        try:
            yield held
        finally:
            model.waiting -= 1
            self._waiting.remove(held)

    def waits(self, model: ServedModel) -> bool:
        """Return whether a call that holds this model waits for another one."""
        return any(lease.model is model and not lease.over for held in self._waiting for lease in held)


SHOWN_NAMES = 20
"""Names listed in an error message."""


class ModelRegistry:
    """All models of a server by name, loaded or not."""

    def __init__(self, config: Config, models: list[ServedModel]) -> None:
        self.config = config
        self.models = models
        self.several = len(models) > 1
        """Whether requests must name an existing model; with only one model that depends on `strict_model`."""
        self._by_name = dict(check_names(models))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.models)

    @property
    def first(self) -> ServedModel:
        """Model that is loaded first."""
        return first_of(self.models)

    def find(self, name: str | None, kind: str = "chat") -> ServedModel:
        """Return the model that a request names; if it names none, the first of that kind, loaded ones first.

        With one model always return that: refusing other names is up to `strict_model`. Raise UnknownModel, with the
        existing names.
        """
        if not self.several:
            return self.models[0]
        if name is None:
            alike = [model for model in self.models if model.kind == kind]
            ready = [model for model in alike if model.state == "loaded"]
            return next(iter((*ready, *alike)), self.models[0])
        model = self.get(name) or self.get(name.removesuffix(":latest")) or self.adapted(name)
        if model is None:
            raise self.unknown(name)
        return model

    def adapted(self, name: str) -> ServedModel | None:
        """Return the base of the adapter with this name, its own or `base:adapter`, or None."""
        base, colon, last = name.removesuffix(":latest").rpartition(":")
        first = last.partition("+")[0].partition("@")[0]
        alike = (model for model in self.models if not colon or self.get(base) is model)
        return next((model for model in alike if first in model.adapter_names), None)

    def get(self, name: str) -> ServedModel | None:
        """Return the model with exactly this name, or None."""
        return self._by_name.get(name)

    def has(self, name: str) -> bool:
        """Return whether a model has this name, with or without `:latest`."""
        return name in self._by_name or name.removesuffix(":latest") in self._by_name

    @property
    def has_adapters(self) -> bool:
        """Whether a model has adapters, so that a request's name may mean one."""
        return any(model.adapter_names for model in self.models)

    def canonical(self, name: str) -> str:
        """Return the known name that differs from `name` only in case or in `:latest`; else `name`."""
        if name in self._by_name:
            return name
        wanted = {name.casefold(), name.casefold().removesuffix(":latest")}
        return next((known for known in self._by_name if known.casefold() in wanted), name)

    def by_identity(self, identity: bytes) -> ServedModel | None:
        """Return the model that was last loaded with this identity, or None."""
        return next((model for model in self.models if identity and model.identity == identity), None)

    def unknown(self, name: str) -> UnknownModel:
        """Return the error for an unknown name; it lists the existing ones."""
        names = [model.name for model in self.models]
        more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        shown = "".join(char if char.isprintable() else "?" for char in name[:100])
        return UnknownModel(
            f"there is no model {shown!r}; this server has: {', '.join(names[:SHOWN_NAMES])}{more}", field="model"
        )

    def loaded(self) -> Iterator[tuple[ServedModel, LoadedModel]]:
        """Return the models that are loaded now."""
        return ((model, model.loaded) for model in self.models if model.loaded is not None)

    def rename(self) -> None:
        """Read the names of all models again."""
        self._by_name = dict(check_names(self.models))

    def name_own(self, model: ServedModel, own: str) -> None:
        """Record the name that a model's files give it.

        It becomes the main name unless an option sets one or another model has it.
        """
        if model.config.served_name is None:
            if self._by_name.get(own) in (None, model):
                model.name = own
            model.config = msgspec.structs.replace(model.config, served_name=model.name)
        model.own_names |= {own}
        for name in (model.name, *sorted(model.names)):
            self._by_name.setdefault(name, model)

    def configure(self, config: Config) -> dict[str, str]:
        """Apply new options: aliases, pins, times to live, and limits on loaded models.

        Return the changed options that cannot change at run time, with what they need. Raise InvalidRequest, and change
        nothing, if two models would have one name.
        """
        listed = {options.model: options for options in config.models}
        mine = {model.options.model: model for model in self.models if not model.found}
        if not listed and mine:
            listed = {config.model: ModelOptions(model=config.model, name=config.served_name, aliases=config.alias)}
        _check_aliases(self.models, listed)
        unchanged = {f"models.{name}": "it takes a restart of the server" for name in listed.keys() ^ mine.keys()}
        self.config = config
        for place in listed.keys() & mine.keys():
            unchanged |= mine[place].configure(config, listed[place])
        self.rename()
        return unchanged


def _check_aliases(models: Iterable[ServedModel], listed: Mapping[str, ModelOptions]) -> None:
    """Raise InvalidRequest if an alias belongs to two models or is the name of another one."""
    owner = {model.name: model.options.model for model in models}
    for place, options in listed.items():
        for alias in options.aliases:
            if owner.setdefault(alias, place) != place:
                raise InvalidRequest(f"two models would be called {alias}", field="models")
