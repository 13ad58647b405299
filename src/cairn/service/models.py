"""The models of one server: which name means which, which of them are loaded, and what makes room for what.

Each loaded model is a `Service` with a worker process of its own. One is loaded or unloaded at a time (`_turn`); calls
go on meanwhile, and those for a model that is not there yet wait until it is. Everything runs on one event loop.

    on disk -> loading -> loaded -> unloading -> on disk
                  └> failed ┘ a later call tries again, after a pause
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from cairn import deadline
from cairn.config import Config, ModelOptions, TenantTurns
from cairn.errors import CairnError, Conflict, InvalidRequest, ModelError, Unavailable, UnknownModel, trace
from cairn.seams import Clock
from cairn.service.fit import Fit, free_now, measure
from cairn.service.launch import First, launch_first
from cairn.service.request_table import Used
from cairn.service.served_model import Loaded, ServedModel, check_names, first_of, locate, served_models
from cairn.service.service import SHUTTING_DOWN, Service
from cairn.service.services import RequestIds, Services
from cairn.service.stores import GB
from cairn.service.watchdog import Patience
from cairn.spans import PRESENT
from cairn.system import SystemClock

log = logging.getLogger(__name__)

FAILED_SECONDS = 10.0
"""After a model could not be loaded, how long a call for it is told why, before another attempt."""
FLUSH_SECONDS = 10.0
"""How long KV may be stored before a model is unloaded."""
CLOSE_SECONDS = 15.0
LOOK_SECONDS = 0.02
"""How often to look whether a model's requests are over."""
TTL_SECONDS = 1.0
"""How often to look for models that nobody has asked for."""
LOAD_GUESS = 10.0
"""Seconds that a load takes before any was measured."""
SHOWN_NAMES = 20
"""How many names a refusal lists."""


class _Hold:
    """One call has a model. Tasks that the call has begun see when it is over, too."""

    __slots__ = ("model", "over")

    def __init__(self, model: ServedModel) -> None:
        self.model, self.over = model, False


HELD: ContextVar[tuple[_Hold, ...]] = ContextVar("held", default=())
"""What the call of this task has: it would wait for itself if that had to make room for another model of its own."""


class Models:
    """All models of a server. Make it, `start` it; end it with `close`."""

    def __init__(
        self,
        config: Config,
        models: list[ServedModel] | None = None,
        *,
        in_process: bool = False,
        clock: Clock | None = None,
        patience: Patience | None = None,
        free: Callable[[], int] = free_now,
        turns: TenantTurns | None = None,
    ) -> None:
        """`free` tells the bytes of memory that are free; `turns`: of tenants that are not like all others."""
        self.config = config
        self.models = served_models(config) if models is None else models
        self.several = len(self.models) > 1
        """Whether a name has to be one of a model's: with one model the rule is `strict_model`."""
        self.services: Services
        """Set once the first model is loaded."""
        self.draining = False
        self._used: Used | None = None
        self._in_process, self._clock, self._patience = in_process, clock or SystemClock(), patience
        self._free, self._turns = free, turns
        self._ids = RequestIds(self._clock)
        self._by_name = dict(check_names(self.models))
        self._turn = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: set[Loaded] = set()
        """Models whose names are another's now, while their last requests go on."""
        self._waiting: list[tuple[_Hold, ...]] = []
        """What calls have that wait for another model: it does not get free before they have that."""
        self._closed = False

    @classmethod
    def of(cls, service: Service, config: Config) -> Models:
        """The models of a server whose only one is loaded."""
        model = ServedModel(config, ModelOptions(model=config.model, name=config.served_name, aliases=config.alias))
        models = cls(config, [model])
        models._loaded(model, service, None)
        return models

    # ---------------------------------------------------------------------------------------------------- the start

    @property
    def first(self) -> ServedModel:
        """The one that is loaded first."""
        return first_of(self.models)

    async def start(self, first: First | None = None) -> Service:
        """Load the first model; `first`: its worker, where that was started before. Raises what loading raises."""
        model = self.first
        began = self._clock.now()
        service = await self._service(model, first)
        self._loaded(model, service, None)
        model.load_seconds = self._clock.now() - began
        self._later(self._tend())
        if self.several:
            self._later(self._prepare())
        return service

    async def _prepare(self) -> None:
        """Read what the files of models say, then load those that are to be loaded at the start, as far as there is
        room."""
        for model in self.models:
            if model.spec is None:
                try:
                    await self._describe(model)
                except CairnError as error:
                    self._failed(model, error)
        for model in sorted(self.models, key=lambda one: not one.pinned):
            if not model.at_start or model.loaded is not None or self._closed:
                continue
            with contextlib.suppress(CairnError):
                await self._load(model, evict=False)

    async def _describe(self, model: ServedModel) -> None:
        """Read what its files say. Raises ModelError where they cannot be served."""
        await asyncio.to_thread(model.describe)
        assert model.spec is not None
        self._name(model, model.spec.name)

    def _name(self, model: ServedModel, own: str) -> None:
        """A model's own name is known: it is called so where no option says otherwise and no other is."""
        if model.config.served_name is None:
            if self._by_name.get(own) in (None, model):
                model.name = own
            model.config = msgspec.structs.replace(model.config, served_name=model.name)
        model.names |= {own}
        for name in (model.name, *sorted(model.names)):
            self._by_name.setdefault(name, model)

    # ---------------------------------------------------------------------------------------------------- to look up

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
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if found is None:
            raise self.unknown(name)
        return found

    def has(self, name: str) -> bool:
        """Whether a model has this name."""
        return name in self._by_name or name.removesuffix(":latest") in self._by_name

    def by_identity(self, identity: bytes) -> ServedModel | None:
        """The model that was loaded with this identity, if any still is in its place."""
        return next((one for one in self.models if identity and one.identity == identity), None)

    def with_request(self, id: int) -> Service | None:
        """The service that has, or had, a request."""
        return next((one for one in self.services if one.status(id) is not None), None)

    def unknown(self, name: str) -> UnknownModel:
        """The refusal of a name, with those there are."""
        names = [one.name for one in self.models]
        more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        shown = "".join(char if char.isprintable() else "?" for char in name[:100])
        return UnknownModel(
            f"there is no model {shown!r}; this server has: {', '.join(names[:SHOWN_NAMES])}{more}", field="model"
        )

    def loaded(self) -> Iterator[tuple[ServedModel, Loaded]]:
        """Those that are loaded now."""
        return ((one, one.loaded) for one in self.models if one.loaded is not None)

    # ---------------------------------------------------------------------------------------------------- to use

    @contextlib.asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[Service]:
        """While a call is answered by this model, which is loaded first where it is not: it stays loaded.

        Raises Unavailable where that takes longer than `load_timeout`, or cannot be done; at once where there is no
        room for it beside what the same call has.
        """
        loaded, mine = model.loaded, any(hold.model is model and not hold.over for hold in HELD.get())
        if loaded is None or (loaded.closing and not mine):
            began = self._clock.now()
            try:
                loaded = await self._wait(model)
            finally:
                if (spans := PRESENT.get()) is not None:
                    spans.add("load", began, self._clock.now(), what="model", model=model.name)
        loaded.users += 1
        before, hold = HELD.get(), _Hold(model)
        HELD.set((*before, hold))
        try:
            yield loaded.service
        finally:
            hold.over = True
            HELD.set(before)
            loaded.users -= 1
            loaded.used = self._clock.now()

    async def _wait(self, model: ServedModel) -> Loaded:
        """Until the model is loaded."""
        now = self._clock.now()
        end = now + deadline.left(now, self.config.load_timeout)
        held, tried = tuple(hold for hold in HELD.get() if not hold.over), False
        model.waiting += 1
        self._waiting.append(held)
        try:
            while True:
                if self.draining:
                    raise Unavailable(SHUTTING_DOWN, retry_after=self.config.shutdown_grace)
                if model.loaded is not None and not model.loaded.closing:
                    return model.loaded
                pause = model.failed_at + FAILED_SECONDS - self._clock.now()
                if model.failure and pause > 0:
                    raise Unavailable(f"{model.name} cannot be loaded: {model.failure}", retry_after=pause)
                if tried and held and model.delay:
                    beside = ", ".join(dict.fromkeys(hold.model.name for hold in held))
                    raise Unavailable(
                        f"{model.name} is needed beside {beside}, and there is no room for both (max_loaded "
                        f"{self.config.max_loaded}, or memory): {model.delay}",
                        retry_after=FAILED_SECONDS,
                    )
                task, tried = self._loading(model), True
                left = end - self._clock.now()
                done, _ = await asyncio.wait({task}, timeout=max(0.0, left))
                if not done:
                    why = model.delay or f"{model.name} is being loaded; ask again shortly"
                    raise Unavailable(why, retry_after=self._load_left(model))
        finally:
            model.waiting -= 1
            self._waiting.remove(held)

    def _load_left(self, model: ServedModel) -> float:
        """Seconds until a model that is being loaded will be there: as its last load took, else as others' did."""
        others = [one.load_seconds for one in self.models if one.load_seconds]
        usual = model.load_seconds or (sum(others) / len(others) if others else LOAD_GUESS)
        return max(1.0, usual - (self._clock.now() - model.asked_at))

    def _want(self, name: str) -> bool:
        """Begin to load a model for work that no call waits for; whether there is one of this name."""
        model = self._by_name.get(name)
        if model is not None and not (model.failure and self._clock.now() - model.failed_at < FAILED_SECONDS):
            self._loading(model)
        return model is not None

    def _loading(self, model: ServedModel) -> asyncio.Task[None]:
        if model.loading is None:
            model.asked_at = self._clock.now()
            model.loading = self._later(self._load_quietly(model))
        return model.loading

    async def _load_quietly(self, model: ServedModel) -> None:
        try:
            with contextlib.suppress(CairnError):  # `failure` says it
                await self._load(model)
        finally:
            model.loading = None

    def tell(self, used: Used) -> None:
        """Let somebody know what the requests of all models use, also of those that are loaded later."""
        self._used = used
        for _, loaded in self.loaded():
            loaded.service.used = used

    def keep(self, model: ServedModel, seconds: float) -> None:
        """Unload the model once nobody has asked for it for so long; a pinned one stays, and the only one."""
        if model.loaded is not None and self.several:
            model.loaded.ttl = seconds

    def expires_in(self, model: ServedModel) -> float:
        """Seconds until a loaded model is unloaded if nobody asks for it; infinite for never."""
        loaded = model.loaded
        if loaded is None or model.pinned:
            return math.inf
        return max(0.0, loaded.ttl - (self._clock.now() - loaded.used if loaded.idle else 0.0))

    # ---------------------------------------------------------------------------------------------------- to change

    async def load(self, model: ServedModel) -> None:
        """Load a model where it is not, however long that takes. Raises ModelError or Unavailable."""
        await self._load(model)

    async def unload(self, model: ServedModel, grace: float) -> None:
        """Unload a model: it takes no more calls, and ends once those it has are over, or after `grace` seconds.

        A call for it loads it again. Conflict for one that is not loaded.
        """
        async with self._turn:
            if model.loaded is None:
                raise Conflict(f"{model.name} is not loaded ({model.state})", field="model")
            await self._unload(model, grace, surely=True)

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

    async def _load(self, model: ServedModel, *, evict: bool = True) -> None:
        async with self._turn:
            if model.loaded is not None or self._closed:
                return
            began = self._clock.now()
            try:
                place = await asyncio.to_thread(locate, model)
                if model.spec is None and self.several:
                    await self._describe(model)
                fit = await self._make_room(model, model.config, place, evict=evict)
                self._loaded(model, await self._service(model, None, fit, place), fit)
            except CairnError as error:
                self._failed(model, error)
                raise
            except Exception as error:
                self._failed(model, error)
                log.error("%s could not be loaded: %s", model.name, trace(error))
                raise ModelError(f"{model.name} could not be loaded ({type(error).__name__})") from error
            model.load_seconds = self._clock.now() - began
            log.info("%s is loaded (%.1f s)", model.name, model.load_seconds)

    def _failed(self, model: ServedModel, error: Exception) -> None:
        if isinstance(error, Unavailable):  # no room now: nothing is wrong with the model
            model.delay = str(error)
            return
        model.failures += 1
        model.failure = str(error) if isinstance(error, CairnError) else type(error).__name__
        model.failed_at = self._clock.now()
        log.error("%s cannot be loaded: %s", model.name, model.failure)

    async def _service(
        self, model: ServedModel, first: First | None, fit: Fit | None = None, place: Path | None = None
    ) -> Service:
        return await self._started(model.config, model.part, first, fit, place)

    async def _started(
        self, config: Config, part: float, first: First | None, fit: Fit | None, place: Path | None
    ) -> Service:
        if fit is not None and fit.mapped:  # whatever memory the machine has beyond what models may take
            config = msgspec.structs.replace(config, experts="mapped")
        if first is None:
            blocks = fit.blocks if fit is not None else ()
            launching = asyncio.ensure_future(
                asyncio.to_thread(launch_first, config, self._in_process, place, blocks, part, self._turns)
            )
            try:
                first = await asyncio.shield(launching)
            except asyncio.CancelledError:
                launching.add_done_callback(_end_first)
                raise
        return await Service.start(config, first, patience=self._patience, clock=self._clock, ids=self._ids)

    def _loaded(self, model: ServedModel, service: Service, fit: Fit | None) -> None:
        model.failure = model.delay = ""
        model.loads += 1
        self._take(model, service, fit)

    def _take(self, model: ServedModel, service: Service, fit: Fit | None) -> None:
        """From now on this service answers in the model's names."""
        before = model.loaded.service if model.loaded is not None else None
        if self._used is not None:
            service.used = self._used
        model.loaded = Loaded(service, fit, self._clock.now(), model.ttl)
        model.spec, model.identity = service.spec, service.spec.identity
        model.name = service.name
        model.names |= service.names
        for name in (model.name, *sorted(service.names)):
            self._by_name.setdefault(name, model)
        if not hasattr(self, "services"):
            self.services = Services(service)
            if self.several:
                self.services.want = self._want
            return
        self.services.add(service)
        if before is self.services.first:
            self.services.lead(service)

    async def _unload(self, model: ServedModel, grace: float, *, surely: bool) -> bool:
        """Unload it; whether it was. Without `surely` one stays that is still used after `grace`, or that is of a call
        which waits for another model. With the turn."""
        loaded = model.loaded
        assert loaded is not None
        loaded.closing = True
        try:
            if not await self._ended(loaded, grace, None if surely else model) and not surely:
                return False
            await self._end(loaded.service)
            model.loaded = None
            return True
        finally:
            loaded.closing = False

    async def _ended(self, loaded: Loaded, grace: float, model: ServedModel | None = None) -> bool:
        """Wait until nobody has it any more, but not longer, nor for a call that has `model` and waits itself."""
        end = self._clock.now() + grace
        while not loaded.idle:
            if self._clock.now() >= end or (model is not None and self._waits(model)):
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    async def _end(self, service: Service) -> None:
        """Store its KV and close it."""
        with contextlib.suppress(CairnError, TimeoutError):
            await asyncio.wait_for(service.flush(), FLUSH_SECONDS)
        self.services.remove(service)
        await service.drain(0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.close(), CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------------------- room

    @property
    def budget(self) -> int | None:
        """Bytes for all loaded models; None: what is free."""
        return None if self.config.memory_gb is None else int(self.config.memory_gb * GB)

    def left(self) -> int:
        """Bytes that another model may take."""
        held = sum(model.held for model, _ in self.loaded())
        held += sum(old.fit.held for old in self._retiring if old.fit is not None)
        if self.budget is not None:
            return self.budget - held
        return self._free() - sum(_untouched(model) for model, _ in self.loaded())

    async def _make_room(self, model: ServedModel, config: Config, place: Path, *, evict: bool) -> Fit | None:
        """Unload what was not used for longest until there is room; what the model takes. With the turn.

        Unavailable where the others do not give way, ModelError where all room would be too little.
        """
        if not self.several and self.budget is None:  # the worker itself looks before it loads
            return None
        await self._measure_first()
        end = self._clock.now() + self.config.load_timeout
        while True:
            count = sum(1 for _ in self.loaded())
            left = self.left()
            fit = await measure(config, place, max(0, left), in_process=self._in_process)
            if fit.most <= left and count < self.config.max_loaded:
                return fit
            victim = self._victim() if evict or model.pinned else None
            if victim is None:
                if not count:
                    raise ModelError(
                        f"{model.name} needs {_gb(fit.most)} of memory, and {_gb(left)} are there for models"
                    )
                raise Unavailable(
                    f"there is no room for {model.name} ({_gb(fit.most)}; {_gb(left)} are left, and {count} of "
                    f"{self.config.max_loaded} models are loaded) and no other that may be unloaded",
                    retry_after=FAILED_SECONDS,
                )
            if not await self._unload(victim, max(0.0, end - self._clock.now()), surely=False):
                if self._waits(victim) and self._clock.now() < end:
                    continue
                raise Unavailable(
                    f"{victim.name} would have to make room for {model.name}, and is in use",
                    retry_after=victim.loaded.service.metrics.mean_seconds if victim.loaded is not None else 1.0,
                )
            log.info("%s was unloaded to make room for %s", victim.name, model.name)

    async def _measure_first(self) -> None:
        """The first model was loaded before anybody asked what it takes."""
        for model, loaded in self.loaded():
            if loaded.fit is None and model.place is None:
                with contextlib.suppress(CairnError):
                    await asyncio.to_thread(locate, model)
            if loaded.fit is None and model.place is not None:
                blocks = loaded.service.info.blocks
                with contextlib.suppress(CairnError):
                    loaded.fit = await measure(
                        model.config, model.place, self._free(), in_process=self._in_process, blocks=blocks
                    )

    def _victim(self) -> ServedModel | None:
        """The loaded model that makes room for another: an idle one before others, then the one that was not used for
        longest; never a pinned one, nor one of a call that waits for another model."""
        found = [
            (loaded.idle, -loaded.used, model)
            for model, loaded in self.loaded()
            if not model.pinned and not self._waits(model)
        ]
        return max(found, key=lambda one: one[:2])[2] if found else None

    def _waits(self, model: ServedModel) -> bool:
        """Whether a call that has this model waits for another one."""
        return any(hold.model is model and not hold.over for held in self._waiting for hold in held)

    # ---------------------------------------------------------------------------------------------------- swap

    async def swap(self, model: ServedModel, to: str, grace: float) -> None:
        """Load another model in the place of this one: its names move at once, requests that it has go on to their end.

        `to` is a place, a hub id, or the name of another model of the server that is not loaded. The new one is loaded
        beside the old one where there is room for both, else after it. On any failure the old one answers as before.
        Raises ModelError, Unavailable, Conflict or InvalidRequest.
        """
        async with self._turn:
            config = self._config_for(model, to)
            place = await asyncio.to_thread(_located, config)
            old = model.loaded
            if old is not None and place == model.place and _alike(config, model.config):
                raise InvalidRequest(f"{to} is what {model.name} is already", field="to")
            fit = None if old is None else await self._fit_beside(model, config, place)
            if old is None or fit is not None:
                if old is None and self._bounded:
                    fit = await self._make_room(model, config, place, evict=False)
                service = await self._start_as(model, config, place, fit)
                self._swapped(model, config, to, place, service, fit)
                if old is not None:
                    self._later(self._retire(old, grace))
                return
            assert old is not None
            await self._swap_after(model, old, config, to, place, grace)

    @property
    def _bounded(self) -> bool:
        return self.several or self.budget is not None

    async def _swap_after(
        self,
        model: ServedModel,
        old: Loaded,
        config: Config,
        to: str,
        place: Path,
        grace: float,
    ) -> None:
        """Unload the old one first. What would not fit even then is refused before."""
        room = self.left() + (old.fit.held if old.fit is not None else 0)
        fit = await measure(config, place, max(0, room), in_process=self._in_process) if self._bounded else None
        if fit is not None and fit.most > room:
            raise ModelError(f"{to} needs {_gb(fit.most)} of memory, and {_gb(room)} are there without {model.name}")
        await self._unload(model, grace, surely=True)
        try:
            service = await self._start_as(model, config, place, fit)
        except BaseException as error:
            await asyncio.shield(self._roll_back(model, old.fit))
            if isinstance(error, CairnError) or not isinstance(error, Exception):
                raise
            raise ModelError(f"{to} could not be loaded ({type(error).__name__})") from error
        self._swapped(model, config, to, place, service, fit)

    async def _roll_back(self, model: ServedModel, fit: Fit | None) -> None:
        """The old model again, whose worker is gone."""
        try:
            place = await asyncio.to_thread(locate, model)
            self._take(model, await self._service(model, None, fit, place), fit)
        except Exception as error:
            self._failed(model, error)

    async def _start_as(self, model: ServedModel, config: Config, place: Path, fit: Fit | None) -> Service:
        """A service of another model under this one's name."""
        try:
            return await self._started(config, model.part, None, fit, place)
        except CairnError:
            raise
        except Exception as error:
            raise ModelError(f"{config.model} could not be loaded ({type(error).__name__})") from error

    def _swapped(
        self, model: ServedModel, config: Config, to: str, place: Path, service: Service, fit: Fit | None
    ) -> None:
        model.config, model.reference, model.place = config, to, place
        model.swaps += 1
        self._loaded(model, service, fit)
        log.info("%s is now %s", model.name, to)

    async def _retire(self, old: Loaded, grace: float) -> None:
        """A model whose names are another's now: it ends once what it has is over, or after `grace` seconds."""
        old.closing = True
        self._retiring.add(old)
        try:
            await self._ended(old, grace)
            await self._end(old.service)
        finally:
            self._retiring.discard(old)

    def _config_for(self, model: ServedModel, to: str) -> Config:
        """What the new model is loaded with: as an option of the server has it, else as the old one; with the names of
        the old one."""
        named = {"served_name": model.name, "alias": model.config.alias, "models": ()}
        other = self._by_name.get(to)
        if other is model and not model.swaps:
            raise InvalidRequest(f"{to} is what {model.name} is already", field="to")
        if other is not None and other is not model:  # what it was before a swap is another place again
            if other.loaded is not None:
                raise Conflict(f"{to} is loaded already, under its own name; unload it first", field="to")
            return msgspec.structs.replace(other.config, **named)
        return msgspec.structs.replace(model.config, model=to, tokenizer=None, **named)

    async def _fit_beside(self, model: ServedModel, config: Config, place: Path) -> Fit | None:
        """What the other takes, if there is room for both. Two of the same files want one folder of KV, and of a server
        with one model nobody has measured what that takes."""
        if not self.several or place == model.place:
            return None
        if sum(1 for _ in self.loaded()) >= self.config.max_loaded:
            return None
        await self._measure_first()
        left = self.left()
        fit = await measure(config, place, max(0, left), in_process=self._in_process)
        return fit if fit.most <= left else None

    # ---------------------------------------------------------------------------------------------------- how it is

    def unready(self) -> list[str]:
        """Why new requests would not be served well now; of several models only where that is true of all that are
        loaded, else it is a trouble."""
        if not self.several:
            loaded = self.models[0].loaded
            return loaded.service.unready() if loaded is not None else []
        reasons = self._reasons()
        found = [reason for one in reasons.values() for reason in one] if reasons and all(reasons.values()) else []
        if self.draining and SHUTTING_DOWN not in found:
            found.append(SHUTTING_DOWN)
        return found

    @property
    def stalled(self) -> bool:
        """Whether no worker gets on; of several models one that does not is a trouble."""
        workers = [bool(loaded.service.stalled) for _, loaded in self.loaded()]
        return bool(workers) and all(workers)

    def _reasons(self) -> dict[str, list[str]]:
        """Why each loaded model is not ready, by its name."""
        found = {}
        for model, loaded in self.loaded():
            reasons = [reason for reason in loaded.service.unready() if reason != SHUTTING_DOWN]
            found[model.name] = [f"{model.name}: {reason}" for reason in reasons]
        return found

    def troubles(self) -> list[str]:
        """What does not work although requests are served. Nothing here names a place; the log and the admin's list
        do."""
        found = []
        for model, loaded in self.loaded():
            name = f"{model.name}: " if self.several else ""
            found += [name + trouble for trouble in loaded.service.troubles()]
        if self.several and not all(reasons := self._reasons().values()):
            found += [reason for one in reasons for reason in one]
        return found + [f"{one.name} cannot be loaded" for one in self.models if one.state == "failed"]

    def metrics(self) -> Iterator[tuple[str, str, str, list[tuple[str, float]]]]:
        """What is measured of the models themselves: kind, name, help, and a value for each that was ever loaded."""
        ever = [one for one in self.models if one.loads or one.failures]
        up = [(one.name, float(one.state == "loaded")) for one in ever]
        yield "gauge", "model_loaded", "1 where the model is loaded.", up
        held = [(one.name, float(one.held)) for one in ever]
        yield "gauge", "model_memory_bytes", "Memory that the loaded model takes: weights, KV pool, buffers.", held
        last = [(one.name, one.load_seconds) for one in ever]
        yield "gauge", "model_load_seconds", "How long its last load took.", last
        yield "counter", "model_loads", "Times the model was loaded.", [(one.name, float(one.loads)) for one in ever]
        failed = [(one.name, float(one.failures)) for one in ever]
        yield "counter", "model_load_failures", "Times that failed.", failed
        yield "counter", "model_swaps", "Times another took its place.", [(one.name, float(one.swaps)) for one in ever]

    # ---------------------------------------------------------------------------------------------------- the end

    @property
    def requests(self) -> int:
        """How many requests run and wait."""
        stats = [loaded.service.stats() for _, loaded in self.loaded()]
        return sum(one.running + one.waiting for one in stats)

    async def drain(self, grace: float) -> None:
        """Take no more requests, wait up to `grace` seconds for those that run, and end the rest."""
        self.draining = True
        await asyncio.gather(*(loaded.service.drain(grace) for _, loaded in self.loaded()))

    async def close(self) -> None:
        """End everything. Nothing is left. May be called again."""
        self._closed = self.draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        every = list(self.services) if hasattr(self, "services") else []
        await asyncio.gather(*(service.close() for service in every))

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TTL_SECONDS)
            try:
                await self._unload_idle()
            except Exception as error:
                log.error("looking for idle models failed: %s", trace(error))

    async def _unload_idle(self) -> None:
        """Unload what nobody has asked for."""
        now = self._clock.now()
        for model, loaded in tuple(self.loaded()):
            over = not model.pinned and loaded.idle and now - loaded.used >= loaded.ttl
            if not over or self._turn.locked():
                continue
            async with self._turn:
                if model.loaded is loaded and loaded.idle:
                    await self._unload(model, 0.0, surely=False)
                    log.info("%s was unloaded: nobody asked for it for %g s", model.name, loaded.ttl)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check_aliases(models: Iterable[ServedModel], listed: Mapping[str, ModelOptions]) -> None:
    """InvalidRequest where an alias is two models' or another's name."""
    whose = {model.name: model.options.model for model in models}
    for place, options in listed.items():
        for alias in options.aliases:
            if whose.setdefault(alias, place) != place:
                raise InvalidRequest(f"two models would be called {alias}", field="models")


def _located(config: Config) -> Path:
    return locate(ServedModel(config, ModelOptions(model=config.model)))


def _alike(one: Config, other: Config) -> bool:
    """Whether a model is loaded in the same way, wherever it lies and whatever it is called."""
    same: dict[str, Any] = {"model": "", "served_name": None, "alias": (), "models": ()}
    return msgspec.structs.replace(one, **same) == msgspec.structs.replace(other, **same)


def _end_first(launching: asyncio.Future[First]) -> None:
    """A worker that nobody waits for any more."""
    if not launching.cancelled() and launching.exception() is None:
        launching.result().end()


def _untouched(model: ServedModel) -> int:
    """Bytes that a loaded model may take still: its pool holds no memory before it is used."""
    loaded = model.loaded
    if loaded is None or (pid := loaded.service.stats().worker_pid) is None:
        return 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, model.held - pages * 4096)


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
