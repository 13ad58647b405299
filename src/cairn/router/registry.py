"""Which name means which of a server's models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

import msgspec

from cairn.config.config import Config, ModelOptions
from cairn.router.served_model import LoadedModel, ServedModel, check_names, first_of
from cairn.types.errors import InvalidRequest, UnknownModel


class Lease:
    """One call has a model. Tasks that the call has begun see when it is over, too."""

    __slots__ = ("model", "over")

    def __init__(self, model: ServedModel) -> None:
        self.model, self.over = model, False


_HELD: ContextVar[tuple[Lease, ...]] = ContextVar("held", default=())
"""What the call of this task has."""


class ModelLeases:
    """The leases of one server's models. One event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Lease, ...]] = []
        """What calls have that wait for another model: it does not get free before they have that."""

    @staticmethod
    def held() -> tuple[Lease, ...]:
        """What the call of this task has now."""
        return tuple(lease for lease in _HELD.get() if not lease.over)

    @contextlib.contextmanager
    def lease(self, model: ServedModel, loaded: LoadedModel) -> Iterator[None]:
        """The call of this task has a loaded model meanwhile."""
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
        """The call of this task waits for a model meanwhile; what it has."""
        held = self.held()
        model.waiting += 1
        self._waiting.append(held)
        try:
            yield held
        finally:
            model.waiting -= 1
            self._waiting.remove(held)

    def waits(self, model: ServedModel) -> bool:
        """Whether a call that has this model waits for another one."""
        return any(lease.model is model and not lease.over for held in self._waiting for lease in held)


SHOWN_NAMES = 20
"""How many names a refusal lists."""


class ModelRegistry:
    """All models of a server by their names, loaded or not."""

    def __init__(self, config: Config, models: list[ServedModel]) -> None:
        self.config = config
        self.models = models
        self.several = len(models) > 1
        """Whether a name has to be one of a model's: with one model the rule is `strict_model`."""
        self._by_name = dict(check_names(models))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.models)

    @property
    def first(self) -> ServedModel:
        """The one that is loaded first."""
        return first_of(self.models)

    def find(self, name: str | None, kind: str = "chat") -> ServedModel:
        """The model that a request names; where it names none, the first of that kind.

        With one model it is always that: whether another name is refused is `strict_model`. UnknownModel with the names
        there are.
        """
        if not self.several:
            return self.models[0]
        if name is None:
            alike = [one for one in self.models if one.kind == kind]
            ready = [one for one in alike if one.state == "loaded"]
            return next(iter((*ready, *alike)), self.models[0])
        found = self.get(name) or self.get(name.removesuffix(":latest"))
        if found is None:
            raise self.unknown(name)
        return found

    def get(self, name: str) -> ServedModel | None:
        """The model with exactly this name."""
        return self._by_name.get(name)

    def has(self, name: str) -> bool:
        """Whether a model has this name."""
        return name in self._by_name or name.removesuffix(":latest") in self._by_name

    def spelt(self, name: str) -> str:
        """Return the name of a model that this one differs from in case and in a `:latest` alone; else the name."""
        if name in self._by_name:
            return name
        wanted = {name.casefold(), name.casefold().removesuffix(":latest")}
        return next((known for known in self._by_name if known.casefold() in wanted), name)

    def by_identity(self, identity: bytes) -> ServedModel | None:
        """The model that was loaded with this identity, if any still is in its place."""
        return next((one for one in self.models if identity and one.identity == identity), None)

    def unknown(self, name: str) -> UnknownModel:
        """The refusal of a name, with those there are."""
        names = [one.name for one in self.models]
        more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        shown = "".join(char if char.isprintable() else "?" for char in name[:100])
        return UnknownModel(
            f"there is no model {shown!r}; this server has: {', '.join(names[:SHOWN_NAMES])}{more}", field="model"
        )

    def loaded(self) -> Iterator[tuple[ServedModel, LoadedModel]]:
        """Those that are loaded now."""
        return ((one, one.loaded) for one in self.models if one.loaded is not None)

    def name(self, model: ServedModel, names: Iterable[str]) -> None:
        """A model is called so too, where no other is."""
        for name in names:
            self._by_name.setdefault(name, model)

    def name_own(self, model: ServedModel, own: str) -> None:
        """A model's own name is known: it is called so where no option says otherwise and no other is."""
        if model.config.served_name is None:
            if self._by_name.get(own) in (None, model):
                model.name = own
            model.config = msgspec.structs.replace(model.config, served_name=model.name)
        model.names |= {own}
        self.name(model, (model.name, *sorted(model.names)))

    def configure(self, config: Config) -> dict[str, str]:
        """These options hold from now on: aliases, pins, times to live, and bounds of what is loaded. Those that are
        others and cannot change here, with what they need. InvalidRequest for names that two models would have; then
        nothing has changed."""
        listed = {one.model: one for one in config.models}
        mine = {one.options.model: one for one in self.models if not one.found}
        if not listed and mine:
            listed = {config.model: ModelOptions(model=config.model, name=config.served_name, aliases=config.alias)}
        _check_aliases(self.models, listed)
        unchanged = {f"models.{name}": "it takes a restart of the server" for name in listed.keys() ^ mine.keys()}
        self.config = config
        for place in listed.keys() & mine.keys():
            unchanged |= mine[place].configure(config, listed[place])
        self._by_name = dict(check_names(self.models))
        return unchanged


def _check_aliases(models: Iterable[ServedModel], listed: Mapping[str, ModelOptions]) -> None:
    """InvalidRequest where an alias is two models' or another's name."""
    whose = {model.name: model.options.model for model in models}
    for place, options in listed.items():
        for alias in options.aliases:
            if whose.setdefault(alias, place) != place:
                raise InvalidRequest(f"two models would be called {alias}", field="models")
